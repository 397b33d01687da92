//! `layerzero report`, driven as a user drives it.

use std::fs;
use std::path::PathBuf;

use layerzero::perf::device_id;
use lz_cli::Terminals;
use lz_cli::surroundings::Surroundings;
use lz_model::{CallSpec, DType};
use lz_perfdb::{Key, Mode, Options, Outcome, PerfDb, Provenance, Record, Timing};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory with a database.
struct Place(TempDir);

/// What a command line led to.
#[derive(Debug)]
struct Answer {
    code: i32,
    out: String,
    err: String,
}

impl Answer {
    fn ended(self, code: i32) -> Answer {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    fn json(&self) -> Value {
        let value: Value = serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert_eq!(value["schema_version"], "1.0", "{self:?}");
        value
    }
}

impl Place {
    fn with(rows: Vec<Record>) -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        PerfDb::open(place.path("perfdb.sqlite"), Options::default()).put(rows).wait().unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, line: &str) -> Answer {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let directory = self.0.path().to_owned();
        let surroundings = Surroundings { environment: Default::default(), directory, ..Surroundings::default() };
        let words = ["layerzero", "report"].into_iter().chain(line.split_whitespace());
        let code = lz_cli::run_in(words, &mut out, &mut err, Terminals::default(), surroundings);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Answer { code, out: text(out), err: text(err) }
    }
}

fn call(rows: i64) -> CallSpec {
    CallSpec::new("norm.rms").tensor("input", DType::F32, &[rows, 64])
}

fn row(kernel: &str, device: &str, rows: i64, us: Option<f64>) -> Record {
    let outcome = match us {
        Some(us) => Outcome::Ok(Timing::new(us, us * 1.1, us * 0.01, 12)),
        None => Outcome::Wrong { error: "differs <by> 0.5".into() },
    };
    let key = Key::new(kernel, "norm.rms", device, Mode::Eager, call(rows).to_string());
    let provenance = Provenance { torch_version: Some("2.10.0".into()), ..Provenance::default() };
    Record { baseline: kernel.starts_with("torch."), provenance, ..Record::new(key, outcome) }
}

fn elsewhere() -> Vec<Record> {
    let mut rows = Vec::new();
    for (i, size) in [16, 256, 4096].into_iter().enumerate() {
        let us = 10.0 * (i + 1) as f64;
        rows.push(row("torch.rms_norm", "GPU-1", size, Some(us)));
        rows.push(row("fast.rms_norm", "GPU-1", size, Some(us / (i + 1) as f64)));
        rows.push(row("bad.rms_norm", "GPU-1", size, None));
    }
    let mut old = row("old.rms_norm", "GPU-1", 16, Some(1.0));
    old.invalid = Some("the driver has changed".into());
    rows.push(old);
    rows
}

