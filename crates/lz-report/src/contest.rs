//! One call and the kernels that were measured on it.

use std::collections::BTreeMap;

use lz_model::CallSpec;
use serde::{Deserialize, Serialize};

use crate::shape;

/// What became of measuring a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It was right, and has a time.
    #[default]
    Ok,
    /// Its result differed from the reference.
    Wrong,
    /// It raised.
    Failed,
}

/// A kernel that was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its id.
    pub kernel: String,
    /// What became of it.
    pub outcome: Outcome,
    /// The median, in microseconds.
    #[serde(default)]
    pub median_us: Option<f64>,
    /// The 95th percentile.
    #[serde(default)]
    pub p95_us: Option<f64>,
    /// The noise: differences below it are ties.
    #[serde(default)]
    pub spread_us: Option<f64>,
    /// What the first call took more: compilation, caches.
    #[serde(default)]
    pub warmup_ms: Option<f64>,
    /// How many rounds stand behind the times.
    #[serde(default)]
    pub samples: u32,
    /// What went wrong.
    #[serde(default)]
    pub error: Option<String>,
    /// Whether it is what torch alone would run.
    #[serde(default)]
    pub baseline: bool,
    /// Whether it is the one that runs.
    #[serde(default)]
    pub chosen: bool,
}

impl Candidate {
    /// One that was right.
    pub fn ok(kernel: impl Into<String>, median_us: f64, p95_us: f64, spread_us: f64, samples: u32) -> Candidate {
        let (median_us, p95_us, spread_us) = (Some(median_us), Some(p95_us), Some(spread_us));
        Candidate { kernel: kernel.into(), median_us, p95_us, spread_us, samples, ..Candidate::default() }
    }

    /// One whose result differed from the reference.
    pub fn wrong(kernel: impl Into<String>, error: impl Into<String>) -> Candidate {
        let (kernel, error) = (kernel.into(), Some(error.into()));
        Candidate { kernel, error, outcome: Outcome::Wrong, ..Candidate::default() }
    }

    /// One that raised.
    pub fn failed(kernel: impl Into<String>, error: impl Into<String>) -> Candidate {
        Candidate { outcome: Outcome::Failed, ..Candidate::wrong(kernel, error) }
    }

    /// The same; whether it is what torch alone would run.
    pub fn baseline(mut self, baseline: bool) -> Candidate {
        self.baseline = baseline;
        self
    }

    /// The same; what its first call took more.
    pub fn warmup(mut self, warmup_ms: Option<f64>) -> Candidate {
        self.warmup_ms = warmup_ms;
        self
    }

    /// Its median, if it was right and that is a time.
    pub fn time(&self) -> Option<f64> {
        self.median_us.and_then(real).filter(|_| self.outcome == Outcome::Ok)
    }

    /// Its noise; zero when not known.
    pub(crate) fn spread(&self) -> f64 {
        self.spread_us.and_then(real).unwrap_or(0.0)
    }
}

/// A time that can have been measured: between a femtosecond and thirty years, in microseconds.
fn real(us: f64) -> Option<f64> {
    (1e-9..=1e15).contains(&us).then_some(us)
}

/// A call on a device, the kernels measured on it, and which of them runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contest {
    /// The device, by [`Machine::id`](crate::Machine::id).
    pub device: String,
    /// The operation the call turned out to be.
    pub op: String,
    /// Its sizes, in short: `batch 2 · seq 1024 · heads 32/8 · dim 128`.
    pub label: String,
    /// The dtype of its data.
    pub dtype: String,
    /// What else tells it from other calls of these sizes: parameters, layout, optional tensors.
    #[serde(default)]
    pub variant: String,
    /// How the kernels were run: `eager` or `graph`.
    pub mode: String,
    /// Sizes by the schema's names.
    #[serde(default)]
    pub dims: BTreeMap<String, i64>,
    /// The call.
    pub call: CallSpec,
    /// The kernels.
    pub candidates: Vec<Candidate>,
    /// The least time the device can do that work in.
    #[serde(default)]
    pub floor_us: Option<f64>,
    /// The kernel that runs.
    #[serde(default)]
    pub chosen: Option<String>,
    /// The fastest of the others.
    #[serde(default)]
    pub runner_up: Option<String>,
    /// The time of torch's own kernel over that of the chosen one: 2 is twice as fast.
    #[serde(default)]
    pub times_baseline: Option<f64>,
}

