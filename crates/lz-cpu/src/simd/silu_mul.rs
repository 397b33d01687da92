//! Gated SiLU in one pass over memory: out = gate / (1 + exp(-gate)) · up.

use std::marker::PhantomData;

use lz_abi::{Args, Rows, TensorRef};
use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

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
        let (mut x, mut y) = ([0f32; BLOCK], [0f32; BLOCK]);
        for (i, output) in self.output.chunks_exact_mut(self.gate.len()).enumerate() {
            let (gate, up) = (self.gate.get(self.first + i), self.up.get(self.first + i));
            for ((gate, up), output) in gate.chunks(BLOCK).zip(up.chunks(BLOCK)).zip(output.chunks_mut(BLOCK)) {
                let (x, y) = (&mut x[..gate.len()], &mut y[..gate.len()]);
                T::widen(gate, x);
                T::widen(up, y);
                x.iter_mut().zip(&*y).for_each(|(x, up)| *x = silu::<FUSED>(*x) * up);
                T::narrow(x, output);
            }
        }
    }
}

/// x / (1 + exp(-x)); 0 at minus infinity, its limit.
#[inline(always)]
fn silu<const FUSED: bool>(x: f32) -> f32 {
    let found = x / (1.0 + exp::<FUSED>(-x));
    if x == f32::NEG_INFINITY { 0.0 } else { found }
}

/// e^x to about 2 units in the last place, without branches or calls, so that it is computed for many numbers at once.
/// x = n ln 2 + r with an integer n and |r| ≤ ln 2 / 2: e^x = 2^n e^r, and e^r by its series up to r^7. Below -87 it is
/// e^-87, and above 88.72, where float32 ends, infinity.
#[inline(always)]
fn exp<const FUSED: bool>(x: f32) -> f32 {
    /// a · b + c.
    #[inline(always)]
    fn sum<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
        if FUSED { a.mul_add(b, c) } else { a * b + c }
    }
    /// Added to a number below 2^22, it leaves the nearest integer in the lowest bits.
    const INTEGERS: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first of few digits: n times it is exact.
    const LN_2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
    /// ln of the largest float32, rounded down.
    const LARGEST: f32 = 88.722_83;
    let within = if x.is_nan() { x } else { x.clamp(-87.0, LARGEST) };
    let shifted = sum::<FUSED>(within, std::f32::consts::LOG2_E, INTEGERS);
    let n = shifted - INTEGERS;
    let r = sum::<FUSED>(n, -LN_2.1, sum::<FUSED>(n, -LN_2.0, within));
    const FACTORIALS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0];
    let series = FACTORIALS.into_iter().fold(1.0 / 5040.0, |series, factor| sum::<FUSED>(series, r, factor));
    // 2^n by halves: n may be 128, and 2^128 is no float32.
    let n = shifted.to_bits().wrapping_sub(INTEGERS.to_bits());
    let half = (n as i32 >> 1) as u32;
    let power = |n: u32| f32::from_bits(n.wrapping_add(127) << 23);
    if x > LARGEST { f32::INFINITY } else { series * power(half) * power(n.wrapping_sub(half)) }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use super::*;
    use lz_model::{DType, Tensor};
    use proptest::prelude::*;

    #[test]
    fn powers_of_e_are_right_to_the_last_places() {
        for i in -870_000..=887_228 {
            let x = i as f32 * 1e-4;
            let wanted = f64::from(x).exp();
            for got in [exp::<false>(x), exp::<true>(x)].map(f64::from) {
                assert!((got - wanted).abs() <= 2.5e-7 * wanted, "{x}: {got} {wanted}");
            }
        }
        assert!(exp::<true>(f32::NAN).is_nan() && exp::<false>(f32::NAN).is_nan());
        assert!(exp::<true>(-1e30) < 2e-38 && exp::<true>(f32::INFINITY) == f32::INFINITY);
    }

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
