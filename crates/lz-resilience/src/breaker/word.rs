//! A breaker's whole state in 64 bits, so that it changes in one step.
//!
//! | bits | closed | open | half-open | forever |
//! |---|---|---|---|---|
//! | 0–1 | 0 | 1 | 2 | 3 |
//! | 2–13 | epoch | epoch | epoch | epoch |
//! | 14–19 | 0 | openings | openings | openings |
//! | 20–63 | failures | until, ms | since (32), successes (8), probes (4) | 0 |

/// What the low two bits say.
const STATE: u64 = 0b11;
const EPOCH_AT: u32 = 2;
const EPOCH: u64 = 0xfff;
const OPENINGS_AT: u32 = 14;
const REST_AT: u32 = 20;
const SUCCESSES_AT: u32 = 52;
const PROBES_AT: u32 = 60;

/// Most openings that are counted apart.
pub(crate) const MOST_OPENINGS: u8 = 0x3f;
/// Most probes at once.
pub(crate) const MOST_PROBES: u8 = 0xf;
/// The last moment that can be told; later ones are taken for it.
pub(crate) const LAST_MS: u64 = (1 << 44) - 1;

/// The state, unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    /// Advanced whenever the state changes or a probe is given up: a ticket of another epoch is void.
    pub epoch: u16,
    /// Openings since it was last closed.
    pub openings: u8,
    pub phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Closed {
        failures: u32,
    },
    Open {
        until: u64,
    },
    /// `since`: when the newest probe was let in, the low 32 bits of it.
    HalfOpen {
        successes: u8,
        probes: u8,
        since: u32,
    },
    Forever,
}

impl Word {
    pub fn next(self, openings: u8, phase: Phase) -> Word {
        Word { epoch: self.epoch.wrapping_add(1) & EPOCH as u16, openings, phase }
    }

    pub fn pack(self) -> u64 {
        let (state, rest) = match self.phase {
            Phase::Closed { failures } => (0, u64::from(failures) << REST_AT),
            Phase::Open { until } => (1, until.min(LAST_MS) << REST_AT),
            Phase::HalfOpen { successes, probes, since } => {
                let probes = u64::from(probes.min(MOST_PROBES)) << PROBES_AT;
                (2, probes | u64::from(successes) << SUCCESSES_AT | u64::from(since) << REST_AT)
            }
            Phase::Forever => (3, 0),
        };
        let openings = u64::from(self.openings.min(MOST_OPENINGS)) << OPENINGS_AT;
        state | (u64::from(self.epoch) & EPOCH) << EPOCH_AT | openings | rest
    }

    pub fn unpack(word: u64) -> Word {
        let phase = match word & STATE {
            0 => Phase::Closed { failures: (word >> REST_AT) as u32 },
            1 => Phase::Open { until: word >> REST_AT },
            2 => Phase::HalfOpen {
                successes: (word >> SUCCESSES_AT) as u8,
                probes: (word >> PROBES_AT) as u8,
                since: (word >> REST_AT) as u32,
            },
            _ => Phase::Forever,
        };
        let openings = (word >> OPENINGS_AT) as u8 & MOST_OPENINGS;
        Word { epoch: (word >> EPOCH_AT & EPOCH) as u16, openings, phase }
    }
}

/// Whether a packed word is a closed breaker's.
#[inline]
pub(crate) fn is_closed(word: u64) -> bool {
    word & STATE == 0
}

/// Whether a packed word is that of a closed breaker without failures.
#[inline]
pub(crate) fn is_spotless(word: u64) -> bool {
    is_closed(word) && word >> REST_AT == 0
}
