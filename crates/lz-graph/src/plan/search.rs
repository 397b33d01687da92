//! The smallest plan of several.

use super::bounds::peak;
use super::lifetimes::{Groups, Sharing};
use super::offsets::{Fit, Item, Offsets, assign};
use super::order::{Dependencies, Ordering};
use super::{Demands, Instance, MemoryPlan, Scratch};
use crate::ir::{Inputs, NodeId};

/// How a plan was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// In which order nodes run.
    pub ordering: Ordering,
    /// Which values share memory.
    pub sharing: Sharing,
    /// How offsets were found.
    pub fit: Fit,
}

/// What is tried.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// Orders of the nodes.
    pub orderings: &'a [Ordering],
    /// Which values share memory.
    pub sharings: &'a [Sharing],
    /// How offsets are found.
    pub fits: &'a [Fit],
}

impl Choices<'static> {
    /// Everything that can make a plan smaller. Writing results over inputs can make it larger, since memory is then in
    /// use for longer: it is tried without, too.
    pub const ALL: Choices<'static> =
        Choices { orderings: Ordering::ALL, sharings: &[Sharing::InPlace, Sharing::Views], fits: Fit::ALL };
}

/// Demands of kernels that write over inputs wherever the operation allows it, and need no scratch.
#[derive(Clone, Debug)]
pub struct OfOps(Vec<&'static [usize]>);

impl OfOps {
    /// For the nodes of an instance.
    pub fn of(instance: &Instance<'_>) -> OfOps {
        let mut found = OfOps(vec![&[]; instance.node_count()]);
        for &id in instance.order() {
            found.0[id.index()] = instance.op(id).in_place(Inputs(&instance.inputs(id)));
        }
        found
    }
}

impl Demands for OfOps {
    fn scratch(&self, _: NodeId) -> usize {
        0
    }

    fn in_place(&self, node: NodeId) -> &[usize] {
        self.0[node.index()]
    }
}

/// The smallest plan of all that are tried.
pub fn plan(instance: &Instance<'_>, demands: &dyn Demands) -> MemoryPlan {
    plan_with(instance, demands, &Choices::ALL)
}

/// Groups for one order, ready for offsets.
struct Draft {
    ordering: Ordering,
    sharing: Sharing,
    order: Vec<NodeId>,
    groups: Groups,
    items: Vec<Item>,
    peak: usize,
    copied: usize,
}

impl Draft {
    fn of(
        instance: &Instance<'_>,
        demands: &dyn Demands,
        (ordering, order): &(Ordering, Vec<NodeId>),
        sharing: Sharing,
    ) -> Draft {
        let groups = Groups::of(instance, order, demands, sharing);
        let items: Vec<Item> = groups.in_arena().map(|(_, group)| group.item()).collect();
        let (peak, copied) = (peak(&items), groups.copied(instance));
        Draft { ordering: *ordering, sharing, order: order.clone(), groups, items, peak, copied }
    }

    fn finish(self, instance: &Instance<'_>, fit: Fit, found: Offsets, bound: usize) -> MemoryPlan {
        let mut offsets = vec![0; self.groups.groups.len()];
        for ((group, _), offset) in self.groups.in_arena().zip(&found.offsets) {
            offsets[group] = *offset;
        }
        let mut scratch = vec![None; instance.node_count()];
        for &(node, group) in &self.groups.scratch {
            let bytes = self.groups.groups[group].bytes;
            scratch[node.index()] = Some(Scratch { offset_bytes: offsets[group], bytes });
        }
        let place = |member: &Option<_>| member.as_ref().map(|member| self.groups.place(member, &offsets));
        MemoryPlan {
            places: self.groups.members.iter().map(place).collect(),
            scratch,
            transfers: self.groups.transfers(instance, &offsets),
            views: self.groups.views,
            over: self.groups.over,
            order: self.order,
            arena: found.arena,
            bound,
            choice: Choice { ordering: self.ordering, sharing: self.sharing, fit },
        }
    }
}

/// The smallest plan of some. Without any choice given, the first of [`Choices::ALL`] is made.
pub fn plan_with(instance: &Instance<'_>, demands: &dyn Demands, choices: &Choices<'_>) -> MemoryPlan {
    let first = |given: usize| if given == 0 { 1 } else { 0 };
    let orderings = [choices.orderings, &Ordering::ALL[..first(choices.orderings.len())]].concat();
    let sharings = [choices.sharings, &[Sharing::InPlace][..first(choices.sharings.len())]].concat();
    let fits = [choices.fits, &Fit::ALL[..first(choices.fits.len())]].concat();

    let dependencies = Dependencies::of(instance, demands);
    let mut orders: Vec<(Ordering, Vec<NodeId>)> = Vec::new();
    for ordering in orderings {
        let order = dependencies.order(ordering);
        if orders.iter().all(|(_, other)| *other != order) {
            orders.push((ordering, order));
        }
    }
    let pairs = orders.iter().flat_map(|order| sharings.iter().map(move |&sharing| (order, sharing)));
    let mut drafts: Vec<Draft> = pairs.map(|(order, sharing)| Draft::of(instance, demands, order, sharing)).collect();
    // No arena is smaller than its peak: those with a low one go first, and what cannot be smaller is not tried.
    // Where two are equal, the one that copies less, and then the one that was made first.
    drafts.sort_by_key(|draft| (draft.peak, draft.copied));
    let bound = drafts[0].peak;
    let mut best: Option<(usize, Fit, Offsets)> = None;
    for (at, draft) in drafts.iter().enumerate() {
        for &fit in &fits {
            if best.as_ref().is_some_and(|(_, _, found)| found.arena <= draft.peak) {
                break;
            }
            let found = assign(&draft.items, fit, draft.peak);
            if best.as_ref().is_none_or(|(_, _, smallest)| found.arena < smallest.arena) {
                best = Some((at, fit, found));
            }
        }
    }
    let (at, fit, found) = best.expect("at least one fit of at least one draft");
    drafts.swap_remove(at).finish(instance, fit, found, bound)
}
