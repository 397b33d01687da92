//! Degradation: the worse the health, the less is asked of selection.
//!
//! Health is a score from 0 to 100 over the calls of a sliding window (10 s):
//!
//! ```text
//! score = 100 · (1 − lost / calls)
//! lost  = the sum over the calls of min(1, outcome + ½ · slowness)
//!         outcome:  1 failed · ½ served by a fallback · 0 served as planned
//!         slowness: 0 up to 1.5 times the baseline, then in a straight line to 1 at 4 times
//! ```
//!
//! Below 80 the level is [`Reduced`](Level::Reduced), below 60 [`Cached`](Level::Cached), below 40
//! [`RuleBased`](Level::RuleBased), below 20 [`Minimal`](Level::Minimal). So a fifth of all calls failing, two fifths
//! falling back, or all of them 2.5 times slower than usual are what `Full` bears.
//!
//! - Down at once, as far as the score says, once the window holds 20 calls.
//! - Up one level at a time, after a whole window in which the score was 5 points above what the level above needs.
//! - A level is judged by the calls made at it: a change empties the window.
//! - A whole window without calls goes up one level too, and so does one with fewer than 20 calls if they went well:
//!   where little is tried, health can only be found out by trying more.

use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::window::{Tally, Window};

/// How much is asked of selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Everything: every kernel that is legal.
    Full,
    /// Only kernels that are proven.
    Reduced,
    /// Only decisions already made.
    Cached,
    /// Only what rules and priorities say.
    RuleBased,
    /// Only references, and plain torch where none can serve.
    Minimal,
}

impl Level {
    /// All of them, the best first.
    pub const ALL: [Level; 5] = [Level::Full, Level::Reduced, Level::Cached, Level::RuleBased, Level::Minimal];

    /// Its stable name.
    pub fn name(self) -> &'static str {
        match self {
            Level::Full => "full",
            Level::Reduced => "reduced",
            Level::Cached => "cached",
            Level::RuleBased => "rule_based",
            Level::Minimal => "minimal",
        }
    }

    fn of(depth: usize) -> Level {
        Level::ALL[depth.min(4)]
    }

    fn depth(self) -> usize {
        self as usize
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What moves the level.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DegradationConfig {
    /// Below this score: [`Level::Reduced`].
    pub reduced: u32,
    /// Below this score: [`Level::Cached`].
    pub cached: u32,
    /// Below this score: [`Level::RuleBased`].
    pub rule_based: u32,
    /// Below this score: [`Level::Minimal`].
    pub minimal: u32,
    /// Points above its threshold that a better level needs.
    pub hysteresis: u32,
    /// Calls in the window before it moves.
    pub min_calls: u64,
    /// The length of the window.
    pub window_ms: u64,
}

impl Default for DegradationConfig {
    fn default() -> Self {
        DegradationConfig {
            reduced: 80,
            cached: 60,
            rule_based: 40,
            minimal: 20,
            hysteresis: 5,
            min_calls: 20,
            window_ms: 10_000,
        }
    }
}

impl DegradationConfig {
    fn thresholds(&self) -> [u32; 4] {
        [self.reduced, self.cached, self.rule_based, self.minimal]
    }

    /// The level a score calls for, whatever the present one.
    pub fn level_for(&self, score: f64) -> Level {
        Level::of(self.thresholds().iter().filter(|&&threshold| score < f64::from(threshold)).count())
    }

    /// The score from which a level may be left for the one above. 100 is always enough.
    fn bar(&self, level: Level) -> f64 {
        let threshold = level.depth().checked_sub(1).map_or(0, |above| self.thresholds()[above]);
        f64::from(threshold.saturating_add(self.hysteresis).min(100))
    }
}

/// How a call went, for the score.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServedCall {
    /// Who served it.
    pub served: Served,
    /// Its latency over the baseline of its route, where known.
    pub latency_ratio: Option<f64>,
}

impl ServedCall {
    /// A call without a known latency.
    pub fn of(served: Served) -> ServedCall {
        ServedCall { served, latency_ratio: None }
    }
}

