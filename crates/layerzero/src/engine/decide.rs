//! What selection decides for calls, to be written down.

use std::collections::HashMap;
use std::sync::Arc;

use lz_model::{CallSpec, Context, DeviceIx, DeviceSpec, KernelDescriptor, Query};
use lz_select::{Basis, Candidate, Decision, Restriction, Snapshot, SnapshotSpec};

use super::Engine;
use crate::core::{Scope, no_kernel};
use crate::documents::{Locked, Lockfile, canonical};
use crate::error::Error;

/// What was decided for a query.
pub(crate) struct Decided {
    pub kernel: Arc<KernelDescriptor>,
    pub time_us: Option<f64>,
    pub baseline: Option<String>,
    pub baseline_us: Option<f64>,
    pub basis: &'static str,
}

/// Four digits say what a time is; further ones are different every time it is measured.
pub(crate) fn rounded(us: f64) -> Option<f64> {
    format!("{us:.3e}").parse().ok().filter(|us: &f64| us.is_finite() && *us >= 0.0)
}

impl Decided {
    pub fn new(snapshot: &Snapshot, query: &Query) -> Result<Decided, Error> {
        let decision = snapshot.select(query);
        // What a rollout gives to its candidate is given for the time of the rollout.
        let tried = usize::from(decision.rollout.is_some());
        let chosen = decision.ranked().nth(tried).or_else(|| decision.chosen());
        let chosen = chosen.ok_or_else(|| no_kernel(snapshot, &decision))?;
        let time = |candidate: &Candidate| candidate.estimate.and_then(|estimate| rounded(estimate.median_us));
        let baseline = decision.baseline();
        Ok(Decided {
            kernel: snapshot.kernel(chosen.kernel).clone(),
            time_us: time(chosen),
            baseline: baseline.map(|candidate| snapshot.kernel(candidate.kernel).id.clone()),
            baseline_us: baseline.and_then(time),
            basis: basis(&decision),
        })
    }

    fn is_of(&self, other: &Decided) -> bool {
        self.kernel.id == other.kernel.id && self.kernel.version == other.kernel.version
    }
}

fn basis(decision: &Decision) -> &'static str {
    match decision.basis {
        _ if decision.overridden_by.is_some() => "rule",
        _ if decision.pinned_by.is_some() => "pinned",
        Basis::Measured => "measured",
        Basis::Predicted => "predicted",
        Basis::Prior => "prior",
        Basis::Declared => "declared",
        Basis::Locked => "locked",
    }
}

/// A call that was decided for: in its canonical words, and what was decided. With a second decision for calls under
/// graph capture where that is another one.
pub(crate) struct DecidedCall {
    pub call: CallSpec,
    pub query: Query,
    pub decided: Decided,
    pub captured: Option<(Query, Decided)>,
}

/// Decides a call in a scope.
pub(super) fn decide_call(scope: &Scope<'_>, call: &CallSpec, device: DeviceIx) -> Result<DecidedCall, Error> {
    let bind = |capturing| {
        let named = call.named(device, Context { capturing, ..Context::default() });
        scope.bind(&call.op, &named).map(|(_, bound)| bound)
    };
    let snapshot = scope.snapshot();
    let bound = bind(false)?;
    let decided = Decided::new(snapshot, &bound.query)?;
    let captures = snapshot.device(device).is_some_and(|device| device.supports("graphs"));
    let captured = if captures { Some(bind(true)?.query) } else { None };
    let captured = captured.and_then(|query| Some((query, Decided::new(snapshot, &query).ok()?)));
    let captured = captured.filter(|(_, other)| !other.is_of(&decided));
    Ok(DecidedCall { call: canonical(call, &bound), query: bound.query, decided, captured })
}

/// Counts every kernel that is compiled on first use as compiled, unless the settings forbid compiling.
fn compile_all(spec: &mut SnapshotSpec) {
    if spec.settings.allow_jit {
        spec.warm = None;
        spec.health.values_mut().for_each(|health| health.cold = false);
    }
}

