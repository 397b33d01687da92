//! Candidates of one call, timed side by side in rounds.

mod judge;
mod level;
mod rules;
mod statistics;
mod timing;

pub use rules::Rules;
pub use timing::{Stats, Timing, loss_of, order};

/// The shortest and the longest time of a call that is believed, in microseconds.
const PLAUSIBLE_US: std::ops::RangeInclusive<f64> = 1e-6..=1e15;
/// Samples of a candidate that may be too short before one is taken as it is.
const MOST_WARMUPS: usize = 6;

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Time this candidate: run it so many times in a row, and [`record`](Contest::record) the mean, or the failure.
    Time {
        /// Which one: what [`Contest::add`] gave.
        candidate: usize,
        /// How many calls make the sample.
        calls: u32,
    },
    /// Nothing: who is fastest is known, or that it makes no difference, or nobody is left.
    Settled,
    /// Nothing: it is not known, and more of the same would hardly tell.
    Exhausted,
}

/// One measurement: some calls in a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Microseconds per call.
    pub per_call_us: f64,
    /// How many calls were made.
    pub calls: u32,
}

/// Why a contest refuses what it was told.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // fields are what the messages say they are
pub enum ContestError {
    #[error("rule '{rule}' is {value}; it must be {expected}")]
    BadRule { rule: &'static str, value: f64, expected: &'static str },
    #[error("candidate '{name}' is in the contest already; give every candidate a name of its own")]
    AddedTwice { name: String },
    #[error("candidate '{name}' comes too late: the contest has begun; add all before the first sample")]
    Started { name: String },
    #[error("there is no candidate {candidate}; the contest has {candidates}, counted from 0")]
    NoCandidate { candidate: usize, candidates: usize },
    #[error("candidate '{name}' is not the one to be timed now; ask next() which one is")]
    OutOfTurn { name: String },
    #[error("a call of '{name}' cannot take {per_call_us} microseconds; check the clock that measured it")]
    BadTime { name: String, per_call_us: f64 },
    #[error("a sample of '{name}' with 0 calls is no sample; make at least one")]
    NoCalls { name: String },
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Active,
    /// Timed no more for now: clearly behind.
    Resting,
    /// Timed no more: hopelessly behind.
    Retired,
    Failed(String),
}

#[derive(Clone, Debug)]
struct Candidate {
    name: String,
    baseline: bool,
    state: State,
    warmups: Vec<f64>,
    /// Calls of the next sample; fixed by the first that counts, so that all that count are alike.
    calls: u32,
    samples: Vec<(u32, f64)>,
}

/// A contest between the candidates of one call.
///
/// It is told what was measured and says what to measure next: each round times every candidate that can still win
/// once, in an order that differs from round to round. The same answers give the same questions.
///
/// ```
/// use lz_measure::{Contest, Next, Rules, Sample, order};
///
/// let mut contest = Contest::new(Rules::default())?;
/// for name in ["torch", "fast", "reference"] {
///     contest.add(name, name == "torch")?;
/// }
/// let true_us = [100.0, 50.0, 90_000.0];
/// let end = loop {
///     match contest.next() {
///         Next::Time { candidate, calls } => {
///             let per_call_us = true_us[candidate]; // run it `calls` times here
///             contest.record(candidate, Sample { per_call_us, calls })?;
///         }
///         end => break end,
///     }
/// };
/// assert_eq!(end, Next::Settled);
/// let results = contest.results();
/// assert_eq!(order(&results, |_| 0), [1, 0, 2]);
/// assert_eq!(results[2].stats.as_ref().unwrap().samples, 1); // hopeless at once
/// # Ok::<(), lz_measure::ContestError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Contest {
    rules: Rules,
    candidates: Vec<Candidate>,
    round: u32,
    settled: bool,
    /// The round from which on it counts who is hopeless.
    since: u32,
}

impl Contest {
    /// A contest without candidates.
    pub fn new(rules: Rules) -> Result<Contest, ContestError> {
        rules.check()?;
        Ok(Contest { rules, candidates: Vec::new(), round: 0, settled: false, since: 0 })
    }

    /// Adds a candidate, and gives its number. The baseline is what others are compared with: it stays for
    /// [`Rules::min_rounds`] rounds even when it cannot win, unless it is hundreds of times slower.
    pub fn add(&mut self, name: &str, baseline: bool) -> Result<usize, ContestError> {
        let name = name.to_owned();
        if self.candidates.iter().any(|c| !c.warmups.is_empty() || c.state != State::Active) {
            return Err(ContestError::Started { name });
        }
        if self.candidates.iter().any(|c| c.name == name) {
            return Err(ContestError::AddedTwice { name });
        }
        let state = State::Active;
        self.candidates.push(Candidate { name, baseline, state, warmups: vec![], calls: 1, samples: vec![] });
        Ok(self.candidates.len() - 1)
    }

    /// The name of a candidate.
    pub fn name(&self, candidate: usize) -> Option<&str> {
        self.candidates.get(candidate).map(|c| c.name.as_str())
    }

    /// How many rounds are complete; warm-up is none.
    pub fn rounds(&self) -> u32 {
        self.round
    }

