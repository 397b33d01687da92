//! Norms that are written out: over the last axis, with their weights, and with the casts around them.

use super::pattern::{Match, Pattern, any, binary, node, one_of, rewrite, some_number, square, unary};
use super::softmax::{reduced, reduced_axis};
use crate::ir::{Graph, GraphError, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::reduce::ReduceKind;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::unary::UnaryKind;

/// `x / √v`, however it is written.
fn over_root(x: Pattern, variance: Pattern) -> Pattern {
    one_of([
        x.clone() * unary(UnaryKind::Rsqrt, variance.clone()),
        x.clone() / unary(UnaryKind::Sqrt, variance.clone()),
        x.clone() * unary(UnaryKind::Reciprocal, unary(UnaryKind::Sqrt, variance.clone())),
        x.clone() * binary(BinaryKind::Pow, variance.clone(), super::pattern::number(-0.5)),
        x / binary(BinaryKind::Pow, variance, super::pattern::number(0.5)),
    ])
}

fn is_last(graph: &Graph, value: ValueId, input: ValueId) -> bool {
    reduced_axis(graph, value, input).is_some_and(|axis| axis + 1 == graph.meta(input).rank())
}

/// A weight or a bias: one number for each element of the last axis.
fn is_vector(graph: &Graph, value: ValueId, of: ValueId) -> bool {
    let (vector, whole) = (graph.meta(value), graph.meta(of));
    vector.rank() == 1 && vector.shape.last() == whole.shape.last() && vector.dtype == whole.dtype
}

fn cast(input: Pattern) -> Pattern {
    node(|op| matches!(op, Op::Cast(_)), [input])
}

/// Takes the casts off a norm: `cast(norm(cast(x)))` of the type that x has. The norm computes as exactly without them.
fn without_casts(graph: &mut Graph, is: fn(&Op) -> bool) -> Result<usize, GraphError> {
    let pattern = cast(node(is, [cast(any("x")).shared()]).named("norm"));
    rewrite(graph, &pattern, |graph, found| {
        let (wide, x) = (graph.meta(found.value("norm")).dtype, graph.meta(found.value("x")).dtype);
        let (_, norm) = graph.made_by(found.value("norm"))?;
        // A type that is narrower inside would round.
        x.widens_to(wide).then(|| (norm.op.clone(), vec![found.input("x")]))
    })
}

fn eps(graph: &Graph, found: &Match) -> Option<f64> {
    Some(found.number(graph, "eps")).filter(|eps| *eps >= 0.0 && eps.is_finite())
}

/// `x / √(mean(x²) + eps) · w`.
pub fn rms_norm(graph: &mut Graph) -> Result<usize, GraphError> {
    let x = || any("x");
    let mean = reduced(ReduceKind::Mean, square(x()).named("squares"), "mean");
    let plain = over_root(x(), mean + some_number("eps"));
    let mut count = rewrite(graph, &plain, |graph, found| {
        is_last(graph, found.value("mean"), found.value("squares")).then_some(())?;
        Some((RmsNorm { eps: eps(graph, found)? }.into(), vec![found.input("x")]))
    })?;
    count += without_casts(graph, |op| matches!(op, Op::RmsNorm(_)))?;
    let weighted = binary(BinaryKind::Mul, node(|op| matches!(op, Op::RmsNorm(_)), [x()]).named("norm"), any("w"));
    count += rewrite(graph, &weighted, |graph, found| {
        is_vector(graph, found.value("w"), found.value("x")).then_some(())?;
        let (_, norm) = graph.made_by(found.value("norm"))?;
        Some((norm.op.clone(), vec![found.input("x"), found.input("w")]))
    })?;
    Ok(count)
}

/// `(x − mean(x)) / √(var(x) + eps) · w + b`.
pub fn layer_norm(graph: &mut Graph) -> Result<usize, GraphError> {
    let x = || any("x");
    let centred = (x() - reduced(ReduceKind::Mean, x(), "mean")).named("centred");
    let variance = reduced(ReduceKind::Mean, square(centred.clone()).named("squares"), "variance");
    let plain = over_root(centred, variance + some_number("eps"));
    let mut count = rewrite(graph, &plain, |graph, found| {
        let last = is_last(graph, found.value("mean"), found.value("x"))
            && is_last(graph, found.value("variance"), found.value("squares"));
        last.then_some(())?;
        Some((LayerNorm { eps: eps(graph, found)?, axes: 1 }.into(), vec![found.input("x")]))
    })?;
    let is: fn(&Op) -> bool = |op| matches!(op, Op::LayerNorm(norm) if norm.axes == 1);
    count += without_casts(graph, is)?;
    let weighted = binary(BinaryKind::Mul, node(is, [x()]).named("norm"), any("w"));
    count += rewrite(graph, &weighted, |graph, found| {
        is_vector(graph, found.value("w"), found.value("x")).then_some(())?;
        let (_, norm) = graph.made_by(found.value("norm"))?;
        Some((norm.op.clone(), vec![found.input("x"), found.input("w")]))
    })?;
    let biased = binary(BinaryKind::Add, node(is, [x(), any("w")]).named("norm"), any("b"));
    count += rewrite(graph, &biased, |graph, found| {
        is_vector(graph, found.value("b"), found.value("x")).then_some(())?;
        let (_, norm) = graph.made_by(found.value("norm"))?;
        Some((norm.op.clone(), vec![found.input("x"), found.input("w"), found.input("b")]))
    })?;
    Ok(count)
}
