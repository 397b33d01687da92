//! Tuning, with a bench whose times are made up: what is measured twice, and what is chosen then.

use layerzero::config::Value;
use layerzero::model::*;
use layerzero::perf::bench::{Bench, Checked};
use layerzero::perf::tune::{TuneOptions, Wanted};
use layerzero::perfdb::{Filter, Mode, Outcome};
use layerzero::selection::{Basis, Estimate, EstimateKind, PerfSource, Side, Sides};
use layerzero::{DynamicKernel, Engine};
use std::collections::BTreeMap;
use std::sync::Arc;

const ROWS: [i64; 5] = [32, 64, 128, 256, 512];

fn engine() -> Engine {
    engine_with(vec![DeviceSpec::new(Platform::Cpu, "host")])
}

fn engine_with(devices: Vec<DeviceSpec>) -> Engine {
    let engine = Engine::builder().devices(devices).on_warning(|_| ()).build();
    register(&engine, "lib.plain", 90);
    register(&engine, "lib.fast", 10);
    engine
}

fn register(engine: &Engine, id: &str, priority: i32) {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", "lib");
    kernel.version = "1.0".into();
    kernel.platforms = vec![Platform::Cpu, Platform::Cuda];
    kernel.dtypes = DTypeSet::FLOATS;
    kernel.layouts = vec![Layout::Strided];
    kernel.priority = priority;
    kernel.baseline = id == "lib.plain";
    let nothing: Arc<dyn DynamicKernel> = Arc::new(|_: &mut KernelArgs<'_, '_>| Ok(()));
    engine.register(kernel, nothing).unwrap();
}

/// `lib.fast` takes 0.7 of what `lib.plain` does, but for the first visit of one call.
struct Made {
    bad: i64,
    rows: i64,
    visits: BTreeMap<i64, u32>,
}

impl Bench for Made {
    fn prepare(&mut self, call: &CallSpec, _: DeviceIx, _: Mode) -> Result<(), String> {
        self.rows = call.tensors["input"].shape[0];
        *self.visits.entry(self.rows).or_default() += 1;
        Ok(())
    }

    fn check(&mut self, _: &str) -> Checked {
        Checked::Right { max_error: None, warmup_ms: None }
    }

    fn time(&mut self, kernel: &str, _: u32) -> Result<f64, String> {
        let slowed = self.rows == self.bad && self.visits[&self.rows] == 1;
        let ratio = match kernel {
            "lib.plain" => 1.0,
            "lib.fast" if slowed => 1.0,
            "lib.fast" => 0.7,
            _ => 50.0,
        };
        Ok(ratio * self.rows as f64)
    }
}

fn wanted(rows: &[i64]) -> Vec<Wanted> {
    rows.iter().map(|&rows| Wanted::new(CallSpec::new("rms_norm").tensor("input", DType::F32, &[rows, 64]))).collect()
}

/// Which kernel was found to be the fastest, and how often the call was visited, by rows.
fn tuned_by(
    engine: &Engine,
    rows: &[i64],
    bad: i64,
    options: &TuneOptions,
) -> (BTreeMap<i64, String>, BTreeMap<i64, u32>) {
    let mut bench = Made { bad, rows: 0, visits: BTreeMap::new() };
    let report = engine.tune(&wanted(rows), options, &mut bench, &mut |_| true).unwrap();
    let fastest = |timings: &[layerzero::measure::Timing]| {
        let timed = timings.iter().filter_map(|t| Some((t.stats.as_ref()?.median_us, t.candidate.clone())));
        timed.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
    };
    let found = report.tuned.iter().map(|t| (t.call.tensors["input"].shape[0], fastest(&t.timings))).collect();
    (found, bench.visits)
}

fn tuned(bad: i64) -> (BTreeMap<i64, String>, BTreeMap<i64, u32>) {
    tuned_by(&engine(), &ROWS, bad, &TuneOptions { keep: false, ..TuneOptions::default() })
}

