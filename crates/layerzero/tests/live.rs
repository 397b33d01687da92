//! Measurements beside what happens: calls that take longer than was measured, and proofs in graphs that were kept.

use layerzero::model::*;
use layerzero::perf::device_id;
use layerzero::perfdb::{Key, Mode, Outcome, Record, Timing};
use layerzero::selection::KernelIx;
use layerzero::{CheckStatus, DynamicKernel, Engine};
use std::sync::Arc;

fn engine(platform: Platform) -> Engine {
    let mut device = DeviceSpec::new(platform, "device");
    device.sm = (platform == Platform::Cuda).then_some(90);
    let device = device.completed(&GenerationTable::builtin());
    let engine = Engine::builder().devices(vec![device]).on_warning(|_| ()).build();
    for id in ["lib.one", "lib.two"] {
        let mut kernel = KernelDescriptor::new(id, "norm.rms", "lib");
        kernel.version = "1.0".into();
        kernel.platforms = vec![platform];
        kernel.dtypes = DTypeSet::FLOATS;
        kernel.layouts = vec![Layout::Strided];
        kernel.graph_safe = true;
        let nothing: Arc<dyn DynamicKernel> = Arc::new(|_: &mut KernelArgs<'_, '_>| Ok(()));
        engine.register(kernel, nothing).unwrap();
    }
    engine
}

fn call(rows: i64) -> CallSpec {
    CallSpec::new("norm.rms").tensor("x", DType::F32, &[rows, 64])
}

/// A measurement of a kernel, of a call as it is written.
fn row(engine: &Engine, kernel: &str, mode: Mode, call: &str, median_us: f64) -> Record {
    let key = Key::new(kernel, "norm.rms", device_id(&engine.devices()[0]), mode, call);
    let mut record = Record::new(key, Outcome::Ok(Timing::new(median_us, 2.0 * median_us, 0.1, 20)));
    record.provenance.kernel_version = Some("1.0".into());
    record
}

fn learn(engine: &Engine, rows: i64, median_us: f64) {
    let text = call(rows).to_string();
    let records = ["lib.one", "lib.two"].map(|kernel| row(engine, kernel, Mode::Eager, &text, median_us));
    assert_eq!(engine.learn_from(&records), 2);
}

/// Sampled calls of `lib.one` that took so long, in microseconds.
fn took(engine: &Engine, rows: i64, times: impl IntoIterator<Item = f64>) {
    let kernel = engine.with_snapshot(|s| s.kernels().map(|(_, k)| k.clone()).find(|k| k.id == "lib.one").unwrap());
    let query = query(engine, rows, false);
    times.into_iter().for_each(|us| engine.took(&kernel, &query, || Some(call(rows)), us));
}

fn query(engine: &Engine, rows: i64, capturing: bool) -> Query {
    let spec = call(rows);
    let named = spec.named(DeviceIx(0), Context { capturing, ..Context::default() });
    engine.bind(&spec.op, &named).unwrap().1.query
}

fn times(us: f64, samples: usize) -> impl Iterator<Item = f64> {
    std::iter::repeat_n(us, samples)
}

#[test]
fn calls_that_keep_taking_longer_than_was_measured_are_to_be_measured_again() {
    for platform in [Platform::Cuda, Platform::Cpu] {
        let engine = engine(platform);
        learn(&engine, 100, 10.0);
        // Two slow blocks are a bad moment; so are slow ones with a good one between them.
        took(&engine, 100, times(25.0, 32).chain(times(12.0, 16)).chain(times(25.0, 32)));
        assert_eq!(engine.drifted(), []);
        assert!(engine.health().drifted.is_empty());
        took(&engine, 100, times(25.0, 16));
        let drifted = engine.drifted();
        let found: Vec<_> = drifted.iter().map(|d| (d.kernel.as_str(), &d.call, d.live_us, d.measured_us)).collect();
        assert_eq!(found, [("lib.one", &call(100), 25.0, 10.0)]);
        assert_eq!(drifted[0].device, DeviceIx(0));
        // It is said where people look.
        let spec = call(100);
        let report = engine.explain(&spec.op, &spec.named(DeviceIx(0), Context::default())).unwrap();
        let live = |id: &str| report.candidates.iter().find(|c| c.kernel_id == id).unwrap().live_us;
        assert_eq!((live("lib.one"), live("lib.two")), (Some(25.0), None));
        assert!(report.to_string().contains("takes 25.0 µs here: measure it again"), "{report}");
        assert_eq!(engine.health().drifted, drifted);
        assert!(engine.health().to_string().contains("measure again: lib.one takes 25.0 µs, 10.0 µs were measured"));
        let check = engine.readiness().checks.into_iter().find(|check| check.name == "drift").unwrap();
        assert_eq!(check.status, CheckStatus::Warn, "{}", check.detail);
        // Measured again, it is off the list, and judged by the new time.
        learn(&engine, 100, 24.0);
        assert_eq!(engine.drifted(), []);
        took(&engine, 100, times(25.0, 64));
        assert_eq!(engine.drifted(), []);
    }
}

