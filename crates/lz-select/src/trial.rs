//! Kernels on trial: they serve the part of the calls a rollout gives them, and no other.

use std::fmt;
use std::sync::Arc;

use lz_model::{Catalog, KernelDescriptor, OpIx, Query, Reason};

use crate::policy::Pattern;

/// Whether a call is among those a trial takes, by the key of its cell. Always the same for the same key.
pub type Takes = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// A kernel on trial.
#[derive(Clone)]
pub struct Trial {
    /// What to call it.
    pub name: String,
    /// The operations it is about.
    pub ops: Vec<OpIx>,
    /// The kernel.
    pub candidate: Pattern,
    /// Which calls it serves; a shadow serves none.
    pub takes: Takes,
}

impl fmt::Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial").field("name", &self.name).field("candidate", &self.candidate).finish_non_exhaustive()
    }
}

impl Trial {
    /// The operations behind a name or alias; none when there is no such name.
    pub fn ops_of(operation: &str) -> Vec<OpIx> {
        Catalog::get().find(operation).map(|target| target.ops.to_vec()).unwrap_or_default()
    }

    /// How decisions say that a trial's kernel does not serve a call.
    pub fn denial(name: &str) -> Reason {
        Reason::PolicyDenied { rule: format!("rollout '{name}' does not give it this call") }
    }

    fn concerns(&self, op: OpIx, kernel: &KernelDescriptor) -> bool {
        self.ops.contains(&op) && self.candidate.matches(kernel)
    }
}

/// The trials of a snapshot, as they bear on one call.
pub(crate) struct Trials<'a> {
    trials: &'a [Trial],
    op: OpIx,
    key: u64,
}

impl<'a> Trials<'a> {
    pub fn new(trials: &'a [Trial], cell: &Query) -> Trials<'a> {
        let op = cell.op();
        let key = if trials.is_empty() { 0 } else { cell.fingerprint() };
        Trials { trials, op, key }
    }

    /// Why a kernel on trial may not serve this call.
    pub fn rules_out(&self, kernel: &KernelDescriptor) -> Option<Reason> {
        let trial = self.trials.iter().find(|t| t.concerns(self.op, kernel))?;
        (!(trial.takes)(self.key)).then(|| Trial::denial(&trial.name))
    }

    /// The trial by which a kernel is to serve this call before all others.
    pub fn puts_first(&self, kernel: &KernelDescriptor) -> Option<&'a str> {
        let mut all = self.trials.iter().filter(|t| t.concerns(self.op, kernel));
        all.find(|t| (t.takes)(self.key)).map(|t| t.name.as_str())
    }
}
