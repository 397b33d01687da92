//! A linear layer for few rows, as decoding has them: out = input · weight^T + bias, at the speed the weight is read.
//!
//! Every row of the weight is read once, beside [`SIDE`] - 1 others, and multiplied with all rows of the input. Numbers are
//! multiplied and added as float32.

use std::marker::PhantomData;

use lz_abi::Rows;
use lz_model::{DType, DimRule, KernelArgs, KernelDescriptor, KernelError, Op};

use super::half_floats::Narrow;
use super::rms_norm::as_f32;
use super::vector::{LANES, Sixteen};
use super::{BLOCK, FLOATS, Isa, Work, check, describe, floats, with_float};
use crate::kernel::NativeKernel;

/// The kernel, for an instruction set.
pub struct Linear<I>(PhantomData<I>);

/// The places of its arguments in the schema.
const INPUT: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;

/// Rows of the input it takes: with more, torch's product of tiles is faster.
const MOST_ROWS: i64 = 1;
/// Rows of the weight that are multiplied side by side, so that their sums do not wait for each other.
const SIDE: usize = 4;
/// Bytes of a weight below which one thread does all.
const ONE_THREAD: usize = 256 << 10;

impl<I: Isa> NativeKernel for Linear<I> {
    const OPS: &'static [&'static str] = &["mlp.linear"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<I>(op, "linear", 55);
        let mut dims = reference.dims.clone();
        dims.insert("rows".to_owned(), DimRule { max: Some(MOST_ROWS), ..DimRule::default() });
        KernelDescriptor {
            dtypes: FLOATS,
            inputs: floats(&["input", "weight", "bias"]),
            dims,
            requires_last_dim_stride1: true,
            // Where torch's is not faster (`layerzero bench cpu`): its float32 is.
            conditions: vec!["input.dtype != 'float32'".into()],
            // The input, the result and the bias as float32; each begins at a multiple of 64 bytes.
            workspace: Some("(rows * in_features + (rows + 1) * out_features) * 4 + 128".into()),
            ..reference
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let dtype = args.args.input(INPUT).map_or(DType::F64, |input| input.dtype());
        with_float!(dtype, T => run::<I, T>(args))
    }
}

fn run<I: Isa, T: Narrow>(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    check::<I>()?;
    let args = &mut args.args;
    let (input, weight) =
        args.input(INPUT).zip(args.input(WEIGHT)).ok_or_else(|| KernelError::Failed("no input".into()))?;
    let (outs, ins) = (weight.shape()[0] as usize, weight.shape()[1] as usize);
    let rows = args.outputs[0].as_ref().len().checked_div(outs).unwrap_or(0);
    if rows == 0 {
        return Ok(());
    }
    let x = args.workspace().take::<f32>(rows * ins)?;
    if ins > 0 {
        let given = input.rows::<T>()?;
        x.chunks_exact_mut(ins).enumerate().for_each(|(row, x)| T::widen(given.get(row), x));
    }
    // By columns: each thread has some.
    let y = args.workspace().take::<f32>(rows * outs)?;
    let (x, threads) = (&*x, args.threads());
    if ins == 0 {
        y.fill(0.0);
    } else {
        let weights = weight.rows::<T>()?;
        let parts = if size_of::<T>() * weight.len() < ONE_THREAD { 1 } else { threads.count() };
        // Whole groups of SIDE rows.
        let per_part = outs.div_ceil(parts).next_multiple_of(SIDE);
        threads.each_chunk(y, per_part * rows, |part, y| {
            let first = part * per_part;
            I::vectorize(Products::<T, I::Sixteen> { weights, first, x, y, rows, kind: PhantomData });
        });
    }
    let bias = match args.input(BIAS) {
        None => None,
        Some(bias) => Some(as_f32(bias, args)?),
    };
    let y = &*y;
    let output = args.outputs[0].as_slice::<T>()?;
    I::vectorize(Rounded { y, bias, output, rows });
    Ok(())
}

/// The result by rows, with the bias, in its dtype.
struct Rounded<'a, T: Narrow> {
    y: &'a [f32],
    bias: Option<&'a [f32]>,
    output: &'a mut [T],
    rows: usize,
}

