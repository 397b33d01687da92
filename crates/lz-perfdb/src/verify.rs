//! Looking for damage, and counting.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Serialize;

use crate::connect::{self, Refusal};
use crate::error::StoreError;
use crate::filter::Filter;
use crate::record::{Key, Outcome};
use crate::schema::{self, SCHEMA_VERSION};
use crate::sql::{self, Unreadable};
use crate::state::State;
use crate::store::PerfDb;

/// What is wrong with a row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RowProblem {
    /// The row's number (`id`).
    pub row: i64,
    /// What is wrong.
    pub what: String,
}

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The file.
    pub path: PathBuf,
    /// The version it says it has.
    #[serde(rename = "database_version")]
    pub schema_version: i64,
    /// The version this LayerZero writes.
    pub current_version: u32,
    /// How many rows were looked at.
    pub rows: usize,
    /// What SQLite finds wrong with the file as a whole.
    pub integrity: Vec<String>,
    /// Rows that are not as they were written.
    pub damaged: Vec<RowProblem>,
    /// Rows that are as they were written, and cannot be.
    pub impossible: Vec<RowProblem>,
    /// Rows whose key another row has as well.
    pub duplicates: Vec<RowProblem>,
}

impl Report {
    /// Whether nothing is wrong. An older version is not wrong: it is migrated when it is next written.
    pub fn is_clean(&self) -> bool {
        self.integrity.is_empty() && self.damaged.is_empty() && self.impossible.is_empty() && self.duplicates.is_empty()
    }
}

/// How long other processes are waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Looks for damage in a file. Nothing is changed: neither migrated nor set aside.
pub fn verify_file(path: &Path) -> Result<Report, StoreError> {
    let mut report = Report {
        path: path.to_owned(),
        schema_version: 0,
        current_version: SCHEMA_VERSION,
        rows: 0,
        integrity: Vec::new(),
        damaged: Vec::new(),
        impossible: Vec::new(),
        duplicates: Vec::new(),
    };
    match look(path, &mut report) {
        Ok(()) => Ok(report),
        Err(Refusal::Damaged(why)) => {
            report.integrity.push(why);
            Ok(report)
        }
        Err(refusal) => Err(refusal.error(path)),
    }
}

fn look(path: &Path, report: &mut Report) -> Result<(), Refusal> {
    let readable = connect::readable(path, PATIENCE)?;
    let connection = &readable.connection;
    report.schema_version = match connect::reading(path, PATIENCE) {
        Ok(as_it_is) => schema::version(&as_it_is).unwrap_or(i64::from(SCHEMA_VERSION)),
        Err(_) => schema::version(connection)?,
    };
    let mut check = connection.prepare("PRAGMA integrity_check(100)")?;
    let found = check.query_map([], |row| row.get::<_, String>(0))?.collect::<Result<Vec<_>, _>>();
    match found {
        Ok(lines) => report.integrity.extend(lines.into_iter().filter(|line| line != "ok")),
        Err(error) => report.integrity.push(error.to_string()),
    }
    let mut keys: BTreeMap<Key, i64> = BTreeMap::new();
    let scanned = sql::scan(connection, "", [], |fetched| {
        let row = fetched.id;
        report.rows += 1;
        match fetched.record() {
            Ok(record) => match keys.get(&record.key) {
                Some(first) => {
                    report.duplicates.push(RowProblem { row, what: format!("has the key of row {first}") });
                }
                None => drop(keys.insert(record.key, row)),
            },
            Err(Unreadable::Damaged(what)) => report.damaged.push(RowProblem { row, what }),
            Err(Unreadable::Impossible(what)) => report.impossible.push(RowProblem { row, what }),
        }
    });
    if let Err(error) = scanned {
        report.integrity.push(error.to_string());
    }
    Ok(())
}

