//! Tidying, folding, activations, norms, softmax.

use super::build::*;
use crate::ir::{Dim, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind::*;
use crate::ops::full::Full;
use crate::ops::reduce::ReduceKind;
use crate::ops::unary::UnaryKind::{self, *};
use lz_abi::{DType, Tensor};

/// `0.5 · x · (1 + tanh(√(2/π) · (x + c · x³)))`.
fn gelu_tanh(b: &mut Build, x: ValueId, c: f64) -> ValueId {
    let three = b.number(3.0);
    let cube = b.binary(Pow, x, three);
    let scaled = b.times(cube, c);
    let sum = b.add(x, scaled);
    let inner = b.times(sum, (2.0 / std::f64::consts::PI).sqrt());
    let tanh = b.unary(Tanh, inner);
    let one = b.plus(tanh, 1.0);
    let half = b.times(x, 0.5);
    b.mul(half, one)
}

fn gelu_erf(b: &mut Build, x: ValueId, root: f64) -> ValueId {
    let two = b.number(root);
    let inner = b.div(x, two);
    let erf = b.unary(Erf, inner);
    let one = b.plus(erf, 1.0);
    let product = b.mul(one, x);
    b.times(product, 0.5)
}

#[test]
fn what_changes_nothing_is_taken_out() {
    let mut b = Build::new();
    let x = b.input("s0 6");
    let mut y = b.unary(Tanh, x);
    y = b.times(y, 1.0);
    y = b.plus(y, 0.0);
    let one = b.number(1.0);
    y = b.div(y, one);
    y = b.reshape(y, "s0 6");
    y = b.permute(y, &[0, 1]);
    y = b.expand(y, "s0 6");
    y = b.slice(y, 1, 0, 6, 1);
    y = b.cast(y, DType::F64);
    y = b.reshape(y, "s0 2 3");
    y = b.reshape(y, "6 s0");
    y = b.permute(y, &[1, 0]);
    y = b.permute(y, &[1, 0]);
    let b = b.output(y);
    assert_eq!(left(&b), ["tanh", "reshape"]);
}

#[test]
fn what_changes_something_stays() {
    let mut b = Build::new();
    let x = b.input("1 6");
    let wide = b.number(2.0);
    let y = b.times(x, 2.0);
    let y = b.sub(wide, y);
    // The sum with zeros of a larger size repeats the input.
    let zeros = b.op(Full { shape: dims("3 6"), value: 0.0.into(), dtype: DType::F64 }, &[]);
    let y = b.add(y, zeros);
    let y = b.slice(y, 1, 0, 5, 1);
    // A cast to a narrower type rounds.
    let y = b.cast(y, DType::Bf16);
    let y = b.cast(y, DType::F64);
    let b = b.output(y);
    assert_eq!(left(&b), ["mul", "sub", "full", "add", "slice", "cast", "cast"]);
}

#[test]
fn a_widening_cast_and_back_is_nothing() {
    let mut b = Build::of(DType::Bf16);
    let x = b.input("4");
    let y = b.unary(Neg, x);
    let wide = b.cast(y, DType::F32);
    let back = b.cast(wide, DType::Bf16);
    let y = b.unary(Abs, back);
    assert_eq!(left(&b.output(y)), ["neg", "abs"]);
}

#[test]
fn a_result_that_is_an_input_stays_a_node() {
    let mut b = Build::new();
    let x = b.input("4");
    let y = b.times(x, 1.0);
    assert_eq!(left(&b.output(y)), ["mul"]);
}

#[test]
fn equal_nodes_become_one() {
    let mut b = Build::new();
    let x = b.input("4");
    let (p, q) = (b.times(x, 3.0), b.times(x, 3.0));
    let (p, q) = (b.unary(Exp, p), b.unary(Exp, q));
    let y = b.sub(p, q);
    // Another attribute or other inputs make another node.
    let z = b.unary(Tanh, x);
    let y = b.add(y, z);
    assert_eq!(left(&b.output(y)), ["mul", "exp", "sub", "tanh", "add"]);
}

#[test]
fn constants_are_computed_once_and_not_blown_up() {
    let mut b = Build::new();
    let x = b.input("2 3");
    let (w, v) = (b.weight(&[3]), b.weight(&[3]));
    let sum = b.add(w, v);
    let y = b.mul(x, sum);
    let wide = b.expand(sum, "2 3");
    let y = b.add(y, wide);
    assert_eq!(left(&b.output(y)), ["mul", "expand", "add"], "a repeated constant is not kept");
    // 4 MiB out of 24 bytes.
    let mut b = Build::new();
    let x = b.input("1");
    let w = b.weight(&[3]);
    let wide = b.expand(w, "200000 3");
    let large = b.unary(Tanh, wide);
    let large = b.mul(large, x);
    let y = b.reduce(ReduceKind::Sum, large, 0);
    assert_eq!(left(&b.output(y)), ["expand", "tanh", "mul", "reduce"]);
    // Nor is it made on the way to something small.
    let mut b = Build::new();
    let (x, w) = (b.input("3"), b.weight(&[3]));
    let wide = b.expand(w, "200000 3");
    let sum = b.op(crate::ops::reduce::Reduce { kind: ReduceKind::Max, axes: vec![0], keepdim: false }, &[wide]);
    let y = b.mul(x, sum);
    assert_eq!(left(&b.output(y)), ["expand", "reduce", "mul"]);
}

#[test]
fn what_fails_is_left_for_the_run() {
    let mut b = Build::of(DType::I64);
    let (a, zero) = (b.tensor(Tensor::from_ints(DType::I64, &[1], &[3])), b.number(0.0));
    let bad = b.binary(Remainder, a, zero);
    let x = b.input("1");
    let y = b.add(x, bad);
    let b = b.output(y);
    let mut graph = b.graph.clone();
    super::super::optimize(&mut graph, &Default::default()).unwrap();
    assert_eq!(ops(&graph), ["remainder", "add"]);
}

#[test]
fn gelu_is_found_in_both_forms() {
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        let mut b = Build::of(dtype);
        let x = b.input("s0 5");
        let tanh = gelu_tanh(&mut b, x, 0.044715);
        let erf = gelu_erf(&mut b, tanh, 2.0f64.sqrt());
        assert_eq!(left(&b.output(erf)), ["gelutanh", "gelu"], "{dtype}");
    }
    // x · x · x, and √(2/π) · x · (1 + 0.044715 · x²).
    let mut b = Build::new();
    let x = b.input("5");
    let square = b.mul(x, x);
    let scaled = b.times(square, 0.044715);
    let sum = b.plus(scaled, 1.0);
    let rooted = b.times(x, 0.797_884_560_8);
    let inner = b.mul(rooted, sum);
    let tanh = b.unary(Tanh, inner);
    let one = b.plus(tanh, 1.0);
    let half = b.times(x, 0.5);
    let y = b.mul(half, one);
    assert_eq!(left(&b.output(y)), ["gelutanh"]);
}

