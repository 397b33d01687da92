//! Regret: how far the choice is from the best in hindsight, on calls that were not measured for it.

use lz_measure::Timing;
use lz_model::CallSpec;
use serde::Serialize;

use super::bench::Bench;
use super::tune::{Progress, TuneOptions, Tuned, Wanted, label};
use crate::engine::Engine;
use crate::error::Error;

/// One call: what was chosen, what would have been best, what plain torch does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RegretRow {
    /// The operation.
    pub op: &'static str,
    /// The call.
    pub call: CallSpec,
    /// The call in a few words.
    pub label: String,
    /// The kernel that was chosen.
    pub chosen: String,
    /// What the choice went by.
    pub basis: lz_select::Basis,
    /// Its time, in microseconds.
    pub chosen_us: f64,
    /// The fastest one.
    pub best: String,
    /// Its time.
    pub best_us: f64,
    /// What plain torch runs.
    pub baseline: Option<String>,
    /// Its time.
    pub baseline_us: Option<f64>,
    /// Chosen time over best time.
    pub over_best: f64,
    /// Baseline time over chosen time: how many times faster than plain torch.
    pub times_baseline: Option<f64>,
    /// Noise of the comparison, relative.
    pub noise: f64,
}

/// Regret over many calls.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Regret {
    /// What torch calls the device; empty where calls of several are judged.
    pub device: String,
    /// Every call.
    pub rows: Vec<RegretRow>,
    /// Geometric mean of chosen over best.
    pub geomean: f64,
    /// The worst.
    pub worst: f64,
    /// Geometric mean of how many times faster than plain torch.
    pub times_baseline: f64,
    /// The least of them.
    pub least_times_baseline: f64,
    /// The same where another kernel than torch's own was chosen; 1 when none was.
    pub times_baseline_where_other: f64,
    /// Calls that could not be measured, and why.
    pub impossible: Vec<(CallSpec, String)>,
    /// Calls the budget did not suffice for.
    pub left: usize,
    /// Whether somebody stopped it.
    pub interrupted: bool,
}

fn geomean(values: impl Iterator<Item = f64>) -> f64 {
    let logs: Vec<f64> = values.map(f64::ln).collect();
    if logs.is_empty() { 1.0 } else { (logs.iter().sum::<f64>() / logs.len() as f64).exp() }
}

impl Engine {
    /// Measures every candidate of these calls, and compares what would be chosen with the best in hindsight. Nothing of
    /// it is kept: what is held out stays held out.
    pub fn regret(
        &self,
        wanted: &[Wanted],
        options: &TuneOptions,
        bench: &mut dyn Bench,
        tell: &mut dyn FnMut(&Progress) -> bool,
    ) -> Result<Regret, Error> {
        let options = TuneOptions { keep: false, force: true, ..options.clone() };
        let report = self.tune(wanted, &options, bench, tell)?;
        let mut regret = Regret {
            device: report.device,
            impossible: report.impossible,
            left: report.left.len(),
            interrupted: report.interrupted,
            ..Regret::default()
        };
        regret.rows = report.tuned.iter().filter_map(row).collect();
        regret.sum_up();
        Ok(regret)
    }
}

impl Regret {
    /// Works out what the rows come to.
    pub(super) fn sum_up(&mut self) {
        self.geomean = geomean(self.rows.iter().map(|r| r.over_best));
        self.worst = self.rows.iter().map(|r| r.over_best).fold(1.0, f64::max);
        let times = || self.rows.iter().filter_map(|r| r.times_baseline);
        self.least_times_baseline = times().fold(f64::INFINITY, f64::min);
        let other = self.rows.iter().filter(|r| r.baseline.as_ref().is_some_and(|b| *b != r.chosen));
        let (all, where_other) = (geomean(times()), geomean(other.filter_map(|r| r.times_baseline)));
        (self.times_baseline, self.times_baseline_where_other) = (all, where_other);
    }
}

fn row(tuned: &Tuned) -> Option<RegretRow> {
    let (chosen, basis) = (tuned.chosen.clone()?, tuned.basis?);
    let stats = |name: &str| tuned.timings.iter().find(|t| t.candidate == name).and_then(|t| t.stats.as_ref());
    let faster = |a: &&Timing, b: &&Timing| {
        let time = |t: &Timing| t.stats.as_ref().map_or(f64::INFINITY, |s| s.median_us);
        time(a).total_cmp(&time(b))
    };
    let best = tuned.timings.iter().filter(|t| t.stats.is_some()).min_by(faster)?;
    let (chosen_stats, best_stats) = (stats(&chosen)?, best.stats.as_ref()?);
    let baseline_us = tuned.baseline.as_deref().and_then(stats).map(|s| s.median_us);
    let noise = |s: &lz_measure::Stats| s.spread_us / s.median_us;
    Some(RegretRow {
        op: tuned.op,
        call: tuned.call.clone(),
        label: label(&tuned.call),
        chosen_us: chosen_stats.median_us,
        basis,
        best: best.candidate.clone(),
        best_us: best_stats.median_us,
        baseline: tuned.baseline.clone(),
        baseline_us,
        over_best: chosen_stats.median_us / best_stats.median_us,
        times_baseline: baseline_us.map(|t| t / chosen_stats.median_us),
        noise: noise(chosen_stats).max(noise(best_stats)),
        chosen,
    })
}
