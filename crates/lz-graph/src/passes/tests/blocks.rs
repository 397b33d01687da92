//! Blocks of transformers as exporters write them: how many nodes are left.

use super::super::Options;
use super::build::*;
use crate::ir::{Graph, ValueId};
use crate::ops::layer_norm::LayerNorm;
use crate::ops::reduce::ReduceKind;
use crate::ops::select::Where;
use crate::ops::unary::UnaryKind::*;
use lz_abi::DType;

/// A block as GPT-2 of transformers has it, with eager attention: 2 heads of 4, Conv1D layers over flattened rows.
fn gpt2(b: &mut Build, x: ValueId) -> ValueId {
    let norm = |b: &mut Build, x: ValueId| {
        let (w, bias) = (b.weight(&[8]), b.weight(&[8]));
        b.op(LayerNorm { eps: 1e-5, axes: 1 }, &[x, w, bias])
    };
    let conv1d = |b: &mut Build, x: ValueId, width: i64, out: i64| {
        let flat = b.reshape(x, &format!("2*s0 {width}"));
        let (w, bias) = (b.weight(&[width, out]), b.weight(&[out]));
        let y = b.matmul(flat, w);
        let y = b.add(bias, y);
        b.reshape(y, &format!("2 s0 {out}"))
    };
    let h = norm(b, x);
    let qkv = conv1d(b, h, 8, 24);
    let [q, k, v] = [0, 8, 16].map(|start| {
        let part = b.slice(qkv, 2, start, start + 8, 1);
        let heads = b.reshape(part, "2 s0 2 4");
        b.permute(heads, &[0, 2, 1, 3])
    });
    let turned = b.permute(k, &[0, 1, 3, 2]);
    let scores = b.matmul(q, turned);
    let two = b.number(2.0);
    let scores = b.div(scores, two);
    let (i, j) = (b.iota("0", "s0"), b.iota("0", "s0"));
    let (i, j) = (b.reshape(i, "s0 1"), b.reshape(j, "1 s0"));
    let keep = b.binary(crate::ops::binary::BinaryKind::Ge, i, j);
    let keep = b.reshape(keep, "1 1 s0 s0");
    let out = b.number(f64::from(f32::MIN));
    let scores = b.op(Where {}, &[keep, scores, out]);
    let weights = b.softmax(scores, -1);
    let y = b.matmul(weights, v);
    let y = b.permute(y, &[0, 2, 1, 3]);
    let y = b.reshape(y, "2 s0 8");
    let y = conv1d(b, y, 8, 8);
    let x = b.add(y, x);
    let h = norm(b, x);
    let h = conv1d(b, h, 8, 32);
    let half = b.times(h, 0.5);
    let three = b.number(3.0);
    let cube = b.binary(crate::ops::binary::BinaryKind::Pow, h, three);
    let cube = b.times(cube, 0.044715);
    let sum = b.add(h, cube);
    let inner = b.times(sum, (2.0 / std::f64::consts::PI).sqrt());
    let tanh = b.unary(Tanh, inner);
    let tanh = b.plus(tanh, 1.0);
    let h = b.mul(half, tanh);
    let h = conv1d(b, h, 32, 8);
    b.add(x, h)
}

/// A block as Llama of transformers has it: 4 heads of 4 that share 2 keys, rotary embedding, RMS norms in float32.
fn llama(b: &mut Build, x: ValueId, narrow: DType) -> ValueId {
    let norm = |b: &mut Build, x: ValueId| {
        let wide = b.cast(x, DType::F32);
        b.dtype = DType::F32;
        let two = b.number(2.0);
        let square = b.binary(crate::ops::binary::BinaryKind::Pow, wide, two);
        let mean = b.reduce(ReduceKind::Mean, square, -1);
        let sum = b.plus(mean, 1e-6);
        let root = b.unary(Rsqrt, sum);
        let y = b.mul(wide, root);
        b.dtype = narrow;
        let y = b.cast(y, narrow);
        let w = b.weight(&[16]);
        b.mul(w, y)
    };
    let h = norm(b, x);
    let split = |b: &mut Build, x: ValueId, heads: i64| {
        let y = b.linear(x, 16, heads * 4);
        let y = b.reshape(y, &format!("2 s0 {heads} 4"));
        b.permute(y, &[0, 2, 1, 3])
    };
    let (q, k, v) = (split(b, h, 4), split(b, h, 2), split(b, h, 2));
    // cos and sin of positions times frequencies, twice behind each other.
    let position = b.iota("0", "s0");
    let position = b.cast(position, narrow);
    let position = b.reshape(position, "s0 1");
    let frequencies = b.weight(&[1, 2]);
    let angles = b.mul(position, frequencies);
    let angles = b.concat(-1, &[angles, angles]);
    let (cos, sin) = (b.unary(Cos, angles), b.unary(Sin, angles));
    let (cos, sin) = (b.reshape(cos, "1 1 s0 4"), b.reshape(sin, "1 1 s0 4"));
    let [q, k] = [q, k].map(|x| {
        let (first, second) = (b.slice(x, 3, 0, 2, 1), b.slice(x, 3, 2, 4, 1));
        let negative = b.unary(Neg, second);
        let turned = b.concat(-1, &[negative, first]);
        let (plain, turned) = (b.mul(x, cos), b.mul(turned, sin));
        b.add(plain, turned)
    });
    let [k, v] = [k, v].map(|x| {
        let column = b.reshape(x, "2 2 1 s0 4");
        let wide = b.expand(column, "2 2 2 s0 4");
        b.reshape(wide, "2 4 s0 4")
    });
    let (i, j) = (b.iota("0", "s0"), b.iota("0", "s0"));
    let (i, j) = (b.reshape(i, "s0 1"), b.reshape(j, "1 s0"));
    let keep = b.binary(crate::ops::binary::BinaryKind::Le, j, i);
    let (zero, out) = (b.number(0.0), b.number(lz_abi::numeric::lowest(narrow)));
    let mask = b.op(Where {}, &[keep, zero, out]);
    let mask = b.expand(mask, "2 1 s0 s0");
    let turned = b.permute(k, &[0, 1, 3, 2]);
    let scores = b.matmul(q, turned);
    let scores = b.times(scores, 0.5);
    let scores = b.add(scores, mask);
    let wide = b.cast(scores, DType::F32);
    let weights = b.softmax(wide, -1);
    let weights = b.cast(weights, narrow);
    let y = b.matmul(weights, v);
    let y = b.permute(y, &[0, 2, 1, 3]);
    let y = b.reshape(y, "2 s0 16");
    let y = b.linear(y, 16, 16);
    let x = b.add(x, y);
    let h = norm(b, x);
    let (gate, up) = (b.linear(h, 16, 24), b.linear(h, 16, 24));
    let gate = b.unary(Silu, gate);
    let h = b.mul(gate, up);
    let h = b.linear(h, 24, 16);
    b.add(x, h)
}

