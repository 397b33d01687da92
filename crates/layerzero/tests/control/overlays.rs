//! Settings for the calls of one context.

use std::collections::BTreeSet;
use std::sync::Barrier;

use super::*;

fn layer(entries: &[(&str, Value)]) -> CodeLayer {
    let mut layer = CodeLayer::context();
    layer.set_all(entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone()))).unwrap();
    layer
}

#[test]
fn calls_inside_follow_it_and_calls_outside_do_not() {
    let w = World::with_kernels(&["a.rms", "b.rms", "c.rms"]);
    let prefer = |name: &str| w.engine.overlay(layer(&[("prefer_sources", Value::names([name]))])).unwrap();
    let (b, c) = (prefer("b"), prefer("c"));
    let off = w.engine.overlay(layer(&[("enabled", Value::from(false))])).unwrap();
    for _ in 0..2 {
        assert_eq!(w.serves_in(&b), "b.rms");
        assert_eq!(w.serves_in(&c), "c.rms");
        assert_eq!(w.serves_in(&off), "lz_cpu.ref.norm.rms");
        assert_eq!(w.serves_in(&b), "b.rms");
        assert_eq!(w.serves(), "a.rms");
    }
    assert_eq!(prefer("b").id(), b.id(), "what says the same is the same");
}

#[test]
fn two_threads_are_in_two_overlays_at_once() {
    let w = World::with_kernels(&["a.rms", "b.rms", "c.rms"]);
    let together = Barrier::new(3);
    // Looked at in the end: a thread that panicked would leave the others waiting.
    let served = |overlay: OverlayId| {
        let one = || {
            together.wait();
            rms_in(&w.engine.scope(overlay)).map(|done| done.kernel_id).unwrap_or_else(|error| error.to_string())
        };
        (0..50).map(|_| one()).collect::<BTreeSet<String>>()
    };
    let inside = |source: &str| {
        let overlay = w.engine.overlay(layer(&[("prefer_sources", Value::names([source]))])).unwrap();
        served(overlay.id())
    };
    let (b, c, none) = std::thread::scope(|scope| {
        let (b, c) = (scope.spawn(|| inside("b")), scope.spawn(|| inside("c")));
        let none = served(OverlayId::NONE);
        (b.join().unwrap(), c.join().unwrap(), none)
    });
    let only = |kernel: &str| BTreeSet::from([kernel.to_owned()]);
    assert_eq!((b, c, none), (only("b.rms"), only("c.rms"), only("a.rms")));
}

#[test]
fn changes_of_the_engine_are_seen_inside() {
    let w = World::with_kernels(&["a.rms", "b.rms", "c.rms"]);
    let b = w.engine.overlay(layer(&[("prefer_sources", Value::names(["b"]))])).unwrap();
    assert_eq!(w.serves_in(&b), "b.rms");
    w.engine.lock("norm.rms", "c.rms").unwrap();
    assert_eq!(w.serves_in(&b), "c.rms");
    w.load("avoid_sources: [a]\n");
    w.engine.reload().unwrap();
    w.engine.unlock("norm.rms").unwrap();
    assert_eq!(w.serves_in(&b), "b.rms");
    w.engine.unregister("b.rms", "1.0").unwrap();
    assert_eq!(w.serves_in(&b), "c.rms");
}

#[test]
fn decisions_inside_are_remembered() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    let b = w.engine.overlay(layer(&[("prefer_sources", Value::names(["b"]))])).unwrap();
    let query = w.engine.bind("rms_norm", &call(&[2, 4])).unwrap().1.query;
    let decided = |id: OverlayId| w.engine.scope(id).chain(&query).unwrap();
    let (inside, outside) = (decided(b.id()), decided(OverlayId::NONE));
    assert_ne!(inside, outside);
    for _ in 0..3 {
        assert_eq!((decided(b.id()), decided(OverlayId::NONE)), (inside, outside));
    }
    // A scope keeps the state it was made with, whatever happens to the engine.
    let before = w.engine.scope(b.id());
    w.engine.lock("norm.rms", "a.rms").unwrap();
    assert_eq!(serves(&before), "b.rms");
    assert_eq!(w.serves_in(&b), "a.rms");
}

#[test]
fn explanations_follow_it() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    let b = w.engine.overlay(layer(&[("prefer_sources", Value::names(["b"]))])).unwrap();
    let report = w.engine.scope(b.id()).explain("rms_norm", &call(&[2, 4])).unwrap();
    assert_eq!(report.chosen.as_deref(), Some("b.rms"));
    assert_eq!(report.rules, ["prefer b (context)"]);
}

#[test]
fn there_is_no_end_to_them_and_those_nobody_holds_are_forgotten() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    let made = |i: i64| {
        let settings = [("memory_headroom_mb", Value::from(i)), ("prefer_sources", Value::names(["b"]))];
        w.engine.overlay(layer(&settings)).unwrap()
    };
    let first = made(0);
    let passed = made(1).id();
    for i in 2..1500 {
        made(i);
    }
    assert_eq!((made(0).id(), w.serves_in(&first)), (first.id(), "b.rms".into()), "somebody holds it");
    assert_ne!(made(1).id(), passed, "nobody did, and its number is not given again");
    assert_eq!(serves(&w.engine.scope(passed)), "a.rms", "a number nobody holds is no context");
}

#[test]
fn one_that_makes_no_sense_is_refused() {
    let w = World::new();
    let mut odd = CodeLayer::context();
    odd.set("degradation.minimal_health", Value::from(99)).unwrap();
    let error = w.engine.overlay(odd).unwrap_err();
    assert_eq!(error.code(), "INVALID_CONFIGURATION", "{error}");
}
