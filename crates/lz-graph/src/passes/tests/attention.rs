//! Attention and its masks.

use super::build::*;
use crate::ir::{Dim, Graph, ValueId};
use crate::ops::Op;
use crate::ops::attention::Attention;
use crate::ops::binary::BinaryKind::{self, *};
use crate::ops::full::Full;
use crate::ops::reduce::ReduceKind;
use crate::ops::select::Where;
use crate::ops::triangle::Triangle;
use crate::ops::unary::UnaryKind;
use lz_abi::{DType, Tensor};

fn found(graph: &Graph) -> Attention {
    match only(graph, "attention") {
        Op::Attention(attention) => attention.clone(),
        _ => unreachable!(),
    }
}

/// q, k and v of 2 heads with 4 numbers each, as torch's layers give them.
fn heads(b: &mut Build, length: &str, rank: usize) -> [ValueId; 3] {
    [0; 3].map(|_| match rank {
        4 => {
            let x = b.input(&format!("1 {length} 2 4"));
            b.permute(x, &[0, 2, 1, 3])
        }
        3 => b.input(&format!("2 {length} 4")),
        _ => b.input(&format!("{length} 4")),
    })
}

fn swap(rank: usize) -> Vec<usize> {
    let mut axes: Vec<usize> = (0..rank).collect();
    axes.swap(rank - 2, rank - 1);
    axes
}

/// `softmax(q·kᵀ / 2)·v`, with what happens to the scores.
fn eager(b: &mut Build, [q, k, v]: [ValueId; 3], masked: impl FnOnce(&mut Build, ValueId) -> ValueId) -> ValueId {
    let rank = b.graph.meta(q).rank();
    let turned = b.permute(k, &swap(rank));
    let scores = b.matmul(q, turned);
    let two = b.number(2.0);
    let scores = b.div(scores, two);
    let scores = masked(b, scores);
    let weights = b.softmax(scores, -1);
    b.matmul(weights, v)
}

#[test]
fn attention_is_found_in_all_ranks() {
    for rank in [2, 3, 4] {
        let mut b = Build::new();
        let qkv = heads(&mut b, "s0", rank);
        let y = eager(&mut b, qkv, |_, scores| scores);
        let graph = optimized(&b.output(y));
        assert_eq!(found(&graph).scale, Some(0.5), "rank {rank}");
        assert!(ops(&graph).iter().all(|name| ["attention", "reshape", "permute"].contains(&name.as_str())));
    }
}

#[test]
fn softmax_that_is_written_out_is_attention_too() {
    let mut b = Build::new();
    let qkv @ [q, k, v] = heads(&mut b, "s0", 4);
    let turned = b.permute(k, &swap(4));
    let q2 = b.times(q, 0.5);
    let scores = b.matmul(q2, turned);
    let max = b.reduce(ReduceKind::Max, scores, -1);
    let centred = b.sub(scores, max);
    let exp = b.unary(UnaryKind::Exp, centred);
    let sum = b.reduce(ReduceKind::Sum, exp, -1);
    let weights = b.div(exp, sum);
    let y = b.matmul(weights, v);
    let graph = optimized(&b.output(y));
    assert_eq!((found(&graph).scale, graph.len()), (Some(0.5), 4), "{:?}", ops(&graph));
    let _ = qkv;
}

#[test]
fn casts_and_a_cap_are_a_part_of_it() {
    let mut b = Build::of(DType::Bf16);
    let [q, k, v] = heads(&mut b, "s0", 4);
    let turned = b.permute(k, &swap(4));
    let scores = b.matmul(q, turned);
    let wide = b.cast(scores, DType::F32);
    let weights = b.softmax(wide, 3);
    let weights = b.cast(weights, DType::Bf16);
    let y = b.matmul(weights, v);
    let graph = optimized(&b.output(y));
    assert_eq!(found(&graph).softcap, None);
    let mut b = Build::new();
    let qkv = heads(&mut b, "s0", 4);
    let y = eager(&mut b, qkv, |b, scores| {
        let cap = b.number(5.0);
        let scores = b.div(scores, cap);
        let scores = b.unary(UnaryKind::Tanh, scores);
        b.times(scores, 5.0)
    });
    let graph = optimized(&b.output(y));
    assert_eq!(found(&graph).softcap, Some(5.0));
}

