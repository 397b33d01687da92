//! A tuning under way: which call is visited next, what its candidates took, and what is kept of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use lz_measure::workload::features;
use lz_measure::{Budget, Contest, Item, Next, Rules, Sample, Schedule, Slice, Timing, Visit};
use lz_model::{CallSpec, Catalog, Facts, KernelDescriptor, Query, device_name};
use lz_perfdb::{Filter, Key, Outcome, Parts, Record, Shape};
use lz_predict::{Model, Observation, Seen};
use lz_select::Evidence;

use super::bench::{Bench, Checked};
use super::bind_spec;
use super::tune::{Progress, TuneOptions, TuneReport, Tuned, Wanted, label};
use crate::core::State;
use crate::engine::Engine;
use crate::error::Error;
use crate::services::perf::{device_id, provenance};

/// How slow a reference may be, by a rough estimate, to be timed along: it is never the choice where another is.
const REFERENCE_US: f64 = 1000.0;
/// How long one sample takes: long enough that what wakes threads up and fills caches does not decide.
const SAMPLE_US: f64 = 1000.0;
/// How many times the rounds it gets at least a call may get where the budget allows it.
const MOST_ROUNDS: u32 = 32;
/// A result this far from what its neighbours say, relative and beyond the noise, is looked at again.
const DOUBTFUL: f64 = 0.03;
/// How many times the rounds before, so that the later ones decide.
const AGAIN: u32 = 2;
/// What references manage per microsecond, roughly.
const REFERENCE_FLOPS: f64 = 300.0;

/// What came of some rounds of a call.
struct Rounds {
    /// What would be lost by stopping now.
    loss: f64,
    /// What was needed before the first of them.
    once_us: f64,
    /// More rounds are of no use.
    finished: bool,
}

/// One call under measurement.
struct Subject {
    wanted: Wanted,
    query: Query,
    candidates: Vec<Arc<KernelDescriptor>>,
    baseline: Option<String>,
    contest: Option<Contest>,
    checks: BTreeMap<String, Checked>,
    /// What host and device took in each sample, by kernel, where the bench tells.
    parts: BTreeMap<String, Vec<Parts>>,
    /// What would be lost by going by what was measured before, if it was.
    known_loss: Option<f64>,
    id: String,
}

impl Subject {
    /// Whether it is less certain than what was known of it before, and nobody failed since.
    fn is_less_than_known(&self) -> bool {
        let (Some(known), Some(contest)) = (self.known_loss, &self.contest) else { return false };
        let right = |c: &Checked| matches!(c, Checked::Right { .. });
        contest.loss() > known && self.checks.values().all(right)
    }

    /// Times of its candidates, as knowledge is made of them.
    fn observations(&self, timings: Vec<Timing>) -> Vec<Observation> {
        let observation = |t: Timing| {
            let stats = t.stats.filter(|_| t.error.is_none())?;
            let version = self.candidates.iter().find(|k| k.id == t.candidate)?.version.clone();
            let (median_us, spread_us, samples) = (stats.median_us, stats.spread_us, stats.samples);
            let seen = Seen::Took { median_us, spread_us, samples, parts: self.parts(&t.candidate) };
            let baseline = self.baseline.as_ref() == Some(&t.candidate);
            Some(Observation { query: self.query, kernel: t.candidate, version, baseline, seen })
        };
        timings.into_iter().filter_map(observation).collect()
    }

    /// Of all that was seen of a kernel, the medians.
    fn parts(&self, kernel: &str) -> Option<Parts> {
        let seen = self.parts.get(kernel)?;
        let median = |side: fn(&Parts) -> f64| {
            let mut times: Vec<f64> = seen.iter().map(side).collect();
            times.sort_unstable_by(f64::total_cmp);
            times.get(times.len() / 2).copied().filter(|us| us.is_finite() && *us > 0.0)
        };
        Some(Parts { host_us: median(|p| p.host_us)?, device_us: median(|p| p.device_us)? })
    }

