//! The breaker against a simple sequential model, and by cases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lz_resilience::{Admission, Breaker, BreakerConfig, BreakerReport, BreakerState, Breakers, Probe, Transition};
use proptest::prelude::*;

/// What a breaker is, written down as plainly as can be.
#[derive(Debug)]
enum Model {
    Closed { failures: u32 },
    Open { until: u64 },
    HalfOpen { successes: u32, under_way: Vec<usize>, newest: u64 },
    Forever,
}

#[derive(Debug, PartialEq)]
enum Admitted {
    Closed,
    Probe { first: bool },
    Refused(Option<u64>),
}

#[derive(Clone, Debug)]
enum Step {
    Success,
    Failure,
    Admit,
    ProbeSucceeds(usize),
    ProbeFails(usize),
    ProbeVanishes(usize),
    Wait(u64),
    Trip,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Success),
        6 => Just(Step::Failure),
        8 => Just(Step::Admit),
        5 => (0..4usize).prop_map(Step::ProbeSucceeds),
        2 => (0..4usize).prop_map(Step::ProbeFails),
        2 => (0..4usize).prop_map(Step::ProbeVanishes),
        6 => (0..200u64).prop_map(Step::Wait),
        1 => prop_oneof![19 => Just(Step::Admit), 1 => Just(Step::Trip)],
    ]
}

fn config() -> impl Strategy<Value = BreakerConfig> {
    (1..4u32, 1..4u32, 1..3u32, 50..150u64, 20..100u64).prop_map(|(failures, successes, probes, timeout, patience)| {
        BreakerConfig {
            failure_threshold: failures,
            success_threshold: successes,
            half_open_max_calls: probes,
            timeout_ms: timeout,
            max_timeout_ms: 400,
            probe_timeout_ms: patience,
        }
    })
}

struct World<'a> {
    breaker: &'a Breaker,
    config: BreakerConfig,
    model: Model,
    openings: u32,
    now: u64,
    probes: Vec<(usize, Probe<'a>)>,
    next: usize,
}

impl<'a> World<'a> {
    fn open(&mut self) -> Option<Transition> {
        self.openings += 1;
        let retry_at_ms = self.now + self.breaker.backoff_ms(self.openings);
        self.model = Model::Open { until: retry_at_ms };
        Some(Transition::Opened { openings: self.openings, retry_at_ms })
    }

    fn admit(&mut self) -> Admitted {
        let (now, next) = (self.now, self.next);
        match &mut self.model {
            Model::Closed { .. } => Admitted::Closed,
            Model::Forever => Admitted::Refused(None),
            Model::Open { until } if now < *until => Admitted::Refused(Some(*until - now)),
            Model::Open { .. } => {
                self.model = Model::HalfOpen { successes: 0, under_way: vec![next], newest: now };
                Admitted::Probe { first: true }
            }
            Model::HalfOpen { under_way, newest, .. } => {
                let waited = now - *newest;
                if under_way.len() >= self.config.half_open_max_calls as usize {
                    if waited < self.config.probe_timeout_ms {
                        return Admitted::Refused(Some(self.config.probe_timeout_ms - waited));
                    }
                    under_way.clear();
                }
                under_way.push(next);
                *newest = now;
                Admitted::Probe { first: false }
            }
        }
    }

    /// Ends a probe in the model; `None` if it has no say any more.
    fn end(&mut self, id: usize) -> Option<()> {
        let Model::HalfOpen { under_way, .. } = &mut self.model else { return None };
        under_way.remove(under_way.iter().position(|&other| other == id)?);
        Some(())
    }

    fn take(&mut self, which: usize) -> Option<(usize, Probe<'a>)> {
        (!self.probes.is_empty()).then(|| self.probes.swap_remove(which % self.probes.len()))
    }

