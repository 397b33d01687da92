//! Work that follows from calls and must not keep one waiting.
//!
//! The core says that something is due; whoever stands above it says how it is done ([`Errands::done_by`]). Once somebody
//! [attends](Errands::attend), a thread does it: it is started when there is something to do and ends when nothing is left.
//! At the end of the program what is left is done first; a child process that was forked starts its own.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use crate::forking;

/// Something to be done soon. What is asked for twice is done once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Errand {
    /// Look at the devices' free memory.
    LookAtMemory,
    /// Write the figures of rollouts.
    PublishRollouts,
    /// Write which circuits opened and closed.
    KeepCircuits,
}

type Doer = Box<dyn Fn(Errand) + Send + Sync>;

/// What is to be done.
#[derive(Default)]
pub(crate) struct Errands {
    shared: Arc<Shared>,
    attended: AtomicBool,
}

#[derive(Default)]
struct Shared {
    doer: OnceLock<Doer>,
    // The standard library's locks: see `forking.rs`.
    work: Mutex<Work>,
    idle: Condvar,
}

#[derive(Default)]
struct Work {
    pending: BTreeSet<Errand>,
    /// Whether there is a thread.
    running: bool,
    /// The program is ending: nothing more is begun.
    ended: bool,
}

impl Shared {
    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next thing to do. With nothing left, there is no thread from then on.
    fn next(&self) -> Option<Errand> {
        let mut work = self.work();
        let next = work.pending.pop_first();
        if next.is_none() {
            work.running = false;
            self.idle.notify_all();
        }
        next
    }

    fn run(&self, errand: Errand) {
        if let Some(doer) = self.doer.get() {
            doer(errand);
        }
    }
}

impl Errands {
    /// Says how errands are done. The first to say so is heard.
    pub fn done_by(&self, doer: impl Fn(Errand) + Send + Sync + 'static) {
        let _ = self.shared.doer.set(Box::new(doer));
    }

    /// From now on they are done on a thread of their own.
    pub fn attend(&self) {
        self.attended.store(true, Ordering::Release);
    }

    /// Whether somebody attends.
    pub fn is_attended(&self) -> bool {
        self.attended.load(Ordering::Acquire)
    }

    /// Has something done soon. Where nobody attends it is done at once, except for looking at memory: a call does not
    /// wait for that.
    pub fn later(&self, errand: Errand) {
        if !self.is_attended() {
            if errand != Errand::LookAtMemory {
                self.shared.run(errand);
            }
            return;
        }
        let mut work = self.shared.work();
        if work.ended {
            return;
        }
        work.pending.insert(errand);
        if !work.running {
            let shared = self.shared.clone();
            let thread = thread::Builder::new().name("layerzero-errands".into());
            work.running = thread.spawn(move || run(&shared)).is_ok();
        }
    }

    /// Begins nothing more, and waits for what was begun.
    pub fn end(&self) {
        let mut work = self.shared.work();
        work.ended = true;
        while work.running {
            work = self.shared.idle.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// This process is a child that was forked: the thread is its parent's, and so is what it was to do.
    pub fn forked(&self) {
        let mut work = self.shared.work();
        work.running = false;
        work.pending.clear();
    }
}

fn run(shared: &Shared) {
    let one = || {
        let Some(errand) = shared.next() else { return false };
        // One that panics must not keep the program from ending.
        let _ = catch_unwind(AssertUnwindSafe(|| shared.run(errand)));
        true
    };
    while forking::without_forks(one) {}
}
