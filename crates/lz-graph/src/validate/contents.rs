//! Whether every read finds what was written for it.
//!
//! The plan is run with names instead of numbers: each byte of each memory holds the name of the value that was last
//! written there. A read of a value must find its name in every byte. This knows nothing of lifetimes: two values that
//! overlap while both are needed are found because one of them is read after the other was written.

use std::collections::HashMap;

use super::placement::extent;
use super::{Findings, Planned, Problem, told};
use crate::ir::ValueId;
use crate::plan::{Place, Root};

/// What some bytes hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// A value. For values that are views, what they are a view of.
    Value(ValueId),
    /// What the kernel that makes a value left in its scratch.
    Scratch(ValueId),
}

/// Ranges of bytes by their first byte, with the byte after the last and what they hold. They do not overlap.
#[derive(Default)]
struct Memory(Vec<(usize, usize, Content)>);

impl Memory {
    fn write(&mut self, first: usize, end: usize, content: Content) {
        if first >= end {
            return;
        }
        let mut kept = Vec::with_capacity(self.0.len() + 2);
        for &(from, to, old) in &self.0 {
            for (from, to) in [(from, to.min(first)), (from.max(end), to)] {
                if from < to {
                    kept.push((from, to, old));
                }
            }
        }
        kept.push((first, end, content));
        kept.sort_unstable_by_key(|&(from, ..)| from);
        self.0 = kept;
    }

    /// `Ok` if every byte holds one of these; else what another one holds, or nothing.
    fn holds(&self, first: usize, end: usize, wanted: &[Content]) -> Result<(), Option<Content>> {
        let mut at = first;
        for &(from, to, content) in self.0.iter().filter(|(from, to, _)| *from < end && first < *to) {
            if from > at {
                return Err(None);
            }
            if !wanted.contains(&content) {
                return Err(Some(content));
            }
            at = to;
        }
        if at < end { Err(None) } else { Ok(()) }
    }
}

struct Run<'a> {
    planned: Planned<'a>,
    memories: HashMap<Root, Memory>,
    /// By [`ValueId::index`]: the value that was written where this one is read. Itself, unless it is a view.
    written_as: Vec<ValueId>,
}

impl Run<'_> {
    fn name(&self, value: ValueId) -> String {
        self.planned.instance.graph().value(value).name.to_string()
    }

    fn told(&self, found: Option<Content>) -> String {
        match found {
            Some(Content::Value(value)) => format!("'{}'", self.name(value)),
            Some(Content::Scratch(value)) => format!("scratch of '{}'", self.name(value)),
            None => "nothing".to_owned(),
        }
    }

    fn write(&mut self, root: Root, (first, end): (usize, usize), content: Content) {
        self.memories.entry(root).or_default().write(first, end, content);
    }

    /// Whether a value can be read at a place.
    fn holds(&self, value: ValueId, place: &Place) -> Result<(), Option<Content>> {
        let Some((first, end)) = extent(self.planned, value, place) else { return Err(None) };
        if first == end {
            return Ok(());
        }
        // A copy is written under the name of the value itself.
        let mut wanted = vec![Content::Value(value)];
        if self.planned.plan.place(value) == Some(place) {
            wanted.push(Content::Value(self.written_as[value.index()]));
        }
        self.memories.get(&place.root).ok_or(None)?.holds(first, end, &wanted)
    }

    fn read(&self, reader: &str, value: ValueId, place: &Place, findings: &mut Findings) {
        if let Err(found) = self.holds(value, place) {
            findings.error(Problem::Contents {
                reader: reader.to_owned(),
                value: self.name(value),
                place: told(self.planned, place),
                found: self.told(found),
            });
        }
    }

    fn nodes(&mut self, findings: &mut Findings) {
        let (instance, plan) = (self.planned.instance, self.planned.plan);
        for &id in &plan.order {
            let node = instance.node(id);
            let place = plan.place(node.output).expect("checked before");
            if plan.is_view(id) {
                // What it is a view of: the input in whose memory it lies. The check of views says that it is one.
                let viewed = node
                    .inputs
                    .iter()
                    .flatten()
                    .find(|value| plan.place(**value).is_some_and(|input| input.root == place.root));
                if let Some(viewed) = viewed {
                    self.written_as[node.output.index()] = self.written_as[viewed.index()];
                }
                continue;
            }
            let reader = format!("{} ('{}')", node.op.name(), self.name(node.output));
            let scratch =
                plan.scratch[id.index()].map(|scratch| (scratch.offset_bytes, scratch.offset_bytes + scratch.bytes));
            // The kernel writes its scratch while it reads.
            if let Some(range) = scratch {
                self.write(Root::Arena, range, Content::Scratch(node.output));
            }
            for &value in node.inputs.iter().flatten() {
                self.read(&reader, value, plan.place(value).expect("checked before"), findings);
            }
            let Some((first, end)) = extent(self.planned, node.output, place) else { continue };
            if let Some((from, to)) = scratch
                && place.root == Root::Arena
                && from < end
                && first < to
            {
                let (op, value) = (node.op.name(), self.name(node.output));
                findings.error(Problem::Clash { op, value, place: told(self.planned, place) });
            }
            self.write(place.root, (first, end), Content::Value(node.output));
        }
    }

    fn transfers(&mut self, findings: &mut Findings) {
        for transfer in &self.planned.plan.transfers {
            self.read("the copy after the last node", transfer.value, &transfer.from, findings);
            if let Some(range) = extent(self.planned, transfer.value, &transfer.to) {
                self.write(transfer.to.root, range, Content::Value(transfer.value));
            }
        }
    }

    fn end(&self, findings: &mut Findings) {
        let graph = self.planned.instance.graph();
        for (i, &value) in graph.outputs.iter().enumerate() {
            if let Err(found) = self.holds(value, &Place::at(Root::Output(i), 0)) {
                findings.error(Problem::Result { value: self.name(value), found: self.told(found) });
            }
        }
        for (i, &input) in graph.inputs.iter().enumerate() {
            let update = graph.updates.iter().find(|(old, _)| *old == input);
            let value = update.map_or(input, |&(_, new)| new);
            if let Err(found) = self.holds(value, &Place::at(Root::Input(i), 0)) {
                let (input, value, found) = (self.name(input), self.name(value), self.told(found));
                findings.error(Problem::Updated { input, value, found });
            }
        }
    }
}

/// Every read of a node, a copy or the caller finds the value it wants.
pub fn check(planned: Planned<'_>, findings: &mut Findings) {
    let graph = planned.instance.graph();
    let mut run = Run { planned, memories: HashMap::new(), written_as: graph.value_ids().collect() };
    for (value, place) in super::placement::placed(planned) {
        if graph.producer(value).is_none() {
            run.write(place.root, (0, planned.instance.bytes(value)), Content::Value(value));
        }
    }
    run.nodes(findings);
    run.transfers(findings);
    run.end(findings);
}
