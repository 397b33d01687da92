//! Kernels on trial: they serve the part of the calls a rollout gives them, and no other.

use std::fmt;
use std::sync::Arc;

use lz_expr::Expr;
use lz_model::{Denial, Facts, KernelDescriptor, OpIx, Query, Reason};

use crate::policy::{self, Pattern};

/// Whether a call is among those a trial takes, by the key of its cell. Always the same for the same key.
pub type Takes = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// A kernel on trial.
#[derive(Clone)]
pub struct Trial {
    /// What to call it.
    pub name: String,
    /// The operations it is about, each with what must hold of a call.
    scope: Arc<[(OpIx, Vec<Expr>)]>,
    /// The kernel.
    pub candidate: Pattern,
    /// Which calls it serves; a shadow serves none.
    takes: Takes,
}

impl fmt::Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial").field("name", &self.name).field("candidate", &self.candidate).finish_non_exhaustive()
    }
}

impl Trial {
    /// A trial of a kernel for an operation: its id, an alias, a function's name, or a glob over these.
    pub fn new(name: &str, operation: &str, candidate: Pattern, takes: Takes) -> Trial {
        Trial { name: name.to_owned(), scope: policy::scope(operation).into(), candidate, takes }
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

/// The trials of a snapshot that bear on one call.
pub(crate) struct Trials<'a> {
    trials: Vec<&'a Trial>,
    key: u64,
}

impl<'a> Trials<'a> {
    pub fn new(trials: &'a [Trial], facts: &Facts<'_>, cell: &Query) -> Trials<'a> {
        let trials: Vec<&Trial> = trials.iter().filter(|trial| trial.is_about(facts)).collect();
        let key = if trials.is_empty() { 0 } else { cell.fingerprint() };
        Trials { trials, key }
    }

    /// Why a kernel on trial may not serve this call.
    pub fn rules_out(&self, kernel: &KernelDescriptor) -> Option<Reason> {
        let trial = self.trials.iter().find(|trial| trial.candidate.matches(kernel))?;
        (!(trial.takes)(self.key)).then(|| Reason::PolicyDenied { rule: Denial::Trial { name: trial.name.clone() } })
    }

    /// The trial by which a kernel is to serve this call before all others.
    pub fn puts_first(&self, kernel: &KernelDescriptor) -> Option<&'a str> {
        let mut all = self.trials.iter().filter(|trial| trial.candidate.matches(kernel));
        all.find(|trial| (trial.takes)(self.key)).map(|trial| trial.name.as_str())
    }
}