#[test]
fn what_is_nearly_gelu_is_not() {
    for wrong in 0..4 {
        let mut b = Build::new();
        let x = b.input("5");
        let other = b.unary(Neg, x);
        let mut y = match wrong {
            0 => gelu_tanh(&mut b, x, 0.0447),
            1 => gelu_erf(&mut b, x, 1.5),
            _ => gelu_erf(&mut b, x, 2.0f64.sqrt()),
        };
        if wrong == 2 {
            // Something else reads what is inside.
            let erf = b.graph.nodes().find(|(_, node)| describe(&node.op) == "erf").unwrap().1.output;
            y = b.add(y, erf);
        }
        if wrong == 3 {
            // Another value in the place of one x.
            let (id, node) = b.graph.nodes().find(|(_, node)| describe(&node.op) == "mul").unwrap();
            let (op, inputs) =
                (node.op.clone(), node.inputs.iter().map(|i| if *i == Some(x) { Some(other) } else { *i }));
            let inputs: Vec<_> = inputs.collect();
            b.graph.change(id, op, &inputs).unwrap();
        }
        let found = left(&b.output(y));
        assert!(!found.iter().any(|name| name.starts_with("gelu")), "{wrong}: {found:?}");
    }
}

#[test]
fn silu_and_gates_are_found() {
    for kind in [UnaryKind::Silu, UnaryKind::Gelu, UnaryKind::GeluTanh] {
        let mut b = Build::new();
        let (x, up) = (b.input("s0 4"), b.input("s0 4"));
        let gate = match kind {
            UnaryKind::Silu => {
                let s = b.unary(Sigmoid, x);
                b.mul(s, x)
            }
            kind => b.unary(kind, x),
        };
        let y = b.mul(up, gate);
        assert_eq!(left(&b.output(y)), ["gated"], "{kind:?}");
    }
    // A gate of another size, one that is read twice, and a function that is no gate.
    let mut b = Build::new();
    let (x, up, row) = (b.input("s0 4"), b.input("s0 4"), b.input("4"));
    let narrow = b.unary(Silu, row);
    let p = b.mul(narrow, up);
    let twice = b.unary(Silu, x);
    let q = b.mul(twice, up);
    let relu = b.unary(Relu, up);
    let r = b.mul(relu, x);
    let y = b.add(p, q);
    let y = b.add(y, twice);
    let y = b.add(y, r);
    assert!(!left(&b.output(y)).contains(&"gated".to_owned()));
}

