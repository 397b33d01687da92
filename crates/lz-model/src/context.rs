//! What a call demands beyond its arguments: determinism, graph capture, gradients, parallelism, threads.

use serde::{Deserialize, Serialize};

use crate::accuracy::Accuracy;
use crate::packing::Packing;
use crate::quant::QuantSpec;
use crate::sdpa::SdpaChoice;

/// How keys and values are kept between calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum KvStrategy {
    /// One buffer per sequence.
    Contiguous = 1,
    /// Pages and block tables.
    Paged,
    /// Contiguous virtual addresses over pages mapped on demand.
    Virtual,
    /// One pool for host and device.
    Unified,
}

impl KvStrategy {
    /// The name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            KvStrategy::Contiguous => "contiguous",
            KvStrategy::Paged => "paged",
            KvStrategy::Virtual => "virtual",
            KvStrategy::Unified => "unified",
        }
    }
}

/// The order in which a tensor-parallel reduction adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum ReductionOrder {
    /// Around a ring.
    Ring = 1,
    /// Pairwise.
    Tree,
    /// In rank order, whatever the number of ranks.
    Canonical,
}

impl ReductionOrder {
    /// The name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            ReductionOrder::Ring => "ring",
            ReductionOrder::Tree => "tree",
            ReductionOrder::Canonical => "canonical",
        }
    }
}

/// What a call demands or is surrounded by, beyond its arguments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// Only deterministic kernels.
    pub deterministic: bool,
    /// A CUDA graph is being captured.
    pub capturing: bool,
    /// Gradients are on and some input wants one.
    pub requires_grad: bool,
    /// Results must not depend on the batch a row is in.
    pub batch_invariant: bool,
    /// Results must not depend on the number of tensor-parallel ranks.
    pub tp_invariant: bool,
    /// How keys and values are kept; by the operation when not given.
    pub kv_strategy: Option<KvStrategy>,
    /// Tensor-parallel ranks; 0 and 1 are both "not parallel".
    pub tp_size: u16,
    /// The reduction order the ranks agreed on.
    pub reduction: Option<ReductionOrder>,
    /// How quantized operands are quantized.
    pub quant: Option<QuantSpec>,
    /// The least accuracy rank a quantization format must have.
    pub min_accuracy_rank: u8,
    /// How its weights lie in memory.
    pub packing: Packing,
    /// How exactly it must be computed, at least.
    pub accuracy: Accuracy,
    /// Threads a kernel on the CPU may use; 0 where nobody says. A time that was measured with another number of them
    /// ranks nothing. On other devices it is 0.
    pub threads: u16,
    /// Which of torch's implementations of attention its caller allows (`torch.nn.attention.sdpa_kernel`). Counts for dense
    /// attention alone, which is what torch's function computes.
    pub sdpa: SdpaChoice,
}
