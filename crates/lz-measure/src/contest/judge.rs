//! Who can still win, and whether it is known who does.

use super::level::{Leveled, Track, level};
use super::statistics::{deviation, quantile, variance};
use super::timing::{CLEARLY, SPREAD, Stats};
use super::{Candidate, Contest, State};

/// The noise of a single sample while nothing is known about it.
const UNKNOWN_NOISE: f64 = 0.1;
/// How many samples the noise of all candidates counts for in the noise of each.
const POOLED_SAMPLES: f64 = 10.0;
/// The standard error of a median of normal noise, in those of a mean.
const MEDIAN_ERROR: f64 = 1.2533;

impl Contest {
    /// Judges the rounds so far.
    pub(super) fn judge(&mut self) {
        self.retire();
        if self.is_look() {
            self.settle();
        }
    }

    /// Whether this is a round after which one looks. Every look is a chance to see a difference that is not there, so
    /// they become rarer: each when there is a quarter more to see.
    fn is_look(&self) -> bool {
        let (min, max) = (self.rules.min_rounds, self.rules.max_rounds);
        let looks = std::iter::successors(Some(min), |&r| Some((r + r / 4).max(r + 1)));
        self.round == max || looks.take_while(|&r| r <= self.round).any(|r| r == self.round)
    }

    /// Retires whoever has been far behind the leader so far.
    fn retire(&mut self) {
        let Some(leader) = self.leader(&self.leveled()) else { return };
        let reference = self.candidates[leader].samples.clone();
        let (hopeless, early) = (self.rules.hopeless, self.round < self.rules.min_rounds);
        let since = self.since;
        let is_hopeless = |one: &Candidate| {
            let lately = || one.samples.iter().filter(|sample| sample.0 >= since);
            let power = 4 - lately().count().clamp(1, 3) as i32 + if one.baseline && early { 3 } else { 0 };
            let limit = hopeless.powi(power);
            let at = |round: u32| reference.binary_search_by_key(&round, |s| s.0).ok();
            let ratios = lately().filter_map(|&(round, us)| at(round).map(|at| us / reference[at].1));
            let (behind, others): (Vec<f64>, Vec<f64>) = ratios.partition(|ratio| *ratio > limit);
            // One round in four may have caught the leader at a bad moment.
            !behind.is_empty() && 3 * others.len() <= behind.len()
        };
        for (i, one) in self.candidates.iter_mut().enumerate() {
            if i != leader && one.state == State::Active && is_hopeless(one) {
                one.state = State::Retired;
            }
        }
    }

    /// Lets rest who is clearly behind, and looks whether the others are told apart from the leader, or need not be.
    fn settle(&mut self) {
        let leveled = self.leveled();
        let stats = self.stats_of(&leveled);
        let Some(leader) = self.leader(&leveled) else { return };
        let Some(best) = &stats[leader] else { return };
        let is_precise = |stats: &Stats| stats.spread_us <= self.rules.tie * stats.median_us;
        self.settled = true;
        for (i, one) in self.candidates.iter_mut().enumerate() {
            let Some(stats) = stats[i].as_ref().filter(|_| i != leader) else { continue };
            let noise = stats.spread_us.max(best.spread_us);
            let gap = stats.median_us - best.median_us;
            if matches!(one.state, State::Active | State::Resting) {
                one.state = if gap > CLEARLY * noise { State::Resting } else { State::Active };
                let enough = if one.baseline { CLEARLY } else { 1.0 };
                self.settled &= gap > enough * noise || (is_precise(stats) && is_precise(best));
            }
        }
    }

    fn leveled(&self) -> Vec<Option<Leveled>> {
        level(&self.candidates.iter().map(|one| self.track(one)).collect::<Vec<Track<'_>>>())
    }

    fn track<'a>(&self, one: &'a Candidate) -> Track<'a> {
        let anchor = match one.state {
            State::Failed(_) => return Track { samples: &[], anchor: false },
            State::Retired => one.samples.len() >= self.rules.min_rounds as usize,
            State::Active | State::Resting => true,
        };
        Track { samples: &one.samples, anchor }
    }

    /// The fastest of those that are not out.
    fn leader(&self, leveled: &[Option<Leveled>]) -> Option<usize> {
        let state = |i: &usize| matches!(self.candidates[*i].state, State::Active | State::Resting);
        let timed = (0..leveled.len()).filter(state).filter_map(|i| leveled[i].as_ref().map(|l| (l.median, i)));
        timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, i)| i)
    }

    pub(super) fn stats(&self) -> Vec<Option<Stats>> {
        self.stats_of(&self.leveled())
    }

    fn stats_of(&self, leveled: &[Option<Leveled>]) -> Vec<Option<Stats>> {
        let pooled = pooled(leveled).unwrap_or(UNKNOWN_NOISE);
        let stats = |(one, leveled): (&Candidate, &Option<Leveled>)| {
            let leveled = leveled.as_ref()?;
            let raw: Vec<f64> = one.samples.iter().map(|s| s.1).collect();
            Some(Stats {
                median_us: leveled.median,
                p95_us: quantile(&raw, 0.95)?.max(leveled.median),
                variance_us: variance(&raw),
                spread_us: leveled.median * spread(leveled, pooled).max(self.rules.least_spread),
                samples: raw.len() as u32,
            })
        };
        self.candidates.iter().zip(leveled).map(stats).collect()
    }
}

/// The noise of a difference to an equally fast candidate, relative to the median.
fn spread(leveled: &Leveled, pooled: f64) -> f64 {
    let (count, others) = (leveled.times.len() as f64, leveled.others);
    let own = deviation(&leveled.times, leveled.median).filter(|_| count >= 2.0).map(|d| d / leveled.median);
    let own = own.unwrap_or(pooled);
    let noise = ((count * own.powi(2) + POOLED_SAMPLES * pooled.powi(2)) / (count + POOLED_SAMPLES)).sqrt();
    // Divided by a level of `others`, a sample has 1 + 1/others of its own variance; a difference of two has twice it.
    let difference = if others > 0.0 { (2.0 * others / (others + 1.0)).sqrt() } else { 1.0 };
    // From few samples the noise itself is not known well, and may be taken for far too small.
    let doubt = 1.0 + 5.0 / (count * others.max(1.0) - 3.0).max(1.0);
    SPREAD * doubt * difference * MEDIAN_ERROR * noise / count.sqrt()
}

/// The noise of a sample, relative to its candidate's median, over all candidates.
fn pooled(leveled: &[Option<Leveled>]) -> Option<f64> {
    let several = leveled.iter().flatten().filter(|l| l.times.len() >= 2);
    let relative: Vec<f64> = several.flat_map(|l| l.times.iter().map(|t| t / l.median)).collect();
    deviation(&relative, 1.0)
}