impl Contest {
    /// A call on which nothing was measured yet. A call that does not fit the operation is described by its tensors.
    pub fn new(call: CallSpec, device: impl Into<String>, mode: impl Into<String>) -> Contest {
        let shape = shape::of(&call);
        Contest {
            device: device.into(),
            op: shape.op,
            label: shape.label,
            dtype: shape.dtype,
            variant: shape.variant,
            mode: mode.into(),
            dims: shape.dims,
            call,
            candidates: Vec::new(),
            floor_us: None,
            chosen: None,
            runner_up: None,
            times_baseline: None,
        }
    }

    /// Adds a kernel.
    pub fn candidate(mut self, candidate: Candidate) -> Contest {
        self.candidates.push(candidate);
        self
    }

    /// Says the least time the device can do the work in.
    pub fn floor(mut self, floor_us: Option<f64>) -> Contest {
        self.floor_us = floor_us;
        self
    }

    /// Says which kernel runs, after all of them were added: that one, or the fastest. Sorts them, fastest first.
    pub fn settled(mut self, chosen: Option<&str>) -> Contest {
        let time = |candidate: &Candidate| candidate.time().unwrap_or(f64::INFINITY);
        self.candidates.sort_by(|a, b| time(a).total_cmp(&time(b)).then_with(|| a.kernel.cmp(&b.kernel)));
        self.chosen = chosen.map(str::to_owned).or_else(|| self.fastest().map(|c| c.kernel.clone()));
        for candidate in &mut self.candidates {
            candidate.chosen = self.chosen.as_ref() == Some(&candidate.kernel);
        }
        let timed = || self.candidates.iter().filter(|c| c.time().is_some());
        self.runner_up = timed().find(|c| !c.chosen).map(|c| c.kernel.clone());
        self.times_baseline =
            self.baseline_kernel().and_then(Candidate::time).zip(self.chosen_us()).map(|(d, c)| d / c);
        self
    }

    /// The kernel with the least time.
    pub fn fastest(&self) -> Option<&Candidate> {
        let timed = self.candidates.iter().filter_map(|c| Some((c, c.time()?)));
        timed.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(candidate, _)| candidate)
    }

    /// What torch alone would run: the fastest of the baselines that work, or one that does not.
    pub fn baseline_kernel(&self) -> Option<&Candidate> {
        let time = |c: &Candidate| c.time().unwrap_or(f64::INFINITY);
        self.candidates.iter().filter(|c| c.baseline).min_by(|a, b| time(a).total_cmp(&time(b)))
    }

    /// The time of the kernel that runs, if it was measured.
    pub fn chosen_us(&self) -> Option<f64> {
        self.winner().filter(|c| c.chosen).and_then(Candidate::time)
    }

    /// The kernel that runs if it has a time, otherwise the fastest.
    pub(crate) fn winner(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|c| c.chosen && c.time().is_some()).or_else(|| self.fastest())
    }

    /// The time of the kernel that runs over the least the device can do it in.
    pub(crate) fn over_floor(&self) -> Option<f64> {
        self.chosen_us().zip(self.least()).map(|(us, floor)| us / floor)
    }

    /// [`Contest::floor_us`], if that is a time.
    pub(crate) fn least(&self) -> Option<f64> {
        self.floor_us.and_then(real)
    }

    /// [`Contest::times_baseline`], if that is a ratio.
    pub(crate) fn speedup(&self) -> Option<f64> {
        self.times_baseline.filter(|ratio| ratio.is_finite() && *ratio > 0.0)
    }

    /// Whether another kernel than the baseline runs, where both are known.
    pub(crate) fn beats_default(&self) -> Option<bool> {
        self.baseline_kernel().and_then(Candidate::time)?;
        self.winner().filter(|c| c.chosen).map(|c| !c.baseline)
    }

    /// Whether a kernel is faster than the one that runs by more than the noise of both.
    pub(crate) fn passes_over(&self) -> Option<&Candidate> {
        let (chosen, fastest) = (self.winner()?, self.fastest()?);
        let noise = chosen.spread().max(fastest.spread());
        (chosen.time()? - fastest.time()? > noise && chosen.kernel != fastest.kernel).then_some(fastest)
    }
}
