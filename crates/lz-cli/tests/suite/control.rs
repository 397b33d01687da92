//! Configuration, policy, rollouts and readiness, as an operator sees them.

use std::fs;
use std::path::Path;

use insta::assert_snapshot;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Outcome, attention, layerzero_in, on_h100};

/// A directory with files, and the environment a command runs with there.
struct Project {
    folder: TempDir,
    environment: Vec<(&'static str, String)>,
}

impl Project {
    fn new(files: &[(&str, &str)]) -> Project {
        let folder = tempfile::tempdir().unwrap();
        let project = Project { folder, environment: Vec::new() };
        files.iter().for_each(|(name, text)| project.write(name, text.as_bytes()));
        project
    }

    /// With this `layerzero.yaml`.
    fn with(text: &str) -> Project {
        Project::new(&[("layerzero.yaml", text)])
    }

    fn env(mut self, name: &'static str, value: &str) -> Project {
        self.environment.push((name, value.to_owned()));
        self
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Runs a command line; where the directory is does not show in what it says.
    fn run(&self, line: &str) -> Outcome {
        let environment: Vec<(&str, &str)> = self.environment.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let words: Vec<&str> = line.split_whitespace().collect();
        let outcome = layerzero_in(self.path(), &environment, &words);
        let path = self.path().to_str().unwrap();
        let plain = |text: &str| text.replace(path, "DIR");
        Outcome { out: plain(&outcome.out), err: plain(&outcome.err), ..outcome }
    }
}

const CONFIG: &str = "\
version: 1
fallback_enabled: false
prefer_sources: [flash_attn]
breaker:
  timeout_ms: 5000
locks:
  rms_norm: liger.rms_norm
rules:
  - name: long sequences
    match: {seq_len: '>16384'}
    avoid_sources: [flashinfer]
  - name: short ones
    operation: attention.*
    when: seq_q <= 128
    prefer: flashinfer.*
rollouts:
  - {name: fi, operation: attention.causal, candidate: flashinfer.single_prefill, mode: canary, fraction: 5%}
";

// --- config ----------------------------------------------------------------------------------------------

#[test]
fn config_show_prints_every_value_and_where_it_comes_from() {
    let project = Project::with(CONFIG).env("LAYERZERO_VERBOSE", "1").env("LAYERZERO_LOCK_GELU", "liger.gelu");
    assert_snapshot!(project.run("config show --origin").ended(0).out);
    let text = project.run("config show").ended(0).out;
    assert!(!text.contains("DIR") && text.contains("breaker.timeout_ms"), "{text}");
}

#[test]
fn config_show_takes_keys_and_groups_of_them() {
    let project = Project::with(CONFIG);
    assert_snapshot!(project.run("config show --origin breaker locks rules verbose").ended(0).out);
    assert_eq!(project.run("config show rollouts").ended(0).out.lines().count(), 2);
    let unknown = project.run("config show breaker.timeout").ended(2);
    unknown.says("error[BAD_ARGUMENT]: unknown setting 'breaker.timeout'; did you mean 'breaker.timeout_ms'?");
}

#[test]
fn config_show_as_json_says_the_layer() {
    let project = Project::with(CONFIG).env("LAYERZERO_DEBUG", "1");
    let json = project.run("config show --json").ended(0).json();
    let entry = |key: &str| {
        let entries = json["entries"].as_array().unwrap();
        entries.iter().find(|e| e["key"] == key).unwrap_or_else(|| panic!("{key}")).clone()
    };
    let origin = json!({"layer": "project_file", "path": "DIR/layerzero.yaml", "line": 5, "column": 3});
    assert_eq!(entry("breaker.timeout_ms"), json!({"key": "breaker.timeout_ms", "value": 5000, "origin": origin}));
    assert_eq!(entry("debug")["origin"], json!({"layer": "environment", "name": "LAYERZERO_DEBUG"}));
    assert_eq!(entry("checked")["origin"], json!({"layer": "default"}));
    assert_eq!(entry("locks.norm.rms")["value"], "liger.rms_norm");
    assert_eq!(json["files"], json!(["DIR/layerzero.yaml"]));
}

#[test]
fn the_layers_are_found_and_stand_in_their_order() {
    let project = Project::new(&[
        ("layerzero.yaml", "policy: null\nverbose: true\nchecked: true\n"),
        ("home/.config/layerzero/layerzero.yaml", "verbose: false\ndebug: true\nstrict_mode: true\n"),
        ("other.yaml", "verbose: false\n"),
    ]);
    let project = Project { environment: vec![("HOME", format!("{}/home", project.path().display()))], ..project }
        .env("LAYERZERO_STRICT_MODE", "0");
    let origins = |line: &str| project.run(&format!("config show --origin {line} verbose checked debug strict_mode"));
    assert_snapshot!(origins("").ended(0).out);
    // Another file in the place of the project's.
    assert_snapshot!(origins("--config other.yaml").ended(0).out);
    let project = project.env("LAYERZERO_CONFIG", "other.yaml");
    let text = project.run("config show --origin verbose").ended(0).out;
    assert!(text.contains("DIR/other.yaml:1:1"), "{text}");
    let text = project.run("config show --origin verbose --config layerzero.yaml").ended(0).out;
    assert!(text.contains("DIR/layerzero.yaml:2:1"), "the option stands above the variable: {text}");
}

#[test]
fn config_check_says_that_all_is_well() {
    let project = Project::with(CONFIG);
    let check = |rest: &str| project.run(&format!("config check {rest} {}", on_h100())).ended(0);
    assert_eq!(check("").out, "DIR/layerzero.yaml: no problems\n");
    assert_eq!(check("layerzero.yaml").out, "DIR/layerzero.yaml: no problems\n");
    let json = check("--json").json();
    assert_eq!((&json["problems"], &json["warnings"]), (&json!([]), &json!([])));
    assert_eq!(Project::new(&[]).run("config check").ended(0).out, "no files; the environment is in order\n");
}

#[test]
fn config_check_says_everything_that_is_wrong() {
    let project = Project::with(
        "fallback_enabld: true\nbreaker:\n  timeout_ms: soon\n  failure_threshold: -1\nlocks:\n  norm.rsm: x\n\
         rules:\n  - prefer: a\n    when: seq_q >\n  - {}\ncache: 7\n",
    );
    let outcome = project.run("config check").ended(3);
    assert_eq!(outcome.out, "");
    assert_snapshot!(outcome.err);
    let error = &project.run("config check --json").ended(3).json()["error"];
    assert_eq!(error["code"], "INVALID_CONFIGURATION");
    assert_eq!(error["problems"][0]["path"], "DIR/layerzero.yaml:1:1");
    assert!(error["problems"].as_array().unwrap().len() >= 6, "{error}");
}

#[test]
fn a_file_is_checked_by_itself() {
    // What the environment has wrong is not the file's.
    let project = Project::with("version: 1\n").env("LAYERZERO_VERBOSE", "perhaps");
    project.run("config check layerzero.yaml").ended(0);
    project
        .run("config check")
        .ended(3)
        .says("environment variable LAYERZERO_VERBOSE: verbose: expected true or false");
}

#[test]
fn bad_files_end_as_a_bad_configuration_whatever_is_asked() {
    let cases: &[(&str, &[u8], &str)] = &[
        ("unknown key", b"fallback_enabld: true\n", "did you mean 'fallback_enabled'?"),
        ("wrong type", b"fallback_enabled: [1]\n", "layerzero.yaml:1:19: fallback_enabled: expected true or false"),
        ("no YAML", b"a: [1\n", "layerzero.yaml:"),
        ("not UTF-8", b"a: \xff\n", "is not UTF-8 (first bad byte at offset 3)"),
        ("circle", b"include: layerzero.yaml\n", "files include each other in a circle"),
        ("missing include", b"include: nowhere.yaml\n", "'DIR/nowhere.yaml' cannot be read"),
        ("huge integer", b"breaker: {timeout_ms: 99999999999999999999999999}\n", "breaker.timeout_ms"),
        ("bomb", b"a: &a [1, 1]\nb: [*a, *a]\n", "anchors and aliases"),
        ("unknown operation", b"locks: {atention: x}\n", "did you mean 'attention'?"),
        ("bad expression", b"rules: [{when: seq_q >, prefer: x}]\n", "layerzero.yaml:1:"),
    ];
    for (what, bytes, says) in cases {
        let project = Project::new(&[]);
        project.write("layerzero.yaml", bytes);
        for line in [
            "config check",
            "config show",
            "policy check",
            "rollout status",
            "kernels",
            "select --op rms_norm --shape x=4x8",
            "explain --op rms_norm --shape x=4x8",
            "policy explain --op rms_norm --shape x=4x8",
            "run --op rms_norm --shape x=4x8",
        ] {
            let outcome = project.run(line);
            assert_eq!(outcome.code, 3, "{what}: {line}: {outcome:?}");
            outcome.says("error[INVALID_CONFIGURATION]: DIR/layerzero.yaml:").says(says).says("hint: ");
        }
        // What needs no configuration works without it.
        project.run("ops rms_norm").ended(0);
        project.run("schema config").ended(0);
        project.run("config reference").ended(0);
        project.run("kernels --config /dev/null").ended(3).says("is a device; only regular files are read");
    }
    Project::new(&[]).run("kernels --config nowhere.yaml").ended(3).says("DIR/nowhere.yaml:1:1: cannot be read");
    Project::new(&[("layerzero.yaml/x", "")]).run("kernels").ended(3).says("is a directory; only regular files");
    Project::new(&[]).run("config check nowhere.yaml").ended(3).says("cannot be read");
}

#[cfg(unix)]
#[test]
fn a_file_that_may_not_be_read_is_said() {
    use std::os::unix::fs::PermissionsExt;
    let project = Project::with("version: 1\n");
    let path = project.path().join("layerzero.yaml");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::read(&path).is_ok() {
        return; // root reads everything
    }
    project.run("config check").ended(3).says("cannot be read: Permission denied");
}

#[test]
fn unknown_variables_are_warned_about() {
    let project = Project::new(&[]).env("LAYERZERO_PREFRE", "flash_attn");
    for line in ["kernels", "config show", "config check", "select --op rms_norm --shape x=4x8", "rollout status"] {
        let warning = "warning: environment variable LAYERZERO_PREFRE means nothing; did you mean 'LAYERZERO_PREFER'?";
        project.run(line).ended(0).says(warning);
    }
    let report = project.run("doctor --json").ended(0).json();
    assert!(report["configuration"]["warnings"][0].as_str().unwrap().contains("LAYERZERO_PREFER"), "{report}");
}

#[test]
fn the_reference_and_the_schema_hold_every_setting() {
    let project = Project::new(&[]);
    let markdown = project.run("config reference").ended(0).out;
    let listed = project.run("config reference --json").ended(0).json();
    let schema: Value = serde_json::from_str(&project.run("schema config").ended(0).out).unwrap();
    assert_eq!(schema["type"], json!(["object", "null"]), "an empty file is one too");
    for setting in lz_config::SETTINGS {
        let known = listed["settings"].as_array().unwrap().iter().any(|s| s["key"] == setting.key);
        assert!(known && markdown.contains(setting.key), "{}", setting.key);
        let mut at = &schema["properties"];
        for part in setting.key.split('.') {
            at = if at[part]["properties"].is_object() { &at[part]["properties"] } else { &at[part] };
        }
        assert!(at.is_object(), "{} in the schema", setting.key);
    }
}

// --- what the configuration does -------------------------------------------------------------------------

#[test]
fn commands_follow_the_configuration_and_the_command_line_stands_above_it() {
    let chosen = |project: &Project, flags: &str| {
        let line = format!("select --json {} {} {flags}", attention(1), on_h100());
        project.run(&line).ended(0).json()["kernel_id"].as_str().unwrap().to_owned()
    };
    let plain = Project::new(&[]);
    assert_eq!(chosen(&plain, ""), "flash_attn.v2.causal");
    let locked = Project::with("locks: {attention: flashinfer.single_prefill}\n");
    assert_eq!(chosen(&locked, ""), "flashinfer.single_prefill");
    assert_eq!(chosen(&locked, "--lock flash_attn.v2.causal"), "flash_attn.v2.causal");
    let avoiding = Project::new(&[]).env("LAYERZERO_AVOID", "flash_attn");
    assert_eq!(chosen(&avoiding, ""), "flashinfer.single_prefill");
    assert_eq!(chosen(&avoiding, "--deny flashinfer.*"), "flash_attn.v2.causal");
    let strict = Project::with("strict_mode: true\n");
    let shapes = "--op attention --shape query=2x8x4x64 --shape key=2x8x4x64 --shape value=2x8x4x64";
    let turned = format!("select {shapes} --strides query=2048x64x512x1");
    strict.run(&turned).ended(2).says("error[LAYOUT_CONTRADICTED]");
    let seq =
        |project: &Project| project.run(&format!("explain --json {shapes}")).ended(0).json()["dims"]["seq_q"].clone();
    assert_eq!(seq(&plain), 8);
    assert_eq!(seq(&Project::with("default_layout: BHSD\n")), 4);
    assert_eq!(seq(&Project::new(&[]).env("LAYERZERO_DEFAULT_LAYOUT", "BHSD")), 4);
    let off = Project::new(&[]).env("LAYERZERO_DISABLED", "1");
    assert!(off.run(&format!("explain {} {}", attention(1), on_h100())).ended(1).out.contains("LayerZero is disabled"));
}

#[test]
fn doctor_shows_the_files_in_force_and_what_is_wrong_with_them() {
    let project = Project::new(&[("layerzero.yaml", "include: more.yaml\n"), ("more.yaml", "verbose: true\n")]);
    let text = project.run("doctor").ended(0).out;
    assert!(text.contains("Configuration\n  DIR/layerzero.yaml\n  DIR/more.yaml\n"), "{text}");
    let report = project.run("doctor --json").ended(0).json();
    assert_eq!(report["configuration"]["files"], json!(["DIR/layerzero.yaml", "DIR/more.yaml"]));
    assert_eq!(report["configuration"]["refused_reload"], Value::Null);
    let broken = Project::with("verbos: true\n");
    let text = broken.run("doctor").ended(3).out;
    assert!(text.contains("DIR/layerzero.yaml:1:1: verbos: unknown key; did you mean 'verbose'?"), "{text}");
    assert!(text.contains("Devices"), "the rest is shown all the same: {text}");
}

// --- policy ----------------------------------------------------------------------------------------------

#[test]
fn policy_check_finds_what_is_odd() {
    let project = Project::with(
        "rules:
  - {name: typo, operation: attention, prefer: flash_attn.v2.casual}
  - {name: impossible, operation: attention, when: seq_q > 9 and seq_q < 3, prefer: flashinfer.*}
  - {name: elsewhere, match: {sm: '<80'}, avoid_sources: [flashinfer]}
  - {name: no flash, deny: flash_attn.*}
  - {name: nor this, operation: attention, deny: flash_attn.v2.causal}
",
    );
    let outcome = project.run(&format!("policy check layerzero.yaml {}", on_h100())).ended(1);
    assert_snapshot!(outcome.out);
    let json = project.run(&format!("policy check {} --json", on_h100())).ended(1).json();
    let kinds: Vec<(&str, &str)> = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| (f["rule"].as_str().unwrap().split(" (").next().unwrap(), f["kind"].as_str().unwrap()))
        .collect();
    for expected in [("typo", "unknown_kernel"), ("impossible", "never_matches"), ("nor this", "shadowed")] {
        assert!(kinds.contains(&expected), "{expected:?} in {kinds:?}");
    }
}

#[test]
fn policy_check_is_content_with_good_rules() {
    let project = Project::with(CONFIG);
    let text = project.run(&format!("policy check layerzero.yaml {}", on_h100())).ended(0).out;
    assert!(text.ends_with(": 0 errors, 0 warnings, 0 notes\n"), "{text}");
    let warned = Project::with("rules: [{prefer: xformers}]\n");
    let text = warned.run("policy check").ended(0).out;
    assert!(text.starts_with("warning: ") && text.ends_with("1 rule: 0 errors, 1 warning, 0 notes\n"), "{text}");
    assert_eq!(Project::new(&[]).run("policy check").ended(0).out, "0 rules: 0 errors, 0 warnings, 0 notes\n");
}

#[test]
fn policy_explain_shows_which_rules_fired() {
    let project = Project::with(
        "prefer_sources: [liger]
rules:
  - {name: long ones, operation: attention, when: seq_q > 4096, avoid: flash_attn.*}
  - {name: on hopper, match: {sm: '>=90', operation: 'attention.*'}, boost: {kernel: flashinfer.*, points: 15}}
  - {name: never flash, operation: attention.causal, deny: flash_attn.*}
",
    );
    let line = format!("policy explain {} {}", attention(1), on_h100());
    assert_snapshot!(project.run(&line).ended(0).out);
    let json = project.run(&format!("{line} --json")).ended(0).json();
    assert_eq!(json["chosen"], "flashinfer.single_prefill");
    let none = Project::new(&[]).run(&line).ended(0).out;
    assert!(none.contains("no rule is about this operation"), "{none}");
}

#[test]
fn policy_explain_shows_locks_and_what_they_leave() {
    let project = Project::with("locks: {attention: flash_attn.v2.causal}\nrules: [{name: too, lock: flashinfer.*}]\n");
    let line = format!("policy explain {} {}", attention(1), on_h100());
    assert_snapshot!(project.run(&line).ended(0).out);
    // A lock on a kernel that cannot serve the call leaves nothing.
    let outcome = project.run(&format!("{line} --lock liger.rms_norm")).ended(1);
    assert!(outcome.out.contains("chosen  nothing"), "{}", outcome.out);
}

// --- rollout ---------------------------------------------------------------------------------------------

#[test]
fn rollout_status_shows_what_is_configured() {
    let project = Project::with(CONFIG);
    assert_snapshot!(project.run("rollout status").ended(0).out);
    let json = project.run("rollout status --json").ended(0).json();
    assert_eq!((&json["configured"][0]["name"], &json["processes"]), (&json!("fi"), &json!([])));
    let none = Project::new(&[]).run("rollout status").ended(0).out;
    assert_eq!(none, "no rollout is configured here\nno process has figures\n");
}

#[test]
fn rollout_status_shows_the_figures_of_processes() {
    use layerzero::resilience::rollout::RolloutCall as Tried;
    let project = Project::with(
        "rollouts: [{name: new, operation: rms_norm, candidate: lz_cpu.*, mode: canary, fraction: 1.0, min_samples: 5}]\n",
    );
    let state = project.path().join("state");
    let project = Project { environment: vec![("XDG_STATE_HOME", state.to_str().unwrap().to_owned())], ..project };
    let engine = layerzero::Engine::builder()
        .devices(vec![lz_model::DeviceSpec::new(lz_model::Platform::Cpu, "host")])
        .state_dir(state.join("layerzero"))
        .build();
    let mut other = lz_model::KernelDescriptor::new("other.rms", "norm.rms", "other");
    other.platforms = vec![lz_model::Platform::Cpu];
    other.dtypes = lz_model::DTypeSet::FLOATS;
    other.layouts = vec![lz_model::Layout::Strided];
    engine.register(other, std::sync::Arc::new(|_: &mut lz_model::KernelArgs<'_, '_>| Ok(()))).unwrap();
    engine.load_config(&project.path().join("layerzero.yaml")).unwrap();
    let meta = lz_model::TensorMeta::new(lz_model::DType::F32, &[2, 4]);
    let query = engine.bind("rms_norm", &lz_model::NamedCall::new().input("input", meta)).unwrap().1.query;
    let (rollout, ..) = engine.process().comparison(&query, &engine.steps(&query).unwrap()).unwrap();
    (0..5).for_each(|_| engine.tried(&rollout, Tried::FAILED));
    let pid = format!("process {}", std::process::id());
    assert_snapshot!(project.run("rollout status").ended(0).out.replace(&pid, "process PID"));
    let json = project.run("rollout status --json").ended(0).json();
    let process = &json["processes"][0];
    assert_eq!((&process["pid"], &process["rollouts"][0]["samples"]), (&json!(std::process::id()), &json!(5)));
    assert_eq!(process["rollouts"][0]["verdict"]["state"], "rolled_back");
}

#[test]
fn the_help_of_rollout_says_how_to_begin_anew() {
    let help = Project::new(&[]).run("rollout status --help").ended(0).out;
    assert!(help.contains("lz.restart_rollout(name)") && help.contains("'seed'"), "{help}");
}

/// What is wrong with a configuration is wrong in the eyes of every command that judges one.
#[test]
fn config_check_policy_check_and_ready_give_one_verdict() {
    let cases = [
        (true, "locks: {rms_norm: lz_cpu.ref.norm.rms}"),
        (true, "locks: {rms_norm: lz_cpu}"),
        (true, "prefer_sources: [flash_attn, flashinfer]"),
        (true, "avoid_sources: [experimental_lib]"),
        (true, "rules: [{deny: flashinfer}, {avoid: 'flash_attn.v3.*'}]"),
        (true, "locks: {rms_norm: {kernel: plugin.rms_norm, optional: true}}"),
        (true, "locks: {rms_norm: {kernel: liger.rms_norm, optional: true}}"),
        (true, "rules: [{prefer: plugin.rms_norm, optional: true}]"),
        (false, "locks: {rms_norm: no.such.kernel}"),
        (false, "locks: {rms_norm: lz_cpu.ref.norm.rmss}"),
        (false, "locks: {rms_norm: liger.rms_norm}"),
        (false, "locks: {rms_norm: lz_cpu.ref.activation.gelu}"),
        (false, "locks: {rms_norm: lz_cpu}\nrules: [{deny_sources: lz_cpu, operation: rms_norm}]"),
        (false, "locks: {rms_norm: lz_cpu.ref.norm.rms}\nrules: [{filter: not reference}]"),
        (false, "prefer_sources: [flash_atn]"),
        (false, "avoid_sources: [xformer]"),
        (false, "rules: [{prefer: flashinfr}]"),
        (false, "rules: [{deny: no.such.kernel}]"),
        (false, "rules: [{operation: rms_norm, when: rows > 9 and rows < 3, prefer: lz_cpu}]"),
    ];
    for (good, text) in cases {
        let project = Project::with(text);
        for command in ["config check", "policy check", "ready"] {
            let outcome = project.run(&format!("{command} --device cpu"));
            assert_eq!(outcome.code == 0, good, "{command}: {text}: {outcome:?}");
        }
    }
}

// --- ready -----------------------------------------------------------------------------------------------

#[test]
fn ready_is_a_gate() {
    let project = Project::with("memory_headroom_mb: 1\n");
    let outcome = project.run("ready --device cpu").ended(0);
    let end = outcome.out.lines().last().unwrap();
    assert!(end.starts_with("ready"), "{}", outcome.out);
    let json = project.run("ready --device cpu --json").ended(0).json();
    assert_eq!(json["ready"], true);
    let here = project.run("ready --json").json();
    let memory = here["checks"].as_array().unwrap().iter().find(|c| c["name"] == "memory").unwrap().clone();
    assert_eq!(memory["status"], "pass", "the memory of this machine is looked at: {memory}");
    let locked = Project::with("locks: {rms_norm: nobody.rms}\n");
    let outcome = locked.run("ready --device cpu").ended(1);
    assert!(outcome.out.contains("no kernel is called 'nobody.rms'"), "{}", outcome.out);
    assert_eq!(locked.run("ready --device cpu --json").ended(1).json()["ready"], false);
    let refused = Project::with("nonsense: 1\n");
    let outcome = refused.run("ready --device cpu").ended(1);
    assert!(outcome.out.contains("nonsense: unknown key"), "{}", outcome.out);
    project.run("ready --device nosuch").ended(2).says("error[UNKNOWN_DEVICE]");
    project.run("ready --capabilities nowhere.json").ended(2).says("error[UNREADABLE_FILE]");
    let error = project.run("ready --device nosuch --json").ended(2).json();
    assert_eq!(error["error"]["code"], "UNKNOWN_DEVICE");
}

#[test]
fn ready_prints_every_check() {
    let project = Project::with("locks: {attention: flash_attn.v9}\ngraph_strict_mode: true\n");
    assert_snapshot!(project.run(&format!("ready {}", on_h100())).ended(1).out);
}

#[test]
fn bench_resilience_puts_figures_beside_targets() {
    let project = Project::new(&[]);
    let json = project.run("bench resilience --json --batches 1 --batch-size 50").ended(0).json();
    for key in ["breaker_closed_ns", "record_call_ns"] {
        assert!(json[key].as_f64().is_some_and(|ns| ns > 0.0), "{json}");
    }
    assert!(json["hit_path"]["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{json}");
    assert_eq!(json["targets"], json!({"breaker_closed_ns": 10, "hit_path_ratio": 1.1}));
    let text = project.run("bench resilience --batches 1 --batch-size 50").ended(0).out;
    assert!(text.contains("10 ns") && text.contains("1.1×"), "{text}");
}
