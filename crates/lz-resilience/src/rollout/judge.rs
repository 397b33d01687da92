//! The samples of a candidate, and what they prove.

use serde::{Deserialize, Serialize};

use super::bound::at_least;
use super::{Compared, Limits, RolloutCall, Verdict};

/// Samples in a block; the present block and the one before are judged.
const BLOCK: u64 = 512;
/// Ratios of times that are kept.
const RATIOS: usize = 256;

/// Why a candidate was taken out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "cause")]
pub enum RollbackCause {
    /// It fails too often.
    ErrorRate {
        /// Calls that failed.
        errors: u64,
        /// Out of so many.
        samples: u64,
        /// What the rate is at least, with 99% confidence.
        at_least: f64,
        /// What was allowed.
        limit: f64,
    },
    /// Its answers differ too often.
    MismatchRate {
        /// Calls whose answers differed.
        mismatches: u64,
        /// Out of so many compared.
        compared: u64,
        /// What the rate is at least, with 99% confidence.
        at_least: f64,
        /// What was allowed.
        limit: f64,
        /// The greatest difference, where it is a number.
        worst_error: Option<f64>,
    },
    /// It is too slow.
    Slowdown {
        /// The median of its time over the serving kernel's.
        median: f64,
        /// What was allowed.
        limit: f64,
        /// How many ratios that is the median of.
        samples: u64,
    },
    /// It was ordered.
    Ordered {
        /// Why.
        reason: String,
    },
}

impl std::fmt::Display for RollbackCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RollbackCause::ErrorRate { errors, samples, limit, .. } => {
                write!(f, "{errors} of {samples} calls failed; {} are allowed", percent(*limit))
            }
            RollbackCause::MismatchRate { mismatches, compared, limit, worst_error, .. } => {
                write!(f, "{mismatches} of {compared} answers differ; {} are allowed", percent(*limit))?;
                worst_error.map_or(Ok(()), |worst| write!(f, " (by {worst:.3e} at most)"))
            }
            RollbackCause::Slowdown { median, limit, .. } => {
                write!(f, "it takes {median:.2} times as long; {limit:.2} is allowed")
            }
            RollbackCause::Ordered { reason } => f.write_str(reason),
        }
    }
}

fn percent(rate: f64) -> String {
    format!("{}%", (rate * 1e6).round() / 1e4)
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub samples: u64,
    pub errors: u64,
    pub compared: u64,
    pub mismatches: u64,
}

impl Tally {
    fn plus(self, other: Tally) -> Tally {
        Tally {
            samples: self.samples + other.samples,
            errors: self.errors + other.errors,
            compared: self.compared + other.compared,
            mismatches: self.mismatches + other.mismatches,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Judge {
    pub all: Tally,
    pub worst_error: Option<f64>,
    pub rolled_back: Option<RollbackCause>,
    before: Tally,
    present: Tally,
    /// The last ratios of times, the oldest being replaced at `next`.
    ratios: Vec<f32>,
    next: usize,
    /// How many of them are above the limit.
    slow: u64,
}

impl Judge {
    pub fn note(&mut self, outcome: &RolloutCall, limits: &Limits) {
        let (compared, mismatch, error) = match outcome.compared {
            Compared::No => (false, false, None),
            Compared::Agrees { max_error } => (true, false, Some(max_error)),
            Compared::Differs { max_error } => (true, true, Some(max_error)),
        };
        let one = Tally {
            samples: 1,
            errors: u64::from(!outcome.ok),
            compared: u64::from(compared),
            mismatches: u64::from(mismatch),
        };
        self.all = self.all.plus(one);
        self.present = self.present.plus(one);
        if self.present.samples == BLOCK {
            self.before = std::mem::take(&mut self.present);
        }
        if let Some(error) = error.filter(|error| error.is_finite()) {
            self.worst_error = Some(self.worst_error.map_or(error, |worst| worst.max(error)));
        }
        if let (true, Some(serving), Some(candidate)) = (outcome.ok, outcome.serving_us, outcome.candidate_us) {
            self.note_times(serving, candidate, limits);
        }
    }

    /// The times of one call, of the serving kernel and of the candidate: both of the host, or both of the device.
    pub fn note_times(&mut self, serving_us: f64, candidate_us: f64, limits: &Limits) {
        let ratio = candidate_us / serving_us;
        if ratio.is_finite() && ratio > 0.0 {
            self.note_ratio(ratio as f32, limits.max_slowdown as f32);
        }
    }

    fn note_ratio(&mut self, ratio: f32, limit: f32) {
        self.slow += u64::from(ratio > limit);
        if self.ratios.len() < RATIOS {
            self.ratios.push(ratio);
        } else {
            let oldest = std::mem::replace(&mut self.ratios[self.next], ratio);
            self.slow -= u64::from(oldest > limit);
            self.next = (self.next + 1) % RATIOS;
        }
    }

    /// The median of the ratios.
    pub fn slowdown(&self) -> Option<f64> {
        let mut ratios = self.ratios.clone();
        let middle = ratios.len().checked_sub(1)? / 2;
        let (_, median, _) = ratios.select_nth_unstable_by(middle, f32::total_cmp);
        Some((*median).into())
    }

    pub fn verdict(&self, limits: &Limits) -> Verdict {
        if let Some(why) = &self.rolled_back {
            return Verdict::RolledBack { why: why.clone() };
        }
        let least = limits.min_samples.max(1);
        if self.all.samples < least {
            return Verdict::Running;
        }
        match self.against(limits, least) {
            Some(why) => Verdict::RolledBack { why },
            None => Verdict::Healthy,
        }
    }

    fn against(&self, limits: &Limits, least: u64) -> Option<RollbackCause> {
        let Tally { samples, errors, compared, mismatches } = self.before.plus(self.present);
        let (error_rate, mismatch_rate) = (at_least(errors, samples), at_least(mismatches, compared));
        if mismatch_rate > limits.max_mismatch_rate {
            let worst_error = self.worst_error;
            let limit = limits.max_mismatch_rate;
            return Some(RollbackCause::MismatchRate {
                mismatches,
                compared,
                at_least: mismatch_rate,
                limit,
                worst_error,
            });
        }
        if error_rate > limits.max_error_rate {
            let limit = limits.max_error_rate;
            return Some(RollbackCause::ErrorRate { errors, samples, at_least: error_rate, limit });
        }
        let timed = self.ratios.len() as u64;
        if timed >= least.min(RATIOS as u64) && at_least(self.slow, timed) > 0.5 {
            let median = self.slowdown()?;
            return Some(RollbackCause::Slowdown { median, limit: limits.max_slowdown, samples: timed });
        }
        None
    }
}
