//! LayerZero: call an operation; the fastest kernel that is proven right for this input on this machine runs, and
//! one can always ask why.
//!
//! The [`Engine`] is the whole of it: it knows the machine, the kernels and the operator's will, decides
//! ([`Engine::which`]), explains ([`Engine::explain`]) and runs ([`Engine::dispatch`]).
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

pub mod adapt;
mod ask;
mod baked;
mod change;
mod checkpoint;
mod control;
mod dispatch;
mod engine;
mod errands;
mod error;
mod executable;
mod failures_file;
pub mod forking;
mod guard;
mod health;
mod jit;
mod kept_file;
mod lockfile;
mod manifest;
mod memo;
mod names;
mod overlay;
pub mod perf;
mod pinned;
mod proof;
mod readiness;
mod rejections;
mod report;
mod scope;
mod serve;
pub mod status;
mod table;
mod text;
mod trial;
mod warm_file;
mod warn;
mod written;

/// What a native kernel is called with.
pub use lz_abi as abi;
/// Settings, files and environment: what the operator wants.
pub use lz_config as config;
pub use lz_cpu::threads as native_threads;
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

pub use ask::{KernelInfo, Selection, Step};
pub use baked::Baked;
pub use checkpoint::Checkpoint;
pub use control::Reloads;
pub use dispatch::{Arguments, Dispatched};
pub use engine::{Engine, EngineBuilder};
pub use error::{Error, Failure, Rejection};
pub use executable::{DynamicKernel, Executable};
pub use guard::Fault;
pub use health::{Health, percent, rollout_line};
pub use jit::{Compile, FailedCompile, JitStatus, device_name, device_named};
pub use lockfile::{Locked, Lockfile, LockfileError, LockfileProblem};
pub use manifest::{EntryId, MOST_ENTRIES, Manifest, ManifestEntry, ManifestError, ManifestFile};
pub use memo::Memo;
pub use overlay::{Overlay, OverlayId};
pub use pinned::{Mismatch, MismatchKind, PinKind, PinStatus};
pub use proof::{Proof, WrongResult};
pub use readiness::{Check, CheckStatus, Readiness};
pub use report::{CandidateReport, REPORT_VERSION, RankedBy, ReasonReport, Report, WhyReport};
pub use scope::Scope;
pub use serve::{Blame, Caller, Ending, Proven};
pub use table::solve::{Disagreement, SolveRequest, Solved};
pub use table::{BadBuckets, BucketPlan, Buckets, DispatchTable, Fallback, FallbackMode, PlannedOp, TableError};
pub use text::TextCall;
pub use warn::{Warning, WarningHook};
pub use written::write_file;

/// The README's code runs as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
