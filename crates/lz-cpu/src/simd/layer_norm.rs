//! Layer norm in one pass over memory: out = (x - mean) / sqrt(variance + eps) · weight + bias.
//!
//! A row is read twice, and the second time from the cache: once for its sums, once to be scaled.

use std::marker::PhantomData;

use lz_abi::{Args, Rows, TensorRef};
use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

use super::half_floats::Narrow;
use super::rms_norm::{PLAIN, as_f32, by_halves};
use super::{BLOCK, FLOATS, Isa, Work, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;

/// The kernel, for an instruction set.
pub struct LayerNorm<I>(PhantomData<I>);

/// The places of its arguments in the schema.
const INPUT: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;
const EPS: usize = 0;

impl<I: Isa> NativeKernel for LayerNorm<I> {
    const OPS: &'static [&'static str] = &["norm.layer"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            dtypes: FLOATS,
            inputs: floats(&["input", "weight", "bias"]),
            requires_last_dim_stride1: true,
            // The weight and the bias as float32; each begins at a multiple of 64 bytes.
            workspace: Some("hidden * 8 + 64".into()),
            // Where torch's is not faster (`layerzero bench cpu`): its float16 is, and its float32 from memory.
            conditions: vec![
                "input.dtype != 'float16' or rows == 1".into(),
                "input.dtype != 'float32' or rows * hidden <= 524288".into(),
            ],
            // Above torch's kernels (35 to 50): few rows cost less than the way to torch's.
            ..describe::<I>(op, "layer_norm", 55)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let args = &mut args.args;
        let input = args.input(INPUT).ok_or_else(|| KernelError::Failed("no input".into()))?;
        with_float!(input.dtype(), T => run::<I, T>(args, input))
    }
}

fn run<I: Isa, T: Narrow>(args: &mut Args<'_, '_>, input: TensorRef<'_>) -> Result<(), KernelError> {
    check::<I>()?;
    let rows = input.rows::<T>()?;
    let hidden = rows.len();
    let eps = args.param(EPS).as_float().unwrap_or(1e-5);
    let mut wide = |at: usize| match args.input(at) {
        None => Ok(None),
        Some(given) => as_f32(given, args).map(Some),
    };
    let (weight, bias) = (wide(WEIGHT)?, wide(BIAS)?);
    let threads = args.threads();
    let output = args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let per_part = rows_per_thread(rows.count(), size_of_val(output), threads.count());
    threads.each_chunk(output, per_part * hidden, |part, output| {
        I::vectorize(Norm { rows, first: part * per_part, weight, bias, eps, output });
    });
    Ok(())
}

/// Some rows.
struct Norm<'a, T: Narrow> {
    rows: Rows<'a, T>,
    first: usize,
    weight: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    eps: f64,
    output: &'a mut [T],
}

impl<'a, T: Narrow> Work for Norm<'a, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut x, mut y) = ([0f32; BLOCK], [0f32; BLOCK]);
        let hidden = self.rows.len();
        for (i, output) in self.output.chunks_exact_mut(hidden).enumerate() {
            let row = self.rows.get(self.first + i);
            let moments = moments(row, &mut x);
            let scale = Scale::new(moments.mean, moments.variance, self.eps);
            for (b, (block, output)) in row.chunks(BLOCK).zip(output.chunks_mut(BLOCK)).enumerate() {
                let x = T::wide(block, &mut x);
                let of_block = |all: &'a [f32]| &all[b * BLOCK..b * BLOCK + block.len()];
                let (weight, bias) = (self.weight.map(of_block), self.bias.map(of_block));
                scale.apply(x, weight, bias, T::place(output, &mut y));
                T::settle(&y, output);
            }
        }
    }
}

/// The mean and the variance of a row.
struct Moments {
    mean: f64,
    variance: f64,
}

/// Of differences to the mean of the first numbers, so that a mean far from 0 costs no digits of the variance. Sums of a block
/// are float32 numbers if these have room for the squares, and float64 if not.
#[inline(always)]
fn moments<T: Narrow>(row: &[T], buffer: &mut [f32; BLOCK]) -> Moments {
    /// How many numbers are enough to be near the mean.
    const FIRST: usize = 64;
    let start = T::wide(&row[..FIRST.min(row.len())], buffer);
    let near = (sums(start, 0.0).0 / start.len() as f64) as f32;
    let mut all = (0.0, 0.0);
    for block in row.chunks(BLOCK) {
        let found = sums(T::wide(block, buffer), near);
        all = (all.0 + found.0, all.1 + found.1);
    }
    let n = row.len() as f64;
    // A block of the least squares that are not rounded to few digits has sums of 1e-30, one of the largest of 1e34.
    if near.is_finite() && (1e-28..1e34).contains(&all.1) {
        return Moments::new(f64::from(near), (all.0 / n, all.1 / n));
    }
    let near = f64::from(T::wide(&row[..1], buffer)[0]);
    let mut all = (0.0, 0.0);
    for block in row.chunks(BLOCK) {
        for x in T::wide(block, buffer) {
            let difference = f64::from(*x) - near;
            all = (all.0 + difference, all.1 + difference * difference);
        }
    }
    Moments::new(near, (all.0 / n, all.1 / n))
}

impl Moments {
    /// Of the mean differences to a number, and the mean of their squares.
    fn new(near: f64, (offset, squares): (f64, f64)) -> Moments {
        let variance = squares - offset * offset;
        // Rounding may leave it below 0; a NaN stays one.
        Moments { mean: near + offset, variance: if variance < 0.0 { 0.0 } else { variance } }
    }
}

