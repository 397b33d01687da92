//! How candidates are ranked: every term of the score, and when speed decides alone.

mod operator;
mod prior;
mod times;
mod trust;

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
