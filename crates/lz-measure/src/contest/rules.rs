//! How a contest is held.

use super::ContestError;

/// How long samples are, how many there are, and what counts as a difference.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// Decides the order of candidates within rounds; the same seed gives the same contest.
    pub seed: u64,
    /// How long one sample should take, in microseconds: shorter calls are repeated inside it.
    pub sample_us: f64,
    /// The most calls in one sample.
    pub max_calls: u32,
    /// Rounds before anything is settled.
    pub min_rounds: u32,
    /// Rounds after which the contest ends, settled or not.
    pub max_rounds: u32,
    /// A candidate this many times slower than the leader after three rounds is retired, one that is slower by the square
    /// of it after two rounds, and one that is by the cube of it after one.
    pub hopeless: f64,
    /// The least noise a result is given, relative to its median. What differs between two processes that run the same
    /// code does not show within one of them; and with less, contests between equally fast candidates disagree.
    pub least_spread: f64,
    /// Candidates are as good as equal once the noise is below this, relative to the leader's median, and they are not
    /// told apart.
    pub tie: f64,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            seed: 0,
            sample_us: 200.0,
            max_calls: 1000,
            min_rounds: 5,
            max_rounds: 60,
            hopeless: 3.0,
            least_spread: 0.015,
            tie: 0.02,
        }
    }
}

impl Rules {
    /// Whether a contest can be held by them.
    pub(super) fn check(&self) -> Result<(), ContestError> {
        let rules = [
            ("sample_us", self.sample_us, self.sample_us > 0.0 && self.sample_us.is_finite(), "above 0"),
            ("max_calls", f64::from(self.max_calls), self.max_calls >= 1, "at least 1"),
            ("min_rounds", f64::from(self.min_rounds), self.min_rounds >= 1, "at least 1"),
            ("max_rounds", f64::from(self.max_rounds), self.max_rounds >= self.min_rounds, "at least min_rounds"),
            ("hopeless", self.hopeless, self.hopeless > 1.0, "above 1"),
            ("least_spread", self.least_spread, (0.0..1.0).contains(&self.least_spread), "from 0 to below 1"),
            ("tie", self.tie, (0.0..1.0).contains(&self.tie), "from 0 to below 1"),
        ];
        match rules.into_iter().find(|(_, _, good, _)| !good) {
            Some((rule, value, _, expected)) => Err(ContestError::BadRule { rule, value, expected }),
            None => Ok(()),
        }
    }

    /// How many calls make a sample, for calls that take so long.
    pub(super) fn calls_for(&self, per_call_us: f64) -> u32 {
        (self.sample_us / per_call_us).round().clamp(1.0, f64::from(self.max_calls)) as u32
    }

    /// Whether a sample was long enough to count.
    pub(super) fn is_long_enough(&self, per_call_us: f64, calls: u32) -> bool {
        calls >= self.max_calls || per_call_us * f64::from(calls) >= self.sample_us / 2.0
    }
}
