//! Reasons: why a kernel was not, or could not be, chosen. Data first, a sentence for people second.

use serde::Serialize;

use crate::denial::Denial;
use crate::graph_doubt::GraphDoubt;

/// Why a kernel is out for a call.
///
/// Serialized with its stable code: `{"code": "SM_TOO_OLD", "required": 90, "found": 80}`.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error, strum::VariantNames, strum::IntoStaticStr)]
#[serde(tag = "code", rename_all = "SCREAMING_SNAKE_CASE")]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
#[allow(missing_docs)] // the messages say what the fields are
pub enum Reason {
    // --- hardware -------------------------------------------------------------------------
    /// The kernel runs on another kind of processor.
    #[error("runs on {required}, this is {found}")]
    PlatformMismatch { required: String, found: String },
    /// The GPU is older than the kernel needs.
    #[error("requires SM {required} or newer, have SM {found}")]
    SmTooOld { required: u32, found: u32 },
    /// The GPU is newer than the kernel knows.
    #[error("requires SM below {required}, have SM {found}")]
    SmTooNew { required: u32, found: u32 },
    /// The kernel is written for other GPU generations.
    #[error("written for {required}, this is {found}")]
    GpuGenerationUnsupported { required: String, found: String },
    /// The tensor cores are of an older generation.
    #[error("requires tensor cores of generation {required}, have {found}")]
    TensorCoreGenUnsupported { required: u32, found: u32 },
    /// An instruction set is missing.
    #[error("requires the instruction set {required}, which is not available")]
    InstructionSetMismatch { required: String },
    /// Another capability of the device is missing.
    #[error("requires a device with {required}")]
    DeviceCapabilityUnsupported { required: String },
    /// The driver is too old, too new, or unknown.
    #[error("requires driver {required}, have {found}")]
    DriverVersionUnsupported { required: String, found: String },