    /// What to do next; the same until it has been done.
    pub fn next(&self) -> Next {
        match self.due() {
            Some(candidate) => Next::Time { candidate, calls: self.candidates[candidate].calls },
            None if self.settled || self.active().next().is_none() => Next::Settled,
            None => Next::Exhausted,
        }
    }

    /// Takes a measurement of the candidate that [`next`](Contest::next) asked for.
    pub fn record(&mut self, candidate: usize, sample: Sample) -> Result<(), ContestError> {
        let name = self.in_turn(candidate)?;
        let Sample { per_call_us, calls } = sample;
        if !PLAUSIBLE_US.contains(&per_call_us) {
            return Err(ContestError::BadTime { name, per_call_us });
        }
        if calls == 0 {
            return Err(ContestError::NoCalls { name });
        }
        let one = &mut self.candidates[candidate];
        let counts = !one.warmups.is_empty()
            && (!one.samples.is_empty()
                || one.warmups.len() >= MOST_WARMUPS
                || self.rules.is_long_enough(per_call_us, calls));
        if counts {
            one.samples.push((self.round, per_call_us));
        } else {
            one.warmups.push(per_call_us);
            one.calls = self.rules.calls_for(per_call_us);
        }
        self.close_round();
        Ok(())
    }

    /// The candidate that [`next`](Contest::next) asked for cannot be timed: it leaves the contest.
    pub fn fail(&mut self, candidate: usize, error: impl Into<String>) -> Result<(), ContestError> {
        self.in_turn(candidate)?;
        self.candidates[candidate].state = State::Failed(error.into());
        self.close_round();
        Ok(())
    }

    /// Holds at least so many rounds more, with everybody who did not fail: there is reason to doubt what was measured. All
    /// samples count, those from before as well; who is hopeless is found out anew.
    pub fn reopen(&mut self, rounds: u32) {
        for one in self.candidates.iter_mut().filter(|c| matches!(c.state, State::Resting | State::Retired)) {
            one.state = State::Active;
        }
        self.since = self.round;
        self.settled = false;
        self.rules.min_rounds = self.round.saturating_add(rounds.max(1));
        self.rules.max_rounds = self.rules.max_rounds.max(self.rules.min_rounds);
    }

    /// What is lost by stopping now, in the mean and relative to the leader's time; 0 when settled. See [`loss_of`].
    pub fn loss(&self) -> f64 {
        if self.next() == Next::Settled { 0.0 } else { loss_of(&self.results()) }
    }

    /// What is known of every candidate, in the order they were added.
    pub fn results(&self) -> Vec<Timing> {
        let stats = self.stats();
        let timing = |(one, stats): (&Candidate, Option<Stats>)| Timing {
            candidate: one.name.clone(),
            baseline: one.baseline,
            stats,
            warmup_us: one.warmups.first().copied(),
            retired: matches!(one.state, State::Retired | State::Resting),
            error: if let State::Failed(error) = &one.state { Some(error.clone()) } else { None },
        };
        self.candidates.iter().zip(stats).map(timing).collect()
    }

    fn in_turn(&self, candidate: usize) -> Result<String, ContestError> {
        let candidates = self.candidates.len();
        let one = self.candidates.get(candidate).ok_or(ContestError::NoCandidate { candidate, candidates })?;
        if self.due() != Some(candidate) {
            return Err(ContestError::OutOfTurn { name: one.name.clone() });
        }
        Ok(one.name.clone())
    }

    fn active(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.candidates.len()).filter(|&i| self.candidates[i].state == State::Active)
    }

    /// Who is to be timed now: everybody once for warm-up, then round after round.
    fn due(&self) -> Option<usize> {
        if self.settled || self.round >= self.rules.max_rounds {
            return None;
        }
        let cold = self.active().find(|&i| self.candidates[i].warmups.is_empty());
        cold.or_else(|| self.turns().into_iter().find(|&i| self.is_missing(i)))
    }

    /// Whether the round still waits for a candidate.
    fn is_missing(&self, i: usize) -> bool {
        let one = &self.candidates[i];
        one.state == State::Active && one.samples.last().is_none_or(|s| s.0 != self.round)
    }

    /// The order of candidates in this round. It rotates, so that each is first equally often, and is drawn anew when
    /// everybody has been.
    fn turns(&self) -> Vec<usize> {
        let count = self.candidates.len().max(1);
        let cycle = u64::from(self.round) / count as u64;
        let mut turns: Vec<usize> = (0..self.candidates.len()).collect();
        turns.sort_by_key(|&i| (mix(self.rules.seed ^ mix(cycle ^ mix(i as u64))), i));
        turns.rotate_left(self.round as usize % count);
        turns
    }

    /// Ends the round when nobody is missing any more, and judges.
    fn close_round(&mut self) {
        let complete = |c: &Contest| c.active().all(|i| !c.candidates[i].warmups.is_empty() && !c.is_missing(i));
        if self.active().next().is_some() && complete(self) {
            self.round += 1;
            self.judge();
        }
    }
}

/// Spreads bits (splitmix64).
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
