//! What the kernels of a graph ask of its memory plan.

use std::cell::RefCell;
use std::collections::HashMap;

use lz_abi::{Extents, row_major};

use super::attention::SWAPPED;
use super::{Arg, At, Candidate, Site, Terms, candidates};
use crate::ir::{NodeId, Source, ValueId};
use crate::ops::Op;
use crate::plan::{Demands, Instance, Strides};

/// Bytes scratch memory is a multiple of: every part of it begins at one.
const PART: usize = 64;

/// What is known of a node before memory is planned.
struct Known {
    /// The kernel that would be preferred.
    first: String,
    scratch: usize,
    in_place: Vec<usize>,
}

/// What the kernels of an instance ask of its plan: found by binding each node to tensors that lie row-major.
pub struct Needs<'a> {
    instance: &'a Instance<'a>,
    terms: Terms<'a>,
    known: Vec<Option<Known>>,
    strided: RefCell<HashMap<(NodeId, usize), bool>>,
}

impl<'a> Needs<'a> {
    /// Of an instance.
    pub fn of(instance: &'a Instance<'a>, terms: Terms<'a>) -> Needs<'a> {
        let known = (0..instance.node_count()).map(|_| None).collect();
        let mut needs = Needs { instance, terms, known, strided: RefCell::default() };
        for &id in instance.order() {
            let candidates = needs.bind(id, None);
            let scratch = candidates.iter().map(Candidate::scratch).max().unwrap_or(0);
            let first = &candidates[0];
            let op = instance.op(id);
            let mut allowed = op.in_place(crate::ir::Inputs(&instance.inputs(id)));
            // In place only those that can do it could be measured, and no kernel of another library can.
            if terms.measured && candidates.iter().any(|one| one.foreign().is_some()) {
                allowed = &[];
            }
            needs.known[id.index()] = Some(Known {
                first: first.name.clone(),
                scratch: scratch.next_multiple_of(PART),
                in_place: allowed.iter().copied().filter(|at| first.in_place.contains(at)).collect(),
            });
        }
        needs
    }

    /// The inputs of a node, row-major where it matters.
    fn inputs(&self, id: NodeId) -> Vec<Option<Arg>> {
        let (op, inputs) = (self.instance.op(id), &self.instance.node(id).inputs);
        let arg = |at, value| match self.instance.graph().constant(value) {
            Some(constant) => Arg::constant_of(op, at, constant, self.terms.packs),
            None => self.made(value),
        };
        inputs.iter().enumerate().map(|(at, input)| input.map(|value| arg(at, value))).collect()
    }

    /// A value that is no constant, row-major.
    fn made(&self, value: ValueId) -> Arg {
        Arg::of(self.instance.meta(value), At::Unplanned)
    }

    /// The candidates of a node for row-major tensors; one input may have other strides.
    fn bind(&self, id: NodeId, other: Option<(usize, Extents)>) -> Vec<Candidate> {
        let node = self.instance.node(id);
        let mut inputs = self.inputs(id);
        if let Some((at, strides)) = other
            && let Some(arg) = &mut inputs[at]
        {
            arg.strides = strides;
        }
        let output = self.made(node.output);
        let (op, terms) = (self.instance.op(id), self.terms);
        candidates(&Site { op, inputs: &inputs, output: &output, over: &[], terms })
    }

    /// Whether tokens come before heads in everything that reads the result of attention: it is then stored so.
    fn has_tokens_first(&self, id: NodeId) -> bool {
        let (graph, node) = (self.instance.graph(), self.instance.node(id));
        let (Op::Attention(_) | Op::CachedAttention(_)) = self.instance.op(id) else { return false };
        let given = graph.outputs.contains(&node.output) || graph.updates.iter().any(|(_, new)| *new == node.output);
        let readers = graph.consumers(node.output);
        let turns = |reader: &NodeId| matches!(self.instance.op(*reader), Op::Permute(op) if op.axes == SWAPPED);
        if given || readers.is_empty() || !readers.iter().all(turns) {
            return false;
        }
        let mut output = self.made(node.output);
        output.strides = tokens_first(&output.shape);
        let inputs = self.inputs(id);
        let (op, terms) = (self.instance.op(id), self.terms);
        let found = candidates(&Site { op, inputs: &inputs, output: &output, over: &[], terms });
        !found[0].is_reference()
    }

    /// Whether the elements of the last axis follow each other if every operation that can be a view is one.
    fn has_rows(&self, value: ValueId) -> bool {
        let graph = self.instance.graph();
        let Source::Node(id) = graph.value(value).source else { return true };
        let node = graph.node(id);
        let of_input = || node.inputs.first().copied().flatten().is_none_or(|input| self.has_rows(input));
        match self.instance.op(id) {
            Op::Permute(op) => op.axes.last().is_none_or(|&last| last + 1 == op.axes.len()) && of_input(),
            Op::Slice(op) => {
                let last = self.instance.meta(node.output).rank() as i64 - 1;
                (op.step == 1 || op.axis != -1 && op.axis != last) && of_input()
            }
            Op::Expand(_) => {
                let last = |value: ValueId| self.instance.sizes(value).and_then(|sizes| sizes.last().copied());
                node.inputs[0].is_some_and(|input| last(input) == last(node.output)) && of_input()
            }
            Op::Reshape(_) => of_input(),
            _ => true,
        }
    }
}

/// Strides of (batch, heads, tokens, width) with tokens before heads in memory.
fn tokens_first(shape: &[i64]) -> Extents {
    let &[batch, heads, tokens, width] = shape else { unreachable!("attention has four axes") };
    let mut strides = row_major(&[batch, tokens, heads, width]);
    strides.swap(1, 2);
    strides
}

/// Strides of a tensor whose rows are apart, or whose columns are rows.
fn spread(shape: &[i64], rows: bool) -> Extents {
    let mut wide: Extents = shape.into();
    let Some(last) = wide.len().checked_sub(1) else { return Extents::new() };
    if rows {
        wide[last] += 16;
        return row_major(&wide);
    }
    let mut strides = row_major(&wide);
    match last {
        0 => strides[0] = 2,
        _ => {
            wide.swap(last, last - 1);
            strides = row_major(&wide);
            strides.swap(last, last - 1);
        }
    }
    strides
}

impl Demands for Needs<'_> {
    fn scratch(&self, node: NodeId) -> usize {
        self.known[node.index()].as_ref().map_or(0, |known| known.scratch)
    }

    fn in_place(&self, node: NodeId) -> &[usize] {
        self.known[node.index()].as_ref().map_or(&[], |known| &known.in_place)
    }

    fn stored(&self, node: NodeId) -> Option<Strides> {
        let shape = self.instance.sizes(self.instance.node(node).output)?;
        self.has_tokens_first(node).then(|| tokens_first(&shape).as_slice().into())
    }

    /// Whether the kernel that is preferred for row-major inputs is also preferred with strides.
    fn strided(&self, id: NodeId, input: usize) -> bool {
        if let Some(&known) = self.strided.borrow().get(&(id, input)) {
            return known;
        }
        let value = self.instance.node(id).inputs[input].expect("asked of an input that is there");
        let shape = self.instance.sizes(value).expect("an instance has sizes");
        let found = self.bind(id, Some((input, spread(&shape, self.has_rows(value)))));
        let known = self.known[id.index()].as_ref().is_some_and(|known| known.first == found[0].name);
        self.strided.borrow_mut().insert((id, input), known);
        known
    }
}
