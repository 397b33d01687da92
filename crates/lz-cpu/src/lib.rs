//! Native kernels: Rust on host memory, of two kinds.
//!
//! The *references* define the right result: for every tensor operation of the catalog one readable implementation of its
//! `semantics`, computed in float64 and rounded once, at the end. Every other kernel is compared with them, and they are the last
//! resort when nothing else can run. The kernels in `simd` are the fast ones: written once, and compiled for each instruction set.
//!
//! | | |
//! |---|---|
//! | [`call`] | runs the reference of an operation on named tensors |
//! | [`KERNELS`], [`Builtin`] | the kernels, for those who select and run them themselves |
//! | [`primitives`] | kernels that are no operation of the catalog, for the nodes of graphs |
//! | [`descriptors`], [`backend`] | what they are, as selection sees them |
//!
//! ```
//! use lz_cpu::call;
//! use lz_model::{DType, Tensor};
//!
//! // Three numbers with a mean square of 1, so that normalizing them changes nothing.
//! let x = Tensor::from_f64(DType::F32, &[1, 3], &[1.0, -1.0, 1.0]);
//! let outputs = call("norm.rms", &[("input", x.view())], &[("eps", lz_model::ParamValue::Float(0.0))], None)?;
//! let (name, y) = &outputs[0];
//! assert_eq!((*name, y.to_f64()), ("output", vec![1.0, -1.0, 1.0]));
//! # Ok::<(), lz_cpu::CallRefError>(())
//! ```
//!
//! # Adding a kernel
//!
//! Write a unit struct that implements `NativeKernel` in a file of its own, and add its line to the
//! list in this file. References implement `reference::Reference` instead, which derives the
//! descriptor from the operation's schema.
#![deny(unsafe_code)] // allowed where the instructions of a CPU are named, and for threads

mod call;
#[cfg(test)]
mod every_op;
#[cfg(test)]
#[allow(unsafe_code)]
mod guarded;
mod kernel;
#[allow(unsafe_code)]
pub mod primitives;
mod reference;
mod simd;
#[allow(unsafe_code)]
mod threads;

use lz_model::{BackendDescriptor, Catalog, KernelArgs, KernelDescriptor, KernelError, Platform};

pub use call::{CallRefError, call};
use kernel::NativeKernel;
pub use threads::{OpenMp, threads, use_openmp};

/// The name of the backend all these kernels belong to.
pub const BACKEND: &str = "lz_cpu";

/// The version of the backend and its kernels: this crate's.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Makes the enum, the list and the dispatch out of the lines `Name = type;`.
macro_rules! kernels {
    ($($name:ident = $kernel:ty;)+) => {
        /// A built-in kernel: a closed enum, so that a call is a direct `match` without a vtable.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)] // the names are the documentation
        pub enum Builtin { $($name),+ }

        /// Every built-in kernel, in the order of listings.
        pub static KERNELS: &[Builtin] = &[$(Builtin::$name),+];

        impl Builtin {
            /// The ids of the operations it implements.
            pub fn ops(self) -> &'static [&'static str] {
                match self { $(Builtin::$name => <$kernel>::OPS),+ }
            }

            /// What selection knows of it for one of its [`Builtin::ops`]. Panics on an id the
            /// catalog does not have.
            pub fn descriptor(self, op: &str) -> KernelDescriptor {
                let op = Catalog::get().ops().iter().find(|o| o.id() == op);
                let op = op.unwrap_or_else(|| panic!("{self:?} was asked about an operation the catalog does not have"));
                match self { $(Builtin::$name => <$kernel>::descriptor(op)),+ }
            }

            /// Does the work of a bound and checked call of one of its [`Builtin::ops`].
            pub fn run(self, args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
                match self { $(Builtin::$name => <$kernel as NativeKernel>::run(args)),+ }
            }
        }
    };
}

