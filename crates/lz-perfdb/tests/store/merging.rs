//! Merging, against brute force.

use std::collections::BTreeMap;
use std::fs;

use lz_perfdb::{Key, MergeReport, Outcome, PerfDb, Record, StoreError, Timing};
use proptest::prelude::*;
use rusqlite::Connection;

use crate::support::{Place, all, any_record, by_key, few_keys, options, record, scaled};

/// Few values of everything that decides, so that ties happen.
fn contender() -> impl Strategy<Value = Record> {
    let timing = (1..3u32, 1..4u8, prop::sample::select(vec![1.0, 2.0]))
        .prop_map(|(samples, spread, median)| Outcome::Ok(Timing::new(median, 9.0, f64::from(spread), samples)));
    let outcome = prop_oneof![
        3 => timing,
        1 => Just(Outcome::Wrong { error: "w".into() }),
        1 => Just(Outcome::Failed { error: "f".into() }),
    ];
    (any_record(few_keys()), outcome, 0..3i64, any::<bool>()).prop_map(|(record, outcome, measured_at, valid)| Record {
        outcome,
        measured_at,
        invalid: (!valid).then(|| "old".into()),
        ..record
    })
}

/// How much is behind a row, as numbers: larger is better. Told without looking at the code.
fn rank(r: &Record) -> (bool, u8, u32, i64, i64) {
    let (class, samples, calm) = match &r.outcome {
        Outcome::Wrong { .. } => (2, 0, 0),
        Outcome::Ok(t) => (1, t.samples, -(t.spread_us / t.median_us * 1e6) as i64),
        Outcome::Failed { .. } => (0, 0, 0),
    };
    (r.invalid.is_none(), class, samples, calm, r.measured_at)
}

fn best(rows: &[Record]) -> BTreeMap<Key, (bool, u8, u32, i64, i64)> {
    let mut best = BTreeMap::new();
    for row in rows {
        let entry = best.entry(row.key.clone()).or_insert(rank(row));
        *entry = rank(row).max(*entry);
    }
    best
}

/// A store with these rows, whichever of each key came last.
fn store(rows: &[Record]) -> PerfDb {
    let db = PerfDb::in_memory();
    let rows = by_key(rows.iter().cloned()).into_values().collect();
    db.put(rows).wait().unwrap();
    db
}

proptest! {
    #![proptest_config(ProptestConfig { cases: scaled(60, 4000) as u32, ..ProptestConfig::default() })]

    #[test]
    fn the_better_supported_row_stays(
        a in prop::collection::vec(contender(), 0..10),
        b in prop::collection::vec(contender(), 0..10),
        c in prop::collection::vec(contender(), 0..10),
    ) {
        let [a, b, c] = [a, b, c].map(|rows| all(&store(&rows)));
        let place = Place::new();
        let db = place.open();
        db.put(a.clone()).wait().unwrap();
        let report = db.merge(b.clone()).unwrap();
        let merged = all(&db);

        let everything: Vec<Record> = a.iter().chain(&b).cloned().collect();
        prop_assert!(merged.iter().all(|r| everything.contains(r)), "no row is made up");
        let ranks: BTreeMap<_, _> = merged.iter().map(|r| (r.key.clone(), rank(r))).collect();
        prop_assert_eq!(ranks, best(&everything));

        let before = by_key(a.clone());
        let added = b.iter().filter(|r| !before.contains_key(&r.key)).count();
        let replaced = merged.iter().filter(|r| before.get(&r.key).is_some_and(|old| old != *r)).count();
        let kept = b.len() - added - replaced;
        prop_assert_eq!(report, MergeReport { added, replaced, kept, skipped: 0 });

        // In any order the same: even where nothing tells which is better.
        let other = store(&b);
        other.merge(a.clone()).unwrap();
        prop_assert_eq!(&all(&other), &merged);
        db.merge(c.clone()).unwrap();
        let right = store(&c);
        right.merge(b.clone()).unwrap();
        right.merge(a.clone()).unwrap();
        prop_assert_eq!(all(&right), all(&db));
        // Again changes nothing.
        let again = db.merge(b.clone()).unwrap();
        prop_assert_eq!((again.added, again.replaced), (0, 0));
    }
}

#[test]
fn files_of_every_kind_are_merged() {
    let (ours, theirs) = (Place::new(), Place::new());
    let rows: Vec<Record> = (0..30).map(record).collect();
    theirs.open().put(rows.clone()).wait().unwrap();
    let folder = theirs.folder.path();
    theirs.open().export_jsonl(fs::File::create(folder.join("rows.jsonl")).unwrap()).unwrap();
    theirs.open().export_csv(fs::File::create(folder.join("rows.CSV")).unwrap()).unwrap();
    fs::write(folder.join("empty"), "").unwrap();
    let before = fs::read(theirs.path()).unwrap();
    for name in ["perfdb.sqlite", "rows.jsonl", "rows.CSV"] {
        let db = PerfDb::open(ours.folder.path().join(name), options());
        db.put(rows[..10].to_vec()).wait().unwrap();
        let report = db.merge_file(&folder.join(name)).unwrap();
        assert_eq!(report, MergeReport { added: 20, replaced: 0, kept: 10, skipped: 0 }, "{name}");
        assert_eq!(by_key(all(&db)), by_key(rows.clone()), "{name}");
        assert_eq!(db.merge_file(&folder.join("empty")).unwrap(), MergeReport::default());
    }
    assert_eq!(fs::read(theirs.path()).unwrap(), before, "the other file is only read");
    // One that is being written, and one with a damaged row.
    let writing = theirs.open();
    writing.put(vec![record(30)]).wait().unwrap();
    let other = Connection::open(theirs.path()).unwrap();
    other.execute_batch("UPDATE perf_records SET samples = samples + 1 WHERE id = 1").unwrap();
    let db = ours.open();
    let report = db.merge_file(&theirs.path()).unwrap();
    assert_eq!(report, MergeReport { added: 1, replaced: 0, kept: 29, skipped: 1 });
}

#[test]
fn a_file_that_cannot_be_merged_changes_nothing() {
    let place = Place::new();
    let db = place.open();
    db.put(vec![record(1)]).wait().unwrap();
    let at = |name: &str| place.folder.path().join(name);
    Connection::open(at("foreign")).unwrap().execute_batch("CREATE TABLE users (name TEXT)").unwrap();
    fs::write(at("text"), "not a row\n").unwrap();
    fs::write(at("broken"), [b"SQLite format 3\0".as_slice(), &[7; 5000]].concat()).unwrap();
    let error = |name: &str| db.merge_file(&at(name)).unwrap_err();
    assert!(matches!(error("foreign"), StoreError::NotOurs { .. }));
    assert!(matches!(error("text"), StoreError::BadLine { line: 1, .. }));
    assert!(matches!(error("broken"), StoreError::NotOurs { .. } | StoreError::Damaged { .. }), "{}", error("broken"));
    assert!(matches!(error("missing"), StoreError::Io { .. }));
    let impossible = Record::new(record(2).key, Outcome::Ok(Timing::new(-1.0, 1.0, 0.0, 1)));
    assert!(matches!(db.merge(vec![record(3), impossible]), Err(StoreError::Impossible(_))));
    assert_eq!(all(&db), [record(1)]);
    assert!(at("broken").exists() && at("foreign").exists());
}
