//! Kernels that are compiled on first use: which are wanted, the queue, what is kept for the next process.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;

use layerzero::config::{Sources, Value};
use layerzero::model::*;
use layerzero::selection::*;
use layerzero::{CheckStatus, DynamicKernel, Engine, Error, device_name, device_named};
use proptest::prelude::*;

fn descriptor(id: &str, priority: i32, jit: bool) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", id.split('.').next().unwrap());
    kernel.version = "1.0".into();
    kernel.platforms = vec![Platform::Cpu];
    kernel.dtypes = DTypeSet::FLOATS;
    kernel.layouts = vec![Layout::Strided];
    (kernel.priority, kernel.jit) = (priority, jit);
    kernel
}

fn nothing() -> Arc<dyn DynamicKernel> {
    Arc::new(|_: &mut KernelArgs<'_, '_>| Ok::<(), KernelError>(()))
}

/// An engine with `aot.rms` (50), and `jit.best` (90) and `jit.good` (80), which are compiled on first use.
fn engine() -> Engine {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).compiled_elsewhere().build();
    for (id, priority, jit) in [("aot.rms", 50, false), ("jit.best", 90, true), ("jit.good", 80, true)] {
        engine.register(descriptor(id, priority, jit), nothing()).unwrap();
    }
    engine
}

fn call(rows: i64, hidden: i64) -> CallSpec {
    CallSpec::new("norm.rms").tensor("input", DType::F32, &[rows, hidden])
}

const HOST: DeviceIx = DeviceIx(0);

fn query(engine: &Engine, call: &CallSpec) -> Query {
    engine.bind(&call.op, &call.named(HOST, Context::default())).unwrap().1.query
}

/// Decides a call as a front door does: who serves it, and whether something was queued for it.
fn decide(engine: &Engine, call: &CallSpec) -> Result<(String, bool), Error> {
    let named = call.named(HOST, Context::default());
    let (_, bound) = engine.bind(&call.op, &named)?;
    let steps = engine.steps(&bound.query)?;
    let queued = engine.decided(&engine.process(), &named, &bound)?;
    Ok((steps[0].kernel.id.clone(), queued))
}

fn served(engine: &Engine, call: &CallSpec) -> String {
    decide(engine, call).unwrap().0
}

fn set(engine: &Engine, key: &str, value: impl Into<Value>) {
    engine.configure([(key.to_owned(), value.into())]).unwrap();
}

/// Compiles everything that waits; gives what that was.
fn compile_all(engine: &Engine) -> Vec<(String, CallSpec)> {
    let mut compiled = Vec::new();
    while let Some(job) = engine.next_compile() {
        let done = engine.compiled(job.id).unwrap().unwrap();
        compiled.push((done.kernel, done.call));
    }
    compiled
}

#[test]
fn nobody_waits_for_a_compiler_and_what_was_compiled_serves() {
    let engine = engine();
    let small = call(2, 8);
    assert_eq!(decide(&engine, &small).unwrap(), ("aot.rms".into(), true));
    assert_eq!(decide(&engine, &small).unwrap(), ("aot.rms".into(), false), "it waits already");
    assert_eq!(decide(&engine, &call(3, 8)).unwrap(), ("aot.rms".into(), false), "rows are nothing to compile for");
    assert_eq!(decide(&engine, &call(2, 16)).unwrap(), ("aot.rms".into(), true));
    assert_eq!(compile_all(&engine), [("jit.best".into(), small.clone()), ("jit.best".into(), call(2, 16))]);
    assert_eq!(served(&engine, &small), "jit.best");
    assert_eq!(served(&engine, &call(77, 8)), "jit.best");
    assert_eq!(decide(&engine, &call(2, 24)).unwrap(), ("aot.rms".into(), true));
    let status = engine.jit_status();
    assert_eq!((status.warm, status.cold, status.queued, status.running), (2, 1, 1, 0));
    assert_eq!((status.compiled, status.dropped, status.failed.len()), (2, 0, 0));
    assert_eq!(engine.health().jit, status);
    let said = "compiled on first use: 2 ready, 1 not yet (1 queued, 0 under way, 0 failed); 0 dropped";
    assert!(engine.health().to_string().contains(said), "{}", engine.health());
}

