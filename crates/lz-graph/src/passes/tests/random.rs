//! Random graphs: whatever passes are switched off, the results stay.

use super::super::{Options, PASSES, optimize};
use super::build::*;
use crate::ir::{Graph, Symbols, ValueId};
use crate::ops::binary::BinaryKind::*;
use crate::ops::reduce::ReduceKind;
use crate::ops::select::Where;
use crate::ops::unary::UnaryKind::{self, *};
use proptest::prelude::*;

/// Sizes of the last two axes are 4, so that nearly everything fits together. The first one is s0.
fn step(b: &mut Build, values: &[ValueId], kind: u8, x: ValueId, y: ValueId, n: u8) -> Option<Vec<ValueId>> {
    let meta = b.graph.meta(x).clone();
    let (rank, four) = (meta.rank(), meta.rank() >= 2);
    // Weights have 4 numbers.
    if kind > 9 && !meta.shape.last().is_some_and(|size| size.is(4)) {
        return None;
    }
    let swap = |rank: usize| {
        let mut axes: Vec<usize> = (0..rank).collect();
        axes.swap(rank - 2, rank - 1);
        axes
    };
    let number = f64::from(n % 5) * 0.5;
    let same = |b: &Build, a: ValueId, c: ValueId| b.graph.meta(a) == b.graph.meta(c);
    Some(vec![match kind {
        0 => {
            let kinds = [Neg, Tanh, Sigmoid, Relu, Silu, Gelu, GeluTanh, Abs, Erf];
            b.unary(kinds[n as usize % kinds.len()], x)
        }
        1 if same(b, x, y) => {
            let kinds = [Add, Sub, Mul, Max];
            b.binary(kinds[n as usize % kinds.len()], x, y)
        }
        2 => b.times(x, number),
        3 => b.plus(x, number),
        4 => {
            let by = b.number(number + 0.5);
            b.div(x, by)
        }
        5 if four => b.permute(x, &swap(rank)),
        6 if rank == 3 => b.reshape(x, "s0 2 2 4"),
        7 if rank == 4 => b.reshape(x, "s0 4 4"),
        8 if rank == 4 => b.permute(x, &[[0, 2, 1, 3], [0, 1, 3, 2], [0, 1, 2, 3]][n as usize % 3]),
        9 if rank == 3 && b.graph.meta(y).rank() == 3 => b.matmul(x, y),
        10 if rank == 3 => b.linear(x, 4, 4),
        11 if rank == 3 => {
            let y = b.linear(x, 4, 4);
            let bias = b.weight(&[4]);
            b.add(y, bias)
        }
        12 if rank == 3 => {
            let w = b.weight(&[4, 4]);
            b.matmul(x, w)
        }
        13 if four => b.softmax(x, i64::from(n % 2) - 2),
        14 if four => {
            // Softmax that is written out, on the same or on different axes.
            let axis = |bit: u8| i64::from(n >> bit & 1) - 2;
            let max = b.reduce(ReduceKind::Max, x, axis(0));
            let centred = b.sub(x, max);
            let exp = b.unary(Exp, centred);
            let sum = b.reduce(ReduceKind::Sum, exp, axis(if n > 40 { 0 } else { 1 }));
            let found = b.div(exp, sum);
            return Some(if n.is_multiple_of(7) { vec![found, exp] } else { vec![found] });
        }
        15 => {
            let tight = b.times(x, std::f64::consts::FRAC_1_SQRT_2);
            let erf = b.unary(Erf, tight);
            let one = b.plus(erf, 1.0);
            let half = b.times(if n.is_multiple_of(4) { y } else { x }, 0.5);
            if !same(b, half, one) {
                return None;
            }
            b.mul(half, one)
        }
        16 if four => {
            let square = b.mul(x, x);
            let mean = b.reduce(ReduceKind::Mean, square, if n.is_multiple_of(4) { -2 } else { -1 });
            let sum = b.plus(mean, 0.1);
            let root = b.unary(Rsqrt, sum);
            let y = b.mul(x, root);
            let w = b.weight(&[4]);
            b.mul(y, w)
        }
        17 if four => {
            let mean = b.reduce(ReduceKind::Mean, x, -1);
            let centred = b.sub(x, mean);
            let square = b.mul(centred, centred);
            let variance = b.reduce(ReduceKind::Mean, square, -1);
            let sum = b.plus(variance, 0.1);
            let root = b.unary(Sqrt, sum);
            let y = b.div(centred, root);
            let (w, bias) = (b.weight(&[4]), b.weight(&[4]));
            let y = b.mul(y, w);
            b.add(y, bias)
        }
        18 if rank == 3 => {
            let low = 1 + i64::from(n % 3);
            let (first, second) = (b.slice(x, -1, 0, low, 1), b.slice(x, -1, low, 4, 1));
            let negative = b.unary(Neg, second);
            let turned = b.concat(-1, &[negative, first]);
            let (cos, sin) = (b.weight(&[4, 4]), b.weight(&[4, 4]));
            let (p, q) = (b.mul(x, cos), b.mul(turned, sin));
            b.add(p, q)
        }
        19 if rank == 3 => {
            // Attention with a mask of positions that is causal, or nearly.
            let z = values[n as usize % values.len()];
            let z = if same(b, x, z) { z } else { x };
            let y = if same(b, x, y) { y } else { x };
            let turned = b.permute(y, &[0, 2, 1]);
            let scores = b.matmul(x, turned);
            let scores = b.times(scores, 0.5);
            let (i, j) = (b.iota(if n.is_multiple_of(3) { "1" } else { "0" }, "4"), b.iota("0", "4"));
            let i = b.reshape(i, "4 1");
            let keep = b.binary(if n.is_multiple_of(5) { Gt } else { Ge }, i, j);
            let out = b.number(if n.is_multiple_of(4) { -2.0 } else { -1e30 });
            let scores = match n % 2 {
                0 => b.op(Where {}, &[keep, scores, out]),
                _ => {
                    let zero = b.number(0.0);
                    let mask = b.op(Where {}, &[keep, zero, out]);
                    b.add(scores, mask)
                }
            };
            let weights = b.softmax(scores, -1);
            b.matmul(weights, z)
        }
        20 => b.cast(x, lz_abi::DType::F64),
        21 if rank == 3 => {
            let flat = b.reshape(x, "4*s0 4");
            let y = b.linear(flat, 4, 4);
            b.reshape(y, "s0 4 4")
        }
        22 => {
            let (p, q) = (b.weight(&[4]), b.weight(&[4]));
            let w = b.mul(p, q);
            b.mul(x, w)
        }
        23 if four => {
            let part = b.slice(x, -1, 0, 2, 1);
            b.concat(-1, &[part, part])
        }
        _ => return None,
    }])
}