#[test]
fn a_scale_before_heads_are_split_is_found() {
    let mut b = Build::new();
    let (x, k, v) = (b.input("1 s0 8"), b.input("1 2 s0 4"), b.input("1 2 s0 4"));
    let x = b.times(x, 3.0);
    let q = b.reshape(x, "1 s0 2 4");
    let q = b.permute(q, &[0, 2, 1, 3]);
    let y = b.attention(q, k, v, None);
    let graph = optimized(&b.output(y));
    assert_eq!((found(&graph).scale, ops(&graph).len()), (Some(1.5), 3));
    // Something else reads the scaled value.
    let mut b = Build::new();
    let (x, k, v) = (b.input("1 2 s0 4"), b.input("1 2 s0 4"), b.input("1 2 s0 4"));
    let q = b.times(x, 3.0);
    let y = b.attention(q, k, v, None);
    let y = b.add(y, q);
    assert_eq!(left(&b.output(y)), ["mul", "attention", "add"]);
}

#[test]
fn what_is_nearly_attention_is_not() {
    for wrong in 0..5 {
        let mut b = Build::new();
        let qkv @ [q, k, v] = [0; 3].map(|_| b.input("1 2 4 4"));
        let turned = b.permute(k, &swap(4));
        let scores = if wrong == 0 { b.matmul(q, k) } else { b.matmul(q, turned) };
        let weights = b.softmax(scores, if wrong == 1 { 2 } else { 3 });
        let weights = if wrong == 2 { b.permute(weights, &swap(4)) } else { weights };
        let mut y = b.matmul(weights, v);
        if wrong == 3 {
            y = b.add(y, weights);
        }
        if wrong == 4 {
            y = b.add(y, scores);
        }
        let names = left(&b.output(y));
        assert!(!names.contains(&"attention".to_owned()), "{wrong}: {names:?}");
        let _ = qkv;
    }
}

fn repeated(b: &mut Build, x: ValueId, group: i64, before: bool) -> ValueId {
    let five = if before { "1 1 2 s0 4" } else { "1 2 1 s0 4" };
    let column = b.reshape(x, five);
    let wide = if before { format!("1 {group} 2 s0 4") } else { format!("1 2 {group} s0 4") };
    let wide = b.expand(column, &wide);
    b.reshape(wide, &format!("1 {} s0 4", 2 * group))
}

#[test]
fn repeated_heads_are_read_as_they_are() {
    let mut b = Build::new();
    let (q, k, v) = (b.input("1 6 s0 4"), b.input("1 2 s0 4"), b.input("1 2 s0 4"));
    let (wide, values) = (repeated(&mut b, k, 3, false), repeated(&mut b, v, 3, false));
    let y = eager(&mut b, [q, wide, values], |_, scores| scores);
    assert_eq!(left(&b.output(y)), ["attention"]);
    // Heads in turn (a, b, a, b) are not heads one after another (a, a, b, b).
    let mut b = Build::new();
    let (q, k, v) = (b.input("1 6 s0 4"), b.input("1 2 s0 4"), b.input("1 2 s0 4"));
    let (wide, values) = (repeated(&mut b, k, 3, true), repeated(&mut b, v, 3, true));
    let y = b.attention(q, wide, values, None);
    assert_eq!(left(&b.output(y)).len(), 7);
}

/// Heads that are taken out of the batch are not those the keys have, although sizes with symbols let both pass.
#[test]
fn heads_out_of_the_batch_are_not_repeated_heads() {
    let mut b = Build::new();
    let (q, k) = (b.input("1 4*s0 5 4"), b.input("s0 2 5 4"));
    let column = b.reshape(k, "1 2*s0 1 5 4");
    let wide = b.expand(column, "1 2*s0 2 5 4");
    let k = b.reshape(wide, "1 4*s0 5 4");
    let y = b.attention(q, k, k, None);
    assert_eq!(left(&b.output(y)), ["reshape", "expand", "reshape", "attention"]);
}

/// Attention with a mask of truth values, or numbers, over `queries` and `keys`.
fn masked(queries: &str, keys: &str, mask: impl FnOnce(&mut Build) -> ValueId) -> Build {
    let mut b = Build::new();
    let mask = mask(&mut b);
    let (q, k) = (b.input(&format!("1 2 {queries} 4")), b.input(&format!("1 2 {keys} 4")));
    let y = b.attention(q, k, k, Some(mask));
    b.output(y)
}

/// Truth values for constant masks.
fn kept(b: &mut Build, queries: i64, keys: i64, keep: impl Fn(i64, i64) -> bool) -> ValueId {
    let kept: Vec<i64> = (0..queries * keys).map(|n| i64::from(keep(n / keys, n % keys))).collect();
    b.tensor(Tensor::from_ints(DType::Bool, &[1, 1, queries, keys], &kept))
}

fn expect(b: &Build, causal: bool, top_left: bool, window: Option<i64>) {
    let graph = optimized(b);
    let attention = found(&graph);
    assert_eq!((attention.causal, attention.top_left, attention.window), (causal, top_left, window));
    assert_eq!(ops(&graph), ["attention"], "the mask is gone");
}

