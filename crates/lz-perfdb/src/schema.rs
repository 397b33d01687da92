//! The table, and how it came to be what it is: one step per version.

use rusqlite::{Connection, OptionalExtension, TransactionBehavior};

use crate::row::{ADDED, ADDED_TO_3, COLUMNS};
use crate::sql::{self, Fetched};

/// Marks a SQLite file as ours: `LZPD`.
pub(crate) const APPLICATION_ID: i32 = 0x4c5a_5044;

/// The version of the table and of exported files.
pub const SCHEMA_VERSION: u32 = MIGRATIONS.len() as u32;

/// The oldest version of exported files that is read: what later ones added may be missing.
pub const OLDEST_READABLE: u32 = 2;

/// A step from one version to the next.
pub(crate) struct Migration {
    /// The version it leads to.
    pub version: u32,
    /// What it does, in SQL that never changes once it was released. Rows it writes have no checksum: they get theirs
    /// when all steps are done.
    pub sql: &'static str,
}

/// Every version, in order. A new database takes all steps, an old one those it lacks, in one transaction.
pub(crate) const MIGRATIONS: &[Migration] = &[
    // One row per kernel and bucket.
    Migration {
        version: 1,
        sql: "
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
            UNIQUE (kernel_id, operation, device_id, sm_version, dtype, head_dim, seq_bucket, batch_bucket)
        );
        CREATE INDEX idx_lookup ON perf_records (
            operation, device_id, sm_version, dtype, head_dim, seq_bucket, batch_bucket
        );",
    },
    // One row per kernel and call: failures too, timing modes apart, more provenance, a checksum. A row of version 1
    // does not say which call it measured. It is kept for people, under a call made of its buckets, and does not count.
    Migration {
        version: 2,
        sql: "
        CREATE TABLE perf_records_2 (
            id INTEGER PRIMARY KEY,
            checksum INTEGER,
            kernel_id TEXT NOT NULL,
            operation TEXT NOT NULL,
            device_id TEXT NOT NULL,
            mode TEXT NOT NULL,
            call TEXT NOT NULL,
            sm_version INTEGER NOT NULL,
            dtype TEXT NOT NULL,
            head_dim INTEGER NOT NULL,
            seq_bucket INTEGER NOT NULL,
            batch_bucket INTEGER NOT NULL,
            outcome TEXT NOT NULL,
            error TEXT,
            median_us REAL,
            p95_us REAL,
            spread_us REAL,
            variance_us REAL,
            samples INTEGER NOT NULL,
            warmup_ms REAL,
            max_error REAL,
            baseline INTEGER NOT NULL,
            kernel_version TEXT,
            backend_version TEXT,
            layerzero_version TEXT,
            capabilities_hash TEXT,
            torch_version TEXT,
            cuda_version TEXT,
            driver_version TEXT,
            device_uuid TEXT,
            temperature TEXT,
            memory_pressure TEXT,
            power_state TEXT,
            measured_at INTEGER NOT NULL,
            contest TEXT,
            valid INTEGER NOT NULL,
            invalid_why TEXT,
            UNIQUE (kernel_id, operation, device_id, mode, call)
        ) STRICT;
        INSERT OR IGNORE INTO perf_records_2 (
            kernel_id, operation, device_id, mode, call, sm_version, dtype, head_dim, seq_bucket, batch_bucket, outcome,
            median_us, p95_us, spread_us, variance_us, samples, warmup_ms, baseline, kernel_version, layerzero_version,
            capabilities_hash, power_state, measured_at, valid, invalid_why
        ) SELECT
            CAST(kernel_id AS TEXT), CAST(operation AS TEXT), CAST(device_id AS TEXT), 'eager',
            json_object('schema_version', 1, 'sm_version', CAST(sm_version AS INTEGER), 'dtype', CAST(dtype AS TEXT),
                        'head_dim', CAST(head_dim AS INTEGER), 'seq_bucket', CAST(seq_bucket AS INTEGER),
                        'batch_bucket', CAST(batch_bucket AS INTEGER)),
            CAST(sm_version AS INTEGER), CAST(dtype AS TEXT), CAST(head_dim AS INTEGER), CAST(seq_bucket AS INTEGER),
            CAST(batch_bucket AS INTEGER), 'ok', CAST(median_us AS REAL), max(CAST(p95_us AS REAL), median_us),
            max(CAST(p95_us AS REAL) - median_us, 0.0), CAST(variance_us AS REAL), CAST(samples AS INTEGER),
            CAST(warmup_ms AS REAL), 0, CAST(kernel_version AS TEXT), CAST(layerzero_version AS TEXT),
            CAST(capabilities_hash AS TEXT),
            CASE WHEN lower(power_state) IN ('boost', 'nominal', 'throttled') THEN lower(power_state) END,
            CASE typeof(measured_at)
                WHEN 'text' THEN coalesce(unixepoch(measured_at) * 1000, 0)
                WHEN 'integer' THEN iif(measured_at BETWEEN 0 AND 99999999999, measured_at * 1000, max(measured_at, 0))
                WHEN 'real' THEN CAST(measured_at * 1000 AS INTEGER)
                ELSE 0
            END,
            0, 'measured by version 1, which did not record the call'
        FROM perf_records;
        DROP TABLE perf_records;
        ALTER TABLE perf_records_2 RENAME TO perf_records;
        CREATE INDEX idx_lookup ON perf_records (
            operation, device_id, sm_version, dtype, head_dim, seq_bucket, batch_bucket
        );",
    },
    // What host and device took, each. Rows keep their checksums: a column that was added counts where it has a value.
    Migration {
        version: 3,
        sql: "
        ALTER TABLE perf_records ADD COLUMN host_us REAL;
        ALTER TABLE perf_records ADD COLUMN device_us REAL;",
    },
    // The number of threads, as part of what is measured: NULL where it was not recorded, so that rows keep their
    // checksums. It belongs to the key, and a key that is a constraint of the table cannot be changed in place.
    Migration {
        version: 4,
        sql: "
        CREATE TABLE perf_records_4 (
            id INTEGER PRIMARY KEY,
            checksum INTEGER,
            kernel_id TEXT NOT NULL,
            operation TEXT NOT NULL,
            device_id TEXT NOT NULL,
            mode TEXT NOT NULL,
            call TEXT NOT NULL,
            sm_version INTEGER NOT NULL,
            dtype TEXT NOT NULL,
            head_dim INTEGER NOT NULL,
            seq_bucket INTEGER NOT NULL,
            batch_bucket INTEGER NOT NULL,
            outcome TEXT NOT NULL,
            error TEXT,
            median_us REAL,
            p95_us REAL,
            spread_us REAL,
            variance_us REAL,
            samples INTEGER NOT NULL,
            warmup_ms REAL,
            max_error REAL,
            baseline INTEGER NOT NULL,
            kernel_version TEXT,
            backend_version TEXT,
            layerzero_version TEXT,
            capabilities_hash TEXT,
            torch_version TEXT,
            cuda_version TEXT,
            driver_version TEXT,
            device_uuid TEXT,
            temperature TEXT,
            memory_pressure TEXT,
            power_state TEXT,
            measured_at INTEGER NOT NULL,
            contest TEXT,
            valid INTEGER NOT NULL,
            invalid_why TEXT,
            host_us REAL,
            device_us REAL,
            threads INTEGER
        ) STRICT;
        INSERT INTO perf_records_4 SELECT
            id, checksum, kernel_id, operation, device_id, mode, call, sm_version, dtype, head_dim, seq_bucket,
            batch_bucket, outcome, error, median_us, p95_us, spread_us, variance_us, samples, warmup_ms, max_error,
            baseline, kernel_version, backend_version, layerzero_version, capabilities_hash, torch_version, cuda_version,
            driver_version, device_uuid, temperature, memory_pressure, power_state, measured_at, contest, valid,
            invalid_why, host_us, device_us, NULL
        FROM perf_records;
        DROP TABLE perf_records;
        ALTER TABLE perf_records_4 RENAME TO perf_records;
        CREATE UNIQUE INDEX idx_key ON perf_records (
            kernel_id, operation, device_id, mode, call, coalesce(threads, 0)
        );
        CREATE INDEX idx_lookup ON perf_records (
            operation, device_id, sm_version, dtype, head_dim, seq_bucket, batch_bucket
        );",
    },
];

