//! Why a kernel was chosen, as data. Every sentence about a choice is made from these values, and nowhere else.

use std::fmt;

use lz_model::Reason;
use serde::Serialize;

use crate::decision::{Basis, Candidate, Decision};
use crate::perf::{EstimateKind, Rival};

/// What the compared times are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Times {
    /// All were measured at this shape bucket.
    Measured,
    /// None was.
    Predicted,
    /// Some were measured, others predicted.
    Mixed,
    /// All follow from what was measured on another machine.
    Prior,
}

/// Why a candidate is behind one that is slower, or whose time is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Behind {
    /// Its time is not trusted: too few samples, or sizes beyond those measured.
    Untrusted,
    /// It would have to be compiled first, and the chosen one would not.
    NotCompiled,
    /// The policy's points put it lower.
    Policy,
    /// It is the reference: while another kernel has no time, the time of the reference is no reason to choose it.
    Reference,
}

/// Candidates that are behind the chosen one for another reason than time or score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassedOver {
    /// The best of them: the fastest, or the one with the highest score.
    pub kernel_id: String,
    /// Its time in microseconds, or its score.
    pub value: f64,
    /// Why it is behind.
    pub because: Behind,
    /// How many others there are.
    pub more: usize,
}

/// What decided among candidates whose times differ by no more than noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TieBreak {
    /// What plain torch runs wins ties.
    PlainTorch,
    /// It is ahead of what plain torch runs for certain, which the fastest is not.
    AheadOfTorch,
    /// It is declared faster than what plain torch runs, and uncertain times say the same.
    Declared,
    /// The higher declared priority.
    Priority,
    /// It comes with LayerZero: a kernel that does not wins no tie.
    BuiltIn,
    /// Nothing: the order of ids.
    Order,
}

/// The chosen kernel is not the fastest, but the difference is noise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tie {
    /// The fastest of the kernels it was compared with.
    pub fastest: String,
    /// The time of that one, in microseconds.
    pub fastest_us: f64,
    /// Differences of these two times up to this are noise.
    pub noise_us: f64,
    /// What the fastest must gain beyond the noise to replace what plain torch runs; 0 unless that is at stake.
    pub promise_us: f64,
    /// What decided instead.
    pub by: TieBreak,
}

/// Whether times were known where the score decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Known {
    /// No candidate has a time.
    Nothing,
    /// Some have, but not every one that would have to has a trusted one.
    NotAll,
    /// Times are not looked at on this level of degradation.
    NotAsked,
}

/// Two candidates have the same score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EqualScore {
    /// The other one.
    pub kernel_id: String,
    /// What decided.
    pub by: TieBreak,
}

/// How the ranking found its first kernel, before any rule moved another one there.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "ranked", rename_all = "snake_case")]
pub enum Ranked {
    /// No other kernel can serve the call.
    Only,
    /// Times decided.
    ByTime {
        /// What they are.
        times: Times,
        /// Its own.
        time_us: f64,
        /// Given when another is faster within the noise.
        tie: Option<Tie>,
        /// Faster ones that are behind for another reason than noise.
        passed_over: Option<PassedOver>,
    },
    /// It has no trusted time, and is before those that have one.
    Untimed {
        /// The fastest of those.
        passed_over: PassedOver,
    },
    /// The score decided.
    ByScore {
        /// Its score.
        score: f64,
        /// Why not times.
        known: Known,
        /// Given when another has the same score.
        equal: Option<EqualScore>,
        /// Those with a higher score that are behind.
        passed_over: Option<PassedOver>,
    },
}

/// Why the chosen kernel was chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum Why {
    /// The kernel selection chose may not run now.
    NextInLine {
        /// That kernel.
        after: String,
        /// Why not.
        reason: Reason,
    },
    /// A rollout gave the call to its candidate.
    Rollout {
        /// Its name.
        rollout: String,
    },
    /// A rule put it before all others.
    Override {
        /// Its name.
        rule: String,
    },
    /// A lockfile, a dispatch table or a plan chose it.
    Pin {
        /// Which.
        origin: String,
    },
    /// A rule allows no kernel but those it names.
    Lock {
        /// Its name.
        rule: String,
        /// How it came first among these.
        among: Ranked,
    },
    /// The caller's `torch.nn.attention.sdpa_kernel` allows torch's own implementations alone, and it is the first of them that
    /// can serve the call.
    SdpaKernel {
        /// What is allowed, the preferred one first.
        allowed: String,
    },
    /// The ranking.
    Ranking(Ranked),
}

