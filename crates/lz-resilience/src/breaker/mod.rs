//! Circuit breakers: what keeps failing is left alone for a while, then tried with three calls at a time.
//!
//! ```text
//!            5 failures in a row               its time is over: 3 probes
//!   closed ─────────────────────────▶ open ─────────────────────────────▶ half-open
//!     ▲                                ▲               a probe fails          │ │
//!     │                                └──────────────────────────────────────┘ │
//!     └──────────────────────────────────────────────────────────────── 3 probes go well
//! ```
//!
//! The nth opening in a row lasts `timeout_ms · 2ⁿ⁻¹`, a tenth more or less (the same for the same seed and n), and
//! `max_timeout_ms` at most. [`Breaker::trip_forever`] opens it for the life of the process.

pub(crate) mod gate;
mod table;
pub(crate) mod word;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::message::{LastError, clip};
use gate::{Entry, Gate, Limits, Moved, Ticket};
pub use table::{BreakerReport, Breakers};
use word::Phase;

/// When a breaker opens, for how long, and what closes it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerConfig {
    /// Failures in a row that open it. 0 counts as 1.
    pub failure_threshold: u32,
    /// Successful probes that close it, 1 to 255.
    pub success_threshold: u32,
    /// How long it stays open the first time.
    pub timeout_ms: u64,
    /// How long it stays open at most.
    pub max_timeout_ms: u64,
    /// Probes that may be under way at once, 1 to 15.
    pub half_open_max_calls: u32,
    /// A probe that has not come back after this long is given up, and its outcome no longer counts.
    pub probe_timeout_ms: u64,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        BreakerConfig {
            failure_threshold: 5,
            success_threshold: 3,
            timeout_ms: 30_000,
            max_timeout_ms: 600_000,
            half_open_max_calls: 3,
            probe_timeout_ms: 30_000,
        }
    }
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BreakerState {
    /// Calls go through.
    Closed,
    /// Calls are refused.
    Open,
    /// Probes go through, a few at a time.
    HalfOpen,
    /// Calls are refused for as long as the process lives.
    Disabled,
}

impl BreakerState {
    /// Its stable name.
    pub fn name(self) -> &'static str {
        match self {
            BreakerState::Closed => "closed",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half_open",
            BreakerState::Disabled => "disabled",
        }
    }
}

impl std::fmt::Display for BreakerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A change of state. Exactly one caller is told of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// It opened.
    Opened {
        /// How often it opened since it was last closed.
        openings: u32,
        /// When a probe may go.
        retry_at_ms: u64,
    },
    /// Its time was over, and a probe goes.
    HalfOpened,
    /// Enough probes went well.
    Closed,
    /// It opened for good.
    Disabled,
}

impl From<Moved> for Transition {
    fn from(moved: Moved) -> Self {
        match moved {
            Moved::Opened { openings, until } => Transition::Opened { openings, retry_at_ms: until },
            Moved::Closed => Transition::Closed,
        }
    }
}

/// Whether a call may go ahead.
#[derive(Debug)]
pub enum Admission<'a> {
    /// Yes; its outcome goes to [`Breaker::record_success`] or [`Breaker::record_failure`].
    Closed,
    /// Yes, as a probe; its outcome goes to the ticket.
    Probe(Probe<'a>),
    /// No.
    Refused {
        /// When to ask again; `None`: never.
        retry_in_ms: Option<u64>,
    },
}

/// What a breaker looks like from outside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BreakerView {
    /// Where it stands.
    pub state: BreakerState,
    /// Failures in a row, while closed.
    pub failures: u32,
    /// Probes that went well, while half-open.
    pub successes: u32,
    /// Openings since it was last closed; 63 at most.
    pub openings: u32,
    /// When a probe may go, while open.
    pub retry_at_ms: Option<u64>,
    /// What was last said.
    pub last_error: Option<LastError>,
    /// Why it is disabled for the life of the process.
    pub sticky: Option<String>,
}

/// The state of a breaker that an earlier process left open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Earlier {
    /// How often it opened since it was last closed.
    pub openings: u32,
    /// When a probe may go, by this process's clock.
    pub retry_at_ms: u64,
    /// What was last said.
    pub error: String,
}

#[derive(Debug, Default)]
struct Said {
    last_error: Option<LastError>,
    sticky: Option<String>,
}

/// A circuit breaker.
#[derive(Debug)]
pub struct Breaker {
    gate: Gate,
    said: Mutex<Said>,
}

