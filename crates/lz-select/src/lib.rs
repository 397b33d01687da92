//! Selection, pure: a query and a snapshot in, a decision out, and a cache in front.
//!
//! - [`Snapshot`] holds everything a decision depends on; [`SnapshotSpec::build`] checks and compiles it.
//! - [`Snapshot::select`] judges every registered kernel ([legality](Candidate::reasons) first, preference after)
//!   and gives a [`Decision`] with all reasons and all scores.
//! - [`SelectionCache`] remembers the [`Chain`] of whole cells of shapes; a remembered chain is always the one
//!   selection would make.
//! - [`PerfSource`] is all it knows of measurements; [`PolicySpec`] of the operator's will. [`analyse`] finds rules
//!   that do nothing, and [`Snapshot::trace`] says what every rule did to a decision.
//!
//! ```
//! use std::sync::Arc;
//! use lz_model::*;
//! use lz_select::*;
//!
//! let mut kernel = KernelDescriptor::new("mine.rms", "norm.rms", "mine");
//! kernel.platforms = vec![Platform::Cpu];
//! kernel.dtypes = DTypeSet::of(&[DType::F32]);
//! kernel.layouts = vec![Layout::Contiguous];
//! kernel.dims.insert("hidden".into(), DimRule { max: Some(8192), ..DimRule::default() });
//!
//! let mut spec = SnapshotSpec { devices: vec![DeviceSpec::new(Platform::Cpu, "here")], ..SnapshotSpec::default() };
//! spec.backend(BackendDescriptor::native("mine", "1.0", vec![Platform::Cpu]));
//! spec.kernels.push(Arc::new(kernel));
//! let snapshot = spec.build(1).unwrap();
//!
//! let shape = [4, 16384];
//! let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape));
//! let (_, bound) = Catalog::get().resolve("rms_norm", &call, &BindRules::default(), |_| None).unwrap();
//! let decision = snapshot.select(&bound.query);
//! assert!(decision.chosen().is_none());
//! assert_eq!(decision.candidates[0].reasons[0].to_string(), "hidden: at most 8192 does not hold (hidden=16384)");
//! ```
#![forbid(unsafe_code)]

pub mod cache;
mod cell;
mod check;
mod compiled;
mod constraint;
mod decision;
mod graphs;
mod memory;
mod perf;
mod pin;
mod policy;
mod proof;
mod rank;
mod restriction;
mod rollout;
mod select;
mod snapshot;
mod sync;
mod warm;
mod why;

pub use cache::{CacheConfig, CacheStats, Clock, ENTRY_OVERHEAD, Invalidate, SelectionCache};
pub use compiled::CompiledKernels;
pub use constraint::BadConstraint;
pub use decision::{Basis, Candidate, Chain, Decision, FALLBACKS, KernelIx, MAX_KERNELS, Terms, Transforms};
pub use graphs::{Captures, Covers};
pub use memory::{DeviceMemory, MemoryRange, MemoryState};
pub use perf::{Compared, Estimate, EstimateKind, NoPerfData, PerfSource, Rival, Side, Sides};
pub use pin::{About, Pin, Pins};
pub use policy::{
    AVOID_POINTS, Action, Condition, Effect, FieldPattern, Finding, FindingKind, KernelName, PREFER_POINTS, Pattern,
    PolicyError, PolicySpec, RuleSpec, RuleTrace, Severity, Standing, analyse, not_installed, refusals,
};
pub use proof::{Evidence, KernelVersion, Proofs, Verify};
pub use restriction::{Restriction, Settled};
pub use rollout::{RolloutRule, Takes};
pub use snapshot::{BackendState, Health, Settings, Snapshot, SnapshotError, SnapshotSpec};
pub use warm::Warm;
pub use why::{Behind, EqualScore, Known, PassedOver, Ranked, Tie, TieBreak, Times, Why};
