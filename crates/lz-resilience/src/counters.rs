//! What is known of each kernel's health: calls, failures, fallbacks, latency.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::lanes::{Count, Held, Lane};
use crate::message::LastError;

static HELD: Held = Held::new();

thread_local! {
    /// This thread's lane.
    static MINE: Mine = Mine(Some(HELD.take()));
}

struct Mine(Option<Lane>);

impl Drop for Mine {
    fn drop(&mut self) {
        if let Some(lane) = self.0.take() {
            HELD.give_back(lane);
        }
    }
}

/// Each sample moves the mean by a sixteenth of its distance from it.
const WEIGHT: i64 = 16;
/// Samples before the mean is taken for anything.
const WARM_UP: u64 = 16;

/// A running mean of sampled latencies, and the best it is known to have been.
///
/// Latencies of different shapes do not compare: keep one for each route whose ratio is to mean something.
/// Concurrent samples may lose one another; the mean stays one of samples that were taken.
#[derive(Debug, Default)]
pub struct Latency {
    /// Nanoseconds; 0: nothing yet.
    mean: AtomicU64,
    /// Nanoseconds; 0: nothing yet.
    baseline: AtomicU64,
    samples: AtomicU64,
    /// The least of the samples since the last block of them was full; 0: none.
    least: AtomicU64,
    /// The least of the last full block; 0: nothing yet.
    recent: AtomicU64,
}

/// Samples of a block. The least of a block is what is compared: a thread that had to wait for its turn, or for the
/// interpreter, makes samples that say nothing of the kernel; a kernel that became slow is slow in all of them.
const BLOCK: u64 = 8;

impl Latency {
    /// Takes a sample. After 16 of them the least a block of eight has been is the baseline.
    pub fn record_ns(&self, ns: u64) {
        let ns = ns.clamp(1, i64::MAX as u64 / 2);
        let samples = self.samples.fetch_add(1, Relaxed) + 1;
        let mean = match self.mean.load(Relaxed) {
            0 => ns,
            mean => mean.saturating_add_signed((ns as i64 - mean as i64) / WEIGHT).max(1),
        };
        self.mean.store(mean, Relaxed);
        let less = |least: u64| (least == 0 || ns < least).then_some(ns);
        let _ = self.least.try_update(Relaxed, Relaxed, less);
        if samples.is_multiple_of(BLOCK) {
            let least = self.least.swap(0, Relaxed);
            self.recent.store(least, Relaxed);
            if samples >= WARM_UP {
                self.improve_baseline_ns(least);
            }
        }
    }

    /// Takes a latency known from elsewhere, a measurement, for the baseline if it is better than the present one.
    pub fn improve_baseline_ns(&self, ns: u64) {
        if ns > 0 {
            let better = |baseline: u64| (baseline == 0 || ns < baseline).then_some(ns);
            let _ = self.baseline.try_update(Relaxed, Relaxed, better);
        }
    }

    /// The mean, once there is a sample.
    pub fn mean_ns(&self) -> Option<u64> {
        Some(self.mean.load(Relaxed)).filter(|&ns| ns > 0)
    }

    /// The baseline, once there is one.
    pub fn baseline_ns(&self) -> Option<u64> {
        Some(self.baseline.load(Relaxed)).filter(|&ns| ns > 0)
    }

    /// The least of the last eight samples over the baseline, after 16 of them: 2.0 is twice as slow as at best.
    pub fn ratio(&self) -> Option<f64> {
        let warm = self.samples.load(Relaxed) >= WARM_UP;
        let recent = Some(self.recent.load(Relaxed)).filter(|&ns| ns > 0 && warm)?;
        Some(recent as f64 / self.baseline_ns()? as f64)
    }

    /// How many samples were taken.
    pub fn samples(&self) -> u64 {
        self.samples.load(Relaxed)
    }
}

/// One kernel's counters, on cache lines of their own. About 1 KiB: calls are counted by thread.
#[derive(Debug)]
#[repr(align(128))]
pub struct KernelHealth {
    calls: Count,
    failures: AtomicU64,
    fallbacks: AtomicU64,
    latency: Latency,
    last_error: Mutex<Option<LastError>>,
}

impl Default for KernelHealth {
    fn default() -> Self {
        KernelHealth {
            calls: Count::new(),
            failures: AtomicU64::new(0),
            fallbacks: AtomicU64::new(0),
            latency: Latency::default(),
            last_error: Mutex::new(None),
        }
    }
}

impl KernelHealth {
    /// Counts a call, and gives how many this thread's lane has counted: taking every nth of these takes every nth
    /// call. (A lane is one thread's at a time and goes on where the last one left it; threads beyond the sixteenth
    /// share one.)
    #[inline]
    pub fn record_call(&self) -> u64 {
        // A thread that is ending may have lost its lane already.
        MINE.try_with(|mine| self.calls.add(mine.0.as_ref().unwrap_or(&Lane::SHARED)))
            .unwrap_or_else(|_| self.calls.add(&Lane::SHARED))
    }

    /// Counts a failure.
    pub fn record_failure(&self, now_ms: u64, error: &str) {
        self.failures.fetch_add(1, Relaxed);
        *self.last_error.lock() = Some(LastError::new(error, now_ms));
    }

    /// Counts a call that this kernel served because an earlier one failed.
    pub fn record_fallback(&self) {
        self.fallbacks.fetch_add(1, Relaxed);
    }

    /// The latencies of sampled calls.
    pub fn latency(&self) -> &Latency {
        &self.latency
    }

    /// How many calls were counted.
    pub fn calls(&self) -> u64 {
        self.calls.sum()
    }

