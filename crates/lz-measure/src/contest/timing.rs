//! Results of a contest: noise, ranking, and what is lost by stopping.

use std::f64::consts::SQRT_2;

use serde::{Deserialize, Serialize};

use super::statistics::normal_cdf;

/// How many standard errors of a difference of two medians the spread is. A contest looks at many differences, many
/// times, and ends when it sees one: with 3.2 it takes equally fast candidates for different in less than one contest
/// of a hundred (`tests/contests.rs`).
pub(super) const SPREAD: f64 = 3.2;

/// How many times its noise a candidate must be behind to be clearly so. The baseline must be, for a contest to be settled
/// in favour of another: calls near this one that are not measured go by what was found here, and what is just above
/// the noise says nothing about them.
pub(super) const CLEARLY: f64 = 2.0;

/// What was measured of a candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// The median of the times relative to the level of their rounds, in microseconds per call.
    pub median_us: f64,
    /// The 95th percentile of the times as measured; at least the median.
    pub p95_us: f64,
    /// The variance of the times as measured.
    pub variance_us: f64,
    /// The noise of the median: a difference below it, to another candidate of the same contest, is a tie.
    pub spread_us: f64,
    /// How many samples there were; warm-up is not among them.
    pub samples: u32,
}

/// The result of one candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Its name.
    pub candidate: String,
    /// Whether the others are compared with it.
    pub baseline: bool,
    /// What was measured; `None` when it failed or was never timed.
    pub stats: Option<Stats>,
    /// Its first call, in microseconds, with all that happens only once; `None` when it did not get so far.
    pub warmup_us: Option<f64>,
    /// It was left out of the later rounds, since it could not win.
    pub retired: bool,
    /// Why it failed.
    pub error: Option<String>,
}

/// The candidates that did not fail, best first.
///
/// All that are within the noise of the fastest (of either's spread) form a group, whose order `key` gives: the least
/// first, and of equal ones the first in `timings`. Then comes the group of the fastest among the rest, and so on.
pub fn order<K: Ord>(timings: &[Timing], key: impl Fn(&Timing) -> K) -> Vec<usize> {
    let stats = |i: usize| timings[i].stats.as_ref();
    let time = |i: usize| stats(i).map_or(f64::INFINITY, |s| s.median_us);
    let noise = |i: usize| stats(i).map_or(0.0, |s| s.spread_us);
    let mut rest: Vec<usize> =
        (0..timings.len()).filter(|&i| timings[i].error.is_none() && timings[i].stats.is_some()).collect();
    rest.sort_by(|&a, &b| time(a).total_cmp(&time(b)));
    let mut ranking = Vec::with_capacity(rest.len());
    while let Some(&fastest) = rest.first() {
        let ties = |i: usize| time(i) - time(fastest) <= noise(i).max(noise(fastest));
        let (mut group, slower): (Vec<usize>, Vec<usize>) = rest.iter().partition(|&&i| i == fastest || ties(i));
        group.sort_by_key(|&i| (key(&timings[i]), i));
        ranking.extend(group);
        rest = slower;
    }
    ranking
}

/// What is lost by choosing now, in the mean and relative to the time of the choice: how much faster than it the best of the
/// others is, where one is, times the probability of that. 1 at most, and when nothing is known. The choice is the
/// fastest candidate, or the baseline where the noise does not tell the two apart.
///
/// Where it does, but not clearly, something is lost at calls around this one: they are left to the baseline. That is
/// counted as a part of the difference that shrinks with the square of the noise.
///
/// The medians are taken as independent normal variables whose standard errors their spreads tell.
pub fn loss_of(timings: &[Timing]) -> f64 {
    let timed = timings.iter().filter(|t| t.error.is_none()).filter_map(|t| Some((t, t.stats.as_ref()?)));
    let known: Vec<(bool, &Stats)> = timed.map(|(t, stats)| (t.baseline, stats)).collect();
    let Some(fastest) = known.iter().map(|k| k.1).min_by(|a, b| a.median_us.total_cmp(&b.median_us)) else {
        return 1.0;
    };
    let ties = |s: &Stats| s.median_us - fastest.median_us <= s.spread_us.max(fastest.spread_us);
    let baseline = known.iter().find(|(baseline, _)| *baseline).map(|k| k.1);
    let choice = baseline.filter(|stats| ties(stats)).unwrap_or(fastest);
    let normal = |s: &Stats| (s.median_us, (s.spread_us / (SPREAD * SQRT_2)).max(f64::MIN_POSITIVE));
    let (time, noise) = normal(choice);
    let others: Vec<(f64, f64)> = known.iter().filter(|k| !std::ptr::eq(k.1, choice)).map(|k| normal(k.1)).collect();
    // ∫ P(choice > x) · P(some other ≤ x) dx is the mean of max(0, choice - fastest other).
    let faster = |x: f64| 1.0 - others.iter().map(|&(us, noise)| normal_cdf((us - x) / noise)).product::<f64>();
    let integrand = |x: f64| normal_cdf((time - x) / noise) * faster(x);
    let widest = others.iter().map(|k| k.1).fold(noise, f64::max);
    let here = simpson(integrand, fastest.median_us - 8.0 * widest, time + 8.0 * noise) / time;
    here.max(baseline.map_or(0.0, |baseline| lost_around(fastest, baseline))).clamp(0.0, 1.0)
}

/// What is lost at calls around one where the fastest is ahead of the baseline, but not clearly.
fn lost_around(fastest: &Stats, baseline: &Stats) -> f64 {
    let (gap, noise) = (baseline.median_us - fastest.median_us, baseline.spread_us.max(fastest.spread_us));
    if gap <= noise || gap > CLEARLY * noise {
        return 0.0;
    }
    gap / baseline.median_us * (noise / (CLEARLY * gap)).powi(2)
}

fn simpson(f: impl Fn(f64) -> f64, from: f64, to: f64) -> f64 {
    const STEPS: u32 = 400;
    let h = (to - from) / f64::from(STEPS);
    let weight = |i: u32| if i == 0 || i == STEPS { 1.0 } else { 2.0 + 2.0 * f64::from(i % 2) };
    (0..=STEPS).map(|i| weight(i) * f(from + h * f64::from(i))).sum::<f64>() * h / 3.0
}
