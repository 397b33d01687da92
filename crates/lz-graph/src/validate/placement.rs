//! Whether places lie inside their memory, are aligned, and are writable.

use super::{Findings, Planned, Problem, told};
use crate::ir::ValueId;
use crate::plan::{ALIGNMENT, Place, Root};

/// The bytes a value covers: the first, and the one after the last. `None` if that is no range.
pub fn extent(planned: Planned<'_>, value: ValueId, place: &Place) -> Option<(usize, usize)> {
    let instance = planned.instance;
    if instance.bytes(value) == 0 {
        return Some((place.offset_bytes, place.offset_bytes));
    }
    let Some(strides) = &place.strides else {
        return Some((place.offset_bytes, place.offset_bytes.checked_add(instance.bytes(value))?));
    };
    let (sizes, width) = (instance.sizes(value)?, i64::from(instance.meta(value).dtype.bits()) / 8);
    if strides.len() != sizes.len() {
        return None;
    }
    let (mut low, mut high) = (i64::try_from(place.offset_bytes).ok()?, i64::try_from(place.offset_bytes).ok()?);
    for (&size, &stride) in sizes.iter().zip(strides) {
        let far = (size - 1).checked_mul(stride)?.checked_mul(width)?;
        low = low.checked_add(far.min(0))?;
        high = high.checked_add(far.max(0))?;
    }
    Some((usize::try_from(low).ok()?, usize::try_from(high.checked_add(width)?).ok()?))
}

/// Bytes of a memory; `None` if there is no such memory.
fn size(planned: Planned<'_>, root: Root) -> Option<usize> {
    let (instance, graph) = (planned.instance, planned.instance.graph());
    match root {
        Root::Arena => Some(planned.plan.arena),
        Root::Input(i) => graph.inputs.get(i).map(|&value| instance.bytes(value)),
        Root::Output(i) => graph.outputs.get(i).map(|&value| instance.bytes(value)),
        Root::Constant(value) => {
            (instance.has(value) && graph.constant(value).is_some()).then(|| instance.bytes(value))
        }
    }
}

/// The values that have a place.
pub fn placed(planned: Planned<'_>) -> impl Iterator<Item = (ValueId, &Place)> {
    let graph = planned.instance.graph();
    let made = planned.plan.order.iter().map(|&id| graph.node(id).output);
    let given = graph.inputs.iter().copied();
    let read = planned.plan.order.iter().flat_map(|&id| graph.node(id).inputs.iter().flatten().copied());
    let constants = read.chain(graph.outputs.iter().copied()).filter(|&value| graph.constant(value).is_some());
    given.chain(constants).chain(made).filter_map(|value| Some((value, planned.plan.place(value)?)))
}

/// No value, scratch or copy ends after its memory.
pub fn inside(planned: Planned<'_>, findings: &mut Findings) {
    let (instance, plan) = (planned.instance, planned.plan);
    let graph = instance.graph();
    let mut fits = |value: ValueId, place: &Place, range: Option<(usize, usize)>| {
        let (end, size) = (range.map_or(usize::MAX, |range| range.1), size(planned, place.root).unwrap_or(0));
        if end > size {
            let value = graph.value(value).name.to_string();
            findings.error(Problem::Outside { value, place: told(planned, place), end, size });
        }
    };
    for (value, place) in placed(planned) {
        fits(value, place, extent(planned, value, place));
    }
    for &id in &plan.order {
        if let Some(scratch) = plan.scratch[id.index()] {
            let end = scratch.offset_bytes.checked_add(scratch.bytes);
            let place = Place::at(Root::Arena, scratch.offset_bytes);
            fits(graph.node(id).output, &place, end.map(|end| (scratch.offset_bytes, end)));
        }
    }
    for transfer in &plan.transfers {
        for place in [&transfer.from, &transfer.to] {
            fits(transfer.value, place, extent(planned, transfer.value, place));
        }
    }
}

/// What a kernel writes starts at a multiple of [`ALIGNMENT`], unless it is written over a view; every value starts at
/// a multiple of the size of its elements.
pub fn alignment(planned: Planned<'_>, findings: &mut Findings) {
    let (instance, plan) = (planned.instance, planned.plan);
    let graph = instance.graph();
    let mut check = |value: ValueId, place: &Place, alignment: usize| {
        if !place.offset_bytes.is_multiple_of(alignment) {
            let value = graph.value(value).name.to_string();
            findings.error(Problem::Alignment { value, place: told(planned, place), alignment });
        }
    };
    for (value, place) in placed(planned) {
        check(value, place, (instance.meta(value).dtype.bits() as usize / 8).max(1));
    }
    for &id in &plan.order {
        let node = graph.node(id);
        let place = plan.place(node.output).expect("checked before");
        let over = node.inputs.iter().flatten().any(|&input| plan.place(input) == Some(place));
        if !plan.is_view(id) && !over {
            check(node.output, place, ALIGNMENT);
        }
        if let Some(scratch) = plan.scratch[id.index()] {
            check(node.output, &Place::at(Root::Arena, scratch.offset_bytes), ALIGNMENT);
        }
    }
    for transfer in &plan.transfers {
        check(transfer.value, &transfer.to, ALIGNMENT);
    }
}

/// Constants are never written, and inputs only if the graph updates them.
pub fn protected(planned: Planned<'_>, findings: &mut Findings) {
    let (graph, plan) = (planned.instance.graph(), planned.plan);
    let mut check = |value: ValueId, place: &Place| {
        let writable = match place.root {
            Root::Arena | Root::Output(_) => true,
            Root::Constant(_) => false,
            Root::Input(i) => graph.updates.iter().any(|&(old, _)| graph.inputs.get(i) == Some(&old)),
        };
        if !writable {
            let value = graph.value(value).name.to_string();
            findings.error(Problem::Protected { value, place: told(planned, place) });
        }
    };
    for &id in plan.order.iter().filter(|&&id| !plan.is_view(id)) {
        let output = graph.node(id).output;
        check(output, plan.place(output).expect("checked before"));
    }
    for transfer in &plan.transfers {
        check(transfer.value, &transfer.to);
    }
    // Inputs and constants lie where the caller has them.
    for (i, &input) in graph.inputs.iter().enumerate() {
        if plan.place(input) != Some(&Place::at(Root::Input(i), 0)) {
            findings.error(Problem::NoPlace(graph.value(input).name.to_string()));
        }
    }
    for (value, place) in placed(planned).filter(|(value, _)| graph.constant(*value).is_some()) {
        if *place != Place::at(Root::Constant(value), 0) {
            findings.error(Problem::NoPlace(graph.value(value).name.to_string()));
        }
    }
}
