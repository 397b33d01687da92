//! What products of matrices can do themselves: read transposed inputs, and multiply the result with a number.

use std::collections::HashMap;

use super::constants;
use super::pattern::{any, binary, node, number_of, rewrite, some_number};
use crate::ir::{Graph, GraphError, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::matmul::MatMul;

/// A matrix that [`super::linear`] makes a weight of. A matrix that the caller gives is none: it may be another one
/// each time.
pub fn is_weight(graph: &Graph, value: ValueId) -> bool {
    graph.meta(value).rank() == 2 && graph.constant(value).is_some()
}

/// A product of a swap of the last two axes reads the matrix as it is. Other permutes move elements, and stay.
pub fn transposes(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        for side in 0..2 {
            let Some(made) = graph.get(id) else { continue };
            let Op::MatMul(product) = &made.op else { continue };
            let Some((_, before)) = made.inputs[side].and_then(|input| graph.made_by(input)) else { continue };
            if !matches!(&before.op, Op::Permute(permute) if permute.is_last_two()) {
                continue;
            }
            let (mut product, mut inputs) = (product.clone(), made.inputs.to_vec());
            inputs[side] = before.inputs[0];
            let flag = if side == 0 { &mut product.transpose_a } else { &mut product.transpose_b };
            *flag = !*flag;
            count += usize::from(super::pattern::change(graph, id, |_| Some((product.into(), inputs))));
        }
    }
    Ok(count)
}

/// A constant matrix on the right is kept as (out, in): rows that are multiplied lie in a row of memory, as in the
/// weights of
/// linear layers. Each matrix is copied once, however often it is read.
pub fn pretranspose(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut copies: HashMap<ValueId, ValueId> = HashMap::new();
    let mut count = 0;
    for id in graph.order()? {
        // What nothing reads goes with the first change.
        let Some(made) = graph.get(id) else { continue };
        let (Op::MatMul(product), Some(right)) = (&made.op, made.inputs.get(1).copied().flatten()) else { continue };
        if product.transpose_b || graph.meta(right).rank() != 2 {
            continue;
        }
        let Some(matrix) = graph.constant(right) else { continue };
        let (product, left) = (MatMul { transpose_b: true, ..product.clone() }, made.inputs[0]);
        let copy = match copies.get(&right) {
            Some(&copy) => copy,
            None => {
                let Some(copy) = constants::transposed(matrix) else { continue };
                let copy = graph.add_constant(copy);
                copies.insert(right, copy);
                copy
            }
        };
        count += usize::from(super::pattern::change(graph, id, |_| Some((product.into(), vec![left, Some(copy)]))));
    }
    Ok(count)
}

/// Numbers that a product or one of its inputs is multiplied with become its `alpha`. Not with weights: linear layers
/// have none.
pub fn scalars(graph: &mut Graph) -> Result<usize, GraphError> {
    let product = || node(|op| matches!(op, Op::MatMul(_)), [any("a"), any("b")]).named("product");
    let alpha = |graph: &Graph, value: ValueId| match graph.made_by(value).map(|(_, node)| &node.op) {
        Some(Op::MatMul(product)) => Some(product.clone()),
        _ => None,
    };
    let mut count = 0;
    for divides in [false, true] {
        let by = some_number("by");
        let scaled = if divides { product() / by } else { binary(BinaryKind::Mul, product(), by) };
        count += rewrite(graph, &scaled, |graph, found| {
            let (product, by) = (alpha(graph, found.value("product"))?, found.number(graph, "by"));
            let by = if divides { 1.0 / by } else { by };
            if !fits(graph, found.value("b"), by) {
                return None;
            }
            Some((MatMul { alpha: product.alpha * by, ..product }.into(), vec![found.input("a"), found.input("b")]))
        })?;
    }
    // An input that is multiplied with a number, and read by nothing else.
    for id in graph.order()? {
        for side in 0..2 {
            let Some(made) = graph.get(id) else { continue };
            let Op::MatMul(product) = &made.op else { continue };
            let (Some(input), Some(right)) = (made.inputs[side], made.inputs[1]) else { continue };
            let Some((from, by)) = scaled(graph, input) else { continue };
            if !fits(graph, right, by) || graph.uses()[input.index()] != 1 {
                continue;
            }
            let (product, mut inputs) = (MatMul { alpha: product.alpha * by, ..product.clone() }, made.inputs.to_vec());
            inputs[side] = Some(from);
            count += usize::from(super::pattern::change(graph, id, |_| Some((product.into(), inputs))));
        }
    }
    Ok(count)
}

/// Whether a product with this right side may be multiplied with a number.
fn fits(graph: &Graph, right: ValueId, by: f64) -> bool {
    by.is_finite() && graph.meta(right).dtype.is_float() && !is_weight(graph, right)
}

/// What a value is a multiple of, and the number.
pub fn scaled(graph: &Graph, value: ValueId) -> Option<(ValueId, f64)> {
    let (_, made) = graph.made_by(value)?;
    let Op::Binary(binary) = &made.op else { return None };
    let (left, right) = (made.inputs[0]?, made.inputs[1]?);
    let (from, by) = match binary.kind {
        BinaryKind::Mul => match (number_of(graph, left), number_of(graph, right)) {
            (_, Some(by)) => (left, by),
            (Some(by), _) => (right, by),
            _ => return None,
        },
        BinaryKind::Div => (left, 1.0 / number_of(graph, right)?),
        _ => return None,
    };
    (graph.meta(from) == graph.meta(value)).then_some((from, by))
}