    /// What was seen in a visit. A kernel that turns out to wait for the device has no parts.
    fn see(&mut self, bench: &mut dyn Bench) {
        for kernel in &self.candidates {
            match bench.parts(&kernel.id) {
                Some(seen) => self.parts.entry(kernel.id.clone()).or_default().extend(seen),
                None => drop(self.parts.remove(&kernel.id)),
            }
        }
    }
}

/// The calls that are tuned, and how far it is.
pub(super) struct Tuning<'a> {
    engine: &'a Engine,
    options: &'a TuneOptions,
    unbiased: Arc<State>,
    subjects: Vec<Subject>,
    schedule: Option<Schedule>,
    report: TuneReport,
    begun: Instant,
    /// Whether it was asked which results do not go with their neighbours.
    doubted: bool,
}

impl<'a> Tuning<'a> {
    pub(super) fn new(engine: &'a Engine, wanted: &[Wanted], options: &'a TuneOptions) -> Result<Tuning<'a>, Error> {
        let unbiased = engine.perf.unbiased(engine)?;
        let mut tuning = Tuning {
            engine,
            options,
            unbiased,
            subjects: Vec::new(),
            schedule: None,
            report: TuneReport {
                device: wanted.first().map_or_else(String::new, |one| device_name(&engine.devices(), one.device)),
                ..TuneReport::default()
            },
            begun: Instant::now(),
            doubted: false,
        };
        for wanted in wanted {
            tuning.admit(wanted)?;
        }
        tuning.schedule_all();
        Ok(tuning)
    }

    /// A call that cannot be bound is the caller's mistake; one nobody can serve is told at the end.
    fn admit(&mut self, wanted: &Wanted) -> Result<(), Error> {
        let query = bind_spec(self.engine, &wanted.call, wanted.device, wanted.mode)?;
        let canonical = {
            let context = query.context();
            let named = wanted.call.named(wanted.device, context);
            let (_, bound) = self.engine.bind(&wanted.call.op, &named)?;
            CallSpec::canonical(&named, &bound)
        };
        let wanted = Wanted { call: canonical, ..wanted.clone() };
        let same = |s: &Subject| {
            s.wanted.call == wanted.call && (s.wanted.device, s.wanted.mode) == (wanted.device, wanted.mode)
        };
        if let Some(twice) = self.subjects.iter_mut().find(|s| same(s)) {
            twice.wanted.weight += wanted.weight;
            return Ok(());
        }
        let decision = self.unbiased.snapshot.select(&query);
        let baseline = decision.baseline().map(|c| self.unbiased.snapshot.kernel(c.kernel).id.clone());
        let candidates: Vec<_> = decision.ranked().map(|c| self.unbiased.snapshot.kernel(c.kernel).clone()).collect();
        let slow = self.reference_us(&query) > REFERENCE_US;
        let others = candidates.iter().any(|k| !k.reference);
        let candidates: Vec<_> = candidates.into_iter().filter(|k| !(k.reference && slow && others)).collect();
        if candidates.is_empty() {
            let reasons = decision.candidates.iter().flat_map(|c| c.reasons.first()).map(ToString::to_string);
            let why = reasons.collect::<Vec<_>>().join("; ");
            self.report.impossible.push((wanted.call, format!("no kernel can serve it: {why}")));
            return Ok(());
        }
        let id = format!("{:x}-{}", now_ms(), self.subjects.len());
        self.subjects.push(Subject {
            wanted,
            query,
            candidates,
            baseline,
            contest: None,
            checks: BTreeMap::new(),
            parts: BTreeMap::new(),
            known_loss: None,
            id,
        });
        Ok(())
    }

    fn reference_us(&self, query: &Query) -> f64 {
        let op = Catalog::get().op(query.op());
        self.unbiased
            .snapshot
            .device(query.device())
            .map_or(0.0, |device| op.flops(&Facts { op, query, device }) / REFERENCE_FLOPS)
    }

    /// Which call first, and what is known already.
    fn schedule_all(&mut self) {
        let total_us = self.options.budget.as_secs_f64() * 1e6;
        let budget = Budget { first_rounds: self.options.samples, ..Budget::of_us(total_us) };
        let item = |(id, subject): (usize, &Subject)| {
            let features = features(&subject.wanted.call).ok();
            let kernels = subject.candidates.len() as f64;
            let work = features.as_ref().map_or(0.0, |f| f.flops / 2e4 + f.bytes / 2e4);
            Item {
                id,
                group: features.as_ref().map_or_else(|| subject.wanted.call.op.clone(), |f| f.group.clone()),
                weight: subject.wanted.weight,
                features: features.map(|f| f.log2).unwrap_or_default(),
                cost_hint_us: kernels * (f64::from(self.options.samples) * (work + 250.0) + 2_000.0),
            }
        };
        let items: Vec<Item> = self.subjects.iter().enumerate().map(item).collect();
        let Ok(mut schedule) = Schedule::new(budget, items) else { return };
        if !self.options.force {
            for id in 0..self.subjects.len() {
                if let Some(timings) = self.known_timings(&self.subjects[id]) {
                    let held = timings.iter().filter_map(|t| t.stats.as_ref()).map(|s| s.samples).max().unwrap_or(0);
                    let loss = lz_measure::loss_of(&timings);
                    self.report.known += usize::from(schedule.known(id, loss, held).is_ok());
                    self.subjects[id].known_loss = Some(loss);
                }
            }
        }
        self.schedule = Some(schedule);
    }

    /// What was measured before; `None` when some candidate was not measured.
    fn known_timings(&self, subject: &Subject) -> Option<Vec<Timing>> {
        let db = self.engine.perfdb().filter(|_| self.options.keep)?;
        let device = self.unbiased.snapshot.device(subject.wanted.device)?;
        let filter = Filter::all()
            .device(device_id(device))
            .call(subject.wanted.call.to_string())
            .mode(subject.wanted.mode)
            .threads(u32::from(subject.query.context().threads));
        let records = db.records(&filter.valid()).ok()?;
        let current = |kernel: &KernelDescriptor, record: &&Record| {
            record.key.kernel_id == kernel.id
                && record.provenance.kernel_version.as_ref() == Some(&kernel.version)
                && record.provenance.stale_against(&provenance(&self.unbiased.snapshot, kernel, device)).is_none()
        };
        let mut timings = Vec::new();
        for kernel in subject.candidates.iter().filter(|k| !k.reference) {
            let record = records.iter().find(|record| current(kernel, record))?;
            if let Outcome::Ok(t) = &record.outcome {
                timings.push(Timing {
                    candidate: kernel.id.clone(),
                    baseline: record.baseline,
                    stats: Some(lz_measure::Stats {
                        median_us: t.median_us,
                        p95_us: t.p95_us,
                        variance_us: t.variance_us.unwrap_or(0.0),
                        spread_us: t.spread_us,
                        samples: t.samples,
                    }),
                    warmup_us: t.warmup_ms.map(|ms| ms * 1e3),
                    retired: false,
                    error: None,
                });
            }
        }
        Some(timings)
    }

    fn elapsed_us(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() * 1e6
    }

    pub(super) fn run(
        mut self,
        bench: &mut dyn Bench,
        tell: &mut dyn FnMut(&Progress) -> bool,
    ) -> (TuneReport, Vec<Query>) {
        let mut order: Vec<usize> = Vec::new();
        while let Some(slice) = self.next() {
            let go_on = self.progress(slice.id).is_none_or(|progress| tell(&progress));
            if !go_on || bench.is_interrupted() {
                self.report.interrupted = true;
                break;
            }
            let from = self.elapsed_us();
            let Rounds { loss, once_us, finished } = self.visit(slice.id, slice.rounds, bench);
            if !order.contains(&slice.id) {
                order.push(slice.id);
            }
            let took_us = self.elapsed_us() - from;
            let done = self.schedule.as_mut().map(|s| s.done(slice.id, Visit { loss, took_us, once_us, finished }));
            if !matches!(done, Some(Ok(()))) {
                break;
            }
        }
        self.finish(&order)
    }

    fn next(&mut self) -> Option<Slice> {
        let next = self.schedule.as_ref()?.next(self.elapsed_us());
        let is_first = next.as_ref().is_some_and(|slice| self.subjects[slice.id].checks.is_empty());
        if self.doubted || is_first || self.subjects.iter().all(|s| s.contest.is_none()) {
            return next;
        }
        self.doubt();
        self.schedule.as_ref()?.next(self.elapsed_us())
    }

    /// Looks again, once, at calls whose results do not go with those of calls that are nearly the same: a contest that
    /// took place in a bad moment of the machine is settled all the same, and only at another time can that be seen.
    fn doubt(&mut self) {
        self.doubted = true;
        let timings = |s: &Subject| match &s.contest {
            Some(contest) => contest.results(),
            None => self.known_timings(s).unwrap_or_default(),
        };
        let observations: Vec<Observation> =
            self.subjects.iter().flat_map(|subject| subject.observations(timings(subject))).collect();
        let model = Model::new(observations, &self.engine.devices());
        for (id, subject) in self.subjects.iter_mut().enumerate() {
            let (Some(contest), Some(schedule)) = (&mut subject.contest, &mut self.schedule) else { continue };
            let (loss, rounds) = (model.doubt(&subject.query), AGAIN * contest.rounds().min(self.options.samples));
            if loss > DOUBTFUL && schedule.doubt(id, loss.min(1.0), rounds).is_ok() {
                contest.reopen(rounds);
            }
        }
    }

    fn progress(&self, id: usize) -> Option<Progress> {
        let p = self.schedule.as_ref()?.progress(self.elapsed_us());
        let current = label(&self.subjects[id].wanted.call);
        let (spent_s, left_s) = (p.spent_us / 1e6, p.left_us / 1e6);
        Some(Progress { done: p.done_items, calls: p.items, spent_s, left_s, current })
    }

    /// Gives a call some rounds.
    fn visit(&mut self, id: usize, rounds: u32, bench: &mut dyn Bench) -> Rounds {
        let nothing_to_do = Rounds { loss: 0.0, once_us: 0.0, finished: true };
        let Wanted { call, device, mode, .. } = self.subjects[id].wanted.clone();
        if let Err(why) = bench.prepare(&call, device, mode) {
            self.report.impossible.push((call, why));
            return nothing_to_do;
        }
        let from = self.elapsed_us();
        self.check(id, bench);
        let once_us = self.elapsed_us() - from;
        let Some(contest) = &mut self.subjects[id].contest else {
            self.store(id);
            return nothing_to_do;
        };
        let until = contest.rounds().saturating_add(rounds);
        let mut finished = false;
        loop {
            match contest.next() {
                Next::Time { candidate, calls } => {
                    // A round that was begun is finished: all candidates are timed under the same conditions.
                    if contest.rounds() >= until {
                        break;
                    }
                    let name = contest.name(candidate).unwrap_or_default().to_owned();
                    let told = match bench.time(&name, calls) {
                        Ok(per_call_us) => contest.record(candidate, Sample { per_call_us, calls }),
                        Err(error) => contest.fail(candidate, error),
                    };
                    if told.is_err() {
                        let _ = contest.fail(candidate, "gave a time that is none");
                    }
                }
                Next::Settled | Next::Exhausted => {
                    finished = true;
                    break;
                }
            }
            if bench.is_interrupted() {
                self.report.interrupted = true;
                break;
            }
        }
        let loss = contest.loss();
        self.subjects[id].see(bench);
        self.store(id);
        Rounds { loss, once_us, finished }
    }

    /// Compares every candidate with the reference, the first time a call is visited. Only right ones are timed.
    fn check(&mut self, id: usize, bench: &mut dyn Bench) {
        let (seed, samples) = (self.options.seed.wrapping_add(id as u64), self.options.samples);
        let subject = &mut self.subjects[id];
        if subject.contest.is_some() || !subject.checks.is_empty() {
            return;
        }
        let max_rounds = samples.saturating_mul(MOST_ROUNDS);
        let rules = Rules { seed, sample_us: SAMPLE_US, min_rounds: samples, max_rounds, ..Rules::default() };
        let Ok(mut contest) = Contest::new(rules) else { return };
        for kernel in &subject.candidates {
            let checked = if kernel.reference {
                Checked::Right { max_error: None, warmup_ms: None }
            } else {
                bench.check(&kernel.id)
            };
            if matches!(checked, Checked::Right { .. }) {
                let _ = contest.add(&kernel.id, subject.baseline.as_ref() == Some(&kernel.id));
            }
            subject.checks.insert(kernel.id.clone(), checked);
        }
        let right = |c: &Checked| matches!(c, Checked::Right { .. });
        subject.contest = subject.checks.values().any(right).then_some(contest);
    }

    /// Keeps what is known of a call so far, unless more was known of it before.
    fn store(&mut self, id: usize) {
        self.remember_wrong(id);
        if !self.options.keep || self.subjects[id].is_less_than_known() {
            return;
        }
        if let Err(error) = self.engine.keep(self.records(id)) {
            self.report.not_kept = Some(error.to_string());
        }
    }

    /// Where no database keeps that a kernel is wrong, this process does: it is out of the operation.
    fn remember_wrong(&self, id: usize) {
        if self.options.keep && self.engine.config().settings.perfdb.enabled {
            return;
        }
        let subject = &self.subjects[id];
        for kernel in &subject.candidates {
            let Some(Checked::Wrong(error)) = subject.checks.get(&kernel.id) else { continue };
            let call = format!("{:?}", subject.query);
            let evidence = Evidence { error: error.clone(), call, max_error: None, tolerance: None };
            self.engine.found_wrong(kernel, &subject.query, evidence);
        }
    }

    fn records(&self, id: usize) -> Vec<Record> {
        let subject = &self.subjects[id];
        let Some(device) = self.unbiased.snapshot.device(subject.wanted.device) else { return Vec::new() };
        let timings = subject.contest.as_ref().map(Contest::results).unwrap_or_default();
        let op = Catalog::get().op(subject.query.op());
        let record = |kernel: &Arc<KernelDescriptor>| {
            let timing = timings.iter().find(|t| t.candidate == kernel.id);
            let (outcome, max_error) = outcome(subject.checks.get(&kernel.id)?, timing, subject.parts(&kernel.id))?;
            let call = subject.wanted.call.to_string();
            let key = Key::new(&kernel.id, op.id(), device_id(device), subject.wanted.mode, call)
                .threads(u32::from(subject.query.context().threads));
            Some(Record {
                shape: shape(&subject.query, device.sm.map_or(0, u32::from)),
                max_error,
                baseline: subject.baseline.as_ref() == Some(&kernel.id),
                provenance: provenance(&self.unbiased.snapshot, kernel, device),
                contest: Some(subject.id.clone()),
                ..Record::new(key, outcome)
            })
        };
        subject.candidates.iter().filter_map(record).collect()
    }

    fn finish(mut self, order: &[usize]) -> (TuneReport, Vec<Query>) {
        let mut queries = Vec::new();
        self.report.spent_s = self.begun.elapsed().as_secs_f64();
        for (id, subject) in self.subjects.iter().enumerate() {
            if !order.contains(&id) {
                let known = !self.options.force && self.known_timings(subject).is_some();
                if !known {
                    self.report.left.push(subject.wanted.call.clone());
                }
                continue;
            }
            let out = subject.checks.iter().filter_map(|(kernel, checked)| match checked {
                Checked::Right { .. } => None,
                Checked::Wrong(error) | Checked::Failed(error) => Some((kernel.clone(), error.clone())),
            });
            let contest = subject.contest.as_ref();
            queries.push(subject.query);
            self.report.tuned.push(Tuned {
                op: Catalog::get().op(subject.query.op()).id(),
                call: subject.wanted.call.clone(),
                label: label(&subject.wanted.call),
                mode: subject.wanted.mode,
                baseline: subject.baseline.clone(),
                timings: contest.map(Contest::results).unwrap_or_default(),
                out: out.collect(),
                loss: contest.map_or(0.0, Contest::loss),
                chosen: None,
                basis: None,
                runner_up: None,
                times_baseline: None,
            });
        }
        (self.report, queries)
    }
}

