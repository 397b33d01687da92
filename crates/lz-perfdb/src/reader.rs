//! The connection that reads, which never waits for the writer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::Connection;

use crate::connect::{self, Readable, Refusal};
use crate::error::StoreError;
use crate::schema::{self, SCHEMA_VERSION};

/// The file, for reading.
pub(crate) struct Reader {
    path: PathBuf,
    busy: Duration,
    open: Option<(Readable, Option<(u64, u64)>)>,
}

impl Reader {
    pub fn new(path: &Path, busy: Duration) -> Reader {
        Reader { path: path.to_owned(), busy, open: None }
    }

    /// Reads in one transaction; `None` where there is nothing of ours to read.
    pub fn read<T>(&mut self, job: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<Option<T>, StoreError> {
        let path = self.path.clone();
        if !self.ready()? {
            return Ok(None);
        }
        let Some((readable, _)) = &self.open else { return Ok(None) };
        let within = |connection: &Connection| {
            let transaction = connection.unchecked_transaction()?;
            // A newer LayerZero may have migrated the file under this connection.
            if schema::version(&transaction)? != i64::from(SCHEMA_VERSION) {
                return Ok(None);
            }
            job(&transaction).map(Some)
        };
        let outcome = within(&readable.connection);
        if outcome.as_ref().map_or(true, Option::is_none) {
            self.open = None;
        }
        outcome.map_err(StoreError::sqlite(&path, "read"))
    }

    /// Makes sure that there is a connection to the file that is at the path now; whether there is something to read.
    pub fn ready(&mut self) -> Result<bool, StoreError> {
        let identity = connect::identity(&self.path);
        if self.open.as_ref().is_some_and(|(readable, opened)| readable.lasting && *opened == identity) {
            return Ok(true);
        }
        self.open = None;
        match connect::readable(&self.path, self.busy) {
            Ok(readable) => {
                self.open = Some((readable, identity));
                Ok(true)
            }
            Err(Refusal::Missing | Refusal::NotOurs(_) | Refusal::Unrecognised(_)) => Ok(false),
            Err(refusal) => Err(refusal.error(&self.path)),
        }
    }
}