kernels! {
    DenseAttention = reference::attention::Dense;
    VarlenAttention = reference::varlen::Varlen;
    PagedAttention = reference::paged::Paged;
    MergeStates = reference::merge::Merge;
    LatentAttention = reference::mla::Latent;
    PagedLatentAttention = reference::mla::PagedLatent;
    BlockSparseAttention = reference::sparse::Block;
    VariableBlockSparseAttention = reference::sparse::VariableBlock;
    Embedding = reference::embedding::Lookup;
    Rope = reference::posenc::Rope;
    Alibi = reference::posenc::Alibi;
    RmsNorm = reference::norm::Rms;
    RmsNormPortable = simd::rms_norm::RmsNorm<simd::Portable>;
    RmsNormAvx2 = simd::rms_norm::RmsNorm<simd::Avx2>;
    RmsNormAvx512 = simd::rms_norm::RmsNorm<simd::Avx512>;
    AddRmsNormPortable = simd::add_rms_norm::AddRmsNorm<simd::Portable>;
    AddRmsNormAvx2 = simd::add_rms_norm::AddRmsNorm<simd::Avx2>;
    AddRmsNormAvx512 = simd::add_rms_norm::AddRmsNorm<simd::Avx512>;
    LayerNormPortable = simd::layer_norm::LayerNorm<simd::Portable>;
    LayerNormAvx2 = simd::layer_norm::LayerNorm<simd::Avx2>;
    LayerNormAvx512 = simd::layer_norm::LayerNorm<simd::Avx512>;
    GeluPortable = simd::gelu::Gelu<simd::Portable>;
    GeluAvx2 = simd::gelu::Gelu<simd::Avx2>;
    GeluAvx512 = simd::gelu::Gelu<simd::Avx512>;
    SiluMulPortable = simd::silu_mul::SiluMul<simd::Portable>;
    SiluMulAvx2 = simd::silu_mul::SiluMul<simd::Avx2>;
    SiluMulAvx512 = simd::silu_mul::SiluMul<simd::Avx512>;
    SoftmaxPortable = simd::softmax::Softmax<simd::Portable>;
    SoftmaxAvx2 = simd::softmax::Softmax<simd::Avx2>;
    SoftmaxAvx512 = simd::softmax::Softmax<simd::Avx512>;
    RopePortable = simd::rope::Rope<simd::Portable>;
    RopeAvx2 = simd::rope::Rope<simd::Avx2>;
    RopeAvx512 = simd::rope::Rope<simd::Avx512>;
    QuantizePortable = simd::quantize::Quantize<simd::Portable>;
    QuantizeAvx2 = simd::quantize::Quantize<simd::Avx2>;
    QuantizeAvx512 = simd::quantize::Quantize<simd::Avx512>;
    DequantizePortable = simd::dequantize::Dequantize<simd::Portable>;
    DequantizeAvx2 = simd::dequantize::Dequantize<simd::Avx2>;
    DequantizeAvx512 = simd::dequantize::Dequantize<simd::Avx512>;
    DecodePortable = simd::attention::Decode<simd::Portable>;
    DecodeAvx2 = simd::attention::Decode<simd::Avx2>;
    DecodeAvx512 = simd::attention::Decode<simd::Avx512>;
    DecodePagedPortable = simd::attention::DecodePaged<simd::Portable>;
    DecodePagedAvx2 = simd::attention::DecodePaged<simd::Avx2>;
    DecodePagedAvx512 = simd::attention::DecodePaged<simd::Avx512>;
    PrefillPortable = simd::prefill::Prefill<simd::Portable>;
    PrefillAvx2 = simd::prefill::Prefill<simd::Avx2>;
    PrefillAvx512 = simd::prefill::Prefill<simd::Avx512>;
    PrefillAvx512Bf16 = simd::prefill::bf16::PrefillBf16<simd::prefill::dot_bf16::Dots>;
    PrefillAmx = simd::prefill::bf16::PrefillBf16<simd::prefill::amx::Tiles>;
    PrefillVarlenPortable = simd::prefill::varlen::Varlen<simd::Portable>;
    PrefillVarlenAvx2 = simd::prefill::varlen::Varlen<simd::Avx2>;
    PrefillVarlenAvx512 = simd::prefill::varlen::Varlen<simd::Avx512>;
    PrefillVarlenAvx512Bf16 = simd::prefill::bf16::VarlenBf16<simd::prefill::dot_bf16::Dots>;
    PrefillVarlenAmx = simd::prefill::bf16::VarlenBf16<simd::prefill::amx::Tiles>;
    LinearPortable = simd::linear::Linear<simd::Portable>;
    LinearAvx2 = simd::linear::Linear<simd::Avx2>;
    LinearAvx512 = simd::linear::Linear<simd::Avx512>;
    SampleTopKPortable = simd::sample_topk::TopK<simd::Portable>;
    SampleTopKAvx2 = simd::sample_topk::TopK<simd::Avx2>;
    SampleTopKAvx512 = simd::sample_topk::TopK<simd::Avx512>;
    SampleTopPPortable = simd::sample_topp::TopP<simd::Portable>;
    SampleTopPAvx2 = simd::sample_topp::TopP<simd::Avx2>;
    SampleTopPAvx512 = simd::sample_topp::TopP<simd::Avx512>;
    LinearPackedPortable = simd::packed::LinearPacked<simd::Portable>;
    LinearPackedAvx2 = simd::packed::LinearPacked<simd::Avx2>;
    LinearPackedAvx512 = simd::packed::LinearPacked<simd::Avx512>;
    LinearPackedAvx512Bf16 = simd::packed::LinearPackedBf16<simd::packed::dot_bf16::DotBf16>;
    LinearPackedAmx = simd::packed::LinearPackedBf16<simd::packed::amx::AmxBf16>;
    LinearInt8Portable = simd::packed::integers::LinearIntegers<simd::Portable, i8>;
    LinearInt8Avx2 = simd::packed::integers::LinearIntegers<simd::Avx2, i8>;
    LinearInt8Avx512 = simd::packed::integers::LinearIntegers<simd::Avx512, i8>;
    LinearInt8Amx = simd::packed::integers::LinearIntegersAmx<i8>;
    LinearInt4Portable = simd::packed::integers::LinearIntegers<simd::Portable, u8>;
    LinearInt4Avx2 = simd::packed::integers::LinearIntegers<simd::Avx2, u8>;
    LinearInt4Avx512 = simd::packed::integers::LinearIntegers<simd::Avx512, u8>;
    LinearInt4Amx = simd::packed::integers::LinearIntegersAmx<u8>;
    EmbeddingCopied = simd::embedding::Lookup;
    KvAppendCopied = simd::kv_append::KvAppend;
    LayerNorm = reference::norm::Layer;
    FusedAddRmsNorm = reference::norm::FusedAddRms;
    Linear = reference::mlp::Linear;
    LinearPacked = reference::mlp::LinearPacked;
    LinearQuantized = reference::mlp::LinearQuantized;
    FusedMlp = reference::mlp::Fused;
    SiluMul = reference::activation::SiluMul;
    Softmax = reference::activation::Softmax;
    Gelu = reference::activation::Gelu;
    TopK = reference::sampling::TopK;
    TopP = reference::sampling::TopP;
    Speculative = reference::sampling::Speculative;
    Quantize = reference::quantize::Quantize;
    Dequantize = reference::quantize::Dequantize;
    KvAppend = reference::kv_cache::Append;
    KvCompact = reference::kv_cache::Compact;
}

/// Every kernel with its descriptor, once per operation it implements.
pub fn descriptors() -> impl Iterator<Item = (Builtin, KernelDescriptor)> {
    KERNELS.iter().flat_map(|&kernel| kernel.ops().iter().map(move |op| (kernel, kernel.descriptor(op))))
}

/// The backend these kernels make up.
pub fn backend() -> BackendDescriptor {
    BackendDescriptor::native(BACKEND, VERSION, vec![Platform::Cpu])
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_model::schema::OpKind;

    #[test]
    fn every_tensor_operation_has_exactly_one_reference() {
        for op in Catalog::get().ops().iter().filter(|op| op.schema().kind != OpKind::Tokenization) {
            let references = descriptors().filter(|(_, d)| d.operation == op.id() && d.reference).count();
            assert_eq!(references, 1, "{}", op.id());
        }
    }

    #[test]
    fn every_kernel_names_operations_that_exist() {
        for (kernel, descriptor) in descriptors() {
            let target = Catalog::get().find(&descriptor.operation).unwrap();
            assert_eq!(target.ops.len(), 1, "{kernel:?}");
            assert_eq!(descriptor.backend, backend().name);
        }
    }
}