/// How often each operation is there.
fn count(graph: &Graph, name: &str) -> usize {
    ops(graph).iter().filter(|one| *one == name).count()
}

#[test]
fn a_block_of_gpt2_has_few_nodes_left() {
    let mut b = Build::of(DType::F32);
    let x = b.input("2 s0 8");
    let y = gpt2(&mut b, x);
    let b = b.output(y);
    let (graph, report) = after(&b, &Options::default(), &[1, 5]);
    println!("GPT-2 block: {} nodes before, {} after: {:?}", report.before, report.after, ops(&graph));
    // Two norms, four layers, attention; q, k and v are parts of one layer, each with a reshape and a permute.
    assert_eq!((count(&graph, "layer_norm"), count(&graph, "linear"), count(&graph, "attention")), (2, 4, 1));
    assert_eq!((count(&graph, "slice"), count(&graph, "reshape"), count(&graph, "permute")), (3, 4, 4));
    assert_eq!((report.before, graph.len()), (51, 18));
}

#[test]
fn a_block_of_llama_has_few_nodes_left() {
    for narrow in [DType::F32, DType::F64] {
        let mut b = Build::of(narrow);
        let x = b.input("2 s0 16");
        let y = llama(&mut b, x, narrow);
        let b = b.output(y);
        // In float64 a cast to float32 rounds, and stays: only float32 is compared here.
        if narrow == DType::F64 {
            let mut graph = b.graph.clone();
            super::super::optimize(&mut graph, &Options::default()).unwrap();
            assert_eq!(count(&graph, "rms_norm"), 2);
            continue;
        }
        let (graph, report) = after(&b, &Options::default(), &[1, 5]);
        println!("Llama block: {} nodes before, {} after: {:?}", report.before, report.after, ops(&graph));
        assert_eq!((count(&graph, "rms_norm"), count(&graph, "linear"), count(&graph, "attention")), (2, 4, 1));
        assert_eq!((count(&graph, "rope"), count(&graph, "gated"), count(&graph, "add")), (2, 1, 0));
        assert_eq!((count(&graph, "expand"), count(&graph, "where"), count(&graph, "mul")), (0, 0, 1));
    }
}

#[test]
fn a_block_of_llama_in_bfloat16_has_no_casts_left() {
    let mut b = Build::of(DType::Bf16);
    let x = b.input("2 s0 16");
    let y = llama(&mut b, x, DType::Bf16);
    let mut graph = b.output(y).graph;
    super::super::optimize(&mut graph, &Options::default()).unwrap();
    // That of the positions.
    assert_eq!((count(&graph, "cast"), count(&graph, "rms_norm"), count(&graph, "attention")), (1, 2, 1));
}

#[test]
fn each_pass_can_be_switched_off_without_another_answer() {
    for (name, _) in super::super::PASSES {
        for (width, block) in [(8, gpt2 as fn(&mut Build, ValueId) -> ValueId), (16, |b, x| llama(b, x, DType::F32))] {
            let mut b = Build::of(DType::F32);
            let x = b.input(&format!("2 s0 {width}"));
            let y = block(&mut b, x);
            after(&b.output(y), &Options::default().without(name).unwrap(), &[3]);
        }
    }
}
