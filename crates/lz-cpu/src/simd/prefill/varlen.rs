//! Attention of many queries within packed sequences, by the tiles of `prefill`.

use std::marker::PhantomData;
use std::ops::Range;

use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

use super::super::half_floats::Narrow;
use super::super::{Isa, check, with_float};
use super::mask::MaskBias;
use super::tile::{Bounds, Path, ROWS, Tile};
use super::widened::Widened;
use super::{Cut, Scoring, Target, described, each_item, given, number_of_call};
use crate::kernel::NativeKernel;
use crate::reference::reach::Reach;
use crate::reference::varlen::sequences;

/// The kernel, for an instruction set.
pub struct Varlen<I>(PhantomData<I>);

/// Below torch's fused kernel (45), and above its unfused one (30).
pub(super) const PRIORITY: i32 = 40;

impl<I: Isa> NativeKernel for Varlen<I> {
    const OPS: &'static [&'static str] = &["attention.standard.prefill.varlen", "attention.gqa.prefill.varlen"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        described::<I>(op, PRIORITY)
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        with_float!(given(args, "query")?.dtype(), T => packed::<Widened<I>, T>(args))
    }
}

/// The tiles of a sequence for each key/value head.
struct Sequence {
    rows: Range<i64>,
    tokens: Range<i64>,
    cut: Cut,
    /// Tiles of all sequences up to its end.
    tiles: usize,
}