    fn go(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Success => {
                self.breaker.record_success();
                if let Model::Closed { failures } = &mut self.model {
                    *failures = 0;
                }
            }
            Step::Failure => {
                let mut due = false;
                if let Model::Closed { failures } = &mut self.model {
                    *failures += 1;
                    due = *failures == self.config.failure_threshold;
                }
                let expected = if due { self.open() } else { None };
                prop_assert_eq!(self.breaker.record_failure(self.now, "failed"), expected);
            }
            Step::Admit => {
                let expected = self.admit();
                let now = self.now;
                let got = match self.breaker.admit(|| now) {
                    Admission::Closed => Admitted::Closed,
                    Admission::Refused { retry_in_ms } => Admitted::Refused(retry_in_ms),
                    Admission::Probe(probe) => {
                        let first = probe.transition() == Some(Transition::HalfOpened);
                        self.probes.push((self.next, probe));
                        self.next += 1;
                        Admitted::Probe { first }
                    }
                };
                prop_assert_eq!(got, expected);
            }
            Step::ProbeSucceeds(which) => {
                let Some((id, probe)) = self.take(which) else { return Ok(()) };
                let mut expected = None;
                if self.end(id).is_some()
                    && let Model::HalfOpen { successes, .. } = &mut self.model
                {
                    *successes += 1;
                    if *successes == self.config.success_threshold {
                        (self.model, self.openings) = (Model::Closed { failures: 0 }, 0);
                        expected = Some(Transition::Closed);
                    }
                }
                prop_assert_eq!(probe.succeeded(), expected);
            }
            Step::ProbeFails(which) => {
                let Some((id, probe)) = self.take(which) else { return Ok(()) };
                let expected = if self.end(id).is_some() { self.open() } else { None };
                prop_assert_eq!(probe.failed(self.now, "failed again"), expected);
            }
            Step::ProbeVanishes(which) => {
                if let Some((id, probe)) = self.take(which) {
                    let _ = self.end(id);
                    drop(probe);
                }
            }
            Step::Wait(ms) => self.now += ms,
            Step::Trip => {
                let expected = (!matches!(self.model, Model::Forever)).then_some(Transition::Disabled);
                self.model = Model::Forever;
                prop_assert_eq!(self.breaker.trip_forever("poisoned"), expected);
            }
        }
        self.compare()
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let view = self.breaker.view();
        prop_assert_eq!(self.breaker.is_closed(), matches!(self.model, Model::Closed { .. }));
        prop_assert_eq!(view.openings, self.openings);
        prop_assert_eq!(view.sticky.is_some(), matches!(self.model, Model::Forever));
        let got = (view.state, view.failures, view.successes, view.retry_at_ms);
        let expected = match &self.model {
            Model::Closed { failures } => (BreakerState::Closed, *failures, 0, None),
            Model::Open { until } => (BreakerState::Open, 0, 0, Some(*until)),
            Model::HalfOpen { successes, .. } => (BreakerState::HalfOpen, 0, *successes, None),
            Model::Forever => (BreakerState::Disabled, 0, 0, None),
        };
        prop_assert_eq!(got, expected);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn it_is_its_model(
        config in config(),
        seed: u64,
        // Now and then across the edge of the 32 bits in which probes keep their time.
        begin in prop_oneof![Just(0), Just(u64::from(u32::MAX) - 500), 0..u64::from(u32::MAX) * 8],
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let breaker = Breaker::new(&config, seed);
        let mut world = World {
            breaker: &breaker, config, model: Model::Closed { failures: 0 }, openings: 0, now: begin, probes: vec![], next: 0,
        };
        for step in steps {
            world.go(step)?;
        }
    }

    #[test]
    fn openings_double_with_a_tenth_of_jitter_up_to_the_most(seed: u64, opening in 1..200u32) {
        let config = BreakerConfig::default();
        let lasts = Breaker::new(&config, seed).backoff_ms(opening);
        let doubled = (30_000f64 * 2f64.powi(opening as i32 - 1)).min(600_000.0);
        prop_assert!(lasts as f64 >= (doubled * 0.9).floor() && lasts as f64 <= (doubled * 1.1).min(600_000.0), "{lasts}");
        prop_assert_eq!(lasts, Breaker::new(&config, seed).backoff_ms(opening), "the same seed, the same jitter");
    }

