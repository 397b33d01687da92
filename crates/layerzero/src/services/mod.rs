//! The services around the core: each a struct with its own state. They know the core and not each other; the engine puts
//! them together.

pub(crate) mod control;
mod failures_file;
pub(crate) mod jit;
pub(crate) mod manifest;
pub(crate) mod names;
pub(crate) mod overlays;
pub(crate) mod perf;
mod state_files;
pub mod status;

pub(crate) use state_files::StateFiles;
