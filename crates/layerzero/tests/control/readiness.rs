//! The checklist: each of its lines, failing.

use layerzero::resilience::rollout::RolloutCall;
use layerzero::{CheckStatus, Readiness};

use super::*;

fn check(engine: &Engine, name: &str) -> (CheckStatus, String) {
    let readiness = engine.readiness();
    let failed = readiness.checks.iter().any(|c| c.status == CheckStatus::Fail);
    assert_eq!(readiness.ready, !failed);
    let check = readiness.checks.iter().find(|c| c.name == name).unwrap();
    let to_be_done = matches!(check.status, CheckStatus::Warn | CheckStatus::Fail);
    assert_eq!(!check.hint.is_empty(), to_be_done, "{check:?}");
    (check.status, check.detail.clone())
}

#[track_caller]
fn expect(engine: &Engine, name: &str, status: CheckStatus, detail: &str) {
    let (found, text) = check(engine, name);
    assert_eq!(found, status, "{name}: {text}");
    assert!(text.contains(detail), "'{detail}' in {text}");
}

use CheckStatus::{Fail, Pass, Skipped, Warn};

#[test]
fn an_engine_as_it_is_made_is_ready() {
    let w = World::new();
    let readiness = w.engine.readiness();
    assert!(readiness.ready, "{readiness}");
    let statuses: Vec<_> = readiness.checks.iter().map(|c| (c.name, c.status)).collect();
    assert_eq!(
        statuses,
        [
            ("configuration", Pass),
            ("capabilities", Pass),
            ("kernels", Pass),
            ("locks", Skipped),
            ("rules", Skipped),
            ("versions", Skipped),
            ("memory", Skipped),
            ("results", Skipped),
            ("breakers", Pass),
            ("level", Pass),
            ("rollouts", Skipped),
            ("jit", Skipped),
            ("graphs", Skipped),
            ("lockfile", Skipped),
            ("dispatch_table", Skipped),
            ("perfdb", Skipped),
            ("drift", Skipped),
            ("telemetry", Pass),
        ]
    );
    assert!(readiness.to_string().ends_with("\nready"), "{readiness}");
    let json = serde_json::to_value(&readiness).unwrap();
    assert_eq!((&json["ready"], &json["checks"][0]["status"]), (&true.into(), &"pass".into()));
}

#[test]
fn configuration() {
    let w = World::new();
    w.engine.load_config(&w.write("layerzero.yaml", "nonsense: 1\n")).unwrap_err();
    expect(&w.engine, "configuration", Fail, "layerzero.yaml:1:1: nonsense: unknown key");
    w.load("version: 1\n");
    expect(&w.engine, "configuration", Pass, "layerzero.yaml");
    w.write("layerzero.yaml", "nonsense: 1\n");
    w.engine.reload().unwrap_err();
    expect(&w.engine, "configuration", Fail, "nonsense");
    let environment = [("LAYERZERO_VERBOES".to_owned(), "1".to_owned())].into_iter().collect();
    w.engine.load_sources(&Sources { environment, ..Sources::default() }).unwrap();
    expect(&w.engine, "configuration", Warn, "did you mean 'LAYERZERO_VERBOSE'?");
    assert!(w.engine.readiness().ready, "a warning keeps nobody");
}