#[test]
fn an_engine_that_keeps_no_count_compiles_as_it_goes() {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).build();
    engine.register(descriptor("aot.rms", 50, false), nothing()).unwrap();
    engine.register(descriptor("jit.best", 90, true), nothing()).unwrap();
    assert_eq!(decide(&engine, &call(2, 8)).unwrap(), ("jit.best".into(), false));
    engine.mark_warm("jit.best", &call(2, 8), HOST).unwrap();
    assert_eq!(served(&engine, &call(2, 16)), "jit.best", "what was marked does not make the rest cold");
    assert_eq!((engine.next_compile(), engine.jit_status().tracked), (None, false));
}

#[test]
fn a_compilation_that_fails_is_tried_twice_more_then_the_next_best_is() {
    let engine = engine();
    let small = call(2, 8);
    decide(&engine, &small).unwrap();
    for attempt in 1..=3 {
        let job = engine.next_compile().unwrap();
        assert_eq!(job.kernel, "jit.best", "attempt {attempt}");
        assert_eq!(engine.jit_status().running, 1);
        engine.compile_failed(job.id, &format!("no {attempt}"));
    }
    let status = engine.jit_status();
    assert_eq!(status.failed.len(), 1);
    let failed = &status.failed[0];
    assert_eq!((failed.kernel.as_str(), failed.attempts, failed.error.as_str()), ("jit.best", 3, "no 3"));
    assert_eq!(compile_all(&engine), [("jit.good".into(), small.clone())]);
    assert_eq!(decide(&engine, &small).unwrap(), ("jit.good".into(), false));
    assert_eq!(engine.next_compile(), None, "it is not tried again");
    let jit = engine.readiness().checks.into_iter().find(|check| check.name == "jit").unwrap();
    assert_eq!(jit.status, CheckStatus::Warn);
    assert!(jit.detail.contains("jit.best: no 3"), "{}", jit.detail);
    // For other calls it was not given up.
    decide(&engine, &call(2, 16)).unwrap();
    assert_eq!(compile_all(&engine), [("jit.best".into(), call(2, 16))]);
    // A compilation nobody knows of changes nothing.
    engine.compile_failed(99, "what");
    assert_eq!(engine.compiled(99).unwrap(), None);
    // Whoever succeeds with it after all, for instance a warm-up, is believed.
    let job = engine.begin_compile("jit.best", &small, HOST).unwrap();
    engine.compiled(job.id).unwrap();
    assert_eq!((served(&engine, &small).as_str(), engine.jit_status().failed.len()), ("jit.best", 0));
}

#[test]
fn beyond_its_size_the_queue_drops_the_oldest() {
    let engine = engine();
    set(&engine, "jit.queue_size", 2_i64);
    for hidden in [8, 16, 24, 32] {
        assert!(decide(&engine, &call(2, hidden)).unwrap().1);
    }
    let status = engine.jit_status();
    assert_eq!((status.queued, status.dropped, status.cold), (2, 2, 4));
    assert!(decide(&engine, &call(2, 8)).unwrap().1, "what was dropped can be queued again");
    let hidden: Vec<i64> = compile_all(&engine).iter().map(|(_, call)| call.tensors["input"].shape[1]).collect();
    assert_eq!(hidden, [32, 8]);
}

#[test]
fn the_configuration_may_turn_it_off() {
    let engine = engine();
    set(&engine, "jit.background_compile", false);
    assert_eq!(decide(&engine, &call(2, 8)).unwrap(), ("aot.rms".into(), false));
    assert_eq!((engine.next_compile(), engine.jit_status().cold), (None, 1));
    assert_eq!(
        engine.wanted(&engine.process(), &query(&engine, &call(2, 8))).as_deref(),
        Some("jit.best"),
        "a warm-up still would"
    );
    set(&engine, "jit.background_compile", true);
    set(&engine, "allow_jit", false);
    assert_eq!(decide(&engine, &call(2, 16)).unwrap(), ("aot.rms".into(), false));
    assert_eq!(engine.wanted(&engine.process(), &query(&engine, &call(2, 16))), None);
}

#[test]
fn calls_that_only_a_cold_kernel_could_serve_are_refused_or_wait() {
    let engine = engine();
    engine.lock("norm.rms", "jit.good").unwrap();
    let Err(Error::NoKernel { rejections, .. }) = decide(&engine, &call(2, 8)) else { panic!("it was served") };
    let of = |id: &str| rejections.iter().find(|r| r.kernel_id == id).unwrap().reasons.clone();
    assert_eq!(of("jit.good"), [Reason::JitDisabled]);
    assert_eq!(compile_all(&engine), [("jit.good".into(), call(2, 8))], "it is compiled all the same");
    assert_eq!(served(&engine, &call(2, 8)), "jit.good");
    set(&engine, "jit.fail_on_no_fallback", false);
    assert_eq!(decide(&engine, &call(2, 16)).unwrap(), ("jit.good".into(), true), "the call waits");
}