fn stays(b: &Build) {
    let graph = optimized(b);
    let node = graph.nodes().find(|(_, node)| matches!(node.op, Op::Attention(_))).unwrap().1;
    assert!(node.inputs.len() == 4 && !found(&graph).causal, "{:?}", ops(&graph));
}

#[test]
fn constant_masks_are_recognised() {
    expect(&masked("5", "5", |b| kept(b, 5, 5, |i, j| j <= i)), true, false, None);
    expect(&masked("3", "5", |b| kept(b, 3, 5, |i, j| j <= i + 2)), true, false, None);
    expect(&masked("3", "5", |b| kept(b, 3, 5, |i, j| j <= i)), true, true, None);
    expect(&masked("5", "5", |b| kept(b, 5, 5, |i, j| j <= i && i - j <= 1)), true, false, Some(1));
    expect(&masked("5", "5", |b| kept(b, 5, 5, |_, _| true)), false, false, None);
    expect(&masked("1", "5", |b| kept(b, 1, 5, |_, _| true)), false, false, None);
    for out in [f64::NEG_INFINITY, f64::from(f32::MIN), -1e9] {
        let float = |b: &mut Build| {
            let numbers: Vec<f64> = (0..25).map(|n| if n % 5 <= n / 5 { 0.0 } else { out }).collect();
            b.tensor(Tensor::from_f64(DType::F64, &[5, 5], &numbers))
        };
        expect(&masked("5", "5", float), true, false, None);
    }
}

#[test]
fn masks_that_are_not_causal_stay() {
    stays(&masked("5", "5", |b| kept(b, 5, 5, |i, j| j < i || i == 0)));
    stays(&masked("5", "5", |b| kept(b, 5, 5, |i, j| j <= i + 1)));
    stays(&masked("5", "5", |b| kept(b, 5, 5, |i, j| j <= i && (i, j) != (4, 1))));
    stays(&masked("5", "5", |b| kept(b, 5, 5, |i, j| j >= i)));
    stays(&masked("3", "5", |b| kept(b, 3, 5, |i, j| j <= i + 1)));
    // Numbers that only make keys less likely.
    for out in [-10.0, 3.0] {
        let float = |b: &mut Build| {
            let numbers: Vec<f64> = (0..25).map(|n| if n % 5 <= n / 5 { 0.0 } else { out }).collect();
            b.tensor(Tensor::from_f64(DType::F64, &[5, 5], &numbers))
        };
        stays(&masked("5", "5", float));
    }
    // Another mask for each head.
    let heads = |b: &mut Build| {
        let kept: Vec<i64> = (0..50).map(|n| i64::from(n >= 25 || n % 5 <= n / 5)).collect();
        b.tensor(Tensor::from_ints(DType::Bool, &[1, 2, 5, 5], &kept))
    };
    stays(&masked("5", "5", heads));
}

/// `i + past` for the queries as a column, and j for the keys as a row.
fn positions(b: &mut Build, past: &str, queries: &str, keys: &str) -> (ValueId, ValueId) {
    let (i, j) = (b.iota(past, queries), b.iota("0", keys));
    (b.reshape(i, &format!("{queries} 1")), b.reshape(j, &format!("1 {keys}")))
}

fn compared(b: &mut Build, kind: BinaryKind, past: &str, queries: &str, keys: &str) -> ValueId {
    let (i, j) = positions(b, past, queries, keys);
    b.binary(kind, i, j)
}

#[test]
fn masks_of_positions_are_recognised_for_every_size() {
    expect(&masked("s0", "s0", |b| compared(b, Ge, "0", "s0", "s0")), true, false, None);
    // Queries behind a cache of s1 - s0 keys.
    expect(&masked("s0", "s1", |b| compared(b, Ge, "s1 - s0", "s0", "s1")), true, false, None);
    expect(&masked("s0", "s1", |b| compared(b, Ge, "0", "s0", "s1")), true, true, None);
    // Not the other way round: !(i < j), as numbers.
    expect(
        &masked("s0", "s0", |b| {
            let above = compared(b, Lt, "0", "s0", "s0");
            let (zero, out) = (b.number(0.0), b.number(f64::NEG_INFINITY));
            b.op(Where {}, &[above, out, zero])
        }),
        true,
        false,
        None,
    );
    // A window: i - j < 3, with a mask of ones that is "and"ed, and leading axes.
    let window = |b: &mut Build| {
        let (i, j) = positions(b, "0", "s0", "s0");
        let causal = b.binary(Le, j, i);
        let three = b.tensor(Tensor::from_ints(DType::I64, &[], &[3]));
        let oldest = b.sub(i, three);
        let near = b.binary(Gt, j, oldest);
        let ones = b.op(Full { shape: dims("s0 s0"), value: 1.0.into(), dtype: DType::Bool }, &[]);
        let both = b.binary(And, ones, near);
        let both = b.binary(And, both, causal);
        let four = b.reshape(both, "1 1 s0 s0");
        b.expand(four, "1 2 s0 s0")
    };
    expect(&masked("s0", "s0", window), true, false, Some(2));
}

