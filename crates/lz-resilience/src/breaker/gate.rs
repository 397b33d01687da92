//! The breaker's state machine: one atomic word, changed by compare and swap. Explored by loom.

use super::word::{LAST_MS, MOST_OPENINGS, MOST_PROBES, Phase, Word, is_closed, is_spotless};
use crate::mix::mix;
use crate::sync::{AtomicU64, Ordering};

/// How far a caller's clock may lie behind the one who let the newest probe in.
const BEHIND_MS: u32 = 1 << 16;
/// Longest a probe can be waited for: times of probes are kept in 32 bits.
const MOST_PATIENCE_MS: u64 = 1 << 31;

/// When to open, how long for, and what closes it again.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Failures in a row that open it.
    pub failures: u32,
    /// Successful probes that close it.
    pub successes: u32,
    /// Probes at once.
    pub probes: u32,
    /// The first opening's length.
    pub timeout_ms: u64,
    /// The longest opening.
    pub max_timeout_ms: u64,
    /// After this long a probe is given up.
    pub probe_timeout_ms: u64,
    /// Decides the jitter.
    pub seed: u64,
}

/// The place of one probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u16);

/// Whether a call may go ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// As ever.
    Closed,
    /// As a probe.
    Probe {
        /// To be given back with the outcome.
        ticket: Ticket,
        /// Whether this very call found the time of being open over.
        first: bool,
    },
    /// No; in so many milliseconds perhaps, or never.
    Refused(Option<u64>),
}

/// What a recorded outcome changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// It opened, for the nth time in a row, until then.
    Opened {
        /// How often it opened since it was last closed.
        openings: u32,
        /// When the first probe may go.
        until: u64,
    },
    /// It closed.
    Closed,
}

/// A circuit breaker's state machine.
#[derive(Debug)]
pub struct Gate {
    word: AtomicU64,
    limits: Limits,
}

impl Gate {
    /// A closed one. Limits out of range are taken as the nearest in it: counts at least 1, successes at most
    /// 255, probes at most 15, a probe's patience at most 24 days.
    pub fn new(limits: Limits) -> Gate {
        let limits = Limits {
            failures: limits.failures.max(1),
            successes: limits.successes.clamp(1, u8::MAX.into()),
            probes: limits.probes.clamp(1, MOST_PROBES.into()),
            probe_timeout_ms: limits.probe_timeout_ms.clamp(1, MOST_PATIENCE_MS),
            ..limits
        };
        let word = Word { epoch: 0, openings: 0, phase: Phase::Closed { failures: 0 } };
        Gate { word: AtomicU64::new(word.pack()), limits }
    }

    /// One load.
    #[inline]
    pub fn is_closed(&self) -> bool {
        is_closed(self.word.load(Ordering::Acquire))
    }

    /// The state at this moment.
    pub(crate) fn word(&self) -> Word {
        Word::unpack(self.word.load(Ordering::Acquire))
    }

    /// Moves to what `step` says, however many others move at the same time; `step` says `None` to stay.
    fn change<R>(&self, step: impl Fn(Word) -> (Option<Word>, R)) -> R {
        let mut seen = self.word.load(Ordering::Acquire);
        loop {
            let (next, result) = step(Word::unpack(seen));
            let Some(next) = next else { return result };
            match self.word.compare_exchange_weak(seen, next.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return result,
                Err(now) => seen = now,
            }
        }
    }

    /// Whether a call may go ahead at this time.
    pub fn admit(&self, now_ms: u64) -> Entry {
        let now = now_ms.min(LAST_MS);
        let since = now as u32;
        self.change(|word| match word.phase {
            Phase::Closed { .. } => (None, Entry::Closed),
            Phase::Forever => (None, Entry::Refused(None)),
            Phase::Open { until } if now < until => (None, Entry::Refused(Some(until - now))),
            Phase::Open { .. } => {
                let next = word.next(word.openings, Phase::HalfOpen { successes: 0, probes: 1, since });
                (Some(next), Entry::Probe { ticket: Ticket(next.epoch), first: true })
            }
            Phase::HalfOpen { successes, probes, .. } if u32::from(probes) < self.limits.probes => {
                let next = Word { phase: Phase::HalfOpen { successes, probes: probes + 1, since }, ..word };
                (Some(next), Entry::Probe { ticket: Ticket(next.epoch), first: false })
            }
            Phase::HalfOpen { successes, since: newest, .. } => {
                let waited = waited(newest, since);
                if waited < self.limits.probe_timeout_ms {
                    return (None, Entry::Refused(Some(self.limits.probe_timeout_ms - waited)));
                }
                let next = word.next(word.openings, Phase::HalfOpen { successes, probes: 1, since });
                (Some(next), Entry::Probe { ticket: Ticket(next.epoch), first: false })
            }
        })
    }

