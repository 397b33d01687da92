//! Gated SiLU in one pass over memory: out = gate / (1 + exp(-gate)) · up.

use std::marker::PhantomData;

use lz_abi::{Args, Rows, TensorRef};
use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

use super::exp::exp;
use super::half_floats::Narrow;
use super::{BLOCK, FLOATS, Isa, Work, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;

/// The kernel, for an instruction set.
pub struct SiluMul<I>(PhantomData<I>);

/// The places of its arguments in the schema.
const GATE: usize = 0;
const UP: usize = 1;

impl<I: Isa> NativeKernel for SiluMul<I> {
    const OPS: &'static [&'static str] = &["activation.silu_mul"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            dtypes: FLOATS,
            inputs: floats(&["gate", "up"]),
            requires_last_dim_stride1: true,
            // Where torch's is not faster (`layerzero bench cpu`): its float16 of many numbers is.
            conditions: vec!["gate.dtype != 'float16' or rows * width <= 16384".into()],
            // Above torch's kernels (35 to 50): one pass over memory, where plain torch writes silu(gate) and reads it again.
            ..describe::<I>(op, "silu_mul", 55)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let args = &mut args.args;
        let (gate, up) = args.input(GATE).zip(args.input(UP)).ok_or_else(|| KernelError::Failed("no input".into()))?;
        with_float!(gate.dtype(), T => run::<I, T>(args, gate, up))
    }
}

fn run<I: Isa, T: Narrow>(args: &mut Args<'_, '_>, gate: TensorRef<'_>, up: TensorRef<'_>) -> Result<(), KernelError> {
    check::<I>()?;
    let (gate, up) = (gate.rows::<T>()?, up.rows::<T>()?);
    let (threads, width) = (args.threads(), gate.len());
    let output = args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let per_part = rows_per_thread(gate.count(), size_of_val(output), threads.count());
    threads.each_chunk(output, per_part * width, |part, output| {
        let first = part * per_part;
        if I::FUSED {
            I::vectorize(Gated::<T, true> { gate, up, first, output });
        } else {
            I::vectorize(Gated::<T, false> { gate, up, first, output });
        }
    });
    Ok(())
}

/// Some rows. `FUSED`: as of [`Isa`].
struct Gated<'a, T: Narrow, const FUSED: bool> {
    gate: Rows<'a, T>,
    up: Rows<'a, T>,
    first: usize,
    output: &'a mut [T],
}

impl<T: Narrow, const FUSED: bool> Work for Gated<'_, T, FUSED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut a, mut b, mut y) = ([0f32; BLOCK], [0f32; BLOCK], [0f32; BLOCK]);
        for (i, output) in self.output.chunks_exact_mut(self.gate.len()).enumerate() {
            let (gate, up) = (self.gate.get(self.first + i), self.up.get(self.first + i));
            for ((gate, up), output) in gate.chunks(BLOCK).zip(up.chunks(BLOCK)).zip(output.chunks_mut(BLOCK)) {
                let (gate, up) = (T::wide(gate, &mut a), T::wide(up, &mut b));
                {
                    let y = T::place(output, &mut y);
                    y.iter_mut().zip(gate.iter().zip(up)).for_each(|(y, (gate, up))| *y = silu::<FUSED>(*gate) * up);
                }
                T::settle(&y, output);
            }
        }
    }
}

/// x / (1 + exp(-x)); 0 at minus infinity, its limit.
#[inline(always)]
pub(crate) fn silu<const FUSED: bool>(x: f32) -> f32 {
    let found = x / (1.0 + exp::<FUSED>(-x));
    if x == f32::NEG_INFINITY { 0.0 } else { found }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, Tensor};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, width) in (0i64..6, prop_oneof![0i64..80, 500i64..1100]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (gap, seed) in (0i64..3, any::<u64>()),
        ) {
            let (gate, up) = (drawn(dtype, &[rows, width + gap], seed), drawn(dtype, &[rows, width], seed + 1));
            let inputs = [("gate", strided(&gate, &[rows, width])), ("up", up.view())];
            Agreement::of("activation.silu_mul", "lz_cpu.silu_mul").check(&inputs, &[], None);
        }
    }

    #[test]
    fn the_ends_are_the_references() {
        let gate = [f64::NEG_INFINITY, f64::INFINITY, f64::NAN, -3e38, 3e38, -100.0, -88.5, 0.0];
        let gate = Tensor::from_f64(DType::F32, &[1, 8], &gate);
        // Of the last but one the product is -32.5.
        let up = Tensor::from_f64(DType::F32, &[1, 8], &[2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1e38, 2.0]);
        Agreement::of("activation.silu_mul", "lz_cpu.silu_mul").check(
            &[("gate", gate.view()), ("up", up.view())],
            &[],
            None,
        );
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let (gate, up) = (drawn(DType::F32, &[300, 257], 1), drawn(DType::F32, &[300, 257], 2));
        let inputs = [("gate", gate.view()), ("up", up.view())];
        Agreement::of("activation.silu_mul", "lz_cpu.silu_mul").check(&inputs, &[], None);
    }
}
