//! Products of matrices, linear layers, and rotary embedding.

use super::build::*;
use crate::ir::ValueId;
use crate::ops::Op;
use crate::ops::linear::Activation;
use crate::ops::matmul::MatMul;
use crate::ops::reduce::ReduceKind;
use crate::ops::unary::UnaryKind::*;

fn product(b: &Build) -> MatMul {
    match only(&optimized(b), "matmul") {
        Op::MatMul(product) => product.clone(),
        _ => unreachable!(),
    }
}

#[test]
fn swaps_of_the_last_two_axes_are_absorbed() {
    for (rank, axes) in [(2, vec![1, 0]), (3, vec![0, 2, 1]), (4, vec![0, 1, 3, 2])] {
        let mut b = Build::new();
        let sizes = ["4 3", "2 4 3", "5 2 4 3"][rank - 2];
        let (x, y) = (b.input(sizes), b.input(sizes));
        let (p, q) = (b.permute(x, &axes), b.permute(y, &axes));
        let right = b.matmul(x, q);
        let left_side = b.matmul(p, y);
        let b = b.output(right).output(left_side);
        let graph = optimized(&b);
        assert_eq!(ops(&graph), ["matmul", "matmul"], "rank {rank}");
    }
}

/// Spec 002: absorption once took every permute before a product, also those that split heads.
#[test]
fn permutes_of_other_axes_are_not_absorbed() {
    let mut b = Build::new();
    let (x, y) = (b.input("3 3 3 3"), b.input("3 3 3 3"));
    for axes in [[0, 2, 1, 3], [1, 0, 2, 3], [0, 3, 2, 1], [0, 2, 3, 1]] {
        let mut b = b.clone();
        let p = b.permute(y, &axes);
        let product = b.matmul(x, p);
        assert_eq!(left(&b.output(product)), ["permute", "matmul"], "{axes:?}");
    }
}

/// Spec 002: weights of two axes were read as if there were one for each leading index.
#[test]
fn leading_axes_are_broadcast_to_weights() {
    let mut b = Build::new();
    let x = b.input("2 3 s0 4");
    let y = b.linear(x, 4, 6);
    assert_eq!(left(&b.output(y)), ["linear"]);
}

#[test]
fn weights_are_turned_once() {
    let mut b = Build::new();
    let x = b.input("s0 4");
    let w = b.weight(&[4, 4]);
    let y = b.matmul(x, w);
    let y = b.matmul(y, w);
    let b = b.output(y);
    let graph = optimized(&b);
    assert_eq!(ops(&graph), ["linear", "linear"]);
    let weights: Vec<_> = graph.nodes().map(|(_, node)| node.inputs[1]).collect();
    assert_eq!(weights[0], weights[1]);
    // Matrices with leading axes stay, and so do inputs.
    let mut b = Build::new();
    let (x, v) = (b.input("2 s0 4"), b.input("4 4"));
    let w = b.weight(&[2, 4, 4]);
    let y = b.matmul(x, w);
    let y = b.matmul(y, v);
    assert_eq!(left(&b.output(y)), ["matmul", "matmul"]);
}

#[test]
fn numbers_become_alpha() {
    let mut b = Build::new();
    let (x, y) = (b.input("2 s0 4"), b.input("2 4 s0"));
    let x = b.times(x, 3.0);
    let four = b.number(4.0);
    let y = b.div(y, four);
    let z = b.matmul(x, y);
    let z = b.times(z, 8.0);
    let two = b.number(2.0);
    let z = b.div(z, two);
    assert_eq!(product(&b.output(z)).alpha, 3.0);
}

#[test]
fn numbers_that_others_need_do_not_become_alpha() {
    // The scaled input, or the product, is read by something else.
    let mut b = Build::new();
    let (x, y) = (b.input("2 2"), b.input("2 2"));
    let scaled = b.times(x, 3.0);
    let z = b.matmul(scaled, y);
    let z = b.add(z, scaled);
    assert_eq!(left(&b.output(z)), ["mul", "matmul", "add"]);
    let mut b = Build::new();
    let (x, y) = (b.input("2 2"), b.input("2 2"));
    let z = b.matmul(x, y);
    let scaled = b.times(z, 3.0);
    let z = b.add(z, scaled);
    assert_eq!(left(&b.output(z)), ["matmul", "mul", "add"]);
    // A vector is no number; a number divided by a product is no multiple of it.
    let mut b = Build::new();
    let (x, y) = (b.input("1 2 2"), b.input("1 2 2"));
    let z = b.matmul(x, y);
    let w = b.weight(&[2]);
    let z = b.mul(z, w);
    let q = b.matmul(z, y);
    let n = b.number(2.0);
    let z = b.div(n, q);
    assert_eq!(left(&b.output(z)), ["matmul", "mul", "matmul", "div"]);
}

