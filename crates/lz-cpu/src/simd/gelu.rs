//! Gaussian error linear unit in one pass over memory: x Φ(x), by the error function or its approximation with tanh.

use std::marker::PhantomData;

use lz_abi::{Args, Rows, TensorRef};
use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

use super::exp::{erf, exp, sum};
use super::half_floats::Narrow;
use super::{BLOCK, FLOATS, Isa, Work, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;
use crate::reference::arguments::Arguments;

/// The kernel, for an instruction set.
pub struct Gelu<I>(PhantomData<I>);

/// The place of its argument in the schema.
const INPUT: usize = 0;

impl<I: Isa> NativeKernel for Gelu<I> {
    const OPS: &'static [&'static str] = &["activation.gelu"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            dtypes: FLOATS,
            inputs: floats(&["input"]),
            requires_last_dim_stride1: true,
            // Where torch's is not faster (`layerzero bench cpu`): its error function of many half-precision numbers is.
            conditions: vec!["approximate == 'tanh' or input.dtype == 'float32' or rows * width <= 16384".into()],
            // Above torch's kernels (35 to 50).
            ..describe::<I>(op, "gelu", 55)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let tanh = args.text("approximate") == "tanh";
        let args = &mut args.args;
        let input = args.input(INPUT).ok_or_else(|| KernelError::Failed("no input".into()))?;
        match (I::FUSED, tanh) {
            (true, true) => with_float!(input.dtype(), T => run::<I, T, true, true>(args, input)),
            (true, false) => with_float!(input.dtype(), T => run::<I, T, true, false>(args, input)),
            (false, true) => with_float!(input.dtype(), T => run::<I, T, false, true>(args, input)),
            (false, false) => with_float!(input.dtype(), T => run::<I, T, false, false>(args, input)),
        }
    }
}

fn run<I: Isa, T: Narrow, const FUSED: bool, const TANH: bool>(
    args: &mut Args<'_, '_>,
    input: TensorRef<'_>,
) -> Result<(), KernelError> {
    check::<I>()?;
    let rows = input.rows::<T>()?;
    let (threads, width) = (args.threads(), rows.len());
    let output = args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let per_part = rows_per_thread(rows.count(), size_of_val(output), threads.count());
    threads.each_chunk(output, per_part * width, |part, output| {
        I::vectorize(Activated::<T, FUSED, TANH> { rows, first: part * per_part, output });
    });
    Ok(())
}

/// Some rows. `FUSED`: as of [`Isa`]; `TANH`: by the approximation.
struct Activated<'a, T: Narrow, const FUSED: bool, const TANH: bool> {
    rows: Rows<'a, T>,
    first: usize,
    output: &'a mut [T],
}

impl<T: Narrow, const FUSED: bool, const TANH: bool> Work for Activated<'_, T, FUSED, TANH> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut x, mut y) = ([0f32; BLOCK], [0f32; BLOCK]);
        for (i, output) in self.output.chunks_exact_mut(self.rows.len()).enumerate() {
            let row = self.rows.get(self.first + i);
            for (block, output) in row.chunks(BLOCK).zip(output.chunks_mut(BLOCK)) {
                let x = T::wide(block, &mut x);
                {
                    let y = T::place(output, &mut y);
                    for (y, x) in y.iter_mut().zip(x) {
                        *y = if TANH { by_tanh::<FUSED>(*x) } else { by_erf::<FUSED>(*x) };
                    }
                }
                T::settle(&y, output);
            }
        }
    }
}

/// x/2 (1 + erf(x / sqrt 2)); 0 at minus infinity, its limit.
#[inline(always)]
pub(crate) fn by_erf<const FUSED: bool>(x: f32) -> f32 {
    let half = 0.5 * x;
    // 0 times infinity is NaN.
    let half = if half < f32::MIN { f32::MIN } else { half };
    sum::<FUSED>(half, erf::<FUSED>(x * std::f32::consts::FRAC_1_SQRT_2), half)
}

/// x/2 (1 + tanh(u)) = x / (1 + exp(-2u)) with u = sqrt(2/π) (x + 0.044715 x^3); 0 at minus infinity, its limit.
#[inline(always)]
pub(crate) fn by_tanh<const FUSED: bool>(x: f32) -> f32 {
    /// 2 sqrt(2/π).
    const SLOPE: f32 = 1.595_769;
    let twice = SLOPE * x * sum::<FUSED>(0.044_715, x * x, 1.0);
    let found = x / (1.0 + exp::<FUSED>(-twice));
    if x == f32::NEG_INFINITY { 0.0 } else { found }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    const FORMS: [&str; 2] = ["none", "tanh"];

    fn check(input: &[(&str, lz_model::TensorView<'_>)]) {
        for form in FORMS {
            let params = [("approximate", ParamValue::str(form))];
            Agreement::of("activation.gelu", "lz_cpu.gelu").check(input, &params, None);
        }
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, width) in (0i64..6, prop_oneof![0i64..80, 500i64..1100]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (size, gap, seed) in (prop_oneof![Just(1.0), Just(6.0), Just(1e3)], 0i64..3, any::<u64>()),
        ) {
            let numbers: Vec<f64> = drawn(DType::F32, &[rows * (width + gap)], seed).to_f64().iter().map(|x| x * size).collect();
            let x = Tensor::from_f64(dtype, &[rows, width + gap], &numbers);
            check(&[("input", strided(&x, &[rows, width]))]);
        }
    }

    #[test]
    fn the_ends_are_the_references() {
        let x = [f64::NEG_INFINITY, f64::INFINITY, f64::NAN, -3e38, 3e38, -1e-42, 0.0, -5.5, -13.0, 1e13, -1e13];
        check(&[("input", Tensor::from_f64(DType::F32, &[1, 11], &x).view())]);
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        check(&[("input", drawn(DType::F32, &[300, 257], 1).view())]);
    }
}
