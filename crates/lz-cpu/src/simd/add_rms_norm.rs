//! Residual addition and root-mean-square norm in one pass over memory.
//!
//! A row of the sum is made once, in float32, and normalized from there: nothing is rounded in between.

use std::marker::PhantomData;

use lz_abi::{Args, Rows, TensorRef};
use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

use super::half_floats::Narrow;
use super::rms_norm::{as_f32, scale, sum_of_squares};
use super::{BLOCK, FLOATS, Isa, Work, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;

/// The kernel, for an instruction set.
pub struct AddRmsNorm<I>(PhantomData<I>);

/// The places of its arguments in the schema.
const INPUT: usize = 0;
const RESIDUAL: usize = 1;
const WEIGHT: usize = 2;
const EPS: usize = 0;

impl<I: Isa> NativeKernel for AddRmsNorm<I> {
    const OPS: &'static [&'static str] = &["norm.fused_add_rms"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            dtypes: FLOATS,
            inputs: floats(&["input", "residual", "weight"]),
            requires_last_dim_stride1: true,
            // The weight as float32.
            workspace: Some("hidden * 4".into()),
            // Above torch's kernels (35 to 50): it reads a row once from memory, where plain torch adds first and reads the sum again.
            ..describe::<I>(op, "add_rms_norm", 55)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let args = &mut args.args;
        let (input, residual) = (args.input(INPUT), args.input(RESIDUAL));
        let (input, residual) = input.zip(residual).ok_or_else(|| KernelError::Failed("no input".into()))?;
        with_float!(input.dtype(), T => run::<I, T>(args, input, residual))
    }
}

fn run<I: Isa, T: Narrow>(
    args: &mut Args<'_, '_>,
    input: TensorRef<'_>,
    residual: TensorRef<'_>,
) -> Result<(), KernelError> {
    check::<I>()?;
    let (input, residual) = (input.rows::<T>()?, residual.rows::<T>()?);
    let eps = args.param(EPS).as_float().unwrap_or(1e-6);
    let weight = match args.input(WEIGHT) {
        None => None,
        Some(weight) => Some(as_f32(weight, args)?),
    };
    let threads = args.threads();
    let (normed, sums) = args.outputs.split_at_mut(1);
    let (normed, sums) = (normed[0].as_slice::<T>()?, sums[0].as_slice::<T>()?);
    if normed.is_empty() {
        return Ok(());
    }
    let per_part = rows_per_thread(input.count(), size_of_val(normed) * 2, threads.count());
    threads.each_pair((normed, sums), per_part * input.len(), |part, normed, sums| {
        I::vectorize(AddNorm { input, residual, first: part * per_part, weight, eps, normed, sums });
    });
    Ok(())
}

/// Some rows.
struct AddNorm<'a, T: Narrow> {
    input: Rows<'a, T>,
    residual: Rows<'a, T>,
    first: usize,
    weight: Option<&'a [f32]>,
    eps: f64,
    normed: &'a mut [T],
    sums: &'a mut [T],
}

impl<T: Narrow> Work for AddNorm<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let hidden = self.input.len();
        let (mut x, mut y, mut z) = ([0f32; BLOCK], [0f32; BLOCK], [0f32; BLOCK]);
        let rows = self.normed.chunks_exact_mut(hidden).zip(self.sums.chunks_exact_mut(hidden));
        for (i, (normed, sums)) in rows.enumerate() {
            let (a, b) = (self.input.get(self.first + i), self.residual.get(self.first + i));
            let mut squares = 0.0;
            for ((a, b), sums) in a.chunks(BLOCK).zip(b.chunks(BLOCK)).zip(sums.chunks_mut(BLOCK)) {
                let x = &mut x[..a.len()];
                added(a, b, x, (&mut y, &mut z));
                squares += sum_of_squares(x);
                T::narrow(x, sums);
            }
            let factor = 1.0 / (squares / hidden as f64 + self.eps).sqrt();
            for (n, ((a, b), normed)) in a.chunks(BLOCK).zip(b.chunks(BLOCK)).zip(normed.chunks_mut(BLOCK)).enumerate()
            {
                let x = &mut x[..a.len()];
                added(a, b, x, (&mut y, &mut z));
                let weight = self.weight.map(|w| &w[n * BLOCK..n * BLOCK + a.len()]);
                scale(x, weight, factor, T::place(normed, &mut y));
                T::settle(&y, normed);
            }
        }
    }
}

/// The sum of two pieces of a row, into `x`; the others are scratch.
#[inline(always)]
fn added<T: Narrow>(a: &[T], b: &[T], x: &mut [f32], (y, z): (&mut [f32], &mut [f32])) {
    let (a, b) = (T::wide(a, y), T::wide(b, z));
    x.iter_mut().zip(a.iter().zip(b)).for_each(|(x, (a, b))| *x = a + b);
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, hidden) in (0i64..6, prop_oneof![0i64..80, 500i64..1100]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            weight in prop_oneof![Just(None), Just(Some(DType::F32)), Just(Some(DType::Bf16))],
            (gap, seed) in (0i64..3, any::<u64>()),
        ) {
            let (a, b) = (drawn(dtype, &[rows, hidden + gap], seed), drawn(dtype, &[rows, hidden], seed + 1));
            let weight = weight.map(|dtype| drawn(dtype, &[hidden], seed + 2));
            let mut inputs = vec![("input", strided(&a, &[rows, hidden])), ("residual", b.view())];
            inputs.extend(weight.as_ref().map(|weight| ("weight", weight.view())));
            Agreement::of("norm.fused_add_rms", "lz_cpu.add_rms_norm").check(&inputs, &[], None);
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let (a, b) = (drawn(DType::F32, &[300, 257], 1), drawn(DType::F32, &[300, 257], 2));
        let eps = [("eps", ParamValue::Float(1e-5))];
        let agreement = Agreement::of("norm.fused_add_rms", "lz_cpu.add_rms_norm");
        agreement.check(&[("input", a.view()), ("residual", b.view())], &eps, None);
    }

    #[test]
    fn the_norm_is_of_the_sum_before_it_is_rounded() {
        // 1 + 2^-9 is no bfloat16 number: rounded first, both numbers would be 1.
        let a = Tensor::from_f64(DType::Bf16, &[1, 2], &[1.0, 1.0]);
        let b = Tensor::from_f64(DType::Bf16, &[1, 2], &[2f64.powi(-9) * 3.0, -2f64.powi(-9) * 3.0]);
        let agreement = Agreement::of("norm.fused_add_rms", "lz_cpu.add_rms_norm");
        agreement.check(&[("input", a.view()), ("residual", b.view())], &[], None);
    }
}
