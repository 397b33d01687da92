//! Invalidating, pruning, verifying, counting.

use lz_perfdb::{Filter, PerfDb, Provenance, Prune, PruneReport, Record, State, StoreError};
use proptest::prelude::*;
use rusqlite::Connection;

use crate::support::{Place, all, any_record, by_key, few_keys, options, record, scaled};

#[test]
fn rows_are_invalidated_with_their_reason() {
    let place = Place::new();
    let db = place.open();
    drop(db.put((0..30).map(record).collect()));
    let current = Provenance { driver_version: Some("580.1".into()), ..Provenance::default() };
    let stale = |r: &Record| r.provenance.stale_against(&current);
    assert_eq!(db.invalidate(stale).unwrap(), 20);
    assert_eq!(db.invalidate(stale).unwrap(), 0, "each is marked once");
    drop(db);
    let db = place.open();
    for row in all(&db) {
        let why = row.provenance.stale_against(&current);
        assert_eq!(row.invalid, why);
        assert!(why.is_none_or(|why| why.starts_with("the driver was 580.") && why.ends_with(" and is 580.1")));
    }
    assert_eq!(db.records(&Filter::all().valid()).unwrap().len(), 10);
    // Measured again, a row counts again.
    db.put(vec![record(0)]).wait().unwrap();
    assert_eq!(db.records(&Filter::all().valid()).unwrap().len(), 11);
    assert!(db.verify().unwrap().is_clean());
}

#[test]
fn every_fact_of_the_provenance_makes_stale_and_the_unknown_does_not() {
    type Fact = fn(&mut Provenance) -> &mut Option<String>;
    let facts: [(&str, Fact, bool); 8] = [
        ("the driver was 1 and is 2", |p| &mut p.driver_version, true),
        ("the CUDA toolkit was 1 and is 2", |p| &mut p.cuda_version, true),
        ("torch was 1 and is 2", |p| &mut p.torch_version, true),
        ("the library was 1 and is 2", |p| &mut p.backend_version, true),
        ("the kernel was 1 and is 2", |p| &mut p.kernel_version, true),
        ("the capabilities document was 1 and is 2", |p| &mut p.capabilities_hash, true),
        ("LayerZero", |p| &mut p.layerzero_version, false),
        ("the device", |p| &mut p.device_uuid, false),
    ];
    let with = |values: &[(Fact, &str)]| {
        let mut provenance = Provenance::default();
        values.iter().for_each(|(fact, value)| *fact(&mut provenance) = Some((*value).to_owned()));
        provenance
    };
    for (says, fact, counts) in facts {
        let (then, now) = (with(&[(fact, "1")]), with(&[(fact, "2")]));
        assert_eq!(then.stale_against(&now), counts.then(|| says.to_owned()));
        assert_eq!(then.stale_against(&then), None);
        for unknown in [Provenance::default(), with(&[(fact, "")])] {
            assert_eq!((then.stale_against(&unknown), unknown.stale_against(&then)), (None, None));
        }
    }
    let all = |value: &str| with(&facts.map(|(_, fact, _)| (fact, value)));
    let sentence = all("1").stale_against(&all("2")).unwrap();
    assert_eq!(sentence.matches(" was 1 and is 2").count(), 6, "{sentence}");
}

#[test]
fn pruning_with_nothing_said_removes_nothing() {
    let place = Place::new();
    let db = place.open();
    db.put((0..5).map(record).collect()).wait().unwrap();
    assert_eq!(db.prune(&Prune::default()).unwrap(), PruneReport { removed: 0, left: 5 });
}

/// What is left, said another way.
fn left_over(rows: &[Record], what: &Prune) -> Vec<Record> {
    let mut left: Vec<Record> = rows.to_vec();
    if let Some(before) = what.measured_before {
        left.retain(|r| r.measured_at >= before);
    }
    if what.invalid {
        left.retain(|r| r.invalid.is_none());
    }
    left
}

proptest! {
    #![proptest_config(ProptestConfig { cases: scaled(30, 2000) as u32, ..ProptestConfig::default() })]

    #[test]
    fn pruning_leaves_what_is_not_named(
        rows in prop::collection::vec(any_record(few_keys()), 0..12),
        before in prop::option::of(0..7i64),
        invalid in any::<bool>(),
        keep in prop::option::of(0..8usize),
        on_disk in any::<bool>(),
    ) {
        let place = Place::new();
        let db = if on_disk { place.open() } else { PerfDb::in_memory() };
        db.put(rows).wait().unwrap();
        let rows = all(&db);
        let what = Prune { measured_before: before, invalid, keep, unreadable: false };
        let report = db.prune(&what).unwrap();
        let (left, named) = (all(&db), left_over(&rows, &what));
        prop_assert_eq!((report.left, report.removed), (left.len(), rows.len() - left.len()));
        prop_assert!(left.iter().all(|r| named.contains(r)));
        prop_assert_eq!(left.len(), named.len().min(keep.unwrap_or(usize::MAX)));
        // The newest stay.
        let oldest = left.iter().map(|r| r.measured_at).min();
        let gone = named.iter().filter(|r| !left.contains(r)).map(|r| r.measured_at).max();
        prop_assert!(oldest.zip(gone).is_none_or(|(oldest, gone)| gone <= oldest));
        if on_disk {
            drop(db);
            prop_assert_eq!(all(&place.open()), left);
        }
    }
}

