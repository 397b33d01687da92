//! Circuit breakers through dispatch.

use std::collections::BTreeSet;

use super::*;

/// An engine with a kernel that fails, and another that serves when it does. Levels stay where they are.
fn world(flaky: &Flaky) -> World {
    let w = World::with_kernels(&["good.rms"]);
    w.engine.register(descriptor("flaky.rms", 95), flaky.kernel()).unwrap();
    let gelu = KernelDescriptor { operation: "activation.gelu".into(), ..descriptor("flaky.gelu", 95) };
    w.engine.register(gelu, fill(1.0)).unwrap();
    w.set("degradation.enabled", false);
    w
}

/// The kernel that serves another operation.
fn gelu(w: &World) -> String {
    let x = Tensor::from_f64(DType::F32, &[2], &[1.0, 1.0]);
    w.engine.dispatch("gelu", Arguments::new().input("x", x.view())).unwrap().kernel_id
}

/// What the first kernel to be tried said.
fn first_error(done: &Dispatched) -> String {
    done.failures.first().map(|f| format!("{}: {}", f.kernel_id, f.error)).unwrap_or_default()
}

fn retry_at(w: &World) -> u64 {
    w.engine.health().breakers.iter().find_map(|b| b.view.retry_at_ms).unwrap()
}

#[test]
fn it_opens_after_five_failures_and_closes_after_three_successes() {
    let flaky = Flaky::failing("no luck");
    let w = world(&flaky);
    for i in 1..=5 {
        let done = rms(&w.engine).unwrap();
        assert_eq!(done.kernel_id, "good.rms");
        assert_eq!(first_error(&done), "flaky.rms: no luck");
        assert_eq!(flaky.runs(), i);
    }
    assert_eq!(w.names().iter().filter(|name| **name == "breaker_opened").count(), 1);
    // Open: it is not even tried.
    flaky.fails_with(None);
    for _ in 0..10 {
        let done = rms(&w.engine).unwrap();
        assert_eq!(done.kernel_id, "good.rms");
        assert!(done.failures.is_empty(), "nothing was tried, so nothing failed: {:?}", done.failures);
    }
    assert_eq!(flaky.runs(), 5);
    assert!(reasons(&w.engine, &[2, 4], "flaky.rms").contains("the circuit of flaky.rms is open: no luck"));
    assert_eq!(w.engine.which("rms_norm", &call(&[2, 4])).unwrap().kernel_id, "good.rms");
    // Other operations of the backend are none of its business.
    assert_eq!(gelu(&w), "flaky.gelu");

    w.clock.store(retry_at(&w) - 1, Ordering::Release);
    rms(&w.engine).unwrap();
    assert_eq!(flaky.runs(), 5, "not a moment too soon");
    w.advance(1);
    for i in 1..=3 {
        assert_eq!(rms(&w.engine).unwrap().kernel_id, "flaky.rms");
        assert_eq!(flaky.runs(), 5 + i);
    }
    let told: Vec<_> = w.names().into_iter().filter(|name| name.starts_with("breaker")).collect();
    assert_eq!(told, ["breaker_opened", "breaker_half_open", "breaker_closed"]);
    assert!(w.engine.health().is_well());
    // A success in between begins the count anew.
    for error in [Some("a"), Some("b"), Some("c"), Some("d"), None, Some("e"), Some("f"), Some("g"), Some("h")] {
        flaky.fails_with(error);
        rms(&w.engine).unwrap();
    }
    assert!(w.engine.health().is_well());
}

