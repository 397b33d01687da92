//! Files that are reloaded when they change.

use std::sync::mpsc;
use std::time::Duration;

use super::*;

/// Longer than any machine takes; nothing waits for it but a failing test.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_file_that_changes_is_loaded_and_a_bad_one_is_told() {
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let w = World::made(|builder, _| {
        builder.on_event(move |stamped| drop(tell.lock().unwrap().send(stamped.event.clone())))
    });
    w.register(&["a.rms", "b.rms"]);
    let settings = "watch: true\nwatch_debounce_ms: 5\n";
    w.load(&format!("{settings}locks: {{norm.rms: a.rms}}\n"));
    w.engine.watch().unwrap();
    for round in 0..3 {
        let kernel = ["b.rms", "a.rms"][round % 2];
        w.write("layerzero.yaml", &format!("{settings}locks: {{norm.rms: {kernel}}}\n"));
        let event = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(event, Event::ReloadSucceeded { .. }), "{event:?}");
        assert_eq!(w.serves(), kernel);

        w.write("layerzero.yaml", "lokcs: {}\n");
        let event = told.recv_timeout(PATIENCE).unwrap();
        let Event::ReloadRefused { error, .. } = &event else { panic!("{event:?}") };
        assert!(error.contains("layerzero.yaml:1:1: lokcs: unknown key"), "{error}");
        assert_eq!(w.serves(), kernel);
    }
}

/// A ConfigMap of Kubernetes: the file is a link through a folder that is itself a link, which is swapped.
#[test]
fn a_swapped_link_is_noticed() {
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let w = World::made(|builder, _| {
        builder.on_event(move |stamped| drop(tell.lock().unwrap().send(stamped.event.clone())))
    });
    w.register(&["a.rms", "b.rms"]);
    let folder = w.folder.path();
    let version = |name: &str, kernel: &str| {
        fs::create_dir(folder.join(name)).unwrap();
        let text = format!("watch: true\nwatch_debounce_ms: 5\nlocks: {{norm.rms: {kernel}}}\n");
        fs::write(folder.join(name).join("layerzero.yaml"), text).unwrap();
    };
    version("..1", "a.rms");
    version("..2", "b.rms");
    std::os::unix::fs::symlink("..1", folder.join("..data")).unwrap();
    std::os::unix::fs::symlink("..data/layerzero.yaml", folder.join("layerzero.yaml")).unwrap();
    w.engine.load_config(&folder.join("layerzero.yaml")).unwrap();
    assert_eq!(w.serves(), "a.rms");
    w.engine.watch().unwrap();
    std::os::unix::fs::symlink("..2", folder.join("..data_tmp")).unwrap();
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    let event = told.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, Event::ReloadSucceeded { .. }), "{event:?}");
    assert_eq!(w.serves(), "b.rms");
}

#[test]
fn files_that_are_included_later_are_watched_too() {
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let w = World::made(|builder, _| {
        builder.on_event(move |stamped| drop(tell.lock().unwrap().send(stamped.event.clone())))
    });
    w.register(&["a.rms", "b.rms"]);
    let settings = "watch: true\nwatch_debounce_ms: 5\n";
    w.load(settings);
    w.engine.watch().unwrap();
    w.write("more.yaml", "locks: {norm.rms: a.rms}\n");
    w.write("layerzero.yaml", &format!("{settings}include: more.yaml\n"));
    let reloaded = || {
        let event = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(event, Event::ReloadSucceeded { .. }), "{event:?}");
    };
    reloaded();
    // Once more after the new file is watched.
    reloaded();
    w.write("more.yaml", "locks: {norm.rms: b.rms}\n");
    reloaded();
    assert_eq!(w.serves(), "b.rms");
}

#[test]
fn an_engine_that_is_watched_can_be_dropped() {
    let w = World::with_kernels(&["a.rms"]);
    w.load("watch: true\nwatch_debounce_ms: 5\n");
    w.engine.watch().unwrap();
    let engine = Arc::downgrade(&w.engine);
    drop(w);
    assert!(engine.upgrade().is_none(), "the watch does not keep it alive");
}
