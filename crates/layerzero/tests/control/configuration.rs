//! Files, environment and code: who wins, and what is refused.

use super::*;

#[test]
fn a_file_is_obeyed_once_loaded() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    assert_eq!(w.serves(), "a.rms");
    w.load("locks:\n  norm.rms: b.rms\nfallback_enabled: false\n");
    assert_eq!(w.serves(), "b.rms");
    assert!(!w.engine.config().settings.fallback_enabled);
    assert_eq!(w.engine.config().files(), [w.folder.path().join("layerzero.yaml")]);
    // A file that no longer says it.
    w.load("version: 1\n");
    assert_eq!(w.serves(), "a.rms");
    assert!(w.engine.config().settings.fallback_enabled);
}

#[test]
fn code_sets_all_or_nothing() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    let entries =
        |last: &str| [("avoid_sources".to_owned(), Value::names(["a"])), (last.to_owned(), Value::from(true))];
    let error = w.engine.configure(entries("deterministc")).unwrap_err();
    assert_eq!(error.code(), "INVALID_CONFIGURATION");
    assert!(error.to_string().contains("did you mean 'deterministic'?"), "{error}");
    assert_eq!(w.serves(), "a.rms", "nothing was changed");
    assert!(!w.engine.config().settings.deterministic);
    w.engine.configure(entries("log_selections")).unwrap();
    assert_eq!(w.serves(), "b.rms");
    w.engine.reset_code().unwrap();
    assert_eq!(w.serves(), "a.rms");
}

#[test]
fn locks_are_put_and_taken_away() {
    let w = World::with_kernels(&["a.rms", "b.rms", "c.rms"]);
    w.load("locks: {rms_norm: b.rms}\n");
    w.engine.lock("norm.rms", "c.rms").unwrap();
    assert_eq!(w.serves(), "c.rms");
    w.engine.unlock("rms_norm").unwrap();
    assert_eq!(w.serves(), "a.rms", "the lock of the file is hidden too");
    let error = w.engine.lock("norm.rsm", "a.rms").unwrap_err();
    assert!(error.to_string().contains("norm.rms"), "{error}");
    // A lock on a kernel that is not there is refused; one on a kernel that is not installed serves nothing, and says so.
    let error = w.engine.lock("norm.rms", "d.rms").unwrap_err();
    assert!(error.to_string().contains("no kernel is called 'd.rms'"), "{error}");
    assert_eq!(w.serves(), "a.rms");
    w.engine.lock("norm.rms", "liger.rms_norm").unwrap();
    let error = rms(&w.engine).unwrap_err();
    assert!(
        error.to_string().contains("'liger.rms_norm' is locked, and no kernel of that name is registered"),
        "{error}"
    );
}

#[test]
fn the_higher_layer_wins() {
    let w = World::with_kernels(&["none.rms", "user.rms", "project.rms", "environment.rms", "code.rms", "context.rms"]);
    let user = w.write("user.yaml", "locks: {norm.rms: user.rms}\nverbose: true\nchecked: true\n");
    let project = w.write("project.yaml", "locks: {norm.rms: project.rms}\nverbose: false\n");
    let variables = [("LAYERZERO_LOCK_NORM_RMS".to_owned(), "environment.rms".to_owned())].into_iter().collect();
    let mut sources = Sources { user: Some(user), ..Sources::default() };
    w.engine.load_sources(&sources).unwrap();
    assert_eq!(w.serves(), "user.rms");
    sources.project = Some(project);
    w.engine.load_sources(&sources).unwrap();
    assert_eq!(w.serves(), "project.rms");
    sources.environment = variables;
    w.engine.load_sources(&sources).unwrap();
    assert_eq!(w.serves(), "environment.rms");
    let settings = &w.engine.config().settings;
    assert!(settings.checked && !settings.verbose, "each setting by the highest layer that says it");
    w.engine.lock("norm.rms", "code.rms").unwrap();
    assert_eq!(w.serves(), "code.rms");
    let mut context = CodeLayer::context();
    context.lock("norm.rms", "context.rms").unwrap();
    let overlay = w.engine.overlay(context).unwrap();
    assert_eq!(w.serves_in(&overlay), "context.rms");
    // And down again.
    w.engine.reset_code().unwrap();
    assert_eq!(w.serves(), "environment.rms");
    w.engine.load_sources(&Sources::default()).unwrap();
    assert_eq!(w.serves(), "none.rms");
}

