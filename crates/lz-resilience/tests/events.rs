//! Events: their names, their words, and where they go.

use std::sync::{Arc, Mutex};

use lz_resilience::degradation::Why;
use lz_resilience::rollout::RollbackCause;
use lz_resilience::{Event, EventLog, Level, Severity, Stamped};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};

fn s(text: &str) -> String {
    text.to_owned()
}

/// One of each, with what people read of it and how much it matters.
fn all() -> Vec<(Event, &'static str, Severity)> {
    use Severity::{Error, Info, Warn};
    let (op, backend, kernel, error) = (s("norm.rms"), s("triton"), s("triton.rms"), s("boom"));
    let (rollout, candidate, sources) = (s("next"), s("triton.rms"), vec![s("layerzero.yaml")]);
    let (from, to, why) = (Level::Full, Level::Cached, Why::Failures);
    vec![
        (
            Event::KernelFailed {
                op: op.clone(),
                backend: backend.clone(),
                kernel: kernel.clone(),
                error: error.clone(),
            },
            "norm.rms: triton.rms failed: boom",
            Warn,
        ),
        (
            Event::FellBack { op: op.clone(), failed: kernel.clone(), served: s("lz.rms"), error: error.clone() },
            "norm.rms: triton.rms failed (boom); lz.rms served the call",
            Warn,
        ),
        (
            Event::BreakerOpened {
                op: op.clone(),
                backend: backend.clone(),
                kernel: kernel.clone(),
                openings: 2,
                retry_at_ms: 9,
                error: error.clone(),
            },
            "norm.rms: triton.rms keeps failing and is left alone for a while, time 2 in a row (boom)",
            Warn,
        ),
        (
            Event::BreakerHalfOpen { op: op.clone(), backend: backend.clone(), kernel: kernel.clone() },
            "norm.rms: triton.rms is tried again",
            Info,
        ),
        (
            Event::BreakerClosed { op: op.clone(), backend: backend.clone(), kernel: kernel.clone() },
            "norm.rms: triton.rms works again",
            Info,
        ),
        (
            Event::BackendDisabled { backend, reason: s("the context is lost") },
            "triton is disabled until the process ends: the context is lost",
            Error,
        ),
        (
            Event::OutOfMemory { op: op.clone(), kernel, error: error.clone() },
            "norm.rms: triton.rms ran out of memory: boom",
            Warn,
        ),
        (
            Event::LevelChanged { from, to, score: 55.4, why },
            "degradation level cached, was full: calls fail (health 55 of 100)",
            Warn,
        ),
        (
            Event::LevelChanged { from: to, to: from, score: 100.0, why: Why::Recovered },
            "degradation level full, was cached: a window of good health (health 100 of 100)",
            Info,
        ),
        (
            Event::ReloadSucceeded { version: 3, sources: sources.clone() },
            "configuration 3 is in force (layerzero.yaml)",
            Info,
        ),
        (
            Event::ReloadRefused { error, sources },
            "the configuration was refused, the last good one stays: boom (layerzero.yaml)",
            Error,
        ),
        (
            Event::RolledBack {
                rollout: rollout.clone(),
                op: op.clone(),
                candidate: candidate.clone(),
                why: RollbackCause::Slowdown { median: 2.0, limit: 1.25, samples: 50 },
            },
            "rollout next: triton.rms is out for norm.rms: it takes 2.00 times as long; 1.25 is allowed",
            Error,
        ),
        (
            Event::Rearmed { rollout: rollout.clone(), op: op.clone(), candidate: candidate.clone() },
            "rollout next: triton.rms is tried for norm.rms",
            Info,
        ),
        (
            Event::ShadowMismatch { rollout, op, candidate, serving: s("lz.rms"), max_error: Some(0.5) },
            "rollout next: triton.rms and lz.rms differ on norm.rms by 5.000e-1",
            Warn,
        ),
    ]
}