/// A graph of about 10 to 30 nodes; its results are the last values, and some in between.
fn graphs() -> impl Strategy<Value = Graph> {
    let steps = proptest::collection::vec((0u8..24, any::<u8>(), any::<u8>(), 0u8..60, any::<bool>()), 6..16);
    steps.prop_map(|steps| {
        let mut b = Build::new();
        let mut values = vec![b.input("s0 4 4"), b.input("s0 4 4")];
        let mut results = Vec::new();
        for (kind, x, y, n, near) in steps {
            if b.graph.len() > 30 {
                break;
            }
            // Mostly what was made last, so that chains become long.
            let last = values.len() - 1;
            let x = values[if near { last } else { x as usize % values.len() }];
            let y = values[y as usize % values.len()];
            let Some(made) = step(&mut b, &values, kind, x, y, n) else { continue };
            values.extend(made);
            // Numbers stay small.
            let top = b.unary(UnaryKind::Tanh, *values.last().unwrap());
            if n.is_multiple_of(3) {
                values.push(top);
            }
            if n % 11 == 0 {
                results.push(*values.last().unwrap());
            }
        }
        results.push(*values.last().unwrap());
        let mut graph = b.graph;
        graph.outputs = results;
        graph.sweep();
        graph
    })
}

proptest! {
    #[test]
    fn results_stay_whatever_is_switched_off(
        graph in graphs(), off in any::<u32>(), all in any::<bool>(), size in 1i64..4,
    ) {
        let mut options = Options::default();
        for (i, (name, _)) in PASSES.iter().enumerate() {
            if !all && off >> i & 1 == 1 {
                options = options.without(name).unwrap();
            }
        }
        let mut found = graph.clone();
        let report = optimize(&mut found, &options).unwrap();
        prop_assert!(report.settled, "{:?}", report);
        prop_assert!(found.len() <= graph.len() + 4, "{:?} became {:?}", ops(&graph), ops(&found));
        let symbols = Symbols::from_iter([("s0", size)]);
        if let Some(difference) = difference(&graph, &found, &symbols) {
            let (before, after) = (graph.text().unwrap(), found.text().unwrap());
            return Err(TestCaseError::fail(format!("{difference}\n{before}\n{after}")));
        }
        // A second run finds nothing to do.
        let again = optimize(&mut found, &options).unwrap();
        prop_assert!(again.rewrites.is_empty(), "{:?}", again);
    }
}