impl Decision {
    /// Why the chosen kernel was chosen; `None` when none can serve the call.
    pub fn why(&self) -> Option<Why> {
        self.chosen()?;
        let ranked = self.ranked_first.clone()?;
        Some(if let Some((after, reason)) = self.struck_out.clone() {
            Why::NextInLine { after, reason }
        } else if let Some(rollout) = self.rollout.clone() {
            Why::Rollout { rollout }
        } else if let Some(rule) = self.overridden_by.clone() {
            Why::Override { rule }
        } else if let Some(origin) = self.pinned_by.as_deref() {
            Why::Pin { origin: origin.to_owned() }
        } else if let Some(rule) = self.locked_by.clone() {
            // Of several that a lock names, torch's own order decides there.
            let among = if self.query.context().sdpa.is_for_torch_alone() { Ranked::Only } else { ranked };
            Why::Lock { rule, among }
        } else if self.query.context().sdpa.is_for_torch_alone() {
            Why::SdpaKernel { allowed: self.query.context().sdpa.to_string() }
        } else {
            Why::Ranking(ranked)
        })
    }

    /// Whether times ranked the candidates, so that their scores need not fall from rank to rank.
    pub fn is_ranked_by_time(&self) -> bool {
        matches!(self.ranked_first, Some(Ranked::ByTime { .. } | Ranked::Untimed { .. }))
    }
}

/// Candidates whose times differ from the fastest's by no more than noise, as ranked.
pub(crate) struct Group {
    /// The fastest.
    pub fastest: usize,
    /// Those that are ahead of what plain torch runs for certain.
    pub ahead: Vec<usize>,
    /// Those declared faster than what plain torch runs, of which uncertain times say the same.
    pub promised: Vec<usize>,
    /// All of them, as ranked.
    pub members: Vec<usize>,
}

/// Says how the first of a ranking came first.
pub(crate) struct Ranking<'a> {
    /// Every candidate.
    pub candidates: &'a [Candidate],
    /// The accepted ones, best first.
    pub order: &'a [usize],
    /// Those that tie with the fastest of all, where times decided.
    pub group: Option<&'a Group>,
    /// What plain torch would run.
    pub baseline: Option<usize>,
    /// Whether times count on this level.
    pub times_count: bool,
    /// What a candidate is called.
    pub name: &'a dyn Fn(usize) -> String,
}

