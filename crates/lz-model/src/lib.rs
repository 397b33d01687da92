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

mod accuracy;
mod args;
mod bind;
mod call;
pub mod capabilities;
mod catalog;
mod context;
mod cut;
mod denial;
mod device;
mod function;
mod generation;
mod graph_doubt;
mod ids;
mod isa;
mod kernel;
mod layout;
mod meaning;
pub mod ops;
mod outputs;
mod packing;
mod param;
mod quant;
mod query;
mod reason;
mod resolve;
pub mod schema;
mod sdpa;
mod shape;
mod small;
mod spec;
mod symbol;
mod tensor_meta;
pub mod version;

pub use accuracy::{Accuracy, UnknownAccuracy};
pub use args::{HostCall, KernelArgs};
pub use bind::Bound;
pub use call::{BindRules, Call, CallError, NamedCall, contradiction, say_the_layout};
pub use catalog::{Catalog, Facts, Op, Target};
pub use context::{Context, KvStrategy, ReductionOrder};
pub use cut::{Cut, Uncut};
pub use denial::Denial;
pub use device::{
    CpuCaches, DeviceFileError, DeviceSpec, LaunchLimits, Platform, UnknownPlatform, device_name, device_named,
};
pub use function::{Argument, ArgumentKind, Function, Signature, Special};
pub use generation::{GenerationRow, GenerationTable};
pub use graph_doubt::GraphDoubt;
pub use ids::{DeviceIx, OpIx};
pub use isa::CpuIsa;
pub use kernel::{
    BackendDescriptor, DimRule, GridRule, InputRule, KernelDescriptor, ParamRule, PluginOrigin, Preferred, QuantRule,
    Scalar, TokenizerRule, TpRule, Trust,
};
pub use layout::{DefaultLayouts, Layout, LayoutVerdict, UnknownLayout, contradicts};
pub use lz_abi::{
    Arena, Args, DType, DTypeSet, Extents, KernelError, Tensor, TensorError, TensorMut, TensorRef, TensorView,
    TensorViewMut, Threads, UnknownDType, did_you_mean, indices, nearest, numeric, row_major,
};
pub use meaning::Meaning;
pub use outputs::OutputSpec;
pub use packing::{Packing, UnknownPacking};
pub use param::{Param, ParamDefault, ParamRole, ParamType, ParamValue};
pub use quant::{Granularity, QuantFormat, QuantFormatSpec, QuantSpec};
pub use query::{MAX_DIMS, MAX_INPUTS, MAX_PARAMS, Query};
pub use reason::{CODES, Reason};
pub use resolve::OrderedCall;
pub use schema::OpSchema;
pub use sdpa::{SdpaBackend, SdpaChoice, SdpaRole};
pub use spec::{CallSpec, ParamSpec, TensorSpec};
pub use symbol::Symbol;
pub use tensor_meta::{TensorFacts, TensorMeta};
pub use version::Requirement;
