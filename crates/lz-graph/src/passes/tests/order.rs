//! The constraints on the order of passes: each test fails if the two passes it names are swapped.

use super::super::{Options, PASSES, Pass, optimize, optimize_with};
use super::build::*;
use crate::ir::{Graph, ValueId};
use crate::ops::unary::UnaryKind::*;

/// All passes, with the first one right behind the second one.
fn swapped(first: &str, second: &str) -> Vec<(&'static str, Pass)> {
    let place = |passes: &[(&'static str, Pass)], name: &str| passes.iter().position(|(one, _)| *one == name).unwrap();
    let mut passes = PASSES.to_vec();
    assert!(place(&passes, first) < place(&passes, second), "{first} runs before {second}");
    let one = passes.remove(place(&passes, first));
    let at = place(&passes, second) + 1;
    passes.insert(at, one);
    passes
}

/// The constraint holds in the order of [`PASSES`], and not in the other one.
fn constraint(build: &Build, first: &str, second: &str, holds: impl Fn(&Graph) -> bool) {
    let (mut right, mut wrong) = (build.graph.clone(), build.graph.clone());
    optimize(&mut right, &Options::default()).unwrap();
    optimize_with(&swapped(first, second), &mut wrong, &Options::default()).unwrap();
    assert!(holds(&right), "{:?}", ops(&right));
    assert!(!holds(&wrong), "{:?}", ops(&wrong));
}

fn linear(b: &mut Build, x: ValueId) -> ValueId {
    b.linear(x, 4, 4)
}

#[test]
fn transposes_are_absorbed_before_they_are_folded() {
    let mut b = Build::new();
    let x = b.input("s0 4");
    let w = b.weight(&[4, 4]);
    let turned = b.permute(w, &[1, 0]);
    let y = b.matmul(x, turned);
    let model = b.graph.constant(w).unwrap().clone();
    // The model's own memory is used.
    constraint(&b.output(y), "absorb_transpose", "fold", |graph| {
        let node = graph.nodes().next().unwrap().1;
        graph.constant(node.inputs[1].unwrap()).unwrap().is(&model)
    });
}

#[test]
fn transposes_are_absorbed_before_permutes_join() {
    let mut b = Build::new();
    let (q, x) = (b.input("1 2 s0 4"), b.input("1 s0 2 4"));
    let k = b.permute(x, &[0, 2, 1, 3]);
    let turned = b.permute(k, &[0, 1, 3, 2]);
    let y = b.matmul(q, turned);
    constraint(&b.output(y), "absorb_transpose", "permutes", |graph| match only(graph, "matmul") {
        crate::ops::Op::MatMul(product) => product.transpose_b,
        _ => unreachable!(),
    });
}

#[test]
fn gates_are_found_before_activations_of_layers() {
    let mut b = Build::new();
    let (x, up) = (b.input("s0 4"), b.input("s0 4"));
    let gate = linear(&mut b, x);
    let gate = b.unary(Silu, gate);
    let y = b.mul(gate, up);
    constraint(&b.output(y), "gated", "activation", |graph| ops(graph).contains(&"gated".to_owned()));
}

#[test]
fn biases_are_absorbed_before_layers_merge() {
    let mut b = Build::new();
    let x = b.input("s0 4");
    let parts = [0; 2].map(|_| {
        let y = linear(&mut b, x);
        let bias = b.weight(&[4]);
        b.add(y, bias)
    });
    let y = b.concat(1, &parts);
    constraint(&b.output(y), "bias", "merge_linear", |graph| !ops(graph).contains(&"add".to_owned()));
}

#[test]
fn residuals_are_absorbed_before_norms_take_sums() {
    let mut b = Build::new();
    let (x, r) = (b.input("s0 4"), b.input("s0 4"));
    let y = linear(&mut b, x);
    let y = b.add(y, r);
    let y = b.op(crate::ops::rms_norm::RmsNorm { eps: 1e-6 }, &[y]);
    constraint(&b.output(y), "residual", "add_norm", |graph| ops(graph) == ["linear", "rms_norm"]);
}

#[test]
fn any_pass_can_be_switched_off() {
    let mut b = Build::new();
    let x = b.input("s0 4");
    let y = linear(&mut b, x);
    let y = b.unary(Relu, y);
    let b = b.output(y);
    let off = Options::default().without("activation").unwrap();
    let (graph, report) = after(&b, &off, &[3]);
    assert_eq!(ops(&graph), ["linear", "relu"]);
    assert!(!report.rewrites.contains_key("activation") && report.rewrites["linear"] == 1);
    assert_eq!((report.before, report.after), (3, 2));
    let unknown = Options::default().without("activations").unwrap_err();
    assert_eq!(unknown.to_string(), "there is no pass 'activations'; did you mean 'activation'?");
}

#[test]
fn rounds_are_bounded() {
    let mut b = Build::new();
    let x = b.input("4");
    let y = b.unary(Tanh, x);
    let mut graph = b.output(y).graph;
    let restless: &[(&'static str, Pass)] = &[("restless", |_| Ok(1))];
    let report = optimize_with(restless, &mut graph, &Options { rounds: 5, ..Options::default() }).unwrap();
    assert!(!report.settled && report.rounds == 5 && report.rewrites["restless"] == 5);
}

#[test]
fn a_pass_that_breaks_the_graph_is_an_error() {
    let mut b = Build::new();
    let x = b.input("4");
    let y = b.unary(Tanh, x);
    let z = b.unary(Exp, y);
    let mut graph = b.output(z).graph;
    let breaks: &[(&'static str, Pass)] = &[("breaks", |graph| {
        // A circle: the first node reads the last one.
        let (first, last) = (graph.named("v").unwrap(), graph.outputs[0]);
        let (id, op) = (graph.producer(first).unwrap(), graph.made_by(first).unwrap().1.op.clone());
        graph.change(id, op, &[Some(last)])?;
        Ok(1)
    })];
    let why = optimize_with(breaks, &mut graph, &Options { verify: true, ..Options::default() }).unwrap_err();
    assert!(matches!(why, crate::ir::GraphError::Cycle(_)));
}
