//! Whether a plan is one of this graph.

use super::{Findings, Planned, Problem};

/// Every node runs once, after those it reads from; every value has a place.
pub fn check(planned: Planned<'_>, findings: &mut Findings) {
    let (instance, plan) = (planned.instance, planned.plan);
    let graph = instance.graph();
    if plan.places.len() != graph.value_count() {
        return findings.error(Problem::Foreign("it has places for another number of values"));
    }
    if plan.views.len() != instance.node_count() || plan.scratch.len() != instance.node_count() {
        return findings.error(Problem::Foreign("it is for another number of nodes"));
    }
    let name = |value| graph.value(value).name.to_string();
    let mut made = vec![false; graph.value_count()];
    for &id in &plan.order {
        let Some(node) = graph.get(id) else {
            return findings.error(Problem::Foreign("a node of its order does not exist"));
        };
        let early = node.inputs.iter().flatten().any(|&value| graph.producer(value).is_some() && !made[value.index()]);
        if early {
            findings.error(Problem::Order { value: name(node.output), why: "runs before what it reads is made" });
        }
        if std::mem::replace(&mut made[node.output.index()], true) {
            findings.error(Problem::Order { value: name(node.output), why: "runs twice" });
        }
    }
    for (_, node) in graph.nodes().filter(|(_, node)| !made[node.output.index()]) {
        findings.error(Problem::Order { value: name(node.output), why: "does not run" });
    }
    let used = graph.nodes().flat_map(|(_, node)| node.inputs.iter().flatten().copied().chain([node.output]));
    let given = graph.outputs.iter().chain(graph.updates.iter().flat_map(|(old, new)| [old, new])).copied();
    for value in used.chain(given).filter(|value| plan.place(*value).is_none()) {
        findings.error(Problem::NoPlace(name(value)));
    }
}
