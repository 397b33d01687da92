//! Root-mean-square norm in one pass over memory.
//!
//! A row is read twice, and the second time from the cache: once for the sum of its squares, once to be scaled.

use std::marker::PhantomData;

use half::{bf16, f16};
use lz_abi::{Args, Rows, TensorRef};
use lz_model::{DType, KernelArgs, KernelDescriptor, KernelError, Op};

use super::half_floats::Narrow;
use super::{BLOCK, FLOATS, Isa, Work, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;

/// The kernel, for an instruction set.
pub struct RmsNorm<I>(PhantomData<I>);

/// The places of its arguments in the schema.
const INPUT: usize = 0;
const WEIGHT: usize = 1;
const EPS: usize = 0;

/// Factors that are numbers of float32 with room for the products: outside, products are taken in float64.
pub(super) const PLAIN: std::ops::RangeInclusive<f64> = 1e-30..=1e30;

impl<I: Isa> NativeKernel for RmsNorm<I> {
    const OPS: &'static [&'static str] = &["norm.rms"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            dtypes: FLOATS,
            inputs: floats(&["input", "weight"]),
            requires_last_dim_stride1: true,
            // The weight as float32.
            workspace: Some("hidden * 4".into()),
            // Below every kernel of plain torch (35 to 50): until it was measured here, the literal call serves.
            ..describe::<I>(op, "rms_norm", 30)
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
    let eps = args.param(EPS).as_float().unwrap_or(1e-6);
    let weight = match args.input(WEIGHT) {
        None => None,
        Some(weight) => Some(as_f32(weight, args)?),
    };
    let threads = args.threads();
    let output = args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let per_part = rows_per_thread(rows.count(), size_of_val(output), threads.count());
    threads.each_chunk(output, per_part * hidden, |part, output| {
        let first = part * per_part;
        I::vectorize(Norm { rows, first, weight, eps, output, hidden });
    });
    Ok(())
}

/// The weight as float32: as it is, or converted into scratch memory.
pub(super) fn as_f32<'a>(weight: TensorRef<'a>, args: &mut Args<'a, '_>) -> Result<&'a [f32], KernelError> {
    if weight.dtype() == DType::F32 && weight.is_contiguous() {
        return Ok(weight.as_slice()?);
    }
    let wide = args.workspace().take::<f32>(weight.len())?;
    match (weight.dtype(), weight.is_contiguous()) {
        (DType::F16, true) => f16::widen(weight.as_slice()?, wide),
        (DType::Bf16, true) => bf16::widen(weight.as_slice()?, wide),
        _ => wide.iter_mut().enumerate().for_each(|(i, w)| *w = weight.get(&[i as i64]) as f32),
    }
    Ok(wide)
}

/// Some rows.
struct Norm<'a, T: Narrow> {
    rows: Rows<'a, T>,
    first: usize,
    weight: Option<&'a [f32]>,
    eps: f64,
    output: &'a mut [T],
    hidden: usize,
}

impl<T: Narrow> Work for Norm<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut x, mut y) = ([0f32; BLOCK], [0f32; BLOCK]);
        for (i, output) in self.output.chunks_exact_mut(self.hidden).enumerate() {
            let row = self.rows.get(self.first + i);
            let mut squares = 0.0;
            for block in row.chunks(BLOCK) {
                squares += sum_of_squares(T::wide(block, &mut x));
            }
            let factor = 1.0 / (squares / self.hidden as f64 + self.eps).sqrt();
            for (b, (block, output)) in row.chunks(BLOCK).zip(output.chunks_mut(BLOCK)).enumerate() {
                let x = T::wide(block, &mut x);
                let weight = self.weight.map(|w| &w[b * BLOCK..b * BLOCK + block.len()]);
                scale(x, weight, factor, T::place(output, &mut y));
                T::settle(&y, output);
            }
        }
    }
}

/// The squares of float32 numbers are exact in float64, and so many of them can be added that nothing is lost.
#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f64 {
    const LANES: usize = 32;
    let mut sums = [0f64; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(x) * f64::from(x);
        }
    }
    let rest: f64 = chunks.remainder().iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    by_halves(sums) + rest
}

/// The sum of all: the first half and the last half, and so on. One after the other, each addition would wait for the one before.
#[inline(always)]
pub(super) fn by_halves<const N: usize>(mut all: [f64; N]) -> f64 {
    const { assert!(N.is_power_of_two()) };
    let mut width = N / 2;
    while width > 0 {
        let (low, high) = all.split_at_mut(width);
        low.iter_mut().zip(&*high).for_each(|(low, high)| *low += high);
        width /= 2;
    }
    all[0]
}

