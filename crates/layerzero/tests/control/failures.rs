//! Circuits that opened, across processes: an engine with the same state directory stands for the next process.

use super::*;

/// An engine that keeps its state in `dir`, with a kernel of some version that fails when told to.
fn process(dir: &Path, flaky: &Flaky, version: &str) -> World {
    let w = World::made(|builder, _| builder.state_dir(dir));
    w.register(&["good.rms"]);
    let descriptor = KernelDescriptor { version: version.into(), ..descriptor("flaky.rms", 95) };
    w.engine.register(descriptor, flaky.kernel()).unwrap();
    w.set("degradation.enabled", false);
    w
}

fn kept(dir: &Path) -> serde_json::Value {
    let text = fs::read_to_string(dir.join("failures.json")).unwrap();
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["failures"].clone()
}

fn open_at(w: &World) -> Option<(u32, u64)> {
    let health = w.engine.health();
    let flaky = health.breakers.iter().find(|b| b.kernel == "flaky.rms")?;
    Some((flaky.view.openings, flaky.view.retry_at_ms?))
}

#[test]
fn a_restart_does_not_close_a_circuit() {
    let (dir, flaky) = (tempfile::tempdir().unwrap(), Flaky::failing("no luck"));
    let w = process(dir.path(), &flaky, "1.0");
    (0..4).for_each(|_| drop(rms(&w.engine).unwrap()));
    assert!(!dir.path().join("failures.json").exists(), "its circuit is still closed");
    rms(&w.engine).unwrap();
    let records = kept(dir.path());
    let said = |key: &str| records[0][key].as_str().unwrap();
    assert_eq!((said("kernel"), said("version"), said("op")), ("flaky.rms", "1.0", "norm.rms"));
    assert_eq!((said("backend"), said("error")), ("flaky", "no luck"));

    // The next process: not tried before its time, and the reason is known.
    let w = process(dir.path(), &flaky, "1.0");
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "good.rms");
    assert_eq!(flaky.runs(), 5);
    assert!(reasons(&w.engine, &[2, 4], "flaky.rms").contains("the circuit of flaky.rms is open: no luck"));
    let (openings, retry_at) = open_at(&w).unwrap();
    let left = retry_at - w.clock.load(Ordering::Acquire);
    assert!(openings == 1 && left <= 33_000, "{openings} openings, {left} ms left");
    // A probe that fails opens it for longer, and that is kept too.
    w.clock.store(retry_at, Ordering::Release);
    rms(&w.engine).unwrap();
    assert_eq!((flaky.runs(), kept(dir.path())[0]["openings"].as_u64()), (6, Some(2)));

    // In the next process the kernel works again: three successful calls close the circuit and remove the record.
    let w = process(dir.path(), &flaky, "1.0");
    flaky.fails_with(None);
    rms(&w.engine).unwrap();
    w.clock.store(open_at(&w).unwrap().1, Ordering::Release);
    for _ in 0..3 {
        assert_eq!(rms(&w.engine).unwrap().kernel_id, "flaky.rms");
    }
    assert!(w.engine.health().is_well());
    assert_eq!(kept(dir.path()).as_array().map(Vec::len), Some(0));
    assert_eq!(rms(&process(dir.path(), &flaky, "1.0").engine).unwrap().kernel_id, "flaky.rms");
}

#[test]
fn another_version_begins_anew() {
    let (dir, flaky) = (tempfile::tempdir().unwrap(), Flaky::failing("no luck"));
    let w = process(dir.path(), &flaky, "1.0");
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    flaky.fails_with(None);
    assert_eq!(rms(&process(dir.path(), &flaky, "1.1").engine).unwrap().kernel_id, "flaky.rms");
    assert_eq!(rms(&process(dir.path(), &flaky, "1.0").engine).unwrap().kernel_id, "good.rms");
}

#[test]
fn forgetting_failures_forgets_those_of_earlier_processes() {
    let (dir, flaky) = (tempfile::tempdir().unwrap(), Flaky::failing("no luck"));
    (0..5).for_each(|_| drop(rms(&process(dir.path(), &flaky, "1.0").engine).unwrap()));
    let w = process(dir.path(), &flaky, "1.0");
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    flaky.fails_with(None);
    let w = process(dir.path(), &flaky, "1.0");
    w.engine.forget_failures();
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "flaky.rms");
    assert_eq!(rms(&process(dir.path(), &flaky, "1.0").engine).unwrap().kernel_id, "flaky.rms");
}

#[test]
fn what_is_no_such_file_is_written_anew_and_what_cannot_be_written_costs_nothing() {
    let (dir, flaky) = (tempfile::tempdir().unwrap(), Flaky::failing("no luck"));
    for text in ["", "{", "[]", r#"{"schema_version": "99", "failures": []}"#, "\0\0"] {
        fs::write(dir.path().join("failures.json"), text).unwrap();
        let w = process(dir.path(), &flaky, "1.0");
        (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
        assert_eq!(kept(dir.path()).as_array().map(Vec::len), Some(1), "{text:?}");
    }
    // A file stands where the folder would be.
    let file = dir.path().join("failures.json");
    let w = process(&file, &flaky, "1.0");
    (0..5).for_each(|_| drop(rms(&w.engine).unwrap()));
    assert_eq!(rms(&w.engine).unwrap().kernel_id, "good.rms");
}

#[test]
fn two_processes_keep_what_the_other_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (Flaky::failing("one"), Flaky::failing("other"));
    let (a, b) = (process(dir.path(), &one, "1.0"), process(dir.path(), &Flaky::default(), "1.0"));
    b.engine.register(descriptor("other.rms", 99), other.kernel()).unwrap();
    (0..5).for_each(|_| drop(rms(&a.engine).unwrap()));
    (0..5).for_each(|_| drop(rms(&b.engine).unwrap()));
    let records = kept(dir.path());
    let kernels: Vec<_> = records.as_array().unwrap().iter().map(|r| r["kernel"].as_str().unwrap()).collect();
    assert_eq!(kernels, ["flaky.rms", "other.rms"]);
}
