//! What of a document is in force in a snapshot, and why the rest is not.

use std::sync::Arc;

use lz_model::{Catalog, KernelDescriptor, Query, Reason, nearest};
use lz_select::{Candidate, KernelIx, Snapshot};

use super::mismatch::{Mismatch, MismatchKind, PinStatus};
use super::source::{Entry, Source};
use crate::report::{ReasonReport, label};

/// How much of a document is in force in a snapshot.
pub(crate) fn status(snapshot: &Snapshot, source: &Source) -> PinStatus {
    let entries = source.entries();
    let mut status = PinStatus {
        origin: source.origin.to_string(),
        kind: source.kind,
        entries: entries.len(),
        in_force: 0,
        refused: false,
        mismatches: Vec::new(),
    };
    if let Some(kind) = source.refusal(snapshot.spec()) {
        status.refused = true;
        status.mismatches.push(Mismatch::new(String::new(), String::new(), String::new(), kind));
        return status;
    }
    let resolved = source.resolve(snapshot.spec(), &entries);
    let mut out: Vec<(usize, Mismatch)> = Vec::new();
    for (entry, resolved) in entries.iter().zip(resolved) {
        let kind = match resolved {
            Ok(resolved) => overruled(snapshot, entry, resolved.query.as_ref()),
            Err(kind) => Some(kind),
        };
        let call = entry.call.map_or_else(|| entry.op.to_owned(), label);
        out.extend(
            kind.map(|kind| (entry.index, Mismatch::new(entry.place.clone(), call, entry.kernel.to_owned(), kind))),
        );
    }
    out.sort_by_key(|(index, _)| *index);
    status.in_force = entries.len() - out.len();
    status.mismatches = out.into_iter().map(|(_, mismatch)| mismatch).collect();
    status
}

/// Why an entry that was put in force does not decide its call.
fn overruled(snapshot: &Snapshot, entry: &Entry<'_>, query: Option<&Query>) -> Option<MismatchKind> {
    let of_id: Vec<(KernelIx, &Arc<KernelDescriptor>)> =
        snapshot.kernels().filter(|(_, kernel)| kernel.id == entry.kernel).collect();
    if of_id.is_empty() {
        let nearest = nearest(entry.kernel, snapshot.kernels().map(|(_, kernel)| kernel.id.as_str()));
        return Some(MismatchKind::KernelGone { nearest: nearest.map(str::to_owned) });
    }
    let is_meant = |kernel: &KernelDescriptor| entry.version.is_none_or(|version| kernel.version == version);
    let meant: Vec<KernelIx> = of_id.iter().filter(|(_, kernel)| is_meant(kernel)).map(|(ix, _)| *ix).collect();
    if meant.is_empty() {
        let found: Vec<&str> = of_id.iter().map(|(_, kernel)| kernel.version.as_str()).collect();
        let locked = entry.version.unwrap_or_default().to_owned();
        return Some(MismatchKind::VersionChanged { locked, found: found.join(", ") });
    }
    // Without a call each call says whether the kernel can serve it; but it must be one of the operation's.
    let Some(query) = query else { return of_other_operation(snapshot, entry, &meant) };
    let decision = snapshot.select(query);
    if decision.chosen().is_some_and(|chosen| meant.contains(&chosen.kernel)) {
        return None;
    }
    let mut candidates: Vec<&Candidate> = decision.candidates.iter().filter(|c| meant.contains(&c.kernel)).collect();
    candidates.sort_by_key(|candidate| !candidate.accepted());
    let report = |reason: &Reason| ReasonReport { reason: reason.clone(), message: reason.to_string() };
    let Some(candidate) = candidates.first() else {
        return Some(wrong_operation(snapshot, meant[0], Catalog::get().op(query.op()).id()));
    };
    if !candidate.accepted() {
        return Some(MismatchKind::NotValid { reasons: candidate.reasons.iter().map(report).collect() });
    }
    if candidate.cold {
        return Some(MismatchKind::NotCompiled);
    }
    let instead = decision.chosen().map_or_else(String::new, |chosen| snapshot.name(chosen.kernel));
    // The first pin that covers a call is the only one that counts, whether or not its kernel can serve.
    let above = || snapshot.spec().pins.find(query).map_or_else(String::new, |pin| pin.origin.to_string());
    let by = match (&decision.rollout, &decision.overridden_by) {
        (Some(rollout), _) => format!("rollout '{rollout}'"),
        (None, Some(rule)) => format!("rule '{rule}'"),
        (None, None) => above(),
    };
    Some(MismatchKind::Overruled { by, instead })
}

fn of_other_operation(snapshot: &Snapshot, entry: &Entry<'_>, meant: &[KernelIx]) -> Option<MismatchKind> {
    let ops = Catalog::get().find(entry.op).map(|target| target.ops.clone()).unwrap_or_default();
    let serves = |kernel: &KernelIx| ops.iter().any(|&op| snapshot.kernels_for(op).any(|k| k == *kernel));
    (!meant.iter().any(serves)).then(|| wrong_operation(snapshot, meant[0], entry.op))
}

fn wrong_operation(snapshot: &Snapshot, kernel: KernelIx, found: &str) -> MismatchKind {
    let constraint = format!("the operation is {}", snapshot.kernel(kernel).operation);
    let reason = Reason::ConstraintFailed { constraint, found: found.to_owned() };
    MismatchKind::NotValid { reasons: vec![ReasonReport { message: reason.to_string(), reason }] }
}
