//! Which values share memory, and from which step to which that memory is in use.
//!
//! One pass over the nodes in the order they run. Each value belongs to one group: values of a group lie in the same
//! memory, and a result joins the group of an input either as a view of it or because it is written over it. There is
//! one map from values to groups, so a chain of views and in-place results needs no second pass.
//!
//! Steps: node `i` of the order runs at step `i`; of `n` nodes, results are copied out at step `n` and inputs that are
//! updated by a copy are written at step `n + 1`.

use smallvec::SmallVec;

use super::offsets::Item;
use super::views::{Viewable, strided};
use super::{ALIGNMENT, Demands, Instance, Place, Root, Strides, Transfer};
use crate::ir::{Inputs, NodeId, Source, ValueId};

/// Which values may share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sharing {
    /// Views share, and results are written over inputs that nothing reads later.
    InPlace,
    /// Views share. Only inputs that the graph updates are written over.
    Views,
    /// No value shares: views are copies. Only inputs that the graph updates are written over.
    Nothing,
}

/// Memory of values that share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Which memory.
    pub root: Root,
    /// Its bytes.
    pub bytes: usize,
    /// The step at which it is written first.
    pub first: usize,
    /// The last step at which it is read, or written if nothing reads it.
    pub last: usize,
}

impl Group {
    /// What it takes in the arena.
    pub fn item(&self) -> Item {
        Item { bytes: self.bytes.next_multiple_of(ALIGNMENT), first: self.first, last: self.last }
    }
}

/// Where a value lies in the memory of its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Which group.
    pub group: usize,
    /// Bytes from the start of the group.
    pub offset_bytes: usize,
    /// `None`: row-major.
    pub strides: Option<Strides>,
}

/// Bytes that are copied after the last node, between places that have no offsets yet.
#[derive(Clone, Debug)]
struct Late {
    value: ValueId,
    from: Member,
    to: Target,
}

#[derive(Clone, Copy, Debug)]
enum Target {
    Memory(Root),
    Group(usize),
}

/// The groups of all values for one order.
#[derive(Clone, Debug)]
pub struct Groups {
    /// The groups.
    pub groups: Vec<Group>,
    /// The group of each value, by [`ValueId::index`].
    pub members: Vec<Option<Member>>,
    /// By [`NodeId::index`]: the result is a view.
    pub views: Vec<bool>,
    /// By [`NodeId::index`]: the input over which the result is written.
    pub over: Vec<Option<usize>>,
    /// Scratch: the node, and its group, which lives for one step.
    pub scratch: Vec<(NodeId, usize)>,
    late: Vec<Late>,
}

impl Groups {
    /// Groups the values of an instance whose nodes run in this order.
    pub fn of(instance: &Instance<'_>, order: &[NodeId], demands: &dyn Demands, sharing: Sharing) -> Groups {
        let mut builder = Builder::new(instance, order, demands, sharing);
        for (step, &node) in order.iter().enumerate() {
            builder.place(step, node);
        }
        builder.results();
        builder.updates(order.len());
        builder.groups
    }

    /// The groups in the arena: their number and what they are.
    pub fn in_arena(&self) -> impl Iterator<Item = (usize, &Group)> {
        self.groups.iter().enumerate().filter(|(_, group)| group.root == Root::Arena)
    }

    /// Bytes that are copied after the last node.
    pub fn copied(&self, instance: &Instance<'_>) -> usize {
        self.late.iter().map(|late| instance.bytes(late.value)).sum()
    }

    /// The place of a value, with an offset for each group.
    pub fn place(&self, member: &Member, offsets: &[usize]) -> Place {
        let offset_bytes = offsets[member.group] + member.offset_bytes;
        Place { root: self.groups[member.group].root, offset_bytes, strides: member.strides.clone() }
    }