fn biased(b: &mut Build, x: ValueId, width: i64, out: i64) -> ValueId {
    let y = b.linear(x, width, out);
    let bias = b.weight(&[out]);
    b.add(bias, y)
}

#[test]
fn bias_activation_and_residual_are_a_part_of_the_layer() {
    for (kind, expected) in
        [(Relu, Activation::Relu), (Gelu, Activation::Gelu), (GeluTanh, Activation::GeluTanh), (Silu, Activation::Silu)]
    {
        let mut b = Build::new();
        let (x, r) = (b.input("2 s0 4"), b.input("2 s0 6"));
        let y = biased(&mut b, x, 4, 6);
        let y = b.unary(kind, y);
        let y = b.add(r, y);
        let graph = optimized(&b.output(y));
        let Op::Linear(linear) = only(&graph, "linear") else { panic!() };
        assert_eq!((linear.activation, graph.len()), (expected, 1));
    }
    // Without a bias, and a residual without an activation.
    let mut b = Build::new();
    let (x, r) = (b.input("s0 4"), b.input("s0 6"));
    let y = b.linear(x, 4, 6);
    let y = b.add(y, r);
    assert_eq!(left(&b.output(y)), ["linear"]);
}

#[test]
fn what_a_layer_cannot_do_stays() {
    // A function that is none of its activations.
    let mut b = Build::new();
    let x = b.input("s0 4");
    let y = biased(&mut b, x, 4, 6);
    let y = b.unary(Tanh, y);
    assert_eq!(left(&b.output(y)), ["linear", "tanh"]);
    // The activation after the residual.
    let mut b = Build::new();
    let (x, r) = (b.input("s0 4"), b.input("s0 6"));
    let y = biased(&mut b, x, 4, 6);
    let y = b.add(y, r);
    let y = b.unary(Relu, y);
    assert_eq!(left(&b.output(y)), ["linear", "relu"]);
    // A layer that is read twice.
    let mut b = Build::new();
    let (x, r) = (b.input("s0 4"), b.input("s0 6"));
    let y = biased(&mut b, x, 4, 6);
    let z = b.add(y, r);
    let z = b.mul(z, y);
    assert_eq!(left(&b.output(z)), ["linear", "add", "mul"]);
}

/// Spec 002: an addition was taken for one of a bias, also of a residual, or of a column.
#[test]
fn only_a_vector_of_the_last_axis_is_a_bias() {
    for shape in [&[6, 1][..], &[1], &[1, 6], &[]] {
        let mut b = Build::new();
        let x = b.input("6 4");
        let y = b.linear(x, 4, 6);
        let column = b.weight(shape);
        let y = b.add(y, column);
        assert_eq!(left(&b.output(y)), ["linear", "add"], "{shape:?}");
    }
}

#[test]
fn reshapes_around_a_layer_go() {
    let mut b = Build::new();
    let (x, r) = (b.input("2 s0 4"), b.input("2 s0 6"));
    let flat = b.reshape(x, "2*s0 4");
    let y = biased(&mut b, flat, 4, 6);
    let y = b.reshape(y, "2 s0 6");
    let y = b.add(y, r);
    assert_eq!(left(&b.output(y)), ["linear"]);
    // Leading axes that were joined with others are given back before the layer.
    let mut b = Build::new();
    let x = b.input("2 s0 2 2");
    let flat = b.reshape(x, "2*s0 4");
    let y = b.linear(flat, 4, 6);
    let y = b.reshape(y, "2 s0 6");
    assert_eq!(left(&b.output(y)), ["reshape", "linear"]);
    // A reshape that also splits the last axis stays.
    let mut b = Build::new();
    let x = b.input("2 3 4");
    let flat = b.reshape(x, "12 2");
    let y = b.linear(flat, 2, 6);
    let y = b.reshape(y, "6 12");
    assert_eq!(left(&b.output(y)), ["reshape", "linear", "reshape"]);
}

