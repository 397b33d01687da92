//! Views that do not lie row-major: axes in another order, every second element, one element repeated.
//!
//! Such a result needs no memory and no kernel if everything that reads it takes strides, or is such a view itself.

use super::{Demands, Instance, Strides};
use crate::ir::{Inputs, NodeId, ValueId};
use crate::ops::Op;

/// Which values may be views with strides, because everything that reads them takes strides.
#[derive(Clone, Debug)]
pub struct Viewable(Vec<bool>);

impl Viewable {
    /// No value.
    pub fn none() -> Viewable {
        Viewable(Vec::new())
    }

    /// Whether all that reads a value takes strides.
    pub fn has(&self, value: ValueId) -> bool {
        self.0.get(value.index()).copied().unwrap_or(false)
    }

    /// The values of an instance that may be views with strides.
    pub fn of(instance: &Instance<'_>, order: &[NodeId], demands: &dyn Demands) -> Viewable {
        let graph = instance.graph();
        let mut found = Viewable(vec![true; graph.value_count()]);
        // Results and new contents are copied row-major.
        for &value in graph.outputs.iter().chain(graph.updates.iter().map(|(_, new)| new)) {
            found.0[value.index()] = false;
        }
        // Readers before what they read: a view of a view needs that its own readers take strides.
        for &id in order.iter().rev() {
            let node = instance.node(id);
            let mut passes = None;
            for (at, value) in node.inputs.iter().enumerate().filter_map(|(at, value)| Some((at, (*value)?))) {
                if found.0[value.index()] && !demands.strided(id, at) {
                    let passes = *passes.get_or_insert_with(|| found.has(node.output) && rule(instance, id).is_some());
                    found.0[value.index()] = passes;
                }
            }
        }
        found
    }
}

fn rule(instance: &Instance<'_>, id: NodeId) -> Option<crate::ops::View> {
    let inputs = instance.inputs(id);
    instance.op(id).view(Inputs(&inputs), instance.meta(instance.node(id).output))
}

/// Strides of sizes that lie row-major.
pub fn row_major(sizes: &[i64]) -> Strides {
    let mut strides: Strides = sizes.iter().map(|_| 1).collect();
    for axis in (1..sizes.len()).rev() {
        strides[axis - 1] = strides[axis] * sizes[axis].max(1);
    }
    strides
}

/// Where a result lies that is a view: of which input, bytes from the start of its memory, and strides. `of` gives the
/// bytes and strides of an input.
pub fn strided(
    instance: &Instance<'_>,
    id: NodeId,
    of: impl Fn(ValueId) -> (usize, Option<Strides>),
) -> Option<(usize, usize, Strides)> {
    let node = instance.node(id);
    if let Op::Reshape(_) = instance.op(id) {
        let value = node.inputs.first().copied().flatten()?;
        let (bytes, strides) = of(value);
        let own = cut(&instance.sizes(value)?, &strides?, &instance.sizes(node.output)?)?;
        return Some((0, bytes, own));
    }
    let view = rule(instance, id)?;
    let value = node.inputs.get(view.input).copied().flatten()?;
    let (from, to) = (instance.meta(value), instance.meta(node.output));
    let (bytes, strides) = of(value);
    // Strides count elements, so elements must be whole bytes.
    let width = i64::from(to.dtype.bits());
    if from.dtype != to.dtype || width % 8 != 0 || view.axes.len() != to.rank() || view.start.len() != from.rank() {
        return None;
    }
    let strides = strides.unwrap_or_else(|| row_major(&instance.sizes(value).expect("sizes are known")));
    let start: i64 = view.start.iter().zip(&strides).map(|(start, stride)| start * stride).sum();
    let own = view.axes.iter().map(|&(axis, step)| axis.map_or(Some(0), |axis| Some(strides.get(axis)? * step)));
    let offset_bytes = usize::try_from(i64::try_from(bytes).ok()? + start * width / 8).ok()?;
    Some((view.input, offset_bytes, own.collect::<Option<_>>()?))
}

/// The strides of other sizes for the same elements in the same order, if there are any: axes of the result together make up
/// axes of the input that follow each other evenly.
fn cut(from: &[i64], strides: &[i64], to: &[i64]) -> Option<Strides> {
    if from.contains(&0) || to.contains(&0) {
        return None;
    }
    // Axes of one element say nothing.
    let mut axes = from.iter().zip(strides).filter(|(n, _)| **n != 1).map(|(&n, &stride)| (n, stride)).rev().peekable();
    let mut own: Strides = to.iter().map(|_| 1).collect();
    // What is left of the piece of input axes that is being cut up, and the stride of its innermost elements.
    let (mut left, mut step) = (1, 1);
    for axis in (0..to.len()).rev().filter(|&axis| to[axis] != 1) {
        if left == 1 {
            (left, step) = axes.next()?;
        }
        // Outer axes that continue the piece.
        while let Some((n, _)) = axes.next_if(|&(_, stride)| left % to[axis] != 0 && stride == step * left) {
            left *= n;
        }
        if left % to[axis] != 0 {
            return None;
        }
        own[axis] = step;
        step *= to[axis];
        left /= to[axis];
    }
    (left == 1 && axes.next().is_none()).then_some(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Where every element is, in row-major order.
    fn places(sizes: &[i64], strides: &[i64]) -> Vec<i64> {
        lz_abi::indices(sizes).map(|index| index.iter().zip(strides).map(|(i, s)| i * s).sum()).collect()
    }

    #[test]
    fn slices_of_rows_are_cut_into_heads() {
        assert_eq!(cut(&[1, 5, 768], &[11520, 2304, 1], &[1, 5, 12, 64]).as_deref(), Some(&[1, 2304, 64, 1][..]));
        assert_eq!(cut(&[5, 12, 64], &[64, 320, 1], &[5, 768]), None);
        assert_eq!(cut(&[2, 3, 4], &[24, 8, 1], &[6, 4]).as_deref(), Some(&[8, 1][..]));
    }

    proptest! {
        /// What is cut is where it was; what lies in one piece can always be cut.
        #[test]
        fn cut_elements_stay_where_they_are(
            sizes in proptest::collection::vec(1i64..5, 0..4), steps in proptest::collection::vec(0i64..3, 4), pick in 0usize..6,
        ) {
            let mut strides = row_major(&sizes);
            strides.iter_mut().zip(&steps).for_each(|(stride, step)| *stride *= step);
            let count: i64 = sizes.iter().product();
            let ways: Vec<Vec<i64>> = (1..=count).filter(|n| count % n == 0).map(|n| vec![n, count / n]).collect();
            let to = &ways[pick % ways.len()];
            if let Some(own) = cut(&sizes, &strides, to) {
                prop_assert_eq!(places(&sizes, &strides), places(to, &own));
            }
            let whole = row_major(&sizes);
            prop_assert!(cut(&sizes, &whole, to).is_some());
        }
    }
}
