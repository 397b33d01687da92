//! The process around the interpreter: its forks, and its end.
//!
//! **The end.** Up to Python 3.13 a thread that asks for the interpreter while it shuts down is ended on the spot, by
//! unwinding its stack. Rust and C++ frames on that stack do not survive it: the process aborts with "FATAL: exception
//! not rethrown", and the program's exit status is lost. So before shutdown begins ([`end`], at exit) our own threads are
//! stopped and calls under way on other threads are waited for. A thread that makes a call after that sleeps until the
//! process ends, without the interpreter: see [`Call::enter`].
//!
//! **Forks.** What runs without the interpreter runs in [`detached`], which no fork catches half way.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use layerzero::forking;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::engine;

/// How long the end of the program waits for calls under way on other threads. The first call of a program imports every
/// library, which may take half a minute.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a fork waits for calls under way on other threads. It cannot tell them from a call of its own thread, so it
/// does not wait for long.
const FORK_PATIENCE: Duration = Duration::from_secs(1);

/// Calls under way, on all threads. It is changed while holding the interpreter only, so that a load and a store do.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Whether the program is ending.
static ENDING: AtomicBool = AtomicBool::new(false);
/// The thread that ends the program, and may still make calls.
static LAST: OnceLock<ThreadId> = OnceLock::new();

thread_local! {
    /// Whether this thread is inside [`busy`]: what it calls there is waited for with it, and must not stop half way.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// A call into the native side that may give up the interpreter: it is waited for before the program ends.
pub struct Call(());

impl Call {
    /// A call begins. This thread holds the interpreter.
    #[inline]
    pub fn begin() -> Call {
        CALLS.store(CALLS.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Call(())
    }

    /// As [`Call::begin`], unless the program is ending: then this thread goes no further.
    pub fn enter(py: Python<'_>) -> Call {
        if is_over_for_this_thread() {
            sleep_until_the_end(py);
        }
        Call::begin()
    }
}

impl Drop for Call {
    #[inline]
    fn drop(&mut self) {
        CALLS.store(CALLS.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
    }
}

/// Whether the program is ending.
pub fn is_ending() -> bool {
    ENDING.load(Ordering::Acquire)
}

/// Whether the program is ending and another thread ends it: this one must not ask for the interpreter any more.
pub fn is_over_for_this_thread() -> bool {
    is_ending() && !BUSY.get() && LAST.get() != Some(&thread::current().id())
}

/// A call that is under way already goes no further when the program is ending: nothing has happened yet that anybody
/// waits for.
pub fn stop_here_if_over(py: Python<'_>) {
    if is_over_for_this_thread() {
        // It is no longer waited for.
        drop(Call(()));
        sleep_until_the_end(py);
    }
}

/// Gives up the interpreter, for good.
fn sleep_until_the_end(py: Python<'_>) -> ! {
    py.detach(|| {
        loop {
            thread::park();
        }
    })
}

/// Runs engine work without the interpreter, so that other Python threads go on. The process does not fork meanwhile.
pub fn detached<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> R {
    let _call = Call::enter(py);
    py.detach(|| forking::without_forks(work))
}

/// Makes a call of a Python function that the end of the program waits for.
#[pyfunction]
pub fn busy<'py>(
    py: Python<'py>,
    function: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyAny>> {
    let _call = Call::enter(py);
    to_the_end(|| function.call(args, Some(kwargs)))
}

/// Does work of a call that is under way: whatever it calls itself goes on even while the program ends, which waits for it.
pub fn to_the_end<R>(work: impl FnOnce() -> R) -> R {
    let before = BUSY.replace(true);
    let result = work();
    BUSY.set(before);
    result
}

/// The program ends: stops the engine's threads and waits for the calls of other threads. Called at exit, while the
/// interpreter is whole.
#[pyfunction]
pub fn end(py: Python<'_>) {
    let _ = LAST.set(thread::current().id());
    ENDING.store(true, Ordering::Release);
    py.detach(|| {
        engine::end();
        let begun = Instant::now();
        while CALLS.load(Ordering::Relaxed) > 0 && begun.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

/// The process is about to fork. Calls under way on other threads are waited for: a library that computes without the
/// interpreter may hold a lock, which nobody would open in the child. The count changes only while holding the
/// interpreter, so once it is seen at zero nothing is under way until the fork.
#[pyfunction]
pub fn before_fork(py: Python<'_>) {
    let begun = Instant::now();
    while CALLS.load(Ordering::Relaxed) > 0 && begun.elapsed() < FORK_PATIENCE {
        py.detach(|| thread::sleep(Duration::from_micros(200)));
    }
    py.detach(forking::before_fork);
}

/// The process has forked; this is the parent.
#[pyfunction]
pub fn after_fork() {
    forking::after_fork();
}

/// The process has forked; this is the child, which has no other thread.
#[pyfunction]
pub fn after_fork_in_child() {
    forking::after_fork_in_child();
    CALLS.store(0, Ordering::Relaxed);
    engine::forked();
}
