//! What happened, for logs and for `lz.health()`.

use std::collections::VecDeque;
use std::fmt;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::degradation::{Level, Why};
use crate::message::clip;
use crate::rollout::RollbackCause;

/// Events that are remembered.
const REMEMBERED: usize = 256;

/// Something an operator may want to know of. Names and fields are stable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum Event {
    /// A kernel raised, or returned something malformed.
    KernelFailed {
        /// The operation.
        op: String,
        /// The backend.
        backend: String,
        /// The kernel.
        kernel: String,
        /// What was said.
        error: String,
    },
    /// Another kernel served a call because one failed.
    FellBack {
        /// The operation.
        op: String,
        /// The kernel that failed.
        failed: String,
        /// The kernel that served the call.
        served: String,
        /// What was said.
        error: String,
    },
    /// A breaker opened: the kernel is left alone for this operation until `retry_at_ms`.
    BreakerOpened {
        /// The operation.
        op: String,
        /// The backend.
        backend: String,
        /// The kernel.
        kernel: String,
        /// How often it opened since it was last closed.
        openings: u32,
        /// When it is tried again.
        retry_at_ms: u64,
        /// What was said.
        error: String,
    },
    /// A breaker's time was over, and a probe goes.
    BreakerHalfOpen {
        /// The operation.
        op: String,
        /// The backend.
        backend: String,
        /// The kernel.
        kernel: String,
    },
    /// Enough probes went well: the kernel is back for this operation.
    BreakerClosed {
        /// The operation.
        op: String,
        /// The backend.
        backend: String,
        /// The kernel.
        kernel: String,
    },
    /// A backend is out for the life of the process.
    BackendDisabled {
        /// The backend.
        backend: String,
        /// Why.
        reason: String,
    },
    /// Memory ran out in a kernel.
    OutOfMemory {
        /// The operation.
        op: String,
        /// The kernel.
        kernel: String,
        /// What was said.
        error: String,
    },
    /// The level of degradation changed.
    LevelChanged {
        /// The level it was.
        from: Level,
        /// The level it is.
        to: Level,
        /// The health, 0 to 100.
        score: f64,
        /// What moved it.
        why: Why,
    },
    /// A configuration was taken over.
    ReloadSucceeded {
        /// The configuration's number.
        version: u64,
        /// Where it came from.
        sources: Vec<String>,
    },
    /// A configuration was refused; the last good one stays.
    ReloadRefused {
        /// What was said.
        error: String,
        /// Where it came from.
        sources: Vec<String>,
    },
    /// A rollout's candidate was taken out.
    RolledBack {
        /// The rollout.
        rollout: String,
        /// The operation.
        op: String,
        /// The kernel that is tried.
        candidate: String,
        /// Why.
        why: RollbackCause,
    },
    /// A rollout's candidate was put back to work.
    Rearmed {
        /// The rollout.
        rollout: String,
        /// The operation.
        op: String,
        /// The kernel that is tried.
        candidate: String,
    },
    /// A candidate's answer was not the serving kernel's.
    ShadowMismatch {
        /// The rollout.
        rollout: String,
        /// The operation.
        op: String,
        /// The kernel that is tried.
        candidate: String,
        /// The kernel that served the call.
        serving: String,
        /// The greatest difference, where it is a number.
        max_error: Option<f64>,
    },
}

/// How much an event matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Good to know.
    Info,
    /// Something is not as it should be, and was dealt with.
    Warn,
    /// Somebody should look.
    Error,
}

impl Event {
    /// Every name an event can have.
    pub const NAMES: [&'static str; 13] = [
        "kernel_failed",
        "fell_back",
        "breaker_opened",
        "breaker_half_open",
        "breaker_closed",
        "backend_disabled",
        "out_of_memory",
        "level_changed",
        "reload_succeeded",
        "reload_refused",
        "rolled_back",
        "rearmed",
        "shadow_mismatch",
    ];

