//! 8-bit integers and floats back to floats, in one pass over memory: out = (value - zero point) · scale.

use std::marker::PhantomData;

use lz_abi::{Args, Rows, TensorRef};
use lz_model::{DType, DTypeSet, InputRule, KernelArgs, KernelDescriptor, KernelError, Op, Scalar, numeric};

use super::half_floats::Narrow;
use super::{BLOCK, Isa, Work, check, describe, one_of, rows_per_thread, with_float};
use crate::kernel::NativeKernel;
use crate::reference::arguments::Arguments;

/// The kernel, for an instruction set.
pub struct Dequantize<I>(PhantomData<I>);

/// The places of its arguments in the schema.
const VALUES: usize = 0;
const SCALES: usize = 1;
const ZERO_POINTS: usize = 2;

/// The formats it reads.
const FORMATS: DTypeSet = DTypeSet::of(&[DType::I8, DType::F8E4M3, DType::F8E5M2]);

impl<I: Isa> NativeKernel for Dequantize<I> {
    const OPS: &'static [&'static str] = &["dequantize"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<I>(op, "dequantize", 55);
        let (mut inputs, mut params) = (reference.inputs.clone(), reference.params.clone());
        inputs.insert("values".to_owned(), InputRule { dtypes: Some(FORMATS), ..InputRule::default() });
        let floats = ["float32", "float16", "bfloat16"].map(|name| Scalar::Str(name.to_owned()));
        params.extend([one_of("dtype", &floats)]);
        // Above torch's kernels (35 to 50): one pass over memory, where plain torch makes a tensor for each step.
        KernelDescriptor { dtypes: FORMATS, inputs, params, requires_last_dim_stride1: true, ..reference }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let groups =
            Groups { whole: args.text("granularity") == "per_tensor", width: args.dim("group").max(1) as usize };
        let args = &mut args.args;
        let values = args.input(VALUES).ok_or_else(|| KernelError::Failed("no values".into()))?;
        with_float!(args.outputs[0].dtype(), T => match values.dtype() {
            DType::I8 => run::<I, T, i8>(args, values, groups),
            _ => run::<I, T, u8>(args, values, groups),
        })
    }
}

/// Which elements share a scale.
#[derive(Clone, Copy)]
struct Groups {
    /// One for all rows.
    whole: bool,
    /// How many numbers of a row.
    width: usize,
}

fn run<I: Isa, T: Narrow, V: Code>(
    args: &mut Args<'_, '_>,
    values: TensorRef<'_>,
    groups: Groups,
) -> Result<(), KernelError> {
    check::<I>()?;
    let rows = values.rows::<V>()?;
    let scales = args.input(SCALES).ok_or_else(|| KernelError::Failed("no scales".into()))?;
    let (zero_points, threads) = (args.input(ZERO_POINTS), args.threads());
    let output = args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let table = V::table(values.dtype());
    let per_part = rows_per_thread(rows.count(), size_of_val(output), threads.count());
    threads.each_chunk(output, per_part * rows.len(), |part, output| {
        let first = part * per_part;
        I::vectorize(Scaled { rows, first, scales, zero_points, groups, table: &table, output });
    });
    Ok(())
}

/// A value of 8 bits.
trait Code: lz_abi::Scalar {
    /// The numbers of a format by their bytes, where they are looked up.
    fn table(format: DType) -> [f32; 256];
    /// The number.
    fn number(self, table: &[f32; 256]) -> f32;
}

impl Code for i8 {
    fn table(_: DType) -> [f32; 256] {
        [0.0; 256]
    }

    #[inline(always)]
    fn number(self, _: &[f32; 256]) -> f32 {
        f32::from(self)
    }
}

impl Code for u8 {
    fn table(format: DType) -> [f32; 256] {
        std::array::from_fn(|code| numeric::load(format, &[code as u8], 0) as f32)
    }

    #[inline(always)]
    fn number(self, table: &[f32; 256]) -> f32 {
        table[usize::from(self)]
    }
}

/// Some rows.
struct Scaled<'a, T: Narrow, V: Code> {
    rows: Rows<'a, V>,
    first: usize,
    scales: TensorRef<'a>,
    zero_points: Option<TensorRef<'a>>,
    groups: Groups,
    table: &'a [f32; 256],
    output: &'a mut [T],
}

