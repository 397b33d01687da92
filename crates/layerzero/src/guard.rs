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

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use lz_model::KernelDescriptor;
use lz_resilience::degradation::{CallOutcome, Served};
use lz_resilience::{
    Admission, Breaker, BreakerConfig, BreakerState, Breakers, Counters, Degradation, DegradationConfig, Event,
    EventHook, EventLog, KernelHealth, Level, Rollout, Transition, is_out_of_memory, is_poisoning,
};
use lz_select::{Clock, Restriction, Settled, Snapshot};

use crate::ask::Step;
use crate::change::probe_memory;
use crate::engine::{Engine, State};
use crate::errands::Errand;
use crate::failures_file::Failures;

/// What went wrong with a kernel, as far as the next step depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It failed; the next may do better.
    Kernel,
    /// Memory ran out: the next to try is the one that needs the least.
    OutOfMemory,
    /// The device's context is lost: nothing of this backend runs in this process any more.
    Poisoned,
}

impl Fault {
    /// What an error's text says of it.
    pub fn of(detail: &str) -> Fault {
        if is_poisoning(detail) {
            Fault::Poisoned
        } else if is_out_of_memory(detail) {
            Fault::OutOfMemory
        } else {
            Fault::Kernel
        }
    }
}

/// The health of an engine: breakers, counters, level, events, rollouts.
pub(crate) struct Guard {
    pub clock: Clock,
    breakers: ArcSwap<Breakers>,
    pub counters: Counters,
    /// What earlier processes left of circuits that opened.
    pub failures: Failures,
    degradation: ArcSwap<Option<Degradation>>,
    pub events: EventLog,
    memory_seen_ms: AtomicU64,
    /// Whether somebody receives events.
    pub heard: bool,
    pub rollouts: ArcSwap<Vec<Arc<Rollout>>>,
}

/// Whether a kernel is never refused, however often it failed: what plain torch would run, and references.
pub(crate) fn always_runs(kernel: &KernelDescriptor) -> bool {
    kernel.reference || kernel.baseline
}

/// The version of a backend's library.
pub(crate) fn backend_version<'a>(snapshot: &'a Snapshot, backend: &str) -> Option<&'a str> {
    snapshot.spec().backends.get(backend).map(|state| state.descriptor.version.as_str())
}

fn disabled(step: &Step) -> String {
    format!("{} is disabled for this process", step.kernel.backend)
}

/// Seeds the jitter of breakers, so that the workers of one machine do not probe all at once.
fn seed() -> u64 {
    u64::from(std::process::id())
}

impl Guard {
    pub fn new(clock: Clock, hook: Option<EventHook>) -> Guard {
        Guard {
            clock,
            breakers: ArcSwap::from_pointee(Breakers::new(BreakerConfig::default(), seed())),
            counters: Counters::default(),
            failures: Failures::default(),
            degradation: ArcSwap::from_pointee(Some(Degradation::new(DegradationConfig::default()))),
            heard: hook.is_some(),
            events: hook.map_or_else(EventLog::default, EventLog::with_hook),
            memory_seen_ms: AtomicU64::new(0),
            rollouts: ArcSwap::default(),
        }
    }

    pub fn emit(&self, event: Event) {
        self.events.emit(self.clock.now_ms(), event);
    }

    /// The breaker of a kernel, of this version of its backend, for an operation.
    pub fn breaker(&self, kernel: &KernelDescriptor, backend_version: Option<&str>, op: &str) -> Arc<Breaker> {
        let breakers = self.breakers.load();
        let is_on = breakers.config().failure_threshold < u32::MAX;
        breakers.get_or(&kernel.backend, &kernel.id, op, || {
            if !is_on || always_runs(kernel) {
                return None;
            }
            let now_ms = self.clock.now_ms();
            Some((now_ms, self.failures.earlier(kernel, backend_version, op, now_ms)?))
        })
    }

    pub fn breakers(&self) -> Arc<Breakers> {
        self.breakers.load_full()
    }

    pub fn health(&self, kernel: &str) -> Arc<KernelHealth> {
        self.counters.get(kernel)
    }

    /// Breakers with other thresholds, all closed; what is out for good stays out.
    pub fn set_breakers(&self, config: BreakerConfig) {
        let next = self.breakers.load().reconfigured(config);
        self.breakers.store(Arc::new(next));
    }