/// What a SQLite database is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing is in it.
    Empty,
    /// Ours, of a version we know.
    Ours(u32),
    /// Ours, of a later version.
    Newer(i64),
    /// Ours by its mark, but not with the table it should have.
    Maimed,
    /// Somebody else's.
    Foreign,
}

/// Looks what a database is.
pub(crate) fn kind(connection: &Connection) -> rusqlite::Result<Kind> {
    let version = version(connection)?;
    let mark: i32 = connection.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let columns = columns(connection)?;
    let has = |wanted: &[&str]| wanted.iter().all(|name| columns.iter().any(|column| column == name));
    let is_first = has(FIRST_COLUMNS) && !has(&["checksum"]);
    Ok(match (mark, version) {
        (APPLICATION_ID, v) if v > i64::from(SCHEMA_VERSION) => Kind::Newer(v),
        (APPLICATION_ID, 4) if has(COLUMNS) && has(&["id", "checksum"]) => Kind::Ours(4),
        (APPLICATION_ID, 3) if has(&COLUMNS[..ADDED_TO_3]) && has(&["id", "checksum"]) => Kind::Ours(3),
        (APPLICATION_ID, 2) if has(&COLUMNS[..ADDED]) && has(&["id", "checksum"]) => Kind::Ours(2),
        (APPLICATION_ID, 1) | (0, 0 | 1) if is_first => Kind::Ours(1),
        (APPLICATION_ID, _) => Kind::Maimed,
        (0, 0) if is_empty(connection)? => Kind::Empty,
        _ => Kind::Foreign,
    })
}

