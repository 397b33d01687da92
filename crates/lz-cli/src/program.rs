//! The program that commands are a part of, where there is one: its kernels, and what runs them.
//!
//! The binary `layerzero` has the built-in references alone. `python -m layerzero` hands itself to its commands, in
//! [`Surroundings::program`](crate::surroundings::Surroundings::program).

use std::fmt;

use layerzero::perf::bench::Bench;
use layerzero::{Engine, Reloads};
use lz_model::{CallSpec, DeviceSpec};
use serde::{Deserialize, Serialize};

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

/// Kernels that were never run on the hardware they are for: a whole backend, or some of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unproven {
    /// The backend.
    pub backend: String,
    /// The library it belongs to.
    pub library: String,
    /// The kernels; none stands for all of the backend.
    pub kernels: Vec<String>,
    /// The version that is installed; `null` where it is not.
    pub installed: Option<String>,
    /// Why it counts as unproven.
    pub why: String,
    /// Whether the setting `backends.unproven` names it, so that it is used.
    pub named: bool,
}

/// A model whose calls are wanted, and over which sizes it runs: every combination of them. Lists that are empty stand for
/// the usual sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSizes {
    /// The model: a name, the path of a transformers `config.json`, or its text.
    pub model: String,
    /// What it computes in.
    pub dtype: Option<String>,
    /// Sequences at once.
    pub batch: Vec<i64>,
    /// Tokens of a prompt.
    pub seq: Vec<i64>,
    /// Tokens a sequence has when the next one is generated, that one included.
    pub context: Vec<i64>,
}

/// The calls of a model.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ModelCalls {
    /// Each call, with how often the model makes it.
    pub calls: Vec<(CallSpec, u64)>,
    /// What is not among them, and why.
    pub left_out: Vec<String>,
}

/// Why a program cannot answer, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub hint: String,
}

/// A program that runs commands inside of itself.
pub trait Program: fmt::Debug + Send + Sync {
    /// Adds its kernels to an engine that a command opened. Gives the backends whose libraries were not imported for it, or
    /// why a library cannot be assumed.
    fn add_kernels(&self, engine: &Engine, libraries: Libraries<'_>) -> Result<Vec<String>, String>;

    /// Makes what runs kernels to measure them, or says why it cannot.
    fn bench(&self) -> Result<Box<dyn Bench>, String>;

    /// The calls a model makes. It is traced, and nothing of it runs.
    fn model_calls(&self, wanted: &ModelSizes) -> Result<ModelCalls, Refusal>;

    /// What torch calls the device that calls are made on which do not say: its accelerator in use, else the CPU. `cuda`
    /// is how many CUDA devices the driver shows. Says why it cannot be told.
    fn device_in_use(&self, cuda: usize) -> Result<String, String>;

    /// The devices torch has of a kind, described: `xpu`, `mps`, `npu`. None where it does not know the kind.
    fn devices_of(&self, torch_type: &str) -> Result<Vec<DeviceSpec>, String>;

    /// Backends and kernels that were never run on the hardware they are for.
    fn unproven(&self) -> Vec<Unproven>;

    /// What became of its own configurations.
    fn reloads(&self) -> Reloads;
}
