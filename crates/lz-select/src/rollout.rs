//! Kernels in a rollout: they serve the part of the calls a rollout gives them, and no other.

use std::fmt;
use std::sync::Arc;

use lz_expr::Expr;
use lz_model::{Denial, Facts, KernelDescriptor, OpIx, Query, Reason};

use crate::policy::{self, Pattern};

/// Whether a call is among those a rollout takes, by the key of its cell. Always the same for the same key.
pub type Takes = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// A kernel in a rollout.
#[derive(Clone)]
pub struct RolloutRule {
    /// What to call it.
    pub name: String,
    /// The operations it is about, each with what must hold of a call.
    scope: Arc<[(OpIx, Vec<Expr>)]>,
    /// The kernel.
    pub candidate: Pattern,
    /// Which calls it serves; a shadow serves none.
    takes: Takes,
}

impl fmt::Debug for RolloutRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RolloutRule")
            .field("name", &self.name)
            .field("candidate", &self.candidate)
            .finish_non_exhaustive()
    }
}

impl RolloutRule {
    /// A rollout of a kernel for an operation: its id, an alias, a function's name, or a glob over these.
    pub fn new(name: &str, operation: &str, candidate: Pattern, takes: Takes) -> RolloutRule {
        RolloutRule { name: name.to_owned(), scope: policy::scope(operation).into(), candidate, takes }
    }

    /// The operations behind a name, alias or glob; none when it stands for nothing.
    pub fn ops_of(operation: &str) -> Vec<OpIx> {
        policy::scope(operation).into_iter().map(|(op, _)| op).collect()
    }

    fn is_about(&self, facts: &Facts<'_>) -> bool {
        let op = facts.query.op();
        let holds = |when: &[Expr]| when.iter().all(|expr| expr.test(facts).unwrap_or(false));
        self.scope.iter().any(|(about, when)| *about == op && holds(when))
    }
}

/// The rollouts of a snapshot that bear on one call.
pub(crate) struct RolloutRules<'a> {
    rollouts: Vec<&'a RolloutRule>,
    key: u64,
}

impl<'a> RolloutRules<'a> {
    pub fn new(rollouts: &'a [RolloutRule], facts: &Facts<'_>, cell: &Query) -> RolloutRules<'a> {
        let rollouts: Vec<&RolloutRule> = rollouts.iter().filter(|rollout| rollout.is_about(facts)).collect();
        let key = if rollouts.is_empty() { 0 } else { cell.fingerprint() };
        RolloutRules { rollouts, key }
    }

    /// Why a kernel in a rollout may not serve this call.
    pub fn rules_out(&self, kernel: &KernelDescriptor) -> Option<Reason> {
        let rollout = self.rollouts.iter().find(|rollout| rollout.candidate.matches(kernel))?;
        (!(rollout.takes)(self.key))
            .then(|| Reason::PolicyDenied { rule: Denial::Rollout { name: rollout.name.clone() } })
    }

    /// The rollout by which a kernel is to serve this call before all others.
    pub fn puts_first(&self, kernel: &KernelDescriptor) -> Option<&'a str> {
        let mut all = self.rollouts.iter().filter(|rollout| rollout.candidate.matches(kernel));
        all.find(|rollout| (rollout.takes)(self.key)).map(|rollout| rollout.name.as_str())
    }
}
