//! What stands around every run of a kernel: may it run now, how did it go, and what follows from that.
//!
//! ```text
//! admit      the breaker of (kernel, operation): closed, a probe, or refused; references and plain torch always run
//! succeeded  counts; a probe that succeeds may close the breaker
//! failed     counts, opens the breaker when due; a lost CUDA context puts the backend out for good, exhausted memory
//!            has memory looked at again and is nobody's failure
//! ```
//!
//! What it adds up to is a health score; when that falls, selection is restricted level by level (see [`Level`]).

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use lz_model::KernelDescriptor;
use lz_resilience::degradation::{Served, ServedCall};
use lz_resilience::{Admission, BreakerState, Degradation, Event, Level, Transition};
use lz_select::{Restriction, Settled};

use super::Core;
use super::circuits::{CircuitChange, CircuitRecord, since_1970_ms};
use super::errands::Errand;
use super::guard::{Fault, always_runs, backend_version};
use super::step::Step;

fn disabled(step: &Step) -> String {
    format!("{} is disabled for this process", step.kernel.backend)
}

impl Core {
    /// Whether a step may run now. References and what plain torch runs always may; `Err` says why another may not.
    pub fn admit<'a>(&self, step: &'a Step) -> Result<Admission<'a>, String> {
        if always_runs(&step.kernel) {
            return Ok(Admission::Closed);
        }
        match step.breaker.admit(|| self.guard.clock.now_ms()) {
            Admission::Refused { retry_in_ms: Some(ms) } => {
                Err(format!("the circuit of {} is open for {ms} ms", step.kernel.id))
            }
            Admission::Refused { retry_in_ms: None } => Err(disabled(step)),
            Admission::Probe(probe) => {
                self.tell_transition(step, probe.transition(), "");
                Ok(Admission::Probe(probe))
            }
            Admission::Closed => Ok(Admission::Closed),
        }
    }

    /// Whether a step may be run although its circuit may be open: by name, as an experiment, or as the last resort. Only a
    /// backend that lost its context may not; `Err` says so.
    pub fn admit_anyway(&self, step: &Step) -> Result<(), String> {
        let out = !always_runs(&step.kernel) && step.breaker.view().state == BreakerState::Disabled;
        if out { Err(disabled(step)) } else { Ok(()) }
    }

    /// A kernel that was run by name failed. That is an experiment: it lowers nobody's health and opens no circuit. What a
    /// failure says of the device still counts: a lost context, and memory that ran out.
    pub fn experiment_failed(&self, step: &Step, error: &str, detail: &str) {
        match Fault::of(detail) {
            Fault::Poisoned => self.disable_backend(&step.kernel.backend, error),
            Fault::OutOfMemory => self.refresh_memory(),
            Fault::Kernel => {}
        }
    }

    fn disable_backend(&self, backend: &str, error: &str) {
        self.guard.breakers().disable_backend(backend, error);
        self.guard.emit(Event::BackendDisabled { backend: backend.to_owned(), reason: error.to_owned() });
    }

    /// Whether a step may not even be probed now.
    pub fn refuses(&self, step: &Step) -> bool {
        if always_runs(&step.kernel) {
            return false;
        }
        match step.breaker.admit(|| self.guard.clock.now_ms()) {
            Admission::Refused { .. } => true,
            // Dropped, it frees its place for whoever runs the step.
            Admission::Probe(probe) => {
                self.tell_transition(step, probe.transition(), "");
                false
            }
            Admission::Closed => false,
        }
    }

    /// A step served a call. `instead`: another was to serve it, and failed.
    pub fn succeeded(&self, step: &Step, admission: Admission<'_>, instead: bool) {
        match admission {
            Admission::Probe(probe) => self.tell_transition(step, probe.succeeded(), ""),
            _ if always_runs(&step.kernel) => {}
            _ => step.breaker.record_success(),
        }
        if instead {
            step.health.record_fallback();
        }
        self.record(if instead { Served::Fallback } else { Served::AsPlanned }, None, 1);
    }

    /// A step that runs without anybody looking served `calls` calls. `took`: what the last one took, where that is known,
    /// and how that compares with the best there was.
    pub fn sampled(&self, step: &Step, calls: u64, took: Option<(Duration, Option<f64>)>) {
        if let Some((took, _)) = took {
            step.health.latency().record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        }
        step.breaker.record_success();
        self.record(Served::AsPlanned, took.and_then(|(_, ratio)| ratio), calls);
    }

    /// A step failed: what it said, in a line and in full. What follows from that has happened when this returns.
    pub fn failed(&self, step: &Step, admission: Admission<'_>, error: &str, detail: &str) -> Fault {
        let (op, backend, kernel) = (step.op.to_owned(), step.kernel.backend.clone(), step.kernel.id.clone());
        let now_ms = self.guard.clock.now_ms();
        step.health.record_failure(now_ms, error);
        let fault = Fault::of(detail);
        if fault == Fault::Poisoned {
            self.disable_backend(&backend, error);
            return fault;
        }
        if fault == Fault::OutOfMemory {
            // A probe that meets full memory has shown nothing: dropping it frees its place.
            drop(admission);
            self.guard.emit(Event::OutOfMemory { op, kernel, error: error.to_owned() });
            self.refresh_memory();
            return fault;
        }
        self.guard.emit(Event::KernelFailed { op, backend, kernel, error: error.to_owned() });
        let transition = match admission {
            Admission::Probe(probe) => probe.failed(now_ms, error),
            _ if always_runs(&step.kernel) => None,
            _ => step.breaker.record_failure(now_ms, error),
        };
        self.tell_transition(step, transition, error);
        fault
    }

    /// No kernel served a call.
    pub fn nobody_served(&self) {
        self.record(Served::Nobody, None, 1);
    }

    fn tell_transition(&self, step: &Step, transition: Option<Transition>, error: &str) {
        let (op, backend, kernel) = (step.op.to_owned(), step.kernel.backend.clone(), step.kernel.id.clone());
        let error = error.to_owned();
        let event = match transition {
            None => return,
            Some(Transition::Opened { openings, retry_at_ms }) => {
                self.note_opened(&step.kernel, step.op, openings, retry_at_ms, &error);
                Event::BreakerOpened { op, backend, kernel, openings, retry_at_ms, error }
            }
            Some(Transition::HalfOpened) => Event::BreakerHalfOpen { op, backend, kernel },
            Some(Transition::Closed) => {
                self.note(CircuitChange::Closed((backend.clone(), kernel.clone(), op.clone())));
                Event::BreakerClosed { op, backend, kernel }
            }
            Some(Transition::Disabled) => Event::BackendDisabled { backend, reason: error },
        };
        self.guard.emit(event);
    }

    fn note_opened(&self, kernel: &KernelDescriptor, op: &str, openings: u32, retry_at_ms: u64, error: &str) {
        let (now, clock) = (since_1970_ms(), self.guard.clock.now_ms());
        self.note(CircuitChange::Opened(CircuitRecord {
            backend: kernel.backend.clone(),
            backend_version: self.with_snapshot(|s| backend_version(s, &kernel.backend).map(str::to_owned)),
            kernel: kernel.id.clone(),
            version: kernel.version.clone(),
            op: op.to_owned(),
            error: error.to_owned(),
            openings,
            at: now,
            retry_at: now.saturating_add(retry_at_ms.saturating_sub(clock)),
        }));
    }

    fn note(&self, change: CircuitChange) {
        self.guard.circuits.note(change);
        self.errands.later(Errand::KeepCircuits);
    }

    /// Puts calls into the window, and moves the level when that is due.
    fn record(&self, served: Served, latency_ratio: Option<f64>, calls: u64) {
        let now_ms = self.guard.clock.now_ms();
        let change = self.guard.with_degradation(|degradation| {
            degradation.record_many(now_ms, ServedCall { served, latency_ratio }, calls);
            degradation.update(now_ms)
        });
        self.look_at_memory_soon(now_ms);
        if let Some(change) = change.flatten() {
            self.guard.emit(Event::LevelChanged {
                from: change.from,
                to: change.to,
                score: change.score,
                why: change.why,
            });
            self.restrict(change.to);
        }
    }

    /// Forgets what failed: circuits close, the level is full again, kernels that were wrong are compared again. What a lost context has put out for good stays out.
    pub fn forget_failures(&self) {
        self.guard.renew();
        self.guard.circuits.go_by(BTreeMap::new());
        self.note(CircuitChange::Forgotten);
        self.restrict(Level::Full);
        self.forget_wrong();
    }

    /// How degraded selection is now.
    pub fn level(&self) -> Level {
        self.guard.with_degradation(Degradation::level).unwrap_or(Level::Full)
    }

    /// Restricts selection to what a level allows.
    pub(crate) fn restrict(&self, level: Level) {
        let restriction = self.restriction(level);
        // What was built before is valid with another restriction as well.
        let _ = self.update(|spec| spec.restriction = restriction);
    }

    fn restriction(&self, level: Level) -> Restriction {
        let full = Restriction { level: level.name(), ..Restriction::default() };
        match level {
            Level::Full => full,
            Level::Reduced => Restriction { proven: Some(Arc::new(self.proven())), ..full },
            Level::Cached => Restriction { settled: Some(Arc::new(self.settled())), ..full },
            Level::RuleBased => Restriction { declared_only: true, proven: Some(Arc::new(self.proven())), ..full },
            Level::Minimal => Restriction { only_references: true, ..full },
        }
    }

    /// Kernels that have served calls, and whose last failure, if any, is older than a minute.
    fn proven(&self) -> HashSet<String> {
        const LONG_AGO_MS: u64 = 60_000;
        let now_ms = self.guard.clock.now_ms();
        let reports = self.guard.counters.report().into_iter();
        let well = |at_ms: u64| now_ms.saturating_sub(at_ms) > LONG_AGO_MS;
        reports
            .filter(|r| r.calls > 0 && r.last_error.as_ref().is_none_or(|e| well(e.at_ms)))
            .map(|r| r.kernel)
            .collect()
    }

    /// What the cache has decided so far, less the kernels that failed.
    fn settled(&self) -> Settled {
        let before = self.state.load().snapshot.spec().restriction.settled.clone();
        let (state, proven) = (self.state.load(), self.proven());
        let mut settled = before.map_or_else(Settled::default, |settled| (*settled).clone());
        for (key, chain) in self.cache.chains(&state.snapshot) {
            let ids = chain.steps().map(|(kernel, _)| state.snapshot.kernel(kernel).id.clone());
            if let Some(kernel) = ids.into_iter().find(|id| proven.contains(id)) {
                settled.insert(key, kernel);
            }
        }
        settled
    }
}
