//! Whether the kernels can run the plan.

use super::{Findings, Kernels, Planned, Problem, told};

/// Every node that is no view has a kernel.
pub fn bound(planned: Planned<'_>, kernels: &dyn Kernels, findings: &mut Findings) {
    let graph = planned.instance.graph();
    for &id in planned.plan.order.iter().filter(|&&id| !planned.plan.is_view(id) && !kernels.has(id)) {
        let node = graph.node(id);
        let value = graph.value(node.output).name.to_string();
        findings.error(Problem::NoKernel { op: node.op.name(), value });
    }
}

/// Every kernel gets the scratch it needs.
pub fn scratch(planned: Planned<'_>, findings: &mut Findings) {
    let graph = planned.instance.graph();
    for &id in planned.plan.order.iter().filter(|&&id| !planned.plan.is_view(id)) {
        let needed = planned.demands.scratch(id);
        let planned = planned.plan.scratch[id.index()].map_or(0, |scratch| scratch.bytes);
        if needed > planned {
            let node = graph.node(id);
            let value = graph.value(node.output).name.to_string();
            findings.error(Problem::Scratch { op: node.op.name(), value, needed, planned });
        }
    }
}

/// Kernels read with strides only where they can, and write with the strides they say, or none.
pub fn strides(planned: Planned<'_>, findings: &mut Findings) {
    let (graph, plan) = (planned.instance.graph(), planned.plan);
    for &id in plan.order.iter().filter(|&&id| !plan.is_view(id)) {
        let node = graph.node(id);
        let name = || graph.value(node.output).name.to_string();
        for (input, value) in node.inputs.iter().enumerate().filter_map(|(input, value)| Some((input, (*value)?))) {
            let place = plan.place(value).expect("checked before");
            if place.strides.is_some() && !planned.demands.strided(id, input) {
                let place = told(planned, place);
                findings.error(Problem::Strides { op: node.op.name(), value: name(), input, place });
            }
        }
        let place = plan.place(node.output).expect("checked before");
        if place.strides.is_some() && place.strides != planned.demands.stored(id) {
            findings.error(Problem::NoView { op: node.op.name(), value: name(), place: told(planned, place) });
        }
    }
}