#[test]
fn what_was_pruned_takes_no_space() {
    let place = Place::new();
    let db = place.open();
    db.put((0..3000).map(record).collect()).wait().unwrap();
    drop(db);
    let size = || std::fs::metadata(place.path()).unwrap().len();
    let before = size();
    let db = place.open();
    assert_eq!(
        db.prune(&Prune { keep: Some(10), ..Prune::default() }).unwrap(),
        PruneReport { removed: 2990, left: 10 }
    );
    drop(db);
    assert!(size() * 10 < before, "{before} and {}", size());
    assert_eq!(by_key(all(&place.open())), by_key((2990..3000).map(record)));
}

#[test]
fn verify_finds_what_is_wrong_and_prune_removes_it() {
    let place = Place::new();
    let db = place.open();
    db.put((0..8).map(record).collect()).wait().unwrap();
    assert!(db.verify().unwrap().is_clean());
    let other = Connection::open(place.path()).unwrap();
    other.execute_batch("UPDATE perf_records SET median_us = 1.0 WHERE id = 1").unwrap();
    other.execute_batch("UPDATE perf_records SET checksum = NULL WHERE id = 2").unwrap();
    other.execute_batch("UPDATE perf_records SET mode = 'sideways' WHERE id = 3").unwrap();
    let report = db.verify().unwrap();
    let (rows, what): (Vec<i64>, Vec<&str>) = report.damaged.iter().map(|p| (p.row, p.what.as_str())).unzip();
    assert_eq!(rows, [1, 2, 3]);
    assert!(what[0].contains("checksum") && what[1].contains("checksum"), "{what:?}");
    assert_eq!(what[2], "mode: 'sideways' is not one of eager, graph");
    assert_eq!((report.rows, report.schema_version, report.current_version), (8, 4, 4));
    assert_eq!((all(&db).len(), db.stats().unreadable), (5, 3));
    // They are not removed by the way.
    assert_eq!(db.prune(&Prune { invalid: true, ..Prune::default() }).unwrap().removed, 0);
    let report = db.prune(&Prune { unreadable: true, ..Prune::default() }).unwrap();
    assert_eq!(report, PruneReport { removed: 3, left: 5 });
    assert!(db.verify().unwrap().is_clean());
}

#[test]
fn verify_tells_an_index_that_hides_rows() {
    let place = Place::new();
    place.open().put((0..8).map(record).collect()).wait().unwrap();
    let connection = Connection::open(place.path()).unwrap();
    // The index of keys, emptied behind SQLite's back: its root page becomes that of an empty index.
    let root: i64 = connection
        .query_row("SELECT rootpage FROM sqlite_schema WHERE name = 'idx_key'", [], |row| row.get(0))
        .unwrap();
    drop(connection);
    let mut bytes = std::fs::read(place.path()).unwrap();
    let page = (root as usize - 1) * 4096;
    bytes[page..page + 4096].fill(0);
    bytes[page..page + 8].copy_from_slice(&[0x0a, 0, 0, 0, 0, 0x10, 0, 0]);
    std::fs::write(place.path(), bytes).unwrap();
    let report = lz_perfdb::verify_file(&place.path()).unwrap();
    assert!(report.integrity.iter().any(|line| line.contains("missing from index")), "{report:?}");
    // Reading does not go by indices, so that no row is missing.
    let db = place.open();
    assert_eq!(by_key(all(&db)), by_key((0..8).map(record)), "{}", db.state());
    // Nor does a row that is put again appear twice.
    let newer = Record { measured_at: i64::MAX, ..record(3) };
    db.put(vec![newer.clone()]).wait().unwrap();
    assert_eq!(by_key(all(&db))[&newer.key], newer);
    assert_eq!(all(&db).len(), 8);
    assert_eq!(db.verify().unwrap().duplicates, []);
}

#[test]
fn figures_are_those_of_the_rows() {
    let place = Place::new();
    let db = place.open();
    let empty = db.stats();
    assert_eq!((empty.rows, empty.oldest, empty.state.clone()), (0, None, State::Open));
    let rows: Vec<Record> = (0..44).map(record).collect();
    db.put(rows.clone()).wait().unwrap();
    db.invalidate(|r| (r.key == record(5).key).then(|| "test".into())).unwrap();
    let stats = db.stats();
    assert_eq!((stats.rows, stats.valid, stats.ok, stats.wrong, stats.failed), (44, 43, 36, 4, 4));
    assert_eq!((stats.operations, stats.kernels, stats.devices), (3, 7, 2));
    assert_eq!((stats.oldest, stats.newest), (Some(rows[0].measured_at), Some(rows[43].measured_at)));
    assert!(stats.bytes > 4096 && stats.written == 44 && stats.waiting == 0);
    let json = serde_json::to_value(&stats).unwrap();
    assert_eq!((&json["state"], &json["rows"]), (&"open".into(), &44.into()));
    let memory = PerfDb::in_memory();
    memory.put(rows).wait().unwrap();
    assert_eq!((memory.stats().rows, memory.stats().bytes), (44, 0));
    assert!(matches!(memory.verify(), Err(StoreError::NotOurs { .. })));
    drop(PerfDb::open(place.path(), options()));
}
