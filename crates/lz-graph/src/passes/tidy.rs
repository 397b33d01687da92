//! What changes nothing is taken out: `x * 1`, a reshape to the same sizes, a cast to the same type.

use super::pattern::number_of;
use crate::ir::{Graph, GraphError, NodeId, Source, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::permute::Permute;

/// Makes what reads a value read another one, if it is the same tensor.
fn replace(graph: &mut Graph, value: ValueId, by: ValueId) -> bool {
    if graph.meta(value) != graph.meta(by) {
        return false;
    }
    let given = graph.outputs.contains(&value) || graph.updates.iter().any(|(_, new)| *new == value);
    // A result is made by a node: the plan gives it memory that is not an input's.
    if given && !matches!(graph.value(by).source, Source::Node(_)) {
        return false;
    }
    graph.replace(value, by);
    graph.sweep();
    true
}

/// The value a node only passes on.
fn passed_on(graph: &Graph, id: NodeId) -> Option<ValueId> {
    let node = graph.node(id);
    let input = |at: usize| node.inputs.get(at).copied().flatten();
    let first = input(0)?;
    match &node.op {
        Op::Binary(binary) => {
            let second = input(1)?;
            let is = |value, number| number_of(graph, value) == Some(number);
            match binary.kind {
                BinaryKind::Mul if is(second, 1.0) => Some(first),
                BinaryKind::Mul if is(first, 1.0) => Some(second),
                BinaryKind::Div | BinaryKind::Pow if is(second, 1.0) => Some(first),
                BinaryKind::Add if is(second, 0.0) => Some(first),
                BinaryKind::Add if is(first, 0.0) => Some(second),
                BinaryKind::Sub if is(second, 0.0) => Some(first),
                _ => None,
            }
        }
        // Equal sizes are the same elements in the same places.
        Op::Reshape(_) | Op::Cast(_) | Op::Expand(_) => Some(first),
        Op::Permute(permute) => permute.axes.is_sorted().then_some(first),
        // As many elements, one by one.
        Op::Slice(slice) => (slice.step == 1).then_some(first),
        Op::Concat(_) => (node.inputs.len() == 1).then_some(first),
        _ => None,
    }
}

/// The inner one of two nodes of which only the outer one counts.
fn skipped(graph: &Graph, id: NodeId) -> Option<ValueId> {
    let node = graph.node(id);
    let (_, inner) = graph.made_by(node.inputs.first().copied().flatten()?)?;
    let source = inner.inputs.first().copied().flatten()?;
    match (&node.op, &inner.op) {
        (Op::Reshape(_), Op::Reshape(_)) => Some(source),
        // Nothing is lost on the way.
        (Op::Cast(_), Op::Cast(through)) => graph.meta(source).dtype.widens_to(through.dtype).then_some(source),
        _ => None,
    }
}

/// Takes out nodes that change nothing.
pub fn tidy(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        let Some(output) = graph.get(id).map(|node| node.output) else { continue };
        if passed_on(graph, id).is_some_and(|by| replace(graph, output, by)) {
            count += 1;
            continue;
        }
        if let Some(source) = skipped(graph, id) {
            let op = graph.node(id).op.clone();
            count += usize::from(super::pattern::change(graph, id, |_| Some((op, vec![Some(source)]))));
        }
    }
    Ok(count)
}

/// Two permutes become one.
pub fn permutes(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        let Some(node) = graph.get(id) else { continue };
        let Op::Permute(outer) = &node.op else { continue };
        let Some((_, inner)) = node.inputs[0].and_then(|input| graph.made_by(input)) else { continue };
        let Op::Permute(first) = &inner.op else { continue };
        let (axes, source) = (outer.axes.iter().map(|&axis| first.axes[axis]).collect(), inner.inputs[0]);
        let op = Op::Permute(Permute { axes });
        count += usize::from(super::pattern::change(graph, id, |_| Some((op, vec![source]))));
    }
    Ok(count)
}
