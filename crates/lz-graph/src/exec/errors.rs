//! What can go wrong when a graph is compiled and run.

use lz_abi::KernelError;
use lz_abi::program::{ExternalError, LayoutError};

use super::interpreted::RunError;
use crate::plan::InstanceError;

/// Why a graph was not compiled, or did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// The graph has no instance for these sizes.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// The inputs are not what the graph takes.
    #[error(transparent)]
    Inputs(#[from] RunError),
    /// The plan puts a tensor where it may not be. A mistake of the planner or of a kernel's needs.
    #[error("the memory plan is wrong: {0}")]
    Layout(#[from] LayoutError),
    /// The plan has no place for a value that is read. A mistake of the planner.
    #[error("the memory plan has no place for '{0}'")]
    NoPlace(String),
    /// The caller's tensors do not fit.
    #[error(transparent)]
    External(#[from] ExternalError),
    /// A node failed with every kernel.
    #[error("{op} ('{output}'{}): {why}", if origin.is_empty() { String::new() } else { format!(", of {origin}") })]
    Kernel {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        output: String,
        /// Where it stands in the model.
        origin: String,
        /// Why.
        why: Box<KernelError>,
    },
}

/// A kernel that failed, and was replaced by the next candidate of its node from then on.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The value its node makes.
    pub output: String,
    /// The kernel.
    pub kernel: String,
    /// Why.
    pub why: KernelError,
}
