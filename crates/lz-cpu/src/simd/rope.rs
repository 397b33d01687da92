//! Rotary embedding in one pass over memory, in both conventions.
//!
//! Rows of the input are turned in the order they have in the result. Heads of one token follow each other there (except in
//! BHSD), and share a row of the tables, which is converted once for them.

use std::marker::PhantomData;

use half::{bf16, f16};
use lz_abi::{Rows, TensorRef};
use lz_model::{DType, KernelArgs, KernelDescriptor, KernelError, Layout, Op};

use super::half_floats::Narrow;
use super::{FLOATS, Isa, Work, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;
use crate::reference::arguments::Arguments;
use crate::reference::posenc::Positions;

/// The kernel, for an instruction set.
pub struct Rope<I>(PhantomData<I>);

/// The places of its arguments in the schema.
const INPUT: usize = 0;
const COS: usize = 1;
const SIN: usize = 2;
const POSITIONS: usize = 3;

/// Pairs that are turned at a time: with halves of a head, sines and cosines, 4 KiB of float32.
const PAIRS: usize = 128;

impl<I: Isa> NativeKernel for Rope<I> {
    const OPS: &'static [&'static str] = &["posenc.rope"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<I>(op, "rope", 55);
        let mut inputs = reference.inputs.clone();
        inputs.extend(floats(&["input", "cos", "sin"]));
        // Above torch's kernels (35 to 50): one pass over memory, where plain torch makes a tensor for each step.
        KernelDescriptor { dtypes: FLOATS, inputs, requires_last_dim_stride1: true, ..reference }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let input = args.args.input(INPUT).ok_or_else(|| KernelError::Failed("no input".into()))?;
        with_float!(input.dtype(), T => run::<I, T>(args, input))
    }
}

fn run<I: Isa, T: Narrow>(args: &mut KernelArgs<'_, '_>, input: TensorRef<'_>) -> Result<(), KernelError> {
    check::<I>()?;
    let table = |at: usize| Table::of(args.args.input(at).ok_or_else(|| KernelError::Failed("no table".into()))?);
    let (cos, sin) = (table(COS)?, table(SIN)?);
    let [seq, heads, head_dim, rot] = ["seq", "heads", "head_dim", "rot"].map(|name| args.dim(name));
    let layout = args.layout("input");
    let batch = if layout == Layout::Nhd { 1 } else { input.shape()[0] };
    let positions = Positions::of(args.args.input(POSITIONS), batch, seq, args.dim("table"))?;
    let pairs = if rot == head_dim { head_dim / 2 } else { rot } as usize;
    let interleaved = args.flag("interleaved");
    let rows = input.rows::<T>()?;
    let threads = args.args.threads();
    let output = args.args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let (seq, heads, head_dim) = (seq as usize, heads as usize, head_dim as usize);
    let per_part = rows_per_thread(rows.count(), size_of_val(output), threads.count());
    threads.each_chunk(output, per_part * head_dim, |part, output| {
        let position = |row: usize| {
            let at = if layout == Layout::Bhsd { row % seq } else { row / heads % seq };
            positions.get((row / (heads * seq)) as i64, at as i64)
        };
        I::vectorize(Turned { rows, cos, sin, position, pairs, interleaved, first: part * per_part, output });
    });
    Ok(())
}

/// The rows of a table of cosines or sines.
#[derive(Clone, Copy)]
enum Table<'a> {
    F32(Rows<'a, f32>),
    F16(Rows<'a, f16>),
    Bf16(Rows<'a, bf16>),
}

impl<'a> Table<'a> {
    fn of(table: TensorRef<'a>) -> Result<Table<'a>, KernelError> {
        Ok(match table.dtype() {
            DType::F16 => Table::F16(table.rows()?),
            DType::Bf16 => Table::Bf16(table.rows()?),
            _ => Table::F32(table.rows()?),
        })
    }

    /// Some of the numbers of a row, from `start` on.
    #[inline(always)]
    fn read(&self, row: usize, start: usize, to: &mut [f32]) {
        let end = start + to.len();
        match self {
            Table::F32(rows) => f32::widen(&rows.get(row)[start..end], to),
            Table::F16(rows) => f16::widen(&rows.get(row)[start..end], to),
            Table::Bf16(rows) => bf16::widen(&rows.get(row)[start..end], to),
        }
    }
}

/// Some rows.
struct Turned<'a, T: Narrow, P: Fn(usize) -> usize> {
    rows: Rows<'a, T>,
    cos: Table<'a>,
    sin: Table<'a>,
    /// The row of the tables that belongs to a row of the input.
    position: P,
    pairs: usize,
    interleaved: bool,
    first: usize,
    output: &'a mut [T],
}

impl<T: Narrow, P: Fn(usize) -> usize> Work for Turned<'_, T, P> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut cos, mut sin) = ([0f32; PAIRS], [0f32; PAIRS]);
        let (mut x, mut y, mut both) = ([0f32; PAIRS], [0f32; PAIRS], [0f32; 2 * PAIRS]);
        let mut read = None;
        for (i, output) in self.output.chunks_exact_mut(self.rows.len()).enumerate() {
            let (row, position) = (self.rows.get(self.first + i), (self.position)(self.first + i));
            for start in (0..self.pairs).step_by(PAIRS) {
                let n = PAIRS.min(self.pairs - start);
                let (cos, sin, x, y) = (&mut cos[..n], &mut sin[..n], &mut x[..n], &mut y[..n]);
                if read != Some((position, start)) {
                    self.cos.read(position, start, cos);
                    self.sin.read(position, start, sin);
                    read = Some((position, start));
                }
                if self.interleaved {
                    let (given, both) = (2 * start..2 * (start + n), &mut both[..2 * n]);
                    T::widen(&row[given.clone()], both);
                    for (pair, (x, y)) in both.chunks_exact(2).zip(x.iter_mut().zip(&mut *y)) {
                        (*x, *y) = (pair[0], pair[1]);
                    }
                    turn(x, y, cos, sin);
                    for (pair, (x, y)) in both.chunks_exact_mut(2).zip(x.iter().zip(&*y)) {
                        (pair[0], pair[1]) = (*x, *y);
                    }
                    T::narrow(both, &mut output[given]);
                } else {
                    let (a, b) = (start..start + n, self.pairs + start..self.pairs + start + n);
                    T::widen(&row[a.clone()], x);
                    T::widen(&row[b.clone()], y);
                    turn(x, y, cos, sin);
                    T::narrow(x, &mut output[a]);
                    T::narrow(y, &mut output[b]);
                }
            }
            output[2 * self.pairs..].copy_from_slice(&row[2 * self.pairs..]);
        }
    }
}