#[test]
fn inside_a_capture_nothing_is_compiled() {
    let engine = engine();
    let spec = call(2, 8);
    let named = spec.named(HOST, Context { capturing: true, ..Context::default() });
    let (_, bound) = engine.bind("norm.rms", &named).unwrap();
    // None of these kernels is safe there, so that none is wanted; one that is would be.
    assert!(!engine.decided(&engine.process(), &named, &bound).unwrap_or(false));
    let mut safe = descriptor("jit.safe", 95, true);
    safe.graph_safe = true;
    engine.register(safe, nothing()).unwrap();
    assert_eq!(engine.wanted(&engine.process(), &bound.query).as_deref(), Some("jit.safe"));
    assert!(!engine.decided(&engine.process(), &named, &bound).unwrap_or(false));
    assert_eq!(engine.next_compile(), None);
}

#[test]
fn in_a_forked_child_what_was_under_way_waits_again() {
    let engine = engine();
    for hidden in [8, 16, 24] {
        decide(&engine, &call(2, hidden)).unwrap();
    }
    let first = engine.next_compile().unwrap();
    engine.compiles_forked();
    let status = engine.jit_status();
    assert_eq!((status.queued, status.running), (3, 0));
    assert_eq!(engine.next_compile(), Some(first), "it comes first");
    assert_eq!(compile_all(&engine).len(), 2);
}

#[test]
fn a_kernel_that_is_replaced_begins_anew() {
    let engine = engine();
    engine.mark_warm("jit.best", &call(2, 8), HOST).unwrap();
    decide(&engine, &call(2, 16)).unwrap();
    assert_eq!(served(&engine, &call(2, 8)), "jit.best");
    engine.unregister("jit.best", "1.0").unwrap();
    assert_eq!((engine.next_compile(), engine.jit_status().warm), (None, 0));
    engine.register(descriptor("jit.best", 90, true), nothing()).unwrap();
    assert_eq!(decide(&engine, &call(2, 8)).unwrap(), ("aot.rms".into(), true));
}

#[test]
fn what_a_warm_up_compiles_does_not_wait_any_more() {
    let engine = engine();
    decide(&engine, &call(2, 8)).unwrap();
    let job = engine.begin_compile("jit.best", &call(5, 8), HOST).unwrap();
    assert_eq!((engine.jit_status().queued, engine.jit_status().running), (0, 1));
    assert!(!decide(&engine, &call(2, 8)).unwrap().1, "it is under way");
    engine.compiled(job.id).unwrap();
    assert_eq!(served(&engine, &call(2, 8)), "jit.best");
    // Marked while it waits: passed over.
    decide(&engine, &call(2, 16)).unwrap();
    engine.mark_warm("jit.best", &call(2, 16), HOST).unwrap();
    assert_eq!(engine.next_compile(), None);
    assert!(matches!(engine.mark_warm("jit.best", &CallSpec::new("norm.rms"), HOST), Err(Error::Call(_))));
}

#[test]
fn calls_are_counted_in_the_manifest() {
    let engine = engine();
    for rows in [2, 2, 3] {
        decide(&engine, &call(rows, 8)).unwrap();
    }
    // By another name, it is the same call.
    decide(&engine, &CallSpec::new("rms_norm").tensor("x", DType::F32, &[3, 8]).param("eps", 1e-6)).unwrap();
    let told: Vec<(CallSpec, u64)> = engine.manifest().entries().into_iter().map(|e| (e.call, e.count)).collect();
    let rms = |rows| CallSpec { layout: None, ..call(rows, 8) };
    assert_eq!(told, [(rms(3), 2), (rms(2), 2)]);
    assert_eq!(engine.manifest().entries()[0].device, "cpu");
}

#[test]
fn devices_have_names() {
    let spec = |platform| DeviceSpec::new(platform, "x");
    let devices = [spec(Platform::Cpu), spec(Platform::Cuda), spec(Platform::Cuda), spec(Platform::Xpu)];
    for (at, name) in ["cpu", "cuda:0", "cuda:1", "xpu:0"].into_iter().enumerate() {
        assert_eq!(device_name(&devices, DeviceIx(at as u16)), name);
        assert_eq!(device_named(&devices, name), Some(DeviceIx(at as u16)));
    }
    assert_eq!(device_named(&devices, "cuda"), Some(DeviceIx(1)));
    for unknown in ["cuda:2", "cuda:x", "moon", "", "cpu:1"] {
        assert_eq!(device_named(&devices, unknown), None, "{unknown}");
    }
}

