//! Rollout: a candidate kernel beside the one that serves, in the shadow or for a share of the calls.
//!
//! **Which calls.** A canary takes a call by its key: `mix(key ^ mix(seed)) < fraction · 2⁶⁴`, where `mix` is
//! SplitMix64's output function. That is the same in every process and every version, so a call is either always or
//! never the candidate's, and whoever is taken at 1% is taken at 25% too. A shadow takes every kth call of a route,
//! evenly: the nth (from 0) if `⌊(n+1)·fraction⌋ > ⌊n·fraction⌋`.
//!
//! **When it is rolled back.** Nothing is judged before `min_samples`. Then, looking at the last 512 to 1024 samples
//! (so that a candidate that goes bad late is not excused by its past):
//!
//! - errors, mismatches: when Wilson's lower bound of the rate (99%, one-sided) is above the limit. With a limit of 0
//!   a single one is enough.
//! - slowdown: the median of candidate over serving time is above the limit when more than half of the last 256 ratios
//!   are; that share, too, must be above one half by its lower bound. A few slow calls never move a median.
//!
//! A rollback is final until [`Rollout::rearm`].

mod bound;
mod judge;

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::message::clip;
use crate::mix::mix;
use judge::Judge;
pub use judge::RollbackCause;

/// How a candidate is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Run beside the serving kernel; its answer is compared and thrown away.
    Shadow,
    /// Serves its share of the calls.
    Canary,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Shadow => "shadow",
            Mode::Canary => "canary",
        })
    }
}

/// What a candidate must keep to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// The share of its calls that may fail.
    pub max_error_rate: f64,
    /// The share of compared calls whose answers may differ.
    pub max_mismatch_rate: f64,
    /// How many times the serving kernel's time it may take.
    pub max_slowdown: f64,
    /// Samples before it is judged.
    pub min_samples: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_error_rate: 0.01, max_mismatch_rate: 0.0, max_slowdown: 1.25, min_samples: 50 }
    }
}

/// A rollout as it is configured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutSpec {
    /// Its name.
    pub name: String,
    /// The operation.
    pub operation: String,
    /// The kernel that is tried.
    pub candidate: String,
    /// How.
    pub mode: Mode,
    /// The share of the calls, 0 to 1. Not a number counts as 0.
    pub fraction: f64,
    /// Decides which calls; rollouts of different seeds take different ones.
    #[serde(default)]
    pub seed: u64,
    /// What the candidate must keep to.
    #[serde(default)]
    pub limits: Limits,
}

/// Whether a candidate's answer was the serving kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compared {
    /// Nobody looked.
    No,
    /// Yes, within the tolerance.
    Agrees {
        /// The greatest difference.
        max_error: f64,
    },
    /// No.
    Differs {
        /// The greatest difference.
        max_error: f64,
    },
}

/// How one of the candidate's calls went.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutCall {
    /// It returned something well formed.
    pub ok: bool,
    /// Whether its answer was right.
    pub compared: Compared,
    /// The serving kernel's time for such a call, where known: of the host. What a GPU takes is brought later, by
    /// [`Rollout::record_times`].
    pub serving_us: Option<f64>,
    /// The candidate's time, likewise.
    pub candidate_us: Option<f64>,
}

impl RolloutCall {
    /// A call that returned something, not compared and not timed.
    pub const OK: RolloutCall = RolloutCall { ok: true, compared: Compared::No, serving_us: None, candidate_us: None };
    /// A call that failed.
    pub const FAILED: RolloutCall = RolloutCall { ok: false, ..RolloutCall::OK };
}

/// Where a rollout stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum Verdict {
    /// Too few samples to say.
    Running,
    /// Enough samples, and nothing against it so far.
    Healthy,
    /// Taken out.
    RolledBack {
        /// Why.
        why: RollbackCause,
    },
}

/// A rollout at one moment, for `layerzero rollout status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RolloutStatus {
    /// As configured.
    pub spec: RolloutSpec,
    /// Where it stands.
    pub verdict: Verdict,
    /// The candidate's calls since it was armed.
    pub samples: u64,
    /// Of these, calls that failed.
    pub errors: u64,
    /// Of these, calls that were compared.
    pub compared: u64,
    /// Of those, calls whose answers differed.
    pub mismatches: u64,
    /// The greatest difference seen.
    pub worst_error: Option<f64>,
    /// The median of candidate over serving time, of the last 256 timed calls.
    pub slowdown: Option<f64>,
}

