//! Attention of one new query per sequence over its cache: which calls it takes, where keys and values are, and which thread
//! computes what. `decode_heads` has the arithmetic.

use std::marker::PhantomData;

use lz_abi::{Line, Rows, TensorRef};
use lz_model::{
    DType, DimRule, KernelArgs, KernelDescriptor, KernelError, KvStrategy, Layout, Op, ParamRule, Preferred, Scalar,
};

use super::decode_heads::{Cache, Group, HEADS, Span, WIDEST};
use super::half_floats::Narrow;
use super::{FLOATS, Isa, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;
use crate::reference::arguments::Arguments;
use crate::reference::pages::PageTable;
use crate::reference::reach::Reach;

/// Over keys and values in one tensor each, for an instruction set.
pub struct Decode<I>(PhantomData<I>);

/// Over a paged cache, for an instruction set.
pub struct DecodePaged<I>(PhantomData<I>);

/// Below torch's fused kernel (60); where it is ahead of it, above.
const PRIORITY: i32 = 50;
const PRIORITY_AHEAD: i32 = 65;
/// Where torch's fused kernel is not faster (`layerzero bench cpu`). That one is with one query head for each key/value head, and in
/// bfloat16 on CPUs with instructions for it; it repeats shared heads in memory, and has no softcap. Of a window it is given the
/// keys in reach alone.
const AHEAD: &str = "softcap > 0.0 or query.dtype == 'float16' or query.dtype == 'float32' and heads != kv_heads";

/// What both descriptors have in common.
fn narrowed(reference: KernelDescriptor, wide: &[&str], tensors: &[&str]) -> KernelDescriptor {
    let (mut inputs, mut params, mut dims) =
        (reference.inputs.clone(), reference.params.clone(), reference.dims.clone());
    // What it does not read, it does not take.
    for name in ["attn_mask", "alibi_slopes", "sinks"] {
        inputs.remove(name);
    }
    inputs.extend(floats(tensors));
    if params.contains_key("dropout_p") {
        params.insert(
            "dropout_p".to_owned(),
            ParamRule { one_of: Some(vec![Scalar::Float(0.0)]), ..ParamRule::default() },
        );
    }
    let fits = DimRule { min: Some(1), max: Some(WIDEST as i64), ..DimRule::default() };
    dims.extend(wide.iter().map(|&name| (name.to_owned(), fits.clone())));
    KernelDescriptor { dtypes: FLOATS, inputs, params, dims, requires_last_dim_stride1: true, ..reference }
}

impl<I: Isa> NativeKernel for Decode<I> {
    const OPS: &'static [&'static str] =
        &["attention.standard.decode", "attention.gqa.decode", "attention.cross.decode"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<I>(op, op.id(), PRIORITY);
        let reference = narrowed(reference, &["head_dim", "v_dim"], &["query", "key", "value"]);
        let preferred = Some(Preferred { when: AHEAD.into(), priority: PRIORITY_AHEAD + I::PRIORITY });
        KernelDescriptor { preferred, ..reference }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        with_float!(dtype_of(args)?, T => dense::<I, T>(args))
    }
}

impl<I: Isa> NativeKernel for DecodePaged<I> {
    const OPS: &'static [&'static str] = &["attention.standard.decode.paged", "attention.gqa.decode.paged"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<I>(op, op.id(), PRIORITY_AHEAD);
        let reference = KernelDescriptor { kv_strategies: vec![KvStrategy::Paged], ..reference };
        let reference = narrowed(reference, &["head_dim"], &["query", "key_cache", "value_cache"]);
        KernelDescriptor { conditions: vec!["query.dtype == key_cache.dtype".into()], ..reference }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        with_float!(dtype_of(args)?, T => paged::<I, T>(args))
    }
}

fn dtype_of(args: &KernelArgs<'_, '_>) -> Result<DType, KernelError> {
    Ok(given(args, "query")?.dtype())
}

fn given<'t>(args: &KernelArgs<'_, 't>, name: &str) -> Result<TensorRef<'t>, KernelError> {
    args.input(name).ok_or_else(|| KernelError::Failed(format!("no {name}")))
}

