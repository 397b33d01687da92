//! What can go wrong, with enough in it to act on.

use lz_config::ConfigError;
use lz_model::capabilities::CapabilitiesError;
use lz_model::{CallError, KernelError};
use lz_resilience::WatchError;
use lz_select::SnapshotError;

use crate::documents::MismatchKind;
use crate::rejections::{Rejection, summary};

/// Why one kernel did not serve a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The kernel.
    pub kernel_id: String,
    /// What it said.
    pub error: KernelError,
}

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The call is no valid call of the operation.
    #[error(transparent)]
    Call(#[from] CallError),
    /// No kernel can serve the call.
    #[error("no kernel available for '{op}'{}", summary(rejections))]
    NoKernel {
        /// The operation.
        op: &'static str,
        /// Every candidate and why it is out.
        rejections: Vec<Rejection>,
    },
    /// No kernel that is safe inside CUDA graph capture can serve the call.
    #[error("no CUDA-graph-safe kernel available for '{op}'{}", summary(rejections))]
    CudaGraphUnsafe {
        /// The operation.
        op: &'static str,
        /// Every candidate and why it is out.
        rejections: Vec<Rejection>,
    },
    /// Every kernel that was tried failed.
    #[error("'{op}' failed: {}", chain.iter().map(|f| format!("{}: {}", f.kernel_id, f.error)).collect::<Vec<_>>().join("; "))]
    Execution {
        /// The operation.
        op: &'static str,
        /// What was tried, in order, and what each said.
        chain: Vec<Failure>,
    },
    /// No such kernel.
    #[error("unknown kernel '{id}'{}", lz_model::did_you_mean(nearest))]
    UnknownKernel {
        /// The id asked for.
        id: String,
        /// The closest known one.
        nearest: Option<String>,
    },
    /// No such device.
    #[error("there is no device {0}; see 'layerzero doctor'")]
    UnknownDevice(u16),
    /// What was registered or configured does not fit together. Nothing was changed.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Snapshot(Vec<SnapshotError>),
    /// A capabilities document was refused. The backend is disabled.
    #[error("backend '{backend}': {error}")]
    Capabilities {
        /// The backend.
        backend: String,
        /// Why.
        error: CapabilitiesError,
    },
    /// A configuration was refused. Nothing was changed.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration switches explanations off.
    #[error("explanations are switched off by explain_enabled: false")]
    ExplainDisabled,
    /// A dispatch table was refused. Nothing was changed.
    #[error("dispatch table {table} is refused: {why}")]
    TableRefused {
        /// What it is called.
        table: String,
        /// Why.
        why: Box<MismatchKind>,
    },
    /// Files cannot be watched.
    #[error(transparent)]
    Watch(#[from] WatchError),
}

impl Error {
    /// A stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Call(error) => error.code(),
            Error::NoKernel { .. } => "NO_KERNEL_FOUND",
            Error::CudaGraphUnsafe { .. } => "CUDA_GRAPH_UNSAFE",
            Error::Execution { .. } => "KERNEL_EXECUTION_FAILED",
            Error::UnknownKernel { .. } => "UNKNOWN_KERNEL",
            Error::UnknownDevice(_) => "UNKNOWN_DEVICE",
            Error::Snapshot(_) => "INVALID_CONFIGURATION",
            Error::Capabilities { .. } => "INVALID_CAPABILITIES",
            Error::Config(_) => "INVALID_CONFIGURATION",
            Error::ExplainDisabled => "EXPLAIN_DISABLED",
            Error::TableRefused { .. } => "DISPATCH_TABLE_REFUSED",
            Error::Watch(_) => "CANNOT_WATCH",
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            Error::Call(error) => error.hint(),
            Error::NoKernel { .. } => {
                "each reason says what would have to change; 'layerzero explain' shows them all".into()
            }
            Error::CudaGraphUnsafe { rejections, .. } if rejections.iter().any(Rejection::is_unproven_in_graphs) => {
                "prove it before the capture: 'lz.warmup(…)' or 'with lz.capture(): …' makes such a call once; or turn \
                 graph_strict_mode off"
                    .into()
            }
            Error::CudaGraphUnsafe { .. } => {
                "run the call outside capture, or register a kernel proven safe for it".into()
            }
            Error::Execution { chain, .. } if chain.iter().any(|f| f.error.is_callers_fault()) => {
                "the data of the call is invalid; no kernel can serve it".into()
            }
            Error::Execution { .. } => "see each kernel's error; enable fallback to end at the reference".into(),
            Error::UnknownKernel { .. } => "list the kernels with 'layerzero kernels'".into(),
            Error::UnknownDevice(_) => "put the tensors on a device that exists".into(),
            Error::Snapshot(_) => "nothing was changed; fix what is listed and try again".into(),
            Error::Capabilities { .. } => "fix the document; until then the backend stays disabled".into(),
            Error::Config(_) => "nothing was changed; 'layerzero config reference' lists every setting".into(),
            Error::ExplainDisabled => {
                "see who sets it with 'layerzero config show'; 'which' still names the kernel".into()
            }
            Error::TableRefused { .. } => "solve it anew on this machine: 'layerzero solve'".into(),
            Error::Watch(_) => "reload by hand, or by SIGHUP".into(),
        }
    }
}
