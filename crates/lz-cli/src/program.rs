//! The program that commands are a part of, where there is one: its kernels, and what runs them.
//!
//! The binary `layerzero` has the built-in references alone. `python -m layerzero` hands itself to its commands, in
//! [`Surroundings::program`](crate::surroundings::Surroundings::program).

use std::fmt;

use layerzero::perf::bench::Bench;
use layerzero::{Engine, Reloads};

/// How a command wants the libraries of the program it is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Libraries<'a> {
    /// Imported: their kernels can run, and whether they work is known.
    Imported,
    /// Found where they are installed, and not imported, which takes seconds: to answer questions.
    Found,
    /// Taken for installed, because the device is a described one: these, written `LIB` or `LIB=VERSION`, or all that are
    /// known when none is named.
    Assumed(&'a [String]),
}

/// A program that runs commands inside of itself.
pub trait Program: fmt::Debug + Send + Sync {
    /// Adds its kernels to an engine that a command opened. Gives the backends whose libraries were not imported for it, or
    /// why a library cannot be assumed.
    fn add_kernels(&self, engine: &Engine, libraries: Libraries<'_>) -> Result<Vec<String>, String>;

    /// Makes what runs kernels to measure them, or says why it cannot.
    fn bench(&self) -> Result<Box<dyn Bench>, String>;

    /// What became of its own configurations.
    fn reloads(&self) -> Reloads;
}