#[test]
fn what_is_faster_noisy_or_not_measured_has_not_drifted() {
    let gpu = engine(Platform::Cuda);
    learn(&gpu, 100, 10.0);
    took(&gpu, 100, times(1.0, 64));
    // Less than half of the calls are slow: a median does not move.
    took(&gpu, 100, (0..64).map(|n| if n % 16 < 7 { 500.0 } else { 12.0 }));
    took(&gpu, 100, [f64::NAN, -1.0, 0.0, f64::INFINITY]);
    // Between measured sizes there is a prediction, which nobody measured; beyond them not even that.
    took(&gpu, 101, times(900.0, 64));
    took(&gpu, 5000, times(900.0, 64));
    assert_eq!(gpu.drifted(), []);
    // A host is kept from its work more often than not: its lower quartile counts.
    let host = engine(Platform::Cpu);
    learn(&host, 100, 10.0);
    took(&host, 100, (0..64).map(|n| if n % 16 < 10 { 500.0 } else { 12.0 }));
    assert_eq!(host.drifted(), []);
}

#[test]
fn without_measurements_the_check_has_nothing_to_say() {
    let engine = engine(Platform::Cpu);
    let check = engine.readiness().checks.into_iter().find(|check| check.name == "drift").unwrap();
    assert_eq!(check.status, CheckStatus::Skipped);
}

/// What `tune --graph` kept, by this version or an earlier one, is a row with the call it was made with.
#[test]
fn a_proof_that_was_kept_covers_the_cell_of_its_call() {
    let engine = engine(Platform::Cuda);
    let kept = row(&engine, "lib.one", Mode::Graph, &call(100).to_string(), 5.0);
    // A call that is not known any more, and none at all: nobody knows which sizes they were.
    let strange = row(&engine, "lib.two", Mode::Graph, r#"{"op": "norm.unheard_of", "tensors": {}}"#, 5.0);
    let nameless = row(&engine, "lib.two", Mode::Graph, "", 5.0);
    engine.learn_from(&[kept, strange, nameless]);
    engine.configure([("graph_strict_mode".to_owned(), true.into())]).unwrap();
    let serves = |rows: i64| {
        let decision = engine.with_snapshot(|s| s.select(&query(&engine, rows, true)));
        let ids: Vec<KernelIx> = decision.ranked().map(|c| c.kernel).collect();
        engine.with_snapshot(|s| ids.iter().map(|ix| s.kernel(*ix).id.clone()).collect::<Vec<_>>())
    };
    // Buckets of rows are powers of two, and a measured size has a cell of its own inside of one.
    assert_eq!([65, 100, 128].map(serves), [["lib.one"], ["lib.one"], ["lib.one"]]);
    assert!([64, 129].map(serves).concat().is_empty());
    let error = engine.process().steps(&query(&engine, 129, true)).err().unwrap();
    assert_eq!(error.code(), "CUDA_GRAPH_UNSAFE");
    assert!(error.hint().contains("lz.warmup"), "{}", error.hint());
}

#[test]
fn a_kernel_is_wanted_until_it_is_proven_and_held_until_it_is_released() {
    let engine = engine(Platform::Cuda);
    engine.configure([("graph_strict_mode".to_owned(), true.into())]).unwrap();
    let at = |rows: i64| query(&engine, rows, false);
    let wanted = |rows: i64| engine.wanted_in_graphs(&engine.process(), &at(rows));
    assert_eq!(wanted(100).as_deref(), Some("lib.one"));
    assert!(engine.hold_for_capture(&engine.process(), &at(100)).is_err());
    engine.captured("lib.one", &at(100), Err(GraphDoubt::Synchronizes { error: "no".into() })).unwrap();
    assert_eq!(wanted(100).as_deref(), Some("lib.two"), "one that failed is not tried again");
    engine.captured("lib.two", &at(100), Ok(())).unwrap();
    assert_eq!(wanted(120), None);
    assert_eq!(wanted(200).as_deref(), Some("lib.one"), "another cell is another proof");
    let doubt = engine.graph_doubt(&engine.process(), "lib.one", &at(100)).unwrap();
    assert_eq!(doubt, Some(GraphDoubt::Synchronizes { error: "no".into() }));
    assert_eq!(engine.hold_for_capture(&engine.process(), &at(100)).unwrap(), "lib.two");
    // A failure that is forgotten makes the other one the choice again, but not where a decision is held.
    engine.forget_failures();
    engine.captured("lib.one", &at(100), Ok(())).unwrap();
    let held = |rows: i64| engine.process().steps(&query(&engine, rows, true)).unwrap()[0].kernel.id.clone();
    assert_eq!((held(100), held(101)), ("lib.two".to_owned(), "lib.one".to_owned()));
    engine.release_captures().unwrap();
    assert_eq!(held(100), "lib.one");
}
