//! Linear layers with weights of 8-bit integers: they are read as bytes, and become float32 in registers.

use std::marker::PhantomData;

use lz_model::{DType, KernelArgs, KernelDescriptor, KernelError, Op};

use super::dequantized::Dequantized;
use super::widened::Tile;
use super::{product, quantized};
use crate::kernel::NativeKernel;
use crate::simd::with_float;

/// The kernel, for an instruction set.
pub struct LinearInt8<I>(PhantomData<I>);

impl<I: Tile> NativeKernel for LinearInt8<I> {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let condition = "interleave == 1 and group_size in [0, 32, 64, 128, 256]";
        KernelDescriptor { conditions: vec![condition.into()], ..quantized::<I>(op, "linear_int8", DType::I8) }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let dtype = args.args.input(product::INPUT).map_or(DType::F64, |input| input.dtype());
        with_float!(dtype, T => product::run::<Dequantized<I, i8, T>>(args))
    }
}
