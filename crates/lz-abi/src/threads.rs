//! The threads a kernel may use. They are the caller's: a kernel starts none of its own.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One part of a job: the job, and which part.
type Part = unsafe extern "C" fn(*const c_void, usize);

/// Somebody who runs the parts of a job on several threads.
///
/// # Safety
/// `run` calls `part(job, i)` exactly once for every `i` below `parts`, on any threads, and returns after all of them have.
pub unsafe trait ParallelFor: Sync {
    /// How many threads there are, the caller's included.
    fn threads(&self) -> usize;
    /// Runs all parts. `part` may be called from any thread until this returns.
    ///
    /// # Safety
    /// `part` may be called with `job` and every number below `parts`, from several threads at once.
    unsafe fn run(&self, parts: usize, part: unsafe extern "C" fn(*const c_void, usize), job: *const c_void);
}

/// How many threads a kernel may use, and whose they are.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Threads<'a> {
    count: usize,
    pool: *const c_void,
    run: unsafe extern "C" fn(*const c_void, usize, Part, *const c_void),
    owner: PhantomData<&'a ()>,
}

// SAFETY: the pool it points to may be used from any thread (`ParallelFor: Sync`).
unsafe impl Send for Threads<'_> {}
// SAFETY: as above.
unsafe impl Sync for Threads<'_> {}

unsafe extern "C" fn alone(_: *const c_void, parts: usize, part: Part, job: *const c_void) {
    for i in 0..parts {
        // SAFETY: the caller says that every part may be run.
        unsafe { part(job, i) };
    }
}

unsafe extern "C" fn together<P: ParallelFor>(pool: *const c_void, parts: usize, part: Part, job: *const c_void) {
    // SAFETY: the pool is borrowed as long as the `Threads` it was put into; the rest is passed on.
    unsafe { (*pool.cast::<P>()).run(parts, part, job) };
}

impl<'a> Threads<'a> {
    /// The caller's thread alone.
    pub const ONE: Threads<'static> = Threads { count: 1, pool: std::ptr::null(), run: alone, owner: PhantomData };

    /// Threads of a pool, at most `most` of them.
    pub fn of<P: ParallelFor>(pool: &'a P, most: usize) -> Threads<'a> {
        let count = pool.threads().min(most).max(1);
        if count == 1 {
            return Threads::ONE;
        }
        Threads { count, pool: std::ptr::from_ref(pool).cast(), run: together::<P>, owner: PhantomData }
    }

    /// How many threads there are, the caller's included. Cut the work into about that many parts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Runs `f` once for every number below `parts`, on these threads, and returns when all are done. A panic in one of
    /// them is raised here, after the others have ended.
    pub fn each<F: Fn(usize) + Sync>(&self, parts: usize, f: F) {
        if parts <= 1 || self.count == 1 {
            return (0..parts).for_each(f);
        }
        self.share(parts, &f);
    }

    /// [`Threads::each`] on several threads. Kernels have hundreds of closures: this is compiled once for all of them.
    fn share(&self, parts: usize, f: &(dyn Fn(usize) + Sync)) {
        struct Job<'a> {
            f: &'a (dyn Fn(usize) + Sync),
            parts: usize,
            /// The next part nobody has taken.
            next: AtomicUsize,
            panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
        }
        /// Runs parts until all are taken.
        unsafe extern "C" fn share(job: *const c_void, _: usize) {
            // SAFETY: `Threads::share` passes its own job, which outlives the run.
            let job = unsafe { &*job.cast::<Job<'_>>() };
            loop {
                let i = job.next.fetch_add(1, Ordering::Relaxed);
                if i >= job.parts {
                    return;
                }
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (job.f)(i))) {
                    *job.panic.lock().unwrap_or_else(|e| e.into_inner()) = Some(panic);
                }
            }
        }
        let job = Job { f, parts, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        // As many shares as threads: a pool may have more threads than this call may use.
        let shares = self.count.min(parts);
        // SAFETY: `f` may be called from several threads at once, and the job is alive until the run is over.
        unsafe { (self.run)(self.pool, shares, share, std::ptr::from_ref(&job).cast()) };
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(|e| e.into_inner()) {
            resume_unwind(panic);
        }
    }
}

