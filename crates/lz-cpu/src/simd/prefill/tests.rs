//! Attention of many queries against the reference, for every instruction set.

use super::super::checking::{Agreement, drawn};
use super::*;
use lz_model::{ParamValue, Tensor, TensorView};
use proptest::prelude::*;

/// Scores of up to 30 are sums of up to 256 products, one after the other, and weights their exponentials.
const OFF: f64 = 1e-5;
/// Weights that are rounded to bfloat16 are off by 2^-9 of themselves, and so is their sum; values are up to 1.
const ROUNDED: f64 = 4e-3;

fn kernels(op: &'static str) -> Agreement {
    let kernel = match op {
        "attention.standard.prefill" => "lz_cpu.attention.standard.prefill",
        "attention.gqa.prefill" => "lz_cpu.attention.gqa.prefill",
        _ => "lz_cpu.attention.cross.prefill",
    };
    Agreement::of(op, kernel).within(OFF).rounding(ROUNDED)
}

fn float() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
}

fn width() -> impl Strategy<Value = i64> {
    prop_oneof![1i64..20, 60i64..70, Just(128i64), Just(256i64)]
}

fn edge() -> impl Strategy<Value = i64> {
    prop_oneof![2i64..4, 15i64..18, 31i64..34, 47i64..50, 63i64..66, 127i64..131]
}

/// (batch, tokens, heads, width), or with heads first; a part of a longer tensor, so that neither is without gaps.
fn longer(dtype: DType, [batch, tokens, heads, width]: [i64; 4], heads_first: bool, seed: u64) -> Tensor {
    let shape = if heads_first { [batch, heads, tokens + 3, width] } else { [batch, tokens + 3, heads, width] };
    drawn(dtype, &shape, seed)
}

