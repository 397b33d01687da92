//! Who wins: files, environment and code against a model that looks through them one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;

use lz_config::{Config, Layers, Origin, SETTINGS, Sources, Value};
use lz_select::{Action, Pattern};
use proptest::prelude::*;
use tempfile::TempDir;

/// What one layer says, as it was drawn.
#[derive(Clone, Debug, Default)]
struct Said {
    /// By index into [`PROBES`], which of its two values.
    values: BTreeMap<usize, bool>,
    sources: Option<Vec<String>>,
    /// By operation, the kernel; `None` takes a lock away, which only code can.
    locks: BTreeMap<&'static str, Option<String>>,
    rules: Vec<String>,
}

/// Settings that are tried: key, and two values.
const PROBES: &[(&str, &str, &str)] = &[
    ("enabled", "true", "false"),
    ("strict_mode", "true", "false"),
    ("deterministic", "true", "false"),
    ("batch_invariant", "true", "false"),
    ("max_cpu_isa", "avx2", "avx512_bf16"),
    ("num_threads", "3", "5"),
    ("shared_prefixes", "true", "false"),
    ("memory_headroom_mb", "7", "9"),
    ("default_layout", "BHSD", "BSHD"),
    ("breaker.failure_threshold", "2", "8"),
    ("cache.ttl_seconds", "3", "0"),
    ("health.sample_every", "1", "5"),
];

const OPERATIONS: &[&str] = &["attention", "attention.causal", "norm.rms"];

/// Highest first.
const NAMES: [&str; 7] = ["context", "code", "environment", "project", "included", "nested", "user"];

fn said(layer: usize) -> impl Strategy<Value = Said> {
    let values = prop::collection::btree_map(0..PROBES.len(), any::<bool>(), 0..5);
    let source = prop::sample::select(vec!["a", "b", "c"]).prop_map(str::to_owned);
    let sources = prop::option::weighted(0.4, prop::collection::vec(source, if layer == 2 { 1..3 } else { 0..3 }));
    let kernel = prop_oneof![
        Just(Some(format!("{}.k", NAMES[layer]))),
        Just((layer >= 2).then(|| format!("{}.k2", NAMES[layer])))
    ];
    let locks = prop::collection::btree_map(prop::sample::select(OPERATIONS), kernel, 0..3);
    let rules = (0..if layer == 2 { 1usize } else { 3 })
        .prop_map(move |n| (0..n).map(|i| format!("{}.{i}", NAMES[layer])).collect());
    (values, sources, locks, rules).prop_map(|(values, sources, locks, rules)| Said { values, sources, locks, rules })
}

fn world() -> impl Strategy<Value = Vec<Said>> {
    (0..NAMES.len()).map(said).collect::<Vec<_>>()
}

fn value_of(probe: usize, first: bool) -> &'static str {
    let (_, a, b) = PROBES[probe];
    if first { a } else { b }
}

impl Said {
    fn yaml(&self, include: Option<&str>) -> String {
        let mut text = String::from("version: 1\n");
        for (&probe, &first) in &self.values {
            let (key, value) = (PROBES[probe].0, value_of(probe, first));
            match key.split_once('.') {
                Some((group, name)) => writeln!(text, "{group}: {{{name}: {value}}}").unwrap(),
                None => writeln!(text, "{key}: {value}").unwrap(),
            }
        }
        if let Some(sources) = &self.sources {
            writeln!(text, "prefer_sources: [{}]", sources.join(", ")).unwrap();
        }
        if !self.locks.is_empty() {
            text.push_str("locks:\n");
            let locks = self.locks.iter().filter_map(|(op, kernel)| Some((op, kernel.as_ref()?)));
            locks.for_each(|(op, kernel)| writeln!(text, "  {op}: {kernel}").unwrap());
        }
        if !self.rules.is_empty() {
            text.push_str("rules:\n");
            self.rules.iter().for_each(|rule| writeln!(text, "  - {{deny: {rule}}}").unwrap());
        }
        include.iter().for_each(|path| writeln!(text, "include: {path}").unwrap());
        text
    }

