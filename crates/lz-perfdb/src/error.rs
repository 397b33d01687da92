//! What can go wrong. None of it is a reason to fail a call: the store is a cache.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::ErrorCode;

use crate::record::Impossible;
use crate::schema::{OLDEST_READABLE, SCHEMA_VERSION};

/// Why the store did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A measurement that cannot be; nothing of what was put with it is taken.
    #[error(transparent)]
    Impossible(#[from] Impossible),
    /// The rows could not be written. What was put stays readable in this process, and is written with the next rows
    /// that can be.
    #[error("not written: {why}")]
    NotStored {
        /// Why.
        why: String,
    },
    /// A change of many rows could not be made; nothing has changed.
    #[error("nothing was changed: {why}")]
    Unwritable {
        /// Why.
        why: String,
    },
    /// The writer is too far behind.
    #[error(
        "the writer is {rows} rows behind and took none for {waited:?}; measure less at a time, or wait for tickets"
    )]
    QueueFull {
        /// How many rows wait.
        rows: usize,
        /// How long it was waited for room.
        waited: Duration,
    },
    /// As many rows as memory may hold could not be written.
    #[error("{limit} rows wait in memory for a disk that takes them ({why}); no more are taken")]
    MemoryFull {
        /// How many are held.
        limit: usize,
        /// Why they are not written.
        why: String,
    },
    /// The process was forked after the store was opened. SQLite's connections and the writer stay with the parent.
    #[error("opened by process {opener}, of which this one is a fork; open the store again here")]
    Forked {
        /// The process that opened it.
        opener: u32,
    },
    /// The writer's thread has ended.
    #[error("the store is closed")]
    Closed,
    /// The file is damaged.
    #[error("'{}' is damaged: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The file is not ours to read.
    #[error("'{}' {why}", path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What it is.
        why: String,
    },
    /// SQLite says no.
    #[error("'{}': cannot {doing}: {source}", path.display())]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What SQLite says.
        source: rusqlite::Error,
    },
    /// A file cannot be read or written.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What was tried.
        doing: String,
        /// What the system says.
        source: io::Error,
    },
    /// A line of an imported file is wrong; nothing of the file is taken.
    #[error("line {line}: {what}")]
    BadLine {
        /// Which line, from 1.
        line: u64,
        /// What is wrong with it.
        what: String,
    },
    /// A line of an imported file is of another version; nothing of the file is taken.
    #[error(
        "line {line}: schema_version is {found}, this version reads {OLDEST_READABLE} to {SCHEMA_VERSION}; export the \
         file again with the LayerZero that is to read it"
    )]
    OtherSchema {
        /// Which line, from 1.
        line: u64,
        /// The version it has.
        found: u64,
    },
}

impl StoreError {
    pub(crate) fn sqlite(path: &Path, doing: &'static str) -> impl FnOnce(rusqlite::Error) -> StoreError {
        move |source| match Fault::of(&source) {
            Fault::Damaged => StoreError::Damaged { path: path.to_owned(), why: source.to_string() },
            _ => StoreError::Sqlite { path: path.to_owned(), doing, source },
        }
    }

    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
        move |source| StoreError::Io { doing: doing.into(), source }
    }
}

/// What an error of SQLite means for the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Others are writing; later it goes.
    Busy,
    /// The file is not what it was.
    Damaged,
    /// It may be read at most.
    ReadOnly,
    /// The statement does not fit the table: somebody else changed it.
    Statement,
    /// The disk, or memory.
    Other,
}

impl Fault {
    pub fn of(error: &rusqlite::Error) -> Fault {
        use rusqlite::Error;
        // What should be a name or a number is neither.
        if matches!(error, Error::Utf8Error(..) | Error::FromSqlConversionFailure(..) | Error::InvalidColumnType(..)) {
            return Fault::Damaged;
        }
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Fault::Busy,
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Fault::Damaged,
            Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => Fault::ReadOnly,
            Some(ErrorCode::Unknown | ErrorCode::SchemaChanged | ErrorCode::ConstraintViolation) => Fault::Statement,
            _ => Fault::Other,
        }
    }
}