#[test]
fn one_probe_at_a_time_and_a_failed_one_opens_it_for_longer() {
    let flaky = Flaky::failing("no luck");
    let w = world(&flaky);
    w.set("breaker.half_open_max_calls", 1);
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    let first = retry_at(&w) - w.clock.load(Ordering::Acquire);
    w.clock.store(retry_at(&w), Ordering::Release);
    rms(&w.engine).unwrap();
    assert_eq!(flaky.runs(), 6, "one probe went, and failed");
    rms(&w.engine).unwrap();
    assert_eq!(flaky.runs(), 6);
    let second = retry_at(&w) - w.clock.load(Ordering::Acquire);
    assert!(second > first, "{first} ms, then {second} ms");

    // A kernel that makes a call of its own: while it is the probe, no other is.
    let engine = Arc::downgrade(&w.engine);
    let inner = Arc::new(Mutex::new(Vec::new()));
    let (served, depth) = (inner.clone(), AtomicBool::new(false));
    let nested = code(move |_| {
        if !depth.swap(true, Ordering::AcqRel) {
            served.lock().unwrap().push(rms(&engine.upgrade().unwrap()).unwrap().kernel_id);
        }
        Ok(())
    });
    // Another version of the kernel has its circuit; one that came after it was removed would have none.
    w.engine.register(KernelDescriptor { version: "2.0".into(), ..descriptor("flaky.rms", 95) }, nested).unwrap();
    w.engine.unregister("flaky.rms", "1.0").unwrap();
    w.clock.store(retry_at(&w), Ordering::Release);
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "flaky.rms");
    assert_eq!(*inner.lock().unwrap(), ["good.rms"]);
}

#[test]
fn a_lost_context_puts_a_library_out_for_good() {
    let flaky = Flaky::failing("CUDA error: an illegal memory access was encountered");
    let w = world(&flaky);
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "good.rms");
    assert!(w.names().contains(&"backend_disabled"), "{:?}", w.names());
    flaky.fails_with(None);
    let year_ms = 365 * 24 * 3600 * 1000;
    for step in 0..3 {
        w.advance(year_ms);
        if step == 1 {
            // Other thresholds bring nothing back.
            w.set("breaker.failure_threshold", 9);
        }
        assert_eq!(rms(&w.engine).unwrap().kernel_id, "good.rms");
        assert_eq!(gelu(&w), "lz_cpu.ref.activation.gelu", "all of its operations");
    }
    assert_eq!(flaky.runs(), 1);
    let why = reasons(&w.engine, &[2, 4], "flaky.rms");
    assert!(why.contains("flaky is disabled for this process") && why.contains("illegal memory access"), "{why}");
    w.set("fallback_enabled", false);
    let error = rms(&w.engine).unwrap_err();
    assert!(error.to_string().contains("flaky is disabled for this process"), "{error}");
}

#[test]
fn exhausted_memory_is_nobodys_failure_and_the_smaller_workspace_is_next() {
    let flaky = Flaky::failing("CUDA out of memory. Tried to allocate 20 GiB");
    let w = World::new();
    w.set("degradation.enabled", false);
    let workspace = |bytes: &str| Some(format!("{bytes} * rows"));
    let kernel =
        |id: &str, priority, bytes: &str| KernelDescriptor { workspace: workspace(bytes), ..descriptor(id, priority) };
    w.engine.register(kernel("flaky.rms", 95, "8"), flaky.kernel()).unwrap();
    w.engine.register(kernel("large.rms", 90, "1000"), fill(1.0)).unwrap();
    w.engine.register(kernel("small.rms", 85, "10"), fill(2.0)).unwrap();
    for i in 1..=20 {
        let done = rms(&w.engine).unwrap();
        assert_eq!(done.kernel_id, "small.rms");
        assert_eq!(flaky.runs(), i, "it is tried every time: the breaker stays closed");
    }
    assert!(w.engine.health().is_well());
    let names: BTreeSet<_> = w.names().into_iter().collect();
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["fell_back", "out_of_memory"]);
    // Any other failure goes on in the order of the ranking.
    flaky.fails_with(Some("no luck"));
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "large.rms");
}

#[test]
fn when_memory_is_exhausted_the_reference_is_still_the_last() {
    let w = World::new();
    let oom = || Flaky::failing("out of memory").kernel();
    w.engine.register(KernelDescriptor { workspace: Some("64".into()), ..descriptor("a.rms", 95) }, oom()).unwrap();
    w.engine.register(KernelDescriptor { workspace: Some("32".into()), ..descriptor("b.rms", 90) }, oom()).unwrap();
    let done = rms(&w.engine).unwrap();
    let tried: Vec<&str> = done.failures.iter().map(|f| f.kernel_id.as_str()).collect();
    assert_eq!((tried, done.kernel_id.as_str()), (vec!["a.rms", "b.rms"], "lz_cpu.ref.norm.rms"));
}