#[test]
fn what_was_measured_in_a_bad_moment_is_measured_again() {
    for bad in [64, 128, 256] {
        let (fastest, visits) = tuned(bad);
        assert!(visits[&bad] > 1, "{bad} rows: {visits:?}");
        assert!(fastest.values().all(|kernel| kernel == "lib.fast"), "{bad} rows: {fastest:?}");
    }
}

#[test]
fn what_agrees_is_measured_once() {
    let (fastest, visits) = tuned(0);
    assert!(visits.values().all(|visits| *visits == 1), "{visits:?}");
    assert!(fastest.values().all(|kernel| kernel == "lib.fast"), "{fastest:?}");
}

#[test]
fn what_an_earlier_tuning_found_is_held_against_what_a_later_one_does() {
    for bad in [64, 128, 256] {
        let folder = tempfile::tempdir().unwrap();
        let engine = engine();
        let path = folder.path().join("perfdb.sqlite").display().to_string();
        engine.configure([("perfdb.path".to_owned(), Value::from(path.as_str()))]).unwrap();
        let before: Vec<i64> = ROWS.into_iter().filter(|rows| *rows != bad).collect();
        tuned_by(&engine, &before, 0, &TuneOptions::default());
        let (fastest, visits) = tuned_by(&engine, &ROWS, bad, &TuneOptions::default());
        assert_eq!(visits.keys().collect::<Vec<_>>(), [&bad], "what is known is not measured again");
        assert!(visits[&bad] > 1, "{bad} rows: {visits:?}");
        assert_eq!(fastest, BTreeMap::from([(bad, "lib.fast".to_owned())]));
    }
}

/// The fast kernel takes this much of what the others do.
struct Ratio(f64);

impl Bench for Ratio {
    fn prepare(&mut self, _: &CallSpec, _: DeviceIx, _: Mode) -> Result<(), String> {
        Ok(())
    }

    fn check(&mut self, _: &str) -> Checked {
        Checked::Right { max_error: None, warmup_ms: None }
    }

    fn time(&mut self, kernel: &str, _: u32) -> Result<f64, String> {
        Ok(if kernel.ends_with(".fast") { 100.0 * self.0 } else { 100.0 })
    }
}

#[test]
fn what_was_measured_with_other_threads_does_not_rank() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine();
    let path = folder.path().join("perfdb.sqlite").display().to_string();
    engine.configure([("perfdb.path".to_owned(), Value::from(path.as_str()))]).unwrap();
    let call = CallSpec::new("rms_norm").tensor("input", DType::F32, &[64, 64]);
    let chosen = |threads: u16| {
        let named = call.named(DeviceIx(0), Context { threads, ..Context::default() });
        let report = engine.explain(&call.op, &named).unwrap();
        (report.chosen.unwrap(), report.basis)
    };
    let tune = |threads: u16, ratio: f64| {
        engine.set_threads(threads);
        engine.tune(&wanted(&[64]), &TuneOptions::default(), &mut Ratio(ratio), &mut |_| true).unwrap();
    };
    let measured = |kernel: &str| (kernel.to_owned(), Basis::Measured);
    let declared = ("lib.plain".to_owned(), Basis::Declared);
    tune(16, 0.5);
    assert_eq!([16, 1, 8].map(chosen), [measured("lib.fast"), declared.clone(), declared.clone()]);
    // Whoever does not say has what the engine was told last.
    assert_eq!(chosen(0), measured("lib.fast"));
    engine.set_threads(1);
    assert_eq!(chosen(0), declared);
    // Both are kept side by side.
    tune(1, 2.0);
    assert_eq!([16, 1, 8].map(chosen), [measured("lib.fast"), measured("lib.plain"), declared]);
    let rows = |threads: u32| engine.perfdb().unwrap().records(&Filter::all().threads(threads)).unwrap().len();
    assert_eq!((rows(16), rows(1), rows(0)), (3, 3, 0));
}