/// A rollout under way.
#[derive(Debug)]
pub struct Rollout {
    spec: RolloutSpec,
    /// The fraction as a share of 2⁶⁴; `None`: all.
    threshold: Option<u64>,
    seed: u64,
    armed: AtomicBool,
    judge: Mutex<Judge>,
}

impl Rollout {
    /// An armed one.
    pub fn new(spec: RolloutSpec) -> Rollout {
        // `as` takes what is below 0, and what is no number, for 0.
        let threshold =
            (spec.fraction < 1.0 || spec.fraction.is_nan()).then_some((spec.fraction * 2f64.powi(64)) as u64);
        let seed = mix(spec.seed);
        Rollout { spec, threshold, seed, armed: AtomicBool::new(true), judge: Mutex::default() }
    }

    /// As configured.
    pub fn spec(&self) -> &RolloutSpec {
        &self.spec
    }

    /// Whether the candidate may be tried: it was not rolled back.
    #[inline]
    pub fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire)
    }

    /// Whether a call belongs to the candidate, by its key. The key's hash must itself be the same in every process
    /// for this to be so.
    #[inline]
    pub fn takes(&self, call_key_hash: u64) -> bool {
        self.is_armed() && self.threshold.is_none_or(|threshold| mix(call_key_hash ^ self.seed) < threshold)
    }

    /// Whether the nth call of a route, counted from 0, is shadowed.
    #[inline]
    pub fn samples(&self, n: u64) -> bool {
        // The multiple of the threshold passes 2⁶⁴ exactly when the whole part of n · fraction grows.
        self.is_armed() && self.threshold.is_none_or(|threshold| n.wrapping_add(1).wrapping_mul(threshold) < threshold)
    }

    /// Notes one of the candidate's calls. Gives the verdict if this changed it.
    pub fn record(&self, outcome: RolloutCall) -> Option<Verdict> {
        self.note(|judge, limits| judge.note(&outcome, limits))
    }

    /// Notes the times of a call that was noted before without: what a device takes is known when it is done. Gives the
    /// verdict if this changed it.
    pub fn record_times(&self, serving_us: f64, candidate_us: f64) -> Option<Verdict> {
        self.note(|judge, limits| judge.note_times(serving_us, candidate_us, limits))
    }

    fn note(&self, note: impl FnOnce(&mut Judge, &Limits)) -> Option<Verdict> {
        let mut judge = self.judge.lock();
        if !self.is_armed() {
            return None;
        }
        let before = judge.verdict(&self.spec.limits);
        note(&mut judge, &self.spec.limits);
        let after = judge.verdict(&self.spec.limits);
        if let Verdict::RolledBack { why } = &after {
            judge.rolled_back = Some(why.clone());
            self.armed.store(false, Ordering::Release);
        }
        (after != before).then_some(after)
    }

    /// Takes the candidate out, whatever its samples say. `None` if it was out already.
    pub fn roll_back(&self, reason: &str) -> Option<Verdict> {
        let mut judge = self.judge.lock();
        if !self.armed.swap(false, Ordering::AcqRel) {
            return None;
        }
        let why = RollbackCause::Ordered { reason: clip(reason) };
        judge.rolled_back = Some(why.clone());
        Some(Verdict::RolledBack { why })
    }

    /// Begins anew, with no samples.
    pub fn rearm(&self) {
        let mut judge = self.judge.lock();
        *judge = Judge::default();
        self.armed.store(true, Ordering::Release);
    }

    /// Where it stands.
    pub fn verdict(&self) -> Verdict {
        self.judge.lock().verdict(&self.spec.limits)
    }

    /// All there is to say.
    pub fn status(&self) -> RolloutStatus {
        let judge = self.judge.lock();
        RolloutStatus {
            spec: self.spec.clone(),
            verdict: judge.verdict(&self.spec.limits),
            samples: judge.all.samples,
            errors: judge.all.errors,
            compared: judge.all.compared,
            mismatches: judge.all.mismatches,
            worst_error: judge.worst_error,
            slowdown: judge.slowdown(),
        }
    }
}
