//! Linear layers that read the same value become one, and parts of its result: q, k and v, or a gate and what it gates.

use std::collections::BTreeMap;

use super::constants;
use crate::ir::{Constant, Graph, GraphError, NodeId, ValueId};
use crate::ops::Op;
use crate::ops::linear::{Activation, Linear};
use crate::ops::slice::Slice;

/// A layer that can be merged: what it reads, and whether it has a bias. Both its weights and its bias are constants.
fn mergeable(graph: &Graph, id: NodeId) -> Option<(ValueId, bool)> {
    let made = graph.node(id);
    let input = |at: usize| made.inputs.get(at).copied().flatten();
    let Op::Linear(Linear { activation: Activation::None }) = made.op else { return None };
    let constant = |at: usize| input(at).is_none_or(|value| graph.constant(value).is_some());
    (constant(1) && constant(2) && input(3).is_none()).then(|| Some((input(0)?, input(2).is_some()))).flatten()
}

/// Merges linear layers. Their weights are copied into one matrix.
pub fn merge(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut groups: BTreeMap<(ValueId, bool), Vec<NodeId>> = BTreeMap::new();
    for id in graph.order()? {
        if let Some(key) = mergeable(graph, id) {
            groups.entry(key).or_default().push(id);
        }
    }
    let mut count = 0;
    for ((x, biased), layers) in groups {
        if layers.len() < 2 {
            continue;
        }
        let parts = |graph: &Graph, at: usize| -> Option<Constant> {
            let constants: Option<Vec<&Constant>> =
                layers.iter().map(|&id| graph.constant(graph.node(id).inputs[at]?)).collect();
            constants::stacked(&constants?)
        };
        let Some(weight) = parts(graph, 1) else { continue };
        let bias = if biased { parts(graph, 2) } else { None };
        if biased && bias.is_none() {
            continue;
        }
        let mut inputs = vec![Some(x), Some(graph.add_constant(weight))];
        inputs.extend(bias.map(|bias| Some(graph.add_constant(bias))));
        let first = graph.node(layers[0]);
        let (name, origin) = (format!("{}_merged", graph.value(first.output).name), first.origin.clone());
        let whole = graph.push(Linear::default().into(), &inputs, &name, &origin)?;
        let axis = graph.meta(whole).rank() - 1;
        let mut start = crate::ir::Dim::from(0);
        for id in layers {
            let width = graph.meta(graph.node(id).output).shape[axis].clone();
            let end = start.clone() + width;
            let part = Slice { axis: axis as i64, start, end: end.clone(), step: 1 };
            graph.change(id, part.into(), &[Some(whole)])?;
            start = end;
            count += 1;
        }
    }
    Ok(count)
}