fn dense<I: Isa, T: Narrow>(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    check::<I>()?;
    let [key, value] = [given(args, "key")?, given(args, "value")?];
    let (keys, values) = (key.rows::<T>()?, value.rows::<T>()?);
    let tokens = args.dim("seq_k");
    let heads_first = args.layout("query") == Layout::Bhsd;
    let first = Reach::of(args).first_key(tokens - 1).min(tokens) as usize;
    let span = Span { first, end: tokens as usize };
    let cache = |sequence: usize, head: usize| {
        let (axis, at) = if heads_first { (2, [sequence, head, 0]) } else { (1, [sequence, 0, head]) };
        (Contiguous { keys: keys.along(axis, &at), values: values.along(axis, &at) }, span)
    };
    let bytes = key.len().saturating_add(value.len()) * size_of::<T>();
    attend::<I, T, _>(args, args.dim("v_dim") as usize, bytes, cache)
}

fn paged<I: Isa, T: Narrow>(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    check::<I>()?;
    let (keys, values) = (given(args, "key_cache")?.rows::<T>()?, given(args, "value_cache")?.rows::<T>()?);
    let (tables, lens) = (given(args, "block_tables")?, given(args, "context_lens")?);
    let [batch, num_blocks, block_size, kv_heads, head_dim] =
        ["batch", "num_blocks", "block_size", "kv_heads", "head_dim"].map(|name| args.dim(name));
    let (reach, heads_first) = (Reach::of(args), args.layout("key_cache") == Layout::Hnd);
    let span = |sequence: i64| {
        let len = lens.get_int(&[sequence]);
        Span { first: reach.first_key(len.saturating_sub(1)).clamp(0, len.max(0)) as usize, end: len.max(0) as usize }
    };
    // All is checked before anything is computed; the reference says what is wrong.
    let capacity = tables.shape()[1].saturating_mul(block_size);
    let mut tokens = 0;
    for sequence in 0..batch {
        let span = span(sequence);
        let pages =
            span.first as i64 / block_size.max(1)..(span.end as i64).saturating_add(block_size - 1) / block_size.max(1);
        let fits = (0..=capacity).contains(&lens.get_int(&[sequence]));
        if !fits || !pages.into_iter().all(|page| (0..num_blocks).contains(&tables.get_int(&[sequence, page]))) {
            PageTable::of(args).context(sequence, |len| reach.first_key(len.saturating_sub(1)))?;
        }
        tokens += span.end - span.first;
    }
    let cache = |sequence: usize, head: usize| {
        let cache =
            Paged { keys, values, tables, sequence: sequence as i64, head, size: block_size as usize, heads_first };
        (cache, span(sequence as i64))
    };
    let bytes = 2 * tokens * (kv_heads * head_dim) as usize * size_of::<T>();
    attend::<I, T, _>(args, head_dim as usize, bytes, cache)
}

#[derive(Clone, Copy)]
struct Contiguous<'a, T> {
    keys: Line<'a, T>,
    values: Line<'a, T>,
}

impl<'a, T: Narrow> Cache<'a, T> for Contiguous<'a, T> {
    #[inline(always)]
    fn read(&self, first: usize, to: &mut [(&'a [T], &'a [T])]) {
        for (i, to) in to.iter_mut().enumerate() {
            *to = (self.keys.get(first + i), self.values.get(first + i));
        }
    }
}

#[derive(Clone, Copy)]
struct Paged<'a, T> {
    keys: Rows<'a, T>,
    values: Rows<'a, T>,
    tables: TensorRef<'a>,
    sequence: i64,
    head: usize,
    size: usize,
    heads_first: bool,
}

impl<'a, T: Narrow> Cache<'a, T> for Paged<'a, T> {
    #[inline(always)]
    fn read(&self, first: usize, to: &mut [(&'a [T], &'a [T])]) {
        let (mut page, mut slot, mut left) = (first / self.size, first % self.size, to);
        while !left.is_empty() {
            let (now, rest) = left.split_at_mut((self.size - slot).min(left.len()));
            let number = self.tables.get_int(&[self.sequence, page as i64]) as usize;
            let (axis, at) = if self.heads_first { (2, [number, self.head, 0]) } else { (1, [number, 0, self.head]) };
            let (keys, values) = (self.keys.along(axis, &at), self.values.along(axis, &at));
            for (i, to) in now.iter_mut().enumerate() {
                *to = (keys.get(slot + i), values.get(slot + i));
            }
            (page, slot, left) = (page + 1, 0, rest);
        }
    }
}

