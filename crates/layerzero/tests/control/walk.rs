//! Every setting the engine acts on, changed: something that can be observed changes with it.
//!
//! Settings that act in Python, or on files and threads, are walked in `tests/control/test_settings_walk.py`, which also
//! sees to it that no setting is left out of both.

use super::*;

/// A setting, another value than its default, and what is observed.
type Stop = (&'static str, fn() -> Value, fn(&World) -> String);

const WALK: &[Stop] = &[
    ("enabled", || false.into(), chosen),
    ("fallback_enabled", || false.into(), answer_of_a_failing_kernel),
    ("explain_enabled", || false.into(), explained),
    ("deterministic", || true.into(), why_not_the_first),
    ("batch_invariant", || true.into(), why_not_the_first),
    ("max_cpu_isa", || "baseline".into(), why_not_the_first),
    ("num_threads", || Value::Int(1), threads_of_a_kernel),
    ("prefer_sources", || Value::names([String::from("b")]), chosen),
    ("avoid_sources", || Value::names([String::from("a")]), chosen),
    ("cache.enabled", || false.into(), remembered),
    ("cache.max_size", || Value::Int(1), remembered),
    ("cache.ttl_seconds", || Value::Int(1), decided_again_after_two_seconds),
    ("breaker.enabled", || false.into(), runs_of_a_failing_kernel),
    ("breaker.failure_threshold", || Value::Int(2), runs_of_a_failing_kernel),
    ("breaker.timeout_ms", || Value::Int(5), runs_of_a_failing_kernel),
    ("breaker.max_timeout_ms", || Value::Int(30_000), runs_of_a_failing_kernel),
    ("breaker.success_threshold", || Value::Int(1), states_while_it_recovers),
    ("breaker.half_open_max_calls", || Value::Int(1), probes_at_once),
    ("degradation.enabled", || false.into(), levels_by_failures),
    ("degradation.reduced_health", || Value::Int(95), levels_by_failures),
    ("degradation.cached_health", || Value::Int(75), levels_by_failures),
    ("degradation.rule_based_health", || Value::Int(55), levels_by_failures),
    ("degradation.minimal_health", || Value::Int(39), levels_when_nobody_else_serves),
    ("degradation.min_calls", || Value::Int(200), levels_by_failures),
    ("degradation.hysteresis", || Value::Int(0), levels_while_it_half_recovers),
    ("degradation.window_ms", || Value::Int(1_000), levels_while_it_recovers),
];

#[test]
fn every_setting_of_the_engine_changes_something() {
    for (key, other, observe) in WALK {
        let (as_it_is, changed) = (world(), world());
        changed.set(key, other());
        assert_ne!(observe(&as_it_is), observe(&changed), "{key} has no effect");
        assert_eq!(observe(&world()), observe(&world()), "{key}: what is observed must depend on nothing else");
    }
}

/// Two kernels; the first is what a careful operator does not want: not deterministic, not batch-invariant, and
/// for a CPU with AVX-512.
fn world() -> World {
    let mut host = DeviceSpec::new(Platform::Cpu, "host");
    host.features.push("avx512f".into());
    let w = World::made(|builder, _| builder.devices(vec![host]));
    w.register(&["b.rms"]);
    let mut first = descriptor("a.rms", 95);
    first.deterministic = false;
    first.batch_invariant = false;
    first.instruction_sets = vec!["avx512f".into()];
    w.engine.register(first, fill(9.0)).unwrap();
    w
}

fn chosen(w: &World) -> String {
    w.serves()
}

fn why_not_the_first(w: &World) -> String {
    reasons(&w.engine, &[2, 4], "a.rms")
}

fn explained(w: &World) -> String {
    w.engine.explain("rms_norm", &call(&[2, 4])).map_or_else(|e| e.to_string(), |report| report.op.to_string())
}

/// Registers a kernel that fails, before all others.
fn failing(w: &World) -> Flaky {
    let flaky = Flaky::failing("no luck");
    w.engine.register(descriptor("flaky.rms", 99), flaky.kernel()).unwrap();
    flaky
}

fn answer_of_a_failing_kernel(w: &World) -> String {
    failing(w);
    rms(&w.engine).map_or_else(|e| e.to_string(), |done| done.kernel_id)
}

/// How many of sixty-four decisions are remembered.
fn remembered(w: &World) -> String {
    for i in 0..64 {
        w.engine.select("rms_norm", &call(&[1 << (i % 16), 1 << (i / 4)])).unwrap();
    }
    let entries = w.engine.cache_stats().entries;
    format!("{entries}")
}

fn decided_again_after_two_seconds(w: &World) -> String {
    let mut misses = Vec::new();
    for _ in 0..2 {
        w.engine.select("rms_norm", &call(&[2, 4])).unwrap();
        misses.push(w.engine.cache_stats().misses);
        w.advance(2_000);
    }
    format!("{}", misses[1] - misses[0])
}

/// How often a kernel that always fails is tried, call by call, over an hour.
fn runs_of_a_failing_kernel(w: &World) -> String {
    w.set("degradation.enabled", false);
    let flaky = failing(w);
    let runs = |_| {
        rms(&w.engine).unwrap();
        w.advance(10_000);
        flaky.runs().to_string()
    };
    (0..360).map(runs).collect::<Vec<_>>().join(" ")
}

/// The states of a circuit that is open, when the kernel is well again.
fn states_while_it_recovers(w: &World) -> String {
    w.set("degradation.enabled", false);
    let flaky = failing(w);
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    flaky.fails_with(None);
    w.advance(600_000);
    let state = |_| {
        rms(&w.engine).unwrap();
        let health = w.engine.health();
        health.breakers.iter().find(|b| b.kernel == "flaky.rms").map(|b| b.view.state.to_string()).unwrap()
    };
    (0..4).map(state).collect::<Vec<_>>().join(" ")
}

/// How many calls may try at once whether a circuit can close: each probe makes a call of its own while it is under way.
fn probes_at_once(w: &World) -> String {
    w.set("degradation.enabled", false);
    let runs = Arc::new(AtomicUsize::new(0));
    let (counted, engine) = (runs.clone(), Arc::downgrade(&w.engine));
    let nested = code(move |args| {
        let run = counted.fetch_add(1, Ordering::AcqRel);
        if run < 5 {
            return Err(KernelError::Failed("no luck".into()));
        }
        if run < 13
            && let Some(engine) = engine.upgrade()
        {
            drop(rms(&engine));
        }
        fill(7.0).run(args)
    });
    w.engine.register(descriptor("flaky.rms", 99), nested).unwrap();
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    w.advance(600_000);
    drop(rms(&w.engine));
    runs.load(Ordering::Acquire).to_string()
}

/// The level after twenty calls of which so many fell to another kernel, for any number of them.
fn levels_by_failures(w: &World) -> String {
    levels(w, true)
}

/// The same of calls that failed: no other kernel may serve them.
fn levels_when_nobody_else_serves(w: &World) -> String {
    levels(w, false)
}

fn levels(w: &World, fallback_enabled: bool) -> String {
    let settings = w.engine.config();
    let level = |bad: usize| {
        let fresh = world();
        fresh.set("breaker.enabled", false);
        fresh.set("fallback_enabled", fallback_enabled);
        let entries = settings.entries();
        for entry in entries.iter().filter(|entry| entry.key.starts_with("degradation.")) {
            fresh.set(&entry.key, entry.value.clone());
        }
        let flaky = failing(&fresh);
        for i in 0..20 {
            flaky.fails_with((i < bad).then_some("no luck"));
            drop(rms(&fresh.engine));
        }
        fresh.engine.level().name()
    };
    (0..=20).map(level).collect::<Vec<_>>().join(" ")
}

/// The levels after twenty bad calls, while good ones follow.
fn levels_while_it_recovers(w: &World) -> String {
    levels_after(w, 0)
}

/// The levels after twenty bad calls, while three of eight go on failing: the score is 62.5, just above a threshold.
fn levels_while_it_half_recovers(w: &World) -> String {
    levels_after(w, 3)
}

fn levels_after(w: &World, bad_of_eight: usize) -> String {
    w.set("breaker.enabled", false);
    let flaky = failing(w);
    (0..20).for_each(|_| drop(rms(&w.engine)));
    flaky.fails_with(None);
    let level = |i: usize| {
        if i % 8 < bad_of_eight {
            w.engine.nobody_served();
        } else {
            drop(rms(&w.engine));
        }
        w.advance(100);
        w.engine.level().name()
    };
    (0..200).map(level).collect::<Vec<_>>().join(" ")
}

fn threads_of_a_kernel(w: &World) -> String {
    w.engine.process().most_threads().to_string()
}
