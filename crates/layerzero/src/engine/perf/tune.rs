//! Tuning: every viable kernel of every wanted call is checked, timed side by side, and remembered.

use std::time::Duration;

use lz_measure::Timing;
use lz_model::{CallSpec, DeviceIx, Query};
use lz_perfdb::Mode;
use lz_select::{Basis, Snapshot};
use serde::Serialize;

pub use crate::report::label;

/// A call to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The call.
    pub call: CallSpec,
    /// On which device.
    pub device: DeviceIx,
    /// Eager, or replayed in a graph.
    pub mode: Mode,
    /// How much it matters against others: how often it is made.
    pub weight: f64,
}

impl Wanted {
    /// An eager call on the first device.
    pub fn new(call: CallSpec) -> Wanted {
        Wanted { call, device: DeviceIx(0), mode: Mode::Eager, weight: 1.0 }
    }
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct TuneOptions {
    /// How long it may take altogether.
    pub budget: Duration,
    /// How many rounds a call gets at least; more where it is worth the time.
    pub samples: u32,
    /// Measure again what was measured before.
    pub force: bool,
    /// Whether results are kept; what is only asked for (regret) is not.
    pub keep: bool,
    /// What the order of candidates in a round is drawn from.
    pub seed: u64,
}

impl Default for TuneOptions {
    fn default() -> Self {
        TuneOptions { budget: Duration::from_secs(60), samples: 8, force: false, keep: true, seed: 0 }
    }
}

/// How far tuning has come.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// Calls that were visited.
    pub done: usize,
    /// Calls there are.
    pub calls: usize,
    /// Seconds spent.
    pub spent_s: f64,
    /// Seconds left, as far as can be said.
    pub left_s: f64,
    /// What is being measured.
    pub current: String,
}

/// What was found out about one call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tuned {
    /// The operation.
    pub op: &'static str,
    /// The call, as it is written down.
    pub call: CallSpec,
    /// The call in a few words.
    pub label: String,
    /// Eager or graph.
    pub mode: Mode,
    /// What plain torch runs.
    pub baseline: Option<String>,
    /// Every candidate that was timed.
    pub timings: Vec<Timing>,
    /// Candidates that gave wrong results or failed, and what was seen.
    pub out: Vec<(String, String)>,
    /// How much is expected to be lost by going by this.
    pub loss: f64,
    /// The kernel that serves such calls from now on.
    pub chosen: Option<String>,
    /// What that choice goes by.
    pub basis: Option<Basis>,
    /// The one that would without it.
    pub runner_up: Option<String>,
    /// How many times faster than plain torch it is.
    pub times_baseline: Option<f64>,
}

/// What tuning did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TuneReport {
    /// What torch calls the device it was measured on; empty where nothing was asked for.
    pub device: String,
    /// The calls that were measured, in the order they were asked for.
    pub tuned: Vec<Tuned>,
    /// Calls that were measured before and are as good as settled.
    pub known: usize,
    /// Calls the budget did not suffice for.
    pub left: Vec<CallSpec>,
    /// Calls that could not be measured, and why.
    pub impossible: Vec<(CallSpec, String)>,
    /// Whether somebody stopped it.
    pub interrupted: bool,
    /// Seconds spent.
    pub spent_s: f64,
    /// Why results were not kept, if they were not.
    pub not_kept: Option<String>,
}

impl Tuned {
    /// What is chosen now.
    pub(super) fn decide(&mut self, snapshot: &Snapshot, query: &Query) {
        let decision = snapshot.select(query);
        let mut ranked = decision.ranked().map(|c| snapshot.kernel(c.kernel).id.clone());
        (self.chosen, self.runner_up, self.basis) = (ranked.next(), ranked.next(), Some(decision.basis));
        let time = |kernel: &Option<String>| {
            let timing = self.timings.iter().find(|t| Some(&t.candidate) == kernel.as_ref())?;
            timing.stats.as_ref().map(|s| s.median_us)
        };
        self.times_baseline = time(&self.baseline).zip(time(&self.chosen)).map(|(default, chosen)| default / chosen);
    }
}
