//! Forks: when the process forks, no other thread holds one of the engine's locks.
//!
//! A child process has only the thread that forked it. A lock that another thread held at that moment stays locked in
//! the child for ever. So work that takes locks on a thread of its own runs inside [`without_forks`], and whoever forks
//! calls [`before_fork`], which waits until no such work is under way, then [`after_fork`] in the parent and
//! [`after_fork_in_child`] in the child.
//!
//! ```
//! use layerzero::forking::{after_fork, before_fork, without_forks};
//!
//! assert_eq!(without_forks(|| 6 * 7), 42);
//! before_fork();
//! // fork() here
//! after_fork();
//! ```
//!
//! The locks here are the standard library's: they keep no table of waiting threads that a fork could catch half changed.

use std::cell::{Cell, RefCell};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a fork waits for work under way. Work that takes longer hangs, and a fork must not hang with it.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many threads are inside [`without_forks`].
static INSIDE: Mutex<usize> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// How deep this thread is inside [`without_forks`].
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Held between [`before_fork`] and [`after_fork`]: nobody enters meanwhile.
    static FORKING: RefCell<Option<MutexGuard<'static, usize>>> = const { RefCell::new(None) };
}

fn inside() -> MutexGuard<'static, usize> {
    INSIDE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` while the process does not fork. It may be nested.
pub fn without_forks<R>(work: impl FnOnce() -> R) -> R {
    /// Leaves when it is dropped, so that a panic leaves as well.
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
            if DEPTH.get() == 0 {
                *inside() -= 1;
                CHANGED.notify_all();
            }
        }
    }
    // The thread that forks may do anything between the two hooks: it is the one that goes on in the child.
    if FORKING.with_borrow(Option::is_some) {
        return work();
    }
    if DEPTH.get() == 0 {
        *inside() += 1;
    }
    DEPTH.set(DEPTH.get() + 1);
    let _leave = Leave;
    work()
}

/// Waits until no other thread is inside [`without_forks`], and keeps all from entering until [`after_fork`].
pub fn before_fork() {
    // A fork out of such work is not waited for by itself.
    let own = usize::from(DEPTH.get() > 0);
    let begun = Instant::now();
    let mut others = inside();
    while *others > own {
        let Some(left) = PATIENCE.checked_sub(begun.elapsed()) else { break };
        others = CHANGED.wait_timeout(others, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    FORKING.set(Some(others));
}

/// The process has forked: work may go on in the parent.
pub fn after_fork() {
    FORKING.take();
}

/// The process has forked: work may go on in the child, where no other thread is.
pub fn after_fork_in_child() {
    if let Some(mut count) = FORKING.take() {
        *count = usize::from(DEPTH.get() > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn a_fork_waits_for_work_and_work_waits_for_a_fork() {
        let (entered, has_entered) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let worker = thread::spawn(move || {
            without_forks(|| {
                // Nested: it must not wait for itself.
                without_forks(|| entered.send(()).unwrap());
                may_go_on.recv().unwrap();
            });
        });
        has_entered.recv().unwrap();
        assert_eq!(*inside(), 1);
        go_on.send(()).unwrap();
        before_fork();
        worker.join().unwrap();
        // Held by this thread, which may work itself.
        assert!(INSIDE.try_lock().is_err());
        assert_eq!(without_forks(|| 1), 1);
        let (done, is_done) = mpsc::channel();
        let late = thread::spawn(move || without_forks(|| done.send(()).unwrap()));
        assert!(is_done.try_recv().is_err());
        after_fork();
        is_done.recv().unwrap();
        late.join().unwrap();
        assert_eq!(*inside(), 0);
        // Out of such work, too.
        without_forks(|| {
            before_fork();
            after_fork();
            assert_eq!(*inside(), 1);
            before_fork();
            after_fork_in_child();
            assert_eq!(*inside(), 1);
        });
        assert_eq!(*inside(), 0);
    }
}