/// A library with a kernel that is compiled on first use, as a document describes it.
fn library(version: &str) -> String {
    format!(
        r#"{{"schema_version": "1.0", "backend": "lib", "backend_version": "{version}", "platform": "cpu",
            "ops": {{"norm.rms": [{{"kernel_id": "lib.rms", "dtypes": ["float32"], "requires_layouts": ["contiguous"],
                                    "priority": 90, "jit": true, "inputs": {{"weight": {{}}}}}}]}}}}"#
    )
}

/// An engine whose files are in a folder, with the library loaded.
fn at(folder: &Path, version: &str, devices: &[&str]) -> Engine {
    let devices = devices.iter().map(|name| DeviceSpec::new(Platform::Cpu, *name)).collect();
    let engine = Engine::builder().devices(devices).compiled_elsewhere().build();
    let environment = BTreeMap::from([("HOME".to_owned(), folder.display().to_string())]);
    engine.load_sources(&Sources { environment, ..Sources::default() }).unwrap();
    engine.load_capabilities("lib", &library(version)).unwrap();
    engine.attach("lib.rms", version, nothing()).unwrap();
    engine.load_warm().unwrap();
    engine
}

#[test]
fn the_next_process_knows_what_is_compiled() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("triton");
    std::fs::create_dir(&cache).unwrap();
    std::fs::write(cache.join("kernel.cubin"), "x").unwrap();
    let small = call(2, 8);
    {
        let engine = at(folder.path(), "1", &["host"]);
        decide(&engine, &small).unwrap();
        let job = engine.next_compile().unwrap();
        let done = engine.compiled(job.id).unwrap().unwrap();
        engine.keep_warm(&done.kernel, &done.call, done.device, 1200.0, vec![cache.clone()]);
        // Nothing is kept of what no library keeps.
        engine.mark_warm("lib.rms", &call(2, 16), HOST).unwrap();
        engine.keep_warm("lib.rms", &call(2, 16), HOST, 1.0, Vec::new());
    }
    let ready = |engine: &Engine, spec: &CallSpec| served(engine, spec) == "lib.rms";
    let next = at(folder.path(), "1", &["host"]);
    assert!(ready(&next, &small) && !ready(&next, &call(2, 16)));
    assert_eq!((next.jit_status().restored, next.jit_status().compiled), (1, 0));
    assert!(!ready(&at(folder.path(), "2", &["host"]), &small), "another version");
    assert!(!ready(&at(folder.path(), "1", &["other"]), &small), "another device");
    // A second one is kept beside the first.
    next.mark_warm("lib.rms", &call(2, 24), HOST).unwrap();
    next.keep_warm("lib.rms", &call(2, 24), HOST, 1.0, vec![cache.clone()]);
    let third = at(folder.path(), "1", &["host"]);
    assert!(ready(&third, &small) && ready(&third, &call(2, 24)));
    // A cache that was cleared, or that was deleted.
    std::fs::remove_file(cache.join("kernel.cubin")).unwrap();
    assert!(!ready(&at(folder.path(), "1", &["host"]), &small));
    std::fs::remove_dir(&cache).unwrap();
    assert!(!ready(&at(folder.path(), "1", &["host"]), &small));
}

