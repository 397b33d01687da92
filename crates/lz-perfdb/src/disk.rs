//! The connection that writes: opened when it is needed, given up when it fails, tried again later.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::{Connection, Transaction, TransactionBehavior};

use crate::connect::{self, Link};
use crate::error::Fault;
use crate::open::{self, Claim, Look, Opened};
use crate::schema::{self, SCHEMA_VERSION};
use crate::state::{Board, State};
use crate::store::Options;

/// The file, for writing.
pub(crate) struct Disk {
    path: PathBuf,
    busy: Duration,
    connection: Option<Link>,
    /// The file that was last opened: a database of ours, whatever has become of it since.
    identity: Option<(u64, u64)>,
    own_place: bool,
    retry: Retry,
}

/// When a disk that failed is tried again.
struct Retry {
    first: Duration,
    delay: Duration,
    not_before: Option<Instant>,
    why: String,
}

/// The delay doubles up to so many times the first.
const LONGEST: u32 = 64;

impl Retry {
    fn failed(&mut self, why: String) {
        self.not_before = Some(Instant::now() + self.delay);
        self.delay = (self.delay * 2).min(self.first * LONGEST);
        self.why = why;
    }

    fn succeeded(&mut self) {
        (self.delay, self.not_before) = (self.first, None);
    }

    fn is_too_early(&self) -> bool {
        self.not_before.is_some_and(|moment| Instant::now() < moment)
    }
}

/// Why a transaction did not happen.
enum Failure {
    Sqlite(rusqlite::Error),
    /// The file has another version than when it was opened.
    Changed,
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Failure {
        Failure::Sqlite(error)
    }
}

impl Disk {
    /// Opens the file.
    pub fn open(path: &Path, options: &Options) -> (Disk, State) {
        let first = options.retry_after;
        let mut disk = Disk {
            path: path.to_owned(),
            busy: options.busy_timeout,
            connection: None,
            identity: None,
            own_place: options.own_place,
            retry: Retry { first, delay: first, not_before: None, why: String::new() },
        };
        let state = disk.reopen(Look::Quick).unwrap_or_else(|state| state);
        (disk, state)
    }

    /// Does something in one transaction; the error says why it did not happen. A disk that failed a moment ago is left
    /// alone unless one insists.
    pub fn write<T>(
        &mut self,
        insist: bool,
        board: &Board,
        mut job: impl FnMut(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, String> {
        if !insist && self.retry.is_too_early() {
            return Err(self.retry.why.clone());
        }
        // A file that was replaced, damaged or changed is opened anew, which puts it right, and tried once more.
        let mut again = true;
        let mut look = Look::Quick;
        loop {
            if self.connection.is_none() || connect::identity(&self.path) != self.identity {
                match self.reopen(look) {
                    Ok(State::Open) => {}
                    Ok(rebuilt) => board.set(rebuilt),
                    Err(state) => {
                        board.set(state);
                        return Err(self.retry.why.clone());
                    }
                }
            }
            let Some(connection) = &mut self.connection else { return Err(self.retry.why.clone()) };
            let (why, fault) = match transact(connection, &mut job) {
                Ok(done) => {
                    self.retry.succeeded();
                    if !board.state().is_durable() {
                        board.set(State::Open);
                    }
                    return Ok(done);
                }
                Err(Failure::Changed) => ("its version has changed".to_owned(), Fault::Statement),
                Err(Failure::Sqlite(error)) => (error.to_string(), Fault::of(&error)),
            };
            // A connection gets over a disk that fails by itself. Without it nobody might be able to read: the file that
            // readers share needs room as well.
            if !matches!(fault, Fault::Busy | Fault::Other) {
                self.connection = None;
            }
            if again && matches!(fault, Fault::Damaged | Fault::Statement) {
                (again, look) = (false, Look::Thorough);
                continue;
            }
            let why = format!("'{}' cannot be written: {why}", self.path.display());
            self.retry.failed(why.clone());
            board.set(State::Memory { why: why.clone() });
            return Err(why);
        }
    }

    /// Reads through the writing connection what it sees, for jobs that are no transaction (`VACUUM`).
    pub fn connection(&self) -> Option<&Connection> {
        self.connection.as_deref()
    }

    /// Opens the file anew, so that it is checked, and set aside if it is damaged.
    pub fn reopen(&mut self, look: Look) -> Result<State, State> {
        self.connection = None;
        let claim = Claim { place: self.own_place, file: self.identity };
        match open::open(&self.path, self.busy, look, claim) {
            Ok(Opened { connection, state }) => {
                self.connection = Some(connection);
                self.identity = connect::identity(&self.path);
                Ok(state)
            }
            Err(state) => {
                self.retry.failed(match &state {
                    State::Memory { why } | State::ReadOnly { why } => why.clone(),
                    State::Open | State::Rebuilt { .. } => state.to_string(),
                });
                Err(state)
            }
        }
    }
}

fn transact<T>(
    connection: &mut Connection,
    job: &mut impl FnMut(&Transaction<'_>) -> rusqlite::Result<T>,
) -> Result<T, Failure> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if schema::version(&transaction)? != i64::from(SCHEMA_VERSION) {
        return Err(Failure::Changed);
    }
    let done = job(&transaction)?;
    transaction.commit()?;
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fails_is_left_alone_for_longer_and_longer() {
        let first = Duration::from_secs(10);
        let mut retry = Retry { first, delay: first, not_before: None, why: String::new() };
        assert!(!retry.is_too_early());
        let mut delays = Vec::new();
        for _ in 0..9 {
            let now = Instant::now();
            retry.failed("full".into());
            let delay = retry.not_before.unwrap().duration_since(now).as_secs();
            delays.push(delay / 10);
            assert!(retry.is_too_early());
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        retry.succeeded();
        assert!(!retry.is_too_early() && retry.delay == first);
    }

    #[test]
    fn only_who_insists_wakes_it_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing/perfdb.sqlite");
        std::fs::write(folder.path().join("missing"), "").unwrap();
        let options =
            Options { busy_timeout: Duration::ZERO, retry_after: Duration::from_secs(3600), ..Options::default() };
        let (mut disk, state) = Disk::open(&path, &options);
        let board = Board::new(state);
        std::fs::remove_file(folder.path().join("missing")).unwrap();
        let mut asked = 0;
        let mut count = |disk: &mut Disk, insist: bool| {
            disk.write(insist, &board, |_| {
                asked += 1;
                Ok(())
            })
            .is_ok()
        };
        assert!(!count(&mut disk, false), "it failed a moment ago");
        assert!(count(&mut disk, true));
        assert!(count(&mut disk, false), "and works again");
        assert_eq!((asked, board.state()), (2, State::Open));
    }
}
