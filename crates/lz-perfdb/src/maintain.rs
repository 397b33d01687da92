//! Changes of many rows at once: invalidating, merging, importing, pruning. Each is one transaction.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use crate::connect;
use crate::error::StoreError;
use crate::filter::Filter;
use crate::record::Record;
use crate::row::Row;
use crate::sql::{self, Effect, Fetched};
use crate::store::PerfDb;
use crate::support;
use crate::transfer::{self, Format};

/// What became of rows that were merged or imported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MergeReport {
    /// Rows of which there was none.
    pub added: usize,
    /// Rows that took the place of another.
    pub replaced: usize,
    /// Rows that did not, because the one that was there stays.
    pub kept: usize,
    /// Rows of a merged database that are not as they were written.
    pub skipped: usize,
}

impl MergeReport {
    fn count(&mut self, effect: Effect) {
        match effect {
            Effect::Added => self.added += 1,
            Effect::Replaced => self.replaced += 1,
            Effect::Kept => self.kept += 1,
        }
    }
}

/// Which rows are to go: those that any of this is said of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prune {
    /// Rows measured before this time, in milliseconds since 1970.
    pub measured_before: Option<i64>,
    /// Rows that do not count.
    pub invalid: bool,
    /// All but so many: the newest stay.
    pub keep: Option<usize>,
    /// Rows that are not as they were written.
    pub unreadable: bool,
}

/// What was pruned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PruneReport {
    /// How many rows went.
    pub removed: usize,
    /// How many are left.
    pub left: usize,
}

impl PerfDb {
    /// Marks rows as not counting any more, for the reason the function gives; rows that do not count already are not
    /// shown to it. Gives how many. Where the file cannot be written, rows are marked for this process.
    ///
    /// The function may be asked about a row more than once, and must not use the store itself.
    pub fn invalidate(&self, mut why: impl FnMut(&Record) -> Option<String>) -> Result<usize, StoreError> {
        self.shared.here()?;
        // Whatever it says, the rows are then in the file or in memory.
        let _ = self.flush();
        // Mostly there is nothing to mark, and others need not wait for that to be found out.
        if self.shared.gather(&Filter::all().valid(), None).is_ok_and(|rows| rows.iter().all(|row| why(row).is_none()))
        {
            return Ok(0);
        }
        let marked = match &mut *self.shared.disk() {
            None => None,
            Some(disk) => {
                let marking = disk.write(true, &self.shared.board, |transaction| {
                    let mut marked: Vec<(i64, Row)> = Vec::new();
                    sql::scan(transaction, "", [], |fetched| marked.extend(mark(fetched, &mut why)))?;
                    marked.iter().try_for_each(|(id, row)| sql::overwrite(transaction, *id, row))?;
                    Ok(marked.len())
                });
                marking.ok()
            }
        };
        match marked {
            Some(marked) => Ok(marked + self.invalidate_in_memory(&mut why, false)?),
            None => self.invalidate_in_memory(&mut why, true),
        }
    }

    /// Marks rows in memory, and those of a file that cannot be written by a copy in memory.
    fn invalidate_in_memory(
        &self,
        why: &mut impl FnMut(&Record) -> Option<String>,
        also_of_the_file: bool,
    ) -> Result<usize, StoreError> {
        if !also_of_the_file {
            let mut marked = 0;
            for record in self.shared.memory().rows_mut().filter(|record| record.is_valid()) {
                record.invalid = why(record);
                marked += usize::from(!record.is_valid());
            }
            return Ok(marked);
        }
        let mut marked = 0;
        for record in self.shared.gather(&Filter::all().valid(), None)? {
            let Some(reason) = why(&record) else { continue };
            let mut memory = self.shared.memory();
            if memory.put(Record { invalid: Some(reason), ..record }, support::newer).is_none() {
                return Err(StoreError::MemoryFull { limit: memory.limit(), why: self.state().to_string() });
            }
            marked += 1;
        }
        Ok(marked)
    }

