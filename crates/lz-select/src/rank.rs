//! The order of the accepted candidates: by times where they are known, else by score.
//!
//! Which of two times is ahead is the performance model's answer ([`PerfSource::compare`]); what is here only groups by it.

use crate::decision::{Basis, Candidate};
use crate::perf::{Compared, Estimate, EstimateKind, PerfSource, Rival};
use crate::why::Group;

/// The most that speed can take off a score.
const SLOWEST: f64 = -30.0;

/// What plain torch would run: of the accepted candidates marked so, the one of the highest priority.
pub(crate) fn baseline_of(candidates: &[Candidate]) -> Option<usize> {
    let plain = (0..candidates.len()).filter(|&i| candidates[i].accepted() && candidates[i].baseline);
    plain.min_by(|&a, &b| candidates[b].terms.priority.total_cmp(&candidates[a].terms.priority).then(a.cmp(&b)))
}

/// Fills the speed term, and says whether speed can decide alone.
pub(crate) fn score_speed(candidates: &mut [Candidate]) -> Basis {
    let accepted = || candidates.iter().filter(|c| c.accepted());
    let fastest = accepted().filter_map(|c| c.estimate).map(|e| e.median_us).fold(f64::INFINITY, f64::min);
    let trusted = |c: &Candidate| c.estimate.is_some_and(|e| e.trusted);
    // References are the last resort: nobody waits for them to be measured. Nor, where it is known what plain torch
    // takes, for anybody else: a library that was installed since would undo what was measured without it.
    let is_baseline_known = baseline_of(candidates).is_some_and(|i| trusted(&candidates[i]));
    let contenders = || accepted().filter(|c| trusted(c) || !(c.reference || is_baseline_known));
    let all_trusted = contenders().all(trusted);
    let all_measured = contenders().all(|c| c.estimate.is_some_and(|e| e.kind == EstimateKind::Measured));
    let any = contenders().next().is_some();
    for candidate in candidates.iter_mut().filter(|c| c.accepted()) {
        candidate.terms.perf = candidate.estimate.map_or(0.0, |estimate| {
            let slowdown = estimate.median_us / fastest.max(f64::MIN_POSITIVE);
            let weight = if estimate.trusted { 1.0 } else { 0.5 };
            (weight * -10.0 * (slowdown - 1.0)).max(SLOWEST)
        });
    }
    match (any && all_trusted, all_measured) {
        (true, true) => Basis::Measured,
        (true, false) => Basis::Predicted,
        (false, _) => Basis::Declared,
    }
}

/// The accepted candidates, best first, and, where times decide, in groups that tie. Candidates stand in the snapshot's
/// fixed order, and every sort here ends in that order, so ties resolve the same everywhere.
pub(crate) fn rank(candidates: &[Candidate], basis: Basis, perf: &dyn PerfSource) -> (Vec<usize>, Vec<Group>) {
    let untimed = |c: &Candidate| c.accepted() && !c.reference && !c.estimate.is_some_and(|e| e.trusted);
    let any_untimed = candidates.iter().any(untimed);
    let field = Field { candidates, baseline: baseline_of(candidates), any_untimed, perf };
    match basis {
        Basis::Declared => (field.by_score(), Vec::new()),
        _ => {
            let groups = field.groups();
            (groups.iter().flat_map(|group| group.members.iter().copied()).collect(), groups)
        }
    }
}

fn descending(a: f64, b: f64) -> std::cmp::Ordering {
    b.total_cmp(&a)
}

/// The candidates of one call.
struct Field<'a> {
    candidates: &'a [Candidate],
    /// What plain torch would run.
    baseline: Option<usize>,
    /// Whether a kernel other than the reference has no time.
    any_untimed: bool,
    perf: &'a dyn PerfSource,
}

