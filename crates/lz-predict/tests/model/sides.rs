//! What calls take the host and the device, each by itself.

use lz_model::*;
use lz_predict::{Model, Observation, Parts, Seen};
use lz_select::{EstimateKind, PerfSource};

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
                Observation { query, kernel: id.into(), version: "1".into(), baseline: false, seen }
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
        Observation { query, kernel: kernel.into(), version, baseline: kernel == "lib.plain", seen }
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
        // As sure as a mean of nine is.
        let expected = deviation / 3.0;
        assert!((0.8..1.3).contains(&(off / expected)), "{rows}: {off}, not {expected}");
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
        Observation { query, kernel: "lib.plain".into(), version: "1".into(), baseline: true, seen }
    });
    let model = Model::new(seen, &devices());
    for rows in [128, 512, 2048, 8192] {
        let (us, _, kind, _) = ask(&model, "lib.plain", &rms(rows, 1024, DType::F32)).unwrap();
        assert_eq!(kind, EstimateKind::Predicted);
        assert!((us / host_us(rows)).ln().abs() < 0.03, "{rows}: {us}, not {}", host_us(rows));
    }
}