    /// Its stable name.
    pub fn name(&self) -> &'static str {
        let [
            failed,
            fell_back,
            opened,
            half_open,
            closed,
            disabled,
            memory,
            level,
            reload,
            refused,
            rolled_back,
            rearmed,
            mismatch,
        ] = Event::NAMES;
        match self {
            Event::KernelFailed { .. } => failed,
            Event::FellBack { .. } => fell_back,
            Event::BreakerOpened { .. } => opened,
            Event::BreakerHalfOpen { .. } => half_open,
            Event::BreakerClosed { .. } => closed,
            Event::BackendDisabled { .. } => disabled,
            Event::OutOfMemory { .. } => memory,
            Event::LevelChanged { .. } => level,
            Event::ReloadSucceeded { .. } => reload,
            Event::ReloadRefused { .. } => refused,
            Event::RolledBack { .. } => rolled_back,
            Event::Rearmed { .. } => rearmed,
            Event::ShadowMismatch { .. } => mismatch,
        }
    }

    /// How much it matters.
    pub fn level(&self) -> Severity {
        match self {
            Event::BreakerHalfOpen { .. }
            | Event::BreakerClosed { .. }
            | Event::ReloadSucceeded { .. }
            | Event::Rearmed { .. } => Severity::Info,
            Event::LevelChanged { from, to, .. } if to < from => Severity::Info,
            Event::BackendDisabled { .. } | Event::ReloadRefused { .. } | Event::RolledBack { .. } => Severity::Error,
            _ => Severity::Warn,
        }
    }

    /// Cuts every message that may be of any length.
    fn shorten(&mut self) {
        match self {
            Event::KernelFailed { error, .. }
            | Event::FellBack { error, .. }
            | Event::BreakerOpened { error, .. }
            | Event::OutOfMemory { error, .. }
            | Event::ReloadRefused { error, .. }
            | Event::BackendDisabled { reason: error, .. }
            | Event::RolledBack { why: RollbackCause::Ordered { reason: error }, .. } => *error = clip(error),
            _ => {}
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::KernelFailed { op, kernel, error, .. } => write!(f, "{op}: {kernel} failed: {error}"),
            Event::FellBack { op, failed, served, error } => {
                write!(f, "{op}: {failed} failed ({error}); {served} served the call")
            }
            Event::BreakerOpened { op, kernel, openings, error, .. } => {
                write!(f, "{op}: {kernel} keeps failing and is left alone for a while")?;
                if *openings > 1 {
                    write!(f, ", time {openings} in a row")?;
                }
                write!(f, " ({error})")
            }
            Event::BreakerHalfOpen { op, kernel, .. } => write!(f, "{op}: {kernel} is tried again"),
            Event::BreakerClosed { op, kernel, .. } => write!(f, "{op}: {kernel} works again"),
            Event::BackendDisabled { backend, reason } => {
                write!(f, "{backend} is disabled until the process ends: {reason}")
            }
            Event::OutOfMemory { op, kernel, error } => write!(f, "{op}: {kernel} ran out of memory: {error}"),
            Event::LevelChanged { from, to, score, why } => {
                write!(f, "degradation level {to}, was {from}: {why} (health {score:.0} of 100)")
            }
            Event::ReloadSucceeded { version, sources } => {
                write!(f, "configuration {version} is in force ({})", sources.join(", "))
            }
            Event::ReloadRefused { error, sources } => {
                write!(f, "the configuration was refused, the last good one stays: {error} ({})", sources.join(", "))
            }
            Event::RolledBack { rollout, op, candidate, why } => {
                write!(f, "rollout {rollout}: {candidate} is out for {op}: {why}")
            }
            Event::Rearmed { rollout, op, candidate } => write!(f, "rollout {rollout}: {candidate} is tried for {op}"),
            Event::ShadowMismatch { rollout, op, candidate, serving, max_error } => {
                write!(f, "rollout {rollout}: {candidate} and {serving} differ on {op}")?;
                max_error.map_or(Ok(()), |error| write!(f, " by {error:.3e}"))
            }
        }
    }
}

/// An event with its number and its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stamped {
    /// Counted from 1, without gaps.
    pub number: u64,
    /// When, by the clock of whoever emitted it.
    pub at_ms: u64,
    /// What.
    #[serde(flatten)]
    pub event: Event,
}

/// Receives every event, after it was logged.
pub type EventHook = Box<dyn Fn(&Stamped) + Send + Sync>;

/// Where events go: to `tracing`, to a hook, and into a memory of the last 256.
#[derive(Default)]
pub struct EventLog {
    recent: Mutex<(u64, VecDeque<Stamped>)>,
    hook: Option<EventHook>,
}

impl EventLog {
    /// A log that gives every event to a hook as well.
    pub fn with_hook(hook: EventHook) -> EventLog {
        EventLog { recent: Mutex::default(), hook: Some(hook) }
    }

    /// Emits an event, with target `layerzero`.
    pub fn emit(&self, at_ms: u64, mut event: Event) {
        event.shorten();
        match event.level() {
            Severity::Info => tracing::info!(target: "layerzero", event = event.name(), "{event}"),
            Severity::Warn => tracing::warn!(target: "layerzero", event = event.name(), "{event}"),
            Severity::Error => tracing::error!(target: "layerzero", event = event.name(), "{event}"),
        }
        let stamped = {
            let (number, recent) = &mut *self.recent.lock();
            *number += 1;
            if recent.len() == REMEMBERED {
                recent.pop_front();
            }
            let stamped = Stamped { number: *number, at_ms, event };
            recent.push_back(stamped.clone());
            stamped
        };
        if let Some(hook) = &self.hook {
            hook(&stamped);
        }
    }

    /// The last 256 events, the oldest first.
    pub fn recent(&self) -> Vec<Stamped> {
        self.recent.lock().1.iter().cloned().collect()
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.recent.lock().0
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventLog").field("count", &self.count()).finish_non_exhaustive()
    }
}