#[test]
fn it_can_be_turned_off() {
    let flaky = Flaky::failing("no luck");
    let w = world(&flaky);
    w.set("breaker.enabled", false);
    (0..50).for_each(|_| drop(rms(&w.engine).unwrap()));
    assert_eq!(flaky.runs(), 50);
}

#[test]
fn a_reference_that_fails_is_tried_again() {
    let w = World::new();
    w.set("degradation.enabled", false);
    let x = Tensor::from_ints(DType::I64, &[1], &[9]);
    let table = Tensor::from_f64(DType::F32, &[3, 2], &[0.0; 6]);
    let call = |ids: &Tensor| {
        w.engine.dispatch("embedding", Arguments::new().input("indices", ids.view()).input("weight", table.view()))
    };
    (0..10).for_each(|_| drop(call(&x).unwrap_err()));
    assert!(call(&Tensor::from_ints(DType::I64, &[1], &[1])).is_ok());
    assert!(w.engine.health().is_well(), "data of the caller's is no failure of a kernel");
}

#[test]
fn without_fallback_an_open_circuit_is_an_error_that_says_so() {
    let flaky = Flaky::failing("no luck");
    let w = world(&flaky);
    w.set("fallback_enabled", false);
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap_err()));
    let error = rms(&w.engine).unwrap_err();
    assert_eq!(error.code(), "KERNEL_EXECUTION_FAILED");
    assert!(error.to_string().contains("the circuit of flaky.rms is open"), "{error}");
    assert_eq!(flaky.runs(), 5);
}

#[test]
fn one_broken_kernel_leaves_its_siblings_and_the_level_alone() {
    let flaky = Flaky::failing("no luck");
    let w = World::new();
    w.engine.register(descriptor("lib.fast", 95), flaky.kernel()).unwrap();
    w.engine.register(descriptor("lib.sound", 90), fill(2.0)).unwrap();
    for i in 1..=60 {
        let done = rms(&w.engine).unwrap();
        assert_eq!(done.kernel_id, "lib.sound");
        assert_eq!(flaky.runs(), i.min(5));
    }
    let health = w.engine.health();
    let of_lib = health.breakers.iter().filter(|b| b.backend == "lib");
    let states: Vec<_> = of_lib.map(|b| (b.kernel.as_str(), b.view.state.name())).collect();
    assert_eq!(states, [("lib.fast", "open"), ("lib.sound", "closed")]);
    assert_eq!((health.level, w.names().contains(&"level_changed")), (Level::Full, false));
    assert_eq!(reasons(&w.engine, &[2, 4], "lib.sound"), "");
}

#[test]
fn a_kernel_that_is_registered_anew_begins_anew() {
    let flaky = Flaky::failing("no luck");
    let w = world(&flaky);
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "good.rms");
    w.engine.unregister("flaky.rms", "1.0").unwrap();
    w.engine.register(descriptor("flaky.rms", 95), fill(1.0)).unwrap();
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "flaky.rms", "its backend has another kernel, and is not new");
}

#[test]
fn an_experiment_moves_nothing_but_a_lost_context() {
    let flaky = Flaky::default();
    let w = world(&flaky);
    w.set("degradation.enabled", true);
    let (_, bound) = w.engine.bind("rms_norm", &call(&[2, 4])).unwrap();
    let step = w.engine.process().step_of("flaky.rms", &bound.query).unwrap();
    for _ in 0..100 {
        w.engine.admit_anyway(&step).unwrap();
        w.engine.experiment_failed(&step, "no luck", "no luck");
    }
    assert!(w.engine.health().is_well() && w.names().is_empty(), "{:?}", w.names());
    assert_eq!(w.engine.health().score, 100.0);
    let lost = "CUDA error: an illegal memory access was encountered";
    w.engine.experiment_failed(&step, lost, lost);
    assert_eq!(w.names(), ["backend_disabled"]);
    assert_eq!(w.engine.admit_anyway(&step).unwrap_err(), "flaky is disabled for this process");
}

