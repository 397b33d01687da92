//! Kernels that are no operation of the catalog: what the nodes of a graph run besides those.
//!
//! A primitive takes plain [`lz_abi::Args`]: tensors and parameters by their place. The file of each says which places it has.
//!
//! | | |
//! |---|---|
//! | [`elementwise`] | sums, products, comparisons, functions, selection, conversion, constants |
//! | [`copy`] | strided copies, permutation, slices, concatenation, padding, ranges, triangles |
//! | [`gather`] | elements and rows by their indices |
//! | [`reduce`] | sums, extremes and their places, along axes |
//! | [`matmul`] | products of matrices, batched, with an epilogue |
//! | [`doubles`] | softmax, norms and attention of float64 |
//! | [`conv`], [`pool`] | convolutions, and the largest or the mean of windows, over one or two axes |
//!
//! What holds for all of them:
//!
//! - Inputs may have any strides, 0 included. Outputs may, where the file does not say that they are row-major.
//! - In place: an input that is [`lz_abi::TensorRef::ABSENT`] is the output, which holds its old contents. No other input may
//!   share memory with the output.
//! - A parameter that is [`lz_abi::Param::None`], or left out at the end of the list, has its default.
//! - The kind of an operation is a parameter: the number of a variant (`BinaryOp::Add.param()`), or its name as text, which
//!   takes longer to look up.
//! - `run` allocates nothing. Scratch memory comes from the workspace, as much as [`Primitive::scratch`] says.
//! - Four-bit dtypes are not taken; tensors have at most [`RANK`] axes after those that can be merged are.
//!
//! ```
//! use lz_abi::{Args, DType, Tensor, TensorRef, Workspace};
//! use lz_cpu::primitives::{BinaryOp, Primitive};
//!
//! let x = Tensor::from_f64(DType::F32, &[2, 2], &[1.0, 2.0, 3.0, 4.0]);
//! let row = Tensor::from_f64(DType::F32, &[2], &[10.0, 20.0]);
//! let mut y = Tensor::zeros(DType::F32, &[2, 2]);
//! let (x, row, mut out) = (x.view(), row.view(), y.view_mut());
//! let inputs = [x.as_ref(), row.as_ref()];
//! let (mut outputs, params) = ([out.as_mut()], [BinaryOp::Add.param()]);
//! let mut workspace = Workspace::none();
//! Primitive::Binary.run(&mut Args::new(&inputs, &mut outputs, &params, &[], &mut workspace))?;
//! assert_eq!(y.to_f64(), [11.0, 22.0, 13.0, 24.0]);
//! # Ok::<(), lz_abi::KernelError>(())
//! ```

use std::sync::OnceLock;

use lz_abi::{Args, DType, KernelError, Param};
use lz_model::CpuIsa;

use crate::simd::{Avx2, Avx512, Isa, Portable};

#[cfg(test)]
mod checking;
pub mod conv;
pub mod copy;
pub mod doubles;
pub mod elementwise;
pub mod gather;
mod kinds;
mod loops;
pub mod matmul;
pub mod pool;
pub mod reduce;
mod windows;

pub use elementwise::{BinaryOp, UnaryOp};
pub use loops::RANK;
pub use matmul::Activation;
pub use pool::PoolOp;
pub use reduce::ReduceOp;

/// Dtype and sizes of an input, without its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta<'a> {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: &'a [i64],
}

/// Instruction sets the primitives are compiled for, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// What every CPU of the architecture has.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl InstructionSet {
    /// Every one.
    pub const ALL: [InstructionSet; 3] = [InstructionSet::Portable, InstructionSet::Avx2, InstructionSet::Avx512];

    /// The features a device must list.
    pub fn features(self) -> &'static [&'static str] {
        match self {
            InstructionSet::Portable => Portable::FEATURES,
            InstructionSet::Avx2 => Avx2::FEATURES,
            InstructionSet::Avx512 => Avx512::FEATURES,
        }
    }

    /// The best one this CPU has. Found once.
    pub fn native() -> InstructionSet {
        static NATIVE: OnceLock<InstructionSet> = OnceLock::new();
        *NATIVE.get_or_init(|| {
            if crate::simd::check::<Avx512>().is_ok() {
                InstructionSet::Avx512
            } else if crate::simd::check::<Avx2>().is_ok() {
                InstructionSet::Avx2
            } else {
                InstructionSet::Portable
            }
        })
    }

    /// The best one this CPU has within a level.
    pub fn within(level: CpuIsa) -> InstructionSet {
        let allowed = |set: &InstructionSet| set.features().iter().all(|feature| level.allows(feature));
        let here = InstructionSet::ALL.into_iter().rev().filter(|&set| set <= InstructionSet::native());
        here.into_iter().find(allowed).unwrap_or(InstructionSet::Portable)
    }

    /// Whether this CPU has it.
    pub fn is_here(self) -> bool {
        self <= InstructionSet::native()
    }
}

/// What a primitive is. Implementors are unit structs.
trait Kernel {
    /// Does the work. This CPU has the instructions of `I`.
    fn run<I: matmul::Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError>;