impl<T: Narrow, V: Code> Work for Scaled<'_, T, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut x = [0f32; BLOCK];
        for (i, output) in self.output.chunks_exact_mut(self.rows.len()).enumerate() {
            let row = self.first + i;
            let groups = self.rows.get(row).chunks(self.groups.width).zip(output.chunks_mut(self.groups.width));
            for (group, (values, output)) in groups.enumerate() {
                let place = (if self.groups.whole { 0 } else { row as i64 }, group as i64);
                let scale = entry(self.scales, place);
                let zero_point = self.zero_points.map_or(0.0, |zero_points| entry(zero_points, place));
                for (values, output) in values.chunks(BLOCK).zip(output.chunks_mut(BLOCK)) {
                    let x = &mut x[..values.len()];
                    x.iter_mut().zip(values).for_each(|(x, value)| *x = value.number(self.table));
                    if zero_point == 0.0 {
                        x.iter_mut().for_each(|x| *x *= scale as f32);
                    } else {
                        x.iter_mut().for_each(|x| *x = ((f64::from(*x) - zero_point) * scale) as f32);
                    }
                    T::narrow(x, output);
                }
            }
        }
    }
}

/// The entry for a group in a tensor of scales, which has one per group, one per row of them, or one.
fn entry(scales: TensorRef<'_>, (row, col): (i64, i64)) -> f64 {
    match scales.shape() {
        [_, _] => scales.get(&[row, col]),
        [1] => scales.get(&[0]),
        _ => scales.get(&[row]),
    }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    fn agreement() -> Agreement {
        Agreement::of("dequantize", "lz_cpu.dequantize")
    }

    /// All codes of a format, in rows of these sizes.
    fn codes(format: DType, rows: i64, cols: i64, seed: i64) -> Tensor {
        let bytes: Vec<u8> = (0..rows * cols).map(|i| ((i + seed) * 37 % 256) as u8).collect();
        let numbers: Vec<f64> = bytes.iter().map(|&code| lz_model::numeric::load(format, &[code], 0)).collect();
        Tensor::from_f64(format, &[rows, cols], &numbers)
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, cols) in (0i64..6, prop_oneof![0i64..80, 500i64..1100]),
            format in prop_oneof![Just(DType::I8), Just(DType::F8E4M3), Just(DType::F8E5M2)],
            granularity in 0usize..3,
            group in prop_oneof![1i64..9, Just(32i64), Just(600i64)],
            wanted in prop_oneof![Just("float32"), Just("float16"), Just("bfloat16")],
            (offset, flat, gap, seed) in (any::<bool>(), any::<bool>(), 0i64..3, 0i64..1000),
        ) {
            let values = codes(format, rows, cols + gap, seed);
            let scale_cols = if granularity == 2 { (cols + group - 1) / group } else { 1 };
            let scale_rows = if granularity == 0 { 1 } else { rows };
            let shape: &[i64] = if flat && granularity < 2 { &[scale_rows] } else { &[scale_rows, scale_cols] };
            // float16 ends at 65504.
            let scales = drawn(DType::F32, shape, seed as u64);
            let points: Vec<i64> = (0..shape.iter().product()).map(|i| (i * 29 + seed) % 200 - 100).collect();
            let points = Tensor::from_ints(DType::I32, shape, &points);
            let mut inputs = vec![("values", strided(&values, &[rows, cols])), ("scales", scales.view())];
            if offset {
                inputs.push(("zero_points", points.view()));
            }
            let mut params = vec![
                ("dtype", ParamValue::str(wanted)),
                ("granularity", ParamValue::str(["per_tensor", "per_channel", "blockwise"][granularity])),
            ];
            if granularity == 2 {
                params.push(("group_size", ParamValue::Int(group)));
            }
            agreement().check(&inputs, &params, None);
        }
    }

    #[test]
    fn every_code_is_its_number_under_any_scale() {
        for format in [DType::I8, DType::F8E4M3, DType::F8E5M2] {
            let values = codes(format, 1, 256, 0);
            for scale in [1.0, 1e-40, 3e38, 0.0, f64::INFINITY, f64::NAN, -0.3] {
                let scale = Tensor::from_f64(DType::F32, &[1], &[scale]);
                for zero_point in [0, 5, i64::from(i32::MIN), i64::from(i32::MAX)] {
                    let zero_point = Tensor::from_ints(DType::I32, &[1], &[zero_point]);
                    let inputs =
                        [("values", values.view()), ("scales", scale.view()), ("zero_points", zero_point.view())];
                    agreement().check(&inputs, &[], None);
                }
            }
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let (values, scales) = (codes(DType::I8, 300, 257, 0), drawn(DType::F32, &[300], 1));
        let params = [("granularity", ParamValue::str("per_channel"))];
        agreement().check(&[("values", values.view()), ("scales", scales.view())], &params, None);
    }
}