/// What a check and a timing come to; `None` when there is nothing to say yet.
fn outcome(checked: &Checked, timing: Option<&Timing>, parts: Option<Parts>) -> Option<(Outcome, Option<f64>)> {
    match checked {
        Checked::Wrong(error) => Some((Outcome::Wrong { error: error.clone() }, None)),
        Checked::Failed(error) => Some((Outcome::Failed { error: error.clone() }, None)),
        Checked::Right { max_error, warmup_ms } => {
            let timing = timing?;
            if let Some(error) = &timing.error {
                return Some((Outcome::Failed { error: error.clone() }, *max_error));
            }
            let stats = timing.stats.as_ref()?;
            // Who was left behind early was seen a few times only, and yet is behind for certain.
            let certain = if timing.retired { stats.median_us / 4.0 } else { f64::INFINITY };
            let ok = lz_perfdb::Timing {
                parts,
                variance_us: Some(stats.variance_us),
                warmup_ms: warmup_ms.or(timing.warmup_us.map(|us| us / 1e3)),
                ..lz_perfdb::Timing::new(
                    stats.median_us,
                    stats.p95_us.max(stats.median_us),
                    stats.spread_us.min(certain),
                    stats.samples,
                )
            };
            Some((Outcome::Ok(ok), *max_error))
        }
    }
}

