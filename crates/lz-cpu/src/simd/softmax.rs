//! Softmax of rows: e^(x - max) / sum of e^(x - max).
//!
//! A row is read three times: for its largest number, for the exponentials and their sum, and for the quotients. Only the first time
//! comes from memory, since a row fits into a cache. The exponentials are kept where the result will be. Half precision has no such
//! place, and torch is faster there.

use std::marker::PhantomData;

use lz_abi::Rows;
use lz_model::{DType, DTypeSet, InputRule, KernelArgs, KernelDescriptor, KernelError, Op};

use super::exp::exp_below_zero;
use super::{Isa, Work, check, describe, rows_per_thread};
use crate::kernel::NativeKernel;

/// The kernel, for an instruction set.
pub struct Softmax<I>(PhantomData<I>);

/// The place of its argument in the schema.
const INPUT: usize = 0;

/// What it computes with.
const F32: DTypeSet = DTypeSet::of(&[DType::F32]);

/// Numbers that are compared or added side by side.
const LANES: usize = 32;

/// Numbers that are added in float32.
const PART: usize = 32 * LANES;

impl<I: Isa> NativeKernel for Softmax<I> {
    const OPS: &'static [&'static str] = &["activation.softmax"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let rule = InputRule { dtypes: Some(F32), ..InputRule::default() };
        KernelDescriptor {
            dtypes: F32,
            inputs: [("input".to_owned(), rule)].into(),
            requires_last_dim_stride1: true,
            // Above torch's kernel (50).
            ..describe::<I>(op, "softmax", 55)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        check::<I>()?;
        let args = &mut args.args;
        let input = args.input(INPUT).ok_or_else(|| KernelError::Failed("no input".into()))?;
        let rows = input.rows::<f32>()?;
        let (threads, width) = (args.threads(), rows.len());
        let output = args.outputs[0].as_slice::<f32>()?;
        if output.is_empty() {
            return Ok(());
        }
        let per_part = rows_per_thread(rows.count(), size_of_val(output), threads.count());
        threads.each_chunk(output, per_part * width, |part, output| {
            let first = part * per_part;
            if I::FUSED {
                I::vectorize(Shares::<true> { rows, first, output });
            } else {
                I::vectorize(Shares::<false> { rows, first, output });
            }
        });
        Ok(())
    }
}

/// Some rows. `FUSED`: as of [`Isa`].
struct Shares<'a, const FUSED: bool> {
    rows: Rows<'a, f32>,
    first: usize,
    output: &'a mut [f32],
}

impl<const FUSED: bool> Work for Shares<'_, FUSED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, y) in self.output.chunks_exact_mut(self.rows.len()).enumerate() {
            let x = self.rows.get(self.first + i);
            let most = largest(x);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = exp_below_zero::<FUSED>(*x - most));
            let share = (1.0 / sum(y)) as f32;
            y.iter_mut().for_each(|y| *y *= share);
        }
    }
}

/// The largest number. A NaN is passed over here, and comes back as its own exponential.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let larger = |most: f32, x: f32| if x > most { x } else { most };
    let mut most = [f32::NEG_INFINITY; LANES];
    let (groups, rest) = x.as_chunks::<LANES>();
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    for group in groups.iter().chain([&last]) {
        for (most, &x) in most.iter_mut().zip(group) {
            *most = larger(*most, x);
        }
    }
    halved(most, larger)
}

/// The sum: of [`PART`] numbers at a time in float32, in [`LANES`] sums, so that at most 32 roundings add up; of these in float64.
#[inline(always)]
fn sum(x: &[f32]) -> f64 {
    let of = |part: &[f32]| {
        let mut sums = [0f32; LANES];
        let (groups, rest) = part.as_chunks::<LANES>();
        let mut last = [0f32; LANES];
        last[..rest.len()].copy_from_slice(rest);
        for group in groups.iter().chain([&last]) {
            for (sum, &x) in sums.iter_mut().zip(group) {
                *sum += x;
            }
        }
        f64::from(halved(sums, |a, b| a + b))
    };
    x.chunks(PART).map(of).sum()
}

/// All numbers made one: the first half with the second, and so on.
#[inline(always)]
fn halved(mut all: [f32; LANES], both: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = all.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(low, high)| *low = both(*low, *high));
        width /= 2;
    }
    all[0]
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, Tensor, TensorView};
    use proptest::prelude::*;

    fn check(input: TensorView<'_>) {
        Agreement::of("activation.softmax", "lz_cpu.softmax").check(&[("input", input)], &[], None);
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, width) in (0i64..6, prop_oneof![0i64..80, 500i64..1100, 4000i64..4200]),
            (size, gap, seed) in (prop_oneof![Just(1.0), Just(20.0), Just(1e4)], 0i64..3, any::<u64>()),
        ) {
            let numbers: Vec<f64> = drawn(DType::F32, &[rows * (width + gap)], seed).to_f64().iter().map(|x| x * size).collect();
            let x = Tensor::from_f64(DType::F32, &[rows, width + gap], &numbers);
            check(strided(&x, &[rows, width]));
        }
    }

    #[test]
    fn infinities_and_nan_are_the_references() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        for row in [
            [-inf, -inf, -inf],
            [-inf, 0.0, 1.0],
            [inf, 0.0, -inf],
            [nan, 0.0, 1.0],
            [-inf, nan, -inf],
            [3e38, -3e38, 3e38],
            [-3e38, -3e38, -3e38],
            [-90.0, 0.0, -200.0],
        ] {
            for width in [3, 40] {
                let numbers: Vec<f64> = row.iter().copied().chain(std::iter::repeat(row[2])).take(width).collect();
                check(Tensor::from_f64(DType::F32, &[1, width as i64], &numbers).view());
            }
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        check(drawn(DType::F32, &[300, 257], 1).view());
    }
}
