//! What is found at the path, and what becomes of it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use lz_perfdb::{Filter, Options, Outcome, PerfDb, PowerState, Record, State, StoreError};
use rusqlite::Connection;

use crate::support::{Place, all, by_key, options, record};

/// The table as the first version's document has it.
const FIRST: &str = "
CREATE TABLE perf_records (
    id INTEGER PRIMARY KEY,
    kernel_id TEXT NOT NULL,
    operation TEXT NOT NULL,
    device_id TEXT NOT NULL,
    sm_version INTEGER NOT NULL,
    dtype TEXT NOT NULL,
    head_dim INTEGER NOT NULL,
    seq_bucket INTEGER NOT NULL,
    batch_bucket INTEGER NOT NULL,
    median_us REAL NOT NULL,
    p95_us REAL NOT NULL,
    samples INTEGER NOT NULL,
    variance_us REAL,
    warmup_ms REAL,
    kernel_version TEXT,
    layerzero_version TEXT,
    capabilities_hash TEXT,
    power_state TEXT,
    measured_at TIMESTAMP,
    valid BOOLEAN DEFAULT TRUE,
    UNIQUE(kernel_id, operation, device_id, sm_version, dtype, head_dim, seq_bucket, batch_bucket)
);
CREATE INDEX idx_lookup ON perf_records(
    operation, device_id, sm_version, dtype, head_dim, seq_bucket, batch_bucket
);
INSERT INTO perf_records (kernel_id, operation, device_id, sm_version, dtype, head_dim, seq_bucket, batch_bucket,
    median_us, p95_us, samples, variance_us, warmup_ms, kernel_version, layerzero_version, power_state, measured_at)
VALUES
    ('flash_attn.v2', 'attention.causal', 'GPU-1', 80, 'float16', 128, 1024, 8, 12.5, 14.0, 20, 0.25, 3.5, '2.7', '0.0.9',
     'Boost', '2024-05-06 07:08:09'),
    ('flash_attn.v2', 'attention.causal', 'GPU-1', 80, 'float16', 128, 2048, 8, 30.0, 29.0, 20, NULL, NULL, NULL, NULL,
     'P0', 1714979289),
    ('negative', 'attention.causal', 'GPU-1', 80, 'float16', 128, 1024, 8, -1.0, 1.0, 20, NULL, NULL, NULL, NULL, NULL, NULL),
    ('odd time', 'attention.causal', 'GPU-1', 80, x'00', 128, 1024, 8, 2.0, 3.0, 20, NULL, NULL, NULL, NULL, NULL,
     'last week'),
    ('ancient', 'attention.causal', 'GPU-1', 80, 'float16', 128, 1024, 8, 2.0, 3.0, 20, NULL, NULL, NULL, NULL, NULL,
     -9223372036854775807);
";

#[test]
fn a_new_file_and_its_directories_belong_to_their_owner_alone() {
    let place = Place::new();
    let path = place.folder.path().join("a/b/perfdb.sqlite");
    let db = PerfDb::open(&path, options());
    assert_eq!(db.state(), State::Open);
    db.put(vec![record(1)]).wait().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&path.with_extension("sqlite-wal")), 0o600);
    assert_eq!((mode(path.parent().unwrap()), mode(&place.folder.path().join("a"))), (0o700, 0o700));
    drop(db);
    let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["perfdb.sqlite"], "a store that is closed leaves one file");
}

#[test]
fn a_path_that_needs_escaping_is_a_path() {
    let place = Place::new();
    for name in ["file:a?mode=memory", "a b%20c#d?e", "é漢'\"", "-"] {
        let path = place.folder.path().join(name);
        drop(PerfDb::open(&path, options()).put(vec![record(1)]));
        assert!(path.is_file(), "{name}");
        let db = PerfDb::open(&path, Options { read_only: true, ..options() });
        assert_eq!(all(&db), [record(1)], "{name}");
    }
    let path = place.folder.path().join("link");
    std::os::unix::fs::symlink(place.folder.path().join("a b%20c#d?e"), &path).unwrap();
    assert_eq!(all(&PerfDb::open(&path, options())), [record(1)]);
}

#[test]
fn an_empty_file_is_a_new_one() {
    let place = Place::new();
    fs::write(place.path(), "").unwrap();
    let db = place.open();
    assert_eq!(db.state(), State::Open);
    db.put(vec![record(1)]).wait().unwrap();
    assert_eq!(place.files().iter().filter(|name| name.contains("corrupt")).count(), 0);
}

