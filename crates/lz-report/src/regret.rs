//! How far the choices are from the best there is.

use serde::{Deserialize, Serialize};

use crate::contest::{Candidate, Contest};
use crate::figures::{geomean, short};

/// Below this nothing is lost.
pub(crate) const NONE: f64 = 1.005;
/// Upper ends of the classes of ratios to the best, and their names.
const CLASSES: &[(f64, &str)] = &[
    (NONE, "none"),
    (1.02, "≤ 2 %"),
    (1.05, "≤ 5 %"),
    (1.1, "≤ 10 %"),
    (1.25, "≤ 25 %"),
    (1.5, "≤ 50 %"),
    (2.0, "≤ 2×"),
    (5.0, "≤ 5×"),
    (f64::INFINITY, "> 5×"),
];
/// Classes that are shown even when nothing is in them.
const ALWAYS: usize = 5;

/// One choice, against the best and against the baseline.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RegretRow {
    /// The operation.
    pub op: String,
    /// The sizes of the call.
    pub label: String,
    /// The kernel that runs.
    pub chosen: String,
    /// The fastest of all.
    pub best: String,
    /// What torch alone would run.
    #[serde(default, alias = "default")]
    pub baseline: Option<String>,
    /// The time of the chosen over that of the best: 1 is the best, 1.1 is ten percent lost.
    #[serde(alias = "over_best")]
    pub ratio_best: f64,
    /// The time of the baseline over that of the chosen: 2 is twice as fast.
    #[serde(default, alias = "times_baseline", alias = "ratio_default")]
    pub ratio_baseline: Option<f64>,
}

/// How far the choices are from the best.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Regret {
    /// How it was found out, in a sentence.
    #[serde(default)]
    pub about: String,
    /// The geometric mean of the ratios to the best.
    pub geomean: f64,
    /// The largest of them.
    pub worst: f64,
    /// Every choice.
    pub rows: Vec<RegretRow>,
}

impl Regret {
    /// The regret of these choices; 1 when there are none.
    pub fn of(about: impl Into<String>, rows: Vec<RegretRow>) -> Regret {
        let ratios = || rows.iter().map(|row| row.ratio_best).filter(|r| r.is_finite() && *r > 0.0);
        let (geomean, worst) = (geomean(ratios()).unwrap_or(1.0), ratios().fold(1.0, f64::max));
        Regret { about: about.into(), geomean, worst, rows }
    }

    /// How many choices lose how much, up to the most that is lost.
    pub fn classes(&self) -> Vec<Lost> {
        let mut counts: Vec<Lost> = CLASSES.iter().map(|&(_, lost)| Lost { lost, calls: 0 }).collect();
        for ratio in self.rows.iter().map(|row| row.ratio_best).filter(|r| !r.is_nan()) {
            let class = CLASSES.iter().position(|(end, _)| ratio <= *end).unwrap_or(CLASSES.len() - 1);
            counts[class].calls += 1;
        }
        let used = counts.iter().rposition(|class| class.calls > 0).map_or(0, |last| last + 1);
        counts.truncate(used.max(ALWAYS));
        counts
    }

    /// The choices of contests against the best of the same contests; `None` when none of the chosen was measured.
    pub fn from_contests(contests: &[Contest]) -> Option<Regret> {
        let rows: Vec<RegretRow> = contests.iter().filter_map(row).collect();
        let about = "Each choice against the fastest kernel measured on the same call.";
        (!rows.is_empty()).then(|| Regret::of(about, rows))
    }
}

/// How many choices lose how much.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// How much: `none`, `≤ 2 %`, …
    pub lost: &'static str,
    /// How many calls.
    pub calls: usize,
}

fn row(contest: &Contest) -> Option<RegretRow> {
    let (chosen_us, best) = (contest.chosen_us()?, contest.fastest()?);
    let baseline = contest.baseline_kernel().filter(|c| c.time().is_some());
    Some(RegretRow {
        op: contest.op.clone(),
        label: format!("{} · {}", contest.label, short(&contest.dtype)),
        chosen: contest.chosen.clone()?,
        best: best.kernel.clone(),
        baseline: baseline.map(|c| c.kernel.clone()),
        ratio_best: chosen_us / best.time()?,
        ratio_baseline: baseline.and_then(Candidate::time).map(|us| us / chosen_us),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ratio_is_counted_once() {
        let classes = |ratios: &[f64]| -> Vec<usize> {
            let row = |r: &f64| RegretRow { ratio_best: *r, ..RegretRow::default() };
            let regret = Regret::of("", ratios.iter().map(row).collect());
            regret.classes().iter().map(|class| class.calls).collect()
        };
        assert_eq!(classes(&[]), [0; 5]);
        assert_eq!(classes(&[1.0, 0.99, 1.005, 1.006, 1.05, 1.3]), [3, 1, 1, 0, 0, 1]);
        assert_eq!(classes(&[f64::INFINITY, 1e9, f64::NAN]), [0, 0, 0, 0, 0, 0, 0, 0, 2]);
    }
}