/// The columns of the specification: for people and their queries.
fn shape(query: &Query, sm_version: u32) -> Shape {
    let op = Catalog::get().op(query.op());
    let dim = |names: &[&str]| names.iter().find_map(|n| op.dim_index(n)).map_or(0, |i| query.dim(i));
    let bucket =
        |size: i64| u32::try_from(size.max(0)).unwrap_or(u32::MAX).checked_next_power_of_two().unwrap_or(u32::MAX);
    Shape {
        sm_version,
        dtype: op.dtype(query).map_or_else(String::new, |d| d.name().to_owned()),
        head_dim: u32::try_from(dim(&["head_dim"])).unwrap_or(0),
        seq_bucket: bucket(dim(&["seq_q", "rows"])),
        batch_bucket: bucket(dim(&["batch"])),
    }
}

fn now_ms() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis())
}

impl Engine {
    /// Measures these calls with what runs their kernels, and goes by the results from then on. `tell` hears how far it
    /// is and says whether to go on. What was measured is kept at once, so that stopping loses nothing.
    pub fn tune(
        &self,
        wanted: &[Wanted],
        options: &TuneOptions,
        bench: &mut dyn Bench,
        tell: &mut dyn FnMut(&Progress) -> bool,
    ) -> Result<TuneReport, Error> {
        let (mut report, queries) = Tuning::new(self, wanted, options)?.run(bench, tell);
        if options.keep && !report.tuned.is_empty() {
            self.learn();
        }
        for (tuned, query) in report.tuned.iter_mut().zip(&queries) {
            self.with_snapshot(|snapshot| tuned.decide(snapshot, query));
        }
        Ok(report)
    }
}
