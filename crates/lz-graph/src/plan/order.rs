//! Orders in which the nodes of a graph can run.
//!
//! Three of them choose, among the nodes that could run next, the one that frees the most memory. They differ in when
//! they look: a node's figure changes while it waits, since others that read the same values run.
//!
//! In every order, readers of a value that a later node writes over (an input that the graph updates) run before that
//! node, where the graph allows it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::lifetimes::{alias, update_chains};
use super::{Demands, Instance};
use crate::ir::{NodeId, ValueId};

/// Which node runs next, of those that could.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ordering {
    /// The one made first.
    Made,
    /// The one that frees the most bytes, as counted when it became ready.
    Freed,
    /// The one with the greatest gain, counted again when it is about to run. Gain: bytes freed, less bytes of its
    /// result, and an eighth of them back if the result will be written over.
    Rescored,
    /// The one with the greatest gain, counted again whenever a value gets down to its last reader. Gain: bytes freed,
    /// less bytes of its result unless that is written over an input.
    Events,
}

impl Ordering {
    /// All of them.
    pub const ALL: &'static [Ordering] = &[Ordering::Made, Ordering::Freed, Ordering::Rescored, Ordering::Events];
}

/// What an order has to know of a graph, with nodes by their position in [`Instance::order`].
pub struct Dependencies<'a> {
    instance: &'a Instance<'a>,
    /// By node: how many nodes must run before.
    waits: Vec<usize>,
    /// By node: the nodes that wait for it.
    waiting: Vec<Vec<usize>>,
    /// By node: the memory it reads, each once.
    reads: Vec<Vec<usize>>,
    /// By memory: how many nodes read it.
    readers: Vec<usize>,
    /// By memory: the nodes that read it.
    read_by: Vec<Vec<usize>>,
    /// By memory: bytes in the arena.
    bytes: Vec<usize>,
    /// By node: bytes in the arena of its result; none for a view.
    makes: Vec<usize>,
    /// By node: memory over which its result may be written.
    over: Vec<Vec<usize>>,
    /// By node: whether the only reader of its result may write over it.
    written_over: Vec<bool>,
}

