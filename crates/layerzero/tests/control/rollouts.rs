//! Kernels in a rollout.

use std::collections::BTreeSet;

use layerzero::resilience::rollout::{Compared, RolloutCall};
use layerzero::resilience::{Rollout, Verdict};

use super::*;

fn rollout(mode: &str, fraction: f64, more: &str) -> String {
    format!(
        "rollouts:\n  - {{name: new, operation: rms_norm, candidate: new.rms, mode: {mode}, fraction: {fraction}{more}}}\n"
    )
}

/// An engine on which `old.rms` serves, and `new.rms`, declared better, is in a rollout.
fn world(config: &str) -> World {
    let w = World::with_kernels(&["new.rms", "old.rms"]);
    w.load(config);
    w
}

/// Sizes that are no two in one cell.
fn sizes() -> impl Iterator<Item = [i64; 2]> {
    (0..400).map(|i| [1 << (i % 8), 16 + i / 8])
}

fn query(engine: &Engine, shape: &[i64]) -> Query {
    engine.bind("rms_norm", &call(shape)).unwrap().1.query
}

/// The sizes whose calls the candidate serves.
fn taken(engine: &Engine) -> BTreeSet<[i64; 2]> {
    let serves = |shape: &[i64; 2]| engine.select("rms_norm", &call(shape)).unwrap()[0] == "new.rms";
    sizes().filter(serves).collect()
}

/// What is in a rollout for some call.
fn rollout_of_a_call(engine: &Engine) -> Arc<Rollout> {
    let find = |shape: [i64; 2]| {
        let query = query(engine, &shape);
        engine.process().comparison(&query, &engine.steps(&query).unwrap())
    };
    sizes().find_map(find).unwrap().0
}

#[test]
fn a_canary_serves_its_share_and_always_the_same_calls() {
    let w = world(&rollout("canary", 0.25, ""));
    let all = sizes().map(|shape| w.engine.with_snapshot(|s| s.cell_key(&query(&w.engine, &shape))));
    let cells = all.map(|key| key.fingerprint()).collect::<BTreeSet<_>>().len();
    assert!(cells >= 300, "only {cells} different cells");
    let share = taken(&w.engine);
    assert!((60..140).contains(&share.len()), "{} of 400 at a quarter", share.len());
    // Again, after a reload that changes nothing, and in another process.
    assert_eq!(taken(&w.engine), share);
    w.engine.reload().unwrap();
    assert_eq!(taken(&w.engine), share);
    assert_eq!(taken(&world(&rollout("canary", 0.25, "")).engine), share);
    // A larger share holds the smaller; another seed takes others.
    let more = taken(&world(&rollout("canary", 0.5, "")).engine);
    assert!(more.is_superset(&share) && more.len() > share.len());
    assert_ne!(taken(&world(&rollout("canary", 0.25, ", seed: 1")).engine), share);
    assert_eq!(taken(&world(&rollout("canary", 1.0, "")).engine).len(), 400);
    assert_eq!(taken(&world("version: 1\n").engine).len(), 400, "without a rollout it serves everything");
}

#[test]
fn what_is_asked_run_and_explained_agrees_about_a_canary() {
    let w = world(&rollout("canary", 0.5, ""));
    let share = taken(&w.engine);
    for shape in sizes().take(60) {
        let expected = if share.contains(&shape) { "new.rms" } else { "old.rms" };
        let x = Tensor::from_f64(DType::F32, &shape, &vec![1.0; (shape[0] * shape[1]) as usize]);
        let done = w.engine.dispatch("rms_norm", Arguments::new().input("x", x.view())).unwrap();
        assert_eq!(done.kernel_id, expected);
        let report = w.engine.explain("rms_norm", &call(&shape)).unwrap();
        assert_eq!(report.chosen.as_deref(), Some(expected));
        assert_eq!(report.rollout.as_deref(), share.contains(&shape).then_some("new"));
        let out = reasons(&w.engine, &shape, "new.rms");
        assert_eq!(out.contains("rollout 'new'"), !share.contains(&shape), "{out}");
    }
}

#[test]
fn a_canary_that_fails_is_rolled_back() {
    let w = world(&rollout("canary", 0.25, ", min_samples: 20"));
    let share = taken(&w.engine);
    let rollout = rollout_of_a_call(&w.engine);
    for _ in 0..19 {
        w.engine.tried(&rollout, RolloutCall::FAILED);
        assert_eq!(taken(&w.engine), share, "nothing is judged before min_samples");
    }
    w.engine.tried(&rollout, RolloutCall::FAILED);
    assert_eq!(w.names(), ["rolled_back"]);
    assert!(taken(&w.engine).is_empty());
    assert!(matches!(w.engine.rollouts()[0].verdict, Verdict::RolledBack { .. }));
    assert!(!w.engine.health().is_well());
    // It stays so, whatever comes in late, and through a reload that says the same.
    w.engine.tried(&rollout, RolloutCall::OK);
    w.engine.reload().unwrap();
    assert!(taken(&w.engine).is_empty());
    assert!(w.engine.rearm("new"));
    assert!(!w.engine.rearm("newer"));
    assert_eq!(taken(&w.engine), share);
    assert_eq!(w.names().last(), Some(&"rearmed"));
    assert_eq!(w.engine.rollouts()[0].samples, 0);
}

