//! Linear layers with weights of 8-bit integers: they are read as bytes, and become float32 in registers, or bfloat16 for
//! the instructions that multiply it.

use std::marker::PhantomData;

use half::bf16;
use lz_model::{DType, DTypeSet, KernelArgs, KernelDescriptor, KernelError, Op};

use super::dequantized::Dequantized;
use super::engine::Engine;
use super::expanded::Expanded;
use super::widened::Tile;
use super::{product, quantized};
use crate::kernel::NativeKernel;
use crate::simd::{FLOATS, with_float};

/// What the kernels take.
const CONDITION: &str = "interleave == 1 and group_size in [0, 32, 64, 128, 256]";

/// The kernel, for an instruction set.
pub struct LinearInt8<I>(PhantomData<I>);

impl<I: Tile> NativeKernel for LinearInt8<I> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor { conditions: vec![CONDITION.into()], ..quantized::<I>(op, "linear_int8", FLOATS, DType::I8) }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let dtype = args.args.input(product::INPUT).map_or(DType::F64, |input| input.dtype());
        with_float!(dtype, T => product::run::<Dequantized<I, i8, T>>(args))
    }
}

/// The kernel for bfloat16 alone, by instructions that multiply it.
pub struct LinearInt8Bf16<E>(PhantomData<E>);

impl<E: Engine<Number = bf16, Weight = bf16, Row = bf16, Scratch = ()>> NativeKernel for LinearInt8Bf16<E> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            conditions: vec![CONDITION.into()],
            ..quantized::<E::Isa>(op, "linear_int8", DTypeSet::of(&[DType::Bf16]), DType::I8)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        product::run::<Expanded<E, i8>>(args)
    }
}