impl Breaker {
    /// A closed breaker. The seed decides the jitter: breakers of different seeds do not come back together.
    pub fn new(config: &BreakerConfig, seed: u64) -> Breaker {
        let gate = Gate::new(Limits {
            failures: config.failure_threshold,
            successes: config.success_threshold,
            probes: config.half_open_max_calls,
            timeout_ms: config.timeout_ms,
            max_timeout_ms: config.max_timeout_ms,
            probe_timeout_ms: config.probe_timeout_ms,
            seed,
        });
        Breaker { gate, said: Mutex::default() }
    }

    /// As an earlier process left it: open, though never for longer than that opening lasts.
    pub fn reopened(config: &BreakerConfig, seed: u64, now_ms: u64, earlier: &Earlier) -> Breaker {
        let breaker = Breaker::new(config, seed);
        breaker.note(now_ms, &earlier.error);
        breaker.gate.reopen(earlier.openings, now_ms, earlier.retry_at_ms);
        breaker
    }

    /// Whether calls go through as ever: one load, for the path every call takes.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.gate.is_closed()
    }

    /// Whether a call may go ahead. The clock is read only if the breaker is not closed.
    #[inline]
    pub fn admit(&self, now_ms: impl FnOnce() -> u64) -> Admission<'_> {
        if self.is_closed() { Admission::Closed } else { self.admit_unclosed(now_ms()) }
    }

    #[cold]
    fn admit_unclosed(&self, now_ms: u64) -> Admission<'_> {
        match self.gate.admit(now_ms) {
            Entry::Closed => Admission::Closed,
            Entry::Probe { ticket, first } => Admission::Probe(Probe { breaker: self, ticket: Some(ticket), first }),
            Entry::Refused(retry_in_ms) => Admission::Refused { retry_in_ms },
        }
    }

    /// A call that was admitted while closed went well. One load, unless there are failures to forgive.
    #[inline]
    pub fn record_success(&self) {
        self.gate.succeeded();
    }

    /// A call that was admitted while closed went wrong. Does nothing but note the error if the breaker has opened
    /// since.
    pub fn record_failure(&self, now_ms: u64, error: &str) -> Option<Transition> {
        self.note(now_ms, error);
        self.gate.failed(now_ms).map(Transition::from)
    }

    /// Opens it for the life of the process. The first reason stands.
    pub fn trip_forever(&self, reason: &str) -> Option<Transition> {
        // The reason first: whoever sees the state can read it.
        self.said.lock().sticky.get_or_insert_with(|| clip(reason));
        self.gate.trip().then_some(Transition::Disabled)
    }

    /// What it looks like.
    pub fn view(&self) -> BreakerView {
        let word = self.gate.word();
        let said = self.said.lock();
        let mut view = BreakerView {
            state: BreakerState::Closed,
            failures: 0,
            successes: 0,
            openings: word.openings.into(),
            retry_at_ms: None,
            last_error: said.last_error.clone(),
            sticky: None,
        };
        match word.phase {
            Phase::Closed { failures } => view.failures = failures,
            Phase::Open { until } => (view.state, view.retry_at_ms) = (BreakerState::Open, Some(until)),
            Phase::HalfOpen { successes, .. } => {
                (view.state, view.successes) = (BreakerState::HalfOpen, successes.into());
            }
            Phase::Forever => (view.state, view.sticky) = (BreakerState::Disabled, said.sticky.clone()),
        }
        view
    }

    /// How long the nth opening in a row lasts.
    pub fn backoff_ms(&self, opening: u32) -> u64 {
        self.gate.backoff_ms(opening)
    }

    fn note(&self, now_ms: u64, error: &str) {
        self.said.lock().last_error = Some(LastError::new(error, now_ms));
    }
}

/// The right to try a half-open breaker. Dropped without an outcome it counts as nothing and frees its place.
#[derive(Debug)]
#[must_use = "a probe without an outcome counts as nothing"]
pub struct Probe<'a> {
    breaker: &'a Breaker,
    ticket: Option<Ticket>,
    first: bool,
}

impl Probe<'_> {
    /// [`Transition::HalfOpened`] if this very probe found the time of being open over.
    pub fn transition(&self) -> Option<Transition> {
        self.first.then_some(Transition::HalfOpened)
    }

    /// The call went well.
    pub fn succeeded(mut self) -> Option<Transition> {
        self.breaker.gate.probe_succeeded(self.ticket.take()?).map(Transition::from)
    }

    /// The call went wrong.
    pub fn failed(mut self, now_ms: u64, error: &str) -> Option<Transition> {
        self.breaker.note(now_ms, error);
        self.breaker.gate.probe_failed(self.ticket.take()?, now_ms).map(Transition::from)
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.breaker.gate.release(ticket);
        }
    }
}
