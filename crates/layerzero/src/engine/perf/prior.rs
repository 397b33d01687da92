//! Makes a prior out of measurements: what one machine measured, to ship to others.

use std::collections::{BTreeMap, HashSet};

use lz_model::{DeviceIx, DeviceSpec};
use lz_perfdb::{Mode, Outcome, Record, Timing};
pub use lz_predict::{PriorError, PriorFile, PriorTime, PriorTimes};

use crate::engine::Engine;

/// What a prior was made of.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltPrior {
    /// The file.
    pub file: PriorFile,
    /// Times that are in it.
    pub times: usize,
    /// Measurements that are not: of other devices, of kernels that are not known here, wrong ones and failures.
    pub left_out: usize,
}

/// Which call: in its own words, whether in a graph, with how many threads.
type Of<'a> = (&'a str, bool, u32);
/// What each kernel took for one call, run by run.
type Kernels<'a> = BTreeMap<&'a str, Vec<(&'a Record, &'a Timing)>>;

impl Engine {
    /// A prior of a device, made of the measurements of one or more runs on it: for each call and kernel the median over the
    /// runs. Measurements count that were taken on the device, or, where none was, on one with its compute capability.
    pub fn build_prior(&self, runs: &[Vec<Record>], device: DeviceIx) -> Option<BuiltPrior> {
        let spec = self.devices().get(usize::from(device.0))?.clone();
        let known: HashSet<String> = self.with_snapshot(|s| s.kernels().map(|(_, kernel)| kernel.id.clone()).collect());
        let records = of_device(runs, &spec);
        let wrong: HashSet<(&str, &str)> = records.iter().filter(|r| is_wrong(r)).map(|r| subject(r)).collect();
        let mut calls: BTreeMap<Of<'_>, Kernels<'_>> = BTreeMap::new();
        for &record in &records {
            let (Outcome::Ok(timing), key) = (&record.outcome, &record.key) else { continue };
            if known.contains(&key.kernel_id) && !wrong.contains(&subject(record)) {
                let of = (key.call.as_str(), key.mode == Mode::Graph, key.threads);
                calls.entry(of).or_default().entry(&key.kernel_id).or_default().push((record, timing));
            }
        }
        let used = calls.values().flat_map(|kernels| kernels.values().flatten());
        let mut file = PriorFile::new(anonymous(spec), used.map(|(r, _)| r.measured_at).max()?, runs.len());
        let mut left_out = runs.iter().map(Vec::len).sum::<usize>();
        for (&of, kernels) in &calls {
            // One kernel alone says nothing about which is faster.
            let (true, Ok(call), Ok(threads)) = (kernels.len() > 1, of.0.parse(), u16::try_from(of.2)) else {
                continue;
            };
            let times = PriorTimes { call, graph: of.1, threads, baseline: None, times: Vec::new() };
            file.calls.push(with_kernels(times, kernels, &mut file.kernels));
            left_out -= kernels.values().map(Vec::len).sum::<usize>();
        }
        let times = file.calls.iter().map(|call| call.times.len()).sum();
        Some(BuiltPrior { file, times, left_out })
    }
}

/// The measurements that count of a device, or of those like it.
fn of_device<'a>(runs: &'a [Vec<Record>], device: &DeviceSpec) -> Vec<&'a Record> {
    let id = super::device_id(device);
    let valid = || runs.iter().flatten().filter(|record| record.is_valid());
    let by_id: Vec<&Record> = valid().filter(|record| record.key.device_id == id).collect();
    match by_id.is_empty() {
        true => valid().filter(|record| device.sm.is_some_and(|sm| record.shape.sm_version == sm)).collect(),
        false => by_id,
    }
}

fn is_wrong(record: &Record) -> bool {
    matches!(record.outcome, Outcome::Wrong { .. })
}

/// The kernel and the operation.
fn subject(record: &Record) -> (&str, &str) {
    (&record.key.kernel_id, &record.key.operation)
}

/// A call with the times of its kernels. Kernels that are new are added to the list.
fn with_kernels(mut call: PriorTimes, kernels: &Kernels<'_>, list: &mut Vec<(String, String)>) -> PriorTimes {
    for (id, measured) in kernels {
        let Some((last, _)) = measured.last() else { continue };
        let at = place(list, (*id).to_owned(), last.provenance.kernel_version.clone().unwrap_or_default());
        call.times.push(merged(at, measured));
        call.baseline = call.baseline.or(last.baseline.then_some(at));
    }
    call
}

/// Where a kernel is in the list; it is added if it is not there. Of two versions the later one counts.
fn place(kernels: &mut Vec<(String, String)>, id: String, version: String) -> usize {
    match kernels.iter().position(|(known, _)| *known == id) {
        Some(at) => {
            kernels[at].1 = version;
            at
        }
        None => {
            kernels.push((id, version));
            kernels.len() - 1
        }
    }
}

/// The median over runs; the spread is what one run says, or what the runs differ by, whichever is more.
fn merged(kernel: usize, measured: &[(&Record, &Timing)]) -> PriorTime {
    let over = |of: &dyn Fn(&Timing) -> f64| lz_predict::median(measured.iter().map(|(_, t)| of(t)).collect());
    let median_us = over(&|t| t.median_us);
    let spread_us = over(&|t| t.spread_us).max(over(&|t| (t.median_us - median_us).abs()));
    let parts = measured.iter().all(|(_, t)| t.parts.is_some());
    let part = |of: fn(lz_predict::Parts) -> f64| rounded(over(&|t| t.parts.map_or(0.0, of)));
    match parts {
        true => {
            PriorTime::Parts(kernel, rounded(median_us), rounded(spread_us), part(|p| p.host_us), part(|p| p.device_us))
        }
        false => PriorTime::Whole(kernel, rounded(median_us), rounded(spread_us)),
    }
}

/// To hundredths of a microsecond: more is noise, and makes the file long.
fn rounded(us: f64) -> f64 {
    ((us * 100.0).round() / 100.0).max(0.01)
}

/// The device as a product, not as this one.
fn anonymous(device: DeviceSpec) -> DeviceSpec {
    DeviceSpec { uuid: None, versions: BTreeMap::new(), ..device }
}
