//! Every way in which a decision cannot be kept, told entry by entry; the others stay in force.

use layerzero::{Locked, Mismatch};

use super::*;

/// Two locked calls of `a.rms`, of which the first is made to differ.
fn locked(engine: &Engine) -> Lockfile {
    engine.lockfile(&on_first([rms(8), rms(9)])).unwrap()
}

/// Replays; the second call is kept whatever is wrong with the first.
#[track_caller]
fn first_mismatch(engine: &Engine, lockfile: &Lockfile) -> Mismatch {
    let mut found = engine.replay(lockfile, "x.lock").unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    let status = &engine.pinned()[0];
    assert_eq!((status.entries, status.in_force, status.refused), (2, 1, false));
    assert_eq!(status.mismatches, found);
    assert_eq!(serves(engine, &rms(9)), lockfile.entries[1].kernel);
    let mismatch = found.remove(0);
    assert_eq!((mismatch.entry.as_str(), mismatch.call.as_str()), ("call 1", "norm.rms 8×64 float32"));
    assert_eq!(mismatch.code(), mismatch.kind.code());
    let json = serde_json::to_value(&mismatch).unwrap();
    assert_eq!(json["code"], mismatch.code());
    assert_eq!(json["message"], mismatch.message);
    mismatch
}

#[test]
fn a_kernel_that_is_gone() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let mut lockfile = locked(&engine);
    lockfile.entries[0].kernel = "b.rmss".into();
    let mismatch = first_mismatch(&engine, &lockfile);
    assert_eq!(mismatch.kind, MismatchKind::KernelGone { nearest: Some("b.rms".into()) });
    let told = "[KERNEL_GONE] call 1 (norm.rms 8×64 float32): b.rmss the kernel is not there; did you mean 'b.rms'?";
    assert_eq!(mismatch.to_string(), told);
    assert_eq!(serves(&engine, &rms(8)), "a.rms", "selected as if nothing had been said");
    // It is in force as soon as the kernel comes.
    register(&engine, "b.rmss", "1.0", 10);
    assert_eq!(engine.pinned()[0].mismatches, []);
    assert_eq!(serves(&engine, &rms(8)), "b.rmss");
}

#[test]
fn another_version() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let mut lockfile = locked(&engine);
    lockfile.entries[0].kernel = "b.rms".into();
    engine.unregister("b.rms", "1.0").unwrap();
    register(&engine, "b.rms", "1.1", 10);
    register(&engine, "b.rms", "1.2", 10);
    let mismatch = first_mismatch(&engine, &lockfile);
    assert_eq!(mismatch.kind, MismatchKind::VersionChanged { locked: "1.0".into(), found: "1.2, 1.1".into() });
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    // One of several; and whichever there is.
    lockfile.entries[0].version = Some("1.1".into());
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    let named = rms(8);
    let which = engine.which("rms_norm", &named.named(DeviceIx(0), Context::default())).unwrap();
    assert_eq!((which.kernel_id.as_str(), which.version.as_str()), ("b.rms", "1.1"));
    lockfile.entries[0].version = None;
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
}

#[test]
fn a_kernel_that_cannot_serve_the_call() {
    let engine = engine_with(&["a.rms"]);
    let mut small = descriptor("small.rms", "1.0", 10);
    small.dims.insert("rows".into(), DimRule { max: Some(4), ..DimRule::default() });
    engine.register(small, nothing()).unwrap();
    let mut lockfile = locked(&engine);
    lockfile.entries[0].kernel = "small.rms".into();
    let mismatch = first_mismatch(&engine, &lockfile);
    assert_eq!(mismatch.code(), "NOT_VALID");
    assert!(mismatch.message.contains("[CONSTRAINT_FAILED] rows: at most 4 does not hold (rows=8)"), "{mismatch}");
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    // A kernel of another operation.
    lockfile.entries[0].kernel = "lz_cpu.ref.norm.layer".into();
    lockfile.entries[0].version = None;
    let mismatch = first_mismatch(&engine, &lockfile);
    assert!(mismatch.message.contains("the operation is norm.layer does not hold (norm.rms)"), "{mismatch}");
}

