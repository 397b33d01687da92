//! Threads of LayerZero's own: one pool per process, as large as the machine has cores.
//!
//! A job of 10 µs must not wait for a thread to wake up. A worker therefore spins for [`SPIN`] after its last job before it
//! sleeps; a job that finds it spinning starts within about a microsecond. A sleeping worker takes about 50 µs to wake, and the caller
//! does not wait for it: parts that nobody has taken are the caller's own.
//!
//! A child process has none of its parent's threads, so it makes a pool of its own.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lz_abi::ParallelFor;

use super::Parts;

/// How long a worker looks for the next job before it sleeps. Long enough for the pause between two kernels of a model,
/// short enough not to show in the process's CPU time.
const SPIN: Duration = Duration::from_micros(100);

/// The pool of this process.
pub fn pool() -> &'static Pool {
    // No lock: a fork in the middle of it would leave the child waiting for a thread it does not have.
    static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
    loop {
        let current = POOL.load(Ordering::Acquire);
        // SAFETY: null, or a pool that is never freed.
        match unsafe { current.as_ref() } {
            Some(pool) if pool.process == std::process::id() => return pool,
            _ => {}
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mine = Box::into_raw(Box::new(Pool::new(cores)));
        // Two threads may have made one at once; the workers of the other one sleep for good.
        let _ = POOL.compare_exchange(current, mine, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// A job that several threads work on.
struct Job {
    parts: Parts,
    /// Parts that are done.
    done: AtomicUsize,
}

impl Job {
    /// Runs parts until all are taken.
    ///
    /// # Safety
    /// As [`Parts::each`]: whoever made the job waits until `done` is the number of its parts.
    unsafe fn work(&self) {
        // SAFETY: passed on.
        unsafe {
            self.parts.each(|| {
                self.done.fetch_add(1, Ordering::Release);
            });
        }
    }
}

#[derive(Default)]
struct Board {
    job: Mutex<Option<Arc<Job>>>,
    /// Counts jobs, so that a spinning worker sees a new one without the lock.
    number: AtomicU32,
    wake: Condvar,
}

/// The workers, and the board on which they find their jobs.
pub struct Pool {
    /// The process whose threads these are.
    process: u32,
    board: Arc<Board>,
    workers: usize,
    /// One job at a time: a second caller does its work alone.
    busy: AtomicBool,
}

impl Pool {
    fn new(threads: usize) -> Pool {
        let board = Arc::new(Board::default());
        let spawn = |i: usize| {
            let board = board.clone();
            std::thread::Builder::new().name(format!("lz-cpu-{i}")).spawn(move || serve(&board)).is_ok()
        };
        let workers = (1..threads).take_while(|&i| spawn(i)).count();
        Pool { process: std::process::id(), board, workers, busy: AtomicBool::new(false) }
    }
}

/// A worker's life: looks for a job, works, looks again. It ends with the process.
fn serve(board: &Board) {
    let mut seen = 0;
    loop {
        let begun = Instant::now();
        while board.number.load(Ordering::Acquire) == seen && begun.elapsed() < SPIN {
            std::hint::spin_loop();
        }
        let job = {
            let guard = board.job.lock().unwrap_or_else(PoisonError::into_inner);
            let waiting = board.wake.wait_while(guard, |_| board.number.load(Ordering::Acquire) == seen);
            let guard = waiting.unwrap_or_else(PoisonError::into_inner);
            seen = board.number.load(Ordering::Acquire);
            guard.clone()
        };
        if let Some(job) = job {
            // SAFETY: `run` waits for every part that was taken.
            unsafe { job.work() };
        }
    }
}

// SAFETY: every part is taken once, and `run` returns when all that were taken are done.
unsafe impl ParallelFor for Pool {
    fn threads(&self) -> usize {
        self.workers + 1
    }

    unsafe fn run(&self, parts: usize, part: unsafe extern "C" fn(*const c_void, usize), data: *const c_void) {
        let job = Job { parts: Parts::new(parts, part, data), done: AtomicUsize::new(0) };
        if self.busy.swap(true, Ordering::Acquire) {
            // SAFETY: the caller says that every part may be run; nobody else knows of this job.
            return unsafe { job.work() };
        }
        let job = Arc::new(job);
        *self.board.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(job.clone());
        self.board.number.fetch_add(1, Ordering::Release);
        self.board.wake.notify_all();
        // SAFETY: the caller says that every part may be run, and the parts others have taken are waited for.
        unsafe { job.work() };
        // A worker that has a part and no core is waited for without taking the core.
        let mut turns = 0u32;
        while job.done.load(Ordering::Acquire) < parts {
            turns += 1;
            if turns < 4_096 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        *self.board.job.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.busy.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_abi::Threads;

    #[test]
    fn every_part_of_many_jobs_runs_once_from_many_callers() {
        let pool = Pool::new(4);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for parts in 0..200usize {
                        let runs: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                        Threads::of(&pool, 4).each(parts, |i| {
                            runs[i].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
    }
}