/// (x, y) becomes (x cos - y sin, y cos + x sin).
#[inline(always)]
fn turn(x: &mut [f32], y: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((x, y), (cos, sin)) in x.iter_mut().zip(y).zip(cos.iter().zip(sin)) {
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, Layout, ParamValue, Tensor};
    use proptest::prelude::*;

    fn float() -> impl Strategy<Value = DType> {
        prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            layout in prop_oneof![Just(Layout::Bshd), Just(Layout::Bhsd), Just(Layout::Nhd)],
            (batch, seq, heads) in (0i64..3, 0i64..5, 1i64..4),
            (half, rest, whole) in (prop_oneof![1i64..40, 126i64..131], 0i64..3, any::<bool>()),
            (dtype, table) in (float(), float()),
            (interleaved, placed) in (any::<bool>(), 0..3),
            (gap, seed) in (0i64..3, any::<u64>()),
        ) {
            // Tables as wide as a head hold everything twice.
            let (rot, head_dim) = if whole { (2 * half, 2 * half) } else { (half, 2 * half + rest) };
            let (shape, batch): (&[i64], i64) = match layout {
                Layout::Nhd => (&[seq, heads, head_dim], 1),
                Layout::Bhsd => (&[batch, heads, seq, head_dim], batch),
                _ => (&[batch, seq, heads, head_dim], batch),
            };
            let padded: Vec<i64> = shape[..shape.len() - 1].iter().copied().chain([head_dim + gap]).collect();
            let x = drawn(dtype, &padded, seed);
            let (cos, sin) = (drawn(table, &[seq + 3, rot], seed + 1), drawn(table, &[seq + 3, rot], seed + 2));
            let of = |rows: i64| (0..rows * seq).map(|i| (i * 5 + 1) % (seq + 3)).collect::<Vec<i64>>();
            let positions = match placed {
                0 => None,
                1 => Some(Tensor::from_ints(DType::I32, &[seq], &of(1))),
                _ => Some(Tensor::from_ints(DType::I64, &[batch, seq], &of(batch))),
            };
            let mut inputs = vec![("input", strided(&x, shape)), ("cos", cos.view()), ("sin", sin.view())];
            inputs.extend(positions.as_ref().map(|p| ("positions", p.view())));
            let params = [("interleaved", ParamValue::Bool(interleaved))];
            Agreement::of("posenc.rope", "lz_cpu.rope").check(&inputs, &params, Some(layout));
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let x = drawn(DType::F32, &[2, 40, 8, 64], 1);
        let (cos, sin) = (drawn(DType::F32, &[40, 32], 2), drawn(DType::F32, &[40, 32], 3));
        let inputs = [("input", x.view()), ("cos", cos.view()), ("sin", sin.view())];
        Agreement::of("posenc.rope", "lz_cpu.rope").check(&inputs, &[], Some(Layout::Bshd));
    }

    #[test]
    fn a_position_beyond_the_tables_is_the_callers_mistake() {
        let x = drawn(DType::F32, &[1, 2, 1, 4], 1);
        let table = drawn(DType::F32, &[2, 2], 2);
        let positions = Tensor::from_ints(DType::I64, &[2], &[0, 2]);
        let inputs =
            [("input", x.view()), ("cos", table.view()), ("sin", table.view()), ("positions", positions.view())];
        let error = Agreement::of("posenc.rope", "lz_cpu.rope").fails(&inputs, &[], None);
        assert_eq!(error, "positions[1] is 2, but cos and sin have rows 0 to below 2");
    }
}