/// Who served a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Served {
    /// The kernel that was chosen.
    AsPlanned,
    /// A later one, because an earlier one failed.
    Fallback,
    /// Nobody.
    Nobody,
}

/// What moved the level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// Mostly calls that failed.
    Failures,
    /// Mostly calls that fell back.
    Fallbacks,
    /// Mostly calls that were slow.
    Latency,
    /// A whole window of good health.
    Recovered,
    /// A whole window with hardly any calls.
    Quiet,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Why::Failures => "calls fail",
            Why::Fallbacks => "calls fall back",
            Why::Latency => "calls are slow",
            Why::Recovered => "a window of good health",
            Why::Quiet => "a quiet window",
        })
    }
}

/// A change of level.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The level it was.
    pub from: Level,
    /// The level it is.
    pub to: Level,
    /// The score that moved it.
    pub score: f64,
    /// What moved it.
    pub why: Why,
}

/// The present state, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DegradationView {
    /// The level.
    pub level: Level,
    /// The score of the window; 100 if it is empty.
    pub score: f64,
    /// Calls in the window.
    pub calls: u64,
    /// Of these, calls that failed.
    pub failures: u64,
    /// Of these, calls that fell back.
    pub fallbacks: u64,
}

/// Moves between the levels as health goes.
#[derive(Debug)]
pub struct Degradation {
    config: DegradationConfig,
    level: AtomicU8,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    window: Window,
    /// Since when nothing spoke against going up.
    good_since: Option<u64>,
}

impl Degradation {
    /// At [`Level::Full`], with an empty window.
    pub fn new(config: DegradationConfig) -> Degradation {
        let state = State { window: Window::new(config.window_ms), good_since: None };
        Degradation { config, level: AtomicU8::new(0), state: Mutex::new(state) }
    }

    /// Its thresholds.
    pub fn config(&self) -> &DegradationConfig {
        &self.config
    }

    /// The level: one load.
    #[inline]
    pub fn level(&self) -> Level {
        Level::of(self.level.load(Ordering::Acquire).into())
    }

    /// Notes a call.
    pub fn record(&self, now_ms: u64, outcome: ServedCall) {
        self.record_many(now_ms, outcome, 1);
    }

    /// Notes so many calls that went alike: callers may count good ones and bring them together.
    pub fn record_many(&self, now_ms: u64, outcome: ServedCall, calls: u64) {
        self.state.lock().window.add(now_ms, Tally::of(outcome, calls));
    }

    /// Moves the level, if it is time. To be called now and then, and after failures.
    pub fn update(&self, now_ms: u64) -> Option<Change> {
        let mut state = self.state.lock();
        let from = self.level();
        let tally = state.window.tally(now_ms);
        let score = tally.score();
        let enough = tally.calls >= self.config.min_calls.max(1);
        let called_for = self.config.level_for(score);
        if enough && called_for > from {
            return Some(self.go(&mut state, now_ms, Change { from, to: called_for, score, why: tally.mostly() }));
        }
        if from == Level::Full {
            return None;
        }
        if score < self.config.bar(from) {
            state.good_since = Some(now_ms);
            return None;
        }
        // A clock that was set back begins anew.
        let since = state.good_since.map_or(now_ms, |since| since.min(now_ms));
        state.good_since = Some(since);
        if now_ms - since < self.config.window_ms {
            return None;
        }
        let why = if enough { Why::Recovered } else { Why::Quiet };
        Some(self.go(&mut state, now_ms, Change { from, to: Level::of(from.depth() - 1), score, why }))
    }

    fn go(&self, state: &mut State, now_ms: u64, change: Change) -> Change {
        self.level.store(change.to as u8, Ordering::Release);
        state.window.clear();
        state.good_since = Some(now_ms);
        change
    }

    /// The present state.
    pub fn view(&self, now_ms: u64) -> DegradationView {
        let tally = self.state.lock().window.tally(now_ms);
        DegradationView {
            level: self.level(),
            score: tally.score(),
            calls: tally.calls,
            failures: tally.failures,
            fallbacks: tally.fallbacks,
        }
    }
}
