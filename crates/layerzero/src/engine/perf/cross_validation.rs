//! Cross-validation: each measured call is left out in turn, by itself or with all calls of its model, and decided by the others.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use lz_model::schema::DimKey;
use lz_model::{BindRules, CallSpec, Catalog, DeviceIx, Query};
use lz_perfdb::{Mode, Outcome, Record, Timing};
use lz_predict::{Model, Observation, Seen};
use lz_select::{Basis, SnapshotSpec};

use super::regret::{Regret, RegretRow};
use super::tune::label;
use crate::core::Draft;
use crate::engine::Engine;
use crate::error::Error;
use crate::services::perf::{device_id, impartial, observed, provenances};

/// What a measurement is of: the device, the mode, the number of threads, the call.
type Of<'a> = (&'a str, Mode, u32, &'a str);

/// What is left out with a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaveOut {
    /// The call alone: how good choices between measured sizes are.
    #[default]
    Call,
    /// Every call with its heads, head size and width: how good choices are for a model that was never measured.
    Model,
}

/// A measurement, as selection sees it.
struct Measured<'a> {
    record: &'a Record,
    call: CallSpec,
    class: Query,
    observation: Observation,
}

impl Measured<'_> {
    fn of(&self) -> Of<'_> {
        let key = &self.record.key;
        (&key.device_id, key.mode, key.threads, &key.call)
    }

    /// The sizes that a model sets: those that kernels are compiled for.
    fn geometry(&self) -> Vec<i64> {
        let query = &self.observation.query;
        let dims = Catalog::get().op(query.op()).schema().dims;
        dims.iter().zip(query.dims()).filter(|(dim, _)| dim.key == DimKey::Exact).map(|(_, size)| *size).collect()
    }

    fn timing(&self) -> Option<&Timing> {
        match &self.record.outcome {
            Outcome::Ok(timing) => Some(timing),
            Outcome::Wrong { .. } | Outcome::Failed { .. } => None,
        }
    }
}

/// How good choices between measured sizes are, by measurements that were left out.
#[derive(Clone, Debug, Default)]
pub struct CrossValidation {
    /// For each mode, how what would be chosen for a call compares with what was measured of it. Calls that cannot be decided
    /// by others are counted as left; those where what would be chosen has no time are impossible, with why.
    pub modes: Vec<(Mode, Regret)>,
    /// Measurements of the device whose kernels or calls are not known here.
    pub unknown: usize,
    /// Measurements that are out of date.
    pub outdated: usize,
}

impl Engine {
    /// Decides each call of these records by the others, as one that was not measured, or as one of a model that was not. The
    /// operator's rules hold, and kernels that were measured are taken to be there.
    ///
    /// Records are those of devices that are here, as far as they are not out of date; or those of `device`, or if there are
    /// none those of other devices like it.
    pub fn cross_validate(
        &self,
        records: &[Record],
        device: Option<DeviceIx>,
        leave_out: LeaveOut,
    ) -> Result<CrossValidation, Error> {
        let mut found = CrossValidation::default();
        let measured = self.measured(records, device, &mut found);
        let mut devices: BTreeMap<&str, Vec<&Measured<'_>>> = BTreeMap::new();
        for one in &measured {
            devices.entry(one.of().0).or_default().push(one);
        }
        let mut modes = [Mode::Eager, Mode::Graph].map(|mode| (mode, Regret::default()));
        for of_device in devices.values() {
            let mut draft = impartial(self);
            take_for_granted(&mut draft.spec, of_device);
            decide(&mut draft, of_device, leave_out, &mut modes)?;
        }
        modes.iter_mut().for_each(|(_, regret)| regret.sum_up());
        let is_there = |r: &Regret| !r.rows.is_empty() || r.left > 0 || !r.impossible.is_empty();
        found.modes = modes.into_iter().filter(|(_, regret)| is_there(regret)).collect();
        Ok(found)
    }