    #[test]
    fn no_limits_and_no_times_do_harm(
        failures: u32, successes: u32, probes: u32, timeout: u64, most: u64, patience: u64, times: [u64; 8],
    ) {
        let config = BreakerConfig {
            failure_threshold: failures % 3, success_threshold: successes, half_open_max_calls: probes,
            timeout_ms: timeout, max_timeout_ms: most, probe_timeout_ms: patience,
        };
        let breaker = Breaker::new(&config, 1);
        for now in times {
            match breaker.admit(|| now) {
                Admission::Closed => drop(breaker.record_failure(now, "")),
                Admission::Probe(probe) => drop(probe.failed(now, "")),
                Admission::Refused { .. } => {}
            }
        }
        breaker.view();
        // Whatever the clock said before, at the end of time it lets somebody in.
        let refused = matches!(breaker.admit(|| u64::MAX), Admission::Refused { .. });
        prop_assert!(!refused);
    }
}

fn opened(breaker: &Breaker) -> u64 {
    match (0..5).find_map(|_| breaker.record_failure(1000, "boom")) {
        Some(Transition::Opened { retry_at_ms, .. }) => retry_at_ms,
        other => panic!("{other:?}"),
    }
}

#[test]
fn jitter_differs_between_breakers() {
    let lengths = (0..100).map(|seed| Breaker::new(&BreakerConfig::default(), seed).backoff_ms(1));
    assert!(lengths.collect::<std::collections::BTreeSet<_>>().len() > 90);
}

#[test]
fn the_clock_is_read_only_when_it_matters() {
    let breaker = Breaker::new(&BreakerConfig::default(), 0);
    let admission = breaker.admit(|| panic!("a closed breaker needs no clock"));
    assert!(matches!(admission, Admission::Closed));
}

#[test]
fn a_dropped_probe_frees_its_place_even_by_a_panic() {
    let breaker = Breaker::new(&BreakerConfig::default(), 0);
    let at = opened(&breaker);
    let call = std::panic::AssertUnwindSafe(|| {
        let Admission::Probe(_probe) = breaker.admit(|| at) else { return };
        panic!("inside the probed call");
    });
    assert!(std::panic::catch_unwind(call).is_err());
    assert!(matches!(breaker.admit(|| at), Admission::Probe(_)));
}

#[test]
fn the_view_tells_what_went_wrong() {
    let breaker = Breaker::new(&BreakerConfig::default(), 0);
    let at = opened(&breaker);
    let view = breaker.view();
    assert_eq!((view.state, view.openings, view.retry_at_ms), (BreakerState::Open, 1, Some(at)));
    let last = view.last_error.unwrap();
    assert_eq!((last.message.as_str(), last.at_ms), ("boom", 1000));
    assert_eq!(breaker.trip_forever("illegal memory access"), Some(Transition::Disabled));
    assert_eq!(breaker.trip_forever("something later"), None);
    let json = serde_json::to_value(breaker.view()).unwrap();
    assert_eq!((&json["state"], &json["sticky"]), (&"disabled".into(), &"illegal memory access".into()));
    assert!(matches!(breaker.admit(|| u64::MAX), Admission::Refused { retry_in_ms: None }));
}

#[test]
fn under_fire_every_change_is_told_once_and_in_order() {
    // With more, those of the opening before may still be under way.
    let config = BreakerConfig { timeout_ms: 0, half_open_max_calls: 1, ..BreakerConfig::default() };
    let (breaker, probing) = (Breaker::new(&config, 0), AtomicU32::new(0));
    let (opened, halved, closed) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    let count = |change: Option<Transition>| match change {
        Some(Transition::Opened { .. }) => drop(opened.fetch_add(1, Ordering::Relaxed)),
        Some(Transition::HalfOpened) => drop(halved.fetch_add(1, Ordering::Relaxed)),
        Some(Transition::Closed) => drop(closed.fetch_add(1, Ordering::Relaxed)),
        Some(Transition::Disabled) | None => {}
    };
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (breaker, probing, count) = (&breaker, &probing, &count);
            scope.spawn(move || {
                for n in 0..20_000u64 {
                    match breaker.admit(|| n) {
                        Admission::Closed => count(breaker.record_failure(n, "")),
                        Admission::Probe(probe) => {
                            count(probe.transition());
                            assert_eq!(probing.fetch_add(1, Ordering::AcqRel), 0, "two probes at once");
                            probing.fetch_sub(1, Ordering::AcqRel);
                            count(if (n + thread) % 5 == 0 { probe.failed(n, "") } else { probe.succeeded() });
                        }
                        Admission::Refused { .. } => {}
                    }
                }
            });
        }
    });
    let view = breaker.view();
    let (opened, halved, closed) = (opened.into_inner(), halved.into_inner(), closed.into_inner());
    assert!(opened > 10 && closed > 0);
    assert_eq!(opened - halved, u32::from(view.state == BreakerState::Open));
    assert!(closed <= halved);
}

