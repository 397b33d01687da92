//! How candidates are ranked: every term of the score, and when speed decides alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use lz_model::*;
use lz_select::*;

/// Times by kernel id: median, spread, kind, trusted.
#[derive(Default)]
struct Times(BTreeMap<&'static str, (f64, f64, Option<EstimateKind>, bool)>);

impl PerfSource for Times {
    fn estimate(&self, kernel: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        let &(median_us, spread_us, kind, trusted) = self.0.get(kernel.id.as_str())?;
        let kind = kind.unwrap_or(EstimateKind::Measured);
        Some(Estimate { median_us, spread_us, apart_us: None, sides: None, samples: 20, kind, trusted })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

fn measured(median: f64, spread: f64) -> (f64, f64, Option<EstimateKind>, bool) {
    (median, spread, Some(EstimateKind::Measured), true)
}

fn kernel(id: &str, priority: i32) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", id.split('.').next().unwrap());
    kernel.platforms = vec![Platform::Cuda];
    kernel.dtypes = DTypeSet::of(&[DType::F32]);
    kernel.layouts = vec![Layout::Strided];
    kernel.inputs.insert("weight".into(), InputRule::default());
    kernel.priority = priority;
    kernel
}

fn spec(kernels: Vec<KernelDescriptor>) -> SnapshotSpec {
    let mut device = DeviceSpec::new(Platform::Cuda, "GPU");
    device.sm = Some(90);
    let devices = vec![device.completed(&GenerationTable::builtin())];
    let mut spec = SnapshotSpec { devices, ..SnapshotSpec::default() };
    for kernel in kernels {
        spec.backend(BackendDescriptor::native(kernel.backend.clone(), "1", vec![Platform::Cuda]));
        spec.kernels.push(Arc::new(kernel));
    }
    spec
}

fn query_with(rows: i64, context: Context) -> Query {
    let shape = [rows, 64];
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape)).context(context);
    Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query
}

fn query() -> Query {
    query_with(128, Context::default())
}

/// The ids of a decision's ranking.
fn ranking(spec: &SnapshotSpec, query: &Query) -> (Vec<String>, Basis) {
    let snapshot = spec.build(1).unwrap();
    let decision = snapshot.select(query);
    (decision.ranked().map(|c| snapshot.kernel(c.kernel).id.clone()).collect(), decision.basis)
}

fn terms(spec: &SnapshotSpec, id: &str, query: &Query) -> Terms {
    let snapshot = spec.build(1).unwrap();
    let decision = snapshot.select(query);
    decision.candidates.iter().find(|c| snapshot.kernel(c.kernel).id == id).unwrap().terms
}

#[test]
fn without_data_declared_priority_decides_and_ties_go_by_name() {
    let spec = spec(vec![kernel("b.x", 50), kernel("a.x", 50), kernel("c.x", 90)]);
    assert_eq!(ranking(&spec, &query()), (vec!["c.x".into(), "a.x".into(), "b.x".into()], Basis::Declared));
}

#[test]
fn without_data_plain_torch_wins_ties() {
    let mut plain = kernel("b.plain", 50);
    plain.baseline = true;
    let spec = spec(vec![kernel("a.x", 50), plain, kernel("c.x", 51)]);
    assert_eq!(ranking(&spec, &query()).0, ["c.x", "b.plain", "a.x"]);
}

#[test]
fn a_measured_fact_overrules_a_declared_priority() {
    let mut spec = spec(vec![kernel("a.slow", 100), kernel("b.fast", 1)]);
    spec.perf = Arc::new(Times(BTreeMap::from([("a.slow", measured(20.0, 1.0)), ("b.fast", measured(10.0, 1.0))])));
    assert_eq!(ranking(&spec, &query()), (vec!["b.fast".into(), "a.slow".into()], Basis::Measured));
}

#[test]
fn differences_inside_the_noise_are_ties_that_priority_breaks() {
    let mut spec = spec(vec![kernel("a.x", 10), kernel("b.x", 80), kernel("c.x", 99)]);
    let times = [("a.x", measured(10.0, 0.5)), ("b.x", measured(10.4, 0.2)), ("c.x", measured(12.0, 0.5))];
    spec.perf = Arc::new(Times(BTreeMap::from(times)));
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "a.x", "c.x"]);
}