#[test]
fn what_the_operator_wants_stands_above() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let mut lockfile = locked(&engine);
    lockfile.entries[0].kernel = "b.rms".into();
    let only_eight = |action: Action| {
        let when = Condition::When("rows == 8".into());
        engine.update(|spec| {
            spec.policy = PolicySpec::default().rule("mine", Some("norm.rms"), when, action);
        })
    };
    only_eight(Action::Deny(Pattern::Kernel("b.rms".into()))).unwrap();
    assert!(first_mismatch(&engine, &lockfile).message.contains("[POLICY_DENIED] denied by policy: mine"));
    only_eight(Action::Lock(Pattern::Kernel("c.rms".into()))).unwrap();
    assert!(first_mismatch(&engine, &lockfile).message.contains("[POLICY_LOCKED] 'c.rms' is locked"));
    assert_eq!(serves(&engine, &rms(8)), "c.rms");
    only_eight(Action::Override(Pattern::Kernel("c.rms".into()))).unwrap();
    let mismatch = first_mismatch(&engine, &lockfile);
    assert_eq!(mismatch.kind, MismatchKind::Overruled { by: "rule 'mine'".into(), instead: "c.rms".into() });
    // What is merely preferred does not: the decision was made with the same preferences, or against them.
    only_eight(Action::Prefer(Pattern::Kernel("c.rms".into()))).unwrap();
    assert_eq!(engine.pinned()[0].mismatches, []);
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
    let rollout = RolloutRule::new("new", "norm.rms", Pattern::Kernel("c.rms".into()), Arc::new(|_| true));
    engine.update(|spec| spec.rollouts = vec![rollout]).unwrap();
    assert!(engine.pinned()[0].mismatches[0].message.starts_with("rollout 'new' decides otherwise"));
}

#[test]
fn another_device() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let mut lockfile = locked(&engine);
    lockfile.entries[0].kernel = "b.rms".into();
    lockfile.entries[0].device = "cuda_sm90_cu130".into();
    let mismatch = first_mismatch(&engine, &lockfile);
    let (wanted, found) = ("cuda_sm90_cu130".into(), "is cpu__baseline".into());
    assert_eq!(mismatch.kind, MismatchKind::OtherDevice { wanted, found });
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    // It is in force as soon as such a device is found, and there alone.
    engine.update(|spec| spec.devices.push(h100())).unwrap();
    assert_eq!(engine.pinned()[0].mismatches[0].code(), "NOT_VALID", "the device is there, the kernel is not for it");
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
}

#[test]
fn a_kernel_that_is_not_compiled_yet() {
    let engine = engine_with(&["a.rms"]);
    let mut compiled = descriptor("jit.rms", "1.0", 10);
    compiled.jit = true;
    engine.register(compiled, nothing()).unwrap();
    engine.update(|spec| spec.warm = Some(Arc::default())).unwrap();
    let mut lockfile = locked(&engine);
    lockfile.entries[0].kernel = "jit.rms".into();
    assert_eq!(first_mismatch(&engine, &lockfile).kind, MismatchKind::NotCompiled);
    assert_eq!(serves(&engine, &rms(8)), "a.rms", "nobody waits for a compiler");
    let mut warm = Warm::default();
    warm.insert("jit.rms", &query(&engine, &rms(8), false));
    engine.update(|spec| spec.warm = Some(Arc::new(warm))).unwrap();
    assert_eq!(engine.pinned()[0].mismatches, []);
    assert_eq!(serves(&engine, &rms(8)), "jit.rms");
}

/// A document with kernels for `norm.rms`.
fn document(priority: i32) -> String {
    let kernel = |id: &str| {
        serde_json::json!({
            "kernel_id": id, "dtypes": ["float32"], "requires_layouts": ["strided"], "priority": priority,
            "deterministic": true,
        })
    };
    let ops = serde_json::json!({ "norm.rms": [kernel("doc.rms"), kernel("doc.other")] });
    let document = serde_json::json!({
        "schema_version": "1.0", "backend": "doc", "backend_version": "1.0", "platform": "cpu", "ops": ops,
    });
    document.to_string()
}

#[test]
fn another_document_of_capabilities() {
    let engine = engine_with(&["a.rms"]);
    engine.load_capabilities("doc", &document(95)).unwrap();
    let mut lockfile = engine.lockfile(&on_first([rms(8), rms(9)])).unwrap();
    assert_eq!(lockfile.entries[0].kernel, "doc.other", "{lockfile}");
    lockfile.entries[1].kernel = "a.rms".into();
    assert_eq!(lockfile.capabilities.len(), 1);
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    engine.load_capabilities("doc", &document(5)).unwrap();
    let mismatch = first_mismatch(&engine, &lockfile);
    assert_eq!(mismatch.code(), "CAPABILITIES_CHANGED");
    assert!(mismatch.message.starts_with("the capabilities of doc are not those it was decided with"), "{mismatch}");
    assert_eq!(serves(&engine, &rms(8)), "a.rms", "and so it is not in force");
    // The very document puts it in force again.
    engine.load_capabilities("doc", &document(95)).unwrap();
    assert_eq!(engine.pinned()[0].mismatches, []);
    // Without a hash nobody compares.
    lockfile.capabilities.clear();
    engine.load_capabilities("doc", &document(5)).unwrap();
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    assert_eq!(serves(&engine, &rms(8)), "doc.other");
}

