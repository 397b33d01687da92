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
        w.engine.within(b, || {
            assert_eq!(w.serves(), "b.rms");
            w.engine.within(c, || assert_eq!(w.serves(), "c.rms"));
            assert_eq!(w.serves(), "b.rms");
            w.engine.within(off, || assert_eq!(w.serves(), "lz_cpu.ref.norm.rms"));
            assert_eq!(w.serves(), "b.rms");
        });
        assert_eq!(w.serves(), "a.rms");
    }
    assert_eq!(prefer("b"), b, "what says the same is the same");
}

#[test]
fn it_ends_with_a_panic_too() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    let b = w.engine.overlay(layer(&[("prefer_sources", Value::names(["b"]))])).unwrap();
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| w.engine.within(b, || panic!("out"))));
    assert!(ended.is_err());
    assert_eq!(w.serves(), "a.rms");
}

#[test]
fn two_threads_are_in_two_overlays_at_once() {
    let w = World::with_kernels(&["a.rms", "b.rms", "c.rms"]);
    let together = Barrier::new(3);
    // Looked at in the end: a thread that panicked would leave the others waiting.
    let served = || {
        let one = || {
            together.wait();
            rms(&w.engine).map(|done| done.kernel_id).unwrap_or_else(|error| error.to_string())
        };
        (0..50).map(|_| one()).collect::<BTreeSet<String>>()
    };
    let inside = |source: &str| {
        let overlay = w.engine.overlay(layer(&[("prefer_sources", Value::names([source]))])).unwrap();
        w.engine.within(overlay, served)
    };
    let (b, c, none) = std::thread::scope(|scope| {
        let (b, c) = (scope.spawn(|| inside("b")), scope.spawn(|| inside("c")));
        let none = served();
        (b.join().unwrap(), c.join().unwrap(), none)
    });
    let only = |kernel: &str| BTreeSet::from([kernel.to_owned()]);
    assert_eq!((b, c, none), (only("b.rms"), only("c.rms"), only("a.rms")));
}

#[test]
fn changes_of_the_engine_are_seen_inside() {
    let w = World::with_kernels(&["a.rms", "b.rms", "c.rms"]);
    let b = w.engine.overlay(layer(&[("prefer_sources", Value::names(["b"]))])).unwrap();
    w.engine.within(b, || {
        assert_eq!(w.serves(), "b.rms");
        // Changed from inside as well: nothing waits for itself.
        w.engine.lock("norm.rms", "c.rms").unwrap();
        assert_eq!(w.serves(), "c.rms");
        w.load("avoid_sources: [a]\n");
        w.engine.reload().unwrap();
        w.engine.unlock("norm.rms").unwrap();
        assert_eq!(w.serves(), "b.rms");
        w.engine.unregister("b.rms", "1.0").unwrap();
        assert_eq!(w.serves(), "c.rms");
    });
}

#[test]
fn explanations_follow_it() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    let b = w.engine.overlay(layer(&[("prefer_sources", Value::names(["b"]))])).unwrap();
    w.engine.within(b, || {
        let report = w.engine.explain("rms_norm", &call(&[2, 4])).unwrap();
        assert_eq!(report.chosen.as_deref(), Some("b.rms"));
        assert_eq!(report.rules, ["prefer b (context)"]);
    });
}

#[test]
fn there_is_an_end_to_them() {
    let w = World::new();
    let made = |i: i64| w.engine.overlay(layer(&[("memory_headroom_mb", Value::from(i))]));
    for i in 0..1024 {
        made(i).unwrap();
    }
    let error = made(1024).unwrap_err();
    assert_eq!(error.code(), "TOO_MANY_CONTEXTS");
    assert!(made(0).is_ok(), "those that were made stay");
}

#[test]
fn one_that_makes_no_sense_is_refused() {
    let w = World::new();
    let mut odd = CodeLayer::context();
    odd.set("degradation.minimal_health", Value::from(99)).unwrap();
    let error = w.engine.overlay(odd).unwrap_err();
    assert_eq!(error.code(), "INVALID_CONFIGURATION", "{error}");
}
