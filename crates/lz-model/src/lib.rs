//! What things *are*: the vocabulary every other crate speaks.
//!
//! | | |
//! |---|---|
//! | [`DType`], [`Layout`], [`QuantSpec`] | how numbers are stored |
//! | [`DeviceSpec`], [`GenerationTable`] | what hardware can do |
//! | [`OpSchema`], [`Catalog`] | operations: inputs, dimensions, parameters, costs, tolerances |
//! | [`Query`] | one call, reduced to what can decide between kernels |
//! | [`CallSpec`] | one call, written down |
//! | [`KernelDescriptor`], [`BackendDescriptor`], [`capabilities`] | kernels and their constraints |
//! | [`Reason`] | why a kernel is out |
//! | [`Tensor`], [`TensorView`] | host memory, for native kernels |
//!
//! Nothing here decides anything, and nothing here does input or output beyond reading a device file.
//!
//! ```
//! use lz_model::{BindRules, Catalog, DType, NamedCall, TensorMeta};
//!
//! // 32 query heads share 8 key/value heads, many queries: `attention` is grouped-query prefill.
//! let (q, kv) = ([2, 1024, 32, 128], [2, 1024, 8, 128]);
//! let call = NamedCall::new()
//!     .input("query", TensorMeta::new(DType::Bf16, &q))
//!     .input("key", TensorMeta::new(DType::Bf16, &kv))
//!     .input("value", TensorMeta::new(DType::Bf16, &kv));
//! let (_, bound) = Catalog::get().resolve("attention", &call, &BindRules::default(), |_| None).unwrap();
//! let op = Catalog::get().op(bound.query.op());
//! assert_eq!(op.id(), "attention.gqa.prefill");
//! assert_eq!(bound.query.dim(op.dim_index("kv_heads").unwrap()), 8);
//! ```
#![forbid(unsafe_code)]

mod args;
mod bind;
mod call;
pub mod capabilities;
mod catalog;
mod device;
mod dtype;
mod function;
mod generation;
mod isa;
mod kernel;
mod layout;
mod meaning;
mod nearest;
pub mod numeric;
pub mod ops;
mod outputs;
mod param;
mod quant;
mod query;
mod reason;
mod resolve;
pub mod schema;
mod shape;
mod spec;
mod symbol;
mod tensor;
pub mod version;

pub use args::{KernelArgs, KernelError};
pub use bind::Bound;
pub use call::{BindRules, Call, CallError, NamedCall, contradiction, say_the_layout};
pub use catalog::{Catalog, Facts, Op, Target};
pub use device::{CpuCaches, DeviceFileError, DeviceSpec, LaunchLimits, Platform, UnknownPlatform};
pub use dtype::{DType, DTypeSet, UnknownDType};
pub use function::{Argument, ArgumentKind, Function, Signature, Special};
pub use generation::{GenerationRow, GenerationTable};
pub use isa::CpuIsa;
pub use kernel::{
    BackendDescriptor, DimRule, GridRule, InputRule, KernelDescriptor, ParamRule, PluginOrigin, QuantRule, Scalar,
    TokenizerRule, TpRule,
};
pub use layout::{DefaultLayouts, Layout, LayoutVerdict, UnknownLayout, contradicts};
pub use meaning::Meaning;
pub use nearest::{did_you_mean, nearest};
pub use outputs::OutputSpec;
pub use param::{Param, ParamDefault, ParamRole, ParamType, ParamValue};
pub use quant::{Granularity, QuantFormat, QuantFormatSpec, QuantSpec};
pub use query::{
    Context, DeviceIx, KvStrategy, MAX_DIMS, MAX_INPUTS, MAX_PARAMS, OpIx, Query, ReductionOrder, TensorFacts,
    TensorMeta,
};
pub use reason::{CODES, Reason};
pub use resolve::OrderedCall;
pub use schema::OpSchema;
pub use spec::{CallSpec, ParamSpec, TensorSpec};
pub use symbol::Symbol;
pub use tensor::{Extents, Tensor, TensorError, TensorView, TensorViewMut, indices, row_major};
pub use version::Requirement;
