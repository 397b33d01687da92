//! Which paths the `layerzero.yaml` of a checkout may name.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use lz_config::{ConfigError, Layers, ProblemKind, Sources, resolve_path};
use proptest::prelude::*;
use tempfile::TempDir;

/// A home with a cache and a user file, and a checkout beside it.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Machine {
        let folder = tempfile::tempdir().unwrap();
        for inner in ["home/.cache", "home/.config/layerzero", "home/.ssh", "checkout/deep", "allowed"] {
            fs::create_dir_all(folder.path().join(inner)).unwrap();
        }
        fs::write(folder.path().join("home/.ssh/authorized_keys"), "a key").unwrap();
        Machine { folder }
    }

    fn path(&self, inner: &str) -> PathBuf {
        self.folder.path().join(inner)
    }

    fn environment(&self) -> BTreeMap<String, String> {
        [("HOME".to_owned(), self.path("home").display().to_string())].into()
    }

    /// What a process in the checkout finds.
    fn found(&self, project: &str, user: &str) -> Result<PathBuf, ConfigError> {
        fs::write(self.path("checkout/layerzero.yaml"), project).unwrap();
        fs::write(self.path("home/.config/layerzero/layerzero.yaml"), user).unwrap();
        let sources = Sources::discover(self.environment(), &self.path("checkout"));
        let config = Layers::load(&sources)?.resolve()?;
        Ok(config.perfdb_path().unwrap())
    }

    fn refused(&self, project: &str) -> bool {
        self.found(project, "").is_err()
    }
}

#[test]
fn a_checkout_names_paths_of_its_own_and_of_the_users_cache() {
    let machine = Machine::new();
    for (said, leads_to) in [
        ("db.sqlite", machine.path("checkout/db.sqlite")),
        ("deep/../db.sqlite", machine.path("checkout/deep/../db.sqlite")),
        ("not/there/yet.sqlite", machine.path("checkout/not/there/yet.sqlite")),
        ("~/.cache/project/db.sqlite", machine.path("home/.cache/project/db.sqlite")),
    ] {
        assert_eq!(machine.found(&format!("perfdb: {{path: \"{said}\"}}"), "").unwrap(), leads_to, "{said}");
    }
}

#[test]
fn a_checkout_names_no_other_path() {
    let machine = Machine::new();
    let keys = machine.path("home/.ssh/authorized_keys");
    symlink(&keys, machine.path("checkout/link")).unwrap();
    symlink("../home/.ssh/not there yet", machine.path("checkout/dangling")).unwrap();
    symlink(machine.path("home"), machine.path("checkout/deep/home")).unwrap();
    symlink("loop", machine.path("checkout/loop")).unwrap();
    symlink(machine.path("home/.ssh"), machine.path("home/.cache/link")).unwrap();
    let absolute = keys.display().to_string();
    let all = [
        "~/.ssh/authorized_keys",
        &absolute,
        "../elsewhere.sqlite",
        "deep/../../elsewhere.sqlite",
        "not there/../../elsewhere.sqlite",
        "~/.cache/../.ssh/authorized_keys",
        "~/.cache/link/authorized_keys",
        "link",
        "dangling",
        "deep/home/.ssh/authorized_keys",
        "deep/home/../x",
        "loop",
        "/dev/sda",
    ];
    for said in all {
        for key in ["perfdb: {path: \"X\"}", "jit: {manifest_path: \"X\"}", "lockfile: \"X\"", "dispatch_table: \"X\""]
        {
            let text = key.replace('X', said);
            let error = machine.found(&text, "").unwrap_err();
            let [problem] = &error.problems[..] else { panic!("{text}: {error}") };
            assert!(matches!(problem.kind, ProblemKind::OutsideProject { .. }), "{text}: {error}");
            assert_eq!(problem.value.as_deref(), Some(said), "{text}");
            let shown = error.to_string();
            for part in ["checkout/layerzero.yaml:1:", key.split(':').next().unwrap(), "allow_project_paths"] {
                assert!(shown.contains(part), "{text}: {shown}");
            }
        }
    }
}