#[test]
fn where_no_file_can_be_rows_stay_in_memory() {
    let place = Place::new();
    fs::write(place.path(), "").unwrap();
    for (path, says) in [
        (place.path().join("below a file/perfdb.sqlite"), "cannot be made: "),
        (place.folder.path().to_owned(), "is no regular file"),
        ("/proc/perfdb.sqlite".into(), "cannot be opened: "),
        ("/dev/null".into(), "is no regular file"),
        ("".into(), "cannot be opened"),
    ] {
        let db = PerfDb::open(&path, options());
        let State::Memory { why } = db.state() else { panic!("{path:?}: {}", db.state()) };
        assert!(why.contains(says), "{path:?}: {why}");
        let error = db.put(vec![record(1)]).wait().unwrap_err();
        assert!(matches!(&error, StoreError::NotStored { why: said } if *said == why), "{error}");
        assert_eq!(all(&db), [record(1)]);
        assert_eq!(db.notes(), [format!("new measurements are kept in memory only: {why}")]);
        db.put(vec![record(2)]);
        let _ = db.flush();
        assert_eq!(db.notes().len(), 1, "it is told once: {:?}", db.notes());
        let stats = db.stats();
        assert_eq!((stats.in_memory, stats.not_written, stats.written), (2, 2, 0));
    }
}

#[test]
fn memory_is_bounded() {
    let place = Place::new();
    fs::write(place.path(), "").unwrap();
    let db = PerfDb::open(place.path().join("x"), Options { memory_rows: 3, ..options() });
    let error = db.put((0..5).map(record).collect()).wait().unwrap_err();
    assert!(matches!(error, StoreError::MemoryFull { limit: 3, .. }), "{error}");
    assert_eq!((all(&db).len(), db.stats().refused), (3, 2));
    // Rows that are there may still be renewed.
    let newer = Record { measured_at: i64::MAX, ..record(0) };
    assert!(matches!(db.put(vec![newer.clone()]).wait(), Err(StoreError::NotStored { .. })));
    assert!(all(&db).contains(&newer));
}

#[test]
fn another_programs_database_is_not_touched() {
    for (marked, sql) in [
        (false, "CREATE TABLE users (name TEXT); INSERT INTO users VALUES ('a')"),
        (true, "PRAGMA application_id = 252006673; CREATE TABLE users (name TEXT)"),
        (false, "PRAGMA user_version = 7; CREATE TABLE perf_records (kernel_id TEXT)"),
        (false, "CREATE TABLE perf_records (kernel_id TEXT)"),
        (false, "PRAGMA journal_mode = WAL; CREATE TABLE users (name TEXT)"),
    ] {
        let place = Place::new();
        let other = Connection::open(place.path()).unwrap();
        other.execute_batch(sql).unwrap();
        drop(other);
        let before = (fs::read(place.path()).unwrap(), place.files());
        for read_only in [false, true] {
            let db = PerfDb::open(place.path(), Options { read_only, ..options() });
            let State::Memory { why } = db.state() else { panic!("{sql}: {}", db.state()) };
            assert!(why.ends_with("is a SQLite database of another program; it is left as it is"), "{marked}: {why}");
            assert!(db.put(vec![record(1)]).wait().is_err());
            assert_eq!(all(&db), [record(1)]);
            assert!(matches!(db.verify(), Err(StoreError::NotOurs { .. })));
            let _ = db.flush();
        }
        assert_eq!((fs::read(place.path()).unwrap(), place.files()), before, "{sql}");
    }
}

#[test]
fn a_newer_version_is_not_touched() {
    let place = Place::new();
    place.open().put(vec![record(1)]);
    Connection::open(place.path()).unwrap().execute_batch("PRAGMA user_version = 5").unwrap();
    let before = (fs::read(place.path()).unwrap(), place.files());
    for read_only in [false, true] {
        let db = PerfDb::open(place.path(), Options { read_only, ..options() });
        let State::Memory { why } = db.state() else { panic!("{}", db.state()) };
        assert!(why.ends_with("is of version 5, this LayerZero knows up to 4; it is left as it is"), "{why}");
        assert_eq!(all(&db), []);
        assert!(db.put(vec![record(2)]).wait().is_err());
        assert!(db.merge(vec![record(2)]).is_err());
    }
    assert_eq!((fs::read(place.path()).unwrap(), place.files()), before);
}

