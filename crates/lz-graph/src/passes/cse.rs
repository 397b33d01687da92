//! Equal nodes become one: the same operation with the same attributes on the same inputs.

use std::collections::BTreeMap;

use crate::ir::{Graph, GraphError, ValueId};

/// Constants of at most so many bytes are compared by what is in them.
const SMALL: usize = 256;

/// Which of two equal constants stands for both: the first by shape and contents, or by memory.
fn constants(graph: &mut Graph) -> usize {
    let mut read: Vec<ValueId> = graph.nodes().flat_map(|(_, node)| node.inputs.iter().flatten().copied()).collect();
    read.sort_unstable();
    read.dedup();
    let mut seen: BTreeMap<(String, Vec<u8>), ValueId> = BTreeMap::new();
    let mut equal = Vec::new();
    for value in read {
        let Some(constant) = graph.constant(value) else { continue };
        let view = constant.view();
        let contents = if view.dtype().bytes_for(view.len()) <= SMALL {
            view.to_tensor().bytes().to_vec()
        } else {
            // Where it lies, and how: the sizes are in the other half of the key.
            let mut place = view.as_ref().address().to_le_bytes().to_vec();
            place.extend(view.strides().iter().flat_map(|stride| stride.to_le_bytes()));
            place
        };
        let key = (graph.meta(value).to_string(), contents);
        match seen.get(&key) {
            Some(&first) => equal.push((value, first)),
            None => _ = seen.insert(key, value),
        }
    }
    equal.iter().for_each(|&(value, by)| graph.replace(value, by));
    equal.len()
}

/// Makes equal nodes and equal constants one.
pub fn cse(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = constants(graph);
    let mut seen: BTreeMap<(&'static str, String, Vec<Option<ValueId>>), ValueId> = BTreeMap::new();
    for id in graph.order()? {
        let node = graph.node(id);
        // What does not fold may give another result each time.
        if !node.op.folds() {
            continue;
        }
        let key = (node.op.name(), node.op.attributes().to_string(), node.inputs.to_vec());
        let output = node.output;
        match seen.get(&key) {
            Some(&first) => {
                graph.replace(output, first);
                count += 1;
            }
            None => _ = seen.insert(key, output),
        }
    }
    if count > 0 {
        graph.sweep();
    }
    Ok(count)
}