#[test]
fn layers_of_one_value_are_merged() {
    let mut b = Build::new();
    let x = b.input("2 s0 4");
    let (q, k, v) = (biased(&mut b, x, 4, 6), biased(&mut b, x, 4, 2), biased(&mut b, x, 4, 6));
    let y = b.concat(-1, &[q, k, v]);
    let graph = optimized(&b.output(y));
    assert_eq!(ops(&graph).iter().filter(|name| *name == "linear").count(), 1, "{:?}", ops(&graph));
    assert_eq!(graph.len(), 1 + 3 + 1);
}

#[test]
fn layers_that_differ_are_not_merged() {
    let mut b = Build::new();
    let (x, z) = (b.input("s0 4"), b.input("s0 4"));
    // Another input; no bias; an activation; weights that are not known.
    let p = biased(&mut b, x, 4, 4);
    let q = biased(&mut b, z, 4, 4);
    let r = b.linear(x, 4, 4);
    let s = biased(&mut b, x, 4, 4);
    let s = b.unary(Relu, s);
    let w = b.input("4 4");
    let turned = b.permute(w, &[1, 0]);
    let t = b.matmul(x, turned);
    let y = b.concat(0, &[p, q, r, s, t]);
    assert_eq!(left(&b.output(y)), ["linear", "linear", "linear", "linear", "matmul", "concat"]);
}

fn rotate_half(b: &mut Build, x: ValueId, low: i64, width: i64) -> ValueId {
    let (first, second) = (b.slice(x, 3, 0, low, 1), b.slice(x, 3, low, width, 1));
    let negative = b.unary(Neg, second);
    b.concat(3, &[negative, first])
}

fn rope(b: &mut Build, x: ValueId, turned: ValueId, sizes: &[i64]) -> ValueId {
    let (cos, sin) = (b.weight(sizes), b.weight(sizes));
    let (p, q) = (b.mul(x, cos), b.mul(turned, sin));
    b.add(p, q)
}

#[test]
fn rope_of_halves_is_found() {
    let mut b = Build::new();
    let x = b.input("2 3 5 8");
    let turned = rotate_half(&mut b, x, 4, 8);
    let y = rope(&mut b, x, turned, &[1, 1, 5, 8]);
    assert_eq!(left(&b.output(y)), ["rope"]);
}

/// Columns of the tables of the only rotation.
fn table_columns(b: &Build) -> i64 {
    let graph = optimized(b);
    let node = graph.nodes().find(|(_, node)| matches!(node.op, Op::Rope(_))).unwrap().1;
    graph.meta(node.inputs[1].unwrap()).shape.last().unwrap().known().unwrap()
}

#[test]
fn tables_without_halves_stay() {
    for columns in [0, 1, 3] {
        let mut b = Build::new();
        let x = b.input(&format!("1 3 5 {columns}"));
        let table = b.tensor(lz_abi::Tensor::zeros(b.dtype, &[1, 1, 5, columns]));
        let mut graph = b.graph;
        let op = crate::ops::rope::Rope { interleaved: false };
        if let Ok(y) = graph.push(op.into(), &[Some(x), Some(table), Some(table)], "y", "") {
            graph.outputs.push(y);
            crate::passes::rope::tables(&mut graph).unwrap();
            assert_eq!(graph.meta(graph.nodes().next().unwrap().1.inputs[1].unwrap()).shape[3], columns.into());
        }
    }
}

#[test]
fn tables_of_two_equal_halves_are_read_once() {
    // cos(concat(a, a)), cast and with an axis for the heads; and a constant.
    for (constant, equal) in [(false, true), (false, false), (true, true), (true, false)] {
        let mut b = Build::new();
        let x = b.input("1 3 5 8");
        let turned = rotate_half(&mut b, x, 4, 8);
        let (angles, others) = (b.input("5 4"), b.input("5 4"));
        let table = |b: &mut Build, kind| {
            if constant {
                let numbers: Vec<f64> = (0..40).map(|i| f64::from(if equal { i % 4 } else { i })).collect();
                return b.tensor(lz_abi::Tensor::from_f64(b.dtype, &[1, 1, 5, 8], &numbers));
            }
            let both = b.concat(-1, &[angles, if equal { angles } else { others }]);
            let table = b.unary(kind, both);
            let table = b.times(table, 1.5);
            b.reshape(table, "1 1 5 8")
        };
        let (cos, sin) = (table(&mut b, Cos), table(&mut b, Sin));
        let (p, q) = (b.mul(x, cos), b.mul(turned, sin));
        let y = b.add(p, q);
        assert_eq!(table_columns(&b.output(y)), if equal { 4 } else { 8 }, "{constant} {equal}");
    }
}

