//! The manifest of calls: what is counted, what a file keeps, and files that are no good.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use layerzero::model::{CallSpec, DType};
use layerzero::{MOST_ENTRIES, Manifest, ManifestEntry, ManifestError, ManifestFile};
use proptest::prelude::*;

const DAY: u64 = 24 * 3600 * 1000;
const NOW: u64 = 1_800_000_000_000;

fn call(hidden: i64) -> CallSpec {
    CallSpec::new("norm.rms").tensor("input", DType::F32, &[2, hidden])
}

fn entry(hidden: i64, count: u64, last_seen: u64) -> ManifestEntry {
    ManifestEntry { call: call(hidden), device: "cpu".into(), count, first_seen: last_seen - 5, last_seen }
}

#[test]
fn calls_are_counted_by_kind_and_device() {
    let manifest = Manifest::default();
    let first = manifest.seen_at(&call(8), "cpu", 10);
    assert_eq!(manifest.seen_at(&call(8), "cpu", 20), first);
    let other = manifest.seen_at(&call(8), "cuda:0", 30);
    assert_ne!(other, first);
    manifest.seen_again(other, 100);
    let entries = manifest.entries();
    let told: Vec<(&str, u64)> = entries.iter().map(|e| (e.device.as_str(), e.count)).collect();
    assert_eq!(told, [("cuda:0", 101), ("cpu", 2)], "the last one seen comes first");
    assert_eq!((entries[1].first_seen, entries[1].last_seen), (10, 20));
}

#[test]
fn beyond_the_most_the_one_not_seen_for_longest_goes() {
    let manifest = Manifest::default();
    let ids: Vec<_> = (0..MOST_ENTRIES as i64).map(|i| manifest.seen_at(&call(i), "cpu", NOW)).collect();
    // The first is seen again, so that the second is the oldest.
    manifest.seen_again(ids[0], 1);
    manifest.seen_at(&call(-1), "cpu", NOW);
    assert_eq!((manifest.entries().len(), manifest.dropped()), (MOST_ENTRIES, 1));
    let kept = manifest.entries();
    let has = |hidden| kept.iter().any(|e| e.call == call(hidden));
    assert!(has(0) && !has(1) && has(2) && has(-1));
    // What was deleted is not counted, and does no harm.
    manifest.seen_again(ids[1], 5);
    assert_eq!(manifest.entries().len(), MOST_ENTRIES);
}

#[test]
fn saving_adds_what_was_not_saved_yet() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new/folder/calls.json");
    let (mine, yours) = (Manifest::default(), Manifest::default());
    let id = mine.seen(&call(8), "cpu");
    yours.seen(&call(8), "cpu");
    yours.seen(&call(16), "cpu");
    let counts = || -> Vec<(i64, u64)> {
        let calls = ManifestFile::read(&path).unwrap().calls(Some("m"), 0);
        calls.iter().map(|e| (e.call.tensors["input"].shape[1], e.count)).collect()
    };
    mine.save(&path, Some("m")).unwrap();
    mine.save(&path, Some("m")).unwrap();
    assert_eq!(counts(), [(8, 1)], "nothing is added twice");
    yours.save(&path, Some("m")).unwrap();
    mine.seen_again(id, 10);
    mine.save(&path, Some("m")).unwrap();
    assert_eq!(counts(), [(8, 12), (16, 1)], "the most frequent comes first");
    assert_eq!(mine.entries()[0].count, 11, "what this process counted is its own");
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".tmp")), "{left:?}");
}

#[test]
fn models_are_kept_apart_and_old_calls_do_not_count() {
    let mut file = ManifestFile::default();
    file.merge(Some("a"), vec![entry(8, 1, NOW - 8 * DAY), entry(16, 2, NOW - 6 * DAY)]);
    file.merge(Some("b"), vec![entry(32, 1, NOW)]);
    let sizes = |model, days| -> Vec<i64> {
        file.calls_at(model, days, NOW).iter().map(|e| e.call.tensors["input"].shape[1]).collect()
    };
    assert_eq!(sizes(Some("a"), 7), [16]);
    assert_eq!(sizes(Some("a"), 0), [16, 8]);
    assert_eq!(sizes(Some("b"), 7), [32]);
    assert!(sizes(None, 0).is_empty() && sizes(Some("c"), 0).is_empty());
}

#[test]
fn a_file_keeps_so_many_models() {
    let mut file = ManifestFile::default();
    for i in 0..70_u64 {
        file.merge(Some(&format!("m{i:02}")), vec![entry(8, 1, NOW + i)]);
    }
    let models: Vec<&str> = file.models().collect();
    assert_eq!((models.len(), models[0]), (64, "m06"), "the last ones seen");
    // One that was just added stays, however old its calls are.
    file.merge(Some("old"), vec![entry(8, 1, NOW - DAY)]);
    assert!(file.models().any(|model| model == "old"));
}