    /// What is copied after the last node, with an offset for each group.
    pub fn transfers(&self, instance: &Instance<'_>, offsets: &[usize]) -> Vec<Transfer> {
        let to = |target| match target {
            Target::Memory(root) => Place::at(root, 0),
            Target::Group(group) => Place::at(self.groups[group].root, offsets[group]),
        };
        self.late
            .iter()
            .map(|late| Transfer {
                value: late.value,
                from: self.place(&late.from, offsets),
                to: to(late.to),
                bytes: instance.bytes(late.value),
            })
            .collect()
    }
}

/// For each update, the way from the old contents to the new ones over results that are views of an input or may be
/// written over it. By [`NodeId::index`]: which input of the node is on that way.
pub fn update_chains(instance: &Instance<'_>, demands: &dyn Demands) -> Vec<Option<usize>> {
    let graph = instance.graph();
    let mut chain = vec![None; instance.node_count()];
    for &(old, new) in &graph.updates {
        let mut reached = vec![false; graph.value_count()];
        let mut way: Vec<Option<usize>> = vec![None; instance.node_count()];
        reached[old.index()] = true;
        for &id in instance.order() {
            let node = instance.node(id);
            let shares = |at: usize| {
                let value = node.inputs.get(at).copied().flatten();
                value.filter(|value| reached[value.index()] && instance.bytes(*value) == instance.bytes(node.output))
            };
            let view = alias(instance, id).map(|alias| alias.0);
            let found = view.into_iter().chain(demands.in_place(id).iter().copied()).find(|&at| shares(at).is_some());
            if found.is_some() {
                way[id.index()] = found;
                reached[node.output.index()] = true;
            }
        }
        let mut value = new;
        while let Some((id, node)) = graph.made_by(value) {
            let Some(input) = way[id.index()] else { break };
            chain[id.index()] = Some(input);
            value = node.inputs[input].expect("an input on the way");
        }
    }
    chain
}

/// The input a result is a row-major view of, and the bytes from the input's first to its first.
pub fn alias(instance: &Instance<'_>, id: NodeId) -> Option<(usize, usize)> {
    let node = instance.node(id);
    let metas = instance.inputs(id);
    let alias = instance.op(id).alias(Inputs(&metas), instance.meta(node.output))?;
    let input = node.inputs.get(alias.input).copied().flatten()?;
    let (from, to) = (instance.meta(input), instance.meta(node.output));
    if from.dtype != to.dtype {
        return None;
    }
    let bits = usize::try_from(alias.offset).ok()?.checked_mul(to.dtype.bits() as usize)?;
    let inside =
        bits.is_multiple_of(8) && (bits / 8).checked_add(instance.bytes(node.output))? <= instance.bytes(input);
    inside.then_some((alias.input, bits / 8))
}

struct Builder<'a, 'g> {
    instance: &'a Instance<'g>,
    demands: &'a dyn Demands,
    sharing: Sharing,
    groups: Groups,
    /// By [`ValueId::index`]: the last step that reads the value.
    last_read: Vec<usize>,
    /// By group: the last step that reads any of its values made so far.
    last: Vec<usize>,
    chains: Vec<Option<usize>>,
    viewable: Viewable,
}

