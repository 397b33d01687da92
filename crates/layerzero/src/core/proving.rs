//! Comparisons under way: who has the task of comparing a kernel with the reference.

use std::time::Duration;

use lz_model::{KernelDescriptor, Query};
use lz_select::KernelVersion;
use parking_lot::{Condvar, Mutex};

/// How long a call that no other kernel can serve waits for a comparison in another thread.
const PATIENCE: Duration = Duration::from_secs(10);

type Task = (KernelVersion, Query);

/// Comparisons under way.
#[derive(Default)]
pub(crate) struct Proving {
    /// In which process, and which: a child inherits the tasks of its parent's threads, and not the threads.
    under_way: Mutex<(u32, Vec<Task>)>,
    finished: Condvar,
}

/// The task of comparing a kernel, held by one thread. Dropped, it is free again.
pub struct Proof<'a> {
    proving: &'a Proving,
    task: Task,
}

impl Drop for Proof<'_> {
    fn drop(&mut self) {
        self.proving.under_way.lock().1.retain(|task| *task != self.task);
        self.proving.finished.notify_all();
    }
}

fn task(kernel: &KernelDescriptor, query: &Query) -> Task {
    ((kernel.id.clone(), kernel.version.clone()), query.proof_class())
}

impl Proving {
    /// Takes a task; `None` while another thread has it.
    pub fn begin(&self, kernel: &KernelDescriptor, query: &Query) -> Option<Proof<'_>> {
        let task = task(kernel, query);
        let mut under_way = self.under_way.lock();
        let process = std::process::id();
        if under_way.0 != process {
            *under_way = (process, Vec::new());
        }
        if under_way.1.contains(&task) {
            return None;
        }
        under_way.1.push(task.clone());
        Some(Proof { proving: self, task })
    }

    /// Waits until no thread has a task, or for ten seconds.
    pub fn wait(&self, kernel: &KernelDescriptor, query: &Query) {
        let task = task(kernel, query);
        let mut under_way = self.under_way.lock();
        self.finished.wait_while_for(&mut under_way, |(_, tasks)| tasks.contains(&task), PATIENCE);
    }
}