/// Shares the key/value heads of all sequences among threads. `bytes`: of the keys and values that are read.
fn attend<'a, I: Isa, T: Narrow, C: Cache<'a, T>>(
    args: &mut KernelArgs<'_, '_>,
    v_dim: usize,
    bytes: usize,
    cache: impl Fn(usize, usize) -> (C, Span) + Sync,
) -> Result<(), KernelError> {
    let queries = given(args, "query")?.rows::<T>()?;
    let [batch, heads, kv_heads] = ["batch", "heads", "kv_heads"].map(|name| args.dim(name) as usize);
    let usual = 1.0 / (queries.len().max(1) as f64).sqrt();
    let scale = args.param("scale").as_float().unwrap_or(usual) as f32;
    let cap = args.float_or("softcap", 0.0);
    // A cap that float32 does not hold is still one.
    let softcap = if cap > 0.0 { (cap as f32).max(f32::MIN_POSITIVE) } else { 0.0 };
    let (group, threads) = (heads / kv_heads.max(1), args.args.threads());
    let output = args.args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let per_part = rows_per_thread(batch * kv_heads, bytes, threads.count());
    threads.each_chunk(output, per_part * group * v_dim, |part, output| {
        for (i, output) in output.chunks_exact_mut(group * v_dim).enumerate() {
            let item = part * per_part + i;
            let (cache, span) = cache(item / kv_heads, item % kv_heads);
            // Heads follow each other, and so do those of one key/value head.
            for (pass, output) in output.chunks_mut(HEADS * v_dim).enumerate() {
                let first = item * group + pass * HEADS;
                let group = Group { queries, first, cache: &cache, span, scale, softcap, v_dim, output };
                group.attend::<I>();
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn};
    use lz_model::{DType, Layout, ParamValue, Tensor, TensorView};
    use proptest::prelude::*;

    /// Scores are sums of so many products, and weights their exponentials.
    const OFF: f64 = 4e-6;

    fn dense(op: &'static str) -> Agreement {
        let kernel = match op {
            "attention.standard.decode" => "lz_cpu.attention.standard.decode",
            "attention.gqa.decode" => "lz_cpu.attention.gqa.decode",
            _ => "lz_cpu.attention.cross.decode",
        };
        Agreement::of(op, kernel).within(OFF)
    }

    fn paged(op: &'static str) -> Agreement {
        let kernel = if op == "attention.standard.decode.paged" {
            "lz_cpu.attention.standard.decode.paged"
        } else {
            "lz_cpu.attention.gqa.decode.paged"
        };
        Agreement::of(op, kernel).within(OFF)
    }

    fn float() -> impl Strategy<Value = DType> {
        prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
    }

    fn width() -> impl Strategy<Value = i64> {
        prop_oneof![1i64..70, Just(128i64), Just(256i64)]
    }

    /// Numbers of a tensor in the order (batch, tokens, heads, width), seen in that order or with heads first: a part of a longer
    /// cache, so that neither is without gaps.
    fn cached(dtype: DType, [batch, tokens, heads, width]: [i64; 4], heads_first: bool, seed: u64) -> Tensor {
        if heads_first {
            drawn(dtype, &[batch, heads, tokens + 3, width], seed)
        } else {
            drawn(dtype, &[batch, tokens + 3, heads, width], seed)
        }
    }

    fn seen<'a>(of: &'a Tensor, tokens: i64, heads_first: bool) -> TensorView<'a> {
        let view = of.view();
        let mut shape = view.shape().to_vec();
        shape[if heads_first { 2 } else { 1 }] = tokens;
        TensorView::strided(of.dtype(), &shape, view.strides(), 0, of.bytes()).unwrap()
    }

    #[test]
    fn what_is_far_below_the_largest_score_has_no_weight() {
        // 64 keys of score 0 with large values, then one of score 200 in the next tile.
        let mut keys = vec![0.0; 65];
        keys[64] = 200.0;
        let values: Vec<f64> = (0..65).map(|at| if at < 64 { 5e36 } else { 1.0 }).collect();
        let query = Tensor::from_f64(DType::F32, &[1, 1, 2, 1], &[1.0, 1.0]);
        let [key, value] = [&keys, &values].map(|of| Tensor::from_f64(DType::F32, &[1, 65, 1, 1], of));
        let inputs = [("query", query.view()), ("key", key.view()), ("value", value.view())];
        let params = [("causal", ParamValue::Bool(false)), ("scale", ParamValue::Float(1.0))];
        dense("attention.gqa.decode").check(&inputs, &params, Some(Layout::Bshd));
    }

    #[test]
    fn a_cap_below_float32_is_a_cap() {
        let query = drawn(DType::F32, &[1, 1, 2, 8], 1);
        let [key, value] = [2, 3].map(|seed| drawn(DType::F32, &[1, 9, 1, 8], seed));
        let inputs = [("query", query.view()), ("key", key.view()), ("value", value.view())];
        let params = [("causal", ParamValue::Bool(false)), ("softcap", ParamValue::Float(1e-46))];
        dense("attention.gqa.decode").check(&inputs, &params, Some(Layout::Bshd));
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (batch, kv_heads, group) in (0i64..3, 1i64..4, prop_oneof![1i64..10, Just(17i64)]),
            tokens in prop_oneof![0i64..5, 60i64..70, 120i64..200],
            (width, v_dim) in (width(), width()),
            dtype in float(),
            (heads_first, cross, seed) in (any::<bool>(), any::<bool>(), any::<u64>()),
            scale in prop_oneof![Just(None), Just(Some(0.3)), Just(Some(-1.0)), Just(Some(1e-45))],
            softcap in prop_oneof![Just(0.0), Just(0.7), Just(30.0)],
            window in prop_oneof![Just(-1i64), 0i64..5, 60i64..70, Just(i64::MAX)],
        ) {
            let heads = kv_heads * group;
            let q = if heads_first { [batch, heads, 1, width] } else { [batch, 1, heads, width] };
            let q = drawn(dtype, &q, seed);
            let k = cached(dtype, [batch, tokens, kv_heads, width], heads_first, seed + 1);
            let v = cached(dtype, [batch, tokens, kv_heads, v_dim], heads_first, seed + 2);
            let inputs = [("query", q.view()), ("key", seen(&k, tokens, heads_first)), ("value", seen(&v, tokens, heads_first))];
            let mut params = vec![("softcap", ParamValue::Float(softcap))];
            params.extend(scale.map(|scale| ("scale", ParamValue::Float(scale))));
            let op = match (cross, group) {
                (true, _) => "attention.cross.decode",
                (false, 1) => "attention.standard.decode",
                _ => "attention.gqa.decode",
            };
            if !cross {
                params.extend([("window_left", ParamValue::Int(window)), ("causal", ParamValue::Bool(tokens > 0))]);
            }
            let layout = if heads_first { Layout::Bhsd } else { Layout::Bshd };
            dense(op).check(&inputs, &params, Some(layout));
        }

        #[test]
        fn pages_are_read_where_they_are(
            (batch, kv_heads, group) in (0i64..4, 1i64..3, prop_oneof![1i64..6, Just(9i64)]),
            (width, size) in (width(), prop_oneof![Just(1i64), Just(3i64), Just(16i64), Just(100i64)]),
            lens in proptest::collection::vec(prop_oneof![0i64..5, 60i64..70, 100i64..200], 4),
            dtype in float(),
            (heads_first, unit, wide, seed) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<u64>()),
            (softcap, window) in (prop_oneof![Just(0.0), Just(0.7)], prop_oneof![Just(-1i64), 0i64..5, 60i64..70]),
        ) {
            let (heads, columns) = (kv_heads * group, 200 / size + 1);
            let pages = columns * 2;
            let q = if unit { drawn(dtype, &[batch, 1, heads, width], seed) } else { drawn(dtype, &[batch, heads, width], seed) };
            let shape = if heads_first { [pages, kv_heads, size, width] } else { [pages, size, kv_heads, width] };
            let [k, v] = [seed + 1, seed + 2].map(|seed| drawn(dtype, &shape, seed));
            let ints = if wide { DType::I64 } else { DType::I32 };
            let tables: Vec<i64> = (0..batch * columns).map(|i| (i * 7 + 3) % pages).collect();
            let tables = Tensor::from_ints(ints, &[batch, columns], &tables);
            let lens = Tensor::from_ints(ints, &[batch], &lens[..batch as usize]);
            let inputs = [
                ("query", q.view()),
                ("key_cache", k.view()),
                ("value_cache", v.view()),
                ("block_tables", tables.view()),
                ("context_lens", lens.view()),
            ];
            let op = if group == 1 { "attention.standard.decode.paged" } else { "attention.gqa.decode.paged" };
            let params = [("softcap", ParamValue::Float(softcap)), ("window_left", ParamValue::Int(window))];
            paged(op).check(&inputs, &params, Some(if heads_first { Layout::Hnd } else { Layout::Nhd }));
        }
    }

    /// One query with the value 1 over keys and values of one number each.
    fn one(keys: &[f64], values: &[f64]) {
        let column = |x: &[f64]| Tensor::from_f64(DType::F32, &[1, x.len() as i64, 1, 1], x);
        let (q, k, v) = (column(&[1.0]), column(keys), column(values));
        let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view())];
        dense("attention.standard.decode").check(&inputs, &[("scale", ParamValue::Float(1.0))], Some(Layout::Bshd));
    }

    #[test]
    fn scores_of_any_size_give_the_references_weights() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        // The largest score comes last, in another tile than the first, and far above it.
        let rising: Vec<f64> = (0..150).map(|i| f64::from(i) * 1.7).collect();
        let values: Vec<f64> = (0..150).map(f64::from).collect();
        one(&rising, &values);
        one(&rising.iter().map(|x| -x).collect::<Vec<_>>(), &values);
        for keys in [
            [0.0, -inf, 1.0],
            [-inf, -inf, -inf],
            [nan, 0.0, 1.0],
            [nan, nan, nan],
            [3e38, -3e38, 3e38],
            [inf, 0.0, 1.0],
        ] {
            one(&keys, &[1.0, 2.0, 4.0]);
        }
        let mut late = vec![0.0; 150];
        late[140] = nan;
        one(&late, &values);
        late[140] = inf;
        one(&late, &values);
        one(&[0.0, 0.0], &[3e38, -3e38]);
        one(&[0.0, 0.0], &[1e-44, 1e-45]);
        one(&[0.0, -200.0], &[1.0, 1e38]);
    }

    #[test]
    fn heads_are_shared_among_threads() {
        let (q, k) = (drawn(DType::F32, &[3, 1, 12, 64], 1), drawn(DType::F32, &[3, 90, 4, 64], 2));
        let inputs = [("query", q.view()), ("key", k.view()), ("value", k.view())];
        dense("attention.gqa.decode").check(&inputs, &[], Some(Layout::Bshd));
    }

    #[test]
    fn pages_and_lengths_that_cannot_be_are_the_callers_mistake() {
        let (q, cache) = (drawn(DType::F32, &[2, 1, 4], 1), drawn(DType::F32, &[3, 2, 1, 4], 2));
        let fails = |tables: [i64; 4], lens: [i64; 2], window: i64| {
            let tables = Tensor::from_ints(DType::I32, &[2, 2], &tables);
            let lens = Tensor::from_ints(DType::I32, &[2], &lens);
            let inputs = [
                ("query", q.view()),
                ("key_cache", cache.view()),
                ("value_cache", cache.view()),
                ("block_tables", tables.view()),
                ("context_lens", lens.view()),
            ];
            let window = [("window_left", ParamValue::Int(window))];
            let agreement = paged("attention.standard.decode.paged");
            if tables.to_f64()[2] == 99.0 {
                agreement.check(&inputs, &window, Some(Layout::Nhd));
                return String::new();
            }
            agreement.fails(&inputs, &window, Some(Layout::Nhd))
        };
        assert_eq!(fails([0, 1, 2, 3], [4, 3], -1), "block_tables[1, 1] is 3, expected an index from 0 to below 3");
        assert_eq!(fails([0, -1, 2, 0], [3, 2], -1), "block_tables[0, 1] is -1, expected an index from 0 to below 3");
        assert_eq!(
            fails([0, 1, 2, 0], [4, 5], -1),
            "context_lens[1] is 5, expected 0 to 4, which is what its pages hold"
        );
        assert_eq!(
            fails([0, 1, 2, 0], [-1, 2], -1),
            "context_lens[0] is -1, expected 0 to 4, which is what its pages hold"
        );
        // Pages that nothing is read of may be anything.
        assert_eq!(fails([0, 1, 99, 1], [4, 4], 1), "");
    }
}