#[test]
fn the_first_version_is_copied_and_migrated() {
    for (mark, wal) in [
        ("", false),
        ("PRAGMA user_version = 1;", true),
        ("PRAGMA user_version = 1; PRAGMA application_id = 1280987204;", false),
    ] {
        let place = Place::new();
        let first = Connection::open(place.path()).unwrap();
        if wal {
            first.execute_batch("PRAGMA journal_mode = WAL").unwrap();
        }
        first.execute_batch(&format!("{FIRST} {mark}")).unwrap();
        drop(first);
        let before = fs::read(place.path()).unwrap();
        // Whoever only reads sees it migrated, and leaves it as it is.
        let looked = by_key(all(&PerfDb::open(place.path(), Options { read_only: true, ..options() })));
        assert_eq!(fs::read(place.path()).unwrap(), before);
        assert_eq!(lz_perfdb::verify_file(&place.path()).unwrap().schema_version, i64::from(!mark.is_empty()));

        let db = place.open();
        assert_eq!(db.state(), State::Open, "{mark}");
        let rows = by_key(all(&db));
        assert_eq!(rows, looked);
        let row =
            |seq: u32| rows.values().find(|r| r.shape.seq_bucket == seq && r.key.kernel_id == "flash_attn.v2").unwrap();
        let (one, two) = (row(1024), row(2048));
        assert_eq!(rows.len(), 4, "what cannot be a measurement is in the copy only: {rows:#?}");
        let Outcome::Ok(timing) = &one.outcome else { panic!() };
        assert_eq!((timing.median_us, timing.p95_us, timing.spread_us, timing.samples), (12.5, 14.0, 1.5, 20));
        assert_eq!((timing.variance_us, timing.warmup_ms), (Some(0.25), Some(3.5)));
        assert_eq!(one.measured_at, 1_714_979_289_000, "2024-05-06 07:08:09 UTC");
        assert_eq!(two.measured_at, 1_714_979_289_000);
        assert_eq!(two.outcome.timing().unwrap().p95_us, 30.0, "never below the median");
        assert_eq!((one.conditions.power_state, two.conditions.power_state), (Some(PowerState::Boost), None));
        assert_eq!(one.provenance.kernel_version.as_deref(), Some("2.7"));
        assert_eq!((one.shape.sm_version, one.shape.dtype.as_str(), one.shape.head_dim), (80, "float16", 128));
        let why = "measured by version 1, which did not record the call";
        assert!(rows.values().all(|row| row.invalid.as_deref() == Some(why)));
        assert_eq!(db.records(&Filter::all().valid()).unwrap(), []);
        // New rows go beside them.
        db.put(vec![record(1)]).wait().unwrap();
        assert_eq!(all(&db).len(), 5);
        drop(db);
        assert_eq!(place.files(), ["perfdb.sqlite", "perfdb.sqlite.backup-v1"]);
        let copy = Connection::open(place.folder.path().join("perfdb.sqlite.backup-v1")).unwrap();
        let count: i64 = copy.query_row("SELECT count(*) FROM perf_records WHERE valid", [], |row| row.get(0)).unwrap();
        assert_eq!(count, 5, "the copy has what there was");
        assert_eq!(all(&place.open()).len(), 5);
        assert_eq!(place.files().len(), 2, "it is migrated once");
        assert!(lz_perfdb::verify_file(&place.path()).unwrap().is_clean());
    }
}

/// Rows of the second version keep their checksums: one that was damaged before is still known to be.
#[test]
fn the_second_version_gets_the_columns_it_lacks() {
    let place = Place::new();
    let old: Vec<_> = (0..20).map(|n| record(2 * n + 1)).collect();
    place.open().put(old.clone()).wait().unwrap();
    let connection = Connection::open(place.path()).unwrap();
    connection.execute_batch("DROP INDEX idx_key").unwrap();
    for column in ["host_us", "device_us", "threads"] {
        connection.execute_batch(&format!("ALTER TABLE perf_records DROP COLUMN {column}")).unwrap();
    }
    // As the second version wrote it, worked out apart, in Python.
    let sql = "SELECT checksum FROM perf_records WHERE kernel_id = 'library1.kernel' AND samples = 6";
    let written: i64 = connection.query_row(sql, [], |row| row.get(0)).unwrap();
    assert_eq!(written, -5_986_796_266_307_233_230);
    let damage = "UPDATE perf_records SET samples = samples + 1 WHERE id = 1;
                  UPDATE perf_records SET samples = samples + 1, checksum = NULL WHERE id = 2;";
    connection.execute_batch(&format!("PRAGMA user_version = 2; {damage}")).unwrap();
    drop(connection);
    let damaged = |rows: &[lz_perfdb::Record]| old.iter().filter(|r| !rows.contains(r)).count();
    let looked = all(&PerfDb::open(place.path(), Options { read_only: true, ..options() }));
    assert_eq!((looked.len(), damaged(&looked)), (18, 2));
    let db = place.open();
    assert_eq!(db.state(), State::Open);
    assert_eq!(by_key(all(&db)), by_key(looked));
    db.put(vec![record(2)]).wait().unwrap();
    assert!(all(&db).contains(&record(2)), "what host and device took is kept");
    drop(db);
    assert!(place.files().contains(&"perfdb.sqlite.backup-v2".to_owned()), "{:?}", place.files());
    assert_eq!(lz_perfdb::verify_file(&place.path()).unwrap().schema_version, 4);
}

