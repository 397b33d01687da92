//! The source files of lz-resilience that hold hand-written atomics, compiled with loom's primitives.

#[path = "../../src/breaker/gate.rs"]
#[allow(dead_code, reason = "reports read the state")]
pub mod gate;
#[path = "../../src/lanes.rs"]
pub mod lanes;
#[path = "../../src/mix.rs"]
mod mix;
#[path = "../../src/sync.rs"]
mod sync;
#[path = "../../src/breaker/word.rs"]
#[allow(dead_code, reason = "reports read the state")]
mod word;
