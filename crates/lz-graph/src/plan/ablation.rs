//! What each part of the planner is worth: the arena with each order, sharing and fit.

use super::lifetimes::Sharing;
use super::offsets::Fit;
use super::order::Ordering;
use super::search::{Choice, Choices, plan_with};
use super::{Demands, Instance};

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// How the plan was made.
    pub choice: Choice,
    /// Bytes of its arena.
    pub arena: usize,
    /// The most bytes that live at one step of its order.
    pub bound: usize,
    /// Bytes copied after the last node.
    pub copied: usize,
}

/// A plan for each order, sharing and fit.
pub fn ablation(instance: &Instance<'_>, demands: &dyn Demands) -> Vec<Row> {
    let mut rows = Vec::new();
    for &ordering in Ordering::ALL {
        for sharing in [Sharing::InPlace, Sharing::Views, Sharing::Nothing] {
            for &fit in Fit::ALL {
                let choices = Choices { orderings: &[ordering], sharings: &[sharing], fits: &[fit] };
                let plan = plan_with(instance, demands, &choices);
                let copied = plan.transfers.iter().map(|transfer| transfer.bytes).sum();
                rows.push(Row { choice: plan.choice, arena: plan.arena, bound: plan.bound, copied });
            }
        }
    }
    rows
}