    // --- software -------------------------------------------------------------------------
    /// The library is not installed.
    #[error("{library} is not installed")]
    NotInstalled { library: String },
    /// The library is installed but cannot be loaded.
    #[error("{library} cannot be imported: {error}")]
    BackendImportFailed { library: String, error: String },
    /// The kernel, or its whole backend, was never run on the hardware it is for, and nobody asked for it.
    #[error("was never run on the hardware it is for; to use it, name '{name}' in the setting backends.unproven")]
    Unproven { name: String },
    /// A version of something the kernel builds on does not fit.
    #[error("requires {required}, found {found}")]
    VersionUnsupported { required: String, found: String },
    /// The library's capabilities document is of a version this build does not know.
    #[error("capabilities schema {found} is not supported (this build reads {supported})")]
    CapabilitiesSchemaMismatch { found: String, supported: String },
    /// The kernel failed here before and is quarantined.
    #[error("failed before on this machine: {error}")]
    BackendError { error: String },
    /// The kernel's results were compared with the reference's on this machine, and were wrong. `call` is the call it was
    /// compared for, which may be another one of the same operation; `max_error` the largest difference, where it is a
    /// number; `tolerance` the largest difference allowed, relative to the size of the value.
    #[error("gave wrong results when it was checked on this machine, for {call}: {error}")]
    NumericalMismatch { error: String, call: String, max_error: Option<f64>, tolerance: Option<f64> },
    /// The kernel is not built in, was never compared with the reference for calls like this, and cannot be now.
    #[error(
        "is not built in and was not compared with the reference for calls like this, which cannot be done while {busy}"
    )]
    NotVerified { busy: String },
    /// The kernel would have to be compiled first, and that is not allowed now.
    #[error("would have to be compiled first, and compilation is not allowed here")]
    JitDisabled,

    // --- tensors --------------------------------------------------------------------------
    /// A dtype the kernel does not take.
    #[error("'{input}' is {found}, the kernel takes {supported}")]
    DtypeUnsupported { input: String, found: String, supported: String },
    /// A layout the kernel does not take, and may not be given by transposing.
    #[error("'{input}' is {found}, the kernel takes {supported}")]
    LayoutUnsupported { input: String, found: String, supported: String },
    /// A tensor with gaps or transposed axes, and the kernel wants none.
    #[error("'{input}' is not contiguous")]
    NotContiguous { input: String },
    /// Neighbours in the last dimension are not neighbours in memory.
    #[error("the last dimension of '{input}' does not have stride 1")]
    StrideLastDim { input: String },
    /// Data that does not start at a multiple of 16 bytes.
    #[error("'{input}' is not aligned to 16 bytes")]
    NotAligned { input: String },
    /// An optional tensor the kernel cannot use was given.
    #[error("cannot use '{input}'")]
    InputUnsupported { input: String },
    /// A mask the kernel cannot use was given.
    #[error("cannot use a {found} mask; supported: {supported}")]
    AttnMaskUnsupported { found: String, supported: String },
    /// A mask that contradicts another argument.
    #[error("{message}")]
    AttnMaskInvalid { message: String },
    /// A cache in a layout the kernel does not take.
    #[error("'{input}' is laid out {found}, the kernel takes {supported}")]
    KvCacheLayoutMismatch { input: String, found: String, supported: String },
    /// A cache of a dtype the kernel does not take.
    #[error("'{input}' is {found}, the kernel takes {supported}")]
    KvCacheDtypeMismatch { input: String, found: String, supported: String },
    /// The kernel multiplies only weights packed for it.
    #[error("requires weights packed as {supported}; pack them first")]
    PackedWeightsRequired { supported: String },
    /// The weights are packed in a format the kernel does not take.
    #[error("the weights are {found}, the kernel takes {supported}")]
    PackingUnsupported { found: String, supported: String },

    // --- sizes ----------------------------------------------------------------------------
    /// The head dimension is below the smallest one, or is not one of those the kernel was built for.
    #[error("{dim} is {found}, the kernel takes {supported}")]
    HeadDimInvalid { dim: String, found: i64, supported: String },
    /// A head dimension above the largest.
    #[error("{dim} is {found}, at most {max} is supported")]
    HeadDimTooLarge { dim: String, found: i64, max: i64 },
    /// A head dimension that is no multiple of what the kernel needs.
    #[error("{dim} is {found}, which is no multiple of {multiple}")]
    HeadDimAlignment { dim: String, found: i64, multiple: i64 },
    /// A sequence longer than the kernel takes.
    #[error("{dim} is {found}, at most {max} is supported")]
    SeqTooLong { dim: String, found: i64, max: i64 },
    /// Unequal head counts, and the kernel cannot share key/value heads.
    #[error("{heads} query heads over {kv_heads} key/value heads: the kernel cannot share key/value heads")]
    GqaUnsupported { heads: i64, kv_heads: i64 },
    /// Query heads are no multiple of key/value heads.
    #[error("{message}")]
    GqaHeadsMismatch { message: String },
    /// A parameter value the kernel does not take.
    #[error("{param} is {found}, the kernel takes {supported}")]
    ParamUnsupported { param: String, found: String, supported: String },
    /// Any other declared constraint.
    #[error("{constraint} does not hold ({found})")]
    ConstraintFailed { constraint: String, found: String },
    /// More blocks, or more threads or shared memory in one, than the device launches.
    #[error("would need {needed} {what} per block, the device allows {limit}")]
    CudaBlockLimitExceeded { what: String, needed: i64, limit: i64 },
    /// A grid larger than the device launches.
    #[error("would launch a grid of {needed} along {axis}, the device allows {limit}")]
    CudaGridDimExceeded { axis: char, needed: i64, limit: i64 },
    /// More workspace than may be taken.
    #[error("needs {needed} bytes of workspace, {available} are available beyond the headroom")]
    MemoryHeadroomExceeded { needed: i64, available: i64 },

    // --- demands of the call --------------------------------------------------------------
    /// Not known to be safe inside CUDA graph capture.
    #[error("not verified as safe for CUDA graph capture: {why}")]
    CudaGraphUnsafe { why: GraphDoubt },
    /// Results may differ between runs, and the call demands that they do not.
    #[error("is not deterministic")]
    NonDeterministic,
    /// Gradients are wanted and the kernel gives none.
    #[error("has no backward")]
    AutogradUnsupported,
    /// The caller's `torch.nn.attention.sdpa_kernel` does not allow it. `backend` is what the kernel is among torch's
    /// implementations; kernels that are not torch's are OVERRIDEABLE.
    #[error("is {backend} to torch's sdpa_kernel, which allows {allowed} here")]
    SdpaBackendDisabled { backend: String, allowed: String },
    /// Results may depend on the rest of the batch, and the call demands that they do not.
    #[error("results may depend on the rest of the batch")]
    BatchInvarianceRequired,
    /// The kernel computes less exactly than the call demands.
    #[error("computes in accuracy class {provided}, at least {required} is demanded")]
    AccuracyUnsupported { provided: String, required: String },
    /// A quantization format (or its scales) the kernel does not take.
    #[error("does not take {found}; supported: {supported}")]
    QuantFormatUnsupported { found: String, supported: String },
    /// A format less accurate than the call demands.
    #[error("{format} has accuracy rank {rank}, at least {required} is demanded")]
    QuantAccuracyThresholdExceeded { format: String, rank: u8, required: u8 },
    /// The kernel would take the operand in another format of the same width.
    #[error("takes {to}, the operand is {from}: requantize it, or allow requantization")]
    RequantizationRequired { from: String, to: String },
    /// Results may depend on the number of ranks, and the call demands that they do not.
    #[error("results may depend on the number of tensor-parallel ranks")]
    TpInvarianceRequired,
    /// More ranks than the kernel's invariance holds for.
    #[error("invariant up to {max} tensor-parallel ranks, there are {found}")]
    TpSizeExceeded { max: u16, found: u16 },
    /// The kernel reduces in another order than the ranks agreed on.
    #[error("reduces in {found} order, the ranks agreed on {required}")]
    ReductionOrderMismatch { required: String, found: String },
    /// Keys and values are kept in a way the kernel cannot read.
    #[error("cannot read a {found} key/value cache; supported: {supported}")]
    KvStrategyUnsupported { found: String, supported: String },
    /// No virtual address space is left for the cache.
    #[error("the virtual key/value cache needs {needed} bytes of address space, {available} are left")]
    VirtualMemoryExhausted { needed: i64, available: i64 },

    // --- tokenizers -----------------------------------------------------------------------
    /// The kernel serves other tokenizers.
    #[error("serves tokenizer {supported}, asked for {found}")]
    TokenizerIdMismatch { found: String, supported: String },
    /// Another vocabulary.
    #[error("has vocabulary {supported}, asked for {found}")]
    VocabHashMismatch { found: String, supported: String },
    /// Another normalizer.
    #[error("normalizes with {supported}, asked for {found}")]
    NormalizerMismatch { found: String, supported: String },
    /// Other merges.
    #[error("has merges {supported}, asked for {found}")]
    MergesHashMismatch { found: String, supported: String },
    /// Other added tokens.
    #[error("has added tokens {supported}, asked for {found}")]
    AddedTokensMismatch { found: String, supported: String },
    /// Other special tokens.
    #[error("has special tokens {supported}, asked for {found}")]
    SpecialTokensMismatch { found: String, supported: String },

    // --- policy and plans -----------------------------------------------------------------
    /// The operator forbids it.
    #[error("denied by policy: {rule}")]
    PolicyDenied { rule: Denial },
    /// The operator locked another kernel.
    #[error("'{locked}' is locked for this operation")]
    PolicyLocked { locked: String },
    /// The shape lies outside the buckets of a dispatch table.
    #[error("{dim} = {found} lies outside the table's buckets")]
    PlanBucketMiss { dim: String, found: i64 },

    // --- speculative decoding -------------------------------------------------------------
    /// Speculation does not go with pipeline parallelism.
    #[error("speculative decoding does not work with {stages} pipeline stages")]
    SpecDecodePpIncompatible { stages: u16 },
    /// The draft model runs on more ranks than allowed.
    #[error("the draft model runs on {found} ranks, at most {max} are supported")]
    SpecDecodeDraftTpConstraint { found: u16, max: u16 },
    /// Draft and target keep their keys and values in incompatible ways.
    #[error("draft cache is {draft}, target cache is {target}")]
    SpecDecodeKvIncompatible { draft: String, target: String },
    /// An algorithm the kernel pair does not implement.
    #[error("does not implement {found}; supported: {supported}")]
    SpecDecodeAlgorithmUnsupported { found: String, supported: String },
}

