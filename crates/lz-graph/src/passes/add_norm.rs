//! Norms of a sum that nothing else reads.

use super::pattern::{any, binary, node, rewrite};
use crate::ir::{Graph, GraphError};
use crate::ops::Op;
use crate::ops::add_layer_norm::AddLayerNorm;
use crate::ops::binary::BinaryKind;
use crate::ops::rms_norm::AddRmsNorm;

/// The sum becomes a part of the norm.
pub fn add_norm(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    let is_norm: fn(&Op) -> bool = |op| match op {
        Op::RmsNorm(_) => true,
        Op::LayerNorm(norm) => norm.axes == 1,
        _ => false,
    };
    let sum = || binary(BinaryKind::Add, any("x"), any("residual"));
    for inputs in [vec![sum()], vec![sum(), any("w")], vec![sum(), any("w"), any("b")]] {
        let pattern = node(is_norm, inputs).named("norm");
        count += rewrite(graph, &pattern, |graph, found| {
            let (_, made) = graph.made_by(found.value("norm"))?;
            let op = match &made.op {
                Op::RmsNorm(norm) => Op::from(AddRmsNorm { eps: norm.eps }),
                Op::LayerNorm(norm) => AddLayerNorm { eps: norm.eps }.into(),
                _ => return None,
            };
            let mut inputs = vec![found.input("x"), found.input("residual")];
            inputs.extend_from_slice(&made.inputs[1..]);
            Some((op, inputs))
        })?;
    }
    Ok(count)
}
