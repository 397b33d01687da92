//! What selection may ask about speed. Implemented by the performance database; empty by default.

use lz_model::{Facts, KernelDescriptor, OpIx, Reason};
use serde::Serialize;

use crate::proof::{Evidence, KernelVersion};

/// How much of what a prediction may be off by is counted against it in a tie: a kernel that is ahead by the word of one
/// neighbour, and behind everywhere else, is no good guess.
const DOUBT: f64 = 0.5;
/// What a host takes of its time when it is twice as fast.
const SLOW: f64 = 0.5;

/// Where a time comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EstimateKind {
    /// Measured at this very shape bucket.
    Measured,
    /// Interpolated between measured shapes.
    Predicted,
    /// A guess beyond the measured shapes: never trusted.
    Extrapolated,
}

/// A time of the host, or of the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Side {
    /// Median time in microseconds.
    pub median_us: f64,
    /// As [`Estimate::apart_us`].
    pub apart_us: Option<f64>,
}

impl Side {
    /// Differences to another's time on the same side below this are noise, as far as that is known.
    fn noise_to(&self, other: &Side) -> Option<f64> {
        Some(self.apart_us?.hypot(other.apart_us?))
    }

    fn is_clearly_behind(&self, other: &Side) -> bool {
        self.noise_to(other).is_some_and(|noise| self.median_us - other.median_us > noise)
    }
}

/// What a kernel takes of the host and of the device, which work at the same time: the slower one sets the pace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sides {
    /// What the host takes.
    pub host: Side,
    /// What the device takes.
    pub device: Side,
}

impl Sides {
    fn is_bound_by_host(&self) -> bool {
        self.host.median_us > self.device.median_us
    }

    /// The one that sets the pace.
    pub fn slower(&self) -> Side {
        *self.by_pace(self).0
    }

    /// The one that sets the pace, and the other one.
    fn by_pace<'a>(&self, of: &'a Sides) -> (&'a Side, &'a Side) {
        if self.is_bound_by_host() { (&of.host, &of.device) } else { (&of.device, &of.host) }
    }

    /// Clearly behind on the side that sets its pace, which is also clearly more than what the other one takes of the other
    /// side, and not ahead there: then it does not matter which side sets the other's pace.
    fn is_clearly_behind(&self, other: &Sides) -> bool {
        let ((pace, free), (same, others)) = (self.by_pace(self), self.by_pace(other));
        let is_clear = |noise: Option<f64>| noise.is_some_and(|noise| pace.median_us - others.median_us > noise);
        pace.is_clearly_behind(same) && free.median_us >= others.median_us && is_clear(free.noise_to(others))
    }
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

    /// Differences to another's time below this are noise. Two that were timed side by side, here or where both were compared
    /// with a third, share what disturbed them; other predictions err each for itself.
    pub fn noise_to(&self, other: &Estimate) -> f64 {
        let alone = self.spread_us.hypot(other.spread_us);
        if (self.kind, other.kind) == (EstimateKind::Measured, EstimateKind::Measured) {
            return self.spread_us.max(other.spread_us);
        }
        match (&self.sides, &other.sides) {
            (Some(a), Some(b)) if a.is_bound_by_host() == b.is_bound_by_host() => {
                a.slower().noise_to(&b.slower()).unwrap_or(alone)
            }
            (Some(a), Some(b)) if a.is_clearly_behind(b) || b.is_clearly_behind(a) => 0.0,
            (None, None) => self.apart_us.zip(other.apart_us).map_or(alone, |(a, b)| a.hypot(b)),
            _ => alone,
        }
    }

    /// Whether it is ahead of another in one state of the host, and behind by half as much in any other at most. Hosts take twice
    /// as long for the same at one time as at another: where the host is slow, what it takes shows, and where it is fast, what
    /// the device takes. One of the two is less, by more than noise and this share, and by twice what the other one is more, in
    /// doubt.
    pub fn outruns(&self, other: &Estimate, by: f64) -> bool {
        let (Some(ours), Some(theirs)) = (self.sides, other.sides) else { return false };
        let leads = |lead: (Side, Side), lag: (Side, Side)| {
            let (Some(noise), Some(doubt)) = (lead.0.noise_to(&lead.1), lag.0.apart_us) else { return false };
            let (less, more) = (lead.1.median_us - lead.0.median_us, lag.0.median_us - lag.1.median_us);
            let more = more + DOUBT * doubt;
            less > noise + by * lead.0.median_us
                && 2.0 * more / lag.1.median_us <= less / lead.1.median_us
                && lead.1.median_us >= SLOW * lag.1.median_us
        };
        let (host, device) = ((ours.host, theirs.host), (ours.device, theirs.device));
        let shows = theirs.device.median_us + other.spread_us >= theirs.host.median_us;
        leads(host, device) || leads(device, host) && shows
    }

    /// Its time, and some of what it may be off by where it was not measured: of two that tie, the less is the better guess.
    pub fn doubted_us(&self) -> f64 {
        match self.kind {
            EstimateKind::Measured => self.median_us,
            _ => self.median_us + DOUBT * self.apart_us.unwrap_or(self.spread_us),
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

    /// Why a kernel must not serve the call, by what was seen of it on this machine: wrong results, a failure at just
    /// this shape. Asked at the call's own shape; changes only at the edges.
    fn verdict(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Reason> {
        let _ = (kernel, facts);
        None
    }

    /// Whether a kernel was captured, replayed and found right in a CUDA graph, for calls that differ from this one in
    /// sizes at most.
    fn proven_in_graphs(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> bool {
        let _ = (kernel, facts);
        false
    }

    /// How many kernels were, for some call.
    fn graph_proofs(&self) -> usize {
        0
    }

    /// Every kernel that must not serve an operation because its results were wrong.
    fn mismatches(&self) -> Vec<(KernelVersion, OpIx, Evidence)> {
        Vec::new()
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

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}