#[test]
fn capabilities() {
    let w = World::new();
    w.engine.load_capabilities("mine", r#"{"schema_version": "9.9"}"#).unwrap_err();
    expect(&w.engine, "capabilities", Warn, "mine: [CAPABILITIES_SCHEMA_MISMATCH]");
    let w = World::new();
    let unavailable = |reason: Reason, platform: Platform| {
        w.engine
            .update(|spec| {
                let descriptor = BackendDescriptor::native("lib", "1", vec![platform]);
                spec.backends.insert("lib".into(), BackendState::unavailable(descriptor, reason));
            })
            .unwrap();
    };
    unavailable(Reason::NotInstalled { library: "lib".into() }, Platform::Cpu);
    expect(&w.engine, "capabilities", Pass, "1 not installed, 0 for other hardware");
    let broken = || Reason::BackendImportFailed { library: "lib".into(), error: "undefined symbol".into() };
    unavailable(broken(), Platform::Cpu);
    expect(&w.engine, "capabilities", Warn, "undefined symbol");
    // A machine without a GPU is not asked to repair a library for one.
    unavailable(broken(), Platform::Cuda);
    expect(&w.engine, "capabilities", Pass, "0 not installed, 1 for other hardware");
}

fn h100() -> DeviceSpec {
    let mut device = DeviceSpec::new(Platform::Cuda, "H100");
    device.versions.insert("cuda".into(), "12.8".into());
    device
}

#[test]
fn kernels() {
    let w = World::made(|builder, _| builder.devices(vec![h100()]));
    expect(&w.engine, "kernels", Fail, "no kernel runs here for ");
    let w = World::made(|builder, _| builder.devices(vec![DeviceSpec::new(Platform::Cpu, "host"), h100()]));
    expect(&w.engine, "kernels", Warn, "no kernel runs on H100");
    let w = World::new();
    w.engine.unregister("lz_cpu.ref.norm.rms", &version_of(&w, "lz_cpu.ref.norm.rms")).unwrap();
    expect(&w.engine, "kernels", Fail, "no kernel runs here for norm.rms");
}

fn version_of(w: &World, id: &str) -> String {
    w.engine.with_snapshot(|s| s.kernels().find(|(_, k)| k.id == id).unwrap().1.version.clone())
}

#[test]
fn locks() {
    let w = World::with_kernels(&["a.rms"]);
    w.engine.lock("norm.rms", "a.rms").unwrap();
    expect(&w.engine, "locks", Pass, "1 lock");
    let elsewhere = KernelDescriptor { platforms: vec![Platform::Cuda], ..descriptor("b.rms", 90) };
    w.engine.register(elsewhere, fill(1.0)).unwrap();
    w.engine.lock("norm.rms", "b.rms").unwrap();
    expect(&w.engine, "locks", Fail, "'b.rms' cannot run here: runs on cuda, this is cpu");
    w.engine.lock_if_there("norm.rms", "b.rms").unwrap();
    expect(&w.engine, "locks", Pass, "1 lock");
}

#[test]
fn rules() {
    let w = World::with_kernels(&["a.rms"]);
    let rules = |text: &str| w.load(&format!("rules:\n  - {text}\n"));
    rules("{name: fine, operation: rms_norm, prefer: a.rms}");
    expect(&w.engine, "rules", Pass, "1 rule");
    rules("{name: odd, operation: rms_norm, prefer: liger.rms_norm}");
    expect(&w.engine, "rules", Warn, "'liger.rms_norm' cannot run here: it is not loaded");
    let path = w.write("layerzero.yaml", "rules: [{operation: rms_norm, prefer: b.rms}]");
    w.engine.load_config(&path).unwrap_err();
    expect(&w.engine, "configuration", Fail, "no kernel is called 'b.rms'");
    rules("{name: odd, operation: rms_norm, when: rows > 9 and rows < 3, prefer: a.rms}");
    expect(&w.engine, "rules", Fail, "can never match");
}

#[test]
fn versions() {
    let w = World::made(|builder, _| builder.devices(vec![h100()]));
    let library = |name: &'static str, version: &'static str| {
        w.engine.update(|spec| drop(spec.versions.insert(name.into(), version.into()))).unwrap();
    };
    library("torch", "2.9.1+cu126");
    library("flashinfer", "0.5.3+cu128");
    expect(&w.engine, "versions", Pass, "cuda 12");
    library("xformers", "0.0.33+cu118");
    expect(&w.engine, "versions", Fail, "cuda 11");
    library("xformers", "0.0.33+rocm6.2");
    expect(&w.engine, "versions", Fail, "rocm 6");
    library("xformers", "0.0.33+cu126");
    let mut backend = BackendDescriptor::native("lib", "1", vec![Platform::Cuda]);
    backend.requires = vec!["cuda>=13".parse().unwrap()];
    w.engine.update(|spec| spec.backend(backend)).unwrap();
    expect(&w.engine, "versions", Fail, "found 12.8");
}

#[test]
fn memory() {
    let engine = Engine::builder().cpu_only().build();
    let set = |mb: i64| engine.configure([("memory_headroom_mb".to_owned(), Value::from(mb))]).unwrap();
    set(1);
    expect(&engine, "memory", Pass, "1 MiB");
    set(0);
    expect(&engine, "memory", Warn, "no headroom");
    set(1 << 30);
    expect(&engine, "memory", Warn, "are to stay free");
}

#[test]
fn breakers() {
    let flaky = Flaky::failing("no luck");
    let w = World::new();
    w.engine.register(descriptor("flaky.rms", 95), flaky.kernel()).unwrap();
    w.set("breaker.enabled", false);
    expect(&w.engine, "breakers", Warn, "turned off");
    w.set("breaker.enabled", true);
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    expect(&w.engine, "breakers", Fail, "the circuit of flaky.rms for norm.rms is open");
}

#[test]
fn level() {
    let flaky = Flaky::failing("no luck");
    let w = World::new();
    w.engine.register(descriptor("flaky.rms", 95), flaky.kernel()).unwrap();
    w.set("breaker.enabled", false);
    expect(&w.engine, "level", Pass, "full");
    (0..20).for_each(|_| drop(rms(&w.engine).unwrap()));
    expect(&w.engine, "level", Warn, "degraded to 'cached'");
    (0..40).for_each(|_| w.engine.nobody_served());
    expect(&w.engine, "level", Fail, "degraded to 'minimal'");
    w.set("degradation.enabled", false);
    expect(&w.engine, "level", Warn, "turned off");
}

#[test]
fn a_breaker_that_is_trying_is_a_warning() {
    let flaky = Flaky::failing("no luck");
    let w = World::new();
    w.engine.register(descriptor("flaky.rms", 95), flaky.kernel()).unwrap();
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    flaky.fails_with(None);
    w.advance(3_600_000);
    rms(&w.engine).unwrap();
    expect(&w.engine, "breakers", Warn, "is half_open");
}

#[test]
fn rollouts() {
    let w = World::with_kernels(&["new.rms", "old.rms"]);
    let canary = |candidate: &str| {
        format!(
            "rollouts:\n  - {{name: new, operation: rms_norm, candidate: {candidate}, mode: canary, fraction: 1.0, min_samples: 1}}\n"
        )
    };
    w.load(&canary("lz_cpu.ref.activation.gelu"));
    expect(&w.engine, "rollouts", Warn, "no kernel 'lz_cpu.ref.activation.gelu' serves norm.rms");
    w.load(&canary("new.rms"));
    expect(&w.engine, "rollouts", Pass, "1 under way");
    let query = w.engine.bind("rms_norm", &call(&[2, 4])).unwrap().1.query;
    let (rollout, ..) = w.engine.process().comparison(&query, &w.engine.steps(&query).unwrap()).unwrap();
    (0..20).for_each(|_| w.engine.tried(&rollout, RolloutCall::FAILED));
    expect(&w.engine, "rollouts", Warn, "'new' was rolled back");
}

#[test]
fn jit() {
    let w = World::new();
    w.engine.register(KernelDescriptor { jit: true, ..descriptor("jit.rms", 90) }, fill(1.0)).unwrap();
    expect(&w.engine, "jit", Pass, "none known to be cold");
    let cold = |id: &'static str, cold| {
        let health = Health { cold, ..Health::default() };
        w.engine.update(|spec| drop(spec.health.insert(id.into(), health))).unwrap();
    };
    cold("jit.rms", true);
    expect(&w.engine, "jit", Warn, "not compiled yet: jit.rms");
    cold("jit.rms@1.0", false);
    expect(&w.engine, "jit", Pass, "");
}

