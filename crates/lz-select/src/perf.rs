//! What selection may ask about speed. Implemented by the performance database; empty by default.

use lz_model::{Facts, KernelDescriptor, OpIx, Reason};
use serde::Serialize;

/// Where a time comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EstimateKind {
    /// Measured at this very shape bucket.
    Measured,
    /// Interpolated between measured shapes.
    Predicted,
    /// A guess beyond the measured shapes: never trusted.
    Extrapolated,
}

/// Beside which times of a third kernel a time was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Beside {
    /// All in all.
    #[default]
    Whole,
    /// What the host took.
    Host,
    /// What the device took.
    Device,
}

/// How long a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Median time in microseconds.
    pub median_us: f64,
    /// How far off the median may be.
    pub spread_us: f64,
    /// Where the time goes by how the kernel compares with another, which is the same for all candidates that have this
    /// beside the same times: differences among them below it are noise. Less than the spread, since what disturbs one of
    /// them disturbs all.
    pub apart_us: Option<f64>,
    /// Beside which times.
    #[serde(skip)]
    pub beside: Beside,
    /// How many measurements stand behind it.
    pub samples: u32,
    /// Measured or predicted.
    pub kind: EstimateKind,
    /// Whether there is enough behind it to overrule declared priorities.
    pub trusted: bool,
}

/// Read-only knowledge of kernel times.
///
/// `estimate` must be a function of its arguments for as long as the source is part of a
/// snapshot: selection is cached on that promise. It is asked at the representative shape of a
/// cell, so a source that knows an exact shape reports its edges to give it a cell of its own.
pub trait PerfSource: Send + Sync {
    /// The time of `kernel` for the call, if anything is known.
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate>;

    /// Why a kernel must not serve the call, by what was seen of it on this machine: wrong results, a failure at just
    /// this shape. Asked at the call's own shape; changes only at the edges.
    fn verdict(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Reason> {
        let _ = (kernel, facts);
        None
    }

    /// Whether a kernel was captured, replayed and found right in a CUDA graph, for calls that differ from this one in
    /// sizes at most.
    fn proven_in_graphs(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> bool {
        let _ = (kernel, facts);
        false
    }

    /// How many kernels were, for some call.
    fn graph_proofs(&self) -> usize {
        0
    }

    /// Sizes at which the knowledge changes: dimension index, and the first size that is different.
    fn edges(&self, op: OpIx) -> Vec<(usize, i64)>;
}

/// Knows nothing: declared priority decides.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPerfData;

impl PerfSource for NoPerfData {
    fn estimate(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        None
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}
