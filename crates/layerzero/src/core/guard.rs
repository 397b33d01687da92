//! What is kept of failures: circuits, counters, the level of degradation, events, rollouts. What happens to it around a run
//! of a kernel is in `admit.rs`.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arc_swap::ArcSwap;
use lz_model::KernelDescriptor;
use lz_resilience::{
    Breaker, BreakerConfig, Breakers, Counters, Degradation, DegradationConfig, Event, EventHook, EventLog,
    KernelHealth, Rollout, is_out_of_memory, is_poisoning,
};
use lz_select::{Clock, Snapshot};

use super::circuits::Circuits;

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
    /// Circuits that opened, for the next process.
    pub circuits: Circuits,
    degradation: ArcSwap<Option<Degradation>>,
    pub events: EventLog,
    pub memory_seen_ms: AtomicU64,
    /// When the figures of rollouts may be written again.
    pub publish_at_ms: AtomicU64,
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
            circuits: Circuits::default(),
            degradation: ArcSwap::from_pointee(Some(Degradation::new(DegradationConfig::default()))),
            heard: hook.is_some(),
            events: hook.map_or_else(EventLog::default, EventLog::with_hook),
            memory_seen_ms: AtomicU64::new(0),
            publish_at_ms: AtomicU64::new(0),
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
            Some((now_ms, self.circuits.earlier(kernel, backend_version, op, now_ms)?))
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
    pub fn renew(&self) {
        let breakers = self.breakers.load();
        self.breakers.store(Arc::new(breakers.reconfigured(breakers.config().clone())));
        let degradation = self.degradation.load().as_ref().as_ref().map(|d| Degradation::new(d.config().clone()));
        self.degradation.store(Arc::new(degradation));
    }

    pub fn with_degradation<R>(&self, read: impl FnOnce(&Degradation) -> R) -> Option<R> {
        (**self.degradation.load()).as_ref().map(read)
    }
}