pub(super) fn packed<P: Path<T>, T: Narrow>(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    check::<P::Isa>()?;
    let [query, key, value] = [given(args, "query")?, given(args, "key")?, given(args, "value")?];
    let (queries, keys, values) = (query.rows::<T>()?, key.rows::<T>()?, value.rows::<T>()?);
    let [heads, kv_heads, v_dim, head_dim] =
        ["heads", "kv_heads", "v_dim", "head_dim"].map(|name| args.dim(name) as usize);
    let (reach, scoring) = (Reach::of(args), Scoring::of(args));
    let (rows, tokens) = sequences(args)?;
    let group = heads / kv_heads.max(1);
    let (mut tiles, mut products) = (0, 0.0);
    let mut all: Vec<Sequence> = Vec::with_capacity(rows.len());
    for (rows, tokens) in rows.into_iter().zip(tokens) {
        if rows.is_empty() || tokens.is_empty() {
            continue;
        }
        let count = (rows.end - rows.start) as usize;
        let cut = Cut::new(count, group);
        tiles += cut.count(group);
        products += count as f64 * (tokens.end - tokens.start) as f64;
        all.push(Sequence { rows, tokens, cut, tiles });
    }
    let output = args.args.outputs[0].as_slice::<T>()?;
    // Rows that belong to no sequence, or attend to nothing.
    output.chunks_mut(v_dim.max(1)).for_each(|row| T::narrow(&[0f32; super::tile::WIDEST][..row.len()], row));
    let target = Target::new(output, v_dim);
    let operations = products * (heads * (head_dim + v_dim)) as f64;
    let call = number_of_call();
    each_item(args, tiles * kv_heads, operations, |item, scratch| {
        let (kv_head, tile) = (item / tiles, item % tiles);
        let number = all.partition_point(|sequence| sequence.tiles <= tile);
        let Sequence { rows, tokens, cut, tiles } = &all[number];
        let (count, first) = cut.tile(tile + cut.count(group) - tiles);
        let length = tokens.end - tokens.start;
        // The row of a lane's query in the result, and its place in its sequence.
        let at = |lane: usize| {
            let (head, i) = cut.place(first + lane);
            ((rows.start as usize + i) * heads + kv_head * group + head, i as i64)
        };
        let none: &[T] = &[];
        let mut lanes = [none; ROWS];
        for (lane, to) in lanes.iter_mut().enumerate().take(count) {
            *to = queries.get(at(lane).0);
        }
        let offset = length - (rows.end - rows.start);
        let bounds = Bounds::new(reach, length, count, |lane| at(lane).1 + offset);
        let tile = Tile {
            queries: &lanes[..count],
            keys: keys.along(0, &[0, kv_head]),
            values: values.along(0, &[0, kv_head]),
            start: tokens.start as usize,
            count: length as usize,
            head: (call, number * kv_heads + kv_head),
            bounds: &bounds,
            bias: MaskBias::None,
            scale: scoring.scale,
            softcap: scoring.softcap,
            v_dim,
        };
        P::attend(tile, scratch, &mut |lane, numbers| {
            // SAFETY: every row is in one sequence, every query in one tile, and every tile is one item.
            #[allow(unsafe_code)]
            unsafe {
                target.write(at(lane).0, numbers);
            }
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::super::checking::{Agreement, drawn};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    fn kernels(group: i64) -> Agreement {
        let (op, kernel) = match group {
            1 => ("attention.standard.prefill.varlen", "lz_cpu.attention.standard.prefill.varlen"),
            _ => ("attention.gqa.prefill.varlen", "lz_cpu.attention.gqa.prefill.varlen"),
        };
        Agreement::of(op, kernel).within(4e-6).rounding(4e-3)
    }

    /// Bounds of sequences of these lengths, after `skipped` rows that belong to none.
    fn bounds(skipped: i64, lengths: &[i64]) -> Tensor {
        let mut ends = vec![skipped];
        lengths.iter().for_each(|n| ends.push(ends[ends.len() - 1] + n));
        Tensor::from_ints(DType::I32, &[ends.len() as i64], &ends)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn it_gives_what_the_reference_gives(
            lengths in prop::collection::vec((prop_oneof![0i64..9, 60i64..70], prop_oneof![0i64..9, 60i64..140]), 0..5),
            (kv_heads, group, width, skipped) in (1i64..3, 1i64..4, prop_oneof![1i64..20, Just(64i64)], 0i64..3),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (causal, seed) in (any::<bool>(), any::<u64>()),
            (left, softcap) in (prop_oneof![Just(-1i64), 0i64..70], prop_oneof![Just(0.0), Just(5.0)]),
        ) {
            let (rows, tokens): (Vec<i64>, Vec<i64>) = lengths.into_iter().unzip();
            let (all_rows, all_tokens) = (skipped + rows.iter().sum::<i64>() + 1, skipped + tokens.iter().sum::<i64>() + 1);
            let q = drawn(dtype, &[all_rows, kv_heads * group, width], seed);
            let (k, v) = (drawn(dtype, &[all_tokens, kv_heads, width], seed + 1), drawn(dtype, &[all_tokens, kv_heads, width], seed + 2));
            let (rows, tokens) = (bounds(skipped, &rows), bounds(skipped, &tokens));
            let inputs = [
                ("query", q.view()),
                ("key", k.view()),
                ("value", v.view()),
                ("cu_seqlens_q", rows.view()),
                ("cu_seqlens_k", tokens.view()),
            ];
            let params = [
                ("causal", ParamValue::Bool(causal)),
                ("window_left", ParamValue::Int(left)),
                ("softcap", ParamValue::Float(softcap)),
            ];
            kernels(group).check(&inputs, &params, None);
        }
    }

    #[test]
    fn bounds_that_do_not_fit_are_the_callers_fault() {
        let tensor = drawn(DType::F32, &[4, 1, 8], 1);
        let (rows, tokens) = (bounds(0, &[2, 3]), bounds(0, &[2, 2]));
        let inputs = [
            ("query", tensor.view()),
            ("key", tensor.view()),
            ("value", tensor.view()),
            ("cu_seqlens_q", rows.view()),
            ("cu_seqlens_k", tokens.view()),
        ];
        assert!(kernels(1).fails(&inputs, &[], None).contains("cu_seqlens_q[2] is 5"));
    }
}
