//! torch's OpenMP threads, called by the two functions that compilers call for `#pragma omp parallel`.
//!
//! libgomp, which torch brings along, has them, and so do LLVM's and Intel's OpenMP. Whoever knows where torch's library is
//! gives them to [`use_openmp`]. Every part of a job is done when the parallel region ends.
//!
//! A region ends when every thread of the team has looked for a part, also one that got none. On a machine with more work than cores
//! that thread may wait for a core for milliseconds (16 ms were seen for a call of 0.3 ms). After a region that ended late, calls
//! use the pool for [`PAUSE`]: its caller waits for nobody who has no part.
//!
//! A child process has none of its parent's threads, and OpenMP would wait for them for good: a child uses a pool of its own.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lz_abi::ParallelFor;

use super::Parts;

/// What is called of an OpenMP library.
#[derive(Clone, Copy, Debug)]
pub struct OpenMp {
    /// `GOMP_parallel(region, data, threads, flags)`: runs `region(data)` once on every thread of a team. With 0 threads, the
    /// team has as many as [`OpenMp::max_threads`].
    pub parallel: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint),
    /// `omp_get_max_threads()`: how many threads a team of the calling thread has.
    pub max_threads: unsafe extern "C" fn() -> c_int,
    /// `omp_in_parallel()`: whether the calling thread is in a parallel region.
    pub in_parallel: unsafe extern "C" fn() -> c_int,
}

/// How long after its last part a region may end. It is some microseconds where every thread has a core.
const LATE: Duration = Duration::from_millis(1);
/// How long the team is left alone after a region that ended late.
const PAUSE: Duration = Duration::from_secs(1);

static TEAM: OnceLock<Team> = OnceLock::new();

/// From now on, kernels that may use as many threads as an OpenMP team has run on that team. The first library that is given
/// is used.
///
/// # Safety
/// The functions are those of one OpenMP library, which is never unloaded.
pub unsafe fn use_openmp(library: OpenMp) {
    TEAM.get_or_init(|| Team::new(library));
}

/// The team that a parallel region begun by this thread would have, if it has that many threads.
pub fn of_size(threads: usize) -> Option<&'static Team> {
    TEAM.get().filter(|team| team.may_begin() && team.threads() == threads)
}

/// The threads of an OpenMP library.
pub struct Team {
    library: OpenMp,
    /// The process whose threads these are.
    process: u32,
    made: Instant,
    /// Until when it is left alone, in nanoseconds after it was made.
    pause: AtomicU64,
}

impl Team {
    fn new(library: OpenMp) -> Team {
        Team { library, process: std::process::id(), made: Instant::now(), pause: AtomicU64::new(0) }
    }

    /// Nanoseconds since it was made.
    fn now(&self) -> u64 {
        u64::try_from(self.made.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Whether the calling thread may begin a parallel region: not in a child process, not inside of another region, and not soon
    /// after one that ended late.
    fn may_begin(&self) -> bool {
        let pause = self.pause.load(Ordering::Relaxed);
        // SAFETY: a function without preconditions.
        (pause == 0 || self.now() >= pause)
            && self.process == std::process::id()
            && unsafe { (self.library.in_parallel)() } == 0
    }
}

/// A job of the team.
struct Region<'a> {
    team: &'a Team,
    parts: Parts,
    /// When the last part was done.
    done: AtomicU64,
}

unsafe extern "C" fn region(region: *mut c_void) {
    // SAFETY: `run` passes its own region, and is waiting for its end.
    let region = unsafe { &*region.cast::<Region<'_>>() };
    // SAFETY: as above, the data of the parts is alive until then.
    unsafe { region.parts.each(|| _ = region.done.fetch_max(region.team.now(), Ordering::Relaxed)) };
}

// SAFETY: every part is taken once, and a parallel region ends when all its threads have.
unsafe impl ParallelFor for Team {
    fn threads(&self) -> usize {
        // SAFETY: a function without preconditions.
        usize::try_from(unsafe { (self.library.max_threads)() }).unwrap_or(1)
    }

    unsafe fn run(&self, parts: usize, part: unsafe extern "C" fn(*const c_void, usize), data: *const c_void) {
        let mut job = Region { team: self, parts: Parts::new(parts, part, data), done: AtomicU64::new(0) };
        // SAFETY: the job outlives the region. A part does not unwind: it is an `extern "C"` function.
        unsafe { (self.library.parallel)(region, std::ptr::from_mut(&mut job).cast(), 0, 0) };
        let ended = self.now();
        if u128::from(ended.saturating_sub(job.done.into_inner())) > LATE.as_nanos() {
            self.pause.store(ended.saturating_add(PAUSE.as_nanos() as u64), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use lz_abi::Threads;

    use super::*;

    thread_local! {
        static INSIDE: Cell<c_int> = const { Cell::new(0) };
    }

    /// Three threads, made for every region.
    const THREE: OpenMp = OpenMp { parallel, max_threads, in_parallel };

    struct Address(*mut c_void);
    // SAFETY: in these tests, parts of a job.
    unsafe impl Sync for Address {}

    unsafe extern "C" fn parallel(
        region: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
        size: c_uint,
        _: c_uint,
    ) {
        assert_eq!(size, 0, "as many as there are");
        let data = &Address(data);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    INSIDE.set(1);
                    // SAFETY: passed on.
                    unsafe { region(data.0) };
                });
            }
        });
    }

    unsafe extern "C" fn max_threads() -> c_int {
        3
    }

    unsafe extern "C" fn in_parallel() -> c_int {
        INSIDE.get()
    }

    #[test]
    fn every_part_runs_once_in_the_region() {
        let team = Team::new(THREE);
        for parts in 2..100usize {
            let runs: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
            Threads::of(&team, 3).each(parts, |i| {
                assert!(!team.may_begin(), "a region within a region");
                runs[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    #[should_panic(expected = "part 4")]
    fn a_panic_of_a_part_reaches_the_caller() {
        let team = Team::new(THREE);
        Threads::of(&team, 3).each(9, |i| assert!(i != 4, "part {i}"));
    }

    #[test]
    fn a_child_process_begins_no_region() {
        let parents = Team { process: std::process::id() + 1, ..Team::new(THREE) };
        assert!(Team::new(THREE).may_begin());
        assert!(!parents.may_begin());
    }

    /// A library whose region ends long after its last part.
    unsafe extern "C" fn late(region: unsafe extern "C" fn(*mut c_void), data: *mut c_void, _: c_uint, _: c_uint) {
        // SAFETY: passed on.
        unsafe { region(data) };
        let begun = Instant::now();
        while begun.elapsed() < 2 * LATE {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_team_that_ends_late_is_left_alone_for_a_while() {
        let team = Team::new(OpenMp { parallel: late, ..THREE });
        Threads::of(&team, 3).each(5, |_| ());
        assert!(team.pause.load(Ordering::Relaxed) >= PAUSE.as_nanos() as u64);
        team.pause.store(u64::MAX, Ordering::Relaxed);
        assert!(!team.may_begin());
        team.pause.store(team.now(), Ordering::Relaxed);
        assert!(team.may_begin(), "the pause is over");
    }
}
