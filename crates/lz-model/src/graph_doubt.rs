//! Why a kernel is not taken for safe inside CUDA graphs.

use serde::{Deserialize, Serialize};

/// What is behind `CUDA_GRAPH_UNSAFE`. Serialized with its kind: `{"kind": "allocates", "bytes": 4194304, "limit": 1048576}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum GraphDoubt {
    /// Its capabilities do not say that it is safe: unknown means unsafe.
    #[error("it is not declared safe there")]
    Undeclared,
    /// `graph_strict_mode` is on, and it was not captured and replayed here at sizes like these.
    #[error("it was not captured and replayed here at sizes like these; lz.warmup does that")]
    Unproven,
    /// Its capture, or a replay, keeps memory beyond its results.
    #[error("it keeps {bytes} bytes of memory beyond its results; {limit} are allowed")]
    Allocates {
        /// How much, in bytes.
        bytes: u64,
        /// How much `graph.memory_delta_warning_mb` allows, in bytes.
        limit: u64,
    },
    /// It does what the driver refuses inside a capture: waits for the device, or asks the driver for memory.
    #[error("it waits for the device or asks the driver for memory, which a capture does not allow: {error}")]
    Synchronizes {
        /// What the driver said.
        error: String,
    },
    /// Its replayed result is not the eager one.
    #[error("replayed on other inputs it {error}")]
    Differs {
        /// By how much.
        error: String,
    },
    /// Its capture failed for another reason.
    #[error("its capture failed: {error}")]
    Failed {
        /// What it raised.
        error: String,
    },
}