impl Field<'_> {
    fn accepted(&self) -> Vec<usize> {
        (0..self.candidates.len()).filter(|&i| self.candidates[i].accepted()).collect()
    }

    /// Nobody waits for a compiler while another can serve. A kernel that is not built in wins no tie: it must be given a
    /// higher priority, or be measured. What plain torch runs wins ties with those that are.
    fn by_score(&self) -> Vec<usize> {
        let key = |i: usize| {
            let c = &self.candidates[i];
            (c.cold, c.terms.total(), !c.built_in, c.terms.priority, !c.baseline, i)
        };
        let mut keyed: Vec<_> = self.accepted().into_iter().map(key).collect();
        keyed.sort_unstable_by(|a, b| {
            let score = a.0.cmp(&b.0).then(descending(a.1, b.1));
            score.then(a.2.cmp(&b.2)).then(descending(a.3, b.3)).then(a.4.cmp(&b.4)).then(a.5.cmp(&b.5))
        });
        keyed.into_iter().map(|(.., i)| i).collect()
    }

    /// Each group is the fastest of those that are left and all that are not behind it.
    fn groups(&self) -> Vec<Group> {
        let mut left = self.accepted();
        left.sort_by(|&a, &b| {
            let times = self.time(a).total_cmp(&self.time(b));
            self.precedence(a, b).then(times).then(self.declared(a, b))
        });
        let mut groups = Vec::new();
        while let Some(&fastest) = left.first() {
            // Never slower than the baseline: where that is behind, so is whoever is slower than it.
            let lost = self.baseline.filter(|d| left.contains(d) && self.compare(fastest, *d) == Compared::Ahead);
            let limit = lost.map_or(f64::INFINITY, |d| self.time(d));
            let ties = |i: usize| self.compare(fastest, i) == Compared::Tie && self.time(i) < limit;
            let (members, rest) = left.into_iter().partition(|&i| i == fastest || ties(i));
            groups.push(self.ordered(fastest, members));
            left = rest;
        }
        groups
    }

    /// Within a tie, in this order: who is ahead of the baseline, by time; who is [promised](Field::is_promised) to be; the
    /// baseline; the others by declared priority where all were measured, so that noise decides nothing, else by time, since
    /// a prediction is better than none.
    fn ordered(&self, fastest: usize, mut members: Vec<usize>) -> Group {
        let baseline = self.baseline.filter(|d| members.contains(d));
        let is_ahead = |i: usize| baseline.is_some_and(|d| self.compare(i, d) == Compared::Ahead);
        let ahead: Vec<usize> = members.iter().copied().filter(|&i| is_ahead(i)).collect();
        let is_promised = |i: usize| baseline.is_some_and(|d| self.is_promised(i, d));
        let promised: Vec<usize> = members.iter().copied().filter(|&i| is_promised(i) && !is_ahead(i)).collect();
        let first = |i: usize| (ahead.contains(&i), promised.contains(&i), baseline == Some(i));
        let is_measured = |i: &usize| self.trusted(*i).is_some_and(|e| e.kind == EstimateKind::Measured);
        let all_measured = members.iter().all(is_measured);
        members.sort_by(|&a, &b| {
            let (x, y) = (&self.candidates[a], &self.candidates[b]);
            let declared = descending(x.terms.priority, y.terms.priority);
            let by_time = || self.time(a).total_cmp(&self.time(b)).then(declared);
            let better = if all_measured && !ahead.contains(&a) { declared } else { by_time() };
            first(b).cmp(&first(a)).then(better).then(y.built_in.cmp(&x.built_in)).then(a.cmp(&b))
        });
        Group { fastest, ahead, promised, members }
    }

    /// Whether a kernel is declared faster than the baseline, and the times of other machines or sizes, uncertain as they are,
    /// say the same. Without times it would be chosen; times that agree must not undo that.
    fn is_promised(&self, i: usize, baseline: usize) -> bool {
        let is_far = |i: usize| {
            let far = |e: &Estimate| matches!(e.kind, EstimateKind::Prior | EstimateKind::Extrapolated);
            self.trusted(i).is_some_and(far)
        };
        let priority = |i: usize| self.candidates[i].terms.priority;
        is_far(i) && is_far(baseline) && priority(i) > priority(baseline) && self.time(i) < self.time(baseline)
    }

    /// What goes before speed: nobody waits for a compiler while another can serve; then the operator's will and health. A
    /// reference that has a time is no reason to pass over a kernel that has none.
    fn precedence(&self, a: usize, b: usize) -> std::cmp::Ordering {
        let (a, b) = (&self.candidates[a], &self.candidates[b]);
        let willed = a.cold.cmp(&b.cold).then(descending(a.terms.precedence(), b.terms.precedence()));
        willed.then(if self.any_untimed { a.reference.cmp(&b.reference) } else { std::cmp::Ordering::Equal })
    }

    fn compare(&self, a: usize, b: usize) -> Compared {
        match (self.precedence(a, b), self.rival(a), self.rival(b)) {
            (std::cmp::Ordering::Equal, Some(a), Some(b)) => self.perf.compare(&a, &b),
            (std::cmp::Ordering::Equal, None, None) => Compared::from(self.declared(a, b)),
            (std::cmp::Ordering::Equal, timed, _) if timed.is_some() => Compared::Ahead,
            (std::cmp::Ordering::Equal, ..) => Compared::Behind,
            (precedence, ..) => Compared::from(precedence),
        }
    }

    /// By declared priority, the order of two that have no time: of one library's kernels, the one for the better instruction set.
    fn declared(&self, a: usize, b: usize) -> std::cmp::Ordering {
        let priority = |i: usize| self.candidates[i].terms.priority;
        descending(priority(a), priority(b)).then(a.cmp(&b))
    }

    fn rival(&self, i: usize) -> Option<Rival<'_>> {
        self.trusted(i).map(|estimate| Rival { estimate, baseline: self.baseline == Some(i) })
    }

    fn trusted(&self, i: usize) -> Option<&Estimate> {
        self.candidates[i].estimate.as_ref().filter(|e| e.trusted)
    }

    /// Whose time is only a guess goes last.
    fn time(&self, i: usize) -> f64 {
        self.trusted(i).map_or(f64::INFINITY, |e| e.median_us)
    }
}
