//! How well measurements foretell each other: each call is left out in turn and decided by the others.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use lz_model::{CallSpec, Catalog, DeviceIx, Query};
use lz_perfdb::model::{Model, Observation};
use lz_perfdb::{Mode, Outcome, Record, Timing};
use lz_select::{Basis, SnapshotSpec};

use super::regret::{Regret, RegretRow};
use super::tune::label;
use super::{context_of, device_id, seen};
use crate::engine::Engine;
use crate::error::Error;

/// What a measurement is of: the device, the mode, the call.
type Of<'a> = (&'a str, Mode, &'a str);

/// A measurement, as selection sees it.
struct Measured<'a> {
    record: &'a Record,
    query: Query,
    class: Query,
    observation: Observation,
}

impl Measured<'_> {
    fn of(&self) -> Of<'_> {
        let key = &self.record.key;
        (&key.device_id, key.mode, &key.call)
    }

    fn timing(&self) -> Option<&Timing> {
        match &self.record.outcome {
            Outcome::Ok(timing) => Some(timing),
            Outcome::Wrong { .. } | Outcome::Failed { .. } => None,
        }
    }
}

impl Engine {
    /// What would be chosen for each call of these records if it had not been measured, and how that compares with what was
    /// measured of it, for each mode. The operator's rules hold, and kernels that were measured are taken to be there. Records of devices that are not here are left out, or taken
    /// to be of `device`. Calls that cannot be decided by others are counted as left.
    pub fn foretold(&self, records: &[Record], device: Option<DeviceIx>) -> Result<Vec<(Mode, Regret)>, Error> {
        let measured = self.measured(records, device);
        let mut draft = self.impartial();
        take_for_granted(&mut draft.spec, &measured);
        let mut calls: BTreeMap<Of<'_>, Vec<&Measured<'_>>> = BTreeMap::new();
        for one in &measured {
            calls.entry(one.of()).or_default().push(one);
        }
        let mut found = [Mode::Eager, Mode::Graph].map(|mode| (mode, Regret::default()));
        for (of, here) in &calls {
            let Some((_, regret)) = found.iter_mut().find(|(mode, _)| *mode == of.1) else { continue };
            let (query, class) = (&here[0].query, &here[0].class);
            let others = measured.iter().filter(|m| m.class == *class && m.of().0 == of.0 && m.of() != *of);
            draft.spec.perf = Arc::new(Model::new(others.map(|m| m.observation.clone()), &draft.spec.devices));
            let snapshot = draft.spec.build(draft.epoch).map_err(Error::Snapshot)?;
            let decision = snapshot.select(query);
            let mut ranked = decision.ranked().map(|c| snapshot.kernel(c.kernel).id.as_str());
            let chosen =
                ranked.find_map(|id| here.iter().find(|m| m.record.key.kernel_id == id && m.timing().is_some()));
            match chosen.filter(|_| decision.basis == Basis::Predicted).and_then(|chosen| row(chosen, here)) {
                Some(row) => regret.rows.push(row),
                None => regret.left += 1,
            }
        }
        found.iter_mut().for_each(|(_, regret)| regret.sum_up());
        Ok(found.into_iter().filter(|(_, regret)| !regret.rows.is_empty() || regret.left > 0).collect())
    }

    /// The measurements that count here.
    fn measured<'a>(&self, records: &'a [Record], device: Option<DeviceIx>) -> Vec<Measured<'a>> {
        let devices = self.devices();
        let ids: Vec<String> = devices.iter().map(device_id).collect();
        let (rules, versions): (_, HashMap<String, String>) = self.with_snapshot(|snapshot| {
            let versions = snapshot.kernels().map(|(_, kernel)| (kernel.id.clone(), kernel.version.clone()));
            (snapshot.spec().settings.bind_rules(), versions.collect())
        });
        let measured = |record: &'a Record| {
            let key = &record.key;
            let named = || ids.iter().position(|id| *id == key.device_id).and_then(|at| u16::try_from(at).ok());
            let device = device.or_else(|| named().map(DeviceIx))?;
            let call: CallSpec = key.call.parse().ok()?;
            let named = call.named(device, context_of(key.mode));
            let resolved = Catalog::get().resolve(&call.op, &named, &rules, |ix| devices.get(usize::from(ix.0)));
            let query = resolved.ok()?.1.query;
            let observation = Observation {
                query,
                kernel: key.kernel_id.clone(),
                version: versions.get(&key.kernel_id)?.clone(),
                default: record.baseline,
                seen: seen(&record.outcome),
            };
            Some(Measured { record, query, class: query.class(), observation })
        };
        records.iter().filter(|record| record.is_valid()).filter_map(measured).collect()
    }
}

/// What was measured is there, whatever this process finds, and nothing else is.
fn take_for_granted(spec: &mut SnapshotSpec, measured: &[Measured<'_>]) {
    let ids: HashSet<&str> = measured.iter().map(|m| m.record.key.kernel_id.as_str()).collect();
    spec.kernels.retain(|kernel| ids.contains(kernel.id.as_str()));
    for kernel in &mut spec.kernels {
        Arc::make_mut(kernel).requires.clear();
        if let Some(backend) = spec.backends.get_mut(&kernel.backend) {
            backend.unavailable = None;
            backend.descriptor.requires.clear();
        }
    }
}

fn row(chosen: &Measured<'_>, here: &[&Measured<'_>]) -> Option<RegretRow> {
    let call: CallSpec = chosen.record.key.call.parse().ok()?;
    let timed = || here.iter().filter_map(|m| Some((m, m.timing()?)));
    let (best, best_timing) = timed().min_by(|a, b| a.1.median_us.total_cmp(&b.1.median_us))?;
    let baseline = timed().find(|(m, _)| m.record.baseline);
    let (timing, noise) = (chosen.timing()?, |t: &Timing| t.spread_us / t.median_us);
    Some(RegretRow {
        op: Catalog::get().op(chosen.query.op()).id(),
        label: label(&call),
        call,
        chosen: chosen.record.key.kernel_id.clone(),
        basis: Basis::Predicted,
        chosen_us: timing.median_us,
        best: best.record.key.kernel_id.clone(),
        best_us: best_timing.median_us,
        baseline: baseline.map(|(m, _)| m.record.key.kernel_id.clone()),
        baseline_us: baseline.map(|(_, t)| t.median_us),
        over_best: timing.median_us / best_timing.median_us,
        times_baseline: baseline.map(|(_, t)| t.median_us / timing.median_us),
        noise: noise(timing).max(noise(best_timing)),
    })
}
