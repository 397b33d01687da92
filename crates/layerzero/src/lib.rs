//! LayerZero: call an operation; the fastest kernel that is proven right for this input on this machine runs, and
//! one can always ask why.
//!
//! The [`Engine`] is the whole of it: it knows the machine, the kernels and the operator's will, decides
//! ([`Engine::which`](Core::which)), explains ([`Engine::explain`](Core::explain)) and runs
//! ([`Engine::dispatch`](Core::dispatch)).
//!
//! ```
//! use layerzero::{Arguments, Engine};
//! use layerzero::model::{DType, ParamValue, Tensor};
//!
//! let engine = Engine::new();
//! let x = Tensor::from_f64(DType::F32, &[2, 4], &[1.0, -1.0, 1.0, -1.0, 2.0, 2.0, 2.0, 2.0]);
//! let done = engine.dispatch("rms_norm", Arguments::new().input("x", x.view()).param("eps", ParamValue::Float(0.0)))?;
//! assert_eq!(done.output().unwrap().to_f64(), [1.0, -1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0]);
//! assert_eq!(done.kernel_id, "lz_cpu.ref.norm.rms");
//! # Ok::<(), layerzero::Error>(())
//! ```
//!
//! A kernel of your own is a descriptor and a function:
//!
//! ```
//! use std::sync::Arc;
//! use layerzero::{Arguments, Engine};
//! use layerzero::model::*;
//!
//! let engine = Engine::new();
//! let mut mine = KernelDescriptor::new("mine.rms", "norm.rms", "mine");
//! mine.platforms = vec![Platform::Cpu];
//! mine.dtypes = DTypeSet::of(&[DType::F32]);
//! mine.layouts = vec![Layout::Contiguous];
//! mine.priority = 80;
//! engine.register(mine, Arc::new(|args: &mut KernelArgs<'_, '_>| {
//!     let _ = args; // write args.outputs[0] here
//!     Err(KernelError::Failed("not written yet".into()))
//! }))?;
//!
//! // It is chosen, fails, and the reference serves the call.
//! let x = Tensor::from_f64(DType::F32, &[1, 2], &[3.0, 3.0]);
//! let done = engine.dispatch("rms_norm", Arguments::new().input("x", x.view()))?;
//! assert_eq!(done.failures[0].kernel_id, "mine.rms");
//! assert_eq!(done.kernel_id, "lz_cpu.ref.norm.rms");
//! # Ok::<(), layerzero::Error>(())
//! ```
#![forbid(unsafe_code)]

mod core;
mod documents;
mod engine;
mod error;
mod files;
pub mod forking;
mod memo;
mod rejections;
mod report;
mod services;
mod warn;

/// What a native kernel is called with.
pub use lz_abi as abi;
/// Settings, files and environment: what the operator wants.
pub use lz_config as config;
/// The threads that native kernels run on.
pub use lz_cpu::{OpenMp, threads as native_threads, use_openmp};
/// How kernels are timed: contests, schedules, workloads.
pub use lz_measure as measure;
/// What things are: operations, devices, kernels, tensors.
pub use lz_model as model;
/// What was measured, kept on disk.
pub use lz_perfdb as perfdb;
/// What keeps a broken kernel from breaking a call: breakers, levels, rollouts, events.
pub use lz_resilience as resilience;
/// How kernels are selected: snapshots, policies, decisions.
pub use lz_select as selection;

pub use core::{
    AllocatorMemory, Arguments, Blame, Caller, Core, Dispatched, Drifted, DynamicKernel, Ending, Executable, Fault,
    KernelInfo, MemorySource, OverlayId, Pieces, Proof, Proven, Scope, Selection, Step, TextCall, WrongResult, adapt,
};
pub use documents::{
    BadBuckets, BucketPlan, Buckets, DispatchTable, Fallback, FallbackMode, Locked, Lockfile, LockfileError,
    LockfileProblem, Mismatch, MismatchKind, PinKind, PinStatus, Plan, PlannedOp, TableError,
};
pub use engine::{
    Check, CheckStatus, Checkpoint, Disagreement, Engine, EngineBuilder, Health, Readiness, SolveRequest, Solved,
    percent, perf, rollout_line,
};
pub use error::{Error, Failure};
pub use files::write_file;
pub use lz_model::{device_name, device_named};
pub use memo::Memo;
pub use rejections::Rejection;
pub use report::{CandidateReport, REPORT_VERSION, RankedBy, ReasonReport, Report, WhyReport};
pub use services::control::Reloads;
pub use services::jit::{Compile, FailedCompile, JitStatus};
pub use services::manifest::{EntryId, MOST_ENTRIES, Manifest, ManifestEntry, ManifestError, ManifestFile};
pub use services::overlays::Overlay;
pub use services::status;
pub use warn::{Warning, WarningHook};

/// The README's code runs as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
