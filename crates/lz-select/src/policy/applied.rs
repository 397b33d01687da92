//! The rules that apply to one call, and what they come to.

use lz_expr::Env;

use super::{AVOID_POINTS, Action, PREFER_POINTS, Rule};
use crate::decision::{Candidate, KernelIx};

/// The rules that apply to one call, in order.
pub(crate) struct Applied<'a>(Vec<&'a Rule>);

impl<'a> Applied<'a> {
    pub fn new<E: Env>(rules: &'a [Rule], facts: &E) -> Applied<'a> {
        Applied(rules.iter().filter(|rule| rule.applies(facts)).collect())
    }

    pub fn iter(&self) -> impl Iterator<Item = &'a Rule> + '_ {
        self.0.iter().copied()
    }

    /// The first rule that forbids a kernel.
    pub fn forbids(&self, kernel: KernelIx) -> Option<&'a Rule> {
        self.iter().find(|rule| rule.forbids(kernel))
    }

    /// The lock in force: the first.
    pub fn lock(&self) -> Option<&'a Rule> {
        self.iter().find(|rule| matches!(rule.action, Action::Lock(_)))
    }

    /// Points of preferences, avoidances and boosts.
    pub fn points(&self, kernel: KernelIx) -> f64 {
        self.iter().map(|rule| f64::from(points(rule, kernel))).sum()
    }

    /// The rule that replaces a kernel's priority: the first that names it.
    pub fn priority(&self, kernel: KernelIx) -> Option<(&'a Rule, i32)> {
        self.iter().find_map(|rule| match rule.action {
            Action::Priority(_, priority) if rule.concerns(kernel) => Some((rule, priority)),
            _ => None,
        })
    }

    /// The override in force: the first with a kernel that can serve the call.
    pub fn first(&self, candidates: &[Candidate]) -> Option<&'a Rule> {
        self.in_force(candidates, |action| matches!(action, Action::Override(_)))
    }

    /// The fallback in force: the first with a kernel that can serve the call.
    pub fn fallback(&self, candidates: &[Candidate]) -> Option<&'a Rule> {
        self.in_force(candidates, |action| matches!(action, Action::Fallback(_)))
    }

    fn in_force(&self, candidates: &[Candidate], kind: fn(&Action) -> bool) -> Option<&'a Rule> {
        let serves = |rule: &Rule| candidates.iter().any(|c| c.accepted() && rule.concerns(c.kernel));
        self.iter().find(|rule| kind(&rule.action) && serves(rule))
    }
}

/// What one rule adds to a kernel's score.
pub(super) fn points(rule: &Rule, kernel: KernelIx) -> i32 {
    match rule.action {
        _ if !rule.concerns(kernel) => 0,
        Action::Prefer(_) => PREFER_POINTS,
        Action::Avoid(_) => AVOID_POINTS,
        Action::Boost(_, points) => points,
        _ => 0,
    }
}
