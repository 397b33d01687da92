//! Linear layers: products with weights, and what their kernels can do on the way.

use super::absorb::is_weight;
use super::activations::activation as any_activation;
use super::pattern::{any, binary, node, rewrite};
use crate::ir::{Graph, GraphError, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::linear::{Activation, Linear};
use crate::ops::matmul::MatMul;
use crate::ops::reshape::Reshape;

/// A product with a constant (out, in) becomes a linear layer.
pub fn linear(graph: &mut Graph) -> Result<usize, GraphError> {
    let plain = MatMul { transpose_b: true, ..MatMul::default() };
    let pattern = node(move |op| *op == Op::MatMul(plain.clone()), [any("x"), any("w")]);
    rewrite(graph, &pattern, |graph, found| {
        is_weight(graph, found.value("w")).then(|| (Linear::default().into(), vec![found.input("x"), found.input("w")]))
    })
}

/// A linear layer of so many inputs, without an activation.
fn is_plain(op: &Op) -> bool {
    matches!(op, Op::Linear(linear) if linear.activation == Activation::None)
}

/// A vector that is added to a linear layer becomes its bias.
pub fn bias(graph: &mut Graph) -> Result<usize, GraphError> {
    let pattern = binary(BinaryKind::Add, node(is_plain, [any("x"), any("w")]), any("bias"));
    rewrite(graph, &pattern, |graph, found| {
        let bias = graph.meta(found.value("bias"));
        let fits = bias.rank() == 1 && bias.shape[0] == graph.meta(found.value("w")).shape[0];
        fits.then(|| (Linear::default().into(), vec![found.input("x"), found.input("w"), found.input("bias")]))
    })
}

/// A reshape behind a linear layer that only changes leading axes joins the one before it.
pub fn leading_axes(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    let is_linear: fn(&Op) -> bool = |op| matches!(op, Op::Linear(_));
    let is_reshape: fn(&Op) -> bool = |op| matches!(op, Op::Reshape(_));
    for biased in [false, true] {
        let mut inputs = vec![node(is_reshape, [any("x")]).shared().named("flat"), any("w")];
        inputs.extend(biased.then(|| any("bias")));
        let pattern = node(is_reshape, [node(is_linear, inputs).named("linear")]).named("result");
        count += rewrite(graph, &pattern, |graph, found| {
            let (linear, mut inputs) = layer(graph, found.value("linear"))?;
            let (flat, result) = (graph.meta(found.value("flat")), graph.meta(found.value("result")));
            // The last axis is the layer's.
            if result.shape.last() != graph.meta(found.value("linear")).shape.last() {
                return None;
            }
            let mut shape = result.shape.to_vec();
            *shape.last_mut()? = flat.shape.last()?.clone();
            let name = graph.value(found.value("flat")).name.clone();
            inputs[0] = match graph.meta(found.value("x")).shape.as_slice() == shape {
                true => found.input("x"),
                false => Some(graph.push(Reshape { shape }.into(), &[found.input("x")], &name, "").ok()?),
            };
            Some((linear.into(), inputs))
        })?;
    }
    Ok(count)
}

fn layer(graph: &Graph, value: ValueId) -> Option<(Linear, Vec<Option<ValueId>>)> {
    let (_, made) = graph.made_by(value)?;
    let Op::Linear(linear) = &made.op else { return None };
    Some((linear.clone(), made.inputs.to_vec()))
}

/// An activation of a linear layer becomes a part of it.
pub fn activation(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for inputs in [vec![any("x"), any("w")], vec![any("x"), any("w"), any("bias")]] {
        let pattern = any_activation(node(is_plain, inputs).named("linear"));
        count += rewrite(graph, &pattern, |graph, found| {
            let Op::Unary(unary) = &graph.made_by(found.value("activation"))?.1.op else { return None };
            let (_, inputs) = layer(graph, found.value("linear"))?;
            (inputs.get(3).copied().flatten().is_none()).then_some(())?;
            Some((Linear { activation: Activation::of(unary.kind)? }.into(), inputs))
        })?;
    }
    Ok(count)
}

/// A tensor of the same sizes that is added to a linear layer becomes its residual.
pub fn residual(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    let is_linear: fn(&Op) -> bool = |op| matches!(op, Op::Linear(_));
    for inputs in [vec![any("x"), any("w")], vec![any("x"), any("w"), any("bias")]] {
        let pattern = binary(BinaryKind::Add, node(is_linear, inputs).named("linear"), any("residual"));
        count += rewrite(graph, &pattern, |graph, found| {
            let (linear, mut inputs) = layer(graph, found.value("linear"))?;
            let free = inputs.get(3).copied().flatten().is_none();
            // A residual of other sizes is refused by the layer's shape rule.
            free.then(|| {
                inputs.resize(3, None);
                inputs.push(found.input("residual"));
                (linear.into(), inputs)
            })
        })?;
    }
    Ok(count)
}