#[test]
fn what_a_checkout_includes_speaks_for_it() {
    let machine = Machine::new();
    fs::write(machine.path("allowed/more.yaml"), "perfdb: {path: /elsewhere/db.sqlite}").unwrap();
    assert!(machine.refused("include: [../allowed/more.yaml]"));
    fs::write(machine.path("allowed/more.yaml"), "perfdb: {path: db.sqlite}").unwrap();
    assert!(machine.refused("include: [../allowed/more.yaml]"), "relative to the included file");
}

#[test]
fn a_checkout_includes_no_file_from_elsewhere() {
    let machine = Machine::new();
    // A mistake in each: a file that is read is reported on.
    let files = ["allowed/more.yaml", "home/.ssh/more.yaml", "checkout/deep/more.yaml", "home/.cache/more.yaml"];
    for file in files {
        fs::write(machine.path(file), "strict_mode: true\nno_such_setting: 1").unwrap();
    }
    symlink(machine.path("allowed/more.yaml"), machine.path("checkout/link.yaml")).unwrap();
    fs::write(machine.path("checkout/step.yaml"), "include: [../allowed/more.yaml]").unwrap();
    let absolute = machine.path("home/.ssh/more.yaml").display().to_string();
    for said in ["../allowed/more.yaml", "link.yaml", "step.yaml", "deep/../../allowed/more.yaml", &absolute] {
        let error = machine.found(&format!("include: [\"{said}\"]"), "").unwrap_err();
        let [problem] = &error.problems[..] else { panic!("{said}: {error}") };
        assert!(matches!(problem.kind, ProblemKind::OutsideProject { .. }), "{said}: {error}");
        assert!(!error.to_string().contains("no_such_setting"), "{said}: {error}");
    }
    let unknown = |found: Result<PathBuf, ConfigError>| found.unwrap_err().to_string().contains("no_such_setting");
    assert!(unknown(machine.found("include: [deep/more.yaml]", "")));
    let cached = machine.path("home/.cache/more.yaml").display().to_string();
    assert!(unknown(machine.found(&format!("include: [\"{cached}\"]"), "")));
    let allow = format!("allow_project_paths: [\"{}\"]", machine.path("allowed").display());
    assert!(unknown(machine.found("include: [../allowed/more.yaml]", &allow)), "the user allows it");
    assert!(unknown(machine.found("include: [step.yaml]", &allow)));
    let folder = machine.path("allowed").display().to_string();
    fs::write(machine.path("checkout/layerzero.yaml"), "include: [../allowed/more.yaml]").unwrap();
    let mut environment = machine.environment();
    environment.insert("LAYERZERO_ALLOW_PROJECT_PATHS".into(), folder);
    let sources = Sources::discover(environment, &machine.path("checkout"));
    assert!(Layers::load(&sources).unwrap_err().to_string().contains("no_such_setting"), "the environment, too");
    // A file that somebody names may include what it likes.
    let mut named = machine.environment();
    named.insert("LAYERZERO_CONFIG".into(), machine.path("checkout/layerzero.yaml").display().to_string());
    let sources = Sources::discover(named, &machine.path("checkout"));
    assert!(Layers::load(&sources).unwrap_err().to_string().contains("no_such_setting"));
}

#[test]
fn the_user_allows_more_and_the_checkout_cannot() {
    let machine = Machine::new();
    let said = format!("perfdb: {{path: \"{}\"}}", machine.path("allowed/db.sqlite").display());
    let allow = |folder: &str| format!("allow_project_paths: [\"{folder}\"]");
    let allowed = machine.path("allowed").display().to_string();
    assert!(machine.refused(&said));
    assert_eq!(machine.found(&said, &allow(&allowed)).unwrap(), machine.path("allowed/db.sqlite"));
    assert!(machine.found("perfdb: {path: ~/elsewhere/db}", &allow("~/elsewhere")).is_ok());
    assert!(machine.found("perfdb: {path: ~/elsewhere-2/db}", &allow("~/elsewhere")).is_err(), "whole names count");
    assert!(machine.found(&said, &allow(".")).is_err(), "a relative folder is none");
    let error = machine.found(&format!("{said}\n{}", allow(&allowed)), "").unwrap_err().to_string();
    assert!(error.contains("allow_project_paths: a project's file cannot allow this to itself"), "{error}");
    let error = machine.found(&allow(&allowed), &allow(&allowed)).unwrap_err().to_string();
    assert!(error.contains("cannot allow this to itself"), "though it allows nothing new: {error}");
}

