//! How times that were not measured here are compared.

use std::collections::BTreeMap;
use std::sync::Arc;

use lz_model::*;
use lz_select::*;
use proptest::prelude::*;

/// Estimates by kernel id.
struct Known(BTreeMap<&'static str, Estimate>);

impl PerfSource for Known {
    fn estimate(&self, kernel: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        self.0.get(kernel.id.as_str()).copied()
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

fn predicted(median_us: f64, spread_us: f64, apart_us: Option<f64>, sides: Option<Sides>) -> Estimate {
    Estimate { median_us, spread_us, apart_us, sides, samples: 20, kind: EstimateKind::Predicted, trusted: true }
}

/// The ids in order; `torch.x` is what plain torch runs.
fn ranked(estimates: impl IntoIterator<Item = (&'static str, Estimate)>) -> Vec<String> {
    let known = Known(estimates.into_iter().collect());
    let mut spec = SnapshotSpec { devices: vec![DeviceSpec::new(Platform::Cpu, "a CPU")], ..SnapshotSpec::default() };
    for &id in known.0.keys() {
        let backend = id.split('.').next().unwrap();
        spec.backend(BackendDescriptor::native(backend, "1", vec![Platform::Cpu]));
        let mut kernel = KernelDescriptor::new(id, "norm.rms", backend);
        kernel.platforms = vec![Platform::Cpu];
        kernel.dtypes = DTypeSet::of(&[DType::F32]);
        kernel.layouts = vec![Layout::Strided];
        kernel.baseline = backend == "torch";
        spec.kernels.push(Arc::new(kernel));
    }
    spec.perf = Arc::new(known);
    let snapshot = spec.build(1).unwrap();
    let shape = [128, 64];
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape));
    let query = Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query;
    let decision = snapshot.select(&query);
    assert_eq!(decision.basis, Basis::Predicted);
    decision.ranked().map(|c| snapshot.kernel(c.kernel).id.clone()).collect()
}

/// Two that go by how they compare with a third share what disturbed it: √(0.5² + 0.5²) and 3% apart is enough, whatever each
/// may be off by alone.
#[test]
fn what_is_known_beside_another_is_compared_so() {
    let torch = predicted(13.0, 3.0, Some(0.5), None);
    let first = |apart_us| ranked([("torch.x", torch), ("lib.x", predicted(11.0, 3.0, apart_us, None))])[0].clone();
    assert_eq!(first(Some(0.5)), "lib.x");
    assert_eq!(first(Some(2.0)), "torch.x");
    assert_eq!(first(None), "torch.x", "√(3² + 3²) is more than 2");
}

/// A measured time is what it is: its noise is no doubt about it.
#[test]
fn a_measurement_is_no_guess() {
    let measured = Estimate { kind: EstimateKind::Measured, ..predicted(10.0, 1.0, None, None) };
    assert_eq!(ranked([("a.x", measured), ("b.x", predicted(10.3, 0.2, Some(0.1), None))])[0], "a.x");
}

/// A source that says what is no number is not asked.
#[test]
fn what_is_no_number_does_not_count() {
    let side = |apart_us| Side { median_us: 5.0, apart_us: Some(apart_us) };
    let broken = predicted(5.0, 0.1, Some(0.1), Some(Sides { host: side(f64::NAN), device: side(0.1) }));
    let known = predicted(9.0, 0.2, Some(0.1), None);
    assert_eq!(ranked([("a.x", broken), ("b.x", known), ("torch.x", predicted(9.5, 0.1, Some(0.1), None))])[0], "b.x");
}

fn estimate() -> impl Strategy<Value = Estimate> {
    let kind = prop_oneof![Just(EstimateKind::Measured), Just(EstimateKind::Predicted)];
    (0.1..100.0, 0.0..10.0, prop::option::of(0.0..10.0), kind).prop_map(|(median_us, spread_us, apart_us, kind)| {
        Estimate { kind, ..predicted(median_us, spread_us, apart_us, None) }
    })
}

proptest! {
    /// It does not matter which of the two is asked about the other, and who is ahead is faster.
    #[test]
    fn one_is_ahead_where_the_other_is_behind(a in estimate(), b in estimate(), baseline in any::<bool>()) {
        let (x, y) = (Rival { estimate: &a, baseline }, Rival { estimate: &b, baseline: !baseline });
        let mirrored = match y.compare(&x) {
            Compared::Ahead => Compared::Behind,
            Compared::Behind => Compared::Ahead,
            Compared::Tie => Compared::Tie,
        };
        prop_assert_eq!(x.compare(&y), mirrored);
        prop_assert_eq!(a.noise_to(&b), b.noise_to(&a));
        if x.compare(&y) == Compared::Ahead {
            prop_assert!(a.median_us < b.median_us);
        }
    }
}