#[test]
fn the_table_has_one_breaker_for_each_kernel_and_operation() {
    let breakers = Breakers::new(BreakerConfig::default(), 7);
    let first = breakers.get("flash", "flash.fast", "attention");
    assert!(Arc::ptr_eq(&first, &breakers.get("flash", "flash.fast", "attention")));
    for (backend, kernel, op) in
        [("flash", "flash.fast", "norm"), ("flash", "flash.slow", "attention"), ("xformers", "flash.fast", "attention")]
    {
        let other = breakers.get(backend, kernel, op);
        assert!(!Arc::ptr_eq(&first, &other));
        assert_ne!(first.backoff_ms(1), other.backoff_ms(1), "{backend} {kernel} {op}");
    }
    let at = opened(&first);
    assert_eq!(breakers.next_retry_at_ms(), Some(at));
    let report = breakers.report();
    let row = |one: &BreakerReport| format!("{} {} {} {}", one.backend, one.kernel, one.op, one.view.state);
    assert_eq!(
        report.iter().map(row).collect::<Vec<_>>(),
        [
            "flash flash.fast attention open",
            "flash flash.fast norm closed",
            "flash flash.slow attention closed",
            "xformers flash.fast attention closed",
        ]
    );
    breakers.forget(|kernel| kernel == "flash.fast");
    let left = breakers.report().into_iter().map(|one| one.kernel).collect::<Vec<_>>();
    assert_eq!(left, ["flash.slow"], "forgotten");
    assert!(breakers.get("flash", "flash.fast", "attention").is_closed());
}

#[test]
fn a_disabled_backend_is_out_for_operations_it_was_never_asked_for() {
    let breakers = Breakers::new(BreakerConfig::default(), 7);
    let held = breakers.get("flash", "flash.fast", "attention");
    breakers.get("xformers", "xformers.fast", "attention");
    let went = breakers.disable_backend("flash", "illegal memory access");
    assert_eq!(went, [("flash.fast".to_owned(), "attention".to_owned())]);
    assert!(breakers.disable_backend("flash", "once more").is_empty());
    assert!(!held.is_closed(), "whoever kept it sees it");
    assert!(!breakers.get("flash", "flash.fast", "norm").is_closed());
    assert!(!breakers.get("flash", "flash.slow", "attention").is_closed(), "its siblings are out as well");
    assert!(breakers.get("xformers", "xformers.fast", "attention").is_closed());
    breakers.forget(|_| true);
    assert!(!breakers.get("flash", "flash.fast", "attention").is_closed(), "for good");
    assert_eq!(breakers.disabled_because("flash").as_deref(), Some("illegal memory access"));
    assert_eq!(breakers.disabled_because("xformers"), None);
}

#[test]
fn another_configuration_keeps_what_is_out_for_good() {
    let breakers = Breakers::new(BreakerConfig::default(), 7);
    opened(&breakers.get("a", "k", "op"));
    breakers.get("b", "k", "op").trip_forever("poisoned");
    breakers.disable_backend("c", "poisoned");
    let next = breakers.reconfigured(BreakerConfig { failure_threshold: 1, ..BreakerConfig::default() });
    assert!(next.get("a", "k", "op").is_closed());
    assert!(!next.get("b", "k", "op").is_closed() && !next.get("c", "k", "op").is_closed());
    assert!(next.get("a", "k", "op").record_failure(0, "").is_some(), "the new threshold holds");
}