#[test]
fn rope_of_neighbours_is_found() {
    let mut b = Build::new();
    let x = b.input("2 3 5 8");
    let (first, second) = (b.slice(x, 3, 0, 8, 2), b.slice(x, 3, 1, 8, 2));
    let negative = b.unary(Neg, second);
    let (p, q) = (b.reshape(negative, "2 3 5 4 1"), b.reshape(first, "2 3 5 4 1"));
    let pairs = b.concat(-1, &[p, q]);
    let turned = b.reshape(pairs, "2 3 5 8");
    let y = rope(&mut b, x, turned, &[5, 8]);
    let graph = optimized(&b.output(y));
    let Op::Rope(rope) = only(&graph, "rope") else { panic!() };
    assert!(rope.interleaved && graph.len() == 1);
}

#[test]
fn what_is_nearly_rope_is_not() {
    let has_rope = |b: Build, y| left(&b.output(y)).contains(&"rope".to_owned());
    // Parts of different sizes.
    let mut b = Build::new();
    let x = b.input("2 3 5 8");
    let turned = rotate_half(&mut b, x, 3, 8);
    let y = rope(&mut b, x, turned, &[5, 8]);
    assert!(!has_rope(b, y));
    // The first half is negative.
    let mut b = Build::new();
    let x = b.input("2 3 5 8");
    let (first, second) = (b.slice(x, 3, 0, 4, 1), b.slice(x, 3, 4, 8, 1));
    let negative = b.unary(Neg, first);
    let turned = b.concat(3, &[second, negative]);
    let y = rope(&mut b, x, turned, &[5, 8]);
    assert!(!has_rope(b, y));
    // The first half is negative, and in its place.
    let mut b = Build::new();
    let x = b.input("2 3 5 8");
    let (first, second) = (b.slice(x, 3, 0, 4, 1), b.slice(x, 3, 4, 8, 1));
    let negative = b.unary(Neg, first);
    let turned = b.concat(3, &[negative, second]);
    let y = rope(&mut b, x, turned, &[5, 8]);
    assert!(!has_rope(b, y));
    // Halves of another axis.
    let mut b = Build::new();
    let x = b.input("2 3 8 8");
    let (first, second) = (b.slice(x, 2, 0, 4, 1), b.slice(x, 2, 4, 8, 1));
    let negative = b.unary(Neg, second);
    let turned = b.concat(2, &[negative, first]);
    let y = rope(&mut b, x, turned, &[8, 8]);
    assert!(!has_rope(b, y));
    // Halves of another value.
    let mut b = Build::new();
    let (x, z) = (b.input("2 3 5 8"), b.input("2 3 5 8"));
    let turned = rotate_half(&mut b, z, 4, 8);
    let y = rope(&mut b, x, turned, &[5, 8]);
    assert!(!has_rope(b, y));
}

/// Spec 002: a fused node was added before those it replaces were removed, and lost its place.
#[test]
fn a_chain_of_fusions_leaves_no_node_without_a_producer() {
    let mut b = Build::new();
    let x = b.input("s0 4");
    let mut y = x;
    for _ in 0..3 {
        let h = biased(&mut b, y, 4, 4);
        let h = b.unary(Relu, h);
        y = b.add(y, h);
    }
    let sum = b.reduce(ReduceKind::Sum, y, 1);
    let b = b.output(sum).output(y);
    let graph = optimized(&b);
    graph.verify().unwrap();
    assert_eq!(ops(&graph), ["linear", "linear", "linear", "reduce"]);
}

/// A change removes what nothing reads, also nodes that the pass has not come to yet.
#[test]
fn dead_nodes_may_go_while_a_pass_runs() {
    let mut b = Build::new();
    let x = b.input("s0 4");
    let (w, v) = (b.weight(&[4, 4]), b.weight(&[4, 4]));
    let y = b.matmul(x, w);
    let dead = b.matmul(x, v);
    b.unary(Tanh, dead);
    b.graph.outputs.push(y);
    assert_eq!(ops(&optimized(&b)), ["linear"]);
    for (name, pass) in super::super::PASSES {
        let mut graph = b.graph.clone();
        pass(&mut graph).unwrap_or_else(|why| panic!("{name}: {why}"));
        graph.verify().unwrap();
    }
}