/// The columns that tell a table of version 1, which had no mark of ours.
const FIRST_COLUMNS: &[&str] = &[
    "kernel_id",
    "operation",
    "device_id",
    "sm_version",
    "dtype",
    "head_dim",
    "seq_bucket",
    "batch_bucket",
    "median_us",
    "p95_us",
    "samples",
    "variance_us",
    "warmup_ms",
    "kernel_version",
    "layerzero_version",
    "capabilities_hash",
    "power_state",
    "measured_at",
    "valid",
];

/// The version a database says it has.
pub(crate) fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

fn columns(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    let mut statement = connection.prepare("SELECT name FROM pragma_table_info('perf_records')")?;
    let names = statement.query_map([], |row| row.get(0))?;
    names.collect()
}

fn is_empty(connection: &Connection) -> rusqlite::Result<bool> {
    let any = connection.query_row("SELECT 1 FROM sqlite_schema LIMIT 1", [], |_| Ok(())).optional()?;
    Ok(any.is_none())
}

/// Takes the steps a database lacks, all or none. Another process may have taken them in between.
pub(crate) fn migrate(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let from = match kind(&transaction)? {
        Kind::Empty => 0,
        Kind::Ours(version) if version < SCHEMA_VERSION => version,
        _ => return Ok(()),
    };
    for step in MIGRATIONS.iter().filter(|step| step.version > from) {
        transaction.execute_batch(step.sql)?;
    }
    // Later versions have checksums: a row without one is a damaged one there, and stays that.
    if from < 2 {
        seal(&transaction)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
    transaction.commit()
}

/// Gives rows that came through a migration their checksums. What cannot be a measurement goes: the copy that was made
/// before has it.
fn seal(connection: &Connection) -> rusqlite::Result<()> {
    let mut unsealed: Vec<Fetched> = Vec::new();
    sql::scan(connection, "WHERE checksum IS NULL", [], |fetched| unsealed.push(fetched))?;
    for fetched in unsealed {
        let id = fetched.id;
        match fetched.unchecked() {
            Ok(record) => sql::seal(connection, id, record)?,
            Err(_) => sql::delete(connection, id)?,
        }
    }
    Ok(())
}