    /// Takes rows, of each key the one with more behind it: one that counts before one that does not, a kernel found
    /// wrong before one that was timed before one that raised, then more samples, less noise for its time, and the newer.
    /// All or nothing.
    pub fn merge(&self, records: Vec<Record>) -> Result<MergeReport, StoreError> {
        self.take(records, support::better)
    }

    /// As [`PerfDb::merge`], with all rows of another file: a database of any version, or an exported file (CSV by its
    /// name, otherwise JSON Lines). The other file is only read.
    pub fn merge_file(&self, other: &Path) -> Result<MergeReport, StoreError> {
        let (records, skipped) = read_file(other)?;
        Ok(MergeReport { skipped, ..self.merge(records)? })
    }

    /// Takes rows that were exported, as if they were put: the newer of two stays. All or nothing.
    pub fn import(&self, reader: impl Read, format: Format) -> Result<MergeReport, StoreError> {
        self.import_records(transfer::read_records(reader, format)?)
    }

    /// As [`PerfDb::import`], with rows that were read before.
    pub fn import_records(&self, records: Vec<Record>) -> Result<MergeReport, StoreError> {
        self.take(records, support::newer)
    }

    /// [`PerfDb::import`] of JSON Lines.
    pub fn import_jsonl(&self, reader: impl Read) -> Result<MergeReport, StoreError> {
        self.import(reader, Format::Jsonl)
    }

    /// [`PerfDb::import`] of CSV.
    pub fn import_csv(&self, reader: impl Read) -> Result<MergeReport, StoreError> {
        self.import(reader, Format::Csv)
    }

    /// Writes the rows that are wanted, as they are kept. Gives how many.
    pub fn export(&self, writer: impl Write, format: Format, filter: &Filter) -> Result<usize, StoreError> {
        let _ = self.flush();
        transfer::write_records(writer, format, self.shared.gather(filter, None)?)
    }

    /// [`PerfDb::export`] of everything as JSON Lines.
    pub fn export_jsonl(&self, writer: impl Write) -> Result<usize, StoreError> {
        self.export(writer, Format::Jsonl, &Filter::all())
    }

    /// [`PerfDb::export`] of everything as CSV.
    pub fn export_csv(&self, writer: impl Write) -> Result<usize, StoreError> {
        self.export(writer, Format::Csv, &Filter::all())
    }

    fn take(&self, records: Vec<Record>, rule: fn(&Record, &Record) -> bool) -> Result<MergeReport, StoreError> {
        self.shared.here()?;
        records.iter().try_for_each(Record::check)?;
        if self.path().is_none() {
            return self.take_in_memory(records, rule);
        }
        let _ = self.flush();
        self.change(|transaction| {
            let mut report = MergeReport::default();
            for record in &records {
                report.count(sql::upsert(transaction, record, rule)?);
            }
            Ok(report)
        })
    }

    fn take_in_memory(
        &self,
        records: Vec<Record>,
        rule: fn(&Record, &Record) -> bool,
    ) -> Result<MergeReport, StoreError> {
        let mut memory = self.shared.memory();
        let mut report = MergeReport::default();
        for record in records {
            let Some(effect) = memory.put(record, rule) else {
                return Err(StoreError::MemoryFull { limit: memory.limit(), why: "there is no file".into() });
            };
            report.count(effect);
        }
        Ok(report)
    }

    /// A change of the file, which must be there for it.
    fn change<T>(&self, job: impl FnMut(&rusqlite::Transaction<'_>) -> rusqlite::Result<T>) -> Result<T, StoreError> {
        let unwritable = |why: String| StoreError::Unwritable { why };
        match &mut *self.shared.disk() {
            Some(disk) => disk.write(true, &self.shared.board, job).map_err(unwritable),
            None => Err(unwritable(self.shared.board.state().to_string())),
        }
    }

    /// Removes rows.
    pub fn prune(&self, what: &Prune) -> Result<PruneReport, StoreError> {
        self.shared.here()?;
        let _ = self.flush();
        if self.path().is_none() {
            return Ok(self.prune_memory(what));
        }
        let report = self.change(|transaction| {
            let mut rows = Vec::new();
            sql::scan(transaction, "", [], |fetched| rows.push(Seen::of(fetched)))?;
            let gone = doomed(what, &rows);
            gone.iter().try_for_each(|id| sql::delete(transaction, *id))?;
            Ok(PruneReport { removed: gone.len(), left: rows.len() - gone.len() })
        })?;
        self.prune_memory(what);
        if report.removed > 0 {
            // Gives the space back. Where others hold the file it stays for later rows, which is as good.
            if let Some(connection) = self.shared.disk().as_ref().and_then(|disk| disk.connection()) {
                let _ = connection.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE)");
            }
        }
        Ok(report)
    }