fn seen<'a>(of: &'a Tensor, tokens: i64, heads_first: bool) -> TensorView<'a> {
    let view = of.view();
    let mut shape = view.shape().to_vec();
    shape[if heads_first { 2 } else { 1 }] = tokens;
    TensorView::strided(of.dtype(), &shape, view.strides(), 0, of.bytes()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn it_gives_what_the_reference_gives(
        (batch, kv_heads, group) in (0i64..3, 1i64..3, 1i64..5),
        (queries, more) in (prop_oneof![2i64..20, 60i64..70, 95i64..130], prop_oneof![-3i64..5, 60i64..70]),
        (width, v_dim) in (width(), width()),
        dtype in float(),
        (heads_first, cross, causal, seed) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<u64>()),
        scale in prop_oneof![Just(None), Just(Some(0.3)), Just(Some(-1.0)), Just(Some(1e-45))],
        softcap in prop_oneof![Just(0.0), Just(0.7), Just(30.0)],
        (left, right) in (prop_oneof![Just(-1i64), 0i64..70, Just(i64::MAX)], prop_oneof![Just(-1i64), 0i64..70]),
    ) {
        let tokens = if causal && !cross { queries + more.max(0) } else { (queries + more).max(0) };
        let heads = kv_heads * group;
        let q = longer(dtype, [batch, queries, heads, width], heads_first, seed);
        let k = longer(dtype, [batch, tokens, kv_heads, width], heads_first, seed + 1);
        let v = longer(dtype, [batch, tokens, kv_heads, v_dim], heads_first, seed + 2);
        let inputs = [
            ("query", seen(&q, queries, heads_first)),
            ("key", seen(&k, tokens, heads_first)),
            ("value", seen(&v, tokens, heads_first)),
        ];
        let mut params = vec![("softcap", ParamValue::Float(softcap))];
        params.extend(scale.map(|scale| ("scale", ParamValue::Float(scale))));
        let op = match (cross, group) {
            (true, _) => "attention.cross.prefill",
            (false, 1) => "attention.standard.prefill",
            _ => "attention.gqa.prefill",
        };
        if !cross {
            params.extend([
                ("window_left", ParamValue::Int(left)),
                ("window_right", ParamValue::Int(right)),
                ("causal", ParamValue::Bool(causal)),
            ]);
        }
        kernels(op).check(&inputs, &params, Some(if heads_first { Layout::Bhsd } else { Layout::Bshd }));
    }

    /// Around the edges of blocks: 16 and 32 queries, 16, 32 and 64 keys, 32 elements of a key, 16 of a value. The first call of a
    /// thread and the next ones find memory of other sizes.
    #[test]
    fn pairs_of_bfloat16_end_anywhere(
        (queries, tokens) in (edge(), edge()),
        (width, v_dim) in (prop_oneof![Just(1i64), 15i64..18, 31i64..34, 63i64..66], prop_oneof![Just(1i64), 15i64..18, 31i64..34]),
        (kv_heads, group) in (1i64..3, prop_oneof![Just(1i64), Just(3i64)]),
        (causal, seed) in (any::<bool>(), any::<u64>()),
        (left, softcap) in (prop_oneof![Just(-1i64), 0i64..70], prop_oneof![Just(0.0), Just(5.0)]),
    ) {
        let tokens = if causal { tokens.max(queries) } else { tokens };
        let q = drawn(DType::Bf16, &[1, kv_heads * group, queries, width], seed);
        let k = drawn(DType::Bf16, &[1, kv_heads, tokens, width], seed + 1);
        let v = drawn(DType::Bf16, &[1, kv_heads, tokens, v_dim], seed + 2);
        let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view())];
        let params = [
            ("causal", ParamValue::Bool(causal)),
            ("window_left", ParamValue::Int(left)),
            ("softcap", ParamValue::Float(softcap)),
            ("scale", ParamValue::Float(1.0)),
        ];
        let op = if group == 1 { "attention.standard.prefill" } else { "attention.gqa.prefill" };
        kernels(op).check(&inputs, &params, Some(Layout::Bhsd));
    }

    #[test]
    fn masks_count(
        (queries, tokens, group) in (2i64..70, 1i64..140, 1i64..4),
        kind in prop_oneof![Just(DType::Bool), Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
        (per_batch, per_head, per_query, short) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
        seed in any::<u64>(),
    ) {
        let dtype = if kind == DType::Bool { DType::F32 } else { kind };
        let q = drawn(dtype, &[2, 2 * group, queries, 24], seed);
        let (k, v) = (drawn(dtype, &[2, 2, tokens, 24], seed + 1), drawn(dtype, &[2, 2, tokens, 24], seed + 2));
        let size = |given: bool, n: i64| if given { n } else { 1 };
        let full = [size(per_batch, 2), size(per_head, 2 * group), size(per_query, queries), tokens];
        let shape = if short { &full[2..] } else { &full[..] };
        let numbers = drawn(DType::F32, shape, seed + 3).to_f64().into_iter();
        let numbers: Vec<f64> = match kind {
            DType::Bool => numbers.map(|x| f64::from(x > -0.4)).collect(),
            _ => numbers.map(|x| if x < -0.7 { f64::NEG_INFINITY } else { 3.0 * x }).collect(),
        };
        let mask = Tensor::from_f64(kind, shape, &numbers);
        let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view()), ("attn_mask", mask.view())];
        let op = if group == 1 { "attention.standard.prefill" } else { "attention.gqa.prefill" };
        kernels(op).check(&inputs, &[("causal", ParamValue::Bool(false))], Some(Layout::Bhsd));
    }
}

#[test]
fn what_is_far_below_the_largest_score_has_no_weight() {
    // 64 keys of score 0 with large values, then one of score 200 in the next tile.
    let mut keys = vec![0.0; 65];
    keys[64] = 200.0;
    let values: Vec<f64> = (0..65).map(|at| if at < 64 { 5e36 } else { 1.0 }).collect();
    let query = Tensor::from_f64(DType::F32, &[1, 2, 1, 1], &[1.0, 1.0]);
    let [key, value] = [&keys, &values].map(|of| Tensor::from_f64(DType::F32, &[1, 65, 1, 1], of));
    let inputs = [("query", query.view()), ("key", key.view()), ("value", value.view())];
    let params = [("causal", ParamValue::Bool(false)), ("scale", ParamValue::Float(1.0))];
    kernels("attention.standard.prefill").check(&inputs, &params, Some(Layout::Bshd));
}

