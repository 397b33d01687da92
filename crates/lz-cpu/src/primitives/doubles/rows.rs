//! Softmax and norms of rows of float64.
//!
//! | | |
//! |---|---|
//! | input 0 | x `[…, width]` with a last stride of 1, float64 |
//! | input 1 | norms: the weight `[width]`, row-major; may be absent |
//! | input 2 | layer norm: the bias `[width]`, row-major; may be absent |
//! | output 0 | of the shape of x, row-major, float64 |
//! | param 0 | norms: ε; 1e-5 by default |
//!
//! Sums are made in the same order for any number of threads.

use std::marker::PhantomData;

use lz_abi::{Args, KernelError, Rows};

use super::super::matmul::Products;
use super::super::{Kernel, loops, param, wrong};
use crate::simd::Work;
use crate::simd::exp64;

/// Numbers that are added or compared side by side.
const LANES: usize = 32;

/// What becomes of a row.
trait Row {
    /// Time of an element, in bytes copied for each of its bytes.
    const WEIGHT: usize;
    /// Writes the result of a row.
    fn compute<const FUSED: bool>(x: &[f64], scale: &Scale<'_>, y: &mut [f64]);
}

/// What a norm is scaled with.
#[derive(Clone, Copy)]
struct Scale<'a> {
    eps: f64,
    weight: Option<&'a [f64]>,
    bias: Option<&'a [f64]>,
}

impl Scale<'_> {
    /// y = f(x) · weight + bias.
    #[inline(always)]
    fn apply(&self, x: &[f64], y: &mut [f64], f: impl Fn(f64) -> f64) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = f(*x));
        if let Some(weight) = self.weight {
            y.iter_mut().zip(weight).for_each(|(y, weight)| *y *= weight);
        }
        if let Some(bias) = self.bias {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
}

/// All numbers made one, from `start` on.
#[inline(always)]
fn folded(x: &[f64], start: f64, f: impl Fn(f64, f64) -> f64, both: impl Fn(f64, f64) -> f64) -> f64 {
    let mut all = [start; LANES];
    let (groups, rest) = x.as_chunks::<LANES>();
    for group in groups {
        for lane in 0..LANES {
            all[lane] = f(all[lane], group[lane]);
        }
    }
    all.iter_mut().zip(rest).for_each(|(all, x)| *all = f(*all, *x));
    all.into_iter().fold(start, both)
}

/// e^(x - max) / sum of e^(x - max).
struct OfSoftmax;

impl Row for OfSoftmax {
    const WEIGHT: usize = 4;

    #[inline(always)]
    fn compute<const FUSED: bool>(x: &[f64], _: &Scale<'_>, y: &mut [f64]) {
        // A NaN is passed over here, and comes back as its own exponential.
        let larger = |a: f64, b: f64| if b > a { b } else { a };
        let most = folded(x, f64::NEG_INFINITY, larger, larger);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = exp64::exactly::<FUSED>(*x - most));
        let sum = folded(y, 0.0, |a, b| a + b, |a, b| a + b);
        y.iter_mut().for_each(|y| *y /= sum);
    }
}

/// (x - mean) / sqrt(variance + ε) · weight + bias.
struct OfLayerNorm;

impl Row for OfLayerNorm {
    const WEIGHT: usize = 2;

    #[inline(always)]
    fn compute<const FUSED: bool>(x: &[f64], scale: &Scale<'_>, y: &mut [f64]) {
        let (count, sum) = (x.len() as f64, |a: f64, b: f64| a + b);
        let mean = folded(x, 0.0, sum, sum) / count;
        let variance = folded(x, 0.0, |all, x| all + (x - mean) * (x - mean), sum) / count;
        let factor = 1.0 / (variance + scale.eps).sqrt();
        scale.apply(x, y, |x| (x - mean) * factor);
    }
}

/// x / sqrt(mean of x² + ε) · weight.
struct OfRmsNorm;

impl Row for OfRmsNorm {
    const WEIGHT: usize = 1;

    #[inline(always)]
    fn compute<const FUSED: bool>(x: &[f64], scale: &Scale<'_>, y: &mut [f64]) {
        let square = folded(x, 0.0, |all, x| all + x * x, |a, b| a + b) / x.len() as f64;
        let factor = 1.0 / (square + scale.eps).sqrt();
        scale.apply(x, y, |x| x * factor);
    }
}

/// Some rows.
struct Share<'a, R, const FUSED: bool> {
    rows: Rows<'a, f64>,
    first: usize,
    scale: Scale<'a>,
    output: &'a mut [f64],
    kind: PhantomData<R>,
}

impl<R: Row, const FUSED: bool> Work for Share<'_, R, FUSED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, y) in self.output.chunks_exact_mut(self.rows.len()).enumerate() {
            R::compute::<FUSED>(self.rows.get(self.first + i), &self.scale, y);
        }
    }
}