#[test]
fn what_a_call_demands_stands_above_all() {
    let w = World::with_kernels(&["a.rms"]);
    w.set("deterministic", false);
    let context = Context { deterministic: true, ..Context::default() };
    let chosen = w.engine.which("rms_norm", &call(&[2, 4]).context(context)).unwrap();
    assert_eq!(chosen.kernel_id, "lz_cpu.ref.norm.rms");
    assert_eq!(w.serves(), "a.rms");
}

#[test]
fn a_reload_that_is_refused_keeps_what_was_good_and_is_counted() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    w.load("locks: {norm.rms: b.rms}\n");
    let path = w.folder.path().join("layerzero.yaml");
    type Spoil = fn(&World, &Path);
    let spoils: [(&str, Spoil); 7] = [
        ("did you mean 'locks'?", |w, _| drop(w.write("layerzero.yaml", "lokcs: {norm.rms: a.rms}\n"))),
        ("expected", |w, _| drop(w.write("layerzero.yaml", "locks: 7\n"))),
        ("layerzero.yaml:1", |w, _| drop(w.write("layerzero.yaml", "locks: {norm.rms: a.rms\n"))),
        ("circle", |w, _| drop(w.write("layerzero.yaml", "include: layerzero.yaml\nlocks: {norm.rms: a.rms}\n"))),
        ("not UTF-8", |_, path| fs::write(path, [0xff, 0xfe]).unwrap()),
        ("a directory", |_, path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        }),
        ("cannot be read", |_, path| fs::remove_dir(path).unwrap()),
    ];
    for (i, (expected, spoil)) in spoils.iter().enumerate() {
        spoil(&w, &path);
        let error = w.engine.reload().unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert_eq!(w.serves(), "b.rms", "{expected}");
        let health = w.engine.health();
        assert_eq!((health.reloads.succeeded, health.reloads.refused), (0, i as u64 + 1));
        assert_eq!(health.reloads.last_error, Some(error.to_string()));
        assert!(!health.is_well());
        assert_eq!(w.names().last(), Some(&"reload_refused"));
    }
    w.write("layerzero.yaml", "locks: {norm.rms: a.rms}\n");
    w.engine.reload().unwrap();
    assert_eq!(w.serves(), "a.rms");
    let health = w.engine.health();
    assert_eq!((health.reloads.succeeded, health.reloads.last_error.clone()), (1, None));
    assert!(health.is_well());
    assert_eq!(w.names().last(), Some(&"reload_succeeded"));
}

#[test]
fn what_code_said_survives_a_reload() {
    let w = World::with_kernels(&["a.rms", "b.rms", "c.rms"]);
    w.load("locks: {norm.rms: b.rms}\n");
    w.engine.lock("norm.rms", "c.rms").unwrap();
    w.engine.reload().unwrap();
    assert_eq!(w.serves(), "c.rms");
    w.engine.reset_code().unwrap();
    assert_eq!(w.serves(), "b.rms");
}

#[test]
fn a_change_moves_the_version_and_a_refused_one_does_not() {
    let w = World::with_kernels(&["a.rms"]);
    w.load("version: 1\n");
    let before = w.engine.version();
    w.write("layerzero.yaml", "nonsense: 1\n");
    w.engine.reload().unwrap_err();
    assert_eq!(w.engine.version(), before);
    w.write("layerzero.yaml", "version: 1\n");
    w.engine.reload().unwrap();
    assert!(w.engine.version() > before);
}

#[test]
fn a_new_state_is_warm_when_it_is_seen() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    for rows in [2, 300, 5000] {
        w.engine.select("rms_norm", &call(&[rows, 4])).unwrap();
    }
    w.load("prefer_sources: [b]\n");
    let before = w.engine.cache_stats().misses;
    for rows in [2, 300, 5000] {
        assert_eq!(w.engine.select("rms_norm", &call(&[rows, 4])).unwrap()[0], "b.rms");
    }
    assert_eq!(w.engine.cache_stats().misses, before, "all of it was decided before the swap");
}

#[test]
fn the_cache_can_be_turned_off_and_on() {
    let w = World::with_kernels(&["a.rms"]);
    w.set("cache.enabled", false);
    for _ in 0..3 {
        assert_eq!(w.serves(), "a.rms");
    }
    assert_eq!(w.engine.cache_stats().entries, 0);
    w.set("cache.enabled", true);
    assert_eq!(w.serves(), "a.rms");
    assert_eq!(w.engine.cache_stats().entries, 1);
}