impl Ranking<'_> {
    /// How its first came first; `None` when nothing is accepted.
    pub fn first(&self, basis: Basis) -> Option<Ranked> {
        let &first = self.order.first()?;
        Some(match self.order {
            [_] => Ranked::Only,
            _ if basis == Basis::Declared => self.by_score(first),
            _ => self.by_time(first),
        })
    }

    fn trusted_us(&self, i: usize) -> Option<f64> {
        self.candidates[i].estimate.filter(|e| e.trusted).map(|e| e.median_us)
    }

    fn by_time(&self, first: usize) -> Ranked {
        let accepted = || self.order.iter().copied();
        let Some(time_us) = self.trusted_us(first) else {
            let timed = accepted().filter_map(|i| Some((i, self.trusted_us(i)?)));
            let passed_over = self.passed_over(first, timed.map(|(i, us)| (i, us, us)));
            return passed_over.map_or(Ranked::Only, |passed_over| Ranked::Untimed { passed_over });
        };
        let fastest = self.group.map_or(first, |group| group.fastest);
        let fastest_us = self.trusted_us(fastest).unwrap_or(time_us);
        let tie = self.group.filter(|_| fastest != first).map(|group| self.tie(first, group));
        let faster = accepted().filter_map(|i| Some((i, self.candidates[i].estimate?.median_us)));
        let faster = faster.filter(|&(i, us)| us < fastest_us && i != fastest);
        let passed_over = self.passed_over(first, faster.map(|(i, us)| (i, us, us)));
        let kinds = || accepted().filter_map(|i| self.candidates[i].estimate).filter(|e| e.trusted).map(|e| e.kind);
        let times = match (kinds().any(|k| k == EstimateKind::Measured), kinds().any(|k| k != EstimateKind::Measured)) {
            _ if kinds().any(|k| k == EstimateKind::Prior) => Times::Prior,
            (true, false) => Times::Measured,
            (true, true) => Times::Mixed,
            (false, _) => Times::Predicted,
        };
        Ranked::ByTime { times, time_us, tie, passed_over }
    }

    fn tie(&self, first: usize, group: &Group) -> Tie {
        let fastest = group.fastest;
        let (chosen, quickest) = (&self.candidates[first], &self.candidates[fastest]);
        let fastest_us = self.trusted_us(fastest).unwrap_or(f64::INFINITY);
        let is_baseline = self.baseline == Some(first);
        let rivals = quickest.estimate.as_ref().zip(chosen.estimate.as_ref()).map(|(quickest, chosen)| {
            let quickest = Rival { estimate: quickest, baseline: self.baseline == Some(fastest) };
            (quickest, Rival { estimate: chosen, baseline: is_baseline })
        });
        let noise_us = rivals.as_ref().map_or(0.0, |(a, b)| a.estimate.noise_to(b.estimate));
        let promise_us = rivals.as_ref().map_or(0.0, |(a, b)| a.margin_us(b));
        let is_ahead = |i: usize| group.ahead.contains(&i);
        let by = if is_ahead(first) && !is_ahead(fastest) {
            TieBreak::AheadOfTorch
        } else if group.promised.contains(&first) && !group.promised.contains(&fastest) {
            TieBreak::Declared
        } else if is_baseline {
            TieBreak::PlainTorch
        } else if chosen.terms.priority > quickest.terms.priority {
            TieBreak::Priority
        } else if chosen.built_in && !quickest.built_in {
            TieBreak::BuiltIn
        } else {
            TieBreak::Order
        };
        Tie { fastest: (self.name)(fastest), fastest_us, noise_us, promise_us, by }
    }

    fn by_score(&self, first: usize) -> Ranked {
        let chosen = &self.candidates[first];
        let score = chosen.terms.total();
        let timed = self.order.iter().any(|&i| self.candidates[i].estimate.is_some());
        let known = match (self.times_count, timed) {
            (false, _) => Known::NotAsked,
            (true, true) => Known::NotAll,
            (true, false) => Known::Nothing,
        };
        let second = self.order.get(1).map(|&i| (i, &self.candidates[i]));
        let equal = second.filter(|(_, c)| c.terms.total() == score && c.cold == chosen.cold);
        let equal = equal.map(|(i, c)| EqualScore {
            kernel_id: (self.name)(i),
            by: if chosen.built_in && !c.built_in {
                TieBreak::BuiltIn
            } else if chosen.terms.priority > c.terms.priority {
                TieBreak::Priority
            } else if chosen.baseline && !c.baseline {
                TieBreak::PlainTorch
            } else {
                TieBreak::Order
            },
        });
        let higher = self.order.iter().map(|&i| (i, self.candidates[i].terms.total()));
        let higher = higher.filter(|&(_, other)| other > score);
        let passed_over = self.passed_over(first, higher.map(|(i, score)| (i, -score, score)));
        Ranked::ByScore { score, known, equal, passed_over }
    }

    /// The best of candidates by a key, with the value to show, and why it is behind `first`.
    fn passed_over(&self, first: usize, others: impl Iterator<Item = (usize, f64, f64)>) -> Option<PassedOver> {
        let mut others: Vec<(usize, f64, f64)> = others.collect();
        others.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        others.first().map(|&(i, _, value)| PassedOver {
            kernel_id: (self.name)(i),
            value,
            because: self.behind(first, i),
            more: others.len() - 1,
        })
    }

    fn behind(&self, first: usize, other: usize) -> Behind {
        let (first, other) = (&self.candidates[first], &self.candidates[other]);
        if other.cold && !first.cold {
            Behind::NotCompiled
        } else if first.terms.precedence() != other.terms.precedence() {
            Behind::Policy
        } else if other.estimate.is_some_and(|e| e.trusted) && other.reference && !first.reference {
            Behind::Reference
        } else {
            Behind::Untrusted
        }
    }
}

