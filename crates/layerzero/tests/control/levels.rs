//! Levels of degradation: what moves them, what each admits, and the way back.

use super::*;

/// A measured time for every kernel: `slow.rms` is declared best and measured worst.
struct Measured;

impl PerfSource for Measured {
    fn estimate(&self, kernel: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        let median_us = if kernel.id == "slow.rms" { 50.0 } else { 10.0 };
        Some(Estimate {
            median_us,
            spread_us: 0.1,
            apart_us: None,
            sides: None,
            samples: 50,
            trusted: true,
            kind: EstimateKind::Measured,
        })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

/// An engine on which `flaky.rms` is chosen, `good.rms` comes after it, and `new.rms` has never served.
fn world(flaky: &Flaky) -> World {
    let w = World::with_kernels(&["good.rms", "new.rms"]);
    w.engine.register(descriptor("flaky.rms", 95), flaky.kernel()).unwrap();
    w.set("breaker.enabled", false);
    w
}

/// Twenty calls, of which so many go wrong.
fn calls(w: &World, flaky: &Flaky, bad: usize) {
    for i in 0..20 {
        flaky.fails_with((i < bad).then_some("no luck"));
        let _ = rms(&w.engine);
    }
    flaky.fails_with(None);
}

fn level(w: &World) -> &'static str {
    let level = w.engine.explain("rms_norm", &call(&[2, 4])).unwrap().level;
    assert_eq!(level, w.engine.level().name(), "decisions say the level");
    assert_eq!(level, w.engine.health().level.name());
    level
}

/// Kernels that may serve a call of a shape.
fn admitted(w: &World, shape: &[i64]) -> Vec<String> {
    let report = w.engine.explain("rms_norm", &call(shape)).unwrap();
    report.candidates.into_iter().filter(|c| c.accepted).map(|c| c.kernel_id).collect()
}

const SEEN: &[i64] = &[2, 4];
const UNSEEN: &[i64] = &[5000, 4];
const REFERENCE: &str = "lz_cpu.ref.norm.rms";

#[test]
fn full_admits_everything() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    // Seven of twenty falling back is what it bears.
    calls(&w, &flaky, 7);
    assert_eq!(level(&w), "full");
    assert_eq!(admitted(&w, SEEN), ["flaky.rms", "good.rms", "new.rms", REFERENCE]);
    assert!(!w.names().contains(&"level_changed"));
}

#[test]
fn reduced_admits_what_is_proven() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    calls(&w, &flaky, 12);
    assert_eq!(level(&w), "reduced");
    assert_eq!(w.names().last(), Some(&"level_changed"));
    for shape in [SEEN, UNSEEN] {
        assert_eq!(admitted(&w, shape), ["good.rms", REFERENCE]);
        for out in ["flaky.rms", "new.rms"] {
            let why = reasons(&w.engine, shape, out);
            assert!(why.contains("degraded to 'reduced'"), "{out}: {why}");
        }
    }
    assert_eq!(w.serves(), "good.rms");
}

#[test]
fn cached_admits_what_was_decided_before() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    calls(&w, &flaky, 18);
    assert_eq!(level(&w), "cached");
    assert_eq!(admitted(&w, SEEN), ["good.rms", REFERENCE]);
    assert_eq!(admitted(&w, UNSEEN), [REFERENCE]);
    assert!(reasons(&w.engine, UNSEEN, "good.rms").contains("degraded to 'cached'"));
    assert_eq!(w.serves(), "good.rms");
}

#[test]
fn rule_based_goes_by_rules_and_priorities_alone() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    w.engine.register(descriptor("slow.rms", 94), fill(4.0)).unwrap();
    w.engine.update(|spec| spec.perf = Arc::new(Measured)).unwrap();
    // Each has served before, so that all are proven but the one that fails.
    for kernel in ["slow.rms", "good.rms"] {
        w.engine.lock("norm.rms", kernel).unwrap();
        assert_eq!(w.serves(), kernel);
    }
    w.engine.lock("norm.rms", "flaky.rms").unwrap();
    w.set("fallback_enabled", false);
    calls(&w, &flaky, 16);
    w.engine.unlock("norm.rms").unwrap();
    w.set("fallback_enabled", true);
    assert_eq!(level(&w), "rule_based");
    let report = w.engine.explain("rms_norm", &call(SEEN)).unwrap();
    assert_eq!(report.basis, Basis::Declared, "nothing measured counts");
    assert_eq!(admitted(&w, SEEN), ["slow.rms", "good.rms", REFERENCE]);
    w.set("avoid_sources", Value::names(["slow"]));
    assert_eq!(w.serves(), "good.rms", "rules do");
}

#[test]
fn minimal_admits_references() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    w.set("fallback_enabled", false);
    calls(&w, &flaky, 20);
    assert_eq!(level(&w), "minimal");
    for shape in [SEEN, UNSEEN] {
        assert_eq!(admitted(&w, shape), [REFERENCE]);
    }
    assert!(reasons(&w.engine, SEEN, "good.rms").contains("degraded to 'minimal': only references run"));
    assert_eq!(w.serves(), REFERENCE);
}

#[test]
fn the_way_back_is_level_by_level_a_window_each() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    w.set("fallback_enabled", false);
    calls(&w, &flaky, 20);
    w.set("fallback_enabled", true);
    let mut seen = vec![level(&w)];
    while level(&w) != "full" {
        // Not before the window is over.
        w.advance(9_999);
        rms(&w.engine).unwrap();
        assert_eq!(Some(&level(&w)), seen.last());
        w.advance(1);
        rms(&w.engine).unwrap();
        assert_ne!(Some(&level(&w)), seen.last());
        seen.push(level(&w));
        assert!(seen.len() < 9, "{seen:?}");
    }
    assert_eq!(seen, ["minimal", "rule_based", "cached", "reduced", "full"]);
    assert_eq!(admitted(&w, SEEN), ["flaky.rms", "good.rms", "new.rms", REFERENCE]);
    assert_eq!(w.serves(), "flaky.rms");
    assert_eq!(w.names().iter().filter(|name| **name == "level_changed").count(), 5);
}

#[test]
fn a_bad_call_on_the_way_back_begins_the_window_anew() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    calls(&w, &flaky, 12);
    assert_eq!(level(&w), "reduced");
    // Every other call failed altogether: what is left at this level fails too.
    w.engine.nobody_served();
    w.advance(9_999);
    w.engine.nobody_served();
    w.advance(1);
    rms(&w.engine).unwrap();
    assert_eq!(level(&w), "reduced");
}

#[test]
fn levels_survive_a_change_of_other_settings_and_end_when_they_are_turned_off() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    calls(&w, &flaky, 12);
    w.set("log_selections", true);
    w.engine.register(descriptor("other.rms", 97), fill(3.0)).unwrap();
    assert_eq!(level(&w), "reduced");
    assert_eq!(w.serves(), "good.rms");
    w.set("degradation.enabled", false);
    assert_eq!(level(&w), "full");
    assert_eq!(w.serves(), "other.rms");
    assert_eq!(w.engine.level(), Level::Full);
}

#[test]
fn few_calls_move_nothing() {
    let flaky = Flaky::failing("no luck");
    let w = world(&flaky);
    (0..19).for_each(|_| drop(rms(&w.engine).unwrap()));
    assert_eq!(level(&w), "full");
    rms(&w.engine).unwrap();
    assert_eq!(level(&w), "cached");
}
