//! What keeps a broken kernel from breaking a request, without the engine that calls kernels.
//!
//! | | |
//! |---|---|
//! | [`Breaker`], [`Breakers`] | what keeps failing is left alone for a while |
//! | [`KernelHealth`], [`Counters`] | calls, failures, fallbacks, latency of each kernel |
//! | [`Degradation`] | the worse the health, the less is asked of selection |
//! | [`Rollout`] | a new kernel in the shadow, or for a share of the calls |
//! | [`Watch`] | files that change, however they do |
//! | [`Event`], [`EventLog`] | what happened, for logs and reports |
//! | [`is_poisoning`], [`is_out_of_memory`] | errors that say more than that a kernel failed |
//!
//! Nothing here reads a clock but [`Watch`]: whoever has one says what time it is, in milliseconds since any fixed
//! point. What lies on the path of every call is one load or one addition.
//!
//! ```
//! use lz_resilience::{Admission, BreakerConfig, Breakers, Transition};
//!
//! let breakers = Breakers::new(BreakerConfig::default(), 0);
//! // Looked up once, when a route is made, and kept.
//! let breaker = breakers.get("flash_attn", "flash_attn.prefill", "attention.gqa.prefill");
//!
//! // Five failures in a row, and it opens for about 30 s.
//! let changes: Vec<_> = (0..5).filter_map(|_| breaker.record_failure(1_000, "launch failed")).collect();
//! let [Transition::Opened { openings: 1, retry_at_ms }] = changes[..] else { panic!() };
//! assert!(!breaker.is_closed());
//! assert!(matches!(breaker.admit(|| 2_000), Admission::Refused { retry_in_ms: Some(26_000..=33_000) }));
//!
//! // Then up to three calls at a time may try. Three that go well close it.
//! let probe = || match breaker.admit(|| retry_at_ms) {
//!     Admission::Probe(probe) => probe,
//!     _ => panic!(),
//! };
//! let (first, second, third) = (probe(), probe(), probe());
//! assert_eq!(first.transition(), Some(Transition::HalfOpened));
//! assert!(matches!(breaker.admit(|| retry_at_ms), Admission::Refused { .. }));
//! assert_eq!(first.succeeded(), None);
//! assert_eq!(second.succeeded(), None);
//! assert_eq!(third.succeeded(), Some(Transition::Closed));
//! assert!(breaker.is_closed());
//! ```
#![forbid(unsafe_code)]

pub mod bench;
mod breaker;
mod counters;
pub mod degradation;
mod events;
mod lanes;
mod message;
mod mix;
mod pace;
mod poison;
pub mod rollout;
mod sync;
pub mod watch;
mod window;

pub use breaker::{
    Admission, Breaker, BreakerConfig, BreakerReport, BreakerState, BreakerView, Breakers, Earlier, Probe, Transition,
};
pub use counters::{Counters, KernelHealth, KernelReport, Latency};
pub use degradation::{Change, Degradation, DegradationConfig, Level};
pub use events::{Event, EventHook, EventLog, Severity, Stamped};
pub use message::LastError;
pub use pace::Pace;
pub use poison::{is_out_of_memory, is_poisoning};
pub use rollout::{Rollout, RolloutSpec, RolloutStatus, Verdict};
pub use watch::{Watch, WatchError};