    /// A controller with other thresholds, at the level that asks most of selection. `None` turns it off.
    pub fn set_degradation(&self, config: Option<DegradationConfig>) {
        self.degradation.store(Arc::new(config.map(Degradation::new)));
    }

    /// Begins anew with the thresholds there are.
    fn renew(&self) {
        let breakers = self.breakers.load();
        self.breakers.store(Arc::new(breakers.reconfigured(breakers.config().clone())));
        let degradation = self.degradation.load().as_ref().as_ref().map(|d| Degradation::new(d.config().clone()));
        self.degradation.store(Arc::new(degradation));
    }

    pub fn with_degradation<R>(&self, read: impl FnOnce(&Degradation) -> R) -> Option<R> {
        (**self.degradation.load()).as_ref().map(read)
    }
}

impl Engine {
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
            Fault::OutOfMemory => drop(self.refresh_memory()),
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

    /// A step that runs without anybody looking served `calls` calls; the last one took `took`.
    pub fn sampled(&self, step: &Step, calls: u64, took: Duration, ratio: Option<f64>) {
        step.health.latency().record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        step.breaker.record_success();
        self.record(Served::AsPlanned, ratio, calls);
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
            let _ = self.refresh_memory();
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
                self.note_closed(&step.kernel, step.op);
                Event::BreakerClosed { op, backend, kernel }
            }
            Some(Transition::Disabled) => Event::BackendDisabled { backend, reason: error },
        };
        self.guard.emit(event);
    }

    /// Puts calls into the window, and moves the level when that is due.
    fn record(&self, served: Served, latency_ratio: Option<f64>, calls: u64) {
        let now_ms = self.guard.clock.now_ms();
        let change = self.guard.with_degradation(|degradation| {
            degradation.record_many(now_ms, CallOutcome { served, latency_ratio }, calls);
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

    /// Has the memory of the devices looked at, once a minute.
    fn look_at_memory_soon(&self, now_ms: u64) {
        const EVERY_MS: u64 = 60_000;
        let last = &self.guard.memory_seen_ms;
        let then = last.load(Ordering::Relaxed);
        if now_ms < then.saturating_add(EVERY_MS)
            || last.compare_exchange(then, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_err()
            || then == 0
        {
            return;
        }
        self.later(Errand::LookAtMemory);
    }

    /// Looks at the memory of the devices; what workspaces may take follows it when it has changed much.
    pub(crate) fn look_at_memory(&self) {
        let (devices, known) = self.with_snapshot(|s| (s.spec().devices.clone(), s.spec().memory.clone()));
        let much = |now: i64, before: i64| now > before.saturating_mul(5) / 4 || now < before.saturating_mul(4) / 5;
        let changed = devices.iter().zip(&known).any(|(device, known)| match (probe_memory(device), known) {
            (Some(now), Some(before)) => much(now.free, before.free),
            _ => false,
        });
        if changed {
            let _ = self.refresh_memory();
        }
    }

    /// Forgets what failed: circuits close, the level is full again, kernels that were wrong are compared again. What a lost context has put out for good stays out.
    pub fn forget_failures(&self) {
        self.guard.renew();
        self.forget_earlier_failures();
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
        for (key, plan) in self.cache.plans(&state.snapshot) {
            let ids = plan.steps().map(|(kernel, _)| state.snapshot.kernel(kernel).id.clone());
            if let Some(kernel) = ids.into_iter().find(|id| proven.contains(id)) {
                settled.insert(key, kernel);
            }
        }
        settled
    }
}

impl State {
    /// A kernel's step for an operation.
    pub fn step(
        &self,
        guard: &Guard,
        op: &'static str,
        kernel: lz_select::KernelIx,
        transforms: lz_select::Transforms,
    ) -> Step {
        let descriptor = self.snapshot.kernel(kernel).clone();
        Step {
            op,
            breaker: guard.breaker(&descriptor, backend_version(&self.snapshot, &descriptor.backend), op),
            health: guard.health(&descriptor.id),
            kernel: descriptor,
            transforms,
            executable: self.executables[kernel.0 as usize].clone(),
            unproven: false,
        }
    }
}