impl<'a> Dependencies<'a> {
    /// What there is to know of an instance.
    pub fn of(instance: &'a Instance<'a>, demands: &dyn Demands) -> Dependencies<'a> {
        let (graph, n) = (instance.graph(), instance.order().len());
        let mut position = vec![usize::MAX; instance.node_count()];
        for (at, id) in instance.order().iter().enumerate() {
            position[id.index()] = at;
        }
        // The memory of a value: its own, or what it is a view of. Inputs, constants and results are not in the arena.
        let mut memory: Vec<usize> = (0..graph.value_count()).collect();
        let mut bytes = vec![0; graph.value_count()];
        let mut found = Dependencies {
            instance,
            waits: vec![0; n],
            waiting: vec![Vec::new(); n],
            reads: vec![Vec::new(); n],
            readers: vec![0; graph.value_count()],
            read_by: vec![Vec::new(); graph.value_count()],
            bytes: Vec::new(),
            makes: vec![0; n],
            over: vec![Vec::new(); n],
            written_over: vec![false; n],
        };
        for (at, &id) in instance.order().iter().enumerate() {
            let node = instance.node(id);
            let out = node.output.index();
            match alias(instance, id).and_then(|(input, _)| node.inputs[input]) {
                Some(viewed) => memory[out] = memory[viewed.index()],
                None => {
                    bytes[out] = instance.bytes(node.output);
                    found.makes[at] = bytes[out];
                }
            }
            let mut before: Vec<usize> = Vec::new();
            for &value in node.inputs.iter().flatten() {
                let root = memory[value.index()];
                if !found.reads[at].contains(&root) {
                    found.reads[at].push(root);
                    found.readers[root] += 1;
                    found.read_by[root].push(at);
                }
                if let Some(producer) = graph.producer(value).map(|id| position[id.index()])
                    && !before.contains(&producer)
                {
                    before.push(producer);
                }
            }
            found.waits[at] = before.len();
            before.into_iter().for_each(|producer| found.waiting[producer].push(at));
            let inputs = demands.in_place(id).iter().filter_map(|&at| node.inputs.get(at).copied().flatten());
            found.over[at] = inputs.map(|value| memory[value.index()]).collect();
        }
        for &value in &graph.outputs {
            bytes[memory[value.index()]] = 0;
            if let Some(id) = graph.producer(value) {
                found.makes[position[id.index()]] = 0;
            }
        }
        found.bytes = bytes;
        for (at, &id) in instance.order().iter().enumerate() {
            if let [reader] = *found.read_by[instance.node(id).output.index()] {
                found.written_over[at] = found.over[reader].contains(&instance.node(id).output.index());
            }
        }
        if !graph.updates.is_empty() {
            found.read_before_written(&update_chains(instance, demands), &position, &memory);
        }
        found
    }

    /// Makes nodes that write over a value on the way of an update wait for all others that read it.
    fn read_before_written(&mut self, chains: &[Option<usize>], position: &[usize], memory: &[usize]) {
        for &id in self.instance.order() {
            let Some(input) = chains[id.index()] else { continue };
            let node = self.instance.node(id);
            if alias(self.instance, id).is_some() {
                continue;
            }
            let (writer, written) = (position[id.index()], node.inputs[input].map(ValueId::index).map(|v| memory[v]));
            let others = self.read_by[written.expect("an input on the way")].clone();
            for reader in others.into_iter().filter(|&reader| reader != writer) {
                if !self.leads(writer, reader) && !self.waiting[reader].contains(&writer) {
                    self.waiting[reader].push(writer);
                    self.waits[writer] += 1;
                }
            }
        }
    }

    /// Whether one node must run before another.
    fn leads(&self, from: usize, to: usize) -> bool {
        let (mut seen, mut stack) = (vec![false; self.waits.len()], vec![from]);
        while let Some(at) = stack.pop() {
            if at == to {
                return true;
            }
            if !std::mem::replace(&mut seen[at], true) {
                stack.extend(&self.waiting[at]);
            }
        }
        false
    }

    /// Bytes that are free after a node, if it runs now.
    fn freed(&self, node: usize, readers: &[usize]) -> i64 {
        self.reads[node].iter().filter(|&&memory| readers[memory] == 1).map(|&memory| self.bytes[memory] as i64).sum()
    }

    fn score(&self, ordering: Ordering, node: usize, readers: &[usize]) -> i64 {
        let (freed, makes) = (self.freed(node, readers), self.makes[node] as i64);
        match ordering {
            Ordering::Made => 0,
            Ordering::Freed => freed,
            Ordering::Rescored => freed - makes + if self.written_over[node] { makes / 8 } else { 0 },
            Ordering::Events => {
                let over = self.over[node].iter().any(|&memory| readers[memory] == 1 && self.bytes[memory] > 0);
                freed - if over { 0 } else { makes }
            }
        }
    }

    /// The nodes in an order.
    pub fn order(&self, ordering: Ordering) -> Vec<NodeId> {
        let (mut waits, mut readers) = (self.waits.clone(), self.readers.clone());
        // The greatest score first, then the node made first. Entries with a score that is no more the node's are
        // skipped.
        let mut scores = vec![0i64; waits.len()];
        let mut done = vec![false; waits.len()];
        let mut ready: BinaryHeap<(i64, Reverse<usize>)> = BinaryHeap::new();
        for node in (0..waits.len()).filter(|&node| waits[node] == 0) {
            scores[node] = self.score(ordering, node, &readers);
            ready.push((scores[node], Reverse(node)));
        }
        let mut order = Vec::with_capacity(waits.len());
        while let Some((score, Reverse(node))) = ready.pop() {
            if done[node] || score != scores[node] {
                continue;
            }
            if ordering == Ordering::Rescored {
                let now = self.score(ordering, node, &readers);
                if now != score {
                    scores[node] = now;
                    ready.push((now, Reverse(node)));
                    continue;
                }
            }
            done[node] = true;
            order.push(self.instance.order()[node]);
            let mut last = Vec::new();
            for &memory in &self.reads[node] {
                readers[memory] -= 1;
                if readers[memory] == 1 {
                    last.push(memory);
                }
            }
            for &next in &self.waiting[node] {
                waits[next] -= 1;
                if waits[next] == 0 {
                    scores[next] = self.score(ordering, next, &readers);
                    ready.push((scores[next], Reverse(next)));
                }
            }
            if ordering == Ordering::Events {
                for memory in last {
                    let Some(&reader) = self.read_by[memory].iter().find(|&&reader| !done[reader]) else { continue };
                    let now = self.score(ordering, reader, &readers);
                    if waits[reader] == 0 && now != scores[reader] {
                        scores[reader] = now;
                        ready.push((now, Reverse(reader)));
                    }
                }
            }
        }
        order
    }
}
