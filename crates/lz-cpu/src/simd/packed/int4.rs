//! Linear layers with weights of 4-bit integers, two in a byte: eight of them are read as 32 bits, and become float32 in
//! registers one after the other, or bfloat16 for the instructions that multiply it.

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
const CONDITION: &str = "interleave == 4 and group_size in [0, 32, 64, 128, 256]";

/// The kernel, for an instruction set.
pub struct LinearInt4<I>(PhantomData<I>);

impl<I: Tile> NativeKernel for LinearInt4<I> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor { conditions: vec![CONDITION.into()], ..quantized::<I>(op, "linear_int4", FLOATS, DType::U8) }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let dtype = args.args.input(product::INPUT).map_or(DType::F64, |input| input.dtype());
        with_float!(dtype, T => product::run::<Dequantized<I, u8, T>>(args))
    }
}

/// The kernel for bfloat16 alone, by instructions that multiply it.
pub struct LinearInt4Bf16<E>(PhantomData<E>);

impl<E: Engine<Number = bf16, Weight = bf16, Row = bf16, Scratch = ()>> NativeKernel for LinearInt4Bf16<E> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            conditions: vec![CONDITION.into()],
            ..quantized::<E::Isa>(op, "linear_int4", DTypeSet::of(&[DType::Bf16]), DType::U8)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        product::run::<Expanded<E, u8>>(args)
    }
}
