//! What selection may choose from while the process is degraded.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use lz_model::{Denial, KernelDescriptor, Query, Reason};

/// Decisions that were made while all was well: which kernel each cell got.
#[derive(Clone, Debug, Default)]
pub struct Settled {
    by_key: HashMap<u64, (Query, String)>,
}

impl Settled {
    /// Remembers a decision under its key.
    pub fn insert(&mut self, key: Query, kernel: String) {
        self.by_key.insert(key.fingerprint(), (key, kernel));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    fn kernel(&self, key: &Query) -> Option<&str> {
        self.by_key.get(&key.fingerprint()).filter(|(known, _)| known == key).map(|(_, kernel)| kernel.as_str())
    }
}

/// Limits on what may be chosen, beyond what is legal and what the operator wants. They never leave a call without a kernel
/// that had one: references always may, and what plain torch runs on devices that have none. Where none of these can serve a
/// call (references have no gradients), plain torch may, and if even that cannot, whatever else could.
#[derive(Clone, Debug, PartialEq)]
pub struct Restriction {
    /// What to call it in decisions.
    pub level: &'static str,
    /// Only references run, and plain torch where none can.
    pub only_references: bool,
    /// Only these kernels: those that have served calls and not failed of late.
    pub proven: Option<Arc<HashSet<String>>>,
    /// Only what was decided before for the same cell.
    pub settled: Option<Arc<Settled>>,
    /// Nothing that was measured or predicted counts, only declared priorities and rules.
    pub declared_only: bool,
}

impl PartialEq for Settled {
    fn eq(&self, other: &Self) -> bool {
        let names = |s: &Settled| s.by_key.iter().map(|(k, (_, name))| (*k, name.clone())).collect::<HashMap<_, _>>();
        names(self) == names(other)
    }
}

impl Default for Restriction {
    fn default() -> Self {
        Restriction { level: "full", only_references: false, proven: None, settled: None, declared_only: false }
    }
}

impl Restriction {
    /// Why a kernel that is no last resort may not serve a call, if it may not. `keys`: those the call's decision is
    /// remembered under.
    pub(crate) fn rules_out(&self, kernel: &KernelDescriptor, keys: [&Query; 2]) -> Option<Reason> {
        let only = if self.only_references {
            "only references run, and plain torch where none can"
        } else if self.proven.as_ref().is_some_and(|proven| !proven.contains(&kernel.id)) {
            "only kernels run that have served calls without failing of late"
        } else if self.settled.as_ref().is_some_and(|s| !keys.iter().any(|key| s.kernel(key) == Some(&kernel.id))) {
            "only what was decided before for calls like this runs"
        } else {
            return None;
        };
        Some(Reason::PolicyDenied { rule: Denial::Degraded { level: self.level, only } })
    }

    /// Whether a decision holds for its whole cell.
    pub(crate) fn is_uniform(&self) -> bool {
        self.settled.is_none()
    }
}