    /// A call that was let in while closed went well.
    #[inline]
    pub fn succeeded(&self) {
        if !is_spotless(self.word.load(Ordering::Acquire)) {
            self.forgive();
        }
    }

    fn forgive(&self) {
        self.change(|word| match word.phase {
            Phase::Closed { failures: 1.. } => (Some(Word { phase: Phase::Closed { failures: 0 }, ..word }), ()),
            _ => (None, ()),
        });
    }

    /// A call that was let in while closed went wrong.
    pub fn failed(&self, now_ms: u64) -> Option<Moved> {
        self.change(|word| match word.phase {
            Phase::Closed { failures } if failures.saturating_add(1) >= self.limits.failures => {
                self.opened(word, 1, now_ms)
            }
            Phase::Closed { failures } => {
                (Some(Word { phase: Phase::Closed { failures: failures + 1 }, ..word }), None)
            }
            // A late one: what it has to say is known already.
            _ => (None, None),
        })
    }

    /// A probe went well.
    pub fn probe_succeeded(&self, ticket: Ticket) -> Option<Moved> {
        self.change(|word| match word.phase {
            Phase::HalfOpen { successes, probes, since } if Ticket(word.epoch) == ticket => {
                let successes = successes.saturating_add(1);
                if u32::from(successes) >= self.limits.successes {
                    return (Some(word.next(0, Phase::Closed { failures: 0 })), Some(Moved::Closed));
                }
                let phase = Phase::HalfOpen { successes, probes: probes.saturating_sub(1), since };
                (Some(Word { phase, ..word }), None)
            }
            _ => (None, None),
        })
    }

    /// A probe went wrong.
    pub fn probe_failed(&self, ticket: Ticket, now_ms: u64) -> Option<Moved> {
        self.change(|word| match word.phase {
            Phase::HalfOpen { .. } if Ticket(word.epoch) == ticket => {
                self.opened(word, word.openings.saturating_add(1).min(MOST_OPENINGS), now_ms)
            }
            _ => (None, None),
        })
    }

    /// A probe ended without an outcome.
    pub fn release(&self, ticket: Ticket) {
        self.change(|word| match word.phase {
            Phase::HalfOpen { successes, probes, since } if Ticket(word.epoch) == ticket => {
                let phase = Phase::HalfOpen { successes, probes: probes.saturating_sub(1), since };
                (Some(Word { phase, ..word }), ())
            }
            _ => (None, ()),
        });
    }

    /// Opens it as it was: for the nth time in a row, until then, though no longer than the nth opening lasts.
    pub fn reopen(&self, openings: u32, now_ms: u64, until: u64) {
        let openings = u8::try_from(openings).unwrap_or(MOST_OPENINGS).clamp(1, MOST_OPENINGS);
        let latest = now_ms.saturating_add(self.backoff_ms(openings.into()));
        let until = until.min(latest).min(LAST_MS);
        self.change(|word| (Some(word.next(openings, Phase::Open { until })), ()));
    }

    /// Opens it for good; says whether it was not so before.
    pub fn trip(&self) -> bool {
        self.change(|word| match word.phase {
            Phase::Forever => (None, false),
            _ => (Some(word.next(word.openings, Phase::Forever)), true),
        })
    }

    fn opened(&self, word: Word, openings: u8, now_ms: u64) -> (Option<Word>, Option<Moved>) {
        let until = now_ms.saturating_add(self.backoff_ms(openings.into())).min(LAST_MS);
        (Some(word.next(openings, Phase::Open { until })), Some(Moved::Opened { openings: openings.into(), until }))
    }

    /// How long the nth opening in a row lasts: doubled each time, a tenth more or less, never above the most.
    pub fn backoff_ms(&self, opening: u32) -> u64 {
        let Limits { timeout_ms, max_timeout_ms, seed, .. } = self.limits;
        let doublings = opening.saturating_sub(1);
        let doubled = if doublings > timeout_ms.leading_zeros() { u64::MAX } else { timeout_ms << doublings };
        let doubled = if timeout_ms == 0 { 0 } else { doubled.min(max_timeout_ms) };
        // −1000 to 1000 ten-thousandths.
        let tenth = i128::from(mix(seed ^ u64::from(opening)) % 2001) - 1000;
        let jittered = i128::from(doubled) + i128::from(doubled) * tenth / 10_000;
        u64::try_from(jittered).unwrap_or(u64::MAX).min(max_timeout_ms)
    }
}

/// How long ago, in times of 32 bits. Callers read their clocks before they come here, so another may have been a
/// moment later: that is no time at all, not nearly 2³² ms.
fn waited(newest: u32, now: u32) -> u64 {
    let ago = now.wrapping_sub(newest);
    if ago > u32::MAX - BEHIND_MS { 0 } else { ago.into() }
}
