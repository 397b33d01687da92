//! Rotary positional embedding that is written out: `x·cos + rotated(x)·sin`.

use super::pattern::{Pattern, any, binary, node, rewrite, unary};
use crate::ir::{Constant, Dim, Graph, GraphError, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::expand::Expand;
use crate::ops::reshape::Reshape;
use crate::ops::rope::Rope;
use crate::ops::unary::UnaryKind;

fn slice(name: &'static str) -> Pattern {
    // Both halves are read by `rotated` only, and x by others too.
    node(|op| matches!(op, Op::Slice(_)), [any("x")]).named(name)
}

/// A part of the last axis of a value: where it begins, and its step.
fn part(graph: &Graph, value: ValueId, of: ValueId) -> Option<(Dim, i64)> {
    let (_, made) = graph.made_by(value)?;
    let Op::Slice(slice) = &made.op else { return None };
    let whole = graph.meta(of);
    let axis = whole.axis(slice.axis).ok()?;
    let end = whole.shape[axis].clone();
    // Up to the end, or the first half.
    let half = end.clone().quotient(Dim::from(2));
    let fits = slice.end == end || slice.step == 1 && slice.start.is(0) && slice.end == half;
    let even = slice.step == 2 && slice.end.clone() + Dim::from(1) == end;
    (axis + 1 == whole.rank() && (fits || even && slice.start.is(0))).then(|| (slice.start.clone(), slice.step))
}

fn joined_last(graph: &Graph, value: ValueId) -> bool {
    graph.made_by(value).is_some_and(|(_, made)| match &made.op {
        Op::Concat(concat) => {
            graph.meta(value).axis(concat.axis).is_ok_and(|axis| axis + 1 == graph.meta(value).rank())
        }
        _ => false,
    })
}

fn around(rotated: Pattern) -> Pattern {
    let times = |a, b| binary(BinaryKind::Mul, a, b);
    times(rotated, any("sin")) + times(any("x"), any("cos"))
}

/// The rotation of halves, as Llama has it, and of neighbours, as GPT-J has it.
pub fn rope(graph: &mut Graph) -> Result<usize, GraphError> {
    let is_concat: fn(&Op) -> bool = |op| matches!(op, Op::Concat(_));
    let is_reshape: fn(&Op) -> bool = |op| matches!(op, Op::Reshape(_));
    let neg = |input| unary(UnaryKind::Neg, input);
    let halves = around(node(is_concat, [neg(slice("second")), slice("first")]).named("joined"));
    let replacement = |interleaved, found: &super::pattern::Match| {
        Some((Rope { interleaved }.into(), vec![found.input("x"), found.input("cos"), found.input("sin")]))
    };
    let mut count = rewrite(graph, &halves, |graph, found| {
        let x = found.value("x");
        let half = graph.meta(x).shape.last()?.clone().quotient(Dim::from(2));
        let (first, second) = (part(graph, found.value("first"), x)?, part(graph, found.value("second"), x)?);
        let fits =
            first == (Dim::from(0), 1) && second == (half.clone(), 1) && joined_last(graph, found.value("joined"));
        // Two halves of the same size.
        let even = graph.meta(found.value("first")).shape == graph.meta(found.value("second")).shape;
        (fits && even).then(|| replacement(false, found)).flatten()
    })?;
    // (-x2, x1) with an axis of size 1 each, joined along it, and that axis joined with the one before.
    let column = |input| node(is_reshape, [input]);
    let stack = node(is_concat, [column(neg(slice("second"))), column(slice("first"))]).named("joined");
    let pairs = around(node(is_reshape, [stack]).named("flat"));
    count += rewrite(graph, &pairs, |graph, found| {
        let x = found.value("x");
        let (first, second) = (part(graph, found.value("first"), x)?, part(graph, found.value("second"), x)?);
        let mut stacked = graph.meta(found.value("first")).shape.clone();
        stacked.push(2.into());
        let fits = first == (Dim::from(0), 2)
            && second == (Dim::from(1), 2)
            && joined_last(graph, found.value("joined"))
            && graph.meta(found.value("joined")).shape == stacked
            && graph.meta(found.value("flat")).shape == graph.meta(x).shape;
        fits.then(|| replacement(true, found)).flatten()
    })?;
    Ok(count)
}

/// Half of a table whose two halves are the same: what is before both were put behind each other, with the same
/// operations.
fn half(graph: &mut Graph, table: ValueId, depth: usize) -> Option<ValueId> {
    let meta = graph.meta(table).clone();
    // A table without columns, or with one that has no other, has no halves.
    let columns = meta.shape.last()?.known().filter(|&columns| columns > 0 && columns % 2 == 0)? / 2;
    let name = format!("{}_half", graph.value(table).name);
    if let Some(constant) = graph.constant(table) {
        let (shape, numbers) = (constant.view().shape().to_vec(), constant.view().to_f64());
        let rows = || numbers.chunks(2 * columns as usize).map(|row| row.split_at(columns as usize));
        if rows().any(|(first, second)| first != second) {
            return None;
        }
        let first: Vec<f64> = rows().flat_map(|(first, _)| first).copied().collect();
        let shape = [&shape[..shape.len() - 1], &[columns]].concat();
        let tensor = lz_abi::Tensor::from_f64(meta.dtype, &shape, &first);
        return Some(graph.add_constant(Constant::owned(&name, tensor)));
    }
    let (_, made) = graph.made_by(table)?;
    let (op, inputs) = (made.op.clone(), made.inputs.to_vec());
    let (first, depth) = (inputs.first().copied().flatten()?, depth.checked_sub(1)?);
    let op = match op {
        Op::Concat(concat) => {
            let last = meta.axis(concat.axis).ok()? + 1 == meta.rank();
            return (last && inputs.len() == 2 && inputs[0] == inputs[1]).then_some(first);
        }
        Op::Binary(_) => {
            // Times a number.
            let second = inputs.get(1).copied().flatten()?;
            super::pattern::number_of(graph, second)?;
            let (first, second) = (half(graph, first, depth)?, Some(second));
            return graph.push(op, &[Some(first), second], &name, "").ok();
        }
        Op::Unary(_) | Op::Cast(_) => op,
        Op::Reshape(_) | Op::Expand(_) => {
            if graph.meta(first).shape.last() != meta.shape.last() {
                return None;
            }
            let mut shape = meta.shape.to_vec();
            *shape.last_mut()? = columns.into();
            if matches!(op, Op::Reshape(_)) { Reshape { shape }.into() } else { Expand { shape }.into() }
        }
        _ => return None,
    };
    let first = half(graph, first, depth)?;
    graph.push(op, &[Some(first)], &name, "").ok()
}

/// How many operations there may be between the frequencies and a table.
const TABLE: usize = 16;

/// Tables with a column for each element, whose halves are the same, become tables with a column for each pair.
pub fn tables(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        let Some(made) = graph.get(id) else { continue };
        let (Op::Rope(Rope { interleaved: false }), [Some(x), Some(cos), Some(sin)]) = (&made.op, &made.inputs[..])
        else {
            continue;
        };
        let (x, cos, sin) = (*x, *cos, *sin);
        if graph.meta(cos).shape.last() != graph.meta(x).shape.last() {
            continue;
        }
        count += usize::from(super::pattern::change(graph, id, |graph| {
            let tables = (half(graph, cos, TABLE)?, half(graph, sin, TABLE)?);
            Some((Rope { interleaved: false }.into(), vec![Some(x), Some(tables.0), Some(tables.1)]))
        }));
    }
    Ok(count)
}
