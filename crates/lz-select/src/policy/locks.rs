//! Locks that leave nothing: on kernels that do not serve the operation, or that are all denied.

use std::collections::BTreeMap;

use lz_model::OpIx;

use super::analysis::{FindingKind, implied};
use super::compile::Rule;
use super::{Action, RuleSpec};
use crate::decision::KernelIx;
use crate::snapshot::Snapshot;

/// Why a lock leaves no kernel for an operation it is about, whatever the machine.
pub(super) fn leaves_nothing(
    lock: &RuleSpec,
    compiled: &BTreeMap<OpIx, Rule>,
    all: &[BTreeMap<OpIx, Rule>],
    snapshot: &Snapshot,
    comparisons: &mut usize,
) -> Option<FindingKind> {
    let Action::Lock(pattern) = &lock.action else { return None };
    let kernels = |op: OpIx, rule: &Rule| -> Vec<KernelIx> {
        snapshot.kernels_for(op).filter(|&kernel| rule.concerns(kernel)).collect()
    };
    let registered = snapshot.named(pattern).next().is_some();
    if registered && !compiled.is_empty() && compiled.iter().all(|(&op, rule)| kernels(op, rule).is_empty()) {
        let operation = lock.operation.clone().unwrap_or_default();
        return Some(FindingKind::ServesAnother { name: pattern.as_str().to_owned(), operation });
    }
    compiled.iter().find_map(|(&op, rule)| {
        let named = kernels(op, rule);
        let others = || all.iter().filter_map(|rules| rules.get(&op));
        let is_earlier_lock = |other: &Rule| matches!(other.action, Action::Lock(_)) && other.index < rule.index;
        if named.is_empty() || others().any(|other| is_earlier_lock(other) && implied(op, rule, other, comparisons)) {
            return None;
        }
        let mut by = None;
        for kernel in named {
            let denial = others().find(|other| other.forbids(kernel) && implied(op, rule, other, comparisons))?;
            by.get_or_insert_with(|| denial.name.clone());
        }
        let operation = lz_model::Catalog::get().op(op).id().to_owned();
        Some(FindingKind::NoKernelLeft { operation, by: by? })
    })
}
