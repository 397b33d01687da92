//! Work that follows from calls and must not keep one waiting: it is done by a thread of its own.
//!
//! The thread is started when there is something to do and ends when nothing is left. At the end of the program what is
//! left is done first ([`Engine::end`]); a child process that was forked starts its own.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use crate::engine::Engine;
use crate::forking;

/// Something to be done soon. What is asked for twice is done once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Errand {
    /// See whether the devices' free memory has changed much; then the snapshot is built anew.
    LookAtMemory,
    /// Write the figures of rollouts.
    PublishRollouts,
    /// Write which circuits opened and closed.
    KeepFailures,
}

/// What is to be done for an engine.
#[derive(Default)]
pub(crate) struct Errands {
    /// Set by [`Engine::attend`].
    engine: OnceLock<Weak<Engine>>,
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

impl Errands {
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

    /// Begins nothing more, and waits for what was begun.
    pub fn end(&self) {
        let mut work = self.work();
        work.ended = true;
        while work.running {
            work = self.idle.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// This process is a child that was forked: the thread is its parent's, and so is what it was to do.
    pub fn forked(&self) {
        let mut work = self.work();
        work.running = false;
        work.pending.clear();
    }
}

impl Engine {
    /// From now on work that follows from calls is done on a thread of its own. An engine nobody attends writes its files
    /// while it serves a call, and does not look at free memory by itself: see [`Engine::refresh_memory`].
    pub fn attend(self: &Arc<Engine>) {
        let _ = self.errands.engine.set(Arc::downgrade(self));
    }

    /// Has something done soon.
    pub(crate) fn later(&self, errand: Errand) {
        let Some(engine) = self.errands.engine.get() else {
            if errand != Errand::LookAtMemory {
                self.run_errand(errand);
            }
            return;
        };
        let mut work = self.errands.work();
        if work.ended {
            return;
        }
        work.pending.insert(errand);
        if !work.running {
            let engine = engine.clone();
            let thread = thread::Builder::new().name("layerzero-errands".into());
            work.running = thread.spawn(move || run(&engine)).is_ok();
        }
    }

    fn run_errand(&self, errand: Errand) {
        match errand {
            Errand::LookAtMemory => self.look_at_memory(),
            Errand::PublishRollouts => self.publish(),
            Errand::KeepFailures => self.keep_failures(),
        }
    }
}

fn run(engine: &Weak<Engine>) {
    let one = || {
        let Some(engine) = engine.upgrade() else { return false };
        let Some(errand) = engine.errands.next() else { return false };
        // One that panics must not keep the program from ending.
        let _ = catch_unwind(AssertUnwindSafe(|| engine.run_errand(errand)));
        true
    };
    while forking::without_forks(one) {}
}
