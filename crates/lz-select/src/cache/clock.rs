//! Time for entries to live, cheap enough for every hit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Milliseconds since some fixed point.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The system's coarse monotonic clock: a few nanoseconds to read, a few milliseconds exact.
    #[default]
    System,
    /// A clock that tests move by hand.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// Now.
    pub fn now_ms(&self) -> u64 {
        match self {
            Clock::System => {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
                now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
            }
            Clock::Manual(ms) => ms.load(Ordering::Acquire),
        }
    }
}