#[test]
fn a_checkout_allows_no_kernels_of_the_hub() {
    let machine = Machine::new();
    let allow = "backends: {hub_allow: [\"a/b@0123456789abcdef0123456789abcdef01234567\"]}";
    for said in [allow, "backends: {hub_lockfile: lock.json}"] {
        let error = machine.found(said, "").unwrap_err().to_string();
        assert!(error.contains("cannot allow this to itself"), "{said}: {error}");
    }
    assert!(machine.found("backends: {unproven: [hub]}", allow).is_ok(), "the user may");
}

#[test]
fn whoever_names_a_file_means_what_it_says() {
    let machine = Machine::new();
    let project = machine.path("checkout/layerzero.yaml");
    fs::write(&project, "perfdb: {path: /var/lib/perfdb.sqlite}").unwrap();
    let mut environment = machine.environment();
    assert!(
        Layers::load(&Sources::discover(environment.clone(), &machine.path("checkout"))).unwrap().resolve().is_err()
    );
    environment.insert("LAYERZERO_CONFIG".into(), project.display().to_string());
    let sources = Sources::discover(environment, &machine.path("home"));
    let config = Layers::load(&sources).unwrap().resolve().unwrap();
    assert_eq!(config.perfdb_path().unwrap(), Path::new("/var/lib/perfdb.sqlite"));
    // The environment and the user's own file say what they like, above and below the project's file.
    let mut environment = machine.environment();
    environment.insert("LAYERZERO_PERFDB_PATH".into(), "/elsewhere/db".into());
    let sources = Sources::discover(environment, &machine.path("checkout"));
    assert_eq!(Layers::load(&sources).unwrap().resolve().unwrap().perfdb_path().unwrap(), Path::new("/elsewhere/db"));
    assert_eq!(machine.found("", "perfdb: {path: /elsewhere/db}").unwrap(), Path::new("/elsewhere/db"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// In a tree of folders, files and links, a path leads where the system says it does.
    #[test]
    fn paths_lead_where_the_system_says(
        links in prop::collection::vec((0..6usize, "[abc]", prop::collection::vec("[abc]|\\.\\.|\\.", 1..4)), 0..6),
        asked in prop::collection::vec("[abcd]|\\.\\.|\\.", 1..7),
    ) {
        let tree = tempfile::tempdir().unwrap();
        // Below enough folders that no path of these leaves the tree.
        let base = tree.path().canonicalize().unwrap().join("1/2/3/4/5/6/7/8/9/10/11/12/13/14/15/16/17/18/19/20/21/22/23/24/25");
        let folders = ["", "a", "b", "a/b", "b/c", "a/b/c"].map(|inner| base.join(inner));
        folders.iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        for (folder, name, target) in &links {
            let _ = symlink(target.join("/"), folders[*folder].join(format!("{name}{name}")));
            let _ = symlink(folders[(*folder + 1) % 6].join(target.join("/")), folders[*folder].join(name));
        }
        let path = base.join(asked.join("/"));
        match (path.canonicalize(), resolve_path(&path)) {
            (Ok(system), Ok(ours)) => prop_assert_eq!(system, ours),
            (Ok(system), Err(error)) => prop_assert!(false, "{system:?}: {error}"),
            // What does not exist yet: once it does, the system agrees.
            (Err(_), Ok(ours)) => {
                if fs::create_dir_all(&ours).is_ok() && let Ok(system) = path.canonicalize() {
                    prop_assert_eq!(system, ours);
                }
            }
            (Err(_), Err(_)) => {}
        }
    }
}