impl Behind {
    /// After a kernel's name: `which …`.
    fn words(self) -> &'static str {
        match self {
            Behind::Untrusted => "whose time is not trusted",
            Behind::NotCompiled => "which has to be compiled first",
            Behind::Policy => "which the policy ranks lower",
            Behind::Reference => "which is the reference, the last resort",
        }
    }
}

impl TieBreak {
    fn words(self) -> &'static str {
        match self {
            TieBreak::PlainTorch => "what plain torch runs wins ties",
            TieBreak::AheadOfTorch => "it is ahead of what plain torch runs beyond doubt",
            TieBreak::Declared => "it is declared faster than what plain torch runs, and these times say the same",
            TieBreak::Priority => "it has the higher declared priority",
            TieBreak::BuiltIn => "it comes with LayerZero, and what does not wins no tie",
            TieBreak::Order => "the order of ids decides",
        }
    }
}

fn others(f: &mut fmt::Formatter<'_>, more: usize) -> fmt::Result {
    match more {
        0 => Ok(()),
        1 => f.write_str(", and 1 other"),
        more => write!(f, ", and {more} others"),
    }
}

impl fmt::Display for Ranked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ranked::Only => f.write_str("the only kernel that can serve this call"),
            Ranked::ByTime { times, time_us, tie, passed_over } => {
                let fastest = match times {
                    Times::Measured => "fastest measured",
                    Times::Predicted => "fastest predicted",
                    Times::Mixed => "fastest by measured and predicted times",
                    Times::Prior => "fastest by what was measured on another machine",
                };
                match tie {
                    None => f.write_str(fastest)?,
                    Some(Tie { fastest: other, fastest_us, noise_us, promise_us, by }) => {
                        let limit = match time_us - fastest_us <= *noise_us {
                            true => format!("differences up to {noise_us:.1} µs are noise"),
                            false => format!("less than the noise and {:.0}% apart", promise_us / fastest_us * 100.0),
                        };
                        let by = by.words();
                        write!(
                            f,
                            "tied with {other}, {fastest}: {time_us:.1} µs and {fastest_us:.1} µs, {limit}; {by}"
                        )?;
                    }
                }
                let Some(PassedOver { kernel_id, value, because, more }) = passed_over else { return Ok(()) };
                let except = if tie.is_some() { "; not counting" } else { " except" };
                write!(f, "{except} {kernel_id} ({value:.1} µs), {}", because.words())?;
                others(f, *more)
            }
            Ranked::Untimed { passed_over: PassedOver { kernel_id, value, because, .. } } => {
                write!(f, "its time is not known; before {kernel_id} ({value:.1} µs), {}", because.words())
            }
            Ranked::ByScore { known, equal, passed_over, .. } => {
                f.write_str("highest score")?;
                if let Some(PassedOver { kernel_id, value, because, more }) = passed_over {
                    write!(f, " except {kernel_id} ({value:.1}), {}", because.words())?;
                    others(f, *more)?;
                }
                if let Some(EqualScore { kernel_id, by }) = equal {
                    write!(f, ", equal to {kernel_id}: {}", by.words())?;
                }
                f.write_str(match known {
                    Known::Nothing => "; no times known",
                    Known::NotAll => "; not every candidate has a trusted time",
                    Known::NotAsked => "; times do not count while degraded",
                })
            }
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::NextInLine { after, reason } => write!(f, "next in line after {after}, which is out: {reason}"),
            Why::Rollout { rollout } => write!(f, "given by rollout '{rollout}'"),
            Why::Override { rule } => write!(f, "put first by '{rule}'"),
            Why::Pin { origin } => write!(f, "pinned by {origin}"),
            Why::Lock { rule, among: Ranked::Only } => write!(f, "locked by '{rule}'"),
            Why::Lock { rule, among } => write!(f, "locked by '{rule}'; of those it names: {among}"),
            Why::SdpaKernel { allowed } => {
                write!(f, "the first that can serve the call of those that torch's sdpa_kernel allows ({allowed})")
            }
            Why::Ranking(ranked) => ranked.fmt(f),
        }
    }
}