#[test]
fn a_nan_or_an_infinity_stays_with_its_query() {
    for bad in [f64::NAN, f64::INFINITY] {
        let mut numbers = drawn(DType::F32, &[1, 70, 1, 8], 1).to_f64();
        numbers[3 * 8..4 * 8].fill(bad);
        let query = Tensor::from_f64(DType::F32, &[1, 70, 1, 8], &numbers);
        let key = Tensor::from_f64(DType::F32, &[1, 70, 1, 8], &[0.5; 560]);
        let inputs = [("query", query.view()), ("key", key.view()), ("value", key.view())];
        kernels("attention.standard.prefill").check(&inputs, &[], Some(Layout::Bshd));
    }
}

/// A mask of each dtype excludes all keys of query 3, which is NaN or infinite, and every other key of query 4.
#[test]
fn a_key_that_a_mask_excludes_has_no_weight_whatever_its_score() {
    for kind in [DType::Bool, DType::F32, DType::F16, DType::Bf16] {
        let dtype = if kind == DType::Bool { DType::F32 } else { kind };
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut numbers = drawn(dtype, &[1, 2, 40, 8], 1).to_f64();
            numbers[3 * 8..4 * 8].fill(bad);
            let query = Tensor::from_f64(dtype, &[1, 2, 40, 8], &numbers);
            let [key, value] = [2, 3].map(|seed| drawn(dtype, &[1, 2, 70, 8], seed));
            let excluded = |i: usize| i / 70 == 3 || i / 70 == 4 && i.is_multiple_of(2);
            let (no, yes) = if kind == DType::Bool { (0.0, 1.0) } else { (f64::NEG_INFINITY, 0.0) };
            let mask: Vec<f64> = (0..40 * 70).map(|i| if excluded(i) { no } else { yes }).collect();
            let mask = Tensor::from_f64(kind, &[40, 70], &mask);
            let inputs =
                [("query", query.view()), ("key", key.view()), ("value", value.view()), ("attn_mask", mask.view())];
            let params = [("causal", ParamValue::Bool(false))];
            kernels("attention.standard.prefill").check(&inputs, &params, Some(Layout::Bhsd));
        }
    }
}

#[test]
fn a_window_that_leaves_a_query_nothing_gives_zeros() {
    let (query, key) = (drawn(DType::F32, &[1, 80, 2, 8], 1), drawn(DType::F32, &[1, 5, 1, 8], 2));
    let inputs = [("query", query.view()), ("key", key.view()), ("value", key.view())];
    let params = [
        ("causal", ParamValue::Bool(false)),
        ("window_left", ParamValue::Int(2)),
        ("window_right", ParamValue::Int(0)),
    ];
    kernels("attention.gqa.prefill").check(&inputs, &params, Some(Layout::Bshd));
}

/// More than a thread keeps of a head: its blocks are made again for each tile.
#[test]
fn a_long_head_is_not_kept() {
    let [q, k, v] = [40, 9000, 9000].map(|tokens| drawn(DType::Bf16, &[1, 1, tokens, 64], tokens as u64));
    let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view())];
    kernels("attention.standard.prefill").check(&inputs, &[("causal", ParamValue::Bool(true))], Some(Layout::Bhsd));
}

#[test]
fn every_query_is_in_one_tile() {
    for queries in 2..200 {
        for group in 1..9 {
            let cut = Cut::new(queries, group);
            let tiles = (0..cut.count(group)).map(|tile| cut.tile(tile));
            let all: Vec<usize> = tiles.flat_map(|(count, first)| first..first + count).collect();
            assert_eq!(all, (0..queries * group).collect::<Vec<_>>(), "{queries} of {group}");
            assert!((0..cut.count(group)).all(|tile| cut.tile(tile).0 <= ROWS));
        }
    }
}
