//! What selection may ask about speed. Implemented by the performance model (`lz-predict`); empty by default.

use std::sync::Arc;

use lz_model::{DeviceIx, Facts, KernelDescriptor, OpIx, Reason};
use serde::Serialize;

use crate::graphs::Covers;
use crate::proof::{Evidence, KernelVersion};

/// The share by which a kernel must be ahead of what plain torch runs, beyond the noise, where not both were measured: between
/// two measured sizes there may be a third where it is slower. Cross-validated, it costs 0.3% in graphs and nothing eager, and the
/// call that is slowest beside plain torch takes 1.5 times as long as that instead of 1.75.
const MARGIN: f64 = 0.03;

/// Where a time comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EstimateKind {
    /// Measured at this very shape bucket.
    Measured,
    /// Interpolated between measured shapes.
    Predicted,
    /// Beyond the measured shapes: the less certain the further away.
    Extrapolated,
    /// By what was measured on another machine, and ships with LayerZero.
    Prior,
}

/// A time of the host, or of the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Side {
    /// Median time in microseconds.
    pub median_us: f64,
    /// As [`Estimate::apart_us`].
    pub apart_us: Option<f64>,
}

/// What a kernel takes of the host and of the device, which work at the same time: the slower one sets the pace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sides {
    /// What the host takes.
    pub host: Side,
    /// What the device takes.
    pub device: Side,
}

/// How long a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Median time in microseconds.
    pub median_us: f64,
    /// How far off the median may be.
    pub spread_us: f64,
    /// Where the time goes by how the kernel compares with another, which is the same for all candidates that have this:
    /// differences among them below it are noise. Less than the spread, since what disturbs one of them disturbs all.
    pub apart_us: Option<f64>,
    /// What it is made of, where host and device were predicted each by itself.
    #[serde(skip)]
    pub sides: Option<Sides>,
    /// How many measurements stand behind it.
    pub samples: u32,
    /// Measured or predicted.
    pub kind: EstimateKind,
    /// Whether there is enough behind it to overrule declared priorities.
    pub trusted: bool,
}

impl Estimate {
    /// Whether all of it is numbers one can reckon with.
    pub(crate) fn is_finite(&self) -> bool {
        let sides = self.sides.iter().flat_map(|s| [&s.host, &s.device]);
        let all = sides.flat_map(|s| [Some(s.median_us), s.apart_us]);
        all.chain([Some(self.median_us), Some(self.spread_us), self.apart_us]).flatten().all(f64::is_finite)
    }

    /// σ(a − b): differences to another's time up to this are noise.
    ///
    /// | the two times | σ(a − b) |
    /// |---|---|
    /// | both measured here, side by side | max(spread a, spread b) |
    /// | both by how they compare with a third | √(apart a² + apart b²) |
    /// | else: they err each for itself | √(spread a² + spread b²) |
    pub fn noise_to(&self, other: &Estimate) -> f64 {
        if (self.kind, other.kind) == (EstimateKind::Measured, EstimateKind::Measured) {
            return self.spread_us.max(other.spread_us);
        }
        let apart = self.apart_us.zip(other.apart_us);
        apart.map_or_else(|| self.spread_us.hypot(other.spread_us), |(a, b)| a.hypot(b))
    }
}

/// How one of two kernels compares with the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// Faster beyond doubt.
    Ahead,
    /// Slower beyond doubt.
    Behind,
    /// The difference may be noise.
    Tie,
}

impl From<std::cmp::Ordering> for Compared {
    /// What comes first is ahead.
    fn from(order: std::cmp::Ordering) -> Compared {
        match order {
            std::cmp::Ordering::Less => Compared::Ahead,
            std::cmp::Ordering::Equal => Compared::Tie,
            std::cmp::Ordering::Greater => Compared::Behind,
        }
    }
}

/// One of two kernels that are compared.
#[derive(Clone, Copy, Debug)]
pub struct Rival<'a> {
    /// Its time.
    pub estimate: &'a Estimate,
    /// Whether it is what plain torch runs.
    pub baseline: bool,
}

impl Rival<'_> {
    /// By medians alone: a is ahead of b if a + σ(a − b) + margin(a, b) < b.
    pub fn compare(&self, other: &Rival<'_>) -> Compared {
        match (self.leads(other), other.leads(self)) {
            (true, _) => Compared::Ahead,
            (_, true) => Compared::Behind,
            _ => Compared::Tie,
        }
    }

    fn leads(&self, other: &Rival<'_>) -> bool {
        let less_us = other.estimate.median_us - self.estimate.median_us;
        less_us > self.estimate.noise_to(other.estimate) + self.margin_us(other)
    }

    /// What it must gain on the other beyond the noise: 3% of its own time where the other is what plain torch runs and not both
    /// were measured, else nothing.
    pub fn margin_us(&self, other: &Rival<'_>) -> f64 {
        let is_measured = |rival: &Rival<'_>| rival.estimate.kind == EstimateKind::Measured;
        match other.baseline && !(is_measured(self) && is_measured(other)) {
            true => MARGIN * self.estimate.median_us,
            false => 0.0,
        }
    }
}

/// Read-only knowledge of kernel times.
///
/// `estimate` must be a function of its arguments for as long as the source is part of a
/// snapshot: selection is cached on that promise. It is asked at the representative shape of a
/// cell, so a source that knows an exact shape reports its edges to give it a cell of its own.
pub trait PerfSource: Send + Sync {
    /// The time of `kernel` for the call, if anything is known.
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate>;

    /// Whether `a` is ahead of `b`, behind it, or neither beyond doubt. `compare(b, a)` says the opposite. A source that knows
    /// no more than medians and noise need not say anything else.
    fn compare(&self, a: &Rival<'_>, b: &Rival<'_>) -> Compared {
        a.compare(b)
    }

    /// Why a kernel must not serve the call, by what was seen of it on this machine: wrong results, a failure at just
    /// this shape. Asked at the call's own shape; changes only at the edges.
    fn verdict(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Reason> {
        let _ = (kernel, facts);
        None
    }

    /// Whether a kernel was captured, replayed and found right in a CUDA graph, for a call that differs from this one in
    /// sizes at most, and by sizes for which `covers` holds: those of the same cell.
    fn proven_in_graphs(&self, kernel: &KernelDescriptor, facts: &Facts<'_>, covers: Covers<'_>) -> bool {
        let _ = (kernel, facts, covers);
        false
    }

    /// The kernels that were, for some call.
    fn graph_proofs(&self) -> Vec<KernelVersion> {
        Vec::new()
    }

    /// Every kernel that must not serve an operation because its results were wrong.
    fn mismatches(&self) -> Vec<(KernelVersion, OpIx, Evidence)> {
        Vec::new()
    }

    /// Whether it knows of no time at all.
    fn is_empty(&self) -> bool {
        false
    }

    /// Where it was measured, in words, if that was not here: the device and the version of torch.
    fn origin(&self, device: DeviceIx) -> Option<Arc<str>> {
        let _ = device;
        None
    }

    /// Sizes at which the knowledge changes: dimension index, and the first size that is different.
    fn edges(&self, op: OpIx) -> Vec<(usize, i64)>;
}

/// Knows nothing: declared priority decides.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPerfData;

impl PerfSource for NoPerfData {
    fn estimate(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        None
    }

    fn is_empty(&self) -> bool {
        true
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}