#[test]
fn one_unmeasured_candidate_leaves_the_decision_to_the_score() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 50), kernel("c.unknown", 45)]);
    spec.perf = Arc::new(Times(BTreeMap::from([("a.x", measured(30.0, 1.0)), ("b.x", measured(10.0, 1.0))])));
    // Three times as slow costs 20 points: the unknown one stands between them.
    assert_eq!(ranking(&spec, &query()), (vec!["b.x".into(), "c.unknown".into(), "a.x".into()], Basis::Declared));
    assert_eq!(terms(&spec, "a.x", &query()).perf, -20.0);
    assert_eq!(terms(&spec, "b.x", &query()).perf, 0.0);
}

#[test]
fn a_newcomer_does_not_undo_what_was_measured_beside_the_default() {
    let plain = |id: &str, priority| {
        let mut kernel = kernel(id, priority);
        kernel.baseline = true;
        kernel
    };
    let times = || Arc::new(Times(BTreeMap::from([("a.x", measured(30.0, 1.0)), ("b.x", measured(10.0, 1.0))])));
    let mut known = spec(vec![plain("a.x", 50), kernel("b.x", 20), kernel("c.new", 90)]);
    known.perf = times();
    assert_eq!(ranking(&known, &query()), (vec!["b.x".into(), "a.x".into(), "c.new".into()], Basis::Measured));
    // Where the default itself was not measured, nothing says that what was is any good; another one that plain torch
    // would run only where the first cannot is not the default.
    for a in [kernel("a.x", 50), plain("a.x", 50)] {
        let mut unknown = spec(vec![a, kernel("b.x", 20), plain("c.new", 90)]);
        unknown.perf = times();
        assert_eq!(ranking(&unknown, &query()).1, Basis::Declared);
    }
}

#[test]
fn speed_takes_at_most_thirty_points_and_half_of_that_when_not_trusted() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 50), kernel("c.x", 50), kernel("d.none", 50)]);
    let doubtful = (20.0, 1.0, Some(EstimateKind::Measured), false);
    let times = [("a.x", measured(10.0, 1.0)), ("b.x", measured(1000.0, 1.0)), ("c.x", doubtful)];
    spec.perf = Arc::new(Times(BTreeMap::from(times)));
    assert_eq!(terms(&spec, "b.x", &query()).perf, -30.0);
    assert_eq!(terms(&spec, "c.x", &query()).perf, -5.0);
}

#[test]
fn predictions_decide_like_measurements_and_say_that_they_are_predictions() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 1)]);
    let predicted = (9.0, 0.5, Some(EstimateKind::Predicted), true);
    spec.perf = Arc::new(Times(BTreeMap::from([("a.x", measured(10.0, 0.1)), ("b.x", predicted)])));
    assert_eq!(ranking(&spec, &query()), (vec!["b.x".into(), "a.x".into()], Basis::Predicted));
}

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
fn ties_go_to_what_plain_torch_runs_and_predictions_err_each_for_itself() {
    let mut default = kernel("a.default", 40);
    default.baseline = true;
    let mut spec = spec(vec![default, kernel("b.x", 60), kernel("c.x", 50)]);
    let times = |kind, default: f64, b: f64| {
        let one = |time| (time, 2.0, Some(kind), true);
        Arc::new(Times(BTreeMap::from([("a.default", one(default)), ("b.x", one(b)), ("c.x", one(b))])))
    };
    spec.perf = times(EstimateKind::Measured, 101.5, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["a.default", "b.x", "c.x"]);
    spec.perf = times(EstimateKind::Measured, 103.0, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "c.x", "a.default"]);
    // Twice a noise of 2 is one of 2.83, and a prediction must promise 3% beyond it.
    spec.perf = times(EstimateKind::Predicted, 105.8, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["a.default", "b.x", "c.x"]);
    spec.perf = times(EstimateKind::Predicted, 105.9, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "c.x", "a.default"]);
}