fn exp_over_sum(b: &mut Build, x: ValueId, max_axis: i64, sum_axis: i64) -> ValueId {
    let max = b.reduce(ReduceKind::Max, x, max_axis);
    let centred = b.sub(x, max);
    let exp = b.unary(Exp, centred);
    let sum = b.reduce(ReduceKind::Sum, exp, sum_axis);
    b.div(exp, sum)
}

#[test]
fn softmax_is_found_on_its_axis() {
    for axis in [0, 1, -1] {
        let mut b = Build::new();
        let x = b.input("2 3 s0");
        let y = exp_over_sum(&mut b, x, axis, axis);
        let graph = optimized(&b.output(y));
        let Op::Softmax(softmax) = only(&graph, "softmax") else { panic!() };
        assert_eq!((softmax.axis, graph.len()), ((axis + 3) % 3, 1));
    }
    let mut b = Build::new();
    let x = b.input("2 3 s0");
    let y = exp_over_sum(&mut b, x, 1, 2);
    assert!(!left(&b.output(y)).contains(&"softmax".to_owned()), "the maximum of another axis");
}

fn layer_norm(b: &mut Build, x: ValueId, axis: i64, width: i64) -> ValueId {
    let mean = b.reduce(ReduceKind::Mean, x, axis);
    let centred = b.sub(x, mean);
    let two = b.number(2.0);
    let squares = b.binary(Pow, centred, two);
    let variance = b.reduce(ReduceKind::Mean, squares, axis);
    let sum = b.plus(variance, 1e-5);
    let root = b.unary(Sqrt, sum);
    let y = b.div(centred, root);
    let (w, bias) = (b.weight(&[width]), b.weight(&[width]));
    let y = b.mul(w, y);
    b.add(y, bias)
}

#[test]
fn layer_norm_is_found_with_its_weights() {
    let mut b = Build::new();
    let x = b.input("2 s0 5");
    let y = layer_norm(&mut b, x, -1, 5);
    let graph = optimized(&b.output(y));
    assert_eq!(ops(&graph), ["layer_norm"]);
    assert_eq!(graph.nodes().next().unwrap().1.inputs.len(), 3);
    let mut b = Build::new();
    let x = b.input("2 5 5");
    let y = layer_norm(&mut b, x, 1, 5);
    assert!(!left(&b.output(y)).contains(&"layer_norm".to_owned()), "another axis");
}

