//! What precedes speed: rules, locks, levels, what is not compiled, what does not fit into memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use lz_model::*;
use lz_select::*;

use super::{Times, kernel, measured, query, query_with, ranking, spec, terms};

#[test]
fn the_operators_will_stands_above_speed() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 50)]);
    spec.perf = Arc::new(Times(BTreeMap::from([("a.x", measured(10.0, 0.1)), ("b.x", measured(99.0, 0.1))])));
    spec.policy = PolicySpec::default().prefer_source("b");
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "a.x"]);
    spec.policy = PolicySpec::default().avoid_source("a");
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "a.x"]);
}

#[test]
fn preferred_kernels_without_times_go_by_declared_priority() {
    // Plain torch's time is known, so that times decide. Those of the preferred library are not, but for its reference.
    let plain = KernelDescriptor { baseline: true, ..kernel("torch.x", 50) };
    let reference = KernelDescriptor { reference: true, ..kernel("lib.a.ref", 0) };
    let isas = [kernel("lib.x", 60), kernel("lib.x.avx2", 61), kernel("lib.x.avx512", 62)];
    let mut spec = spec([vec![plain, reference], isas.to_vec()].concat());
    spec.perf = Arc::new(Times(BTreeMap::from([("torch.x", measured(9.0, 0.1)), ("lib.a.ref", measured(1.0, 0.1))])));
    assert_eq!(ranking(&spec, &query()).0, ["torch.x", "lib.x.avx512", "lib.x.avx2", "lib.x", "lib.a.ref"]);
    spec.policy = PolicySpec::default().prefer_source("lib");
    assert_eq!(ranking(&spec, &query()).0, ["lib.x.avx512", "lib.x.avx2", "lib.x", "lib.a.ref", "torch.x"]);
}

#[test]
fn policy_terms_are_the_specifications() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 50), kernel("c.x", 50)]);
    spec.policy = PolicySpec::default().prefer_source("a").avoid_source("b").rule(
        "boost c on Hopper",
        Some("norm.rms"),
        Condition::Match(vec![("sm".into(), ">=90".into()), ("operation".into(), "norm.*".into())]),
        Action::Boost(Pattern::Kernel("c.*".into()), 7),
    );
    let points = |id| terms(&spec, id, &query()).policy;
    assert_eq!((points("a.x"), points("b.x"), points("c.x")), (20.0, -50.0, 7.0));
}

#[test]
fn rules_apply_only_where_their_condition_holds() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 60)]);
    let long = Condition::When("rows > 1000".into());
    spec.policy =
        PolicySpec::default().rule("avoid b when long", None, long, Action::Deny(Pattern::Source("b".into())));
    assert_eq!(ranking(&spec, &query_with(1000, Context::default())).0, ["b.x", "a.x"]);
    assert_eq!(ranking(&spec, &query_with(1001, Context::default())).0, ["a.x"]);
}

#[test]
fn a_kernel_that_must_be_compiled_first_loses_points_or_is_out() {
    let mut cold = kernel("a.jit", 80);
    cold.jit = true;
    let mut spec = spec(vec![cold, kernel("b.x", 50)]);
    assert_eq!(ranking(&spec, &query()).0, ["a.jit", "b.x"]);
    spec.health.insert("a.jit".into(), Health { cold: true, ..Health::default() });
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "a.jit"]);
    assert_eq!(terms(&spec, "a.jit", &query()).jit, -40.0);
    spec.settings.allow_jit = false;
    assert_eq!(ranking(&spec, &query()).0, ["b.x"]);
}

#[test]
fn rules_and_rollouts_do_not_make_calls_wait_for_a_compiler() {
    let mut cold = kernel("a.jit", 80);
    cold.jit = true;
    let mut spec = spec(vec![cold, kernel("b.x", 50), kernel("c.x", 40)]);
    spec.health.insert("a.jit".into(), Health { cold: true, ..Health::default() });
    let override_to =
        |pattern: Pattern| PolicySpec::default().rule("mine", None, Condition::Always, Action::Override(pattern));
    spec.policy = override_to(Pattern::Kernel("a.jit".into()));
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "c.x", "a.jit"]);
    assert_eq!(spec.build(1).unwrap().select(&query()).overridden_by, None);
    spec.policy =
        PolicySpec::default().rule("mine", None, Condition::Always, Action::Fallback(Pattern::Kernel("a.jit".into())));
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "c.x", "a.jit"]);
    // Compiled, or with nobody else there, it goes where the rule says.
    spec.policy = override_to(Pattern::Kernel("a.jit".into()));
    spec.health.clear();
    assert_eq!(ranking(&spec, &query()).0, ["a.jit", "b.x", "c.x"]);
    spec.health.insert("a.jit".into(), Health { cold: true, ..Health::default() });
    spec.policy =
        PolicySpec::default().rule("only", None, Condition::Always, Action::Lock(Pattern::Kernel("a.jit".into())));
    assert_eq!(ranking(&spec, &query()).0, ["a.jit"]);
}

