//! Keys and values that are repeated for each group of heads: attention reads them as they are.

use crate::ir::{Graph, GraphError, ValueId};
use crate::ops::Op;

/// The value whose heads are repeated one after another: (b, h, s, d) → (b, h, 1, s, d) → (b, h, n, s, d) → (b, h·n, s,
/// d).
fn repeated(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let made = |value: ValueId, is: fn(&Op) -> bool| {
        graph.made_by(value).filter(|(_, node)| is(&node.op)).and_then(|(_, node)| node.inputs[0])
    };
    let wide = made(value, |op| matches!(op, Op::Reshape(_)))?;
    let column = made(wide, |op| matches!(op, Op::Expand(_)))?;
    let source = made(column, |op| matches!(op, Op::Reshape(_)))?;
    let shape = |value: ValueId| &graph.meta(value).shape;
    let (s, c, w, r) = (shape(source), shape(column), shape(wide), shape(value));
    if s.len() != 4 || c.len() != 5 || w.len() != 5 || r.len() != 4 {
        return None;
    }
    let added = c[..2] == s[..2] && c[2].is(1) && c[3..] == s[2..];
    let widened = w[..2] == c[..2] && w[3..] == c[3..];
    let joined = r[0] == w[0] && r[1] == w[1].clone() * w[2].clone() && r[2..] == w[3..];
    (added && widened && joined).then_some(source)
}

/// Takes the repetition away.
pub fn gqa(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        let Some(made) = graph.get(id) else { continue };
        if !matches!(made.op, Op::Attention(_)) {
            continue;
        }
        let (Some(k), Some(v)) = (made.inputs[1], made.inputs[2]) else { continue };
        // Both or none: they have as many heads.
        let (Some(keys), Some(values)) = (repeated(graph, k), repeated(graph, v)) else { continue };
        let (op, mut inputs) = (made.op.clone(), made.inputs.to_vec());
        (inputs[1], inputs[2]) = (Some(keys), Some(values));
        count += usize::from(super::pattern::change(graph, id, |_| Some((op, inputs))));
    }
    Ok(count)
}
