//! Convolutions take in what follows them.

use lz_abi::{DType, Tensor};

use super::build::*;
use crate::ir::ValueId;
use crate::ops::Op;
use crate::ops::conv::Conv;
use crate::ops::linear::Activation;
use crate::ops::unary::UnaryKind::*;

fn conv(b: &mut Build, x: ValueId, shape: &[i64], biased: bool) -> ValueId {
    let w = b.weight(shape);
    let axes = shape.len() - 2;
    let (stride, padding, dilation) = (vec![1; axes], vec![1; axes], vec![1; axes]);
    let mut inputs = vec![x, w];
    if biased {
        inputs.push(b.weight(&shape[..1]));
    }
    b.op(Conv { stride, padding, dilation, groups: 1, activation: Activation::None }, &inputs)
}

/// A batch norm as the exporter writes it, of so many channels.
fn batch_norm(b: &mut Build, x: ValueId, channels: i64) -> ValueId {
    let wide = |b: &mut Build| {
        let vector = b.weight(&[channels]);
        b.reshape(vector, &format!("1 {channels} 1 1"))
    };
    let (mean, variance, weight, bias) = (wide(b), wide(b), wide(b), wide(b));
    let variance = b.mul(variance, variance);
    let variance = b.plus(variance, 1e-5);
    let deviation = b.unary(Sqrt, variance);
    let centred = b.sub(x, mean);
    let normed = b.div(centred, deviation);
    let scaled = b.mul(normed, weight);
    b.add(scaled, bias)
}

#[test]
fn a_batch_norm_and_an_activation_become_a_part_of_the_convolution() {
    for biased in [false, true] {
        for (kind, activation) in [(Relu, Activation::Relu), (Gelu, Activation::Gelu), (Silu, Activation::Silu)] {
            let mut b = Build::new();
            let x = b.input("s0 3 5 4");
            let y = conv(&mut b, x, &[6, 3, 3, 3], biased);
            let y = batch_norm(&mut b, y, 6);
            let y = b.unary(kind, y);
            let graph = optimized(&b.output(y));
            assert_eq!(ops(&graph), ["conv"]);
            let Op::Conv(conv) = only(&graph, "conv") else { unreachable!() };
            assert_eq!(conv.activation, activation);
        }
    }
}

#[test]
fn one_number_is_one_for_every_output() {
    let mut b = Build::new();
    let x = b.input("2 3 7");
    let y = conv(&mut b, x, &[4, 3, 3], false);
    let y = b.times(y, 0.25);
    let y = b.plus(y, -1.0);
    assert_eq!(left(&b.output(y)), ["conv"]);
}

#[test]
fn numbers_along_other_axes_stay() {
    let mut b = Build::new();
    let x = b.input("2 3 4 4");
    let y = conv(&mut b, x, &[4, 3, 3, 3], false);
    let columns = b.weight(&[4]);
    let y = b.mul(y, columns);
    assert_eq!(left(&b.output(y)), ["conv", "mul"]);
    // 1 / 0 is no weight.
    let mut b = Build::new();
    let x = b.input("2 3 4");
    let y = conv(&mut b, x, &[4, 3, 3], false);
    let zero = b.number(0.0);
    let y = b.div(y, zero);
    assert_eq!(left(&b.output(y)).len(), 2);
}

#[test]
fn what_weights_cannot_hold_stays() {
    let cases =
        [(1e10, 1e20, true), (1e10, 1e30, false), (1e10, 1e-40, true), (1e-10, 1e-20, true), (1e-10, 1e-30, false)];
    for (weight, number, folded) in cases {
        let mut b = Build::of(DType::F32);
        let x = b.input("2 3 4");
        let w = b.tensor(Tensor::from_f64(DType::F32, &[1, 3, 1], &[1.5 * weight, -weight, 1e-3 * weight]));
        let op = Conv { stride: vec![1], padding: vec![0], dilation: vec![1], groups: 1, activation: Activation::None };
        let y = b.op(op, &[x, w]);
        let c = b.number(number);
        let y = b.mul(y, c);
        assert_eq!(left(&b.output(y)) == ["conv"], folded, "{weight} times {number}");
    }
}

#[test]
fn what_others_read_stays() {
    let mut b = Build::new();
    let x = b.input("2 3 7");
    let y = conv(&mut b, x, &[4, 3, 3], true);
    let z = b.unary(Relu, y);
    assert_eq!(left(&b.output(y).output(z)), ["conv", "relu"]);
}