impl<T: Narrow> Work for Rounded<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut wide = [0f32; BLOCK];
        for (row, output) in self.output.chunks_exact_mut(self.y.len() / self.rows).enumerate() {
            for (b, output) in output.chunks_mut(BLOCK).enumerate() {
                let (first, wide) = (b * BLOCK, &mut wide[..output.len()]);
                if self.rows == 1 {
                    wide.copy_from_slice(&self.y[first..first + wide.len()]);
                } else {
                    wide.iter_mut().enumerate().for_each(|(i, wide)| *wide = self.y[(first + i) * self.rows + row]);
                }
                if let Some(bias) = self.bias {
                    wide.iter_mut().zip(&bias[first..]).for_each(|(wide, bias)| *wide += bias);
                }
                T::narrow(wide, output);
            }
        }
    }
}

/// Some columns of the result.
struct Products<'a, T: Narrow, V> {
    weights: Rows<'a, T>,
    first: usize,
    /// The rows of the input, one after the other.
    x: &'a [f32],
    /// The results of a column, one after the other.
    y: &'a mut [f32],
    rows: usize,
    kind: PhantomData<V>,
}

impl<T: Narrow, V: Sixteen> Work for Products<'_, T, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let columns = self.y.len() / self.rows;
        for (group, y) in self.y.chunks_mut(SIDE * self.rows).enumerate() {
            let side = y.len() / self.rows;
            // Where fewer than SIDE are left, the last one is multiplied more than once.
            let weights: [&[T]; SIDE] =
                std::array::from_fn(|i| self.weights.get(self.first + (group * SIDE + i).min(columns - 1)));
            for (row, x) in self.x.chunks_exact(self.x.len() / self.rows).enumerate() {
                let products = products::<T, V>(weights, x);
                for (i, product) in products[..side].iter().enumerate() {
                    y[i * self.rows + row] = *product;
                }
            }
        }
    }
}

/// The products of some rows with one.
#[allow(unsafe_code)]
#[inline(always)]
fn products<T: Narrow, V: Sixteen>(weights: [&[T]; SIDE], x: &[f32]) -> [f32; SIDE] {
    let (chunks, x_rest) = x.as_chunks::<LANES>();
    let mut found = [0f32; SIDE];
    // SAFETY: `vectorize` runs it where the instructions of `V` are.
    unsafe {
        let mut sums = [V::splat(0.0); SIDE];
        for (c, x) in chunks.iter().enumerate() {
            let x = V::load(x);
            for i in 0..SIDE {
                sums[i] = T::load::<V>(&weights[i].as_chunks().0[c]).times(x, sums[i]);
            }
        }
        for i in 0..SIDE {
            found[i] = sums[i].added();
        }
    }
    for (found, weight) in found.iter_mut().zip(weights) {
        let (mut wide, rest) = ([0f32; LANES], weight.as_chunks::<LANES>().1);
        T::widen(rest, &mut wide[..rest.len()]);
        *found += wide.iter().zip(x_rest).map(|(weight, x)| weight * x).sum::<f32>();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, Tensor};
    use proptest::prelude::*;

    /// Results are sums of so many products.
    fn agreement() -> Agreement {
        Agreement::of("mlp.linear", "lz_cpu.linear").within(4e-6)
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, ins, outs) in (0i64..5, prop_oneof![0i64..70, 500i64..600], prop_oneof![0i64..10, 60i64..70]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (bias, gap, seed) in (any::<bool>(), 0i64..3, any::<u64>()),
        ) {
            let (x, w) = (drawn(dtype, &[rows, ins + gap], seed), drawn(dtype, &[outs, ins + gap], seed + 1));
            let b = drawn(dtype, &[outs], seed + 2);
            let mut inputs = vec![("input", strided(&x, &[rows, ins])), ("weight", strided(&w, &[outs, ins]))];
            if bias {
                inputs.push(("bias", b.view()));
            }
            agreement().check(&inputs, &[], None);
        }
    }

    #[test]
    fn the_ends_are_the_references() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let x = Tensor::from_f64(DType::F32, &[1, 3], &[1.0, 0.0, -1.0]);
        let w = [1.0, inf, 2.0, nan, 0.0, 0.0, 1e-44, 0.0, 1e-45, 3e38, 1.0, 1e38, -inf, 1.0, 1.0];
        agreement().check(
            &[("input", x.view()), ("weight", Tensor::from_f64(DType::F32, &[5, 3], &w).view())],
            &[],
            None,
        );
    }

    #[test]
    fn columns_are_shared_among_threads() {
        let (x, w) = (drawn(DType::F32, &[3, 257], 1), drawn(DType::F32, &[301, 257], 2));
        agreement().check(&[("input", x.view()), ("weight", w.view())], &[], None);
    }
}
