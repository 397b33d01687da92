//! Locking calls, and replaying what was locked.

use super::*;

#[test]
fn a_lockfile_holds_what_is_decided_and_by_what() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    engine.update(|spec| drop(spec.versions.insert("torch".into(), "2.9.1".into()))).unwrap();
    timed(&engine, &[("a.rms", 8, 20.12345), ("b.rms", 8, 10.5)]);
    let lockfile = engine.lockfile(&on_first([rms(8), rms(2)])).unwrap();
    assert_eq!(lockfile.devices, BTreeMap::from([("cpu__baseline".into(), "host".into())]));
    assert_eq!(lockfile.backends, BTreeMap::from([("a".into(), "1.0".into()), ("b".into(), "1.0".into())]));
    assert_eq!(lockfile.libraries, BTreeMap::from([("torch".into(), "2.9.1".into())]));
    assert_eq!(lockfile.layerzero, env!("CARGO_PKG_VERSION"));
    let [two, eight] = &lockfile.entries[..] else { panic!("{lockfile}") };
    assert_eq!((two.kernel.as_str(), two.time_us, two.basis.as_deref()), ("a.rms", None, Some("declared")));
    assert_eq!((eight.kernel.as_str(), eight.time_us, eight.basis.as_deref()), ("b.rms", Some(10.5), Some("measured")));
    assert_eq!((eight.version.as_deref(), eight.call.op.as_str()), (Some("1.0"), "norm.rms"), "canonical");
    assert_eq!(eight.baseline, None, "nobody says what plain torch would run");
}

#[test]
fn times_are_rounded_and_the_baseline_is_told() {
    let engine = engine_with(&["a.rms"]);
    let mut torch = descriptor("torch.rms", "2.9.1", 10);
    torch.baseline = true;
    engine.register(torch, nothing()).unwrap();
    timed(&engine, &[("a.rms", 8, 20.12345), ("torch.rms", 8, 0.001_234_567)]);
    let entry = engine.lockfile(&on_first([rms(8)])).unwrap().entries.remove(0);
    assert_eq!((entry.kernel.as_str(), entry.time_us), ("torch.rms", Some(0.001235)));
    assert_eq!((entry.baseline.as_deref(), entry.baseline_us), (Some("torch.rms"), Some(0.001235)));
    timed(&engine, &[("a.rms", 8, 1234.5), ("torch.rms", 8, 987_654.3)]);
    let entry = engine.lockfile(&on_first([rms(8)])).unwrap().entries.remove(0);
    assert_eq!((entry.kernel.as_str(), entry.time_us, entry.baseline_us), ("a.rms", Some(1234.0), Some(987_700.0)));
}

#[test]
fn the_same_decisions_are_the_same_text_whoever_asks_in_which_order() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let calls = on_first([rms(300), rms(8), rms(1), rms(8)]);
    let text = engine.lockfile(&calls).unwrap().to_string();
    let mut other = calls.clone();
    other.reverse();
    assert_eq!(engine.lockfile(&other).unwrap().to_string(), text);
    assert_eq!(text.matches("[[call]]").count(), 3, "each call once");
    let x = CallSpec::new("norm.rms").tensor("x", DType::F32, &[8, 64]).param("eps", 1e-6);
    assert_eq!(engine.lockfile(&on_first([rms(8)])).unwrap(), engine.lockfile(&on_first([x])).unwrap());
}

#[test]
fn what_was_locked_is_replayed_whatever_is_measured_since() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    timed(&engine, &[("a.rms", 8, 20.0), ("b.rms", 8, 10.0)]);
    let lockfile = engine.lockfile(&on_first([rms(8)])).unwrap();
    timed(&engine, &[("a.rms", 8, 10.0), ("b.rms", 8, 20.0)]);
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    assert_eq!(engine.replay(&lockfile, "x.lock").unwrap(), []);
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
    assert_eq!(serves(&engine, &rms(9)), "a.rms", "another size");
    let half = CallSpec::new("rms_norm").tensor("input", DType::F16, &[8, 64]);
    assert_eq!(serves(&engine, &half), "a.rms", "another dtype");
    // To lock anew is to decide anew.
    assert_eq!(engine.lockfile(&on_first([rms(8)])).unwrap().entries[0].kernel, "a.rms");
    engine.unpin().unwrap();
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    engine.unpin().unwrap();
}

#[test]
fn a_second_lockfile_takes_the_place_of_the_first() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let mut lockfile = engine.lockfile(&on_first([rms(8), rms(9)])).unwrap();
    lockfile.entries[0].kernel = "b.rms".into();
    engine.replay(&lockfile, "one").unwrap();
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
    lockfile.entries[0].kernel = "c.rms".into();
    lockfile.entries.truncate(1);
    engine.replay(&lockfile, "two").unwrap();
    assert_eq!(serves(&engine, &rms(8)), "c.rms");
    let pinned = engine.pinned();
    assert_eq!((pinned.len(), pinned[0].origin.as_str(), pinned[0].entries), (1, "lockfile two", 1));
}

#[test]
fn a_check_changes_nothing() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let mut lockfile = engine.lockfile(&on_first([rms(8)])).unwrap();
    lockfile.entries[0].kernel = "b.rms".into();
    let version = engine.version();
    let status = engine.check_lockfile(&lockfile, "x").unwrap();
    assert_eq!((status.entries, status.in_force, status.mismatches.len()), (1, 1, 0));
    assert_eq!((engine.version(), serves(&engine, &rms(8))), (version, "a.rms".to_owned()));
    assert!(engine.pinned().is_empty());
}

