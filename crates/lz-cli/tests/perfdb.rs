//! `layerzero perfdb`, driven as a user drives it.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use insta::assert_snapshot;
use lz_cli::Terminals;
use lz_cli::surroundings::Surroundings;
use lz_perfdb::{Filter, Key, Mode, Options, Outcome, PerfDb, Record, Timing};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory with a database, and a home that has none.
struct Place {
    folder: TempDir,
}

/// What a command line led to.
#[derive(Debug)]
struct Outcomes {
    code: i32,
    out: String,
    err: String,
}

impl Outcomes {
    fn ended(self, code: i32) -> Outcomes {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    fn says(self, text: &str) -> Outcomes {
        assert!(self.err.contains(text), "'{text}' in {self:?}");
        self
    }

    fn json(&self) -> Value {
        let value: Value = serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert_eq!(value["schema_version"], "1.0", "{self:?}");
        value
    }
}

impl Place {
    fn empty() -> Place {
        Place { folder: tempfile::tempdir().unwrap() }
    }

    fn with(rows: Vec<Record>) -> Place {
        let place = Place::empty();
        place.put("perfdb.sqlite", rows);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn put(&self, name: &str, rows: Vec<Record>) {
        PerfDb::open(self.path(name), Options::default()).put(rows).wait().unwrap();
    }

    fn rows(&self, name: &str) -> Vec<Record> {
        PerfDb::open(self.path(name), Options::default()).records(&Filter::all()).unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Runs a command on the database; where the directory is does not show in what it says.
    fn run(&self, line: &str) -> Outcomes {
        self.run_on("--db perfdb.sqlite", line)
    }

    fn run_on(&self, db: &str, line: &str) -> Outcomes {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let surroundings = Surroundings {
            environment: [("HOME".into(), self.path("home").to_str().unwrap().to_owned())].into(),
            directory: self.folder.path().to_owned(),
            ..Surroundings::default()
        };
        let words = format!("layerzero perfdb {line} {db}");
        let code = lz_cli::run_in(words.split_whitespace(), &mut out, &mut err, Terminals::default(), surroundings);
        let plain = |bytes| String::from_utf8(bytes).unwrap().replace(self.folder.path().to_str().unwrap(), "DIR");
        Outcomes { code, out: plain(out), err: plain(err) }
    }
}

const ATTENTION: &str = r#"{"op":"attention.gqa.prefill","tensors":{"key":{"dtype":"bfloat16","shape":[1,8,1024,128]},"query":{"dtype":"bfloat16","shape":[1,32,1024,128]},"value":{"dtype":"bfloat16","shape":[1,8,1024,128]}},"params":{"causal":true},"layout":"BHSD"}"#;

/// A row measured so many days ago.
fn row(kernel: &str, operation: &str, call: &str, days: i64, outcome: Outcome) -> Record {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
    let key = Key::new(kernel, operation, "GPU-1f2a", Mode::Eager, call);
    Record { measured_at: now - days * 86_400_000 - 1000, ..Record::new(key, outcome) }
}

fn timed(kernel: &str, median: f64) -> Record {
    let timing = Timing::new(median, median * 1.1, median / 100.0, 20);
    row(kernel, "attention.gqa.prefill", ATTENTION, 3, Outcome::Ok(timing))
}

fn measurements() -> Vec<Record> {
    vec![
        timed("flash_attn.v2.causal", 118.25),
        Record { baseline: true, ..timed("torch.sdpa", 140.5) },
        Record { invalid: Some("the driver was 570 and is 580".into()), ..timed("xformers.attention", 130.0) },
        row(
            "flashinfer.single_prefill",
            "attention.gqa.prefill",
            ATTENTION,
            40,
            Outcome::Failed { error: "no kernel image is available\nfor this device".into() },
        ),
        row(
            "other.attention",
            "attention.gqa.prefill",
            ATTENTION,
            3,
            Outcome::Wrong { error: "differs by 0.5".into() },
        ),
        row("liger.rms_norm", "norm.rms", "not a call", 90, Outcome::Ok(Timing::new(2.5, 3.0, 0.25, 7))),
    ]
}

#[test]
fn show_prints_calls_with_the_fastest_first() {
    let place = Place::with(measurements());
    assert_snapshot!(place.run("show").ended(0).out);
    assert_snapshot!(place.run("show --invalid --op attention").ended(0).out);
}

#[test]
fn show_takes_filters() {
    let place = Place::with(measurements());
    let shown = |flags: &str| {
        let json = place.run(&format!("show --json {flags}")).ended(0).json();
        json["rows"].as_array().unwrap().iter().map(|r| r["kernel_id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(shown("").len(), 5);
    assert_eq!(shown("--op rms_norm"), ["liger.rms_norm"]);
    assert_eq!(shown("--kernel flash*"), ["flash_attn.v2.causal", "flashinfer.single_prefill"]);
    assert_eq!(shown("--kernel torch.sdpa --device GPU-1f"), ["torch.sdpa"]);
    assert_eq!(shown("--device GPU-2"), [""; 0]);
    assert_eq!(shown("--invalid").len(), 6);
    place.run("show --op atention").ended(2).says("error[UNKNOWN_OPERATION]").says("did you mean 'attention'?");
    let text = place.run("show --limit 2").ended(0).out;
    assert!(text.ends_with("3 rows more; show them with --limit 5\n"), "{text}");
    let json = place.run("show --json --limit 2").ended(0).json();
    assert_eq!((&json["total"], json["rows"].as_array().unwrap().len()), (&json!(5), 2));
    assert_eq!(json["rows"][0]["median_us"], 118.25);
}

#[test]
fn without_a_database_there_is_nothing_to_show() {
    let place = Place::empty();
    assert_eq!(place.run("show").ended(0).out, "no measurements: 'DIR/perfdb.sqlite' does not exist\n");
    assert_eq!(place.run("show --json").ended(0).json()["rows"], json!([]));
    place.run("export").ended(2).says("'DIR/perfdb.sqlite' does not exist");
    place.run("verify").ended(2).says("'DIR/perfdb.sqlite' does not exist");
    assert_eq!(place.run("prune --invalid").ended(0).out, "0 rows removed, 0 left\n");
    assert!(!place.path("perfdb.sqlite").exists(), "looking makes none");
}

#[test]
fn the_database_is_the_one_of_the_configuration() {
    let place = Place::empty();
    fs::create_dir_all(place.path("home/.cache/layerzero")).unwrap();
    place.put("home/.cache/layerzero/perfdb.sqlite", measurements());
    place.put("elsewhere.sqlite", measurements()[..1].to_vec());
    let total = |db: &str| place.run_on(db, "show --json").ended(0).json()["total"].clone();
    assert_eq!(total(""), 5);
    place.write("layerzero.yaml", "perfdb: {path: elsewhere.sqlite}\n");
    assert_eq!(total(""), 1);
    assert_eq!(total("--db home/.cache/layerzero/perfdb.sqlite"), 5, "the option stands above it");
    place.write("layerzero.yaml", "perfdb: {pth: x}\n");
    place.run_on("", "show").ended(3).says("did you mean 'path'?");
    assert_eq!(total("--db elsewhere.sqlite"), 1, "a named database needs no configuration");
}

#[test]
fn what_is_exported_can_be_imported() {
    let place = Place::with(measurements());
    let rows = place.rows("perfdb.sqlite");
    for (file, flags) in [("rows.jsonl", ""), ("rows.csv", ""), ("rows.txt", "--format csv")] {
        let said = place.run(&format!("export {flags} -o {file}")).ended(0).out;
        assert_eq!(said, format!("6 rows written to 'DIR/{file}'\n"));
        let said = place.run_on(&format!("--db {file}.sqlite"), &format!("import {flags} {file}")).ended(0).out;
        assert_eq!(said, "imported: 6 rows new, 0 better than before, 0 not\n");
        assert_eq!(place.rows(&format!("{file}.sqlite")), rows);
        let text = fs::read_to_string(place.path(file)).unwrap();
        let format = if file.ends_with("jsonl") { "jsonl" } else { "csv" };
        assert_eq!(place.run(&format!("export --format {format}")).ended(0).out, text, "and to standard output");
    }
    let part = place.run("export --op rms_norm --format csv").ended(0).out;
    assert!(part.lines().count() == 2 && part.contains("liger.rms_norm"), "{part}");
    let json = place.run("import rows.jsonl --json").ended(0).json();
    assert_eq!(json, json!({"schema_version": "1.0", "added": 0, "replaced": 6, "kept": 0, "skipped": 0}));
    let json = place.run("export -o again.jsonl --json").ended(0).json();
    assert_eq!((&json["rows"], &json["file"]), (&json!(6), &json!("DIR/again.jsonl")));
    place.run("export -o nowhere/rows.csv").ended(4).says("error[OUTPUT_FAILED]");
    place.run("export --format xml").ended(2).says("invalid value 'xml'");
}

#[test]
fn a_file_with_a_mistake_is_refused_as_a_whole() {
    let place = Place::with(measurements()[..1].to_vec());
    place.run("export -o rows.jsonl").ended(0);
    let text = fs::read_to_string(place.path("rows.jsonl")).unwrap();
    place.write("bad.jsonl", &format!("{text}{}", text.replace("\"samples\":20", "\"samples\":0")));
    place.write("old.jsonl", &text.replace("\"schema_version\":4", "\"schema_version\":1"));
    let refused = place.run_on("--db new.sqlite", "import bad.jsonl").ended(2);
    refused
        .says("error[BAD_ARGUMENT]: bad.jsonl: line 2: samples is 0; a time needs at least one")
        .says("hint: nothing of the file was taken; put it right");
    place.run("import old.jsonl").ended(2).says("old.jsonl: line 1: schema_version is 1, this version reads 2");
    place.run("import missing.jsonl").ended(3).says("error[UNREADABLE_FILE]: cannot read 'missing.jsonl'");
    assert!(!place.path("new.sqlite").exists());
    let error = place.run("import bad.jsonl --json").ended(2).json();
    assert_eq!(error["error"]["code"], "BAD_ARGUMENT");
}

#[test]
fn merging_keeps_what_has_more_behind_it() {
    let place = Place::with(vec![timed("a", 10.0), timed("b", 10.0)]);
    let with = |kernel: &str, samples: u32| {
        row(kernel, "attention.gqa.prefill", ATTENTION, 1, Outcome::Ok(Timing::new(9.0, 9.5, 0.09, samples)))
    };
    place.put("other.sqlite", vec![with("a", 40), with("b", 2), with("c", 1)]);
    place.put("third.sqlite", vec![with("d", 1)]);
    place.run_on("--db third.sqlite", "export -o third.csv").ended(0);
    let before = fs::read(place.path("other.sqlite")).unwrap();
    let said = place.run("merge other.sqlite third.csv").ended(0).out;
    assert_eq!(said, "merged: 2 rows new, 1 better than before, 1 not\n");
    let medians: Vec<f64> = place.rows("perfdb.sqlite").iter().map(|r| r.outcome.timing().unwrap().median_us).collect();
    assert_eq!(medians, [9.0, 10.0, 9.0, 9.0]);
    assert_eq!(fs::read(place.path("other.sqlite")).unwrap(), before);
    place.run("merge missing.sqlite").ended(3).says("cannot read 'DIR/missing.sqlite'");
    place.write("text", "no rows\n");
    place.run("merge text").ended(2).says("DIR/text: line 1: is no JSON object");
    place.run("merge").ended(2).says("<FILE>");
}

#[test]
fn pruning_removes_what_is_named() {
    let place = Place::with(measurements());
    place.run("prune").ended(2).says("--older-than");
    for (age, says) in
        [("30", "'30' is no age"), ("d", "no age"), ("30y", "no age"), ("-1d", ""), ("9999999999999999w", "no age")]
    {
        place.run(&format!("prune --older-than {age}")).ended(2).says(says);
    }
    assert_eq!(place.run("prune --older-than 8w").ended(0).out, "1 row removed, 5 left\n");
    assert_eq!(place.run("prune --older-than 30d --invalid").ended(0).out, "2 rows removed, 3 left\n");
    let json = place.run("prune --keep 1 --json").ended(0).json();
    assert_eq!((&json["removed"], &json["left"]), (&json!(2), &json!(1)));
}

#[test]
fn verify_finds_damage_and_prune_removes_it() {
    let place = Place::with(measurements());
    assert_eq!(place.run("verify").ended(0).out, "'DIR/perfdb.sqlite': 6 rows, no damage\n");
    let bytes = fs::read(place.path("perfdb.sqlite")).unwrap();
    let needle = b"differs by 0.5";
    let at = bytes.windows(needle.len()).position(|window| window == needle).unwrap();
    let mut damaged = bytes.clone();
    damaged[at] = b'D';
    fs::write(place.path("perfdb.sqlite"), damaged).unwrap();
    assert_snapshot!(place.run("verify").ended(1).out);
    let json = place.run("verify --json").ended(1).json();
    assert_eq!((&json["rows"], json["damaged"].as_array().unwrap().len()), (&json!(6), 1));
    let shown = place.run("show --json").ended(0);
    assert_eq!(shown.json()["total"], 4);
    shown.says("warning: 'DIR/perfdb.sqlite' has rows that are not as they were written; they are left out");
    assert_eq!(place.run("prune --damaged").ended(0).out, "1 row removed, 5 left\n");
    place.run("verify").ended(0);

    // Looking at a file whose header is damaged changes nothing; writing sets it aside.
    let mut headless = bytes;
    headless[..60].fill(0x55);
    fs::write(place.path("perfdb.sqlite"), &headless).unwrap();
    assert_snapshot!(place.run("verify").ended(1).out);
    place.run("show").ended(2).says("'DIR/perfdb.sqlite' is damaged: its header is damaged");
    assert_eq!(fs::read(place.path("perfdb.sqlite")).unwrap(), headless);
    place.run("prune --invalid").ended(0).says("warning: the measurements were damaged (its header is damaged)");
    place.run("verify").ended(0);

    // A file that is somebody else's is left alone by every command.
    fs::write(place.path("perfdb.sqlite"), "no database").unwrap();
    for command in ["verify", "show", "prune --invalid", "import rows.jsonl", "export -o rows.jsonl"] {
        place.write("rows.jsonl", "");
        place.run(command).ended(2).says("'DIR/perfdb.sqlite' is no LayerZero database (a file of 11 bytes");
        assert_eq!(fs::read(place.path("perfdb.sqlite")).unwrap(), b"no database");
    }
}

/// Two kernels at six sizes of which one is the faster of small ones. At one size the other was, by an accident of measuring:
/// those around it know nothing of that.
fn two_kernels() -> Place {
    let call =
        |rows: i64| format!(r#"{{"op":"norm.rms","tensors":{{"input":{{"dtype":"float32","shape":[{rows},1024]}}}}}}"#);
    let of = |rows: i64| {
        let (plain, other) = (10.0 + 0.01 * rows as f64, 5.0 + 0.02 * rows as f64);
        let times = [("lib.plain", plain), ("lib.other", if rows == 1024 { 12.0 } else { other })];
        times.map(|(id, us)| {
            let timed = Outcome::Ok(Timing::new(us, us * 1.1, us / 100.0, 20));
            let mut row = row(id, "norm.rms", &call(rows), 1, timed);
            (row.baseline, row.shape.sm_version) = (id == "lib.plain", 90);
            row
        })
    };
    let place = Place::with([64, 128, 256, 512, 1024, 2048].into_iter().flat_map(of).collect());
    let kernel = |id: &str, baseline: bool| {
        let dtypes = ["float32"];
        json!({"kernel_id": id, "dtypes": dtypes, "requires_layouts": ["strided"], "min_sm": null, "priority": 50, "baseline": baseline})
    };
    let document = json!({
        "schema_version": "1.0", "backend": "lib", "backend_version": "1", "platform": "cuda", "import_name": "lib",
        "plugin_origin": "builtin", "requires": ["nowhere>=9"],
        "ops": {"norm.rms": [kernel("lib.plain", true), kernel("lib.other", false)]},
    });
    place.write("lib.json", &document.to_string());
    place
}

#[test]
fn cross_validation_decides_every_call_by_the_others() {
    let place = two_kernels();
    let line = format!("cross-validate --device h100 --capabilities {}", place.path("lib.json").display());
    let json = place.run(&format!("{line} --json")).ended(0).json();
    let modes = json["modes"].as_array().unwrap();
    assert_eq!(modes.len(), 1, "{json}");
    let eager = &modes[0];
    // The least and the largest are beyond the others, but not far.
    assert_eq!((&eager["mode"], &eager["left"]), (&json!("eager"), &json!(0)));
    let rows = eager["rows"].as_array().unwrap();
    let of = |rows: i64| rows_of(&eager["rows"], rows);
    assert_eq!(rows.len(), 6, "{eager}");
    assert_eq!((&of(128)["chosen"], &of(128)["best"]), (&json!("lib.other"), &json!("lib.other")));
    let worst = of(1024);
    assert_eq!((&worst["chosen"], &worst["best"]), (&json!("lib.plain"), &json!("lib.other")));
    let close = |value: &Value, expected: f64| assert!((value.as_f64().unwrap() - expected).abs() < 1e-9, "{value}");
    close(&worst["over_best"], 20.24 / 12.0);
    close(&worst["times_baseline"], 1.0);
    close(&eager["worst"], 20.24 / 12.0);
    assert_snapshot!(place.run(&format!("{line} --limit 1")).ended(0).out);
}

/// Where a whole model is left out, the calls that have its width are decided by those of other widths alone.
#[test]
fn cross_validation_can_leave_out_a_model() {
    let place = two_kernels();
    let line = format!(
        "cross-validate --leave-out model --json --device h100 --capabilities {}",
        place.path("lib.json").display()
    );
    let one_width = place.run(&line).ended(0).json();
    assert_eq!(
        (&one_width["modes"][0]["left"], one_width["modes"][0]["rows"].as_array().unwrap().len()),
        (&json!(6), 0)
    );
    let wider = place.rows("perfdb.sqlite").into_iter().map(|mut row| {
        row.key.call = row.key.call.replace(",1024]", ",2048]");
        row
    });
    place.put("perfdb.sqlite", wider.collect());
    let two_widths = place.run(&line).ended(0).json();
    assert_eq!(
        (&two_widths["modes"][0]["left"], two_widths["modes"][0]["rows"].as_array().unwrap().len()),
        (&json!(0), 12)
    );
}

/// A kernel that was wrong at one call serves none like it, and is nowhere the best; where it would have been chosen if that call
/// had not been looked at, that is said.
#[test]
fn cross_validation_takes_no_wrong_kernel_for_the_best() {
    let place = two_kernels();
    let wrong = |rows: i64| {
        let rows = place.rows("perfdb.sqlite").into_iter().filter(|r| r.key.call.contains(&format!("[{rows},1024]")));
        let other = rows.into_iter().find(|r| r.key.kernel_id == "lib.other").unwrap();
        Record { outcome: Outcome::Wrong { error: "differs by 0.5".into() }, ..other }
    };
    place.put("perfdb.sqlite", vec![wrong(128)]);
    let line = format!("cross-validate --device h100 --capabilities {}", place.path("lib.json").display());
    let eager = place.run(&format!("{line} --json")).ended(0).json()["modes"][0].clone();
    let rows = eager["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["best"] == "lib.plain" && row["chosen"] == "lib.plain"), "{eager}");
    assert_eq!(eager["impossible"].as_array().unwrap().len(), 1, "{eager}");
    let shown = place.run(&line).ended(0).out;
    assert!(shown.contains("left out: norm.rms 128×1024 float32: lib.other would be chosen"), "{shown}");
}

/// Rows of other devices are no concern of the one that is asked about, and kernels nobody knows are counted.
#[test]
fn cross_validation_keeps_devices_apart() {
    let place = two_kernels();
    let line = format!("cross-validate --device h100 --capabilities {} --json", place.path("lib.json").display());
    let before = place.run(&line).ended(0).json();
    let rows = place.rows("perfdb.sqlite");
    let on = |row: &Record, device: &str, sm_version: u32| {
        let mut row = row.clone();
        row.key.device_id = device.into();
        row.shape.sm_version = sm_version;
        row
    };
    let stranger = |row: &Record| {
        let mut row = row.clone();
        row.key.kernel_id = "nobody.knows".into();
        row
    };
    place.put("perfdb.sqlite", rows.iter().map(|row| on(row, "cpu", 0)).chain([stranger(&rows[0])]).collect());
    let after = place.run(&line).ended(0).json();
    assert_eq!((&before["modes"], &before["unknown"]), (&after["modes"], &json!(0)));
    assert_eq!(after["unknown"], json!(1));
    // Another one of the kind counts, by itself.
    place.put("perfdb.sqlite", rows.iter().map(|row| on(row, "GPU-other", 90)).collect());
    let both = place.run(&line).ended(0).json();
    assert_eq!(both["modes"][0]["rows"].as_array().unwrap().len(), 12);
    assert_eq!(both["modes"][0]["geomean"], before["modes"][0]["geomean"]);
}

/// On this machine, what was measured with another version of a kernel is out of date.
#[test]
fn cross_validation_goes_by_what_is_current() {
    let place = two_kernels();
    let here = layerzero::perf::device_id(&lz_hardware::detect_cpu());
    let document = fs::read_to_string(place.path("lib.json")).unwrap().replace("\"cuda\"", "\"cpu\"");
    place.write("lib.json", &document.replace("[\"nowhere>=9\"]", "[]"));
    let rows = place.rows("perfdb.sqlite").into_iter().map(|mut row| {
        row.key.device_id = here.clone();
        let version = if row.key.kernel_id == "lib.other" { "0.9" } else { "1" };
        row.provenance.kernel_version = Some(version.into());
        row
    });
    place.put("here.sqlite", rows.collect());
    let line = format!("cross-validate --capabilities {} --json", place.path("lib.json").display());
    let json = place.run_on("--db here.sqlite", &line).ended(0).json();
    assert_eq!((&json["outdated"], &json["unknown"]), (&json!(6), &json!(0)), "{json}");
    let rows = json["modes"][0]["rows"].as_array().unwrap();
    assert!(rows.len() == 6 && rows.iter().all(|row| row["best"] == "lib.plain"), "{json}");
}

#[test]
fn cross_validation_says_so_where_there_is_nothing() {
    let place = two_kernels();
    let mut rows = place.rows("perfdb.sqlite");
    rows.truncate(2);
    place.put("one.sqlite", rows);
    let line = format!("cross-validate --device h100 --capabilities {}", place.path("lib.json").display());
    let one = place.run_on("--db one.sqlite", &line).ended(0).out;
    assert_eq!(one, "\neager: 0 calls decided by others, 1 that cannot be\n");
    place.put("none.sqlite", vec![]);
    let none = place.run_on("--db none.sqlite", &line).ended(0).out;
    assert_eq!(none, "'DIR/none.sqlite' has no measurements of 'h100' that count\n");
}

fn rows_of(rows: &Value, size: i64) -> &Value {
    let is_of = |row: &&Value| row["call"]["tensors"]["input"]["shape"][0] == size;
    rows.as_array().unwrap().iter().find(is_of).unwrap_or_else(|| panic!("{size} in {rows}"))
}

#[test]
fn cross_validation_says_what_it_cannot_do() {
    let place = two_kernels();
    let elsewhere =
        place.run(&format!("cross-validate --capabilities {}", place.path("lib.json").display())).ended(0).out;
    assert!(
        elsewhere.contains("no measurements of this machine") && elsewhere.contains("--device h200"),
        "{elsewhere}"
    );
    place
        .run_on("--db nothing.sqlite", "cross-validate")
        .ended(2)
        .says("there is no performance database at 'DIR/nothing.sqlite'");
    assert!(!place.path("nothing.sqlite").exists(), "looking makes none");
    place.run("cross-validate --device h10").ended(2).says("h100");
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let place = Place::with(measurements());
    let mut newer = fs::read(place.path("perfdb.sqlite")).unwrap();
    newer[60..64].copy_from_slice(&[0, 0, 0, 9]);
    fs::write(place.path("perfdb.sqlite"), &newer).unwrap();
    for line in ["show", "export", "verify", "prune --invalid", "merge perfdb.sqlite"] {
        place.run(line).ended(2).says("'DIR/perfdb.sqlite' is of version 9, this LayerZero knows up to 4");
    }
    assert_eq!(fs::read(place.path("perfdb.sqlite")).unwrap(), newer);
    place.write("file", "");
    place.run_on("--db file/perfdb.sqlite", "merge perfdb.sqlite").ended(2).says("cannot be made");
}

/// A prior is made of several runs, and can be looked at; what ships can be too.
#[test]
fn priors_are_built_and_shown() {
    let place = two_kernels();
    let slower = place.rows("perfdb.sqlite").into_iter().map(|mut row| {
        if let Outcome::Ok(timing) = &mut row.outcome {
            timing.median_us *= 3.0;
            timing.p95_us *= 3.0;
        }
        row
    });
    place.put("second.sqlite", slower.collect());
    place.put("third.sqlite", place.rows("perfdb.sqlite"));
    let files = "perfdb.sqlite second.sqlite third.sqlite";
    let line =
        format!("prior build {files} --device h100 --capabilities {} -o mine.json", place.path("lib.json").display());
    let said = place.run(&line).ended(0).out;
    assert!(said.starts_with("12 times of 6 calls written to "), "{said}");
    let shown = place.run("prior show mine.json --json").ended(0).json();
    assert_eq!((&shown["summary"]["runs"], &shown["summary"]["calls"]), (&json!(3), &json!(6)), "{shown}");
    let of = |rows: i64| {
        let is_it = |call: &&Value| call["call"].as_str().unwrap().contains(&format!(" {rows}×1024"));
        shown["calls"].as_array().unwrap().iter().find(is_it).unwrap().clone()
    };
    // The median over the runs: the slow one counts for nothing.
    assert_eq!((&of(128)["fastest"], &of(128)["fastest_us"]), (&json!("lib.other"), &json!(7.56)));
    assert_eq!((&of(128)["baseline"], &of(128)["baseline_us"]), (&json!("lib.plain"), &json!(11.28)));
    assert!(place.run("prior show").ended(0).out.contains("nvidia-h200"));
    assert!(place.run("prior show nvidia-h200 --limit 3").ended(0).out.contains("more; show them with --limit"));

    place.run("prior show nobody").ended(2).says("'nobody' is no prior that ships, and cannot be read as a file");
    place.write("broken.json", "{}");
    place.run("prior show broken.json").ended(2).says("not a prior of LayerZero");
    let nothing =
        format!("prior build second.sqlite --device a100 --capabilities {}", place.path("lib.json").display());
    place.run(&nothing).ended(2).says("none of these measurements is of this device");
}

#[test]
fn the_help() {
    assert_snapshot!(Place::empty().run_on("", "--help").ended(0).out);
    assert_snapshot!(Place::empty().run_on("", "merge --help").ended(0).out);
}