/// Every code, in declaration order.
pub const CODES: &[&str] = <Reason as strum::VariantNames>::VARIANTS;

impl Reason {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        self.into()
    }

    /// Whether the kernel is written for a device this one is not: nothing installed or configured changes that.
    pub fn is_other_hardware(&self) -> bool {
        matches!(
            self,
            Reason::PlatformMismatch { .. }
                | Reason::SmTooOld { .. }
                | Reason::SmTooNew { .. }
                | Reason::GpuGenerationUnsupported { .. }
                | Reason::TensorCoreGenUnsupported { .. }
                | Reason::InstructionSetMismatch { .. }
                | Reason::DeviceCapabilityUnsupported { .. }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_what_the_specification_calls_them() {
        assert_eq!(Reason::SmTooOld { required: 90, found: 80 }.code(), "SM_TOO_OLD");
        let json = serde_json::to_string(&Reason::SmTooOld { required: 90, found: 80 }).unwrap();
        assert_eq!(json, r#"{"code":"SM_TOO_OLD","required":90,"found":80}"#);
        let none = Reason::SpecDecodeAlgorithmUnsupported { found: "x".into(), supported: "y".into() };
        assert_eq!(none.code(), *CODES.last().unwrap());
        let graph = Reason::CudaGraphUnsafe { why: GraphDoubt::Allocates { bytes: 4096, limit: 1024 } };
        assert_eq!(graph.code(), "CUDA_GRAPH_UNSAFE");
        let json = serde_json::to_string(&graph).unwrap();
        assert_eq!(json, r#"{"code":"CUDA_GRAPH_UNSAFE","why":{"kind":"allocates","bytes":4096,"limit":1024}}"#);
    }
}