#[test]
fn graphs() {
    let w = World::made(|builder, _| builder.devices(vec![DeviceSpec::new(Platform::Cpu, "host"), h100()]));
    w.set("graph_strict_mode", true);
    expect(&w.engine, "graphs", Fail, "no kernel here is declared safe");
    let safe = KernelDescriptor { platforms: vec![Platform::Cuda], graph_safe: true, ..descriptor("safe.rms", 90) };
    w.engine.register(safe, fill(1.0)).unwrap();
    expect(&w.engine, "graphs", Fail, "none of 1 kernel is proven");
}

#[test]
fn telemetry() {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).build();
    expect(&engine, "telemetry", Warn, "nobody receives events");
    let readiness: Readiness = engine.readiness();
    assert!(readiness.ready);
    assert!(readiness.to_string().ends_with("ready, with 1 warning"), "{readiness}");
}

/// What there is to know of a backend: where it runs, and why it does not.
#[derive(Clone, Copy, Debug)]
enum Library {
    Usable,
    Absent,
    Broken,
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// Every number and every status of these lines follows from what the engine was given.
    #[test]
    fn sentences_follow_from_the_data(
        libraries in proptest::collection::vec((proptest::sample::select(vec![
            Library::Usable, Library::Absent, Library::Broken,
        ]), proptest::bool::ANY), 0..6),
        unproven in 0..4usize,
        compared in 0..3usize,
        wrong in 0..3usize,
        locks in 0..3usize,
        verify in proptest::sample::select(vec![Verify::Off, Verify::FirstUse, Verify::Sample]),
    ) {
        let w = World::new();
        w.set("verify", Verify::WORDS[verify as usize]);
        let before = w.engine.with_snapshot(|s| s.spec().backends.len());
        let ids: Vec<String> = (0..unproven).map(|i| format!("mine{i}.rms")).collect();
        for id in &ids {
            let descriptor = KernelDescriptor { trust: Trust::Unproven, ..descriptor(id, 1) };
            w.engine.register(descriptor, fill(1.0)).unwrap();
        }
        let kernel = w.engine.with_snapshot(|s| s.kernels().next().unwrap().1.clone());
        let queries: Vec<Query> = ["rms_norm", "layer_norm", "gelu"].iter().map(|op| w.engine.bind(op, &call(&[2, 4])).unwrap().1.query).collect();
        let evidence = Evidence { error: "no".into(), call: "a call".into(), max_error: None, tolerance: None };
        w.engine.update(|spec| {
            for (i, (state, here)) in libraries.iter().enumerate() {
                let platform = if *here { Platform::Cpu } else { Platform::Cuda };
                let name = format!("lib{i}");
                let descriptor = BackendDescriptor::native(&name, "1", vec![platform]);
                let state = match state {
                    Library::Usable => BackendState::available(descriptor),
                    Library::Absent => BackendState::unavailable(descriptor, Reason::NotInstalled { library: name.clone() }),
                    Library::Broken => BackendState::unavailable(
                        descriptor,
                        Reason::BackendImportFailed { library: name.clone(), error: "undefined symbol".into() },
                    ),
                };
                spec.backends.insert(name, state);
            }
            let proofs = Arc::make_mut(&mut spec.proofs);
            queries.iter().take(compared).for_each(|query| proofs.passed(&kernel, query));
            queries.iter().rev().take(wrong).for_each(|query| proofs.mismatched(&kernel, query, evidence.clone()));
        }).unwrap();
        for op in ["norm.rms", "norm.layer", "activation.gelu"].iter().take(locks) {
            w.engine.lock(op, &format!("lz_cpu.ref.{op}")).unwrap();
        }
        let many = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        // Libraries of other hardware count as nothing else, and one that is broken here is all that is said.
        let here = || libraries.iter().filter(|(_, here)| *here).map(|(state, _)| *state);
        let is = |wanted: fn(&Library) -> bool| here().filter(wanted).count();
        let (broken, absent) = (is(|l| matches!(l, Library::Broken)), is(|l| matches!(l, Library::Absent)));
        let backends = before + ids.len();
        let (status, detail) = check(&w.engine, "capabilities");
        match broken {
            0 => {
                let usable = backends + is(|l| matches!(l, Library::Usable));
                let elsewhere = libraries.len() - here().count();
                let said = format!("{} in use, {absent} not installed, {elsewhere} for other hardware", many(usable, "backend"));
                proptest::prop_assert_eq!((status, detail), (Pass, said));
            }
            broken => {
                proptest::prop_assert_eq!((status, detail.lines().count()), (Warn, broken));
                proptest::prop_assert!(detail.lines().all(|line| line.contains("[BACKEND_IMPORT_FAILED]")));
            }
        }
        let (status, detail) = check(&w.engine, "results");
        let right = compared.min(queries.len() - wrong);
        match (wrong, unproven, verify) {
            (1.., ..) => {
                proptest::prop_assert_eq!((status, detail.lines().count()), (Fail, wrong));
                proptest::prop_assert!(detail.lines().all(|line| line.contains(&kernel.id)));
            }
            (_, 0, _) => proptest::prop_assert_eq!(status, Skipped),
            (_, n, Verify::Off) => {
                proptest::prop_assert!(status == Warn && detail.starts_with(&many(n, "kernel")), "{}", detail);
            }
            (_, n, _) => {
                proptest::prop_assert_eq!(status, Pass);
                let (first, last) = (many(n, "kernel"), format!("({} so far)", many(right, "comparison")));
                proptest::prop_assert!(detail.starts_with(&first) && detail.ends_with(&last), "{}", detail);
            }
        }
        let (status, detail) = check(&w.engine, "locks");
        match locks {
            0 => proptest::prop_assert_eq!(status, Skipped),
            n => proptest::prop_assert!(status == Pass && detail.starts_with(&many(n, "lock")), "{}", detail),
        }
        // The last line says no more than the lines before it.
        let readiness = w.engine.readiness();
        let of = |wanted| readiness.checks.iter().filter(|c| c.status == wanted).count();
        let last = readiness.to_string().lines().last().unwrap().to_owned();
        let expected = match (of(Fail), of(Warn)) {
            (0, 0) => "ready".to_owned(),
            (0, n) => format!("ready, with {}", many(n, "warning")),
            _ => "not ready".to_owned(),
        };
        proptest::prop_assert_eq!(last, expected);
    }
}