#[test]
fn files_that_are_no_manifest_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("calls.json");
    let said = |text: &str| {
        fs::write(&path, text).unwrap();
        ManifestFile::read(&path).unwrap_err().to_string()
    };
    let with = |entry: &str| format!(r#"{{"schema_version":"1.0","models":{{"m":[{entry}]}}}}"#);
    let good = r#"{"call":{"op":"norm.rms","tensors":{}},"device":"cpu","count":1,"first_seen":1,"last_seen":2}"#;
    fs::write(&path, with(good)).unwrap();
    assert_eq!(ManifestFile::read(&path).unwrap().calls(Some("m"), 0).len(), 1);
    for (text, expected) in [
        ("not json".to_owned(), "it is no manifest: expected"),
        ("[1]".to_owned(), "it is no manifest"),
        ("\u{0}\u{1}".to_owned(), "it is no manifest"),
        (r#"{"schema_version":"9.0"}"#.to_owned(), "schema version '9.0'"),
        (r#"{"schema_version":"1.0","models":{},"more":1}"#.to_owned(), "unknown field `more`"),
        (with(&good.replace("norm.rms", "norm.rmz")), "entry 0 of model 'm': unknown operation 'norm.rmz'"),
        (with(&good.replace("\"count\":1", "\"count\":0")), "its count is 0"),
        (with(&good.replace("\"first_seen\":1", "\"first_seen\":3")), "first seen at 3, after it was last (2)"),
        (with(&good.replace("\"cpu\"", "\"moon\"")), "its device is 'moon'"),
        (with(&good.replace("\"cpu\"", "\"cuda:x\"")), "its device is 'cuda:x'"),
        (
            with(&good.replace("\"tensors\":{}", r#""tensors":{"input":{"dtype":"float32","shape":[-1]}}"#)),
            "a size is negative",
        ),
    ] {
        let found = said(&text);
        assert!(found.contains(expected), "{text}: {found}");
    }
    // What cannot be read is not overwritten by saving either.
    fs::write(&path, "not json").unwrap();
    let manifest = Manifest::default();
    manifest.seen(&call(8), "cpu");
    assert!(matches!(manifest.save(&path, None), Err(ManifestError::Malformed(_))));
    assert_eq!(fs::read_to_string(&path).unwrap(), "not json");
    fs::remove_file(&path).unwrap();
    manifest.save(&path, None).unwrap();
    assert_eq!(ManifestFile::read(&path).unwrap().calls(None, 0)[0].count, 1, "what was not saved still counts");
    assert!(matches!(ManifestFile::read(dir.path()), Err(ManifestError::Unreadable { .. })), "a directory");
    assert!(matches!(manifest.save(&path.join("below"), None), Err(ManifestError::Unreadable { .. })));
}

#[test]
fn several_processes_may_save_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("calls.json");
    let threads: Vec<_> = (0..8)
        .map(|i| {
            let path = path.clone();
            // Each has a manifest of its own, as a process has.
            std::thread::spawn(move || {
                let manifest = Manifest::default();
                for _ in 0..5 {
                    manifest.seen(&call(8), "cpu");
                    manifest.seen(&call(100 + i), "cpu");
                    manifest.save(&path, None).unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let calls = ManifestFile::read(&path).unwrap().calls(None, 0);
    assert_eq!((calls.len(), calls[0].count), (9, 40));
    assert!(calls[1..].iter().all(|entry| entry.count == 5));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Files merge as a map of counts and spans does, in any order and any division; and reading gives what was written.
    #[test]
    fn merging_adds_up(parts in prop::collection::vec(prop::collection::vec((0..4i64, 1..5u64, 0..1000u64), 0..6), 0..5)) {
        let mut expected: BTreeMap<i64, (u64, u64, u64)> = BTreeMap::new();
        let (mut file, mut all) = (ManifestFile::default(), Vec::new());
        for part in &parts {
            let entries: Vec<_> = part.iter().map(|&(h, n, at)| entry(h, n, NOW + at)).collect();
            file.merge(None, entries.clone());
            all.extend(entries);
            for &(hidden, n, at) in part {
                let known = expected.entry(hidden).or_insert((0, u64::MAX, 0));
                *known = (known.0 + n, known.1.min(NOW + at - 5), known.2.max(NOW + at));
            }
        }
        let told: BTreeMap<i64, (u64, u64, u64)> = file.calls(None, 0).iter()
            .map(|e| (e.call.tensors["input"].shape[1], (e.count, e.first_seen, e.last_seen))).collect();
        prop_assert_eq!(told, expected);
        let mut at_once = ManifestFile::default();
        all.reverse();
        at_once.merge(None, all);
        prop_assert_eq!(&at_once, &file);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.json");
        file.write(&path).unwrap();
        prop_assert_eq!(ManifestFile::read(&path).unwrap(), file);
    }

    /// Bytes of any kind, and good files with a bit of damage, are read or refused.
    #[test]
    fn nothing_crashes_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..200), at: prop::sample::Index, with: u8) {
        let _ = ManifestFile::parse(&String::from_utf8_lossy(&bytes));
        let mut file = ManifestFile::default();
        file.merge(Some("m"), vec![entry(8, 3, NOW), entry(16, 1, NOW)]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.json");
        file.write(&path).unwrap();
        let mut text = fs::read(&path).unwrap();
        let at = at.index(text.len());
        text[at] = with;
        fs::write(&path, &text).unwrap();
        let _ = ManifestFile::read(&path);
        fs::write(&path, &text[..at]).unwrap();
        let cut = ManifestFile::read(&path);
        prop_assert!(at == 0 || cut.is_err(), "a file that ends too early was taken");
    }
}
