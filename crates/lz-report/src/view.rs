//! The input in the order of the page.

use lz_model::Catalog;

use crate::color::Colors;
use crate::contest::Contest;
use crate::input::Input;
use crate::shape;

/// A contest and the name of its place on the page.
#[derive(Clone)]
pub(crate) struct Placed<'a> {
    pub contest: &'a Contest,
    /// `c12`.
    pub anchor: String,
}

/// The contests of one operation on one device.
pub(crate) struct Group<'a> {
    pub op: &'a str,
    /// The device, where there are several.
    pub device: Option<&'a str>,
    /// `op3`.
    pub anchor: String,
    /// Calls differ in more than sizes, dtype and mode.
    pub variants: bool,
    /// By dtype, variant, mode and size.
    pub contests: Vec<Placed<'a>>,
}

impl<'a> Group<'a> {
    pub fn iter(&self) -> impl Iterator<Item = &'a Contest> + '_ {
        self.contests.iter().map(|placed| placed.contest)
    }
}

/// What is shown, in order.
pub(crate) struct View<'a> {
    pub groups: Vec<Group<'a>>,
    pub colors: Colors,
}

impl<'a> View<'a> {
    pub fn of(input: &'a Input) -> View<'a> {
        let ops = Catalog::get().ops();
        let op_place = |op: &str| ops.iter().position(|o| o.id() == op).unwrap_or(ops.len());
        let device_place = |id: &str| input.machines.iter().position(|m| m.id == id).unwrap_or(input.machines.len());
        let sizes = |contest: &Contest| {
            let order = shape::dim_order(&contest.op);
            let ordered = order.iter().filter_map(|name| contest.dims.get(*name).copied());
            ordered.chain(contest.dims.values().copied()).collect::<Vec<i64>>()
        };
        let mut sorted: Vec<&Contest> = input.contests.iter().collect();
        sorted.sort_by_cached_key(|c| {
            let place = (device_place(&c.device), c.device.clone(), op_place(&c.op), c.op.clone());
            (place, c.dtype.clone(), c.variant.clone(), c.mode.clone(), sizes(c), c.label.clone())
        });
        let several = sorted.iter().any(|c| c.device != sorted[0].device);
        let name = |id: &'a str| input.machines.iter().find(|m| m.id == id).map_or(id, |m| m.name.as_str());
        let mut groups: Vec<Group<'a>> = Vec::new();
        let mut last: Option<&Contest> = None;
        for (i, &contest) in sorted.iter().enumerate() {
            if last.is_none_or(|l| l.op != contest.op || l.device != contest.device) {
                let device = several.then(|| name(&contest.device));
                let anchor = format!("op{}", groups.len() + 1);
                groups.push(Group { op: &contest.op, device, anchor, variants: false, contests: Vec::new() });
            }
            last = Some(contest);
            if let Some(group) = groups.last_mut() {
                group.variants |= group.contests.first().is_some_and(|p| p.contest.variant != contest.variant);
                group.contests.push(Placed { contest, anchor: format!("c{}", i + 1) });
            }
        }
        View { groups, colors: Colors::of(&input.contests) }
    }
}
