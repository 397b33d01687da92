//! Lockfiles and tables that the configuration names.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use layerzero::config::Sources;
use layerzero::resilience::Event;
use layerzero::{Buckets, SolveRequest};
use tempfile::TempDir;

use super::*;

/// Longer than any machine takes; nothing waits for it but a failing test.
const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with a `layerzero.yaml` and a lockfile that sends norms of 8 rows to a kernel.
struct Project {
    folder: TempDir,
    locked: Lockfile,
}

impl Project {
    fn new(engine: &Engine) -> Project {
        let locked = engine.lockfile(&on_first([rms(8)])).unwrap();
        Project { folder: tempfile::tempdir().unwrap(), locked }
    }

    /// Writes a file the way careful tools do: whole, by renaming.
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let (path, unfinished) = (self.folder.path().join(name), self.folder.path().join("unfinished"));
        std::fs::write(&unfinished, text).unwrap();
        std::fs::rename(&unfinished, &path).unwrap();
        path
    }

    fn lock(&self, kernel: &str) -> PathBuf {
        let mut locked = self.locked.clone();
        locked.entries[0].kernel = kernel.into();
        self.write("model.lock", &locked.to_string())
    }

    fn load(&self, engine: &Engine, text: &str) {
        engine.load_config(&self.write("layerzero.yaml", text)).unwrap();
    }
}

#[test]
fn a_lockfile_is_named_by_a_file_by_the_environment_and_by_code() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let project = Project::new(&engine);
    let path = project.lock("b.rms");
    project.load(&engine, "lockfile: model.lock\n");
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
    assert_eq!(engine.pinned()[0].origin, format!("lockfile {}", path.display()));
    project.load(&engine, "verbose: true\n");
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    assert!(engine.pinned().is_empty());
    let variables = BTreeMap::from([("LAYERZERO_LOCKFILE".to_owned(), path.display().to_string())]);
    engine.load_sources(&Sources { environment: variables, ..Sources::default() }).unwrap();
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
    engine.load_sources(&Sources::default()).unwrap();
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    engine.configure([("lockfile".to_owned(), path.to_str().unwrap().into())]).unwrap();
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
    engine.reset_code().unwrap();
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
}

#[test]
fn what_cannot_be_read_is_refused_and_the_last_good_stays() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let project = Project::new(&engine);
    let path = project.lock("b.rms");
    project.load(&engine, "lockfile: model.lock\n");
    type Spoil = fn(&Project, &Path);
    let spoils: [(&str, Spoil); 6] = [
        ("model.lock', line 1: 'format' is missing", |p, _| drop(p.write("model.lock", "layerzero = \"1\"\n"))),
        ("line 2: unknown key 'kernel' at the top", |p, _| {
            drop(p.write("model.lock", "format = 1\nkernel = \"x\"\n"));
        }),
        ("is not UTF-8", |_, path| std::fs::write(path, [0xff, 0xfe]).unwrap()),
        ("is larger than 1048576 bytes", |p, _| drop(p.write("model.lock", &"#\n".repeat(600_000)))),
        ("is a directory; only regular files are read", |_, path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        }),
        ("cannot be read: No such file", |_, path| std::fs::remove_dir(path).unwrap()),
    ];
    for (expected, spoil) in spoils {
        spoil(&project, &path);
        let error = engine.reload().unwrap_err();
        assert_eq!(error.code(), "INVALID_CONFIGURATION");
        let text = error.to_string();
        assert!(text.contains("layerzero.yaml:1:1: lockfile: ") && text.contains(expected), "{expected}: {text}");
        assert_eq!(serves(&engine, &rms(8)), "b.rms", "{expected}");
        assert_eq!(engine.health().reloads.last_error, Some(text));
    }
    project.lock("a.rms");
    engine.reload().unwrap();
    assert_eq!(serves(&engine, &rms(8)), "a.rms");
    assert!(engine.health().is_well());
}

#[test]
fn everything_that_is_wrong_is_told_at_once() {
    let engine = engine_with(&["a.rms"]);
    let project = Project::new(&engine);
    project.write("t.json", "{}");
    let path = project.write("layerzero.yaml", "lockfile: gone.lock\ndispatch_table: t.json\n");
    let text = engine.load_config(&path).unwrap_err().to_string();
    assert!(text.contains("gone.lock' cannot be read"), "{text}");
    assert!(text.contains("t.json', line 1, column 2: missing field `schema_version`"), "{text}");
}

