//! Softmax that is written out: `e = exp(x - max(x)); e / sum(e)`.

use super::pattern::{Pattern, any, node, one_of, rewrite, unary};
use crate::ir::{Graph, GraphError, ValueId};
use crate::ops::Op;
use crate::ops::reduce::ReduceKind;
use crate::ops::softmax::Softmax;
use crate::ops::unary::UnaryKind;

/// A reduction, with or without a reshape that puts the axis back.
pub fn reduced(kind: ReduceKind, input: Pattern, name: &'static str) -> Pattern {
    let reduce = node(move |op| matches!(op, Op::Reduce(reduce) if reduce.kind == kind), [input]);
    one_of([reduce.clone(), node(|op| matches!(op, Op::Reshape(_)), [reduce])]).named(name)
}

/// The one axis a value is reduced along, if the result keeps it with a size of 1.
pub fn reduced_axis(graph: &Graph, value: ValueId, input: ValueId) -> Option<usize> {
    let (_, mut made) = graph.made_by(value)?;
    if matches!(made.op, Op::Reshape(_)) {
        made = graph.made_by(made.inputs[0]?)?.1;
    }
    let Op::Reduce(reduce) = &made.op else { return None };
    let [axis] = reduce.axes[..] else { return None };
    let axis = graph.meta(input).axis(axis).ok()?;
    let mut kept = graph.meta(input).shape.clone();
    kept[axis] = 1.into();
    (graph.meta(value).shape == kept).then_some(axis)
}

/// Finds softmax.
pub fn softmax(graph: &mut Graph) -> Result<usize, GraphError> {
    let x = any("x");
    let exp = unary(UnaryKind::Exp, x.clone() - reduced(ReduceKind::Max, x, "max")).named("exp");
    let sum = reduced(ReduceKind::Sum, exp.clone(), "sum");
    let whole = one_of([exp.clone() / sum.clone(), exp * unary(UnaryKind::Reciprocal, sum)]);
    rewrite(graph, &whole, |graph, found| {
        let axis = reduced_axis(graph, found.value("max"), found.value("x"))?;
        let same = reduced_axis(graph, found.value("sum"), found.value("exp")) == Some(axis);
        same.then(|| (Softmax { axis: axis as i64 }.into(), vec![found.input("x")]))
    })
}
