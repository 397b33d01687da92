//! Graphs for tests, and what is expected of them after the passes: the same results, and the operations that are left.

use lz_abi::{DType, Tensor};

use super::super::{Options, Report, optimize};
use crate::exec::interpreted;
use crate::ir::{Constant, Dim, Graph, Meta, Symbols, ValueId};
use crate::ops::Op;
use crate::ops::attention::Attention;
use crate::ops::binary::{Binary, BinaryKind};
use crate::ops::cast::Cast;
use crate::ops::concat::Concat;
use crate::ops::expand::Expand;
use crate::ops::iota::Iota;
use crate::ops::matmul::MatMul;
use crate::ops::permute::Permute;
use crate::ops::reduce::{Reduce, ReduceKind};
use crate::ops::reshape::Reshape;
use crate::ops::slice::Slice;
use crate::ops::softmax::Softmax;
use crate::ops::unary::{Unary, UnaryKind};

/// Numbers without a pattern, between -2 and 2.
pub fn scattered(dtype: DType, shape: &[i64], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let numbers: Vec<f64> = (0..shape.iter().product::<i64>())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0
        })
        .collect();
    Tensor::from_f64(dtype, shape, &numbers)
}

/// Sizes as a text: `2 s0 4`.
pub fn dims(text: &str) -> Vec<Dim> {
    text.split_whitespace().map(|size| Dim::parse(size).unwrap()).collect()
}

/// A graph that is being made.
#[derive(Clone)]
pub struct Build {
    pub graph: Graph,
    pub dtype: DType,
    seed: u64,
}

impl Build {
    pub fn new() -> Build {
        Build::of(DType::F64)
    }

    pub fn of(dtype: DType) -> Build {
        Build { graph: Graph::new("test"), dtype, seed: 0 }
    }

    pub fn input(&mut self, shape: &str) -> ValueId {
        self.graph.input("x", Meta::new(self.dtype, dims(shape)))
    }

    pub fn weight(&mut self, shape: &[i64]) -> ValueId {
        self.seed += 1;
        let tensor = scattered(self.dtype, shape, self.seed);
        self.tensor(tensor)
    }

    pub fn tensor(&mut self, tensor: Tensor) -> ValueId {
        self.graph.add_constant(Constant::owned("w", tensor))
    }

    pub fn number(&mut self, number: f64) -> ValueId {
        self.graph.add_constant(Constant::number("n", self.dtype, number))
    }

    pub fn op(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> ValueId {
        let inputs: Vec<_> = inputs.iter().map(|&id| Some(id)).collect();
        self.graph.push(op.into(), &inputs, "v", "").unwrap()
    }

    pub fn unary(&mut self, kind: UnaryKind, x: ValueId) -> ValueId {
        self.op(Unary { kind }, &[x])
    }

    pub fn binary(&mut self, kind: BinaryKind, a: ValueId, b: ValueId) -> ValueId {
        self.op(Binary { kind }, &[a, b])
    }

    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(BinaryKind::Add, a, b)
    }

    pub fn sub(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(BinaryKind::Sub, a, b)
    }

    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(BinaryKind::Mul, a, b)
    }

    pub fn div(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.binary(BinaryKind::Div, a, b)
    }

    /// `a · number`.
    pub fn times(&mut self, a: ValueId, number: f64) -> ValueId {
        let number = self.number(number);
        self.mul(a, number)
    }

    /// `a + number`.
    pub fn plus(&mut self, a: ValueId, number: f64) -> ValueId {
        let number = self.number(number);
        self.add(a, number)
    }

    pub fn matmul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(MatMul::default(), &[a, b])
    }

    pub fn permute(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        self.op(Permute { axes: axes.to_vec() }, &[x])
    }

    pub fn reshape(&mut self, x: ValueId, shape: &str) -> ValueId {
        self.op(Reshape { shape: dims(shape) }, &[x])
    }

    pub fn expand(&mut self, x: ValueId, shape: &str) -> ValueId {
        self.op(Expand { shape: dims(shape) }, &[x])
    }

    pub fn slice(&mut self, x: ValueId, axis: i64, start: i64, end: i64, step: i64) -> ValueId {
        self.op(Slice { axis, start: start.into(), end: end.into(), step }, &[x])
    }

    pub fn concat(&mut self, axis: i64, parts: &[ValueId]) -> ValueId {
        self.op(Concat { axis }, parts)
    }

    pub fn reduce(&mut self, kind: ReduceKind, x: ValueId, axis: i64) -> ValueId {
        self.op(Reduce { kind, axes: vec![axis], keepdim: true }, &[x])
    }

    pub fn softmax(&mut self, x: ValueId, axis: i64) -> ValueId {
        self.op(Softmax { axis }, &[x])
    }

    pub fn cast(&mut self, x: ValueId, dtype: DType) -> ValueId {
        self.op(Cast { dtype }, &[x])
    }

    pub fn iota(&mut self, start: &str, len: &str) -> ValueId {
        let (start, len) = (Dim::parse(start).unwrap(), Dim::parse(len).unwrap());
        self.op(Iota { start, step: 1, len, dtype: DType::I64 }, &[])
    }

    /// `x · Wᵀ` as exporters write it.
    pub fn linear(&mut self, x: ValueId, width: i64, out: i64) -> ValueId {
        let w = self.weight(&[out, width]);
        let turned = self.permute(w, &[1, 0]);
        self.matmul(x, turned)
    }

    pub fn attention(&mut self, q: ValueId, k: ValueId, v: ValueId, mask: Option<ValueId>) -> ValueId {
        let op = Attention { causal: false, top_left: false, scale: Some(0.5), window: None, softcap: None };
        self.op(op, &[&[q, k, v][..], mask.as_slice()].concat())
    }

    pub fn output(mut self, value: ValueId) -> Build {
        self.graph.outputs.push(value);
        self
    }
}

