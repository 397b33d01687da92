//! The store: how it is opened, rows in, rows out.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::connect::{self, Refusal};
use crate::disk::Disk;
use crate::error::StoreError;
use crate::filter::Filter;
use crate::queue::Ticket;
use crate::reader::Reader;
use crate::record::Record;
use crate::shared::Shared;
use crate::state::{Board, State};

/// How a store is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Rows older than this do not count; `None` for no limit.
    pub ttl: Option<Duration>,
    /// Only read: the file is neither made, nor migrated, nor set aside, nor written.
    pub read_only: bool,
    /// The path is LayerZero's own, such as the default one in the user's cache: a regular file there that is no database
    /// is set aside. Elsewhere a file is set aside only if something in it says that it was ours.
    pub own_place: bool,
    /// How long other processes are waited for.
    pub busy_timeout: Duration,
    /// How many rows may wait for the writer.
    pub queue_rows: usize,
    /// How long [`PerfDb::put`] waits for room among them.
    pub put_timeout: Duration,
    /// How many rows are held in memory while the disk takes none.
    pub memory_rows: usize,
    /// After how long a disk that took none is tried again, at the next put; the time doubles with every failure, up to
    /// 64 times.
    pub retry_after: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            ttl: None,
            read_only: false,
            own_place: false,
            busy_timeout: Duration::from_secs(5),
            queue_rows: 4096,
            put_timeout: Duration::from_secs(1),
            memory_rows: 100_000,
            retry_after: Duration::from_secs(1),
        }
    }
}

/// Measurements, kept in a file. See the [crate's front page](crate).
pub struct PerfDb {
    pub(crate) shared: Arc<Shared>,
}

impl std::fmt::Debug for PerfDb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PerfDb").field("path", &self.shared.path).finish_non_exhaustive()
    }
}

impl PerfDb {
    /// Opens a store. This never fails: [`PerfDb::state`] says what came of it.
    pub fn open(path: impl AsRef<Path>, options: Options) -> PerfDb {
        let path = path.as_ref();
        let mut reader = Reader::new(path, options.busy_timeout);
        if options.read_only {
            let board = match looked_at(path, options.busy_timeout) {
                state @ State::ReadOnly { .. } => Board::asked(state),
                state => Board::new(state),
            };
            return PerfDb { shared: Arc::new(Shared::new(Some(path), options, None, Some(reader), board)) };
        }
        let (disk, state) = Disk::open(path, &options);
        // Now, while there is room for what it needs; when a row is wanted the disk may be full. Failures are seen then.
        let _ = reader.ready();
        let shared = Arc::new(Shared::new(Some(path), options, Some(disk), Some(reader), Board::new(state)));
        Shared::start_writer(&shared);
        PerfDb { shared }
    }

    /// A store without a file.
    pub fn in_memory() -> PerfDb {
        let board = Board::asked(State::Memory { why: "no file was asked for".into() });
        PerfDb { shared: Arc::new(Shared::new(None, Options::default(), None, None, board)) }
    }

    /// Its file, if it has one.
    pub fn path(&self) -> Option<&Path> {
        self.shared.path.as_deref()
    }

    /// How it stands.
    pub fn state(&self) -> State {
        if let Err(forked) = self.shared.here() {
            return State::Memory { why: forked.to_string() };
        }
        self.shared.board.state()
    }

    /// Every sentence it has told so far, each once. They went to the log as warnings.
    pub fn notes(&self) -> Vec<String> {
        self.shared.here().map_or_else(|_| Vec::new(), |()| self.shared.board.notes())
    }

    /// Hands rows to the writer, which writes them in one transaction. A row replaces one of the same key that is not
    /// newer. Waits only while the queue is full, and for [`Options::put_timeout`] at most.
    pub fn put(&self, records: Vec<Record>) -> Ticket {
        if let Some(impossible) = records.iter().find_map(|record| record.check().err()) {
            self.shared.counters.refused.fetch_add(records.len() as u64, Ordering::Relaxed);
            return Ticket::of(Err(impossible.into()));
        }
        self.shared.hand_over(records, false)
    }

    /// Waits until everything put so far is on the disk, also what it did not take before; or says why it is not.
    pub fn flush(&self) -> Result<(), StoreError> {
        self.shared.hand_over(Vec::new(), true).wait()
    }

    /// The rows that are wanted, by operation, device, call, mode and kernel. Rows that are not as they were written are
    /// left out, and told of once.
    pub fn records(&self, filter: &Filter) -> Result<Vec<Record>, StoreError> {
        self.shared.gather(filter, self.shared.options.ttl)
    }
}

impl Drop for PerfDb {
    fn drop(&mut self) {
        Shared::close(&self.shared);
    }
}

/// The state of a store that is only read.
fn looked_at(path: &Path, busy: Duration) -> State {
    let shown = path.display();
    match connect::readable(path, busy) {
        Ok(_) => State::ReadOnly { why: "opened for reading".into() },
        Err(Refusal::Missing) => State::Memory { why: format!("'{shown}' does not exist") },
        Err(Refusal::NotOurs(why) | Refusal::Unrecognised(why)) => State::Memory { why: format!("'{shown}' {why}") },
        Err(Refusal::Damaged(why)) => State::Memory { why: format!("'{shown}' is damaged: {why}") },
        Err(Refusal::ReadOnly(why) | Refusal::Other(why)) => {
            State::Memory { why: format!("'{shown}' cannot be read: {why}") }
        }
    }
}
