//! The figures at the top of a page, and of each operation.

use std::collections::BTreeSet;

use crate::contest::{Contest, Outcome};
use crate::figures::{geomean, median};

/// What many contests come down to.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Summary {
    /// Calls on which a kernel has a time.
    pub measured: usize,
    /// Operations.
    pub ops: usize,
    /// Kernels that have a time somewhere.
    pub kernels: usize,
    /// The geometric mean of the speed-ups over the baseline, the least and the largest.
    pub speedup: Option<Speedup>,
    /// Of the calls where the baseline and the chosen kernel were measured: how many, and where another one runs.
    pub other: (usize, usize),
    /// The middle of what the chosen kernels reach of the roofline, as a part of 1.
    pub of_roofline: Option<f64>,
    /// Kernels that gave wrong results, and that failed, each counted once per call.
    pub wrong: usize,
    /// See `wrong`.
    pub failed: usize,
}

/// Speed-ups over the baseline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Speedup {
    pub geomean: f64,
    pub least: f64,
    pub most: f64,
}

impl Summary {
    pub fn of<'a>(contests: impl IntoIterator<Item = &'a Contest>) -> Summary {
        let contests: Vec<&Contest> = contests.into_iter().collect();
        let candidates = || contests.iter().flat_map(|c| &c.candidates);
        let count = |outcome| candidates().filter(|c| c.outcome == outcome).count();
        let ratios = || contests.iter().filter_map(|c| c.speedup());
        let speedup = geomean(ratios()).map(|geomean| Speedup {
            geomean,
            least: ratios().fold(f64::INFINITY, f64::min),
            most: ratios().fold(0.0, f64::max),
        });
        let other: Vec<bool> = contests.iter().filter_map(|c| c.beats_default()).collect();
        Summary {
            measured: contests.iter().filter(|c| c.fastest().is_some()).count(),
            ops: contests.iter().map(|c| &c.op).collect::<BTreeSet<_>>().len(),
            kernels: candidates().filter(|c| c.time().is_some()).map(|c| &c.kernel).collect::<BTreeSet<_>>().len(),
            speedup,
            other: (other.len(), other.iter().filter(|other| **other).count()),
            of_roofline: median(contests.iter().filter_map(|c| c.over_floor()).map(|over| 1.0 / over)),
            wrong: count(Outcome::Wrong),
            failed: count(Outcome::Failed),
        }
    }
}