/// As it was measured on a GPU: one that took longer than the baseline, and whose times varied more, was chosen.
#[test]
fn nobody_that_is_behind_the_default_wins_a_tie_by_being_noisy() {
    let mut default = kernel("a.default", 60);
    default.baseline = true;
    let mut spec = spec(vec![default, kernel("b.fast", 48), kernel("c.noisy", 50)]);
    let times = |noisy: f64| {
        let times =
            [("a.default", measured(28.3, 1.0)), ("b.fast", measured(23.4, 2.0)), ("c.noisy", measured(noisy, 8.0))];
        Arc::new(Times(BTreeMap::from(times)))
    };
    spec.perf = times(30.0);
    assert_eq!(ranking(&spec, &query()).0, ["b.fast", "a.default", "c.noisy"]);
    spec.perf = times(27.0);
    assert_eq!(ranking(&spec, &query()).0, ["c.noisy", "b.fast", "a.default"]);
}

/// The default ties with the fastest because that is noisy, and is behind another that is not: the noise of a third is no
/// reason to stay with it, and none to take somebody that is behind it.
#[test]
fn the_noise_of_the_fastest_does_not_keep_the_default_from_being_beaten() {
    let mut default = kernel("a.default", 60);
    default.baseline = true;
    let all = ["a.default", "b.noisy", "c.sure", "d.behind"];
    let others = [("b.noisy", 40), ("c.sure", 50), ("d.behind", 70)].map(|(id, priority)| kernel(id, priority));
    let mut spec = spec([vec![default], others.to_vec()].concat());
    let first = |spec: &mut SnapshotSpec, kind, us: [f64; 4]| {
        let times = all.into_iter().zip(us.into_iter().zip([0.3, 4.0, 0.3, 4.0]));
        spec.perf = Arc::new(Times(times.map(|(id, (us, spread))| (id, (us, spread, Some(kind), true))).collect()));
        ranking(spec, &query()).0
    };
    for kind in [EstimateKind::Measured, EstimateKind::Predicted] {
        let ranked = first(&mut spec, kind, [30.0, 27.0, 27.5, 30.9]);
        assert_eq!(ranked[..2], ["c.sure", "a.default"], "{kind:?}");
        // Not without that other one.
        assert_eq!(first(&mut spec, kind, [30.0, 27.0, 29.9, 30.9])[0], "a.default", "{kind:?}");
    }
    // Nor does it make a third, declared above both, the choice, which is behind another for certain.
    let mut third = spec.clone();
    third.kernels.push(Arc::new(kernel("c.slower", 80)));
    let times = [("a.default", 30.0, 0.3), ("b.noisy", 27.0, 4.0), ("c.sure", 27.5, 0.3), ("c.slower", 29.5, 0.3)];
    let times = times.map(|(id, us, spread)| (id, measured(us, spread)));
    third.perf = Arc::new(Times(BTreeMap::from(times)));
    assert_eq!(ranking(&third, &query()).0[0], "c.sure");
    // Ahead by more than noise, and by less than what a prediction must promise.
    assert_eq!(first(&mut spec, EstimateKind::Measured, [30.0, 27.0, 29.2, 30.9])[0], "c.sure");
    assert_eq!(first(&mut spec, EstimateKind::Predicted, [30.0, 27.0, 29.2, 30.9])[0], "a.default");
}

#[test]
fn a_promise_is_asked_of_whoever_replaces_the_default_where_either_was_not_measured() {
    let mut default = kernel("a.default", 40);
    default.baseline = true;
    let mut spec = spec(vec![default, kernel("b.x", 60), kernel("c.x", 50)]);
    let kinds = [EstimateKind::Measured, EstimateKind::Predicted];
    for (of_default, of_b) in kinds.into_iter().flat_map(|a| kinds.map(|b| (a, b))) {
        let one = |time, kind| (time, 0.0, Some(kind), true);
        let c = one(101.0, EstimateKind::Predicted);
        let times = [("a.default", one(102.9, of_default)), ("b.x", one(100.0, of_b)), ("c.x", c)];
        spec.perf = Arc::new(Times(BTreeMap::from(times)));
        let both_measured = (of_default, of_b) == (EstimateKind::Measured, EstimateKind::Measured);
        // Nobody asks it of one that replaces another than the baseline.
        let wanted = if both_measured { ["b.x", "a.default", "c.x"] } else { ["a.default", "b.x", "c.x"] };
        assert_eq!(ranking(&spec, &query()).0, wanted, "{of_default:?} {of_b:?}");
    }
}