/// The sums of x - near and of its squares over at most [`BLOCK`] numbers.
#[inline(always)]
fn sums(x: &[f32], near: f32) -> (f64, f64) {
    const LANES: usize = 32;
    let (mut sums, mut squares) = ([0f32; LANES], [0f32; LANES]);
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for ((sum, squares), x) in sums.iter_mut().zip(&mut squares).zip(chunk) {
            let difference = x - near;
            *sum += difference;
            *squares += difference * difference;
        }
    }
    for ((sum, squares), x) in sums.iter_mut().zip(&mut squares).zip(rest) {
        let difference = x - near;
        *sum += difference;
        *squares += difference * difference;
    }
    (by_halves(sums.map(f64::from)), by_halves(squares.map(f64::from)))
}

/// How the numbers of a row become those of the result.
struct Scale {
    /// The mean as two float32 numbers: what is left of it beyond the first one, and the first.
    mean: (f32, f32),
    wide_mean: f64,
    factor: f64,
    /// Whether float32 has room for the differences and the products: else they are formed in float64.
    plain: bool,
}

impl Scale {
    #[inline(always)]
    fn new(mean: f64, variance: f64, eps: f64) -> Scale {
        let factor = 1.0 / (variance + eps).sqrt();
        let first = mean as f32;
        let rest = (mean - f64::from(first)) as f32;
        Scale { mean: (first, rest), wide_mean: mean, factor, plain: PLAIN.contains(&factor) && mean.abs() < 1e30 }
    }

    /// y = (x - mean) · factor · weight + bias.
    #[inline(always)]
    fn apply(&self, x: &[f32], weight: Option<&[f32]>, bias: Option<&[f32]>, y: &mut [f32]) {
        if !self.plain {
            let of = |all: Option<&[f32]>, i: usize, otherwise| all.map_or(otherwise, |all| f64::from(all[i]));
            for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
                let scaled = (f64::from(*x) - self.wide_mean) * self.factor;
                *y = (scaled * of(weight, i, 1.0) + of(bias, i, 0.0)) as f32;
            }
            return;
        }
        let factor = self.factor as f32;
        // x - mean.0 is exact where x is near the mean, and keeps the digits that a single float32 mean would cut off.
        let normed = |x: &f32| (x - self.mean.0 - self.mean.1) * factor;
        match (weight, bias) {
            (Some(w), Some(b)) => {
                y.iter_mut().zip(x).zip(w.iter().zip(b)).for_each(|((y, x), (w, b))| *y = normed(x) * w + b);
            }
            (Some(w), None) => y.iter_mut().zip(x).zip(w).for_each(|((y, x), w)| *y = normed(x) * w),
            (None, Some(b)) => y.iter_mut().zip(x).zip(b).for_each(|((y, x), b)| *y = normed(x) + b),
            (None, None) => y.iter_mut().zip(x).for_each(|(y, x)| *y = normed(x)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    fn agreement() -> Agreement {
        Agreement::of("norm.layer", "lz_cpu.layer_norm")
    }

    fn vector() -> impl Strategy<Value = Option<DType>> {
        prop_oneof![Just(None), Just(Some(DType::F32)), Just(Some(DType::F16)), Just(Some(DType::Bf16))]
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, hidden) in (0i64..6, prop_oneof![0i64..80, 500i64..1100]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (weight, bias) in (vector(), vector()),
            eps in prop_oneof![Just(1e-5), Just(1e-12)],
            (gap, seed) in (0i64..3, any::<u64>()),
        ) {
            let x = drawn(dtype, &[rows, hidden + gap], seed);
            let weight = weight.map(|dtype| drawn(dtype, &[hidden], seed + 1));
            let bias = bias.map(|dtype| drawn(dtype, &[hidden], seed + 2));
            let mut inputs = vec![("input", strided(&x, &[rows, hidden]))];
            inputs.extend(weight.as_ref().map(|weight| ("weight", weight.view())));
            inputs.extend(bias.as_ref().map(|bias| ("bias", bias.view())));
            agreement().check(&inputs, &[("eps", ParamValue::Float(eps))], None);
        }

        #[test]
        fn a_mean_far_from_zero_costs_no_digits(seed in any::<u64>(), mean in prop_oneof![Just(1e3), Just(-3e4), Just(1e6)]) {
            let numbers: Vec<f64> = drawn(DType::F32, &[700], seed).to_f64().iter().map(|x| x + mean).collect();
            let x = Tensor::from_f64(DType::F32, &[1, 700], &numbers);
            agreement().check(&[("input", x.view())], &[], None);
        }
    }

    #[test]
    fn the_smallest_and_the_largest_numbers_are_not_lost() {
        for numbers in [
            [1e-38, 3e-39, -2e-45, 0.0],
            [3e38, -3e38, 1e30, 0.0],
            [3e38, 3e38, 3e38, 2.9e38],
            [f64::INFINITY, 1.0, 0.0, -2.0],
            [f64::NAN, 1.0, 0.0, 0.0],
            [1.0, 0.0, f64::NEG_INFINITY, 0.0],
            [7.0, 7.0, 7.0, 7.0],
        ] {
            let x = Tensor::from_f64(DType::F32, &[1, 4], &numbers);
            let weight = Tensor::from_f64(DType::F32, &[4], &[2.0, 1.0, 0.5, 1.0]);
            for eps in [0.0, 1e-30, 1e-5] {
                // All numbers alike and no eps: 0 / 0 by the definition.
                let eps = [("eps", ParamValue::Float(eps))];
                agreement().check(&[("input", x.view())], &eps, None);
                agreement().check(
                    &[("input", x.view()), ("weight", weight.view()), ("bias", weight.view())],
                    &eps,
                    None,
                );
            }
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let x = drawn(DType::F32, &[300, 257], 1);
        agreement().check(&[("input", x.view())], &[], None);
    }
}