impl<'a, 'g> Builder<'a, 'g> {
    fn new(
        instance: &'a Instance<'g>,
        order: &[NodeId],
        demands: &'a dyn Demands,
        sharing: Sharing,
    ) -> Builder<'a, 'g> {
        let graph = instance.graph();
        let mut last_read = vec![0; graph.value_count()];
        for (step, &id) in order.iter().enumerate() {
            for value in instance.node(id).inputs.iter().flatten() {
                last_read[value.index()] = step;
            }
        }
        let given = graph.outputs.iter().map(|value| (*value, order.len()));
        let updated = graph.updates.iter().map(|(_, new)| (*new, order.len() + 1));
        for (value, step) in given.chain(updated) {
            last_read[value.index()] = step.max(last_read[value.index()]);
        }
        let groups = Groups {
            groups: Vec::with_capacity(graph.value_count()),
            members: vec![None; graph.value_count()],
            views: vec![false; instance.node_count()],
            over: vec![None; instance.node_count()],
            scratch: Vec::new(),
            late: Vec::new(),
        };
        let chains = match graph.updates.is_empty() {
            true => Vec::new(),
            false => update_chains(instance, demands),
        };
        let viewable = match sharing {
            Sharing::Nothing => Viewable::none(),
            _ => Viewable::of(instance, order, demands),
        };
        let last = Vec::with_capacity(graph.value_count());
        let mut builder = Builder { instance, demands, sharing, groups, last_read, last, chains, viewable };
        for (i, &input) in graph.inputs.iter().enumerate() {
            builder.own(input, Root::Input(i), 0);
        }
        let constants: Vec<ValueId> = (order.iter().flat_map(|&id| instance.node(id).inputs.iter().flatten().copied()))
            .chain(graph.outputs.iter().copied())
            .chain(graph.updates.iter().map(|(_, new)| *new))
            .filter(|&value| matches!(graph.value(value).source, Source::Constant(_)))
            .collect();
        for value in constants {
            if builder.groups.members[value.index()].is_none() {
                builder.own(value, Root::Constant(value), 0);
            }
        }
        builder
    }

    /// A group of its own for a value.
    fn own(&mut self, value: ValueId, root: Root, step: usize) {
        let group = self.group(root, self.instance.bytes(value), step, step.max(self.last_read[value.index()]));
        self.groups.members[value.index()] = Some(Member { group, offset_bytes: 0, strides: None });
    }

    fn group(&mut self, root: Root, bytes: usize, first: usize, last: usize) -> usize {
        self.groups.groups.push(Group { root, bytes, first, last });
        self.last.push(last);
        self.groups.groups.len() - 1
    }

    /// Makes a result lie in the memory of an input.
    fn join(&mut self, output: ValueId, member: Member, step: usize) {
        let last = step.max(self.last_read[output.index()]).max(self.last[member.group]);
        self.last[member.group] = last;
        self.groups.groups[member.group].last = last;
        self.groups.members[output.index()] = Some(member);
    }

    fn member(&self, value: ValueId) -> &Member {
        self.groups.members[value.index()].as_ref().expect("nodes run after those they read from")
    }

    fn place(&mut self, step: usize, id: NodeId) {
        let output = self.instance.node(id).output;
        if let Some(member) = self.view(id) {
            self.groups.views[id.index()] = true;
            self.join(output, member, step);
        } else {
            match self.over(step, id) {
                Some(at) => {
                    self.groups.over[id.index()] = Some(at);
                    let value = self.instance.node(id).inputs[at].expect("an input that may be written over");
                    self.join(output, self.member(value).clone(), step);
                }
                None => {
                    self.own(output, Root::Arena, step);
                    let stored = if self.sharing == Sharing::Nothing { None } else { self.demands.stored(id) };
                    if let (Some(strides), Some(member)) = (stored, &mut self.groups.members[output.index()]) {
                        member.strides = Some(strides);
                    }
                }
            }
            // A view runs no kernel, and needs no scratch.
            let scratch = self.demands.scratch(id);
            if scratch > 0 {
                let group = self.group(Root::Arena, scratch, step, step);
                self.groups.scratch.push((id, group));
            }
        }
    }

    /// Where a result lies that is a view.
    fn view(&self, id: NodeId) -> Option<Member> {
        if self.sharing == Sharing::Nothing && self.chains.get(id.index()).is_none_or(Option::is_none) {
            return None;
        }
        let node = self.instance.node(id);
        let row_major = alias(self.instance, id).and_then(|(input, offset_bytes)| {
            let member = self.member(node.inputs[input]?);
            member
                .strides
                .is_none()
                .then(|| Member { offset_bytes: member.offset_bytes + offset_bytes, ..member.clone() })
        });
        if row_major.is_some() || !self.viewable.has(node.output) {
            return row_major;
        }
        strided(self.instance, id, |value| {
            let member = self.member(value);
            (member.offset_bytes, member.strides.clone())
        })
        .map(|(input, offset_bytes, strides)| {
            let group = self.member(node.inputs[input].expect("an input that is viewed")).group;
            // Axes that were turned and are turned back lie row-major.
            let sizes = self.instance.sizes(node.output).expect("sizes are known");
            Member { group, offset_bytes, strides: (strides != super::row_major(&sizes)).then_some(strides) }
        })
    }