#[test]
fn masks_of_triangles_are_recognised() {
    let triangle = |upper, diagonal| Triangle { upper, diagonal };
    let full = |value: f64, dtype| Full { shape: dims("s0 s0"), value: value.into(), dtype };
    expect(
        &masked("s0", "s0", |b| {
            let ones = b.op(full(1.0, DType::Bool), &[]);
            b.op(triangle(false, 0), &[ones])
        }),
        true,
        false,
        None,
    );
    // Numbers above the diagonal.
    expect(
        &masked("s0", "s0", |b| {
            let out = b.op(full(f64::NEG_INFINITY, DType::F64), &[]);
            b.op(triangle(true, 1), &[out])
        }),
        true,
        false,
        None,
    );
    // masked_fill(mask == 0, -inf) of a part of a constant of 8 × 8, as GPT-2 has it.
    expect(
        &masked("s0", "s0", |b| {
            let kept: Vec<f64> = (0..64).map(|n| if n % 8 <= n / 8 { 1.0 } else { 0.0 }).collect();
            let whole = b.tensor(Tensor::from_f64(DType::F64, &[8, 8], &kept));
            let size = || Dim::symbol("s0");
            let rows = crate::ops::slice::Slice { axis: 0, start: 0.into(), end: size(), step: 1 };
            let columns = crate::ops::slice::Slice { axis: 1, ..rows.clone() };
            let part = b.op(rows, &[whole]);
            let part = b.op(columns, &[part]);
            let zero = b.number(0.0);
            let out = b.binary(Eq, part, zero);
            let minus = b.number(f64::NEG_INFINITY);
            b.op(Where {}, &[out, minus, zero])
        }),
        true,
        false,
        None,
    );
    stays(&masked("s0", "s0", |b| {
        let ones = b.op(full(1.0, DType::Bool), &[]);
        b.op(triangle(false, 1), &[ones])
    }));
    stays(&masked("s0", "s0", |b| compared(b, Le, "0", "s0", "s0")));
    stays(&masked("s0", "s0", |b| {
        // What the caller says is not known.
        b.dtype = DType::Bool;
        let given = b.input("s0 s0");
        b.dtype = DType::F64;
        let causal = compared(b, Ge, "0", "s0", "s0");
        b.binary(And, causal, given)
    }));
}

#[test]
fn a_causal_mask_in_the_scores_is_recognised() {
    // Added, and chosen.
    for added in [true, false] {
        let mut b = Build::new();
        let keep = compared(&mut b, Ge, "0", "s0", "s0");
        let (zero, out) = (b.number(0.0), b.number(f64::NEG_INFINITY));
        let qkv = heads(&mut b, "s0", 4);
        let y = eager(&mut b, qkv, |b, scores| match added {
            true => {
                let mask = b.op(Where {}, &[keep, zero, out]);
                b.add(mask, scores)
            }
            false => b.op(Where {}, &[keep, scores, out]),
        });
        let graph = optimized(&b.output(y));
        assert!(found(&graph).causal);
        assert_eq!(graph.len(), 4, "{:?}", ops(&graph));
    }
    // A number that is large, and not so large that a score is lost in the sum.
    for (kind, is_attention) in [(Ge, true), (Gt, false)] {
        let mut b = Build::new();
        let keep = compared(&mut b, kind, "0", "s0", "s0");
        let out = b.number(-1e9);
        let qkv = heads(&mut b, "s0", 4);
        let y = eager(&mut b, qkv, |b, scores| b.op(Where {}, &[keep, scores, out]));
        // The first query has no key in the second case: it has the mean of all values.
        assert_eq!(left(&b.output(y)).contains(&"attention".to_owned()), is_attention);
    }
    let mut b = Build::new();
    let keep = compared(&mut b, Gt, "0", "s0", "s0");
    let out = b.number(f64::from(f32::MIN));
    let qkv = heads(&mut b, "s0", 4);
    let y = eager(&mut b, qkv, |b, scores| b.op(Where {}, &[keep, scores, out]));
    let graph = optimized(&b.output(y));
    assert!(!found(&graph).causal);
    // A choice of a number that does not hide.
    let mut b = Build::new();
    let keep = compared(&mut b, Ge, "0", "s0", "s0");
    let out = b.number(-3.0);
    let qkv = heads(&mut b, "s0", 4);
    let y = eager(&mut b, qkv, |b, scores| b.op(Where {}, &[keep, scores, out]));
    assert!(left(&b.output(y)).contains(&"softmax".to_owned()));
}
