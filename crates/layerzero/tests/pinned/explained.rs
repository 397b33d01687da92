//! What people are told about decisions that were made before.

use layerzero::{Buckets, CheckStatus, DispatchTable, SolveRequest};

use super::*;

fn explain(engine: &Engine, call: &CallSpec) -> layerzero::Report {
    engine.explain(&call.op, &call.named(DeviceIx(0), Context::default())).unwrap()
}

fn check(engine: &Engine, name: &str) -> (CheckStatus, String) {
    let check = engine.readiness().checks.into_iter().find(|check| check.name == name).unwrap();
    (check.status, check.detail)
}

/// A table of what is decided for norms of these rows.
fn table(engine: &Engine, rows: &[i64]) -> DispatchTable {
    let request = SolveRequest {
        model_id: "m".into(),
        buckets: Buckets::new([("rows", [128, 512, 2048])]).unwrap(),
        calls: rows.iter().map(|&n| rms(n)).collect(),
        ..SolveRequest::default()
    };
    engine.solve(&request).unwrap().table
}

#[test]
fn explain_says_who_decided() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let mut lockfile = engine.lockfile(&on_first([rms(8)])).unwrap();
    lockfile.entries[0].kernel = "b.rms".into();
    engine.replay(&lockfile, "model.lock").unwrap();
    let report = explain(&engine, &rms(8));
    assert_eq!(report.pinned_by.as_deref(), Some("lockfile model.lock"));
    assert!(report.to_string().contains("  chosen   b.rms (pinned by lockfile model.lock)\n"), "{report}");
    assert_eq!(explain(&engine, &rms(9)).pinned_by, None);
}

#[test]
fn explain_says_when_a_table_says_nothing() {
    let engine = engine_with(&["a.rms"]);
    assert_eq!(explain(&engine, &rms(8)).outside_table, None, "there is no table");
    engine.load_table(&table(&engine, &[512, 2048]), "llama.json").unwrap();
    assert_eq!(explain(&engine, &rms(300)).pinned_by.as_deref(), Some("dispatch table llama.json"));
    let outside = |call: &CallSpec| explain(&engine, call).outside_table.map(|o| o.message);
    let text = explain(&engine, &rms(9000)).to_string();
    let told = "  table    says nothing: [PLAN_BUCKET_MISS] rows = 9000 lies outside the table's buckets; selected at run time\n";
    assert!(text.contains(told), "{text}");
    let json = serde_json::to_value(explain(&engine, &rms(9000))).unwrap();
    assert_eq!(json["outside_table"]["code"], "PLAN_BUCKET_MISS");
    // Below, in a bucket nothing was decided for.
    assert_eq!(outside(&rms(100)).as_deref(), Some("rows = 100 lies outside the table's buckets"));
    assert_eq!(outside(&rms(300)), None);
    // Calls of a kind the table does not know are no concern of it.
    assert_eq!(outside(&CallSpec::new("rms_norm").tensor("input", DType::F16, &[9000, 64])), None);
    assert_eq!(outside(&CallSpec::new("rms_norm").tensor("input", DType::F32, &[9000, 65])), None);
    assert_eq!(outside(&CallSpec::new("layer_norm").tensor("input", DType::F32, &[9000, 64])), None);
}

#[test]
fn health_and_readiness_tell_of_decisions_that_cannot_be_kept() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    assert_eq!(check(&engine, "lockfile"), (CheckStatus::Skipped, "not configured".into()));
    assert_eq!(check(&engine, "dispatch_table"), (CheckStatus::Skipped, "not configured".into()));
    let mut lockfile = engine.lockfile(&on_first([rms(8), rms(9), rms(10)])).unwrap();
    engine.replay(&lockfile, "x.lock").unwrap();
    assert_eq!(check(&engine, "lockfile"), (CheckStatus::Pass, "lockfile x.lock: 3 decisions in force".into()));
    assert_eq!(engine.health().warnings, Vec::<String>::new());
    lockfile.entries[0].kernel = "gone.rms".into();
    lockfile.entries[2].kernel = "gone.rms".into();
    engine.replay(&lockfile, "x.lock").unwrap();
    let told = "lockfile x.lock: 2 of 3 decisions are not in force: [KERNEL_GONE] call 1 (norm.rms 8×64 float32): \
                gone.rms the kernel is not there; did you mean 'a.rms'?; and 1 more";
    assert_eq!(check(&engine, "lockfile"), (CheckStatus::Warn, told.into()));
    assert!(engine.readiness().ready, "a warning keeps nobody from being ready");
    let health = engine.health();
    assert_eq!(health.warnings, [told]);
    assert!(health.to_string().contains(&format!("warning: {told}\n")) && health.is_well(), "{health}");
    let json = serde_json::to_value(&health).unwrap();
    assert_eq!(json["pinned"][0]["in_force"], 1);
    assert_eq!(json["pinned"][0]["mismatches"][0]["code"], "KERNEL_GONE");
}