    /// All of it, under the kernel's name.
    pub fn report(&self, kernel: &str) -> KernelReport {
        KernelReport {
            kernel: kernel.to_owned(),
            calls: self.calls(),
            failures: self.failures.load(Relaxed),
            fallbacks: self.fallbacks.load(Relaxed),
            latency_samples: self.latency.samples(),
            mean_ns: self.latency.mean_ns(),
            baseline_ns: self.latency.baseline_ns(),
            last_error: self.last_error.lock().clone(),
        }
    }
}

/// A kernel's counters at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReport {
    /// The kernel.
    pub kernel: String,
    /// Calls it was given.
    pub calls: u64,
    /// Calls it failed.
    pub failures: u64,
    /// Calls it served because an earlier one failed.
    pub fallbacks: u64,
    /// Calls that were timed.
    pub latency_samples: u64,
    /// Their mean, the newest counting most.
    pub mean_ns: Option<u64>,
    /// The lowest that mean is known to have been.
    pub baseline_ns: Option<u64>,
    /// What was last said.
    pub last_error: Option<LastError>,
}

/// The counters of every kernel, made on first use.
///
/// Looking one up takes a lock: whoever calls often keeps the [`Arc`].
#[derive(Debug, Default)]
pub struct Counters {
    kernels: RwLock<BTreeMap<String, Arc<KernelHealth>>>,
}

impl Counters {
    /// The counters of a kernel.
    pub fn get(&self, kernel: &str) -> Arc<KernelHealth> {
        if let Some(health) = self.kernels.read().get(kernel) {
            return health.clone();
        }
        self.kernels.write().entry(kernel.to_owned()).or_default().clone()
    }

    /// The calls of all kernels together.
    pub fn calls(&self) -> u64 {
        self.kernels.read().values().map(|health| health.calls()).sum()
    }

    /// All of them, by name.
    pub fn report(&self) -> Vec<KernelReport> {
        self.kernels.read().iter().map(|(kernel, health)| health.report(kernel)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_between_threads() {
        let counters = Counters::default();
        let work = || {
            let health = counters.get("k");
            (0..1000).for_each(|n| {
                health.record_call();
                if n % 10 == 0 {
                    health.record_failure(n, "boom");
                    health.record_fallback();
                }
            });
        };
        // More threads than lanes, and three times over, so that lanes change hands.
        for _ in 0..3 {
            std::thread::scope(|scope| (0..40).for_each(|_| drop(scope.spawn(work))));
        }
        let [report] = &counters.report()[..] else { panic!() };
        assert_eq!((report.calls, report.failures, report.fallbacks), (120_000, 12_000, 12_000));
        assert_eq!(report.last_error.as_ref().unwrap().message, "boom");
    }

    #[test]
    fn every_nth_call_of_a_thread_can_be_told() {
        let health = KernelHealth::default();
        let sampled = (0..1000).filter(|_| health.record_call() % 10 == 0).count();
        assert_eq!((sampled, health.calls()), (100, 1000));
    }

    #[test]
    fn calls_are_counted_while_a_thread_ends() {
        struct Last(Arc<KernelHealth>);
        impl Drop for Last {
            fn drop(&mut self) {
                self.0.record_call();
            }
        }
        thread_local!(static LAST: std::cell::RefCell<Option<Last>> = const { std::cell::RefCell::new(None) });
        let health = Arc::new(KernelHealth::default());
        let inner = health.clone();
        let thread = std::thread::spawn(move || {
            // Registered before the lane, so dropped after it, or the other way round: both must count.
            LAST.set(Some(Last(inner.clone())));
            inner.record_call();
        });
        thread.join().unwrap();
        assert_eq!(health.calls(), 2);
    }

    /// Threads that take turns: most samples hold a wait, some do not.
    #[test]
    fn waiting_is_not_slowness() {
        let latency = Latency::default();
        for i in 0..1000u64 {
            latency.record_ns(if i % 4 == 0 { 1000 } else { 5_000_000 });
        }
        assert_eq!(latency.ratio(), Some(1.0));
        (0..16).for_each(|_| latency.record_ns(4000));
        assert_eq!(latency.ratio(), Some(4.0));
    }

    #[test]
    fn the_mean_follows_and_the_baseline_stays_at_the_best() {
        let latency = Latency::default();
        assert_eq!((latency.mean_ns(), latency.ratio()), (None, None));
        (0..100).for_each(|_| latency.record_ns(1000));
        assert_eq!((latency.mean_ns(), latency.baseline_ns(), latency.ratio()), (Some(1000), Some(1000), Some(1.0)));
        (0..300).for_each(|_| latency.record_ns(3000));
        assert_eq!(latency.ratio(), Some(3.0));
        assert!((2950..=3000).contains(&latency.mean_ns().unwrap()));
        (0..300).for_each(|_| latency.record_ns(500));
        assert_eq!(latency.baseline_ns(), Some(500));
        latency.improve_baseline_ns(400);
        latency.improve_baseline_ns(0);
        latency.improve_baseline_ns(900);
        assert_eq!(latency.baseline_ns(), Some(400));
    }

    #[test]
    fn a_lucky_first_sample_is_no_baseline_and_extremes_harm_nothing() {
        let latency = Latency::default();
        latency.record_ns(0);
        (0..14).for_each(|_| latency.record_ns(1000));
        assert_eq!((latency.baseline_ns(), latency.ratio()), (None, None));
        latency.record_ns(1000);
        assert!(latency.ratio().is_some());
        latency.record_ns(u64::MAX);
        latency.record_ns(u64::MAX);
        assert!(latency.mean_ns().unwrap() > 1_000_000);
    }

    #[test]
    fn the_counters_have_their_own_cache_lines() {
        assert_eq!(align_of::<KernelHealth>(), 128);
        assert_eq!(size_of::<KernelHealth>() % 128, 0);
    }
}