#[test]
fn half_open_admits_three_calls_at_once() {
    let flaky = Flaky::failing("no luck");
    let w = world(&flaky);
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    w.clock.store(retry_at(&w), Ordering::Release);
    let (_, bound) = w.engine.bind("rms_norm", &call(&[2, 4])).unwrap();
    let step = w.engine.process().step_of("flaky.rms", &bound.query).unwrap();
    let under_way: Vec<_> = (0..3).map(|_| w.engine.admit(&step).unwrap()).collect();
    let refused = w.engine.admit(&step).unwrap_err();
    assert!(refused.contains("the circuit of flaky.rms is open"), "{refused}");
    // Three that succeed close it.
    under_way.into_iter().for_each(|probe| w.engine.succeeded(&step, probe, false));
    assert!(w.engine.health().is_well());
}

/// Kernels of one backend: one that fails when told to, for two operations, and one that never does.
fn siblings(flaky: &Flaky) -> World {
    let w = World::new();
    w.set("degradation.enabled", false);
    w.engine.register(descriptor("lib.fast", 95), flaky.kernel()).unwrap();
    w.engine.register(descriptor("lib.sound", 90), fill(2.0)).unwrap();
    w
}

#[test]
fn a_siblings_success_does_not_reset_the_failure_count() {
    let flaky = Flaky::failing("no luck");
    let w = siblings(&flaky);
    for failures in 1..=5 {
        // The call fails, and the sibling serves it.
        assert_eq!(rms(&w.engine).unwrap().kernel_id, "lib.sound");
        let health = w.engine.health();
        let fast = &health.breakers.iter().find(|b| b.kernel == "lib.fast").unwrap().view;
        let expected = if failures < 5 { ("closed", failures) } else { ("open", 0) };
        assert_eq!((fast.state.name(), fast.failures), expected);
    }
}

#[test]
fn a_siblings_failure_does_not_open_the_circuit() {
    let (one, other) = (Flaky::failing("one"), Flaky::failing("other"));
    let w = World::new();
    w.set("degradation.enabled", false);
    w.engine.register(descriptor("lib.one", 95), one.kernel()).unwrap();
    w.engine.register(descriptor("lib.other", 90), other.kernel()).unwrap();
    w.engine.register(descriptor("lib.sound", 85), fill(2.0)).unwrap();
    // Four failures of each: eight of the backend.
    (0..4).for_each(|_| drop(rms(&w.engine).unwrap()));
    let failures = |w: &World| -> Vec<u32> {
        let breakers = w.engine.health().breakers;
        breakers.iter().filter(|b| b.backend == "lib").map(|b| b.view.failures).collect()
    };
    assert_eq!(failures(&w), [4, 4, 0]);
    one.fails_with(None);
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "lib.one");
    assert_eq!(failures(&w), [0, 4, 0]);
}

#[test]
fn plain_torch_is_never_refused() {
    let flaky = Flaky::failing("no luck");
    let w = World::with_kernels(&["good.rms"]);
    w.set("degradation.enabled", false);
    let plain = KernelDescriptor { baseline: true, ..descriptor("plain.rms", 95) };
    w.engine.register(plain, flaky.kernel()).unwrap();
    for runs in 1..=20 {
        let done = rms(&w.engine).unwrap();
        assert_eq!((done.kernel_id.as_str(), flaky.runs()), ("good.rms", runs));
        assert_eq!(first_error(&done), "plain.rms: no luck");
    }
    assert_eq!(reasons(&w.engine, &[2, 4], "plain.rms"), "");
    // Not even when its library lost its context: then torch itself says so.
    flaky.fails_with(Some("CUDA error: an illegal memory access was encountered"));
    for runs in 21..=30 {
        assert_eq!((rms(&w.engine).unwrap().kernel_id.as_str(), flaky.runs()), ("good.rms", runs));
    }
    assert_eq!(reasons(&w.engine, &[2, 4], "plain.rms"), "");
    flaky.fails_with(None);
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "plain.rms");
}
