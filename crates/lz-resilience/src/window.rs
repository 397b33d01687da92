//! A sliding window of outcomes, in ten slices.

use crate::degradation::{Served, ServedCall, Why};

/// What one call can lose, in parts.
const WHOLE: u64 = 1000;
/// Up to this many times the baseline a call is not slow.
const SLOW_FROM: f64 = 1.5;
/// From this many times the baseline on it cannot be slower.
const SLOW_MOST: f64 = 4.0;
const SLICES: usize = 10;

/// Calls counted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub calls: u64,
    pub failures: u64,
    pub fallbacks: u64,
    /// Thousandths of a call lost to slowness.
    slow: u64,
    /// Thousandths of a call lost altogether.
    lost: u64,
}

impl Tally {
    pub fn of(outcome: ServedCall, calls: u64) -> Tally {
        let calls = calls.min(u32::MAX.into());
        let (failed, fell_back) = (outcome.served == Served::Nobody, outcome.served == Served::Fallback);
        let base = if failed { WHOLE } else { u64::from(fell_back) * WHOLE / 2 };
        let ratio = outcome.latency_ratio.filter(|ratio| ratio.is_finite()).unwrap_or(1.0);
        let slowness = ((ratio - SLOW_FROM) / (SLOW_MOST - SLOW_FROM)).clamp(0.0, 1.0);
        let slow = ((WHOLE / 2) as f64 * slowness).round() as u64;
        let slow = slow.min(WHOLE - base);
        Tally {
            calls,
            failures: u64::from(failed) * calls,
            fallbacks: u64::from(fell_back) * calls,
            slow: slow * calls,
            lost: (base + slow) * calls,
        }
    }

    fn plus(self, other: Tally) -> Tally {
        Tally {
            calls: self.calls.saturating_add(other.calls),
            failures: self.failures.saturating_add(other.failures),
            fallbacks: self.fallbacks.saturating_add(other.fallbacks),
            slow: self.slow.saturating_add(other.slow),
            lost: self.lost.saturating_add(other.lost),
        }
    }

    /// 0 to 100; 100 without calls.
    pub fn score(&self) -> f64 {
        if self.calls == 0 {
            return 100.0;
        }
        (100.0 - 100.0 * (self.lost as f64 / WHOLE as f64) / self.calls as f64).clamp(0.0, 100.0)
    }

    /// What cost the most.
    pub fn mostly(&self) -> Why {
        let failures = self.failures.saturating_mul(WHOLE);
        let fallbacks = self.fallbacks.saturating_mul(WHOLE / 2);
        if failures >= fallbacks && failures >= self.slow {
            Why::Failures
        } else if fallbacks >= self.slow {
            Why::Fallbacks
        } else {
            Why::Latency
        }
    }
}

/// The calls of the last ten slices of time.
#[derive(Debug)]
pub(crate) struct Window {
    slice_ms: u64,
    /// Each with the number of the slice it counts.
    slices: [(u64, Tally); SLICES],
    /// The newest slice there was a call in.
    newest: u64,
}

impl Window {
    pub fn new(window_ms: u64) -> Window {
        let slice_ms = window_ms.div_ceil(SLICES as u64).max(1);
        Window { slice_ms, slices: [(0, Tally::default()); SLICES], newest: 0 }
    }

    /// The slice of a time. One a little before the newest counts as the newest: threads read their clocks before
    /// they come here. A whole window before it, the clock was set back.
    fn slice(&self, now_ms: u64) -> u64 {
        let slice = now_ms / self.slice_ms;
        let behind = self.newest.saturating_sub(slice);
        if behind < SLICES as u64 { slice.max(self.newest) } else { slice }
    }

    pub fn add(&mut self, now_ms: u64, tally: Tally) {
        let slice = self.slice(now_ms);
        if slice < self.newest {
            self.clear();
        }
        self.newest = slice;
        let slot = &mut self.slices[(slice % SLICES as u64) as usize];
        if slot.0 != slice {
            *slot = (slice, Tally::default());
        }
        slot.1 = slot.1.plus(tally);
    }

    pub fn tally(&self, now_ms: u64) -> Tally {
        let now = self.slice(now_ms);
        let recent = self.slices.iter().filter(|(slice, _)| *slice <= now && now - slice < SLICES as u64);
        recent.fold(Tally::default(), |sum, (_, tally)| sum.plus(*tally))
    }

    pub fn clear(&mut self) {
        self.slices = [(0, Tally::default()); SLICES];
    }
}
