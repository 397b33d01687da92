//! What depends on constants only is computed once.

use std::collections::HashMap;

use lz_abi::{Tensor, TensorView};

use crate::ir::{Constant, Graph, GraphError, NodeId, Symbols, ValueId};
use crate::ops::Op;

/// Results up to so many bytes are always kept. A mask for 1024 positions is that large.
const ALWAYS: usize = 1 << 20;
/// Larger ones may be so many times as large as the constants they are made of: a cast to a wider type is twice as
/// large.
const GROWTH: usize = 2;

/// Whether a node repeats few numbers many times. It is computed as a part of what reads it, and not kept itself.
fn repeats(op: &Op) -> bool {
    matches!(op, Op::Full(_) | Op::Expand(_))
}

struct Folder<'g> {
    graph: &'g Graph,
    made: HashMap<ValueId, Option<Tensor>>,
}

impl Folder<'_> {
    /// Bytes of a value, if its sizes are known.
    fn bytes(&self, value: ValueId) -> Option<usize> {
        let meta = self.graph.meta(value);
        Some(meta.dtype.bytes_for(usize::try_from(meta.len().known()?).ok()?))
    }

    /// Bytes of the constants a value is made of; `None` if it depends on anything else, or is too large.
    fn source(&self, value: ValueId) -> Option<usize> {
        if self.graph.constant(value).is_some() {
            return self.bytes(value);
        }
        let (_, node) = self.graph.made_by(value)?;
        if !node.op.folds() || !(repeats(&node.op) || node.inputs.is_empty()) {
            return None;
        }
        let read = node.inputs.iter().flatten().map(|&input| self.source(input)).sum::<Option<usize>>()?;
        (self.bytes(value)? <= ALWAYS.max(GROWTH * read)).then_some(read)
    }

    /// Whether a node becomes a constant.
    fn folds(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        let all = || node.inputs.iter().flatten().map(|&input| self.source(input)).sum::<Option<usize>>();
        let Some(size) = self.bytes(node.output).filter(|_| node.op.folds()) else { return false };
        let number = self.graph.meta(node.output).len().is(1);
        (number || !repeats(&node.op)) && all().is_some_and(|read| size <= ALWAYS.max(GROWTH * read))
    }

    fn tensor(&mut self, value: ValueId) -> Option<Tensor> {
        if let Some(constant) = self.graph.constant(value) {
            return Some(constant.view().to_tensor());
        }
        if let Some(made) = self.made.get(&value) {
            return made.clone();
        }
        let made = self.evaluated(value);
        self.made.insert(value, made.clone());
        made
    }

    /// A node's result. `None` if it fails: then it fails where it stands, when the graph runs.
    fn evaluated(&mut self, value: ValueId) -> Option<Tensor> {
        let (_, node) = self.graph.made_by(value)?;
        let given: Vec<Option<Tensor>> = node
            .inputs
            .iter()
            .map(|input| input.map_or(Some(None), |input| self.tensor(input).map(Some)))
            .collect::<Option<_>>()?;
        let views: Vec<Option<TensorView<'_>>> = given.iter().map(|one| one.as_ref().map(Tensor::view)).collect();
        let meta = self.graph.meta(value);
        let mut output = Tensor::try_zeros(meta.dtype, &meta.sizes()?)?;
        // Attributes with symbols have no numbers yet.
        node.op.at(&Symbols::new()).ok()?.evaluate(&views, &mut output).ok()?;
        Some(output)
    }
}

/// Computes nodes whose inputs are all constants.
pub fn fold(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        let mut folder = Folder { graph, made: HashMap::new() };
        if !folder.folds(id) {
            continue;
        }
        let output = graph.node(id).output;
        // A result of the graph is made by a node.
        let given = graph.outputs.contains(&output) || graph.updates.iter().any(|(_, new)| *new == output);
        if given {
            continue;
        }
        if let Some(tensor) = folder.tensor(output) {
            let name = graph.value(output).name.clone();
            graph.fold(output, Constant::owned(&name, tensor));
            count += 1;
        }
    }
    if count > 0 {
        graph.sweep();
    }
    Ok(count)
}