#[test]
fn another_seed_begins_anew() {
    let w = world(&rollout("canary", 0.25, ", min_samples: 1"));
    w.engine.tried(&rollout_of_a_call(&w.engine), RolloutCall::FAILED);
    assert!(taken(&w.engine).is_empty());
    w.load(&rollout("canary", 0.25, ", min_samples: 1, seed: 2"));
    assert!(!taken(&w.engine).is_empty());
}

#[test]
fn a_canary_that_differs_or_is_slow_is_rolled_back() {
    let differs = RolloutCall { compared: Compared::Differs { max_error: 0.5 }, ..RolloutCall::OK };
    let slow = RolloutCall { serving_us: Some(1.0), candidate_us: Some(3.0), ..RolloutCall::OK };
    let well = RolloutCall {
        compared: Compared::Agrees { max_error: 0.0 },
        serving_us: Some(1.0),
        candidate_us: Some(1.0),
        ..RolloutCall::OK
    };
    for (outcome, gone) in [(differs, true), (slow, true), (well, false)] {
        let w = world(&rollout("canary", 0.25, ", min_samples: 20"));
        let rollout = rollout_of_a_call(&w.engine);
        (0..40).for_each(|_| w.engine.tried(&rollout, outcome));
        assert_eq!(taken(&w.engine).is_empty(), gone, "{outcome:?}");
        assert_eq!(w.names().contains(&"rolled_back"), gone, "{outcome:?}");
    }
}

#[test]
fn a_shadow_never_serves() {
    let w = world(&rollout("shadow", 1.0, ""));
    assert!(taken(&w.engine).is_empty());
    assert_eq!(w.serves(), "old.rms");
    let query = query(&w.engine, &[2, 4]);
    let steps = w.engine.steps(&query).unwrap();
    assert!(steps.iter().all(|step| step.kernel.id != "new.rms"), "not even as a fallback");
    let (rollout, other, serving) = w.engine.process().comparison(&query, &steps).unwrap();
    assert_eq!((rollout.spec().name.as_str(), other.kernel.id.as_str(), serving), ("new", "new.rms", false));
    // Nor when the kernel that serves fails.
    w.engine.unregister("old.rms", "1.0").unwrap();
    w.engine.register(descriptor("old.rms", 80), Flaky::failing("no luck").kernel()).unwrap();
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
}

#[test]
fn a_rule_that_is_called_like_a_rollout_is_not_one() {
    let rule = "rules:\n  - {name: \"rollout 'new' does not give it this call\", deny_sources: [another]}\n";
    let w = world(&rollout("shadow", 1.0, ""));
    w.engine.register(descriptor("another.rms", 99), fill(3.0)).unwrap();
    w.load(&(rollout("shadow", 1.0, "") + rule));
    let query = query(&w.engine, &[2, 4]);
    let steps = w.engine.steps(&query).unwrap();
    let (_, other, _) = w.engine.process().comparison(&query, &steps).unwrap();
    assert_eq!(other.kernel.id, "new.rms", "and not the kernel that the rule forbids");
}

#[test]
fn a_lock_stands_above_a_rollout() {
    let w = world(&rollout("canary", 0.25, ""));
    w.engine.lock("norm.rms", "old.rms").unwrap();
    assert!(taken(&w.engine).is_empty());
    w.engine.lock("norm.rms", "new.rms").unwrap();
    assert_eq!(taken(&w.engine).len(), 400);
}

#[test]
fn a_canary_falls_back_like_any_kernel() {
    let w = World::with_kernels(&["old.rms"]);
    w.engine.register(descriptor("new.rms", 95), Flaky::failing("no luck").kernel()).unwrap();
    w.load(&rollout("canary", 1.0, ""));
    let done = rms(&w.engine).unwrap();
    assert_eq!((done.kernel_id.as_str(), done.failures[0].kernel_id.as_str()), ("old.rms", "new.rms"));
}

#[test]
fn one_version_of_a_kernel_can_be_rollout_of_a_call() {
    let w = World::with_kernels(&["old.rms"]);
    for version in ["1.0", "2.0"] {
        let kernel = KernelDescriptor { version: version.into(), ..descriptor("new.rms", 95) };
        w.engine.register(kernel, fill(9.0)).unwrap();
    }
    w.load(&rollout("canary", 1.0, "").replace("new.rms", "new.rms@2.0"));
    assert_eq!(w.engine.select("rms_norm", &call(&[2, 4])).unwrap()[0], "new.rms@2.0");
    let query = query(&w.engine, &[2, 4]);
    assert!(w.engine.process().comparison(&query, &w.engine.steps(&query).unwrap()).is_some());
}