    fn variables(&self) -> BTreeMap<String, String> {
        let mut variables = BTreeMap::new();
        for (&probe, &first) in &self.values {
            let (key, value) = (PROBES[probe].0, value_of(probe, first));
            let name = format!("LAYERZERO_{}", key.to_uppercase().replace('.', "_"));
            match key {
                "enabled" => variables.insert("LAYERZERO_DISABLED".into(), if first { "0" } else { "1" }.into()),
                _ => variables.insert(name, value.into()),
            };
        }
        self.sources.iter().for_each(|list| drop(variables.insert("LAYERZERO_PREFER".into(), list.join(","))));
        for (op, kernel) in &self.locks {
            let name = format!("LAYERZERO_LOCK_{}", op.to_uppercase().replace('.', "_"));
            variables.insert(name, kernel.clone().unwrap());
        }
        variables
    }

    fn apply(&self, code: &mut lz_config::CodeLayer) {
        let typed = |text: &str| match text.parse::<i64>() {
            Ok(number) => Value::Int(number),
            Err(_) => text.parse::<bool>().map_or_else(|_| Value::from(text), Value::Bool),
        };
        for (&probe, &first) in &self.values {
            code.set(PROBES[probe].0, typed(value_of(probe, first))).unwrap();
        }
        self.sources.iter().for_each(|list| code.set("prefer_sources", Value::names(list.clone())).unwrap());
        for (op, kernel) in &self.locks {
            match kernel {
                Some(kernel) => code.lock(op, kernel).unwrap(),
                None => code.unlock(op).unwrap(),
            }
        }
        if !self.rules.is_empty() {
            let rule = |rule: &String| Value::Map(vec![("deny".into(), Value::from(rule.as_str()))]);
            code.set("rules", Value::List(self.rules.iter().map(rule).collect())).unwrap();
        }
    }
}

fn build(folder: &TempDir, layers: &[Said]) -> Config {
    let file = |name: &str, text: String| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    file("included.yaml", layers[4].yaml(Some("nested.yaml")));
    file("nested.yaml", layers[5].yaml(None));
    let project = Some(file("project.yaml", layers[3].yaml(Some("included.yaml"))));
    let user = Some(file("user.yaml", layers[6].yaml(None)));
    let mut loaded =
        Layers::load(&Sources { user, project, environment: layers[2].variables(), ..Sources::default() }).unwrap();
    layers[1].apply(loaded.code());
    let mut context = lz_config::CodeLayer::context();
    layers[0].apply(&mut context);
    let config = loaded.resolve_in(&[&context]).unwrap();
    assert_eq!(loaded.reread().unwrap().resolve_in(&[&context]).unwrap(), config, "reading again changes nothing");
    config
}

/// Which layer an origin is of.
fn layer_of(origin: &Origin) -> &'static str {
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    let found = match origin {
        Origin::Default => return "default",
        Origin::Context => "context".into(),
        Origin::Code => "code".into(),
        Origin::Environment { .. } => "environment".into(),
        Origin::ProjectFile { path, .. } | Origin::Included { path, .. } | Origin::UserFile { path, .. } => name(path),
    };
    NAMES.into_iter().find(|known| **known == found).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn the_highest_layer_that_says_something_decides(layers in world()) {
        let folder = tempfile::tempdir().unwrap();
        let config = build(&folder, &layers);
        let entry = |key: &str| config.entries().iter().find(|e| e.key == key).unwrap();
        for (probe, (key, _, _)) in PROBES.iter().enumerate() {
            let setting = SETTINGS.iter().find(|s| s.key == *key).unwrap();
            let mut expected = (setting.default().to_string(), "default");
            for (name, said) in NAMES.iter().zip(&layers).rev() {
                if let Some(&first) = said.values.get(&probe) {
                    expected = (value_of(probe, first).to_owned(), name);
                }
            }
            let found = entry(key);
            let value = found.value.to_string().replace('"', "");
            prop_assert_eq!((value, layer_of(&found.origin)), (expected.0.replace('"', ""), expected.1), "{}", key);
        }
        let mut sources = (Vec::new(), "default");
        for (name, said) in NAMES.iter().zip(&layers).rev() {
            if let Some(list) = &said.sources {
                sources = (list.clone(), name);
            }
        }
        prop_assert_eq!((config.settings.prefer_sources.clone(), layer_of(&entry("prefer_sources").origin)), sources);
    }

    #[test]
    fn locks_add_up_by_operation_and_rules_by_layer(layers in world()) {
        let folder = tempfile::tempdir().unwrap();
        let config = build(&folder, &layers);
        let mut locks: BTreeMap<&str, String> = BTreeMap::new();
        for said in layers.iter().rev() {
            for (op, kernel) in &said.locks {
                match kernel {
                    Some(kernel) => drop(locks.insert(op, kernel.clone())),
                    None => drop(locks.remove(op)),
                }
            }
        }
        let rules = &config.policy().rules;
        let found: BTreeMap<&str, String> = rules.iter().filter_map(|rule| match &rule.action {
            Action::Lock(Pattern::Kernel(kernel)) => Some((rule.operation.as_deref().unwrap(), kernel.clone())),
            _ => None,
        }).collect();
        prop_assert_eq!(&found, &locks);
        // Locks of higher layers come first, so that they decide where names overlap.
        let order: Vec<usize> = rules.iter().filter_map(|rule| match &rule.action {
            Action::Lock(Pattern::Kernel(kernel)) => NAMES.iter().position(|name| kernel.starts_with(*name)),
            _ => None,
        }).collect();
        prop_assert!(order.is_sorted());
        let expected: Vec<&String> = layers.iter().flat_map(|said| &said.rules).collect();
        let denied: Vec<&str> = rules.iter().filter_map(|rule| match &rule.action {
            Action::Deny(Pattern::Kernel(kernel)) => Some(kernel.as_str()),
            _ => None,
        }).collect();
        prop_assert_eq!(denied, expected);
    }
}