#[test]
fn packing_and_accuracy_are_kept_apart_in_measurements_and_lockfiles() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("perfdb.sqlite").display().to_string();
    let blocked = Packing::blocked(32, 1).unwrap();
    let engine = || {
        let engine = engine();
        for (id, priority) in [("linear.plain", 90), ("linear.fast", 10)] {
            let mut kernel = KernelDescriptor::new(id, "mlp.linear", "lib");
            (kernel.platforms, kernel.dtypes) = (vec![Platform::Cpu], DTypeSet::FLOATS);
            (kernel.layouts, kernel.priority) = (vec![Layout::Strided], priority);
            (kernel.packing, kernel.accuracy) = (vec![Packing::Plain, blocked], Accuracy::SplitBf16x2);
            let nothing: Arc<dyn DynamicKernel> = Arc::new(|_: &mut KernelArgs<'_, '_>| Ok(()));
            engine.register(kernel, nothing).unwrap();
        }
        engine
    };
    let call =
        CallSpec::new("mlp.linear").tensor("input", DType::F32, &[4, 32]).tensor("weight", DType::F32, &[64, 32]);
    let plain = call.clone().accuracy(Accuracy::SplitBf16x2);
    let packed = plain.clone().packing(blocked);
    let rough = call.clone().accuracy(Accuracy::Bf16);
    let chosen = |engine: &Engine, call: &CallSpec| {
        let report = engine.explain(&call.op, &call.named(DeviceIx(0), Context::default())).unwrap();
        (report.chosen.unwrap(), report.basis)
    };
    let is = |kernel: &str, basis: Basis| (kernel.to_owned(), basis);

    let tuned = engine();
    // Nobody else computes as exactly as a call that says nothing demands.
    assert_eq!(chosen(&tuned, &call).0, "lz_cpu.ref.mlp.linear");
    tuned.configure([("perfdb.path".to_owned(), Value::from(path.as_str()))]).unwrap();
    let tune = |call: &CallSpec, ratio: f64| {
        let wanted = [Wanted::new(call.clone())];
        tuned.tune(&wanted, &TuneOptions::default(), &mut Ratio(ratio), &mut |_| true).unwrap();
    };
    tune(&packed, 0.5);
    assert_eq!(chosen(&tuned, &packed), is("linear.fast", Basis::Measured));
    for other in [&plain, &rough] {
        assert_eq!(chosen(&tuned, other), is("linear.plain", Basis::Declared), "{other}");
    }
    tune(&rough, 2.0);
    assert_eq!(chosen(&tuned, &rough), is("linear.plain", Basis::Measured));
    assert_eq!(chosen(&tuned, &packed), is("linear.fast", Basis::Measured));

    let lockfile = tuned.lockfile(&[(packed.clone(), DeviceIx(0))]).unwrap();
    let text = lockfile.to_string();
    assert!(text.contains("blocked_32x1") && text.contains("split_bf16_2"), "{text}");
    let replayed = engine();
    assert_eq!(replayed.replay(&layerzero::Lockfile::parse(&text).unwrap(), "x.lock").unwrap(), []);
    assert_eq!(chosen(&replayed, &packed).0, "linear.fast");
    for other in [&plain, &rough] {
        assert_eq!(chosen(&replayed, other), is("linear.plain", Basis::Declared), "{other}");
    }
}