#[test]
fn kernels_and_devices_may_come_after_the_lockfile() {
    let described = engine_on(vec![h100()]);
    let mut kernel = descriptor("gpu.rms", "1.0", 50);
    kernel.platforms = vec![Platform::Cuda];
    let mut better = descriptor("better.rms", "1.0", 90);
    better.platforms = vec![Platform::Cuda];
    described.register(kernel.clone(), nothing()).unwrap();
    let project = Project::new(&described);
    let path = project.lock("gpu.rms");
    let engine = engine_on(vec![host()]);
    engine.configure([("lockfile".to_owned(), path.to_str().unwrap().into())]).unwrap();
    assert_eq!(engine.pinned()[0].mismatches[0].code(), "OTHER_DEVICE");
    engine.update(|spec| spec.devices.push(h100())).unwrap();
    assert_eq!(engine.pinned()[0].mismatches[0].code(), "KERNEL_GONE");
    engine.register(better, nothing()).unwrap();
    engine.register(kernel, nothing()).unwrap();
    assert_eq!(engine.pinned()[0].mismatches, []);
    let call = rms(8);
    let which = engine.which("rms_norm", &call.named(DeviceIx(1), Context::default())).unwrap();
    assert_eq!(which.kernel_id, "gpu.rms");
}

#[test]
fn contexts_keep_to_what_is_pinned() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let project = Project::new(&engine);
    project.lock("b.rms");
    project.load(&engine, "lockfile: model.lock\n");
    let mut layer = layerzero::config::CodeLayer::context();
    layer.set("prefer_sources", layerzero::config::Value::names(["c"])).unwrap();
    let overlay = engine.overlay(layer).unwrap();
    let scope = engine.scope(overlay.id());
    assert_eq!((serves_in(&scope, &rms(8)), serves_in(&scope, &rms(9))), ("b.rms".into(), "c.rms".into()));
}

#[test]
fn a_table_that_is_configured_is_followed() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let project = Project::new(&engine);
    let request = SolveRequest {
        model_id: "m".into(),
        buckets: Buckets::new([("rows", [128, 512])]).unwrap(),
        calls: vec![rms(512)],
        ..SolveRequest::default()
    };
    let text = engine.solve(&request).unwrap().table.to_json();
    project.write("t.json", &text.replace("a.rms", "b.rms"));
    project.load(&engine, "dispatch_table: t.json\n");
    assert_eq!((serves(&engine, &rms(300)), serves(&engine, &rms(100))), ("b.rms".into(), "a.rms".into()));
    // The lockfile stands above it.
    let mut locked = engine.lockfile(&on_first([rms(300)])).unwrap();
    assert_eq!((locked.entries[0].kernel.as_str(), locked.entries[0].basis.as_deref()), ("b.rms", Some("pinned")));
    locked.entries[0].kernel = "a.rms".into();
    project.write("model.lock", &locked.to_string());
    project.load(&engine, "dispatch_table: t.json\nlockfile: model.lock\n");
    assert_eq!((serves(&engine, &rms(300)), serves(&engine, &rms(301))), ("a.rms".into(), "b.rms".into()));
}

#[test]
fn a_lockfile_that_changes_is_read_again_when_files_are_watched() {
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let engine = Engine::builder()
        .devices(vec![host()])
        .on_event(move |stamped| drop(tell.lock().unwrap().send(stamped.event.clone())))
        .build();
    let engine = Arc::new(engine);
    for (i, id) in ["a.rms", "b.rms"].iter().enumerate() {
        register(&engine, id, "1.0", 90 - i as i32);
    }
    let project = Project::new(&engine);
    project.lock("b.rms");
    project.load(&engine, "watch: true\nwatch_debounce_ms: 5\nlockfile: model.lock\n");
    engine.watch().unwrap();
    for kernel in ["a.rms", "b.rms"] {
        project.lock(kernel);
        let event = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(event, Event::ReloadSucceeded { .. }), "{event:?}");
        assert_eq!(serves(&engine, &rms(8)), kernel);
    }
    project.write("model.lock", "nonsense\n");
    let event = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, Event::ReloadRefused { .. }), "{event:?}");
    assert_eq!(serves(&engine, &rms(8)), "b.rms");
}
