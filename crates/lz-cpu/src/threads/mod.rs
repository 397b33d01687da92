//! The threads native kernels run on: torch's own where torch is loaded, otherwise a [`pool`] of LayerZero's.
//!
//! torch's OpenMP threads spin for some milliseconds after each of its calls. A second pool beside them shares its cores with
//! threads that do nothing: on two cores, kernels took up to 2.7 times as long. So a kernel that follows a call of torch runs
//! on the [`team`] that is spinning already.

mod pool;
mod team;

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use lz_abi::Threads;

pub use team::{OpenMp, use_openmp};

/// At most `most` threads, the caller's included.
pub fn threads(most: usize) -> Threads<'static> {
    if most <= 1 {
        return Threads::ONE;
    }
    match team::of_size(most) {
        Some(team) => Threads::of(team, most),
        None => Threads::of(pool::pool(), most),
    }
}

/// The parts of a job. Each is run once, by whichever thread comes first.
struct Parts {
    count: usize,
    part: unsafe extern "C" fn(*const c_void, usize),
    data: *const c_void,
    /// The next part nobody has taken.
    next: AtomicUsize,
}

// SAFETY: `ParallelFor::run` says that parts may be run from any thread.
unsafe impl Send for Parts {}
// SAFETY: as above; the counter is atomic.
unsafe impl Sync for Parts {}

impl Parts {
    fn new(count: usize, part: unsafe extern "C" fn(*const c_void, usize), data: *const c_void) -> Parts {
        Parts { count, part, data, next: AtomicUsize::new(0) }
    }

    /// Runs parts until all are taken, and calls `after` after each.
    ///
    /// # Safety
    /// `data` is alive until the parts that were taken are done.
    unsafe fn each(&self, after: impl Fn()) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            // SAFETY: `data` is alive, and part `i` is taken once.
            unsafe { (self.part)(self.data, i) };
            after();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_is_the_callers() {
        assert_eq!(threads(1).count(), 1);
        assert!(threads(usize::MAX).count() >= 1);
    }
}