#[test]
fn of_predictions_that_tie_the_better_one_wins_and_of_measurements_the_declared_one() {
    let mut spec = spec(vec![kernel("b.x", 60), kernel("c.x", 50)]);
    for (kind, first) in [(EstimateKind::Measured, "b.x"), (EstimateKind::Predicted, "c.x")] {
        let one = |time| (time, 2.0, Some(kind), true);
        spec.perf = Arc::new(Times(BTreeMap::from([("b.x", one(101.0)), ("c.x", one(100.0))])));
        assert_eq!(ranking(&spec, &query()).0[0], first);
    }
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
fn transforms_cost_points_and_strict_mode_refuses_them() {
    let mut picky = kernel("a.contiguous", 52);
    picky.layouts = vec![Layout::Contiguous];
    picky.transform_cost_hint = 1;
    let mut spec = spec(vec![picky, kernel("b.x", 50)]);
    let (shape, strides) = ([128, 64], [128, 2]);
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape).strided(&strides));
    let strided = Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query;
    assert_eq!(ranking(&spec, &query()).0, ["a.contiguous", "b.x"]);
    assert_eq!(ranking(&spec, &strided).0, ["b.x", "a.contiguous"]);
    assert_eq!(terms(&spec, "a.contiguous", &strided).transform, -6.0);
    spec.settings.strict = true;
    assert_eq!(ranking(&spec, &strided).0, ["b.x"]);
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
fn of_several_versions_the_newest_wins_a_tie_and_a_lock_can_name_one() {
    let version = |v: &str| {
        let mut k = kernel("a.x", 50);
        k.version = v.into();
        k
    };
    let mut spec = spec(vec![version("1.9"), version("1.10"), version("1.2")]);
    let chosen = |spec: &SnapshotSpec| {
        let snapshot = spec.build(1).unwrap();
        let decision = snapshot.select(&query());
        snapshot.kernel(decision.chosen().unwrap().kernel).version.clone()
    };
    assert_eq!(chosen(&spec), "1.10");
    spec.policy = PolicySpec::default().lock("norm.rms", "a.x@1.2");
    assert_eq!(chosen(&spec), "1.2");
}

#[test]
fn disabled_leaves_only_references() {
    let mut reference = kernel("z.reference", 0);
    reference.reference = true;
    let mut spec = spec(vec![kernel("a.x", 90), reference]);
    spec.settings.enabled = false;
    assert_eq!(ranking(&spec, &query()).0, ["z.reference"]);
}

#[test]
fn a_long_chain_still_ends_in_the_reference() {
    let mut kernels: Vec<_> = (0..10).map(|i| kernel(&format!("a.k{i}"), 90 - i)).collect();
    let mut reference = kernel("z.reference", 0);
    reference.reference = true;
    kernels.push(reference);
    let snapshot = spec(kernels).build(1).unwrap();
    let chain = snapshot.chain(&snapshot.select(&query())).unwrap();
    let ids: Vec<_> = chain.steps().map(|(k, _)| snapshot.kernel(k).id.clone()).collect();
    assert_eq!(ids, ["a.k0", "a.k1", "a.k2", "a.k3", "a.k4", "a.k5", "z.reference"]);
}

#[test]
fn whatever_does_not_fit_together_is_reported_all_at_once() {
    let mut unknown_op = kernel("a.op", 1);
    unknown_op.operation = "norm.rsm".into();
    let mut bad_formula = kernel("b.formula", 1);
    bad_formula.workspace = Some("rows * 'x'".into());
    let mut stranger = kernel("c.backend", 1);
    stranger.backend = "nobody".into();
    let mut spec = spec(vec![unknown_op, bad_formula, kernel("d.twice", 1), kernel("d.twice", 1)]);
    spec.kernels.push(Arc::new(stranger));
    spec.policy = PolicySpec::default().lock("norm.rms", "d.*").rule(
        "typo",
        None,
        Condition::When("rwos > 3".into()),
        Action::Deny(Pattern::Source("x".into())),
    );
    let Err(problems) = spec.build(1) else { panic!("must not build") };
    let text = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    for expected in ["'norm.rms'", "b.formula", "nobody", "registered twice", "rwos"] {
        assert!(text.contains(expected), "{expected} is missing in:\n{text}");
    }
}

