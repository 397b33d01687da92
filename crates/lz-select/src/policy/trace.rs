//! What every rule did to a decision.

use lz_model::{Catalog, Facts};
use serde::Serialize;

use super::applied::{Applied, points};
use super::{Action, Rule};
use crate::decision::{Decision, KernelIx};
use crate::snapshot::Snapshot;

/// What a rule did to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "effect", rename_all = "snake_case")]
pub enum Effect {
    /// Added points to its score.
    Points {
        /// How many; negative when it took them off.
        points: i32,
    },
    /// Replaced its declared priority.
    Priority {
        /// By this.
        priority: i32,
    },
    /// Ruled it out.
    Denied,
    /// Left it in, and all others out.
    Locked,
    /// Ruled it out in favour of another.
    LockedOut,
    /// Put it before all others.
    PutFirst,
    /// Made it next in line after the chosen kernel.
    NextInLine,
}

/// One rule of the operation, and what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleTrace {
    /// Its place in the policy.
    pub index: usize,
    /// What it is called.
    pub name: String,
    /// What it does: `prefer`, `deny`, ….
    pub action: &'static str,
    /// Whom it names, or the filter.
    pub target: String,
    /// When it applies, as an expression; empty for always.
    pub condition: String,
    /// What its condition looked at: `seq_q=128, sm=90`.
    pub found: String,
    /// Whether it applied.
    pub applied: bool,
    /// The rule that took its place: an earlier lock, override or priority.
    pub overruled_by: Option<String>,
    /// What it did to which kernels.
    pub effects: Vec<(KernelIx, Effect)>,
}

impl Snapshot {
    /// Every rule of the policy that is about the operation of a decision: whether it applied,
    /// and what it did to which kernels.
    pub fn trace(&self, decision: &Decision) -> Vec<RuleTrace> {
        let query = &decision.query;
        let Some(device) = self.device(query.device()) else { return Vec::new() };
        let facts = Facts { op: Catalog::get().op(query.op()), query, device };
        let rules = self.policy.rules(query.op());
        let applied = Applied::new(rules, &facts);
        let one = |rule: &Rule| {
            let applies = rule.applies(&facts);
            let target = match &rule.action {
                Action::Filter(filter) => filter.clone(),
                action => action.pattern().map(|p| p.as_str().to_owned()).unwrap_or_default(),
            };
            let mut condition: Vec<&str> = rule.when.iter().map(lz_expr::Expr::source).collect();
            condition.retain(|text| *text != "true");
            let found = rule.when.iter().map(|when| facts.describe(when)).filter(|text| !text.is_empty());
            let overruled = if applies { overruled_by(rule, &applied, decision) } else { None };
            RuleTrace {
                index: rule.index,
                name: rule.name.clone(),
                action: rule.action.name(),
                target,
                condition: condition.join(" and "),
                found: found.collect::<Vec<_>>().join(", "),
                applied: applies,
                effects: if applies && overruled.is_none() { effects(rule, &applied, decision) } else { Vec::new() },
                overruled_by: overruled,
            }
        };
        rules.iter().map(one).collect()
    }
}

/// The rule of its kind that decided instead of it.
fn overruled_by(rule: &Rule, applied: &Applied<'_>, decision: &Decision) -> Option<String> {
    let winner = match rule.action {
        Action::Lock(_) => applied.lock(),
        Action::Override(_) => applied.first(&decision.candidates),
        Action::Fallback(_) => applied.fallback(&decision.candidates),
        _ => None,
    };
    winner.filter(|winner| winner.index < rule.index).map(|winner| winner.name.clone())
}

fn effects(rule: &Rule, applied: &Applied<'_>, decision: &Decision) -> Vec<(KernelIx, Effect)> {
    let serves = |kernel: KernelIx| decision.ranked().any(|c| c.kernel == kernel);
    let effect = |kernel: KernelIx| match rule.action {
        Action::Lock(_) if rule.concerns(kernel) => Some(Effect::Locked),
        Action::Lock(_) => Some(Effect::LockedOut),
        _ if !rule.concerns(kernel) => None,
        Action::Deny(_) | Action::Filter(_) => Some(Effect::Denied),
        Action::Prefer(_) | Action::Avoid(_) | Action::Boost(..) => {
            Some(Effect::Points { points: points(rule, kernel) })
        }
        Action::Priority(_, priority) => {
            applied.priority(kernel).filter(|(first, _)| first.index == rule.index)?;
            Some(Effect::Priority { priority })
        }
        Action::Override(_) => serves(kernel).then_some(Effect::PutFirst),
        Action::Fallback(_) => {
            let next = decision.ranking.get(1).map(|&i| decision.candidates[i].kernel);
            (next == Some(kernel)).then_some(Effect::NextInLine)
        }
    };
    decision.candidates.iter().filter_map(|c| Some((c.kernel, effect(c.kernel)?))).collect()
}