    /// Bytes of scratch memory at most, for inputs of these sizes or smaller ones.
    fn scratch(inputs: &[Option<Meta<'_>>], params: &[Param], threads: usize) -> usize {
        let _ = (inputs, params, threads);
        0
    }
}

/// Makes the enum, the list and the dispatch out of the lines `Name "name" = type;`.
macro_rules! primitives {
    ($($(#[$doc:meta])+ $variant:ident $name:literal = $kernel:ty;)+) => {
        /// A primitive: a closed enum, so that a call is a direct `match`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Primitive { $($(#[$doc])+ $variant),+ }

        /// Every primitive, in the order of listings.
        pub static PRIMITIVES: &[Primitive] = &[$(Primitive::$variant),+];

        impl Primitive {
            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $(Primitive::$variant => $name),+ }
            }

            /// Bytes of scratch memory that calls with inputs of these sizes, or smaller ones, take at most on so many threads.
            pub fn scratch(self, inputs: &[Option<Meta<'_>>], params: &[Param], threads: usize) -> usize {
                match self { $(Primitive::$variant => <$kernel>::scratch(inputs, params, threads)),+ }
            }

            /// Does the work with an instruction set, which must not be better than [`InstructionSet::native`].
            pub fn run_on(self, set: InstructionSet, args: &mut Args<'_, '_>) -> Result<(), KernelError> {
                if !set.is_here() {
                    return Err(KernelError::Failed(format!("this CPU lacks one of {}", set.features().join(", "))));
                }
                match set {
                    InstructionSet::Portable => match self { $(Primitive::$variant => <$kernel>::run::<Portable>(args)),+ },
                    InstructionSet::Avx2 => match self { $(Primitive::$variant => <$kernel>::run::<Avx2>(args)),+ },
                    InstructionSet::Avx512 => match self { $(Primitive::$variant => <$kernel>::run::<Avx512>(args)),+ },
                }
            }
        }
    };
}

primitives! {
    /// A function of two tensors, element by element: [`elementwise::binary`].
    Binary "binary" = elementwise::binary::Binary;
    /// A function of one tensor, element by element: [`elementwise::unary`].
    Unary "unary" = elementwise::unary::Unary;
    /// One of two tensors, element by element: [`elementwise::select`].
    Where "where" = elementwise::select::Where;
    /// Another dtype: [`elementwise::cast`].
    Cast "cast" = elementwise::cast::Cast;
    /// One number everywhere: [`elementwise::cast`].
    Fill "fill" = elementwise::cast::Fill;
    /// A strided copy, with broadcasting: [`copy`].
    Copy "copy" = copy::Copy;
    /// A copy with axes in another order: [`copy`].
    Permute "permute" = copy::Permute;
    /// A copy of a part of each axis: [`copy`].
    Slice "slice" = copy::Slice;
    /// Several tensors along an axis: [`copy::concat`].
    Concat "concat" = copy::concat::Concat;
    /// A tensor with a margin: [`copy::concat`].
    Pad "pad" = copy::concat::Pad;
    /// Numbers that are evenly apart: [`copy::iota`].
    Iota "iota" = copy::iota::Iota;
    /// The elements above or below a diagonal: [`copy::iota`].
    Triangle "triangle" = copy::iota::Triangle;
    /// Slices along an axis by their indices: [`gather`].
    IndexSelect "index_select" = gather::IndexSelect;
    /// Elements along an axis by their indices: [`gather`].
    Gather "gather" = gather::Gather;
    /// Slices put where indices say, along an axis: [`gather`].
    IndexCopy "index_copy" = gather::IndexCopy;
    /// Elements put where indices say, along an axis: [`gather`].
    Scatter "scatter" = gather::Scatter;
    /// Slices by indices of several axes: [`gather`].
    Index "index" = gather::Index;
    /// Slices put where indices of several axes say, or added: [`gather`].
    IndexPut "index_put" = gather::IndexPut;
    /// Sums and the like along axes: [`reduce`].
    Reduce "reduce" = reduce::Reduce;
    /// The place of the largest or smallest element: [`reduce`].
    ArgReduce "arg_reduce" = reduce::ArgReduce;
    /// Sums up to each element: [`reduce`].
    Cumsum "cumsum" = reduce::Cumsum;
    /// A product of matrices: [`matmul`].
    Matmul "matmul" = matmul::Matmul;
    /// A weight in panels, for products: [`matmul`].
    Pack "pack" = matmul::Pack;
    /// Attention of float64: [`doubles::attention`].
    Attention "attention" = doubles::attention::Attention;
    /// Softmax of rows of float64: [`doubles::rows`].
    Softmax "softmax" = doubles::rows::Softmax;
    /// A norm of rows of float64: [`doubles::rows`].
    LayerNorm "layer_norm" = doubles::rows::LayerNorm;
    /// A norm of rows of float64 by the root mean square: [`doubles::rows`].
    RmsNorm "rms_norm" = doubles::rows::RmsNorm;
    /// A convolution: [`conv`].
    Conv "conv" = conv::Conv;
    /// The largest or the mean of windows: [`pool`].
    Pool "pool" = pool::Pool;
}

impl Primitive {
    /// By its name.
    pub fn named(name: &str) -> Option<Primitive> {
        PRIMITIVES.iter().copied().find(|primitive| primitive.name() == name)
    }

    /// Does the work with the best instructions of this CPU.
    #[inline]
    pub fn run(self, args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        self.run_on(InstructionSet::native(), args)
    }
}

/// A parameter by its place; `None` where the list ends before it.
fn param(args: &Args<'_, '_>, at: usize) -> Param {
    args.params().get(at).copied().unwrap_or(Param::None)
}

/// An error that says what is wrong with a call.
fn wrong<T>(what: impl Into<String>) -> Result<T, KernelError> {
    Err(KernelError::Failed(what.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_lead_back() {
        for &primitive in PRIMITIVES {
            assert_eq!(Primitive::named(primitive.name()), Some(primitive));
        }
        assert_eq!(Primitive::named("nothing"), None);
    }

    #[test]
    fn a_level_limits_the_instruction_set() {
        assert_eq!(InstructionSet::within(CpuIsa::Baseline), InstructionSet::Portable);
        assert_eq!(InstructionSet::within(CpuIsa::Native), InstructionSet::native());
        assert!(InstructionSet::within(CpuIsa::Avx2) <= InstructionSet::Avx2);
    }
}
