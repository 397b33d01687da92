//! The source files of lz-select that hold hand-written atomics, compiled with loom's primitives.

#[path = "../../src/cache/flight.rs"]
pub mod flight;
#[path = "../../src/cache/generation.rs"]
pub mod generation;
#[path = "../../src/sync.rs"]
mod sync;