#[test]
fn every_event_has_its_name_its_words_and_its_severity() {
    let mut names = vec![];
    for (event, words, severity) in all() {
        assert_eq!(event.to_string(), words);
        assert_eq!(event.level(), severity, "{words}");
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["event"], event.name(), "the name in JSON is the name");
        assert_eq!(serde_json::from_value::<Event>(json).unwrap(), event);
        names.push(event.name());
    }
    names.dedup();
    assert_eq!(names, Event::NAMES, "every name is raised");
}

#[test]
fn the_last_256_are_remembered_in_order() {
    let log = EventLog::default();
    for n in 0..1000 {
        log.emit(n, Event::BreakerClosed { op: s("op"), backend: n.to_string(), kernel: s("k") });
    }
    let recent = log.recent();
    assert_eq!((recent.len(), log.count()), (256, 1000));
    assert_eq!((recent[0].number, recent[255].number, recent[255].at_ms), (745, 1000, 999));
    assert!(recent.windows(2).all(|two| two[0].number + 1 == two[1].number));
    let json = serde_json::to_value(&recent[0]).unwrap();
    assert_eq!((&json["event"], &json["backend"]), (&"breaker_closed".into(), &"744".into()));
    assert_eq!(serde_json::from_value::<Stamped>(json).unwrap(), recent[0]);
}

#[test]
fn long_messages_are_not_kept_whole() {
    let log = EventLog::default();
    let long = "x".repeat(1_000_000);
    for (mut event, ..) in all() {
        match &mut event {
            Event::KernelFailed { error, .. }
            | Event::FellBack { error, .. }
            | Event::BreakerOpened { error, .. }
            | Event::OutOfMemory { error, .. }
            | Event::ReloadRefused { error, .. }
            | Event::BackendDisabled { reason: error, .. } => *error = long.clone(),
            Event::RolledBack { why, .. } => *why = RollbackCause::Ordered { reason: long.clone() },
            _ => {}
        }
        log.emit(0, event);
    }
    for one in log.recent() {
        assert!(serde_json::to_string(&one).unwrap().len() < 2000, "{}", one.event.name());
    }
}

#[test]
fn a_hook_gets_every_event_and_may_ask_the_log() {
    let log: Arc<std::sync::OnceLock<EventLog>> = Arc::default();
    let heard = Arc::new(Mutex::new(vec![]));
    let (inner, hears) = (log.clone(), heard.clone());
    let hook = move |stamped: &Stamped| {
        // Not under the log's lock: this would not return.
        let count = inner.get().map_or(0, EventLog::count);
        hears.lock().unwrap().push((stamped.number, count));
    };
    assert!(log.set(EventLog::with_hook(Box::new(hook))).is_ok());
    all().into_iter().for_each(|(event, ..)| log.get().unwrap().emit(0, event));
    let expected: Vec<(u64, u64)> = (1..=all().len() as u64).map(|n| (n, n)).collect();
    assert_eq!(*heard.lock().unwrap(), expected);
}

/// A subscriber that writes down what it is given.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

struct Words(String);

impl Visit for Words {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0 += &format!(" {}={value}", field.name());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!(" {}={value:?}", field.name());
    }
}

impl Subscriber for Notes {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut words = Words(format!("{} {}", event.metadata().target(), event.metadata().level()));
        event.record(&mut words);
        self.0.lock().unwrap().push(words.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn every_event_goes_to_tracing() {
    let notes = Notes::default();
    let log = EventLog::default();
    tracing::subscriber::with_default(notes.clone(), || all().into_iter().for_each(|(event, ..)| log.emit(0, event)));
    let notes = notes.0.lock().unwrap();
    assert_eq!(notes.len(), all().len());
    for (note, (event, words, severity)) in notes.iter().zip(all()) {
        let level = format!("{severity:?}").to_uppercase();
        assert!(note.starts_with(&format!("layerzero {level} ")), "{note}");
        assert!(note.contains(&format!("event={}", event.name())) && note.contains(words), "{note}");
    }
}
