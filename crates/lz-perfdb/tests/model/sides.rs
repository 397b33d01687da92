//! What calls take the host and the device, each by itself.

use std::sync::Arc;

use lz_model::*;
use lz_perfdb::Parts;
use lz_perfdb::model::{Model, Observation, Seen};
use lz_select::{Basis, EstimateKind, PerfSource, SnapshotSpec};

use crate::support::{ask, devices, kernel, rms};

/// Where the host sets the pace a time stays as it is, and from some size on it grows as the device's does.
#[test]
fn host_and_device_are_predicted_each_by_itself() {
    let device_us = |rows: i64, per_row: f64| 3.0 + per_row * rows as f64;
    let observations = |with_parts: bool| {
        let of = |(id, host_us, per_row): (&'static str, f64, f64)| {
            [128, 512, 2048, 8192].map(|rows| {
                let parts = Parts { host_us, device_us: device_us(rows, per_row) };
                let (query, us) = (rms(rows, 1024, DType::F32), parts.host_us.max(parts.device_us));
                let seen =
                    Seen::Took { median_us: us, spread_us: 0.01 * us, samples: 10, parts: with_parts.then_some(parts) };
                Observation { query, kernel: id.into(), version: "1".into(), default: false, seen }
            })
        };
        [("lib.plain", 9.0, 0.041), ("lib.tuned", 28.0, 0.031)].into_iter().flat_map(of).collect::<Vec<_>>()
    };
    let (apart, together) = (Model::new(observations(true), &devices()), Model::new(observations(false), &devices()));
    let mut worst: f64 = 1.0;
    for rows in [150, 300, 700, 1024, 1500, 3000, 6000] {
        for (id, host_us, per_row) in [("lib.plain", 9.0, 0.041), ("lib.tuned", 28.0, 0.031)] {
            let expected = device_us(rows, per_row).max(host_us);
            let (predicted, _, kind, trusted) = ask(&apart, id, &rms(rows, 1024, DType::F32)).unwrap();
            assert_eq!((kind, trusted), (EstimateKind::Predicted, true));
            assert!((predicted / expected).ln().abs() < 0.03, "{id} at {rows}: {predicted}, not {expected}");
            let (guess, ..) = ask(&together, id, &rms(rows, 1024, DType::F32)).unwrap();
            worst = worst.max(guess / expected).max(expected / guess);
        }
    }
    assert!(worst > 1.15, "taken together they are off by {worst} at most: this test shows nothing");
    // Without what it took whom at one size, what is known of all sizes counts.
    let mut some = observations(true);
    let Seen::Took { parts, .. } = &mut some[1].seen else { panic!() };
    *parts = None;
    let (some, at) = (Model::new(some, &devices()), rms(1024, 1024, DType::F32));
    assert_eq!(ask(&some, "lib.plain", &at).unwrap().0, ask(&together, "lib.plain", &at).unwrap().0);
}

/// What calls of so many rows take the host, of what plain torch runs and of another kernel; the device is always faster.
fn by_host(sizes: &[i64], host_us: impl Fn(i64) -> (f64, f64)) -> Model {
    let observation = |kernel: &str, rows: i64, host_us: f64| {
        let parts = Parts { host_us, device_us: 2.0 + 0.0001 * rows as f64 };
        let seen = Seen::Took { median_us: host_us, spread_us: 0.02 * host_us, samples: 10, parts: Some(parts) };
        let (query, version) = (rms(rows, 1024, DType::F32), "1".into());
        Observation { query, kernel: kernel.into(), version, default: kernel == "lib.plain", seen }
    };
    let seen = sizes.iter().flat_map(|&rows| {
        let (plain, other) = host_us(rows);
        [observation("lib.plain", rows, plain), observation("lib.other", rows, other)]
    });
    Model::new(seen, &devices())
}

/// What a kernel takes the host, and how far that may be off its distance to others, relative.
fn of_host(model: &Model, id: &str, rows: i64) -> (f64, f64) {
    let (device, query) = (&devices()[0], rms(rows, 1024, DType::F32));
    let facts = Facts { op: Catalog::get().op(query.op()), query: &query, device };
    let host = model.estimate(&kernel(id), &facts).unwrap().sides.unwrap().host;
    (host.median_us, host.apart_us.unwrap() / host.median_us)
}

/// What a busy moment did to the host at the nearest sizes says nothing about a call between them.
#[test]
fn what_the_host_takes_is_known_by_all_sizes() {
    let sizes = [32, 64, 128, 256, 512, 2048, 4096, 8192, 16384];
    let plain = [18.0, 19.0, 33.0, 20.0, 24.0, 26.0, 21.0, 22.0, 23.0];
    // A tenth more, but for three bad moments.
    let other = plain.map(|us| match us {
        33.0 => 44.0,
        24.0 => 34.0,
        26.0 => 25.0,
        us => 1.1 * us,
    });
    let at = |rows: i64| sizes.iter().position(|size| *size == rows).unwrap();
    let model = by_host(&sizes, |rows| (plain[at(rows)], other[at(rows)]));
    let deviation = plain.iter().zip(other).map(|(a, b)| (b / a / 1.1).ln().abs()).sum::<f64>() / 9.0;
    for rows in [48, 700, 1024, 1500, 6000] {
        let ((plain, _), (other, off)) = (of_host(&model, "lib.plain", rows), of_host(&model, "lib.other", rows));
        // The third of nine, the quarter of all.
        assert!((plain / 20.0).ln().abs() < 0.05, "{rows}: {plain}");
        assert!((other / plain / 1.1).ln().abs() < 0.01, "{rows}: {other} to {plain}");
        // As sure as a median of nine is.
        let expected = std::f64::consts::FRAC_PI_2 * deviation / 3.0;
        assert!((0.8..1.3).contains(&(off / expected)), "{rows}: {off}, not {expected}");
    }
}