#[test]
fn what_was_written_down_holds_for_any_number_of_threads() {
    let mut spec = spec(vec![kernel("a.x", 55), kernel("b.x", 50)]);
    let with = |threads: u16| query_with(128, Context { threads, ..Context::default() });
    spec.pins = Arc::new([Pin::exact(&with(16), "b.x", None, "table t".into())].into_iter().collect());
    assert_eq!(ranking(&spec, &with(1)).0, ["b.x", "a.x"]);
    assert_eq!(ranking(&spec, &with(16)).0, ["b.x", "a.x"]);
}

#[test]
fn quarantine_rules_out() {
    let mut spec = spec(vec![kernel("a.x", 55), kernel("b.x", 50)]);
    assert_eq!(ranking(&spec, &query()).0, ["a.x", "b.x"]);
    spec.health.insert("a.x".into(), Health { quarantined: Some("launch failed".into()), ..Health::default() });
    assert_eq!(ranking(&spec, &query()).0, ["b.x"]);
}

#[test]
fn on_devices_without_references_plain_torch_is_the_last_resort() {
    let mut plain = kernel("torch.x", 10);
    plain.baseline = true;
    let mut spec = spec(vec![kernel("a.x", 55), plain]);
    assert_eq!(ranking(&spec, &query()).0.len(), 2);
    let nothing = Restriction { level: "reduced", ..Restriction::default() };
    let restrictions = [
        Restriction { only_references: true, ..nothing.clone() },
        Restriction { proven: Some(Arc::default()), ..nothing.clone() },
        Restriction { settled: Some(Arc::default()), ..nothing },
    ];
    for restriction in restrictions {
        spec.restriction = restriction;
        assert_eq!(ranking(&spec, &query()).0, ["torch.x"], "{:?}", spec.restriction);
    }
    spec.restriction = Restriction::default();
    spec.settings.enabled = false;
    assert_eq!(ranking(&spec, &query()).0, ["torch.x"]);
    // On the CPU there are references; where none can serve the call, plain torch does.
    spec.kernels.iter_mut().for_each(|k| Arc::make_mut(k).platforms = vec![Platform::Cpu]);
    spec.devices = vec![DeviceSpec::new(Platform::Cpu, "host")];
    assert_eq!(ranking(&spec, &query()).0, ["torch.x"]);
}

#[test]
fn a_lock_decides_alone_and_a_lock_on_an_invalid_kernel_leaves_none() {
    let mut spec = spec(vec![kernel("a.x", 10), kernel("b.x", 90)]);
    spec.policy = PolicySpec::default().lock("norm.rms", "a.x");
    assert_eq!(ranking(&spec, &query()), (vec!["a.x".into()], Basis::Locked));
    let deterministic = query_with(128, Context { deterministic: true, ..Context::default() });
    let snapshot = spec.build(1).unwrap();
    let decision = snapshot.select(&deterministic);
    assert!(decision.chosen().is_none());
    assert_eq!(decision.candidates[0].reasons, [Reason::NonDeterministic]);
    let b = &decision.candidates[1].reasons;
    assert!(b.contains(&Reason::PolicyLocked { locked: "a.x".into() }), "{b:?}");
}

#[test]
fn disabled_leaves_only_references() {
    let mut reference = kernel("z.reference", 0);
    reference.reference = true;
    let mut spec = spec(vec![kernel("a.x", 90), reference]);
    spec.settings.enabled = false;
    assert_eq!(ranking(&spec, &query()).0, ["z.reference"]);
}

/// Headroom rules kernels out, but not the last one: plain torch runs whatever is free.
#[test]
fn plain_torch_runs_where_no_workspace_fits() {
    let taking = |id: &str, priority, bytes: &str| KernelDescriptor {
        workspace: Some(bytes.into()),
        platforms: vec![Platform::Cuda],
        ..kernel(id, priority)
    };
    let plain = KernelDescriptor { baseline: true, ..taking("b.plain", 10, "2000") };
    let mut spec = spec(vec![taking("a.x", 90, "1000"), plain]);
    spec.devices = vec![DeviceSpec::new(Platform::Cuda, "made-up")];
    spec.settings.memory_headroom_bytes = 0;
    let snapshot = spec.build(1).unwrap();
    let ids = |free: i64| {
        spec.memory.set(DeviceIx(0), Some(MemoryState { free, largest_block: free }));
        let chain = snapshot.chain(&snapshot.select(&query())).unwrap();
        chain.steps().map(|(k, _)| snapshot.kernel(k).id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(ids(2000), ["a.x", "b.plain"]);
    assert_eq!(ids(1999), ["a.x"]);
    assert_eq!(ids(999), ["b.plain"]);
}
