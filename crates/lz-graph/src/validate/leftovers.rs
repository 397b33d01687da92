//! Nodes that need not run.

use super::{Findings, Phase, Problem, Severity};
use crate::ir::Graph;

/// Nodes that could have been computed while the graph was made: all they read is constant, and their sizes are
/// numbers.
pub fn not_folded(graph: &Graph, _: Phase, findings: &mut Findings) {
    for (_, node) in graph.nodes() {
        let constant = node.inputs.iter().flatten().all(|&value| graph.constant(value).is_some());
        if constant && node.op.folds() && graph.meta(node.output).sizes().is_some() && attributes_known(node) {
            let value = graph.value(node.output).name.to_string();
            findings.add(Severity::Warning, Problem::NotFolded { op: node.op.name(), value });
        }
    }
}

/// Whether no attribute has a symbol: then it is the same for no symbols at all.
fn attributes_known(node: &crate::ir::Node) -> bool {
    node.op.at(&crate::ir::Symbols::new()).is_ok()
}

/// Nodes whose results no result of the graph needs. The exporter may leave some; passes remove them.
pub fn dead(graph: &Graph, phase: Phase, findings: &mut Findings) {
    let mut needed = vec![false; graph.value_count()];
    let mut open: Vec<_> = graph.outputs.iter().copied().chain(graph.updates.iter().map(|(_, new)| *new)).collect();
    while let Some(value) = open.pop() {
        if !std::mem::replace(&mut needed[value.index()], true)
            && let Some((_, node)) = graph.made_by(value)
        {
            open.extend(node.inputs.iter().flatten());
        }
    }
    let severity = if phase == Phase::AfterExport { Severity::Info } else { Severity::Warning };
    for (_, node) in graph.nodes().filter(|(_, node)| !needed[node.output.index()]) {
        let value = graph.value(node.output).name.to_string();
        findings.add(severity, Problem::Dead { op: node.op.name(), value });
    }
}