impl Threads<'_> {
    /// Cuts a slice into pieces of `len` elements (the last may be shorter) and runs `f` on each, with its number.
    pub fn each_chunk<T: Send, F: Fn(usize, &mut [T]) + Sync>(&self, slice: &mut [T], len: usize, f: F) {
        let (all, start) = (slice.len(), Start(slice.as_mut_ptr()));
        let len = len.max(1);
        self.each(all.div_ceil(len), |i| {
            let start = &start;
            let first = i * len;
            // SAFETY: pieces with different numbers do not overlap, and `each` runs every number once while `slice` is borrowed.
            f(i, unsafe { std::slice::from_raw_parts_mut(start.0.add(first), len.min(all - first)) });
        });
    }
}

impl Threads<'_> {
    /// Cuts two slices of one length into the same pieces, as [`Threads::each_chunk`], and runs `f` on each pair.
    pub fn each_pair<T: Send, F: Fn(usize, &mut [T], &mut [T]) + Sync>(
        &self,
        (a, b): (&mut [T], &mut [T]),
        len: usize,
        f: F,
    ) {
        assert_eq!(a.len(), b.len(), "both are cut alike");
        let (all, other) = (b.len(), Start(b.as_mut_ptr()));
        let len = len.max(1);
        self.each_chunk(a, len, |i, piece| {
            let other = &other;
            let first = i * len;
            // SAFETY: as in `each_chunk`: pieces with different numbers do not overlap, and each is handed out once while `b`
            // is borrowed.
            f(i, piece, unsafe { std::slice::from_raw_parts_mut(other.0.add(first), len.min(all - first)) });
        });
    }
}

/// An address that may be used from several threads.
struct Start<T>(*mut T);

// SAFETY: `each_chunk` gives every thread elements of its own, and they may be sent.
unsafe impl<T: Send> Sync for Start<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scoped(usize);

    // SAFETY: every part is run once, and the scope ends after all of its threads.
    unsafe impl ParallelFor for Scoped {
        fn threads(&self) -> usize {
            self.0
        }
        unsafe fn run(&self, parts: usize, part: unsafe extern "C" fn(*const c_void, usize), job: *const c_void) {
            let (next, job) = (AtomicUsize::new(0), job as usize);
            std::thread::scope(|scope| {
                for _ in 0..self.0 {
                    scope.spawn(|| {
                        loop {
                            let i = next.fetch_add(1, Ordering::Relaxed);
                            if i >= parts {
                                break;
                            }
                            // SAFETY: the caller says that every part may be run.
                            unsafe { part(job as *const c_void, i) };
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn no_more_threads_run_than_may() {
        let pool = Scoped(8);
        let seen = Mutex::new(std::collections::HashSet::new());
        Threads::of(&pool, 2).each(64, |_| {
            seen.lock().unwrap().insert(std::thread::current().id());
        });
        assert!(seen.into_inner().unwrap().len() <= 2);
    }

    #[test]
    fn every_part_runs_once() {
        for count in [1, 3] {
            let pool = Scoped(count);
            let threads = Threads::of(&pool, 8);
            assert_eq!(threads.count(), count);
            let runs: Vec<AtomicUsize> = (0..20).map(|_| AtomicUsize::new(0)).collect();
            threads.each(20, |i| {
                runs[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
        assert_eq!(Threads::of(&Scoped(8), 2).count(), 2);
    }

    #[test]
    fn a_panic_in_a_part_reaches_the_caller_after_the_others() {
        let done = AtomicUsize::new(0);
        let run = || {
            Threads::of(&Scoped(2), 2).each(6, |i| {
                if i == 1 {
                    panic!("part {i}");
                }
                done.fetch_add(1, Ordering::Relaxed);
            })
        };
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "part 1");
        assert_eq!(done.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn chunks_cover_a_slice_once() {
        for (all, len) in [(0, 3), (10, 3), (9, 3), (2, 5), (4, 0)] {
            let mut numbers = vec![0usize; all];
            Threads::of(&Scoped(3), 3)
                .each_chunk(&mut numbers, len, |i, chunk| chunk.iter_mut().for_each(|n| *n += i + 1));
            let expected: Vec<usize> = (0..all).map(|at| at / len.max(1) + 1).collect();
            assert_eq!(numbers, expected);
            let (mut a, mut b) = (vec![0usize; all], vec![0usize; all]);
            Threads::of(&Scoped(3), 3).each_pair((&mut a, &mut b), len, |i, a, b| {
                a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + i + 1, *b + i + 1));
            });
            assert_eq!((&a, &b), (&expected, &expected));
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        assert_eq!((size_of::<Threads<'_>>(), align_of::<Threads<'_>>()), (24, 8));
    }
}