#[test]
fn threads_are_of_the_cpu_alone() {
    let devices =
        ["cpu", "cuda"].map(|p| DeviceSpec::from_json(&format!(r#"{{"platform": "{p}", "name": "x"}}"#)).unwrap());
    let engine = engine_with(devices.into());
    engine.set_threads(4);
    let call = CallSpec::new("rms_norm").tensor("input", DType::F32, &[64, 64]);
    let threads = |device: u16, threads: u16| {
        let named = call.named(DeviceIx(device), Context { threads, ..Context::default() });
        engine.bind(&call.op, &named).unwrap().1.query.context().threads
    };
    assert_eq!([threads(0, 0), threads(0, 2), threads(1, 0), threads(1, 2)], [4, 2, 0, 0]);
}

/// `lib.fast` takes 0.85 of what `lib.plain` does; `lib.odd` a third of it for few rows and more for many.
struct Uneven(i64);

impl Bench for Uneven {
    fn prepare(&mut self, call: &CallSpec, _: DeviceIx, _: Mode) -> Result<(), String> {
        self.0 = call.tensors["input"].shape[0];
        Ok(())
    }

    fn check(&mut self, _: &str) -> Checked {
        Checked::Right { max_error: None, warmup_ms: None }
    }

    fn time(&mut self, kernel: &str, _: u32) -> Result<f64, String> {
        let ratio = match kernel {
            "lib.plain" => 1.0,
            "lib.fast" => 0.85,
            "lib.odd" if self.0 < 128 => 0.3,
            "lib.odd" => 1.2,
            _ => 50.0,
        };
        Ok(ratio * self.0 as f64)
    }
}

#[test]
fn between_sizes_a_kernel_is_held_against_the_one_whose_place_it_would_take() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("perfdb.sqlite").display().to_string();
    let engine = || {
        let engine = engine();
        register(&engine, "lib.odd", 10);
        engine.configure([("perfdb.path".to_owned(), Value::from(path.as_str()))]).unwrap();
        engine
    };
    let tuned = engine();
    tuned.tune(&wanted(&[32, 64, 128, 512, 1024]), &TuneOptions::default(), &mut Uneven(0), &mut |_| true).unwrap();
    let call = &wanted(&[256])[0].call;
    for engine in [tuned, engine()] {
        assert!(engine.learn() > 0);
        let report = engine.explain(&call.op, &call.named(DeviceIx(0), Context::default())).unwrap();
        assert_eq!((report.basis, report.chosen.as_deref()), (Basis::Predicted, Some("lib.fast")), "{report}");
    }
}

/// Two kernels that are nearly as fast as one another, on a machine too noisy to tell.
struct Noisy(u64);

impl Bench for Noisy {
    fn prepare(&mut self, _: &CallSpec, _: DeviceIx, _: Mode) -> Result<(), String> {
        Ok(())
    }

    fn check(&mut self, _: &str) -> Checked {
        Checked::Right { max_error: None, warmup_ms: None }
    }

    fn time(&mut self, kernel: &str, _: u32) -> Result<f64, String> {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let noise = (self.0 >> 40) as f64 / f64::from(1 << 24);
        let us = match kernel {
            "lib.plain" => 1000.0,
            "lib.fast" => 970.0,
            _ => 50_000.0,
        };
        Ok(us * (0.7 + 0.6 * noise))
    }
}

#[test]
fn what_was_measured_at_length_is_not_replaced_by_the_beginning_of_a_new_contest() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine();
    let path = folder.path().join("perfdb.sqlite").display().to_string();
    engine.configure([("perfdb.path".to_owned(), Value::from(path.as_str()))]).unwrap();
    let samples = || {
        let records = engine.perfdb().unwrap().records(&Filter::all()).unwrap();
        let of = |id: &str| records.iter().find(|r| r.key.kernel_id == id).unwrap().outcome.clone();
        match of("lib.fast") {
            Outcome::Ok(timing) => timing.samples,
            other => panic!("{other:?}"),
        }
    };
    engine.tune(&wanted(&[64]), &TuneOptions::default(), &mut Noisy(1), &mut |_| true).unwrap();
    let before = samples();
    assert!(before > 100, "{before}");
    // One visit, and it is stopped.
    let mut visits = 0;
    let once = &mut |_: &_| {
        visits += 1;
        visits == 1
    };
    let report = engine.tune(&wanted(&[64]), &TuneOptions::default(), &mut Noisy(2), once).unwrap();
    assert!(report.interrupted && report.tuned.len() == 1, "it was visited again: {report:?}");
    assert_eq!(samples(), before);
    // Who asks for it gets a new one.
    visits = 0;
    let forced = TuneOptions { force: true, ..TuneOptions::default() };
    let once = &mut |_: &_| {
        visits += 1;
        visits == 1
    };
    engine.tune(&wanted(&[64]), &forced, &mut Noisy(3), once).unwrap();
    assert!(samples() < before);
}

/// Processes look for GPUs when the first call is made on one: what an earlier process measured there must not be lost by
/// having been read before.
#[test]
fn what_was_measured_on_a_device_is_known_when_the_device_is_found() {
    let host = || DeviceSpec::new(Platform::Cpu, "host");
    let gpu = || DeviceSpec { uuid: Some("GPU-1".into()), ..DeviceSpec::new(Platform::Cuda, "gpu") };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("perfdb.sqlite").display().to_string();
    let configured = |devices| {
        let engine = engine_with(devices);
        engine.configure([("perfdb.path".to_owned(), Value::from(path.as_str()))]).unwrap();
        engine
    };
    let on_gpu = || wanted(&ROWS).into_iter().map(|w| Wanted { device: DeviceIx(1), ..w }).collect::<Vec<_>>();
    let mut bench = Made { bad: 0, rows: 0, visits: BTreeMap::new() };
    let tuning = configured(vec![host(), gpu()]);
    let report = tuning.tune(&on_gpu(), &TuneOptions::default(), &mut bench, &mut |_| true).unwrap();
    assert_eq!(report.tuned.len(), ROWS.len());
    drop(tuning);

    let serving = configured(vec![host()]);
    assert_eq!(serving.learn_if_there(), 0, "nothing is known of devices that are not there");
    assert_eq!(serving.add_devices(vec![host(), gpu()]).unwrap(), 2);
    assert!(serving.perf_health().known > 0);
    for rows in ROWS {
        let call = CallSpec::new("rms_norm").tensor("input", DType::F32, &[rows, 64]);
        let report = serving.explain(&call.op, &call.named(DeviceIx(1), Context::default())).unwrap();
        assert_eq!(report.chosen.as_deref(), Some("lib.fast"), "{rows} rows");
    }
    // They are not found twice.
    assert_eq!(serving.add_devices(vec![host(), gpu()]).unwrap(), 2);
}

/// Knows what every kernel takes host and device.
struct OfSides;

impl PerfSource for OfSides {
    fn estimate(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        let side = |median_us| Side { median_us, apart_us: Some(0.5) };
        let sides = Some(Sides { host: side(21.5), device: side(24.25) });
        let (kind, apart_us) = (EstimateKind::Predicted, Some(0.5));
        Some(Estimate { median_us: 24.25, spread_us: 2.0, apart_us, sides, samples: 8, kind, trusted: true })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

#[test]
fn explain_shows_what_host_and_device_are_predicted_to_take() {
    let engine = engine();
    let call = CallSpec::new("rms_norm").tensor("input", DType::F32, &[64, 64]);
    let explained = || engine.explain(&call.op, &call.named(DeviceIx(0), Context::default())).unwrap();
    let before = explained();
    assert!(before.candidates.iter().all(|c| c.host_us.is_none() && c.device_us.is_none()));
    assert!(!serde_json::to_string(&before).unwrap().contains("host_us"));
    engine.update(|spec| spec.perf = Arc::new(OfSides)).unwrap();
    let report = explained();
    assert_eq!(report.candidates[0].host_us.zip(report.candidates[0].device_us), Some((21.5, 24.25)));
    let (text, json) = (report.to_string(), serde_json::to_string(&report).unwrap());
    assert!(text.contains("~24.2 µs (host 21.5, device 24.2)"), "{text}");
    assert!(json.contains(r#""host_us":21.5,"device_us":24.25"#), "{json}");
}
