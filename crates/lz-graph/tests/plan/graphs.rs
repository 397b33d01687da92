//! Graphs to plan.

use lz_abi::{DType, Tensor};
use lz_graph::ir::{Constant, Dim, Graph, Meta, NodeId, Symbol, Symbols, ValueId};
use lz_graph::ops::Op;
use lz_graph::ops::binary::{Binary, BinaryKind};
use lz_graph::ops::matmul::MatMul;
use lz_graph::ops::permute::Permute;
use lz_graph::ops::reshape::Reshape;
use lz_graph::ops::softmax::Softmax;
use lz_graph::ops::unary::{Unary, UnaryKind};
use lz_graph::plan::{Demands, Instance, MemoryPlan, OfOps};
use lz_graph::validate::{self, Finding, Level, Planned};

/// A graph that is built step by step.
pub struct Builder {
    pub graph: Graph,
}

impl Builder {
    pub fn new(name: &str) -> Builder {
        Builder { graph: Graph::new(name) }
    }

    pub fn symbol(&mut self, name: &str) -> Dim {
        self.graph.symbols.push(Symbol { name: name.to_owned(), min: 1, max: Some(1 << 20) });
        Dim::symbol(name)
    }

    pub fn input(&mut self, name: &str, dtype: DType, shape: &[Dim]) -> ValueId {
        self.graph.input(name, Meta::new(dtype, shape.iter().cloned()))
    }

    pub fn weight(&mut self, name: &str, shape: &[i64]) -> ValueId {
        let tensor = Tensor::try_zeros(DType::F32, shape).expect("memory for a weight");
        self.graph.add_constant(Constant::owned(name, tensor))
    }

    pub fn op(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> ValueId {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        self.graph.push(op.into(), &inputs, "", "").expect("inputs that fit")
    }

    pub fn unary(&mut self, kind: UnaryKind, x: ValueId) -> ValueId {
        self.op(Unary { kind }, &[x])
    }

    pub fn relu(&mut self, x: ValueId) -> ValueId {
        self.unary(UnaryKind::Relu, x)
    }

    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(Binary { kind: BinaryKind::Add }, &[a, b])
    }

    pub fn reshape(&mut self, x: ValueId, shape: &[Dim]) -> ValueId {
        self.op(Reshape { shape: shape.to_vec() }, &[x])
    }

    pub fn permute(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        self.op(Permute { axes: axes.to_vec() }, &[x])
    }

    pub fn softmax(&mut self, x: ValueId) -> ValueId {
        self.op(Softmax { axis: -1 }, &[x])
    }

    /// `a · bᵀ`.
    pub fn times(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(MatMul { transpose_b: true, ..MatMul::default() }, &[a, b])
    }
}

pub fn known(sizes: &[i64]) -> Vec<Dim> {
    sizes.iter().map(|&size| Dim::from(size)).collect()
}

/// A decoder of GPT-2's form with eager attention: `layers` of width `heads · 64`, batch 1, `s` tokens.
pub fn gpt2(layers: usize, heads: i64) -> Graph {
    let mut b = Builder::new("gpt2");
    let s = b.symbol("s");
    let width = heads * 64;
    let hidden = |n: i64| vec![Dim::from(1), s.clone(), Dim::from(n)];
    let split = vec![Dim::from(1), s.clone(), Dim::from(heads), Dim::from(64)];
    let mut x = b.input("x", DType::F32, &hidden(width));
    // Weights of all layers are the same here: a plan does not look at them.
    let square = b.weight("square", &[width, width]);
    let (up, down) = (b.weight("up", &[4 * width, width]), b.weight("down", &[width, 4 * width]));
    let (bias, wide) = (b.weight("bias", &[width]), b.weight("wide", &[4 * width]));
    let head = b.weight("head", &[128, width]);
    for _ in 0..layers {
        let norm = b.softmax(x);
        let part = |b: &mut Builder| {
            let product = b.times(norm, square);
            let product = b.add(product, bias);
            let apart = b.reshape(product, &split);
            b.permute(apart, &[0, 2, 1, 3])
        };
        let (q, k, v) = (part(&mut b), part(&mut b), part(&mut b));
        let scores = b.times(q, k);
        let shares = b.softmax(scores);
        let mixed = b.op(MatMul::default(), &[shares, v]);
        let mixed = b.permute(mixed, &[0, 2, 1, 3]);
        let mixed = b.reshape(mixed, &hidden(width));
        let out = b.times(mixed, square);
        let out = b.add(out, bias);
        x = b.add(x, out);
        let norm = b.softmax(x);
        let inner = b.times(norm, up);
        let inner = b.add(inner, wide);
        let inner = b.unary(UnaryKind::GeluTanh, inner);
        let out = b.times(inner, down);
        let out = b.add(out, bias);
        x = b.add(x, out);
    }
    let norm = b.softmax(x);
    let logits = b.times(norm, head);
    b.graph.outputs.push(logits);
    b.graph
}

/// Demands with scratch for some nodes, and kernels that take strides.
pub struct Kernels {
    ops: OfOps,
    pub scratch: Vec<usize>,
    pub strided: bool,
}

impl Kernels {
    pub fn of(instance: &Instance<'_>) -> Kernels {
        Kernels { ops: OfOps::of(instance), scratch: vec![0; instance.node_count()], strided: false }
    }
}

impl Demands for Kernels {
    fn scratch(&self, node: NodeId) -> usize {
        self.scratch[node.index()]
    }

    fn in_place(&self, node: NodeId) -> &[usize] {
        self.ops.in_place(node)
    }

    fn strided(&self, _: NodeId, _: usize) -> bool {
        self.strided
    }
}

pub fn symbols(pairs: &[(&str, i64)]) -> Symbols {
    pairs.iter().copied().collect()
}

/// What the validators find in a plan, errors and all.
pub fn findings(instance: &Instance<'_>, plan: &MemoryPlan, demands: &dyn Demands) -> Vec<Finding> {
    match validate::plan(Planned { instance, plan, demands }, Level::Normal) {
        Ok(found) => found,
        Err(invalid) => invalid.0,
    }
}

/// Fails with what the validators find.
pub fn assert_valid(instance: &Instance<'_>, plan: &MemoryPlan, demands: &dyn Demands) {
    let found = findings(instance, plan, demands);
    let told: Vec<String> = found.iter().map(Finding::to_string).collect();
    assert!(told.is_empty(), "{}\n{plan:#?}", told.join("\n"));
    assert!(plan.bound <= plan.arena, "a bound of {} above the arena of {}", plan.bound, plan.arena);
}
