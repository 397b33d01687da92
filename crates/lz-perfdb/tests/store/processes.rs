//! Several processes, one file.

use lz_perfdb::{Record, State};

use crate::child::{Running, command};
use crate::support::{Place, all, by_key, record, scaled};

#[test]
fn processes_that_write_at_once_lose_nothing() {
    let place = Place::new();
    let (writers, rows) = (3u64, scaled(30, 2000) as u64);
    // The file is made by whoever comes first.
    let children: Vec<Running> =
        (0..writers).map(|who| Running::start(command("write_beside_others", &place.path(), &[who, rows]))).collect();
    for child in children {
        assert_eq!(child.finish(), [State::Open.to_string()]);
    }
    let found = by_key(all(&place.open()));
    let mine = |who: u64| (0..rows).map(move |i| record(1_000_000 * (who + 1) + i));
    let contested = Record { measured_at: ((rows - 1) * 10 + writers - 1) as i64, ..record(7) };
    assert_eq!(found, by_key((0..writers).flat_map(mine).chain([contested])));
    assert!(lz_perfdb::verify_file(&place.path()).unwrap().is_clean());
}

#[test]
fn a_store_sees_what_another_one_writes() {
    let place = Place::new();
    let (one, other) = (place.open(), place.open());
    one.put(vec![record(1)]).wait().unwrap();
    assert_eq!(all(&other), [record(1)]);
    other.put(vec![record(2)]).wait().unwrap();
    assert_eq!(by_key(all(&one)), by_key([record(1), record(2)]));
}

#[test]
fn a_file_that_is_removed_under_a_store_is_made_again() {
    let place = Place::new();
    let db = place.open();
    db.put(vec![record(1)]).wait().unwrap();
    for name in place.files() {
        std::fs::remove_file(place.folder.path().join(name)).unwrap();
    }
    assert_eq!(all(&db), [], "nothing is known");
    db.put(vec![record(2)]).wait().unwrap();
    assert_eq!(all(&db), [record(2)]);
    drop(db);
    assert_eq!(all(&place.open()), [record(2)], "it went to the file that is there now");
}

#[test]
fn a_file_that_a_newer_layerzero_migrates_under_a_store_is_left_alone() {
    let place = Place::new();
    let db = place.open();
    db.put(vec![record(1)]).wait().unwrap();
    let newer = rusqlite::Connection::open(place.path()).unwrap();
    newer
        .execute_batch("BEGIN; ALTER TABLE perf_records ADD COLUMN extra TEXT; PRAGMA user_version = 5; COMMIT")
        .unwrap();
    let error = db.put(vec![record(2)]).wait().unwrap_err().to_string();
    assert!(error.contains("is of version 5, this LayerZero knows up to 4"), "{error}");
    assert!(matches!(db.state(), State::Memory { .. }));
    assert_eq!(all(&db), [record(2)], "what this process measured");
    let rows: i64 = newer.query_row("SELECT count(*) FROM perf_records", [], |row| row.get(0)).unwrap();
    assert_eq!(rows, 1);
}

#[test]
fn a_file_locked_by_others_for_too_long_is_tried_again() {
    let place = Place::new();
    let options =
        lz_perfdb::Options { busy_timeout: std::time::Duration::from_millis(20), ..crate::support::options() };
    let db = lz_perfdb::PerfDb::open(place.path(), options);
    let other = rusqlite::Connection::open(place.path()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = db.put(vec![record(1)]).wait().unwrap_err().to_string();
    assert!(error.contains("locked"), "{error}");
    assert!(matches!(db.state(), State::Memory { .. }));
    assert_eq!(all(&db), [record(1)]);
    other.execute_batch("COMMIT").unwrap();
    db.put(vec![record(2)]).wait().unwrap();
    assert_eq!(db.state(), State::Open);
    drop(db);
    assert_eq!(by_key(all(&place.open())), by_key([record(1), record(2)]));
}