/// From some size on a kernel makes two launches, or plain torch does: there the sizes nearby are right, and the others are
/// about something else.
#[test]
fn where_the_host_has_more_to_do_from_some_size_on_the_sizes_nearby_count() {
    let sizes = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];
    type Step = fn(i64) -> (f64, f64);
    let steps: [Step; 4] = [
        |rows| (20.0, if rows < 700 { 12.0 } else { 24.0 }),
        |rows| (20.0, if rows < 700 { 24.0 } else { 12.0 }),
        |rows| (if rows < 700 { 15.0 } else { 20.3 }, 17.6),
        |rows| (if rows < 700 { 20.3 } else { 15.0 }, 17.6),
    ];
    for (number, step) in steps.into_iter().enumerate() {
        let model = by_host(&sizes, step);
        for rows in [48, 100, 200, 3000, 6000, 12000] {
            let (plain, other) = step(rows);
            let us = ["lib.plain", "lib.other"].map(|id| of_host(&model, id, rows).0);
            let is_close = us.iter().zip([plain, other]).all(|(us, expected)| (us / expected).ln().abs() < 0.12);
            assert!(is_close, "step {number} at {rows}: {us:?}, not {plain} and {other}");
            assert_eq!(us[0] < us[1], plain < other, "step {number} at {rows}: {us:?}");
        }
    }
}

/// A kernel whose host has more to do for larger calls is known by its trend.
#[test]
fn what_the_host_does_may_grow_with_the_call() {
    let host_us = |rows: i64| 12.0 + 0.02 * rows as f64;
    let seen = [64, 256, 1024, 4096, 16384].map(|rows| {
        let parts = Parts { host_us: host_us(rows), device_us: 5.0 };
        let seen = Seen::Took { median_us: host_us(rows), spread_us: 0.1, samples: 10, parts: Some(parts) };
        let query = rms(rows, 1024, DType::F32);
        Observation { query, kernel: "lib.plain".into(), version: "1".into(), default: true, seen }
    });
    let model = Model::new(seen, &devices());
    for rows in [128, 512, 2048, 8192] {
        let (us, _, kind, _) = ask(&model, "lib.plain", &rms(rows, 1024, DType::F32)).unwrap();
        assert_eq!(kind, EstimateKind::Predicted);
        assert!((us / host_us(rows)).ln().abs() < 0.03, "{rows}: {us}, not {}", host_us(rows));
    }
}

/// Kernels that the host cannot keep up with are noisy as it is; the device's times are not, and by them kernels are told apart
/// where the device sets the pace.
#[test]
fn what_a_busy_host_does_is_not_the_noise_of_the_device() {
    let of = |(id, host_us, per_row): (&'static str, f64, f64)| {
        [64, 512, 4096].map(|rows| {
            let parts = Parts { host_us, device_us: 3.0 + per_row * rows as f64 };
            let us = parts.host_us.max(parts.device_us);
            // A third of the host's time, and a hundredth of the device's.
            let spread_us = if us > host_us { 0.01 * us } else { 0.3 * us };
            let seen = Seen::Took { median_us: us, spread_us, samples: 10, parts: Some(parts) };
            Observation {
                query: rms(rows, 1024, DType::F32),
                kernel: id.into(),
                version: "1".into(),
                default: id == "lib.plain",
                seen,
            }
        })
    };
    // The host takes so long for the first that it is never the choice; by the device it is the fastest.
    let kernels = [("lib.slow", 200.0, 0.01), ("lib.plain", 9.0, 0.02), ("lib.tuned", 7.0, 0.015)];
    let mut spec = SnapshotSpec { devices: devices(), memory: vec![None], ..SnapshotSpec::default() };
    spec.backend(lz_model::BackendDescriptor::native("lib", "1", vec![Platform::Cpu]));
    spec.kernels = kernels
        .iter()
        .map(|(id, ..)| {
            let mut kernel = kernel(id);
            kernel.baseline = *id == "lib.plain";
            Arc::new(kernel)
        })
        .collect();
    spec.perf = Arc::new(Model::new(kernels.into_iter().flat_map(of), &devices()));
    let snapshot = spec.build(1).unwrap();
    for rows in [1500, 2048, 3000] {
        let decision = snapshot.select(&rms(rows, 1024, DType::F32));
        assert_eq!(decision.basis, Basis::Predicted);
        let ranked: Vec<&str> = decision.ranked().map(|c| snapshot.kernel(c.kernel).id.as_str()).collect();
        assert_eq!(ranked[..2], ["lib.tuned", "lib.plain"], "{rows}");
    }
}