fn rms_norm(b: &mut Build, x: ValueId, axis: i64) -> ValueId {
    let square = b.mul(x, x);
    let mean = b.reduce(ReduceKind::Mean, square, axis);
    let sum = b.plus(mean, 1e-6);
    let root = b.unary(Rsqrt, sum);
    b.mul(x, root)
}

#[test]
fn rms_norm_is_found_with_its_casts() {
    let mut b = Build::of(DType::Bf16);
    let x = b.input("2 s0 8");
    let w = b.weight(&[8]);
    let wide = b.cast(x, DType::F32);
    b.dtype = DType::F32;
    let y = rms_norm(&mut b, wide, -1);
    let y = b.cast(y, DType::Bf16);
    let y = b.mul(w, y);
    let graph = optimized(&b.output(y));
    assert_eq!(ops(&graph), ["rms_norm"]);
    let node = graph.nodes().next().unwrap().1;
    let Op::RmsNorm(norm) = &node.op else { panic!() };
    assert!((norm.eps - 1e-6).abs() < 1e-12 && node.inputs.to_vec() == [Some(x), Some(w)]);
}

#[test]
fn what_is_nearly_rms_norm_is_not() {
    // Another axis.
    let mut b = Build::new();
    let x = b.input("4 4");
    let y = rms_norm(&mut b, x, 0);
    assert!(!left(&b.output(y)).contains(&"rms_norm".to_owned()));
    // A weight for another axis is no part of it.
    let mut b = Build::new();
    let x = b.input("4 4");
    let y = rms_norm(&mut b, x, 1);
    let w = b.weight(&[4, 1]);
    let y = b.mul(y, w);
    assert_eq!(left(&b.output(y)), ["rms_norm", "mul"]);
    // A cast to a narrower type inside rounds, and stays.
    let mut b = Build::new();
    let x = b.input("4 4");
    let narrow = b.cast(x, DType::Bf16);
    b.dtype = DType::Bf16;
    let y = rms_norm(&mut b, narrow, 1);
    let y = b.cast(y, DType::F64);
    let mut graph = b.output(y).graph;
    super::super::optimize(&mut graph, &Default::default()).unwrap();
    assert_eq!(ops(&graph), ["cast", "rms_norm", "cast"]);
}

#[test]
fn norms_take_a_sum_that_nothing_else_reads() {
    let mut b = Build::new();
    let (x, r) = (b.input("s0 5"), b.input("s0 5"));
    let sum = b.add(x, r);
    let y = layer_norm(&mut b, sum, -1, 5);
    let (z, q) = (b.input("s0 5"), b.input("s0 5"));
    let sum = b.add(z, q);
    let z = rms_norm(&mut b, sum, -1);
    let y = b.mul(y, z);
    assert_eq!(left(&b.output(y)), ["add_layer_norm", "add_rms_norm", "mul"]);
    let mut b = Build::new();
    let (x, r) = (b.input("s0 5"), b.input("s0 5"));
    let sum = b.add(x, r);
    let y = rms_norm(&mut b, sum, -1);
    let y = b.add(y, sum);
    assert_eq!(left(&b.output(y)), ["add", "rms_norm", "add"], "the sum is read twice");
}

#[test]
fn sizes_with_symbols_are_compared_by_their_form() {
    let mut b = Build::new();
    let x = b.input("s0 s0");
    let y = b.unary(Tanh, x);
    let y = b.op(crate::ops::reshape::Reshape { shape: vec![Dim::parse("s0*s0").unwrap()] }, &[y]);
    let y = b.reshape(y, "s0 s0");
    assert_eq!(left(&b.output(y)), ["tanh"]);
}
