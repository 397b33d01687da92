//! Whether nodes write over what they read only where they can, and views are views.

use super::placement::extent;
use super::{Findings, Planned, Problem, told};
use crate::ir::{Inputs, NodeId, ValueId};
use crate::ops::Op;
use crate::plan::{Place, Strides, row_major};

/// Every view lies where its operation says; every result that meets an input of its node lies exactly where that input
/// does, and operation and kernel can do that.
pub fn check(planned: Planned<'_>, findings: &mut Findings) {
    for &id in &planned.plan.order {
        if planned.plan.is_view(id) {
            if !is_view(planned, id).unwrap_or(false) {
                let node = planned.instance.node(id);
                let place = planned.plan.place(node.output).expect("checked before");
                let value = planned.instance.graph().value(node.output).name.to_string();
                findings.error(Problem::NoView { op: node.op.name(), value, place: told(planned, place) });
            }
        } else {
            written_over(planned, id, findings);
        }
    }
}

/// Whether the place of a result is the view its operation says: row-major, or with strides.
fn is_view(planned: Planned<'_>, id: NodeId) -> Option<bool> {
    let (instance, plan) = (planned.instance, planned.plan);
    let (node, op, inputs) = (instance.node(id), instance.op(id), instance.inputs(id));
    let (output, place) = (instance.meta(node.output), plan.place(node.output)?);
    let width = i64::from(output.dtype.bits());
    if let Some(alias) = op.alias(Inputs(&inputs), output) {
        let input = plan.place((*node.inputs.get(alias.input)?)?)?;
        let first = i64::try_from(input.offset_bytes).ok()? * 8 + alias.offset * width;
        let expected = Place::at(input.root, usize::try_from(first / 8).ok()?);
        if input.strides.is_none() && *place == expected {
            return Some(true);
        }
    }
    if let Op::Reshape(_) = op {
        return reshaped(planned, id);
    }
    let view = op.view(Inputs(&inputs), output)?;
    let value = (*node.inputs.get(view.input)?)?;
    let input = plan.place(value)?;
    let steps = input.strides.clone().unwrap_or_else(|| row_major(&instance.sizes(value).expect("sizes are known")));
    let mut first = i64::try_from(input.offset_bytes).ok()?;
    for (start, step) in view.start.iter().zip(&steps) {
        first += start * step * width / 8;
    }
    let strides: Strides = view.axes.iter().map(|&(axis, by)| axis.map_or(0, |axis| steps[axis] * by)).collect();
    let said =
        place.strides.clone().unwrap_or_else(|| row_major(&instance.sizes(node.output).expect("sizes are known")));
    Some(place.root == input.root && place.offset_bytes == usize::try_from(first).ok()? && said == strides)
}

/// Whether the elements of a reshaped tensor are, in order, those of its input: some thousands of them are looked at.
fn reshaped(planned: Planned<'_>, id: NodeId) -> Option<bool> {
    let (instance, plan) = (planned.instance, planned.plan);
    let node = instance.node(id);
    let value = (*node.inputs.first()?)?;
    let place_of = |value: ValueId| {
        let (sizes, place) = (instance.sizes(value)?, plan.place(value)?);
        let strides = place.strides.clone().unwrap_or_else(|| row_major(&sizes));
        Some((place, move |mut flat: i64| {
            let mut at = 0;
            for (&n, &stride) in sizes.iter().zip(&strides).rev() {
                at += flat % n * stride;
                flat /= n;
            }
            at
        }))
    };
    let ((from, old), (to, new)) = (place_of(value)?, place_of(node.output)?);
    let count = instance.meta(value).len().known()?;
    let step = count / 4096 + 1;
    let same = (0..count)
        .step_by(step as usize)
        .chain(count.checked_sub(1).filter(|&last| last >= 0))
        .all(|i| old(i) == new(i));
    Some(from.root == to.root && from.offset_bytes == to.offset_bytes && same)
}

fn written_over(planned: Planned<'_>, id: NodeId, findings: &mut Findings) {
    let (instance, plan) = (planned.instance, planned.plan);
    let (node, op, metas) = (instance.node(id), instance.op(id), instance.inputs(id));
    let place = plan.place(node.output).expect("checked before");
    let Some((first, end)) = extent(planned, node.output, place) else { return };
    let can = op.in_place(Inputs(&metas));
    for (input, value) in node.inputs.iter().enumerate().filter_map(|(input, value)| Some((input, (*value)?))) {
        let read = plan.place(value).expect("checked before");
        let meets =
            read.root == place.root && extent(planned, value, read).is_some_and(|(from, to)| from < end && first < to);
        if !meets {
            continue;
        }
        let same = instance.meta(value).dtype.bits() == instance.meta(node.output).dtype.bits();
        let why = if read != place || !same || instance.bytes(value) != instance.bytes(node.output) {
            "which lies elsewhere in the same memory"
        } else if !can.contains(&input) {
            "which the operation cannot"
        } else if !planned.demands.in_place(id).contains(&input) {
            "which its kernel cannot"
        } else if !plan.written_over(id, &node.inputs).contains(&input) {
            "which the plan does not say"
        } else {
            continue;
        };
        let name = instance.graph().value(node.output).name.to_string();
        findings.error(Problem::InPlace { op: op.name(), value: name, input, why });
    }
}