/// A row of the third version does not say with how many threads it was measured, and stays apart from those that do.
#[test]
fn the_third_version_knows_no_threads() {
    let place = Place::new();
    let old: Vec<_> = (0..20).map(record).collect();
    place.open().put(old.clone()).wait().unwrap();
    let connection = Connection::open(place.path()).unwrap();
    let back = "DROP INDEX idx_key; ALTER TABLE perf_records DROP COLUMN threads; PRAGMA user_version = 3;";
    connection.execute_batch(back).unwrap();
    drop(connection);
    let db = place.open();
    assert_eq!((db.state(), by_key(all(&db))), (State::Open, by_key(old.clone())));
    let with = |threads: u32| lz_perfdb::Record { key: record(1).key.threads(threads), ..record(1) };
    db.put(vec![with(1), with(16)]).wait().unwrap();
    let of = |threads: u32| db.records(&lz_perfdb::Filter::all().threads(threads)).unwrap();
    assert_eq!((of(0).len(), of(1), of(16), of(2)), (20, vec![with(1)], vec![with(16)], vec![]));
    // One key, one row: a second measurement with as many threads takes the place of the first.
    let again = lz_perfdb::Record { measured_at: with(16).measured_at + 1, ..with(16) };
    db.put(vec![again.clone()]).wait().unwrap();
    assert_eq!((of(16), all(&db).len()), (vec![again], 22));
    drop(db);
    assert!(place.files().contains(&"perfdb.sqlite.backup-v3".to_owned()), "{:?}", place.files());
    assert!(lz_perfdb::verify_file(&place.path()).unwrap().is_clean());
}

#[test]
fn a_copy_that_is_there_is_not_overwritten() {
    let place = Place::new();
    Connection::open(place.path()).unwrap().execute_batch(FIRST).unwrap();
    fs::write(place.folder.path().join("perfdb.sqlite.backup-v1"), "mine").unwrap();
    assert_eq!(place.open().state(), State::Open);
    assert_eq!(fs::read(place.folder.path().join("perfdb.sqlite.backup-v1")).unwrap(), b"mine");
    assert_eq!(place.files().iter().filter(|name| name.starts_with("perfdb.sqlite.backup-v1-")).count(), 1);
}

#[test]
fn the_table_can_be_asked_by_people() {
    let place = Place::new();
    place.open().put((0..30).map(record).collect());
    let connection = Connection::open(place.path()).unwrap();
    let sql =
        "SELECT count(*) FROM perf_records WHERE operation = 'norm.rms' AND device_id = 'GPU-1' AND sm_version = 90
               AND dtype = 'bfloat16' AND head_dim = 128 AND seq_bucket = 1024 AND batch_bucket = 8 AND valid";
    let expected = (0..30).map(record).filter(|r| r.key.operation == "norm.rms" && r.key.device_id == "GPU-1").count();
    assert_eq!(connection.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap(), expected as i64);
    let plan: String = connection.query_row(&format!("EXPLAIN QUERY PLAN {sql}"), [], |row| row.get(3)).unwrap();
    assert!(plan.contains("idx_lookup"), "{plan}");
}

#[test]
fn a_store_that_only_reads_makes_nothing() {
    let place = Place::new();
    let db = PerfDb::open(place.path(), Options { read_only: true, ..options() });
    let State::Memory { why } = db.state() else { panic!() };
    assert!(why.ends_with("does not exist"), "{why}");
    assert_eq!((all(&db), place.files()), (vec![], vec![]));
    drop(db);
    place.open().put(vec![record(1)]);
    let db = PerfDb::open(place.path(), Options { read_only: true, ..options() });
    assert_eq!(db.state(), State::ReadOnly { why: "opened for reading".into() });
    assert!(matches!(db.put(vec![record(2)]).wait(), Err(StoreError::NotStored { .. })));
    drop(db);
    assert_eq!(all(&place.open()), [record(1)]);
}