    /// The measurements that count here; those that do not are counted.
    fn measured<'a>(
        &self,
        records: &'a [Record],
        device: Option<DeviceIx>,
        found: &mut CrossValidation,
    ) -> Vec<Measured<'a>> {
        let devices = self.devices();
        let ids: Vec<String> = devices.iter().map(device_id).collect();
        let rules = BindRules::default();
        let (provenances, versions): (_, HashSet<(String, String)>) = self.with_snapshot(|snapshot| {
            let versions = snapshot.kernels().map(|(_, kernel)| (kernel.id.clone(), kernel.version.clone()));
            (provenances(snapshot, &devices), versions.collect())
        });
        let at = |record: &Record| {
            ids.iter().position(|id| *id == record.key.device_id).and_then(|at| u16::try_from(at).ok())
        };
        let is_current = |record: &Record| {
            let current = provenances.get(&(record.key.device_id.clone(), record.key.kernel_id.clone()));
            current.is_none_or(|current| record.provenance.stale_against(current).is_none())
        };
        let is_here = device.is_some_and(|wanted| records.iter().any(|record| at(record) == Some(wanted.0)));
        let of = |record: &Record| match device {
            Some(wanted) if is_here => at(record).filter(|at| *at == wanted.0),
            Some(wanted) => {
                let sm = devices.get(usize::from(wanted.0)).and_then(|device| device.sm).unwrap_or(0);
                (record.shape.sm_version == sm).then_some(wanted.0)
            }
            None => at(record),
        };
        let known = |record: &'a Record, device: DeviceIx| {
            let key = &record.key;
            // The version it was measured with, if that is here; of another machine's, whichever is.
            let as_measured = record.provenance.kernel_version.clone().map(|version| (key.kernel_id.clone(), version));
            let registered = || versions.iter().filter(|(id, _)| *id == key.kernel_id).max().cloned();
            let (_, version) = as_measured.filter(|known| versions.contains(known)).or_else(registered)?;
            let observation = observed(record, version, device, &devices, &rules)?;
            Some(Measured { record, call: key.call.parse().ok()?, class: observation.query.class(), observation })
        };
        let mut measured = Vec::new();
        for (record, at) in records.iter().filter(|r| r.is_valid()).filter_map(|r| Some((r, DeviceIx(of(r)?)))) {
            match known(record, at) {
                None => found.unknown += 1,
                // What another machine runs by now is not known.
                Some(_) if device.is_none() && !is_current(record) => found.outdated += 1,
                Some(one) => measured.push(one),
            }
        }
        measured
    }
}

/// Decides every call of a device by the others.
fn decide(
    draft: &mut Draft,
    measured: &[&Measured<'_>],
    leave_out: LeaveOut,
    modes: &mut [(Mode, Regret)],
) -> Result<(), Error> {
    let mut calls: BTreeMap<Of<'_>, Vec<&Measured<'_>>> = BTreeMap::new();
    for one in measured {
        calls.entry(one.of()).or_default().push(one);
    }
    for (of, here) in &calls {
        let Some((_, regret)) = modes.iter_mut().find(|(mode, _)| *mode == of.1) else { continue };
        let (query, class) = (&here[0].observation.query, &here[0].class);
        let alike = || measured.iter().filter(|m| m.class == *class);
        let geometry = here[0].geometry();
        let is_left_out = |m: &Measured<'_>| match leave_out {
            LeaveOut::Call => m.of() == *of,
            LeaveOut::Model => m.geometry() == geometry,
        };
        let others = alike().filter(|m| !is_left_out(m)).map(|m| m.observation.clone());
        draft.spec.perf = Arc::new(Model::new(others, &draft.spec.devices));
        let snapshot = draft.spec.build(draft.epoch).map_err(Error::Snapshot)?;
        let decision = snapshot.select(query);
        let chosen = decision.chosen().filter(|_| decision.basis == Basis::Predicted);
        let Some(chosen) = chosen.map(|c| &snapshot.kernel(c.kernel).id) else {
            regret.left += 1;
            continue;
        };
        // Who is wrong anywhere in a class serves none of it.
        let is_wrong =
            |id: &str| alike().any(|m| m.observation.kernel == id && matches!(m.observation.seen, Seen::Wrong(_)));
        let right: Vec<_> = here.iter().copied().filter(|m| !is_wrong(&m.observation.kernel)).collect();
        match right.iter().find(|m| m.observation.kernel == *chosen).and_then(|chosen| row(chosen, &right)) {
            Some(row) => regret.rows.push(row),
            None => {
                let call = here[0].call.clone();
                regret
                    .impossible
                    .push((call, format!("{chosen} would be chosen, which was wrong, failed or was not measured")));
            }
        }
    }
    Ok(())
}

/// What was measured is there, whatever this process finds, and nothing else is.
fn take_for_granted(spec: &mut SnapshotSpec, measured: &[&Measured<'_>]) {
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
    let timed = || here.iter().filter_map(|m| Some((m, m.timing()?)));
    let (best, best_timing) = timed().min_by(|a, b| a.1.median_us.total_cmp(&b.1.median_us))?;
    let baseline = timed().find(|(m, _)| m.record.baseline);
    let (timing, noise) = (chosen.timing()?, |t: &Timing| t.spread_us / t.median_us);
    Some(RegretRow {
        op: Catalog::get().op(chosen.observation.query.op()).id(),
        label: label(&chosen.call),
        call: chosen.call.clone(),
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
