//! How times that were not measured here are compared: by what is known of host and device apart, and with doubt.

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

/// A time of two sides, each with what it may be off by beside others, and of which the slower counts. Alone, it may be
/// off by a fifth.
fn of_sides(host: (f64, f64), device: (f64, f64)) -> Estimate {
    let side = |(median_us, apart_us)| Side { median_us, apart_us: Some(apart_us) };
    let sides = Sides { host: side(host), device: side(device) };
    let slower = if host.0 > device.0 { host } else { device };
    predicted(slower.0, 0.2 * slower.0, Some(slower.1), Some(sides))
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

/// The host sets the pace of torch's kernel and the device that of the other. Alone, each of the two times may be off by more
/// than they differ.
#[test]
fn what_is_behind_on_its_own_side_and_not_ahead_on_the_other_is_behind() {
    let torch = of_sides((33.0, 1.0), (26.9, 0.9));
    let ahead = of_sides((17.0, 0.2), (25.4, 0.3));
    assert!(ahead.spread_us.hypot(torch.spread_us) > torch.median_us - ahead.median_us);
    assert_eq!(ranked([("torch.x", torch), ("lib.x", ahead)]), ["lib.x", "torch.x"]);
    // One of its sides may be anything.
    for in_doubt in [of_sides((17.0, 20.0), (25.4, 0.3)), of_sides((17.0, 0.2), (25.4, 20.0))] {
        assert_eq!(ranked([("torch.x", torch), ("lib.x", in_doubt)]), ["torch.x", "lib.x"], "{in_doubt:?}");
    }
    // The other way round: the device of torch's, the host of the other.
    let torch = of_sides((11.4, 2.5), (12.9, 2.8));
    let ahead = of_sides((10.0, 0.1), (9.1, 0.1));
    assert_eq!(ranked([("torch.x", torch), ("lib.x", ahead)]), ["lib.x", "torch.x"]);
    // The host takes longer for it than for torch's.
    let (torch_of_host, behind_of_host) = (of_sides((9.0, 0.5), (12.9, 2.8)), of_sides((12.0, 0.1), (9.1, 0.1)));
    assert_eq!(ranked([("torch.x", torch_of_host), ("lib.x", behind_of_host)]), ["torch.x", "lib.x"]);
    // It may take the device as long.
    let as_much_of_device = of_sides((10.5, 0.1), (10.3, 0.1));
    assert_eq!(ranked([("torch.x", torch), ("lib.x", as_much_of_device)]), ["torch.x", "lib.x"]);
}

/// Where the same side sets the pace of both, what the other side takes does not count.
#[test]
fn the_same_side_of_both_is_compared_by_itself() {
    let torch = of_sides((5.0, 0.1), (13.0, 0.5));
    let lib = of_sides((9.0, 0.1), (11.0, 0.5));
    assert_eq!(ranked([("torch.x", torch), ("lib.x", lib)]), ["lib.x", "torch.x"]);
    let unsure = of_sides((4.0, 0.1), (11.0, 2.0));
    assert_eq!(ranked([("torch.x", torch), ("lib.x", unsure)]), ["torch.x", "lib.x"]);
}

/// The host sets the pace of both and takes as long for both, in doubt; the device is ahead of torch's by a seventh, which shows
/// whenever the host is faster than it was.
#[test]
fn of_those_the_host_makes_wait_the_one_the_device_is_sooner_done_with_is_better() {
    let torch = of_sides((31.6, 4.2), (28.0, 2.1));
    let first = |host, device| ranked([("torch.x", torch), ("lib.x", of_sides(host, device))])[0].clone();
    assert_eq!(first((32.6, 0.3), (24.0, 0.6)), "lib.x");
    // By the noise, and then by too little.
    assert_eq!(first((32.6, 0.3), (26.0, 0.6)), "torch.x");
    assert_eq!(first((32.6, 0.3), (25.6, 0.6)), "torch.x");
    // The host takes longer for it, by more than half of what the device takes less: surely, or in doubt.
    for host in [(34.5, 0.3), (35.7, 0.3), (33.0, 4.0), (38.0, 5.0), (45.0, 20.0)] {
        assert_eq!(first(host, (24.0, 0.6)), "torch.x", "{host:?}");
    }
    // So it is where the device sets the pace of torch's.
    let bound_by_device = of_sides((12.0, 3.0), (13.0, 0.3));
    assert_eq!(ranked([("torch.x", bound_by_device), ("lib.x", of_sides((14.9, 1.0), (11.0, 0.3)))])[0], "torch.x");
    // The device waits for the host in any case, however little is known of that.
    let unsure = Estimate { spread_us: 25.0, ..of_sides((31.6, 20.0), (12.0, 0.3)) };
    assert_eq!(ranked([("torch.x", unsure), ("lib.x", of_sides((31.6, 0.3), (9.0, 0.3)))])[0], "torch.x");
    let torch = of_sides((31.6, 4.2), (16.0, 1.0));
    assert_eq!(ranked([("torch.x", torch), ("lib.x", of_sides((32.6, 0.3), (12.0, 0.6)))])[0], "torch.x");
}

/// The device sets the pace of both and is sooner done with neither for certain; the host takes a third less for the other, which
/// shows whenever it is slower than it was.
#[test]
fn of_those_that_wait_for_the_device_the_one_that_takes_the_host_less_is_better() {
    let torch = of_sides((24.4, 2.3), (26.9, 0.9));
    let first = |host, device| ranked([("torch.x", torch), ("lib.x", of_sides(host, device))])[0].clone();
    assert_eq!(first((16.7, 0.2), (25.6, 0.3)), "lib.x");
    assert_eq!(first((16.7, 0.2), (27.2, 0.3)), "lib.x");
    // The device takes longer for it, surely or in doubt; or the host takes less by the noise alone.
    for (host, device) in [((16.7, 0.2), (29.0, 0.3)), ((16.7, 0.2), (27.2, 9.0)), ((23.0, 1.0), (26.2, 0.3))] {
        assert_eq!(first(host, device), "torch.x", "{host:?} {device:?}");
    }
    // However slow the host is, the device takes longer.
    let torch = of_sides((12.0, 0.5), (26.9, 0.9));
    assert_eq!(ranked([("torch.x", torch), ("lib.x", of_sides((8.0, 0.2), (25.6, 0.3)))])[0], "torch.x");
}

/// `a` is the fastest by its median; whether it is by more than the doubt about it decides.
#[test]
fn of_predictions_that_tie_the_less_doubtful_is_better() {
    let sure = predicted(10.3, 0.2, Some(0.1), None);
    for (apart_us, first) in [(2.0, "b.x"), (0.9, "b.x"), (0.4, "a.x")] {
        let doubtful = predicted(10.0, 2.0, Some(apart_us), None);
        assert_eq!(ranked([("a.x", doubtful), ("b.x", sure)])[0], first, "{apart_us}");
    }
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
    let broken = of_sides((5.0, f64::NAN), (4.0, 0.1));
    let known = predicted(9.0, 0.2, Some(0.1), None);
    assert_eq!(ranked([("a.x", broken), ("b.x", known), ("torch.x", predicted(9.5, 0.1, Some(0.1), None))])[0], "b.x");
}

fn estimate() -> impl Strategy<Value = Estimate> {
    let side =
        || (0.1..100.0, prop::option::of(0.0..10.0)).prop_map(|(median_us, apart_us)| Side { median_us, apart_us });
    let sides = prop::option::of((side(), side()).prop_map(|(host, device)| Sides { host, device }));
    let kind = prop_oneof![Just(EstimateKind::Measured), Just(EstimateKind::Predicted)];
    (0.1..100.0, 0.0..10.0, prop::option::of(0.0..10.0), sides, kind).prop_map(
        |(median_us, spread_us, apart_us, sides, kind)| Estimate {
            kind,
            ..predicted(median_us, spread_us, apart_us, sides)
        },
    )
}

proptest! {
    /// It does not matter which of the two is asked.
    #[test]
    fn noise_between_two_is_the_same_both_ways(a in estimate(), b in estimate()) {
        prop_assert_eq!(a.noise_to(&b), b.noise_to(&a));
        prop_assert!(!(a.outruns(&b, 0.0) && b.outruns(&a, 0.0)));
    }
}