    /// The input over which a result is written.
    fn over(&self, step: usize, id: NodeId) -> Option<usize> {
        let on_way = self.chains.get(id.index()).copied().flatten();
        let others = match self.sharing {
            Sharing::InPlace => self.demands.in_place(id),
            _ => &[],
        };
        let allowed = self.demands.in_place(id);
        let candidates: SmallVec<[usize; 4]> =
            on_way.filter(|at| allowed.contains(at)).into_iter().chain(others.iter().copied()).collect();
        candidates.into_iter().find(|&at| self.may_write(step, id, at, on_way == Some(at)))
    }

    /// Whether the result of a node may be written over an input: nothing reads that memory later, and the node itself
    /// reads it only where each element of the result needs no other element.
    fn may_write(&self, step: usize, id: NodeId, at: usize, on_way: bool) -> bool {
        let node = self.instance.node(id);
        let Some(value) = node.inputs.get(at).copied().flatten() else { return false };
        let member = self.member(value);
        let memory = match self.groups.groups[member.group].root {
            Root::Arena => true,
            Root::Input(_) => on_way && member.offset_bytes == 0,
            Root::Constant(_) | Root::Output(_) => false,
        };
        let (from, to) = (self.instance.meta(value), self.instance.meta(node.output));
        let others = node.inputs.iter().enumerate().filter_map(|(i, input)| Some((i, (*input)?)));
        memory
            && self.instance.bytes(value) > 0
            && member.strides.is_none()
            && from.dtype.bits() == to.dtype.bits()
            && self.instance.bytes(value) == self.instance.bytes(node.output)
            && self.last[member.group] <= step
            && others.into_iter().filter(|&(i, _)| i != at).all(|(i, other)| {
                self.member(other).group != member.group || (other == value && self.demands.in_place(id).contains(&i))
            })
    }

    /// Gives each result memory of the caller: the group of a value that fills it, or else a copy.
    fn results(&mut self) {
        for (i, &value) in self.instance.graph().outputs.iter().enumerate() {
            let from = self.member(value).clone();
            let group = &mut self.groups.groups[from.group];
            let fills = from.offset_bytes == 0 && from.strides.is_none() && group.bytes == self.instance.bytes(value);
            if group.root == Root::Arena && fills {
                group.root = Root::Output(i);
            } else {
                self.groups.late.push(Late { value, from, to: Target::Memory(Root::Output(i)) });
            }
        }
    }

    /// Copies new contents into inputs that were not written in place. All reads of old contents are before that:
    /// results are copied first, and contents that lie in an input which a copy overwrites go through the arena.
    fn updates(&mut self, steps: usize) {
        let graph = self.instance.graph();
        let slot = |old: ValueId| graph.inputs.iter().position(|&input| input == old).expect("checked by the instance");
        let copies: Vec<(ValueId, Root)> = graph
            .updates
            .iter()
            .map(|&(old, new)| (new, Root::Input(slot(old))))
            .filter(|&(new, root)| {
                let member = self.member(new);
                self.groups.groups[member.group].root != root || member.offset_bytes != 0 || member.strides.is_some()
            })
            .collect();
        let mut last = Vec::new();
        for &(value, to) in &copies {
            let mut from = self.member(value).clone();
            let overwritten = copies.iter().any(|&(_, root)| root == self.groups.groups[from.group].root);
            if overwritten {
                let group = self.group(Root::Arena, self.instance.bytes(value), steps, steps + 1);
                let staged = Member { group, offset_bytes: 0, strides: None };
                self.groups.late.push(Late { value, from, to: Target::Group(group) });
                from = staged;
            }
            last.push(Late { value, from, to: Target::Memory(to) });
        }
        self.groups.late.append(&mut last);
    }
}
