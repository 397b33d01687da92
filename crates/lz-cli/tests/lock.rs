//! Locking and solving, as an operator does it.

use std::fs;
use std::path::Path;

use insta::assert_snapshot;
use serde_json::{Value, json};
use support::{Outcome, fixture, layerzero_in, on_h100};
use tempfile::TempDir;

#[path = "suite/support.rs"]
#[allow(dead_code)] // the other suite uses the rest of it
mod support;

fn attention(batch: i64, seq: i64) -> Value {
    let tensor = |heads: i64| json!({"dtype": "bfloat16", "shape": [batch, seq, heads, 128]});
    json!({"op": "attention", "tensors": {"query": tensor(32), "key": tensor(8), "value": tensor(8)}, "layout": "BSHD"})
}

fn norm(rows: i64) -> Value {
    let tensor = |shape: Value| json!({"dtype": "bfloat16", "shape": shape});
    json!({"op": "rms_norm", "tensors": {"x": tensor(json!([rows, 4096])), "weight": tensor(json!([4096]))}})
}

/// A directory, and calls in it.
struct Project {
    folder: TempDir,
    environment: Vec<(&'static str, String)>,
}

impl Project {
    fn new(calls: &[Value]) -> Project {
        let project = Project { folder: tempfile::tempdir().unwrap(), environment: Vec::new() };
        let lines: Vec<String> = calls.iter().map(Value::to_string).collect();
        project.write("calls.jsonl", &(lines.join("\n\n") + "\n"));
        project
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.path().join(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap()
    }

    /// Runs a command line; where the directory is does not show in what it says.
    fn run(&self, line: &str) -> Outcome {
        let environment: Vec<(&str, &str)> = self.environment.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let words: Vec<&str> = line.split_whitespace().collect();
        let outcome = layerzero_in(self.folder.path(), &environment, &words);
        let path = self.folder.path().to_str().unwrap();
        let plain = |text: &str| text.replace(path, "DIR");
        Outcome { out: plain(&outcome.out), err: plain(&outcome.err), ..outcome }
    }

    fn on_h100(&self, line: &str) -> Outcome {
        self.run(&format!("{line} {}", on_h100()))
    }

    fn lock(&self) -> Outcome {
        self.on_h100("lock --calls calls.jsonl").ended(0)
    }
}

// --- lock --------------------------------------------------------------------------------------

#[test]
fn lock_writes_a_file_to_be_read_and_replayed() {
    let project = Project::new(&[attention(1, 1024), norm(1024)]);
    let said = project.lock();
    assert_eq!(said.out, "layerzero.lock: 2 decisions (1 declared, 1 prior)\n");
    assert_snapshot!(project.read("layerzero.lock"));
    assert_eq!(project.on_h100("lock --calls calls.jsonl -o -").ended(0).out, project.read("layerzero.lock"));
    let json = project.on_h100("lock --calls calls.jsonl -o other.lock --json").ended(0).json();
    assert_eq!(json["output"], json!(project.path("other.lock").replace(&project.path(""), "DIR/")));
    assert_eq!(json["entries"][0]["kernel"], "flash_attn.v2.causal");
    assert_eq!(project.read("other.lock"), project.read("layerzero.lock"));
    let left: Vec<String> = names(project.folder.path());
    assert_eq!(left, ["calls.jsonl", "layerzero.lock", "other.lock"], "nothing else is left behind");
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_was_locked_is_in_force() {
    let mut project = Project::new(&[attention(1, 1024)]);
    project.lock();
    let text = project.read("layerzero.lock");
    let text = text.replace("flash_attn.v2.causal", "flashinfer.single_prefill");
    project.write("layerzero.lock", &text.lines().filter(|l| !l.starts_with("version")).collect::<Vec<_>>().join("\n"));
    let call = "--op attention --dtype bf16 --shape query=1x1024x32x128 --shape key=1x1024x8x128 --shape \
                value=1x1024x8x128 --layout BSHD";
    let chosen = |project: &Project| {
        project.on_h100(&format!("select {call} --json")).ended(0).json()["kernel_id"].as_str().unwrap().to_owned()
    };
    assert_eq!(chosen(&project), "flash_attn.v2.causal");
    project.environment.push(("LAYERZERO_LOCKFILE", project.path("layerzero.lock")));
    assert_eq!(chosen(&project), "flashinfer.single_prefill");
    let text = project.on_h100(&format!("explain {call}")).ended(0).out;
    assert!(text.contains("flashinfer.single_prefill (pinned by lockfile DIR/layerzero.lock)"), "{text}");
    // To lock anew is to decide anew.
    let json = project.on_h100("lock --calls calls.jsonl --json -o -").ended(0).json();
    assert_eq!(json["entries"][0]["kernel"], "flash_attn.v2.causal");
}

#[test]
fn a_lockfile_that_is_configured_and_not_there_yet_can_be_made() {
    let project = Project::new(&[norm(8)]);
    project.write("layerzero.yaml", "lockfile: layerzero.lock\ndispatch_table: t.json\n");
    project.on_h100("kernels").ended(3).says("layerzero.lock' cannot be read");
    project.on_h100("lock --calls calls.jsonl").ended(3).says("t.json' cannot be read");
    project.on_h100("solve --calls calls.jsonl --buckets rows=8 -o t.json").ended(0);
    project.lock();
    project.on_h100("kernels").ended(0);
}

#[test]
fn check_says_which_decisions_cannot_be_kept() {
    let project = Project::new(&[attention(1, 1024), attention(1, 2048), norm(1024)]);
    project.lock();
    let good = project.on_h100("lock --check layerzero.lock").ended(0);
    assert_eq!(good.out, "lockfile layerzero.lock: 3 decisions can be kept\n");
    let text = project.read("layerzero.lock").replace("\"liger.rms_norm\"", "\"liger.rms_nrm\"");
    project.write("layerzero.lock", &text.replacen("version = \"2.5.6\"", "version = \"2.5.5\"", 1));
    let bad = project.on_h100("lock --check layerzero.lock").ended(1);
    assert_snapshot!(bad.out);
    let json = project.on_h100("lock --check layerzero.lock --json").ended(1).json();
    let codes: Vec<&Value> = json["mismatches"].as_array().unwrap().iter().map(|m| &m["code"]).collect();
    assert_eq!(codes, ["VERSION_CHANGED", "KERNEL_GONE"]);
    assert_eq!((&json["entries"], &json["in_force"]), (&json!(3), &json!(1)));
    let elsewhere = project.run("lock --check layerzero.lock --device a100").ended(1);
    assert!(elsewhere.out.contains("0 of 3 decisions can be kept"), "{}", elsewhere.out);
    assert_eq!(elsewhere.out.matches("[OTHER_DEVICE]").count(), 3, "{}", elsewhere.out);
}

#[test]
fn mismatches_are_warned_of_by_every_command_and_by_ready() {
    let mut project = Project::new(&[norm(1024)]);
    project.lock();
    project.write("layerzero.lock", &project.read("layerzero.lock").replace("liger.rms_norm", "gone.rms_norm"));
    project.environment.push(("LAYERZERO_LOCKFILE", project.path("layerzero.lock")));
    let told = "warning: lockfile DIR/layerzero.lock: 1 of 1 decisions are not in force: [KERNEL_GONE] call 1";
    project.on_h100("select --op rms_norm --dtype bf16 --shape x=8x4096 --shape weight=4096").ended(0).says(told);
    let checks = project.on_h100("ready --json").json()["checks"].clone();
    let check = checks.as_array().unwrap().iter().find(|c| c["name"] == "lockfile").unwrap().clone();
    assert_eq!(check["status"], "warn");
    assert!(check["hint"].as_str().unwrap().contains("layerzero lock"), "{check}");
}

#[test]
fn what_is_wrong_with_a_lockfile_is_told_with_its_line() {
    let project = Project::new(&[norm(8)]);
    project.lock();
    project.write("layerzero.lock", &project.read("layerzero.lock").replace("kernel = ", "kernl = "));
    let bad = project.on_h100("lock --check layerzero.lock").ended(3);
    let bad = bad.says("error[INVALID_DOCUMENT]: lockfile 'layerzero.lock': line ");
    bad.says("unknown key 'kernl' in a block; did you mean 'kernel'?");
    let bad = project.on_h100("lock --check nowhere.lock").ended(3);
    bad.says("cannot be read: No such file").says("hint: write it anew with 'layerzero lock'");
    let json = project.on_h100("lock --check nowhere.lock --json").ended(3).json();
    assert_eq!(json["error"]["code"], "INVALID_DOCUMENT");
    // In force it would be no configuration.
    let mut project = project;
    project.environment.push(("LAYERZERO_LOCKFILE", project.path("layerzero.lock")));
    let refused = project.on_h100("kernels").ended(3);
    refused.says("environment variable LAYERZERO_LOCKFILE: lockfile: 'DIR/layerzero.lock', line ");
}

#[test]
fn calls_that_cannot_be_locked_are_refused_by_number() {
    let project = Project::new(&[norm(8), json!({"op": "rms_nrm", "tensors": {}})]);
    let bad = project.on_h100("lock --calls calls.jsonl").ended(2);
    bad.says("call 2 of 'calls.jsonl': unknown operation 'rms_nrm'; did you mean 'rms_norm'?");
    assert!(!project.folder.path().join("layerzero.lock").exists(), "nothing is written");
    let unserved = json!({"op": "layer_norm", "tensors": {"x": {"dtype": "bfloat16", "shape": [8, 64]}}});
    let project = Project::new(&[unserved]);
    project.on_h100("lock --calls calls.jsonl").ended(2).says("call 1 of 'calls.jsonl': no kernel available");
    let project = Project::new(&[]);
    project.on_h100("lock --calls calls.jsonl").ended(2).says("there is no call in 'calls.jsonl'");
    project.on_h100("lock").ended(2).says("no call was measured or made on this machine so far");
    project.write("calls.jsonl", "{\"op\": 5}\n");
    project.on_h100("lock --calls calls.jsonl").ended(2).says("calls.jsonl, line 1: no call");
    project.on_h100("lock --calls nowhere.jsonl").ended(3).says("error[UNREADABLE_FILE]");
    project.on_h100("lock --calls a --check b").ended(2).says("cannot be used with");
    let project = Project::new(&[norm(8)]);
    project.on_h100("lock --calls calls.jsonl -o nowhere/x.lock").ended(4).says("nowhere/x.lock': No such file");
}

// --- solve -------------------------------------------------------------------------------------

const BUCKETS: &str = "--buckets seq_len=128,512,2048 batch=1,4 rows=512,8192";

#[test]
fn solve_writes_a_table_by_buckets() {
    let project = Project::new(&[attention(1, 512), attention(4, 2000), norm(2000), norm(500)]);
    let said = project.on_h100(&format!("solve --calls calls.jsonl {BUCKETS} --model llama -o t.json")).ended(0);
    assert_snapshot!(said.out);
    assert_snapshot!(project.read("t.json"));
    let printed = project.on_h100(&format!("solve --calls calls.jsonl {BUCKETS} --model llama -o -")).ended(0);
    assert_eq!(printed.out, project.read("t.json"));
    let json = project.on_h100(&format!("solve --calls calls.jsonl {BUCKETS} -o t2.json --json")).ended(0).json();
    assert_eq!(json["table"]["plans"].as_array().unwrap().len(), 4);
    assert_eq!(json["disagreements"], json!([]));
}

#[test]
fn a_table_is_in_force_within_its_buckets() {
    let mut project = Project::new(&[attention(1, 512)]);
    project.on_h100(&format!("solve --calls calls.jsonl {BUCKETS} -o t.json")).ended(0);
    let text = project.read("t.json").replace("flash_attn.v2.causal", "flashinfer.single_prefill");
    let text: Vec<&str> = text.lines().filter(|l| !l.contains("\"version\"")).collect();
    project.write("t.json", &text.join("\n"));
    project.environment.push(("LAYERZERO_DISPATCH_TABLE", project.path("t.json")));
    let explain = |seq: i64| {
        let shapes =
            format!("--shape query=1x{seq}x32x128 --shape key=1x{seq}x8x128 --shape value=1x{seq}x8x128 --layout BSHD");
        project.on_h100(&format!("explain --op attention --dtype bf16 {shapes}")).ended(0).out
    };
    assert!(explain(300).contains("chosen   flashinfer.single_prefill (pinned by dispatch table DIR/t.json)"));
    let outside = explain(4096);
    assert!(outside.contains("chosen   flash_attn.v2.causal (highest score"), "{outside}");
    let told =
        "table    says nothing: [PLAN_BUCKET_MISS] seq_q = 4096 lies outside the table's buckets; selected at run time";
    assert!(outside.contains(told), "{outside}");
}

#[test]
fn what_does_not_fit_is_told() {
    let project = Project::new(&[attention(1, 4096), attention(1, 512)]);
    let said = project.on_h100(&format!("solve --calls calls.jsonl {BUCKETS} -o t.json")).ended(0);
    let said = said.says("warning: selected at run time: {\"op\":\"attention\"");
    said.says("seq_q = 4096 lies outside the table's buckets");
    let bad = |flags: &str, told: &str| {
        project.on_h100(&format!("solve --calls calls.jsonl -o x.json {flags}")).ended(2).says(told);
    };
    bad("", "--buckets");
    bad("--buckets seq_len", "expected NAME=VALUE");
    bad("--buckets seq_len=a", "'a' is no whole number");
    bad("--buckets seq_len=512,128", "seq_len: 128 follows 512");
    bad("--buckets seq_length=512", "no operation has a size 'seq_length' that varies; did you mean 'seq_len");
    bad("--buckets seq_len=512 seq_len=128", "--buckets seq_len was given twice");
    assert!(!project.folder.path().join("x.json").exists());
}

#[test]
fn check_says_whether_a_table_can_be_kept() {
    let project = Project::new(&[attention(1, 512), norm(500)]);
    project.on_h100(&format!("solve --calls calls.jsonl {BUCKETS} -o t.json")).ended(0);
    let good = project.on_h100("solve --check t.json").ended(0);
    assert_eq!(good.out, "dispatch table t.json: 2 decisions can be kept\n");
    let elsewhere = project.run("solve --check t.json --device a100").ended(1);
    assert_snapshot!(elsewhere.out);
    // Another document of a library: the table is not to be trusted.
    let changed = fs::read_to_string(fixture("liger.json")).unwrap().replacen("\"priority\"", " \"priority\"", 1);
    let changed = changed.replacen("\"deterministic\": true", "\"deterministic\": false", 1);
    project.write("liger.json", &changed);
    let others = ["flash_attn.json", "flashinfer.json"].map(|f| format!("--capabilities {}", fixture(f))).join(" ");
    let line = format!("solve --check t.json --device h100 {others} --capabilities {}", project.path("liger.json"));
    let changed = project.run(&line).ended(1);
    assert!(
        changed.out.contains("refused as a whole\n  [CAPABILITIES_CHANGED] the capabilities of liger"),
        "{}",
        changed.out
    );
    let json = project.run("solve --check t.json --device a100 --json").ended(1).json();
    assert_eq!((&json["refused"], &json["mismatches"][0]["code"]), (&json!(true), &json!("OTHER_DEVICE")));
    project.write("bad.json", &project.read("t.json").replace("\"plans\"", "\"plan\""));
    project.on_h100("solve --check bad.json").ended(3).says("did you mean 'plans'?");
}

#[test]
fn the_schema_of_tables_is_the_one_in_the_repository() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../schemas/dispatch-table-1.0.schema.json");
    let project = Project::new(&[]);
    project.run(&format!("schema dispatch-table --check {}", file.display())).ended(0);
}

#[test]
fn the_help_says_how() {
    let project = Project::new(&[]);
    assert_snapshot!(project.run("lock --help").ended(0).out);
    assert_snapshot!(project.run("solve --help").ended(0).out);
}