/// Figures of a store.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// How it stands.
    #[serde(flatten)]
    pub state: State,
    /// The file's size with its WAL, in bytes.
    pub bytes: u64,
    /// How many rows it has, in the file and in memory.
    pub rows: usize,
    /// How many of them count.
    pub valid: usize,
    /// How many are of kernels that were right and timed.
    pub ok: usize,
    /// How many are of kernels found wrong.
    pub wrong: usize,
    /// How many are of kernels that raised.
    pub failed: usize,
    /// How many operations, kernels and devices they are of.
    pub operations: usize,
    /// How many kernels.
    pub kernels: usize,
    /// How many devices.
    pub devices: usize,
    /// When the oldest was measured, in milliseconds since 1970.
    pub oldest: Option<i64>,
    /// When the newest was.
    pub newest: Option<i64>,
    /// How many rows of the file are not as they were written.
    pub unreadable: u64,
    /// How many rows wait for the writer.
    pub waiting: usize,
    /// How many rows are in memory because the disk did not take them.
    pub in_memory: usize,
    /// How many rows this process has written.
    pub written: u64,
    /// How many rows the disk did not take when they were put.
    pub not_written: u64,
    /// How many rows were refused.
    pub refused: u64,
}

impl PerfDb {
    /// Looks for damage in its file.
    pub fn verify(&self) -> Result<Report, StoreError> {
        self.shared.here()?;
        let _ = self.flush();
        match self.path() {
            Some(path) => verify_file(path),
            None => Err(StoreError::NotOurs { path: PathBuf::new(), why: "is no file: this store has none".into() }),
        }
    }

    /// Figures. Where the file cannot be read they are those of memory.
    pub fn stats(&self) -> Stats {
        let rows = self.records(&Filter::all()).unwrap_or_default();
        let here = self.shared.here().is_ok();
        let counters = &self.shared.counters;
        let size = |suffix: &str| {
            self.path().and_then(|path| fs::metadata(connect::beside(path, suffix)).ok()).map_or(0, |file| file.len())
        };
        let distinct = |of: fn(&Key) -> &str| rows.iter().map(|row| of(&row.key)).collect::<BTreeSet<_>>().len();
        let outcomes = |is: fn(&Outcome) -> bool| rows.iter().filter(|row| is(&row.outcome)).count();
        Stats {
            state: self.state(),
            bytes: size("") + size("-wal"),
            rows: rows.len(),
            valid: rows.iter().filter(|row| row.is_valid()).count(),
            ok: outcomes(|outcome| matches!(outcome, Outcome::Ok(_))),
            wrong: outcomes(|outcome| matches!(outcome, Outcome::Wrong { .. })),
            failed: outcomes(|outcome| matches!(outcome, Outcome::Failed { .. })),
            operations: distinct(|key| &key.operation),
            kernels: distinct(|key| &key.kernel_id),
            devices: distinct(|key| &key.device_id),
            oldest: rows.iter().map(|row| row.measured_at).min(),
            newest: rows.iter().map(|row| row.measured_at).max(),
            unreadable: counters.unreadable.load(Ordering::Relaxed),
            waiting: if here { self.shared.queue.rows() } else { 0 },
            in_memory: if here { self.shared.memory().len() } else { 0 },
            written: counters.written.load(Ordering::Relaxed),
            not_written: counters.not_written.load(Ordering::Relaxed),
            refused: counters.refused.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Row;
    use crate::{Mode, Options, Record, Timing};

    #[test]
    fn what_is_as_it_was_written_and_cannot_be_is_told_from_damage() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("perfdb.sqlite");
        let db = PerfDb::open(&path, Options::default());
        let timed = |p95_us: f64| {
            let key = Key::new("k", "op", "d", Mode::Eager, "{}");
            Record::new(key, Outcome::Ok(Timing::new(4.0, p95_us, 0.5, 9)))
        };
        db.put(vec![timed(5.0)]).wait().unwrap();
        // As another program would write it, with care and nonsense.
        let link = connect::writable(&path, PATIENCE).unwrap_or_else(|refusal| panic!("{refusal:?}"));
        sql::overwrite(&link, 1, &Row::from(timed(3.0))).unwrap();
        let report = db.verify().unwrap();
        let problem = RowProblem { row: 1, what: "p95_us is 3, below median_us, which is 4".into() };
        assert_eq!((report.damaged.len(), report.impossible, report.rows), (0, vec![problem], 1));
        assert_eq!((db.records(&Filter::all()).unwrap(), db.stats().unreadable), (vec![], 1));
    }
}