#[test]
fn a_call_that_cannot_be_is_told_with_its_number() {
    let engine = engine_with(&["a.rms"]);
    let integers = CallSpec::new("rms_norm").tensor("input", DType::I32, &[8, 64]);
    let calls = on_first([rms(1), integers, rms(2), CallSpec::new("no.such")]);
    assert_eq!(engine.lockfile(&calls).unwrap_err().code(), "WRONG_DTYPE");
    let (lockfile, left_out) = engine.lockfile_of(&calls).unwrap();
    assert_eq!(lockfile.entries.len(), 2);
    let codes: Vec<(usize, &str)> = left_out.iter().map(|(i, error)| (*i, error.code())).collect();
    assert_eq!(codes, [(1, "WRONG_DTYPE"), (3, "UNKNOWN_OPERATION")]);
    let elsewhere = [(rms(1), DeviceIx(7))];
    assert_eq!(engine.lockfile(&elsewhere).unwrap_err().code(), "UNKNOWN_DEVICE");
}

#[test]
fn what_an_alias_says_is_kept() {
    let engine = engine_on(vec![host()]);
    let full = CallSpec { op: "attention.full".into(), ..attention(1, 8, 8) };
    let lockfile = engine.lockfile(&on_first([full.clone(), attention(1, 8, 8)])).unwrap();
    let (said, silent): (Vec<_>, Vec<_>) = lockfile.entries.iter().partition(|e| e.call.params.contains_key("causal"));
    assert_eq!((said.len(), silent.len()), (1, 1), "{lockfile}");
    assert_eq!(query(&engine, &said[0].call, false), query(&engine, &full, false));
}

/// A kernel for attention on a GPU.
fn gpu_kernel(id: &str, priority: i32, graph_safe: bool) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "attention", id.split('.').next().unwrap());
    kernel.platforms = vec![Platform::Cuda];
    kernel.dtypes = DTypeSet::FLOATS;
    kernel.layouts = vec![Layout::Bshd];
    kernel.dims.insert("head_dim".into(), DimRule::default());
    kernel.graph_safe = graph_safe;
    kernel.priority = priority;
    kernel
}

#[test]
fn calls_under_capture_are_locked_where_they_are_decided_otherwise() {
    let engine = engine_on(vec![h100()]);
    engine.register(gpu_kernel("eager.attention", 90, false), nothing()).unwrap();
    engine.register(gpu_kernel("safe.attention", 50, true), nothing()).unwrap();
    engine.register(gpu_kernel("other.attention", 40, true), nothing()).unwrap();
    let mut lockfile = engine.lockfile(&on_first([attention(1, 64, 64)])).unwrap();
    let locked: Vec<(&str, bool)> = lockfile.entries.iter().map(|e| (e.kernel.as_str(), e.graph)).collect();
    assert_eq!(locked, [("eager.attention", false), ("safe.attention", true)]);
    let chosen = |engine: &Engine, capturing| {
        let query = query(engine, &attention(1, 64, 64), capturing);
        engine.steps(&query).unwrap()[0].kernel.id.clone()
    };
    lockfile.entries[1].kernel = "other.attention".into();
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    assert_eq!((chosen(&engine, false), chosen(&engine, true)), ("eager.attention".into(), "other.attention".into()));
    // What is said once is said for both, as far as it can be.
    lockfile.entries.truncate(1);
    lockfile.entries[0].kernel = "other.attention".into();
    engine.replay(&lockfile, "x").unwrap();
    assert_eq!((chosen(&engine, false), chosen(&engine, true)), ("other.attention".into(), "other.attention".into()));
    lockfile.entries[0].kernel = "eager.attention".into();
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    assert_eq!((chosen(&engine, false), chosen(&engine, true)), ("eager.attention".into(), "safe.attention".into()));
}

#[test]
fn every_device_of_a_signature_gets_the_decision() {
    let engine = engine_on(vec![host(), h100(), h100()]);
    engine.register(gpu_kernel("a.attention", 90, false), nothing()).unwrap();
    engine.register(gpu_kernel("b.attention", 50, false), nothing()).unwrap();
    let mut lockfile = engine.lockfile(&[(attention(1, 64, 64), DeviceIx(2))]).unwrap();
    assert_eq!(lockfile.entries[0].device, "cuda_sm90_cu130");
    lockfile.entries[0].kernel = "b.attention".into();
    lockfile.entries[0].version = None;
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    for device in [1, 2] {
        let call = attention(1, 64, 64);
        let named = call.named(DeviceIx(device), Context::default());
        assert_eq!(engine.which("attention", &named).unwrap().kernel_id, "b.attention", "{device}");
    }
}

#[test]
fn what_a_rollout_tries_is_not_locked() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let rollout = RolloutRule::new("new", "norm.rms", Pattern::Kernel("b.rms".into()), Arc::new(|_| true));
    engine.update(|spec| spec.rollouts = vec![rollout]).unwrap();
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
    assert_eq!(engine.lockfile(&on_first([rms(8)])).unwrap().entries[0].kernel, "a.rms");
}

#[test]
fn a_bad_day_is_not_locked() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    engine.update(|spec| spec.restriction.only_references = true).unwrap();
    assert_eq!(serves(&engine, &rms(8)), "lz_cpu.ref.norm.rms");
    assert_eq!(engine.lockfile(&on_first([rms(8)])).unwrap().entries[0].kernel, "a.rms");
    let mut compiled = descriptor("jit.rms", "1.0", 99);
    compiled.jit = true;
    engine.register(compiled, nothing()).unwrap();
    engine.update(|spec| spec.warm = Some(Arc::default())).unwrap();
    assert_eq!(engine.lockfile(&on_first([rms(8)])).unwrap().entries[0].kernel, "jit.rms", "as when warmed up");
    engine.configure([("allow_jit".to_owned(), false.into())]).unwrap();
    assert_eq!(engine.lockfile(&on_first([rms(8)])).unwrap().entries[0].kernel, "a.rms");
}