/// What a node is: its operation, and its kind.
pub fn describe(op: &Op) -> String {
    match op {
        Op::Unary(unary) => format!("{:?}", unary.kind).to_lowercase(),
        Op::Binary(binary) => format!("{:?}", binary.kind).to_lowercase(),
        other => other.name().to_owned(),
    }
}

/// The operations of a graph, in order.
pub fn ops(graph: &Graph) -> Vec<String> {
    graph.order().unwrap().into_iter().map(|id| describe(&graph.node(id).op)).collect()
}

/// The only operation of a kind.
pub fn only<'g>(graph: &'g Graph, name: &str) -> &'g Op {
    let found: Vec<&Op> = graph.nodes().map(|(_, node)| &node.op).filter(|op| describe(op) == name).collect();
    assert_eq!(found.len(), 1, "one {name} in {:?}", ops(graph));
    found[0]
}

/// The results of a graph for inputs without a pattern, with a number for each symbol.
pub fn results(graph: &Graph, symbols: &Symbols) -> Vec<Tensor> {
    let inputs: Vec<Tensor> = graph
        .inputs
        .iter()
        .enumerate()
        .map(|(i, &id)| {
            let meta = graph.meta(id).at(symbols).unwrap();
            scattered(meta.dtype, &meta.sizes().unwrap(), 1000 + i as u64)
        })
        .collect();
    let views: Vec<_> = inputs.iter().map(Tensor::view).collect();
    interpreted::run(graph, &views).unwrap().0
}

/// How far numbers may be from each other, relative to the largest one. In float64 the order of sums is all that
/// differs.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-9,
        DType::F32 => 2e-5,
        DType::Bf16 => 4e-2,
        _ => 0.0,
    }
}

/// Says where two graphs differ.
pub fn difference(before: &Graph, after: &Graph, symbols: &Symbols) -> Option<String> {
    let (a, b) = (results(before, symbols), results(after, symbols));
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        if a.dtype() != b.dtype() || a.shape() != b.shape() {
            return Some(format!("result {i} is {}{:?}, not {}{:?}", b.dtype(), b.shape(), a.dtype(), a.shape()));
        }
        let (x, y) = (a.to_f64(), b.to_f64());
        let largest = x.iter().copied().filter(|x| x.is_finite()).fold(1.0, |most: f64, x| most.max(x.abs()));
        for (x, y) in x.iter().zip(&y) {
            let near = (x - y).abs() <= tolerance(a.dtype()) * largest;
            if !(near || x == y || x.is_nan() && y.is_nan()) {
                return Some(format!("result {i}: {y} in the place of {x}, in {:?}", ops(after)));
            }
        }
    }
    (a.len() != b.len()).then(|| "another number of results".to_owned())
}

/// The graph after some passes; its results are compared with those before, for these numbers of `s0`.
pub fn after(build: &Build, options: &Options, sizes: &[i64]) -> (Graph, Report) {
    let mut graph = build.graph.clone();
    let report = optimize(&mut graph, options).unwrap();
    assert!(report.settled, "{report:?}");
    for &size in sizes {
        let symbols = Symbols::from_iter([("s0", size), ("s1", size + 3)]);
        if let Some(difference) = difference(&build.graph, &graph, &symbols) {
            panic!("{difference}");
        }
    }
    (graph, report)
}

/// The graph after all passes.
pub fn optimized(build: &Build) -> Graph {
    after(build, &Options::default(), &[1, 4]).0
}

/// The operations that all passes leave.
pub fn left(build: &Build) -> Vec<String> {
    ops(&optimized(build))
}