/// `LZ_TEST_SCALE=full` runs a hundred times as many cases.
fn cases() -> u32 {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => 12_800,
        _ => 128,
    }
}

// --- case by case -------------------------------------------------------------------------------

fn project(folder: &TempDir, text: &str) -> Sources {
    let path = folder.path().join("layerzero.yaml");
    std::fs::write(&path, text).unwrap();
    Sources { project: Some(path), ..Sources::default() }
}

#[test]
fn a_narrower_lock_of_the_same_layer_comes_first() {
    let folder = tempfile::tempdir().unwrap();
    let text = "locks: {attention: a, attention.causal: b, attention.standard.prefill: c, rms_norm: d}";
    let config = Layers::load(&project(&folder, text)).unwrap().resolve().unwrap();
    let order: Vec<&str> = config.policy().rules.iter().map(|r| r.action.pattern().unwrap().as_str()).collect();
    assert_eq!(order, ["c", "d", "b", "a"]);
}

#[test]
fn an_unlock_by_any_name_hides_locks_below() {
    let folder = tempfile::tempdir().unwrap();
    let mut layers = Layers::load(&project(&folder, "locks: {rms_norm: a}")).unwrap();
    layers.code().unlock("norm.rms").unwrap();
    assert_eq!(layers.resolve().unwrap().policy().rules, []);
    layers.code().reset();
    assert_eq!(layers.resolve().unwrap().policy().rules.len(), 1);
}

#[test]
fn null_takes_back_what_code_said() {
    let mut layers = Layers::load(&Sources::default()).unwrap();
    let group = Value::Map(vec![("timeout_ms".into(), Value::Int(5)), ("enabled".into(), Value::Bool(false))]);
    layers.code().set("breaker", group).unwrap();
    layers.code().set("breaker.max_timeout_ms", Value::Int(6)).unwrap();
    let breaker = layers.resolve().unwrap().settings.breaker;
    assert_eq!((breaker.timeout_ms, breaker.max_timeout_ms, breaker.enabled), (5, 6, false));
    layers.code().set("breaker.enabled", Value::Null).unwrap();
    assert!(layers.resolve().unwrap().settings.breaker.enabled);
    layers.code().set("breaker", Value::Null).unwrap();
    assert!(layers.code().is_empty());
}

#[test]
fn a_file_that_cannot_be_used_leaves_the_layers_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let sources = project(&folder, "verbose: true");
    let mut layers = Layers::load(&sources).unwrap();
    layers.code().set("debug", Value::Bool(true)).unwrap();
    std::fs::write(sources.project.as_ref().unwrap(), "verbse: true").unwrap();
    assert!(layers.reread().is_err());
    assert!(layers.resolve().unwrap().settings.verbose);
    std::fs::write(sources.project.as_ref().unwrap(), "verbose: false").unwrap();
    let settings = layers.reread().unwrap().resolve().unwrap().settings;
    assert!(!settings.verbose && settings.debug);
}