#[test]
fn a_file_that_is_no_good_is_written_anew() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("triton");
    std::fs::create_dir_all(cache.join("x")).unwrap();
    let file = folder.path().join(".cache/layerzero/warm.json");
    for text in ["", r#"{"schema_version":"7","compiled":[]}"#, r#"{"schema_version":"1.0","compiled":[{}]}"#] {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, text).unwrap();
        let engine = at(folder.path(), "1", &["host"]);
        assert_eq!((engine.jit_status().restored, served(&engine, &call(2, 8)).as_str()), (0, "lz_cpu.ref.norm.rms"));
        engine.mark_warm("lib.rms", &call(2, 8), HOST).unwrap();
        engine.keep_warm("lib.rms", &call(2, 8), HOST, 1.0, vec![cache.clone()]);
        assert_eq!(at(folder.path(), "1", &["host"]).jit_status().restored, 1, "{text:?}");
    }
    // What is not ours is left as it is.
    for text in ["not json", "{}"] {
        std::fs::write(&file, text).unwrap();
        let engine = at(folder.path(), "1", &["host"]);
        engine.mark_warm("lib.rms", &call(2, 8), HOST).unwrap();
        engine.keep_warm("lib.rms", &call(2, 8), HOST, 1.0, vec![cache.clone()]);
        assert_eq!(at(folder.path(), "1", &["host"]).jit_status().restored, 0, "{text:?}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    }
    // A folder in its place: nothing is kept, and nothing else happens.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    let engine = at(folder.path(), "1", &["host"]);
    engine.mark_warm("lib.rms", &call(2, 8), HOST).unwrap();
    engine.keep_warm("lib.rms", &call(2, 8), HOST, 1.0, vec![cache]);
    assert_eq!(served(&engine, &call(2, 8)), "lib.rms");
}

#[test]
fn what_was_compiled_for_a_device_counts_once_it_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("triton");
    std::fs::create_dir_all(cache.join("x")).unwrap();
    let second = DeviceIx(1);
    let first = at(folder.path(), "1", &["host", "host"]);
    first.mark_warm("lib.rms", &call(2, 8), second).unwrap();
    first.keep_warm("lib.rms", &call(2, 8), second, 1.0, vec![cache]);
    let next = at(folder.path(), "1", &["host"]);
    assert_eq!(next.jit_status().restored, 0);
    // Already the first call there finds it compiled.
    next.add_devices(vec![DeviceSpec::new(Platform::Cpu, "host"); 2]).unwrap();
    assert_eq!(next.jit_status().restored, 1);
    let spec = call(2, 8);
    let named = spec.named(second, Context::default());
    assert_eq!(next.which("norm.rms", &named).unwrap().kernel_id, "lib.rms");
}

#[test]
fn code_of_the_program_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let engine = at(folder.path(), "1", &["host"]);
    engine.register(descriptor("mine.rms", 95, true), nothing()).unwrap();
    engine.mark_warm("mine.rms", &call(2, 8), HOST).unwrap();
    engine.keep_warm("mine.rms", &call(2, 8), HOST, 1.0, vec![folder.path().to_owned()]);
    assert!(!folder.path().join(".cache/layerzero/warm.json").exists());
}

/// Times by kernel.
struct Times(BTreeMap<String, (f64, bool)>);

impl PerfSource for Times {
    fn estimate(&self, kernel: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        let &(median_us, trusted) = self.0.get(&kernel.id)?;
        Some(Estimate {
            median_us,
            spread_us: 0.5,
            apart_us: None,
            sides: None,
            samples: 9,
            kind: EstimateKind::Measured,
            trusted,
        })
    }
    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

#[derive(Clone, Debug)]
struct Kernel {
    priority: i32,
    jit: bool,
    warm: bool,
    given_up: bool,
    time: Option<(f64, bool)>,
}

fn kernels() -> impl Strategy<Value = Vec<Kernel>> {
    let time = prop::option::of((1..8i32, any::<bool>()).prop_map(|(t, trusted)| (f64::from(t), trusted)));
    let kernel = (0..100i32, prop::bool::weighted(0.7), any::<bool>(), prop::bool::weighted(0.2), time)
        .prop_map(|(priority, jit, warm, given_up, time)| Kernel { priority, jit, warm, given_up, time });
    prop::collection::vec(kernel, 1..7)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Compiling what is wanted, one after the other, ends where selection would be if everything that can be compiled
    /// were compiled; and nothing is wanted that does not serve afterwards.
    #[test]
    fn compiling_what_is_wanted_ends_at_the_best(
        kernels in kernels(), pinned in prop::option::of(0..7usize), preferred in prop::option::of(0..7usize)
    ) {
        let id = |i: usize| format!("k{i}.rms");
        let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).compiled_elsewhere().build();
        for (i, kernel) in kernels.iter().enumerate() {
            engine.register(descriptor(&id(i), kernel.priority, kernel.jit), nothing()).unwrap();
        }
        let spec = call(2, 8);
        let query = query(&engine, &spec);
        if let Some(i) = preferred.filter(|&i| i < kernels.len()) {
            engine.configure([("prefer_sources".to_owned(), Value::names([format!("k{i}")]))]).unwrap();
        }
        let times = kernels.iter().enumerate().filter_map(|(i, k)| Some((id(i), k.time?))).collect();
        let pin = pinned.map(|i| Pin::exact(&query, &id(i), None, "a lockfile".into()));
        engine.update(|s| {
            s.perf = Arc::new(Times(times));
            s.pins = Arc::new(pin.into_iter().collect());
        }).unwrap();
        for (i, kernel) in kernels.iter().enumerate().filter(|(_, k)| k.jit) {
            if kernel.warm {
                engine.mark_warm(&id(i), &spec, HOST).unwrap();
            } else if kernel.given_up {
                for _ in 0..3 {
                    let job = engine.begin_compile(&id(i), &spec, HOST).unwrap();
                    engine.compile_failed(job.id, "no");
                }
            }
        }
        // What is best when all are ready, but those that cannot be had.
        let ideal = engine.with_snapshot(|s| {
            let mut spec = s.spec().clone();
            spec.warm = None;
            let gone = |id: &str| kernels.iter().enumerate().any(|(i, k)| id == format!("k{i}.rms") && k.jit && !k.warm && k.given_up);
            // They stay candidates, so that what the ranking goes by is the same.
            let snapshot = spec.build(1).unwrap();
            let decision = snapshot.select(&query);
            decision.ranked().map(|c| snapshot.kernel(c.kernel).id.clone()).find(|id| !gone(id))
        });
        let mut rounds = 0;
        while let Some(kernel) = engine.wanted(&engine.process(), &query) {
            rounds += 1;
            prop_assert!(rounds <= kernels.len(), "{kernel} is wanted again and again");
            let is_cold = engine.with_snapshot(|s| {
                let d = s.select(&query);
                d.candidates.iter().any(|c| c.cold && c.accepted() && s.kernel(c.kernel).id == kernel)
            });
            prop_assert!(is_cold);
            engine.mark_warm(&kernel, &spec, HOST).unwrap();
            prop_assert_eq!(engine.steps(&query).unwrap()[0].kernel.id.clone(), kernel);
        }
        prop_assert_eq!(Some(engine.steps(&query).unwrap()[0].kernel.id.clone()), ideal);
    }