#[test]
fn a_table_for_other_hardware_keeps_the_engine_from_being_ready() {
    let engine = engine_with(&["a.rms"]);
    let mut table = table(&engine, &[512]);
    engine.load_table(&table, "t.json").unwrap();
    assert_eq!(
        check(&engine, "dispatch_table"),
        (CheckStatus::Pass, "dispatch table t.json: 1 decision in force".into())
    );
    engine.unpin().unwrap();
    // A configured one is read all the same: the device it is for may be found later.
    table.hardware_signature = "cuda_sm90_cu130".into();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    std::fs::write(&path, table.to_json()).unwrap();
    engine.configure([("dispatch_table".to_owned(), path.to_str().unwrap().into())]).unwrap();
    let (status, detail) = check(&engine, "dispatch_table");
    assert_eq!(status, CheckStatus::Fail);
    let told = "is not in force: [OTHER_DEVICE] was decided for cuda_sm90_cu130; here is cpu__baseline";
    assert!(detail.starts_with("dispatch table /") && detail.ends_with(told), "{detail}");
    assert!(!engine.readiness().ready);
    assert_eq!(engine.pin_warnings(), [detail]);
}

/// A process looks for GPUs when it needs one. Until then nobody knows whether a document for one is in force.
#[test]
fn a_table_for_a_gpu_is_told_of_once_gpus_were_looked_for() {
    let here = engine_with(&["a.rms"]);
    let (mut table, mut lockfile) = (table(&here, &[512]), here.lockfile(&on_first([rms(8)])).unwrap());
    let (of_host, of_gpu) = (lockfile.clone(), "cuda_sm777_made_up");
    table.hardware_signature = of_gpu.into();
    lockfile.entries[0].device = of_gpu.into();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    std::fs::write(&path, table.to_json()).unwrap();
    // What is told about the configured table when that was done, and by whom.
    let told_by = |does: &dyn Fn(&Engine)| {
        let told = Arc::new(std::sync::Mutex::new(Vec::new()));
        let hears = told.clone();
        let hook = move |warning: &layerzero::Warning| hears.lock().unwrap().push(warning.to_string());
        let engine = Engine::builder().cpu_only().on_warning(hook).build();
        engine.configure([("dispatch_table".to_owned(), path.to_str().unwrap().into())]).unwrap();
        assert_eq!(engine.pin_warnings(), Vec::<String>::new());
        does(&engine);
        let told = told.lock().unwrap().clone();
        (told, engine.pin_warnings())
    };
    // What is done twice is told of once. Code that loads a document for a GPU wants to know, and has them looked for.
    let ways: [&dyn Fn(&Engine); 5] = [
        &|engine| assert_eq!(engine.detect_accelerators().unwrap(), engine.detect_accelerators().unwrap()),
        &|engine| assert!(engine.load_table(&table, "t.json").unwrap_err().to_string().contains(of_gpu)),
        &|engine| assert_eq!(engine.check_table(&table, "t.json").unwrap().mismatches.len(), 1),
        &|engine| assert_eq!(engine.check_lockfile(&lockfile, "x.lock").unwrap().mismatches.len(), 1),
        &|engine| assert!(engine.make_plan(table.clone(), "p", false).is_err()),
    ];
    for (i, way) in ways.into_iter().enumerate() {
        let (told, known) = told_by(way);
        assert!(told.len() == 1 && told[0].contains("was decided for cuda_sm777_made_up"), "{i}: {told:?}");
        assert_eq!(told, known, "{i}");
    }
    // A document for the host does not, nor does a plan that has decided nothing.
    let of_host = |engine: &Engine| {
        let mut own = of_host.clone();
        own.entries[0].device = engine.devices()[0].signature();
        engine.replay(&own, "x.lock").unwrap();
        let _ = engine.make_plan(DispatchTable { plans: Vec::new(), ..table.clone() }, "p", true);
    };
    let (told, known) = told_by(&of_host);
    assert!(told.is_empty() && !known.iter().any(|warning| warning.contains(of_gpu)), "{told:?} {known:?}");
}