#[test]
fn a_call_that_cannot_be_made_here() {
    let engine = engine_on(vec![host()]);
    let mut lockfile = engine.lockfile(&on_first([attention(1, 8, 8)])).unwrap();
    // What is written down means the same whatever the settings are.
    lockfile.entries[0].call = CallSpec { op: "attention".into(), layout: None, ..attention(2, 8, 8) };
    assert_eq!(engine.replay(&lockfile, "x").unwrap(), []);
    engine.configure([("strict_mode".to_owned(), true.into())]).unwrap();
    engine.configure([("default_layout".to_owned(), "BHSD".into())]).unwrap();
    assert_eq!(engine.pinned()[0].mismatches, []);
    lockfile.entries[0].call.tensors.get_mut("value").unwrap().shape[1] = 3;
    let mismatch = &engine.replay(&lockfile, "x").unwrap()[0];
    assert_eq!(mismatch.code(), "INVALID_CALL");
    assert!(mismatch.message.contains("'value'"), "{mismatch}");
}

#[test]
fn calls_that_a_class_does_not_tell_apart() {
    let engine = engine_on(vec![host()]);
    let mut kernel = KernelDescriptor::new("a.attention", "attention", "a");
    kernel.platforms = vec![Platform::Cpu];
    kernel.dtypes = DTypeSet::FLOATS;
    kernel.layouts = vec![Layout::Bshd];
    kernel.dims.insert("head_dim".into(), DimRule::default());
    kernel.params.insert("softcap".into(), ParamRule { max: Some(50.0), ..ParamRule::default() });
    engine.register(kernel, nothing()).unwrap();
    let capped = |softcap: f64| attention(1, 8, 8).param("softcap", softcap);
    let lockfile = engine.lockfile(&on_first([capped(30.0), capped(80.0), attention(1, 8, 8)])).unwrap();
    let mismatches = engine.replay(&lockfile, "x").unwrap();
    let told: Vec<(&str, &str)> = mismatches.iter().map(|m| (m.entry.as_str(), m.code())).collect();
    assert_eq!(told, [("call 2", "AMBIGUOUS"), ("call 3", "AMBIGUOUS")]);
    assert!(mismatches[0].message.starts_with("call 3 names another kernel"), "{}", mismatches[0]);
    // Each is selected for, and rightly.
    assert_eq!(serves(&engine, &capped(30.0)), "a.attention");
    assert_eq!(serves(&engine, &capped(80.0)), "lz_cpu.ref.attention.standard.prefill");
    // Two that go to one kernel are no trouble.
    let lockfile = engine.lockfile(&on_first([capped(30.0), capped(31.0)])).unwrap();
    assert_eq!((lockfile.entries.len(), engine.replay(&lockfile, "x").unwrap()), (2, vec![]));
}

#[test]
fn of_two_documents_the_higher_decides() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let folder = tempfile::tempdir().unwrap();
    let mut lockfile = engine.lockfile(&on_first([rms(8), rms(9)])).unwrap();
    let set =
        |lockfile: &mut Lockfile, kernel: &str| lockfile.entries.iter_mut().for_each(|e| e.kernel = kernel.into());
    set(&mut lockfile, "c.rms");
    let path = folder.path().join("low.lock");
    std::fs::write(&path, lockfile.to_string()).unwrap();
    engine.configure([("lockfile".to_owned(), path.to_str().unwrap().into())]).unwrap();
    assert_eq!(serves(&engine, &rms(8)), "c.rms");
    set(&mut lockfile, "b.rms");
    lockfile.entries.truncate(1);
    assert_eq!(engine.replay(&lockfile, "high.lock").unwrap(), []);
    assert_eq!((serves(&engine, &rms(8)), serves(&engine, &rms(9))), ("b.rms".into(), "c.rms".into()));
    let [high, low] = &engine.pinned()[..] else { panic!() };
    assert_eq!((high.in_force, low.in_force), (1, 1));
    let (by, instead) = ("lockfile high.lock".to_owned(), "b.rms".to_owned());
    assert_eq!(low.mismatches[0].kind, MismatchKind::Overruled { by, instead });
    // One that names a kernel that is not there still has the say: the call is selected for.
    lockfile.entries[0] = Locked { kernel: "gone".into(), ..lockfile.entries[0].clone() };
    engine.replay(&lockfile, "high.lock").unwrap();
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    let pinned = engine.pinned();
    assert_eq!(pinned[0].mismatches[0].code(), "KERNEL_GONE");
    let MismatchKind::Overruled { by, .. } = &pinned[1].mismatches[0].kind else { panic!("{pinned:?}") };
    assert_eq!(by, "lockfile high.lock");
    engine.unpin().unwrap();
    assert_eq!(serves(&engine, &rms(8)), "c.rms");
}