#[test]
fn files_are_found_where_they_should_be() {
    let folder = tempfile::tempdir().unwrap();
    let (home, work) = (folder.path().join("home"), folder.path().join("work"));
    std::fs::create_dir_all(home.join(".config/layerzero")).unwrap();
    std::fs::create_dir_all(&work).unwrap();
    let environment = |more: &[(&str, &str)]| {
        let mut map = BTreeMap::from([("HOME".to_owned(), home.display().to_string())]);
        map.extend(more.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())));
        map
    };
    let found = |more: &[(&str, &str)]| {
        let sources = Sources::discover(environment(more), &work);
        (sources.user, sources.project)
    };
    assert_eq!(found(&[]), (None, None));
    let user = home.join(".config/layerzero/layerzero.yaml");
    std::fs::write(&user, "").unwrap();
    std::fs::write(work.join("layerzero.yaml"), "").unwrap();
    assert_eq!(found(&[]), (Some(user.clone()), Some(work.join("layerzero.yaml"))));
    assert_eq!(found(&[("LAYERZERO_CONFIG", "other.yaml")]).1, Some(work.join("other.yaml")));
    assert_eq!(found(&[("XDG_CONFIG_HOME", "/nowhere")]).0, None);
    // A file that is named must be there.
    assert!(Layers::load(&Sources::discover(environment(&[("LAYERZERO_CONFIG", "other.yaml")]), &work)).is_err());
    // One file that is both is read once.
    let both = Sources::discover(environment(&[("LAYERZERO_CONFIG", &user.display().to_string())]), &work);
    assert_eq!(Layers::load(&both).unwrap().resolve().unwrap().files(), [user]);
}

#[test]
fn every_file_that_was_read_is_to_be_watched() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in
        [("a.yaml", "include: [c.yaml]"), ("b.yaml", "include: [c.yaml]"), ("c.yaml", "rules: [{deny: x}]")]
    {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let config = Layers::load(&project(&folder, "include: [a.yaml, b.yaml]")).unwrap().resolve().unwrap();
    let names: BTreeSet<String> =
        config.files().iter().map(|p| p.file_name().unwrap().to_string_lossy().into()).collect();
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["a.yaml", "b.yaml", "c.yaml", "layerzero.yaml"]);
    assert_eq!(config.policy().rules.len(), 1, "a file that two include is read once");
}

#[test]
fn paths_of_pinned_decisions_are_relative_to_who_says_them() {
    let folder = tempfile::tempdir().unwrap();
    let paths = |text: &str, more: &[(&str, &str)]| {
        let mut sources = project(&folder, text);
        sources.environment = more.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        let config = Layers::load(&sources).unwrap().resolve().unwrap();
        (config.lockfile_path(), config.dispatch_table_path())
    };
    let here = |name: &str| Some(folder.path().join(name));
    let home = ("HOME", "/home/me");
    assert_eq!(paths("verbose: true", &[]), (None, None));
    assert_eq!(paths("lockfile: a.lock\ndispatch_table: t/b.json", &[]), (here("a.lock"), here("t/b.json")));
    assert_eq!(paths("lockfile: /x/a.lock\ndispatch_table: ~/b.json", &[home]).0, Some("/x/a.lock".into()));
    assert_eq!(paths("dispatch_table: ~/b.json", &[home]).1, Some("/home/me/b.json".into()));
    // Nobody's file, so the current directory; and above what the file says.
    assert_eq!(paths("lockfile: a.lock", &[("LAYERZERO_LOCKFILE", "c.lock")]).0, Some("c.lock".into()));
    assert_eq!(paths("lockfile: null", &[]).0, None);
    // An included file's paths are its own.
    std::fs::create_dir_all(folder.path().join("more")).unwrap();
    std::fs::write(folder.path().join("more/x.yaml"), "lockfile: d.lock").unwrap();
    assert_eq!(paths("include: more/x.yaml", &[]).0, here("more/d.lock"));
}