fn run<I: Products, R: Row>(args: &mut Args<'_, '_>, [weight, bias]: [Option<usize>; 2]) -> Result<(), KernelError> {
    let Some(x) = args.input(0) else { return wrong("rows need an input") };
    let (rows, threads) = (x.rows::<f64>()?, args.threads());
    let width = rows.len();
    let of = |at: Option<usize>| at.and_then(|at| args.input(at)).map(|given| given.as_slice::<f64>()).transpose();
    let scale = Scale { eps: param(args, 0).as_float().unwrap_or(1e-5), weight: of(weight)?, bias: of(bias)? };
    if [scale.weight, scale.bias].into_iter().flatten().any(|numbers| numbers.len() != width) {
        return wrong(format!("rows of {width} numbers have as many weights"));
    }
    if args.outputs[0].shape() != x.shape() {
        return wrong(format!("{:?} is not of the shape of {x:?}", args.outputs[0]));
    }
    let output = args.outputs[0].as_slice::<f64>()?;
    if output.is_empty() {
        return Ok(());
    }
    let parts = loops::parts(output.len(), size_of::<f64>() * R::WEIGHT, threads);
    let each = rows.count().div_ceil(parts);
    threads.each_chunk(output, each * width, |part, output| {
        let first = part * each;
        // SAFETY: `run_on` says that the CPU has the instructions.
        unsafe {
            match I::FUSED {
                true => I::call(Share::<R, true> { rows, first, scale, output, kind: PhantomData }),
                false => I::call(Share::<R, false> { rows, first, scale, output, kind: PhantomData }),
            }
        }
    });
    Ok(())
}

/// The primitive.
pub struct Softmax;

impl Kernel for Softmax {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        run::<I, OfSoftmax>(args, [None, None])
    }
}

/// The primitive.
pub struct LayerNorm;

impl Kernel for LayerNorm {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        run::<I, OfLayerNorm>(args, [Some(1), Some(2)])
    }
}

/// The primitive.
pub struct RmsNorm;

impl Kernel for RmsNorm {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        run::<I, OfRmsNorm>(args, [Some(1), None])
    }
}

#[cfg(test)]
mod tests {
    use lz_abi::{DType, Param, Tensor};
    use proptest::prelude::*;

    use super::super::super::Primitive;
    use super::super::super::checking::{agree, drawn, fails, results};

    proptest! {
        #[test]
        fn rows_are_their_definitions(
            (rows, width, gap) in (0i64..6, prop_oneof![1i64..5, 30i64..35, 62i64..67, 4000i64..4100], 0i64..3),
            (size, weighted, eps, seed) in (prop_oneof![Just(1.0), Just(300.0)], any::<bool>(), prop_oneof![Just(1e-5), Just(0.1)], any::<u32>()),
        ) {
            let whole = drawn(DType::F64, &[rows, width + gap], size, seed.into());
            let x = whole.view().part(1, 0, width);
            let numbers = x.to_f64();
            let (weight, bias) = (drawn(DType::F64, &[width], 2.0, 7), drawn(DType::F64, &[width], 2.0, 8));
            let (w, b) = (weight.to_f64(), bias.to_f64());
            let of = |all: &[f64], i: usize, otherwise: f64| if weighted { all[i] } else { otherwise };
            let each = |f: &dyn Fn(&[f64]) -> Vec<f64>| numbers.chunks(width as usize).flat_map(f).collect::<Vec<_>>();
            let count = width as f64;
            let softmax = each(&|row| {
                let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
                row.iter().map(|x| (x - most).exp() / sum).collect()
            });
            let layer = each(&|row| {
                let mean = row.iter().sum::<f64>() / count;
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
                let scaled = row.iter().map(|x| (x - mean) / (variance + eps).sqrt()).enumerate();
                scaled.map(|(i, x)| x * of(&w, i, 1.0) + of(&b, i, 0.0)).collect()
            });
            let rms = each(&|row| {
                let square = row.iter().map(|x| x * x).sum::<f64>() / count;
                row.iter().enumerate().map(|(i, x)| x / (square + eps).sqrt() * of(&w, i, 1.0)).collect()
            });
            let to = Tensor::zeros(DType::F64, &[rows, width]);
            let inputs = [Some(x), weighted.then(|| weight.view()), weighted.then(|| bias.view())];
            for (primitive, inputs, wanted) in [
                (Primitive::Softmax, &inputs[..1], &softmax),
                (Primitive::LayerNorm, &inputs[..], &layer),
                (Primitive::RmsNorm, &inputs[..2], &rms),
            ] {
                for (set, got) in results(primitive, inputs, &[Param::Float(eps)], &to) {
                    agree(&format!("{set:?} {primitive:?}"), &got, wanted, 1e-13, 1e-13);
                }
            }
        }
    }

    #[test]
    fn infinities_and_nan_are_those_of_the_definition() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let x =
            Tensor::from_f64(DType::F64, &[4, 3], &[-inf, 0.0, 0.0, nan, 0.0, 1.0, -inf, -inf, -inf, inf, 0.0, 1.0]);
        for (_, got) in results(Primitive::Softmax, &[Some(x.view())], &[], &Tensor::zeros(DType::F64, &[4, 3])) {
            let got = got.to_f64();
            assert_eq!(got[..3], [0.0, 0.5, 0.5]);
            assert!(got[3..].iter().all(|x| x.is_nan()), "{got:?}");
        }
    }

    #[test]
    fn calls_that_make_no_sense_are_refused() {
        let (x, w) = (drawn(DType::F64, &[2, 3], 1.0, 1), drawn(DType::F64, &[2], 1.0, 1));
        let (to, other) = (Tensor::zeros(DType::F64, &[2, 3]), Tensor::zeros(DType::F64, &[3, 2]));
        fails(Primitive::RmsNorm, &[Some(x.view()), Some(w.view())], &[], &to, "as many weights");
        fails(Primitive::Softmax, &[Some(x.view())], &[], &other, "not of the shape");
        fails(Primitive::Softmax, &[], &[], &to, "need an input");
    }
}