/// y = x · factor · weight.
#[inline(always)]
pub(super) fn scale(x: &[f32], weight: Option<&[f32]>, factor: f64, y: &mut [f32]) {
    let plain = PLAIN.contains(&factor);
    let narrow = factor as f32;
    match weight {
        Some(w) if plain => y.iter_mut().zip(x.iter().zip(w)).for_each(|(y, (x, w))| *y = x * narrow * w),
        None if plain => y.iter_mut().zip(x).for_each(|(y, x)| *y = x * narrow),
        Some(w) => y
            .iter_mut()
            .zip(x.iter().zip(w))
            .for_each(|(y, (x, w))| *y = (f64::from(*x) * factor * f64::from(*w)) as f32),
        None => y.iter_mut().zip(x).for_each(|(y, x)| *y = (f64::from(*x) * factor) as f32),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Avx2, Avx512, Nothing, Portable};
    use super::*;
    use crate::call;
    use lz_model::{
        Arena, BindRules, Call, Catalog, Context, DeviceIx, HostCall, ParamValue, Tensor, TensorMeta, TensorView,
    };
    use proptest::prelude::*;

    fn run_on<I: Isa>(x: &TensorView<'_>, weight: Option<&Tensor>, eps: f64, threads: usize) -> Option<Tensor> {
        let op = Catalog::get().ops().iter().find(|op| op.id() == "norm.rms").unwrap();
        I::vectorize(Nothing)?;
        let inputs = [Some(x.clone()), weight.map(Tensor::view)];
        let metas = inputs.each_ref().map(|view| view.as_ref().map(|view| TensorMeta::of(view.as_ref())));
        let params = [ParamValue::Float(eps)];
        let bound =
            Call { inputs: &metas, params: &params, layout: None, device: DeviceIx(0), context: Context::default() };
        let bound = op.bind(&bound, &BindRules::default()).unwrap();
        let mut y = Tensor::zeros(x.dtype(), x.shape());
        let mut outputs = [y.view_mut()];
        let call = HostCall { query: &bound.query, inputs: &inputs, params: &params, outputs: &mut outputs };
        let scratch = *x.shape().last().unwrap() as usize * 4;
        call.run((&mut Arena::default(), scratch), crate::threads(threads), RmsNorm::<I>::run).unwrap();
        Some(y)
    }

    fn check(x: &TensorView<'_>, weight: Option<&Tensor>, eps: f64) {
        let mut inputs = vec![("input", x.clone())];
        inputs.extend(weight.map(|weight| ("weight", weight.view())));
        let expected = &call("norm.rms", &inputs, &[("eps", ParamValue::Float(eps))], None).unwrap()[0].1;
        let results = [
            run_on::<Portable>(x, weight, eps, 1),
            run_on::<Avx2>(x, weight, eps, 2),
            run_on::<Avx512>(x, weight, eps, 3),
        ];
        let ulp = match x.dtype() {
            DType::F32 => 4e-7,
            DType::F16 => 1.1e-3,
            _ => 8e-3,
        };
        for result in results.into_iter().flatten() {
            for (got, wanted) in result.to_f64().into_iter().zip(expected.to_f64()) {
                let same = got == wanted || got.is_nan() && wanted.is_nan();
                assert!(
                    same || (got - wanted).abs() <= ulp * wanted.abs() + f64::from(f32::MIN_POSITIVE),
                    "{got} {wanted}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, hidden) in (0i64..6, prop_oneof![0i64..80, 500i64..1100]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            weight in prop_oneof![Just(None), Just(Some(DType::F32)), Just(Some(DType::F16)), Just(Some(DType::Bf16))],
            (size, eps) in (prop_oneof![Just(1.0), Just(1e-3), Just(1e-22), Just(1e18)], prop_oneof![Just(1e-6), Just(1e-12)]),
            gap in 0i64..3,
            seed in any::<u64>(),
        ) {
            let mut state = seed | 1;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
            };
            let memory: Vec<f64> = (0..rows * (hidden + gap)).map(|_| next() * size).collect();
            let memory = Tensor::from_f64(dtype, &[rows * (hidden + gap)], &memory);
            let x = TensorView::strided(dtype, &[rows, hidden], &[hidden + gap, 1], 0, memory.bytes()).unwrap();
            let weight = weight.map(|dtype| Tensor::from_f64(dtype, &[hidden], &(0..hidden).map(|_| next()).collect::<Vec<_>>()));
            check(&x, weight.as_ref(), eps);
        }
    }

    #[test]
    fn the_smallest_and_the_largest_numbers_are_not_lost() {
        for numbers in [
            [1e-38, 3e-39, -2e-45, 0.0],
            [3e38, -3e38, 1e30, 0.0],
            [f64::INFINITY, 1.0, 0.0, -2.0],
            [f64::NAN, 1.0, 0.0, 0.0],
        ] {
            let x = Tensor::from_f64(DType::F32, &[1, 4], &numbers);
            check(&x.view(), None, 0.0);
            check(&x.view(), Some(&Tensor::from_f64(DType::F32, &[4], &[2.0, 1.0, 0.5, 1.0])), 0.0);
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let numbers: Vec<f64> = (0..300 * 257).map(|i| f64::from(i % 97) - 48.0).collect();
        check(&Tensor::from_f64(DType::F32, &[300, 257], &numbers).view(), None, 1e-6);
    }

    #[test]
    fn a_cpu_without_the_instructions_is_told_so_by_the_descriptor() {
        let op = Catalog::get().ops().iter().find(|op| op.id() == "norm.rms").unwrap();
        let all =
            [RmsNorm::<Portable>::descriptor(op), RmsNorm::<Avx2>::descriptor(op), RmsNorm::<Avx512>::descriptor(op)];
        let names = all.each_ref().map(|d| d.id.as_str());
        assert_eq!(names, ["lz_cpu.rms_norm", "lz_cpu.rms_norm.avx2", "lz_cpu.rms_norm.avx512"]);
        assert!(all.windows(2).all(|pair| pair[0].priority < pair[1].priority));
        assert_eq!(all[2].instruction_sets, ["avx512f", "avx512bw", "avx512dq", "avx512vl"]);
    }
}
