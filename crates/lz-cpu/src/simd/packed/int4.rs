//! Linear layers with weights of 4-bit integers, two in a byte: eight of them are read as 32 bits, and become float32 in
//! registers one after the other.

use std::marker::PhantomData;

use lz_model::{DType, KernelArgs, KernelDescriptor, KernelError, Op};

use super::dequantized::Dequantized;
use super::widened::Tile;
use super::{product, quantized};
use crate::kernel::NativeKernel;
use crate::simd::with_float;

/// The kernel, for an instruction set.
pub struct LinearInt4<I>(PhantomData<I>);

impl<I: Tile> NativeKernel for LinearInt4<I> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let condition = "interleave == 4 and group_size in [0, 32, 64, 128, 256]";
        KernelDescriptor { conditions: vec![condition.into()], ..quantized::<I>(op, "linear_int4", DType::U8) }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let dtype = args.args.input(product::INPUT).map_or(DType::F64, |input| input.dtype());
        with_float!(dtype, T => product::run::<Dequantized<I, u8, T>>(args))
    }
}
