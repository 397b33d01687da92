//! Statements on the table: rows in and out, each with its checksum.

use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{Connection, OptionalExtension, Params, ToSql, params_from_iter};

use crate::record::{Key, Record};
use crate::row::{COLUMNS, Row};

/// A row as it was found.
pub(crate) struct Fetched {
    /// Its number.
    pub id: i64,
    checksum: Option<i64>,
    row: Result<Row, String>,
}

/// Why a row of the table is no measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// A column holds what it cannot hold, or the checksum is that of another content.
    Damaged(String),
    /// It is as it was written, and cannot be.
    Impossible(String),
}

impl Fetched {
    /// The measurement, if it is as it was written.
    pub fn record(self) -> Result<Record, Unreadable> {
        let checksum = self.checksum;
        let row = self.row.map_err(Unreadable::Damaged)?;
        if checksum != Some(row.checksum()) {
            return Err(Unreadable::Damaged("its checksum is that of another content".into()));
        }
        Record::try_from(row).map_err(|contradiction| Unreadable::Impossible(contradiction.to_string()))
    }

    /// The measurement of a row that never had a checksum.
    pub fn unchecked(self) -> Result<Record, Unreadable> {
        let row = self.row.map_err(Unreadable::Damaged)?;
        Record::try_from(row).map_err(|contradiction| Unreadable::Impossible(contradiction.to_string()))
    }

    fn of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Fetched> {
        let checksum = match row.get_ref(1)? {
            ValueRef::Integer(checksum) => Some(checksum),
            _ => None,
        };
        let values = |column: usize| row.get_ref(column + 2).ok();
        Ok(Fetched { id: row.get(0)?, checksum, row: Row::from_values(values) })
    }
}

/// Goes through the rows in the order of their numbers. The table itself is read, never an index: an index that is
/// damaged would hide rows.
pub(crate) fn scan(
    connection: &Connection,
    suffix: &str,
    params: impl Params,
    mut each: impl FnMut(Fetched),
) -> rusqlite::Result<()> {
    let sql = format!("SELECT id, checksum, {} FROM perf_records NOT INDEXED {suffix}", COLUMNS.join(", "));
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params)?;
    while let Some(row) = rows.next()? {
        each(Fetched::of(row)?);
    }
    Ok(())
}

/// What a row that is put becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Added,
    Replaced,
    Kept,
}

/// Puts a row in, unless the one that is there is to be kept.
pub(crate) fn upsert(
    connection: &Connection,
    record: &Record,
    replaces: fn(&Record, &Record) -> bool,
) -> rusqlite::Result<Effect> {
    let row = Row::from(record.clone());
    match find(connection, &record.key)? {
        None => {
            let marks = vec!["?"; COLUMNS.len() + 1].join(", ");
            // OR REPLACE only does anything where an index is damaged and the row was not found.
            let sql =
                format!("INSERT OR REPLACE INTO perf_records (checksum, {}) VALUES ({marks})", COLUMNS.join(", "));
            connection.prepare_cached(&sql)?.execute(params_from_iter(values(&row)))?;
            Ok(Effect::Added)
        }
        Some(found) => {
            let id = found.id;
            // What cannot be read is worth nothing.
            if found.record().is_ok_and(|old| !replaces(&old, record)) {
                return Ok(Effect::Kept);
            }
            overwrite(connection, id, &row)?;
            Ok(Effect::Replaced)
        }
    }
}

fn find(connection: &Connection, key: &Key) -> rusqlite::Result<Option<Fetched>> {
    let sql = format!(
        "SELECT id, checksum, {} FROM perf_records \
         WHERE kernel_id = ?1 AND operation = ?2 AND device_id = ?3 AND mode = ?4 AND call = ?5 \
         AND coalesce(threads, 0) = ?6",
        COLUMNS.join(", ")
    );
    let params = (&key.kernel_id, &key.operation, &key.device_id, key.mode.as_str(), &key.call, key.threads);
    connection.prepare_cached(&sql)?.query_row(params, Fetched::of).optional()
}

/// Replaces the whole content of a row.
pub(crate) fn overwrite(connection: &Connection, id: i64, row: &Row) -> rusqlite::Result<()> {
    let columns: Vec<String> = COLUMNS.iter().map(|name| format!("{name} = ?")).collect();
    let sql = format!("UPDATE perf_records SET checksum = ?, {} WHERE id = ?", columns.join(", "));
    let values = values(row).chain([ToSqlOutput::Owned(Value::Integer(id))]);
    connection.prepare_cached(&sql)?.execute(params_from_iter(values))?;
    Ok(())
}

/// Gives a row its checksum.
pub(crate) fn seal(connection: &Connection, id: i64, record: Record) -> rusqlite::Result<()> {
    overwrite(connection, id, &Row::from(record))
}

/// Removes a row.
pub(crate) fn delete(connection: &Connection, id: i64) -> rusqlite::Result<()> {
    connection.prepare_cached("DELETE FROM perf_records WHERE id = ?1")?.execute([id])?;
    Ok(())
}

/// The checksum and the columns.
fn values(row: &Row) -> impl Iterator<Item = ToSqlOutput<'_>> {
    let checksum = ToSqlOutput::Owned(Value::Integer(row.checksum()));
    [checksum].into_iter().chain(row.values().into_iter().map(ToSqlOutput::Borrowed))
}

/// A condition on columns, with its values.
#[derive(Default)]
pub(crate) struct Condition {
    terms: Vec<String>,
    values: Vec<Box<dyn ToSql>>,
}

impl Condition {
    /// And the column has this value, if there is one.
    pub fn and(mut self, column: &str, value: Option<impl ToSql + 'static>) -> Condition {
        if let Some(value) = value {
            self.terms.push(format!("{column} = ?"));
            self.values.push(Box::new(value));
        }
        self
    }

    /// The rows that meet it.
    pub fn scan(self, connection: &Connection, each: impl FnMut(Fetched)) -> rusqlite::Result<()> {
        let suffix = match self.terms.is_empty() {
            true => String::new(),
            false => format!("WHERE {}", self.terms.join(" AND ")),
        };
        scan(connection, &suffix, params_from_iter(self.values.iter().map(AsRef::as_ref)), each)
    }
}