impl Engine {
    /// A scope as it would be without lockfiles, on a good day: nothing is degraded, and what is compiled on first use
    /// was used before.
    pub(super) fn fresh(&self, scope: &Scope<'_>, leave_tables_out: bool) -> Result<Scope<'_>, Error> {
        let mut draft = self.draft_in(scope.overlay());
        draft.pinned.leave_out(leave_tables_out);
        draft.repin();
        draft.spec.restriction = Restriction::default();
        compile_all(&mut draft.spec);
        Ok(Scope::of(self, Arc::new(draft.build()?), scope.overlay()))
    }

    /// A scope as it would be if all that is compiled on first use had been. A program that is itself being compiled
    /// decides by it: it runs for longer than a kernel takes to compile.
    pub fn as_compiled(&self, scope: &Scope<'_>) -> Result<Scope<'_>, Error> {
        let mut draft = self.draft_in(scope.overlay());
        compile_all(&mut draft.spec);
        Ok(Scope::of(self, Arc::new(draft.build()?), scope.overlay()))
    }

    /// What is decided for these calls, as a lockfile. A lockfile in force is left aside: to lock anew is to decide anew.
    pub fn lockfile(&self, calls: &[(CallSpec, DeviceIx)]) -> Result<Lockfile, Error> {
        let (lockfile, left_out) = self.lockfile_of(calls)?;
        left_out.into_iter().next().map_or(Ok(lockfile), |(_, error)| Err(error))
    }

    /// As [`Engine::lockfile`], with calls that cannot be made or served left out: their numbers, and why.
    #[allow(clippy::type_complexity)] // a lockfile and what is not in it
    pub fn lockfile_of(&self, calls: &[(CallSpec, DeviceIx)]) -> Result<(Lockfile, Vec<(usize, Error)>), Error> {
        let fresh = self.fresh(&self.process(), false)?;
        let snapshot = fresh.snapshot();
        let mut lockfile = Lockfile { layerzero: env!("CARGO_PKG_VERSION").to_owned(), ..Lockfile::default() };
        lockfile.libraries.clone_from(&snapshot.spec().versions);
        let mut left_out = Vec::new();
        let mut seen: HashMap<u64, Vec<Query>> = HashMap::new();
        for (i, (call, device)) in calls.iter().enumerate() {
            let decided = match decide_call(&fresh, call, *device) {
                Ok(decided) => decided,
                Err(error) => {
                    left_out.push((i, error));
                    continue;
                }
            };
            let alike = seen.entry(decided.query.fingerprint()).or_default();
            if alike.contains(&decided.query) {
                continue;
            }
            alike.push(decided.query);
            let Some(device) = snapshot.device(*device) else { continue };
            note(&mut lockfile, snapshot, device, decided);
        }
        lockfile.sort();
        Ok((lockfile, left_out))
    }
}

/// Adds a decision to a lockfile, and what it was made with.
fn note(lockfile: &mut Lockfile, snapshot: &Snapshot, device: &DeviceSpec, decided: DecidedCall) {
    lockfile.devices.entry(device.signature()).or_insert_with(|| device.name.clone());
    lockfile.libraries.extend(device.versions.iter().map(|(name, version)| (name.clone(), version.clone())));
    let DecidedCall { call, decided, captured, .. } = decided;
    let captured = captured.map(|(_, decided)| (true, decided));
    for (graph, decided) in [(false, decided)].into_iter().chain(captured) {
        if let Some(backend) = snapshot.spec().backends.get(&decided.kernel.backend).map(|b| &b.descriptor) {
            lockfile.backends.insert(backend.name.clone(), backend.version.clone());
            if !backend.capabilities_hash.is_empty() {
                lockfile.capabilities.insert(backend.name.clone(), backend.capabilities_hash.clone());
            }
        }
        lockfile.entries.push(Locked {
            device: device.signature(),
            call: call.clone(),
            graph,
            kernel: decided.kernel.id.clone(),
            version: Some(decided.kernel.version.clone()),
            time_us: decided.time_us,
            baseline: decided.baseline,
            baseline_us: decided.baseline_us,
            basis: Some(decided.basis.to_owned()),
        });
    }
}