#[test]
fn a_database_of_any_machine_becomes_a_page() {
    let place = Place::with(elsewhere());
    let answer = place.run("--db perfdb.sqlite").ended(0);
    assert_eq!(answer.out, "wrote report.html: calls 3, operations 1\n");
    let page = fs::read_to_string(place.path("report.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("differs &lt;by&gt; 0.5"));
    assert!(page.contains("Left out, 1 measurement: the driver has changed"), "stale rows are told of, not shown");
    assert!(!page.contains("old.rms_norm"));
}

#[test]
fn as_json_it_says_who_wins_by_how_much() {
    let place = Place::with(elsewhere());
    let document = place.run("--db perfdb.sqlite --title Norms --json").ended(0).json();
    assert!(!place.path("report.html").exists(), "JSON writes no page unless one is asked for");
    assert_eq!(document["title"], "Norms");
    assert_eq!(document["machines"][0]["name"], "GPU-1");
    assert_eq!(document["machines"][0]["versions"]["torch"], "2.10.0");
    let contests = document["contests"].as_array().unwrap();
    assert_eq!(contests.len(), 3);
    let mut ratios: Vec<f64> = contests.iter().map(|c| c["times_baseline"].as_f64().unwrap()).collect();
    ratios.sort_by(f64::total_cmp);
    assert_eq!(ratios, [1.0, 2.0, 3.0]);
    for contest in contests {
        let candidates = contest["candidates"].as_array().unwrap();
        let times = candidates.iter().filter_map(|c| Some((c["median_us"].as_f64()?, c["kernel"].as_str()?)));
        let least = times.min_by(|a, b| a.partial_cmp(b).unwrap()).unwrap();
        assert_eq!(contest["chosen"].as_str(), Some(least.1));
        assert_eq!(candidates.len(), 3);
    }
    assert_eq!(document["maps"][0]["columns"], json!(["16", "256", "4096"]));
    assert_eq!(document["regret"]["worst"], 1.0);
    let told = document["notes"].as_array().unwrap().iter().any(|n| n.as_str().unwrap().contains("are not here"));
    assert!(told, "{document}");
    // The same with a page beside.
    place.run("--db perfdb.sqlite --json -o there.html").ended(0).json();
    assert!(place.path("there.html").exists());
}

#[test]
fn here_it_is_the_engine_that_says_what_is_chosen() {
    let cpu = lz_hardware::detect().devices.remove(0);
    let id = device_id(&cpu);
    let known = "lz_cpu.norm.rms.reference";
    let engine = layerzero::Engine::builder().devices(vec![cpu.clone()]).build();
    let registered = engine.list_kernels(Some("norm.rms")).unwrap();
    let reference = registered.iter().find(|k| k.reference).map_or(known.to_owned(), |k| k.kernel_id.clone());
    // The only kernel here is chosen although another, of a library that is not here, was faster.
    let alone = Place::with(vec![row(&reference, &id, 16, Some(5.0))]);
    let document = alone.run("--db perfdb.sqlite --json").ended(0).json();
    assert_eq!(document["contests"][0]["chosen"].as_str(), Some(reference.as_str()));
    assert_eq!(document["machines"][0]["name"].as_str(), Some(cpu.name.as_str()));
    let notes = document["notes"].as_array().unwrap();
    assert!(notes.len() == 1 && notes[0].as_str().unwrap().starts_with("Floors go by"), "{notes:?}");
    let faster = Place::with(vec![row(&reference, &id, 16, Some(5.0)), row("gone.rms_norm", &id, 16, Some(1.0))]);
    let document = faster.run("--db perfdb.sqlite --json").ended(0).json();
    assert_eq!(document["contests"][0]["chosen"], "gone.rms_norm");
    assert_eq!(document["notes"].as_array().unwrap().len(), 2);
}

#[test]
fn where_peaks_are_not_known_floors_go_by_the_best_that_was_seen() {
    let cpu = lz_hardware::detect().devices.remove(0);
    assert!(cpu.bandwidth_gbs.is_none() && cpu.peak_tflops.is_empty(), "a test for what is not known");
    let id = device_id(&cpu);
    let times = [(16, 5.0), (64, 4.0), (4096, 10.0)];
    let place = Place::with(times.iter().map(|&(rows, us)| row("torch.rms_norm", &id, rows, Some(us))).collect());
    let document = place.run("--db perfdb.sqlite --json").ended(0).json();
    let mut floors: Vec<f64> =
        document["contests"].as_array().unwrap().iter().map(|c| c["floor_us"].as_f64().unwrap()).collect();
    floors.sort_by(f64::total_cmp);
    // 4096 rows took the least for what they are, and so are their own floor; others are held to that rate.
    // Rows are read and written, the weight is read once.
    let want = [16.0, 64.0, 4096.0].map(|rows: f64| 10.0 * (2.0 * rows + 1.0) / (2.0 * 4096.0 + 1.0));
    assert!(floors.iter().zip(want).all(|(floor, want)| (floor / want - 1.0).abs() < 1e-6), "{floors:?}");
    let notes = document["notes"].to_string();
    let gbs = (2.0 * 4096.0 + 1.0) * 64.0 * 4.0 / 10.0 / 1e3;
    assert!(notes.contains(&format!("{gbs:.1} GB/s")) && notes.contains("GFLOP/s (float32)"), "{notes}");
}

#[test]
fn regret_can_come_from_a_file() {
    let place = Place::with(elsewhere());
    let regret = json!({"schema_version": "1.0", "geomean": 1.1, "worst": 1.21, "times_baseline": 2.0, "left": 0, "rows": [
        {"op": "norm.rms", "label": "rows 8", "chosen": "fast.rms_norm", "best": "torch.rms_norm", "over_best": 1.21,
         "baseline": "torch.rms_norm", "times_baseline": 0.8}]});
    fs::write(place.path("regret.json"), regret.to_string()).unwrap();
    let document = place.run("--db perfdb.sqlite --regret regret.json --json").ended(0).json();
    assert_eq!(document["regret"]["rows"][0]["ratio_best"], 1.21);
    assert_eq!(document["regret"]["rows"][0]["ratio_baseline"], 0.8);
    fs::write(place.path("regret.json"), "{\"rows\": 3}").unwrap();
    let refused = place.run("--db perfdb.sqlite --regret regret.json").ended(2);
    assert!(refused.err.contains("is not what 'layerzero regret --json' prints"), "{refused:?}");
    let missing = place.run("--db perfdb.sqlite --regret none.json").ended(3);
    assert!(missing.err.contains("none.json"), "{missing:?}");
}

#[test]
fn what_cannot_be_is_said() {
    let place = Place::with(Vec::new());
    let missing = place.run("--db none.sqlite").ended(2);
    assert!(
        missing.err.contains("no performance database at") && missing.err.contains("layerzero tune"),
        "{missing:?}"
    );
    assert!(!place.path("none.sqlite").exists(), "looking makes no database");
    let unwritable = place.run("--db perfdb.sqlite -o no/such/folder.html").ended(4);
    assert!(unwritable.err.contains("folder.html"), "{unwritable:?}");
    fs::write(place.path("text.sqlite"), "this is no database").unwrap();
    place.run("--db text.sqlite").ended(2);
    assert_eq!(fs::read_to_string(place.path("text.sqlite")).unwrap(), "this is no database");
    let empty = place.run("--db perfdb.sqlite").ended(0);
    assert_eq!(empty.out, "wrote report.html: calls 0, operations 0\n");
    assert!(fs::read_to_string(place.path("report.html")).unwrap().contains("Nothing has been measured yet"));
}