#[test]
fn more_kernels_than_a_chain_can_name_are_refused() {
    let mut spec = spec(vec![kernel("a.x", 1)]);
    spec.kernels = vec![spec.kernels[0].clone(); MAX_KERNELS + 1];
    let Err(problems) = spec.build(1) else { panic!("must not build") };
    assert_eq!(problems, [SnapshotError::TooManyKernels { found: MAX_KERNELS + 1 }]);
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

/// A kernel that is not built in.
fn foreign(id: &str, priority: i32, trust: Trust) -> KernelDescriptor {
    KernelDescriptor { trust, ..kernel(id, priority) }
}

#[test]
fn a_kernel_that_is_not_built_in_wins_no_tie() {
    let first = |kernels: Vec<KernelDescriptor>, perf: Times| {
        let spec = SnapshotSpec { perf: Arc::new(perf), ..spec(kernels) };
        let snapshot = spec.build(1).unwrap();
        let decision = snapshot.select(&query());
        snapshot.kernel(decision.chosen().unwrap().kernel).id.clone()
    };
    let none = Times::default;
    for trust in [Trust::Unproven, Trust::Vouched] {
        let built_in = |priority| KernelDescriptor { baseline: true, ..kernel("z.norm", priority) };
        assert_eq!(first(vec![foreign("a.norm", 50, trust), built_in(50)], none()), "z.norm");
        assert_eq!(first(vec![foreign("a.norm", 51, trust), built_in(50)], none()), "a.norm");
        let tied = || Times([("a.norm", measured(10.0, 2.0)), ("z.norm", measured(10.5, 2.0))].into());
        assert_eq!(first(vec![foreign("a.norm", 50, trust), kernel("z.norm", 50)], tied()), "z.norm");
        let faster = || Times([("a.norm", measured(5.0, 0.1)), ("z.norm", measured(10.0, 0.1))].into());
        assert_eq!(first(vec![foreign("a.norm", 50, trust), built_in(50)], faster()), "a.norm");
    }
}

fn evidence() -> Evidence {
    Evidence { error: "off".into(), call: "a call".into(), max_error: Some(1.0), tolerance: Some(1e-5) }
}

#[test]
fn a_wrong_result_counts_for_the_whole_operation_and_for_plain_torch_only_for_the_class() {
    let kernels =
        vec![foreign("a.norm", 90, Trust::Unproven), KernelDescriptor { baseline: true, ..kernel("z.norm", 50) }];
    let mut spec = spec(kernels.clone());
    let gradients = query_with(128, Context { requires_grad: true, ..Context::default() });
    let proofs = Arc::make_mut(&mut spec.proofs);
    kernels.iter().for_each(|kernel| proofs.mismatched(kernel, &query(), evidence()));
    let out = |spec: &SnapshotSpec, query: &Query| -> Vec<bool> {
        let decision = spec.build(1).unwrap().select(query);
        decision.candidates.iter().map(|c| c.reasons.contains(&evidence().reason())).collect()
    };
    assert_eq!(out(&spec, &query()), [true, true]);
    assert_eq!(out(&spec, &query_with(4, Context::default())), [true, true], "whatever the sizes");
    assert_eq!(out(&spec, &gradients), [true, false], "gradients are another class");
    let proofs = Arc::make_mut(&mut spec.proofs);
    kernels.iter().for_each(|kernel| proofs.passed(kernel, &query()));
    assert_eq!(out(&spec, &query()), [false, false], "until it is right there");
}

#[test]
fn proof_is_needed_once_for_each_class() {
    let mut spec = spec(vec![foreign("a.norm", 90, Trust::Unproven), foreign("b.norm", 80, Trust::Vouched)]);
    let needs = |spec: &SnapshotSpec, query: &Query| {
        let snapshot = spec.build(1).unwrap();
        [KernelIx(0), KernelIx(1)].map(|ix| snapshot.needs_proof(ix, query))
    };
    let gradients = query_with(128, Context { requires_grad: true, ..Context::default() });
    assert_eq!(needs(&spec, &query()), [true, false]);
    Arc::make_mut(&mut spec.proofs).passed(&foreign("a.norm", 90, Trust::Unproven), &query());
    assert_eq!(needs(&spec, &query()), [false, false]);
    assert_eq!(needs(&spec, &query_with(7, Context::default())), [false, false]);
    assert_eq!(needs(&spec, &gradients), [true, false]);
    spec.settings.verify = Verify::Off;
    assert_eq!(needs(&spec, &gradients), [false, false]);
}

/// Times of another machine: `a.plain` is what plain torch runs.
fn with_prior(here: Times, prior: Times) -> SnapshotSpec {
    let mut plain = kernel("a.plain", 50);
    plain.baseline = true;
    let mut spec = spec(vec![plain, kernel("b.other", 20), kernel("c.third", 90)]);
    (spec.perf, spec.prior) = (Arc::new(here), Arc::new(prior));
    spec
}

fn told(median: f64, off: f64) -> (f64, f64, Option<EstimateKind>, bool) {
    (median, off, Some(EstimateKind::Prior), true)
}

#[test]
fn what_was_measured_elsewhere_decides_before_declared_priorities() {
    let elsewhere = || Times(BTreeMap::from([("a.plain", told(30.0, 2.0)), ("b.other", told(10.0, 1.0))]));
    let ids = |ids: [&str; 3]| ids.map(String::from).to_vec();
    let spec = with_prior(Times::default(), elsewhere());
    // Nobody timed the third kernel anywhere: its high priority counts for nothing against times.
    assert_eq!(ranking(&spec, &query()), (ids(["b.other", "a.plain", "c.third"]), Basis::Prior));
    let decision = spec.build(1).unwrap().select(&query());
    assert_eq!(decision.why().unwrap().to_string(), "fastest by what was measured on another machine");

    // What was measured here decides before it, whatever it says.
    let here = Times(BTreeMap::from([("a.plain", measured(10.0, 0.5)), ("b.other", measured(20.0, 0.5))]));
    assert_eq!(
        ranking(&with_prior(here, elsewhere()), &query()),
        (ids(["a.plain", "b.other", "c.third"]), Basis::Measured)
    );
    // Too little was: without the time of what plain torch runs, nothing says that the one that was measured is any good.
    let here = Times(BTreeMap::from([("b.other", measured(99.0, 0.5))]));
    assert_eq!(ranking(&with_prior(here, elsewhere()), &query()).1, Basis::Prior);
}

#[test]
fn what_was_measured_elsewhere_is_left_alone_where_it_cannot_decide() {
    // It knows one kernel, but not what plain torch runs.
    let spec = with_prior(Times::default(), Times(BTreeMap::from([("b.other", told(10.0, 1.0))])));
    assert_eq!(ranking(&spec, &query()).1, Basis::Declared);
    assert_eq!(terms(&spec, "b.other", &query()).perf, 0.0, "and leaves nothing behind");
    let decision = spec.build(1).unwrap().select(&query());
    assert!(decision.candidates.iter().all(|c| c.estimate.is_none()));
    // On a level where times do not count, neither do these.
    let times = Times(BTreeMap::from([("a.plain", told(30.0, 2.0)), ("b.other", told(10.0, 1.0))]));
    let mut spec = with_prior(Times::default(), times);
    spec.restriction.declared_only = true;
    assert_eq!(ranking(&spec, &query()).1, Basis::Declared);
}

#[test]
fn within_what_another_machine_may_differ_by_plain_torch_is_chosen() {
    let times = |other| Times(BTreeMap::from([("a.plain", told(30.0, 3.0)), ("b.other", told(other, 3.0))]));
    let first = |other| ranking(&with_prior(Times::default(), times(other)), &query()).0[0].clone();
    assert_eq!(first(28.0), "a.plain");
    assert_eq!(first(15.0), "b.other");
}
