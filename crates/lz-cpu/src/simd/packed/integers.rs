//! Linear layers with weights of 8-bit or 4-bit integers. They become float32 in registers, or bfloat16 for AMX.

use std::marker::PhantomData;

use lz_model::{DType, DTypeSet, DimRule, InputRule, KernelArgs, KernelDescriptor, KernelError, Op};

use super::amx::AmxBf16;
use super::dequantized::{Dequantize, Dequantized};
use super::engine::Engine;
use super::expanded::Expanded;
use super::widened::Tile;
use super::{described, product};
use crate::kernel::NativeKernel;
use crate::simd::{FLOATS, Isa, with_float};

/// Rows of bfloat16 below which making bfloat16 of a weight costs more than AMX gains.
const LEAST_ROWS: i64 = 8;

/// The kernel that computes in float32, for an instruction set and a dtype of weights.
pub struct LinearIntegers<I, W>(PhantomData<(I, W)>);

impl<I: Tile, W: Dequantize> NativeKernel for LinearIntegers<I, W> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        integers::<I, W>(op, FLOATS)
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let dtype = args.args.input(product::INPUT).map_or(DType::F64, |input| input.dtype());
        with_float!(dtype, T => product::run::<Dequantized<I, W, T>>(args))
    }
}

/// The kernel for many rows of bfloat16 by AMX, for a dtype of weights.
pub struct LinearIntegersAmx<W>(PhantomData<W>);

impl<W: Dequantize> NativeKernel for LinearIntegersAmx<W> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let described = integers::<<AmxBf16 as Engine>::Isa, W>(op, DTypeSet::of(&[DType::Bf16]));
        let mut dims = described.dims.clone();
        dims.insert("rows".to_owned(), DimRule { min: Some(LEAST_ROWS), ..DimRule::default() });
        // Fewer rows are another kernel's, so that a row's result depends on how many there are.
        KernelDescriptor { dims, batch_invariant: false, ..described }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        product::run::<Expanded<AmxBf16, W>>(args)
    }
}

/// What they take: inputs of these dtypes, and groups that blocks are multiples of.
fn integers<I: Isa, W: Dequantize>(op: &'static Op, dtypes: DTypeSet) -> KernelDescriptor {
    let (weight, scales) = (DTypeSet::of(&[W::DTYPE]), DTypeSet::of(&[DType::F32]));
    let rule = |dtypes: DTypeSet| InputRule { dtypes: Some(dtypes), ..InputRule::default() };
    let inputs = [("input", dtypes), ("weight", weight), ("bias", dtypes), ("scales", scales)];
    KernelDescriptor {
        dtypes,
        inputs: inputs.map(|(name, dtypes)| (name.to_owned(), rule(dtypes))).into(),
        conditions: vec![format!("interleave == {} and group_size in [0, 32, 64, 128, 256]", W::INTERLEAVE)],
        ..described::<I>(op, W::KERNEL, 60)
    }
}