    fn prune_memory(&self, what: &Prune) -> PruneReport {
        let mut memory = self.shared.memory();
        let seen = |(id, record): (usize, &Record)| Seen {
            id: i64::try_from(id).unwrap_or(i64::MAX),
            measured_at: Some(record.measured_at),
            valid: record.is_valid(),
        };
        let rows: Vec<Seen> = memory.rows().enumerate().map(seen).collect();
        let gone = doomed(what, &rows);
        let mut next = 0..;
        memory.retain(|_| next.next().is_some_and(|id| !gone.contains(&id)));
        PruneReport { removed: gone.len(), left: memory.len() }
    }
}

/// A row that is to be marked, with its mark.
fn mark(fetched: Fetched, why: &mut impl FnMut(&Record) -> Option<String>) -> Option<(i64, Row)> {
    let id = fetched.id;
    let record = fetched.record().ok().filter(Record::is_valid)?;
    let reason = why(&record)?;
    Some((id, Row::from(Record { invalid: Some(reason), ..record })))
}

/// What pruning looks at.
struct Seen {
    id: i64,
    /// `None` for a row that cannot be read.
    measured_at: Option<i64>,
    valid: bool,
}

impl Seen {
    fn of(fetched: Fetched) -> Seen {
        let id = fetched.id;
        match fetched.record() {
            Ok(record) => Seen { id, measured_at: Some(record.measured_at), valid: record.is_valid() },
            Err(_) => Seen { id, measured_at: None, valid: false },
        }
    }
}

/// The numbers of the rows that go.
fn doomed(what: &Prune, rows: &[Seen]) -> BTreeSet<i64> {
    let goes = |row: &Seen| match row.measured_at {
        None => what.unreadable,
        Some(at) => what.measured_before.is_some_and(|before| at < before) || (what.invalid && !row.valid),
    };
    let mut gone: BTreeSet<i64> = rows.iter().filter(|row| goes(row)).map(|row| row.id).collect();
    if let Some(keep) = what.keep {
        let mut left: Vec<(i64, i64)> = rows
            .iter()
            .filter(|row| !gone.contains(&row.id))
            .filter_map(|row| Some((row.measured_at?, row.id)))
            .collect();
        left.sort_unstable_by(|a, b| b.cmp(a));
        gone.extend(left.into_iter().skip(keep).map(|(_, id)| id));
    }
    gone
}

/// All rows of another file, and how many of them cannot be read.
fn read_file(path: &Path) -> Result<(Vec<Record>, usize), StoreError> {
    let mut file = File::open(path).map_err(StoreError::io(format!("read '{}'", path.display())))?;
    let mut magic = [0; 16];
    if file.read_exact(&mut magic).is_err() || &magic != b"SQLite format 3\0" {
        let file = File::open(path).map_err(StoreError::io(format!("read '{}'", path.display())))?;
        let csv = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
        let format = if csv { Format::Csv } else { Format::Jsonl };
        return transfer::read_records(file, format).map(|records| (records, 0));
    }
    drop(file);
    let readable = connect::readable(path, Duration::from_secs(5)).map_err(|refusal| refusal.error(path))?;
    let (mut records, mut skipped) = (Vec::new(), 0);
    let each = |fetched: Fetched| match fetched.record() {
        Ok(record) => records.push(record),
        Err(_) => skipped += 1,
    };
    sql::scan(&readable.connection, "", [], each).map_err(StoreError::sqlite(path, "read"))?;
    Ok((records, skipped))
}