    /// The queue does what one written down as plainly as possible does.
    #[test]
    fn the_queue_is_a_queue(size in 1..4i64, steps in prop::collection::vec((0..6u8, 0..6i64), 0..40)) {
        let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).compiled_elsewhere().build();
        engine.register(descriptor("aot.rms", 50, false), nothing()).unwrap();
        engine.register(descriptor("jit.best", 90, true), nothing()).unwrap();
        set(&engine, "jit.queue_size", size);
        let (mut waiting, mut running): (VecDeque<i64>, Vec<(u64, i64)>) = Default::default();
        let (mut warm, mut attempts, mut dropped) = (BTreeSet::new(), BTreeMap::<i64, u32>::new(), 0);
        let mut push = |waiting: &mut VecDeque<i64>, h: i64| {
            waiting.push_back(h);
            while waiting.len() > size as usize {
                waiting.pop_front();
                dropped += 1;
            }
        };
        for (step, h) in steps {
            match step {
                0..=2 => {
                    let expected = !warm.contains(&h) && !waiting.contains(&h) && !running.iter().any(|r| r.1 == h)
                        && attempts.get(&h).is_none_or(|&n| n < 3);
                    let (by, queued) = decide(&engine, &call(2, 8 + h)).unwrap();
                    prop_assert_eq!(queued, expected);
                    prop_assert_eq!(by == "jit.best", warm.contains(&h));
                    if expected {
                        push(&mut waiting, h);
                    }
                }
                3 => {
                    let job = engine.next_compile();
                    let expected = waiting.pop_front();
                    prop_assert_eq!(job.as_ref().map(|job| job.call.clone()), expected.map(|h| call(2, 8 + h)));
                    running.extend(job.map(|job| (job.id, expected.unwrap())));
                }
                4 if !running.is_empty() => {
                    let (id, h) = running.remove(h as usize % running.len());
                    prop_assert!(engine.compiled(id).unwrap().is_some());
                    warm.insert(h);
                    attempts.remove(&h);
                }
                5 if !running.is_empty() => {
                    let (id, h) = running.remove(h as usize % running.len());
                    engine.compile_failed(id, "no");
                    *attempts.entry(h).or_default() += 1;
                    if attempts[&h] < 3 {
                        push(&mut waiting, h);
                    }
                }
                _ => {}
            }
            let status = engine.jit_status();
            prop_assert_eq!((status.queued, status.running), (waiting.len(), running.len()));
            prop_assert_eq!(status.warm, warm.len());
        }
        prop_assert_eq!(engine.jit_status().dropped, dropped);
    }
}
