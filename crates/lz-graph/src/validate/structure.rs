//! Whether a graph holds together.

use super::{Findings, Phase, Problem, Severity};
use crate::ir::{Graph, ValueId};

/// Shape rules, sources of all values, updates, symbols.
pub fn check(graph: &Graph, _: Phase, findings: &mut Findings) {
    if let Err(why) = graph.verify() {
        findings.error(Problem::Graph(why.to_string()));
    }
    for (at, &(old, _)) in graph.updates.iter().enumerate() {
        let input = || graph.value(old).name.to_string();
        if !graph.inputs.contains(&old) {
            findings.error(Problem::Update { input: input(), why: "is no input" });
        }
        if graph.updates[..at].iter().any(|&(other, _)| other == old) {
            findings.error(Problem::Update { input: input(), why: "is updated before" });
        }
    }
    if graph.outputs.is_empty() && graph.updates.is_empty() {
        findings.add(Severity::Warning, Problem::NoResults);
    }
    let declared = |symbol: &String| graph.symbols.iter().any(|known| known.name == *symbol);
    let made = graph.nodes().map(|(_, node)| node.output);
    for value in graph.inputs.iter().copied().chain(made).collect::<Vec<ValueId>>() {
        for size in &graph.meta(value).shape {
            for symbol in size.symbols().into_iter().filter(|symbol| !declared(symbol)) {
                findings.error(Problem::Symbol { value: graph.value(value).name.to_string(), symbol });
            }
        }
    }
}
