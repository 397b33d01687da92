//! What a store and the thread that writes for it share: the queue between them, the file, and rows in memory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::disk::Disk;
use crate::error::StoreError;
use crate::filter::Filter;
use crate::memory::Memory;
use crate::open::Look;
use crate::queue::{Job, Queue, Ticket};
use crate::reader::Reader;
use crate::record::{Record, now_ms};
use crate::state::{Board, State};
use crate::store::Options;
use crate::{sql, support};

/// What the store and its writer share.
pub(crate) struct Shared {
    /// The process that opened it.
    opener: u32,
    pub options: Options,
    pub path: Option<PathBuf>,
    pub queue: Queue,
    pub board: Board,
    disk: Mutex<Option<Disk>>,
    reader: Mutex<Option<Reader>>,
    memory: Mutex<Memory>,
    /// Whether there is a thread that writes.
    has_writer: AtomicBool,
    pub counters: Counters,
}

/// What happened so far.
#[derive(Default)]
pub(crate) struct Counters {
    /// Rows that were written.
    pub written: AtomicU64,
    /// Rows that the disk did not take when they were put.
    pub not_written: AtomicU64,
    /// Rows that were refused altogether.
    pub refused: AtomicU64,
    /// Rows of the file that could not be read the last time.
    pub unreadable: AtomicU64,
}

impl Shared {
    pub fn new(
        path: Option<&Path>,
        options: Options,
        disk: Option<Disk>,
        reader: Option<Reader>,
        board: Board,
    ) -> Shared {
        Shared {
            opener: std::process::id(),
            path: path.map(Path::to_owned),
            queue: Queue::new(options.queue_rows),
            board,
            disk: Mutex::new(disk),
            reader: Mutex::new(reader),
            memory: Mutex::new(Memory::new(options.memory_rows)),
            has_writer: AtomicBool::new(false),
            counters: Counters::default(),
            options,
        }
    }

    /// Starts the thread that writes.
    pub fn start_writer(shared: &Arc<Shared>) {
        let writer = Arc::clone(shared);
        shared.has_writer.store(true, Ordering::Release);
        let started = thread::Builder::new().name("layerzero-perfdb".into()).spawn(move || {
            let _end = End(&writer);
            while let Some(jobs) = writer.queue.take() {
                writer.store(jobs);
            }
            // What the disk did not take before, once more.
            writer.store(vec![Job::new(Vec::new(), true).0]);
        });
        if let Err(error) = started {
            shared.writer_gone(format!("no thread can be started to write: {error}"));
        }
    }

    /// Writes what waits and closes the file.
    pub fn close(shared: &Arc<Shared>) {
        if shared.here().is_err() {
            // The connections are the parent's: closing them here would take its locks away.
            std::mem::forget(Arc::clone(shared));
            return;
        }
        shared.queue.close();
        if shared.has_writer.load(Ordering::Acquire) {
            // A disk that hangs does not keep the process from ending.
            if !shared.queue.wait_for_end(shared.options.busy_timeout * 2) {
                return;
            }
        }
        // The last one that closes the file tidies up, and a connection that only reads cannot.
        shared.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.disk().take();
    }

    fn writer_gone(&self, why: String) {
        self.has_writer.store(false, Ordering::Release);
        self.queue.end();
        if self.board.state().is_durable() {
            self.board.set(State::Memory { why });
        }
    }

    /// Whether this is the process that opened the store. It is asked before any lock is taken: a lock that another
    /// thread held when the process was forked is held forever.
    pub fn here(&self) -> Result<(), StoreError> {
        if std::process::id() == self.opener { Ok(()) } else { Err(StoreError::Forked { opener: self.opener }) }
    }

    /// Gives rows to the writer; without one they stay in memory.
    pub fn hand_over(&self, rows: Vec<Record>, insist: bool) -> Ticket {
        if let Err(forked) = self.here() {
            return Ticket::of(Err(forked));
        }
        let (job, ticket) = Job::new(rows, insist);
        if !self.has_writer.load(Ordering::Acquire) {
            self.keep_in_memory(job);
            return ticket;
        }
        match self.queue.push(job, self.options.put_timeout).map_err(|refused| *refused) {
            Ok(()) => {}
            Err((job, StoreError::Closed)) => self.keep_in_memory(job),
            Err((job, error)) => {
                self.counters.refused.fetch_add(job.rows.len() as u64, Ordering::Relaxed);
                job.answer(Err(error));
            }
        }
        ticket
    }

    fn keep_in_memory(&self, job: Job) {
        let why = match self.board.state() {
            State::Memory { why } | State::ReadOnly { why } => why,
            state => state.to_string(),
        };
        self.not_written(job, &why);
    }

    /// Writes jobs, and what is held in memory, in one transaction.
    fn store(&self, jobs: Vec<Job>) {
        let insist = jobs.iter().any(|job| job.insist);
        let held: Vec<Record> = self.memory().rows().cloned().collect();
        let rows = || held.iter().chain(jobs.iter().flat_map(|job| &job.rows));
        if rows().next().is_none() {
            return jobs.into_iter().for_each(|job| job.answer(Ok(())));
        }
        let written = match &mut *self.disk() {
            Some(disk) => disk.write(insist, &self.board, |transaction| {
                rows().try_for_each(|record| sql::upsert(transaction, record, support::newer).map(drop))
            }),
            None => Err("there is no file".into()),
        };
        match written {
            Ok(()) => {
                self.counters.written.fetch_add(rows().count() as u64, Ordering::Relaxed);
                self.memory().written(&held);
                jobs.into_iter().for_each(|job| job.answer(Ok(())));
            }
            Err(why) => jobs.into_iter().for_each(|job| self.not_written(job, &why)),
        }
    }

    /// Keeps rows that are not on the disk, and answers so.
    fn not_written(&self, mut job: Job, why: &str) {
        let rows = std::mem::take(&mut job.rows);
        if self.path.is_some() {
            self.counters.not_written.fetch_add(rows.len() as u64, Ordering::Relaxed);
        }
        let mut memory = self.memory();
        let mut no_room = 0;
        for record in rows {
            no_room += u64::from(memory.put(record, support::newer).is_none());
        }
        let (limit, held) = (memory.limit(), memory.len());
        drop(memory);
        self.counters.refused.fetch_add(no_room, Ordering::Relaxed);
        job.answer(if no_room > 0 {
            Err(StoreError::MemoryFull { limit, why: why.into() })
        } else if self.path.is_none() || held == 0 {
            Ok(())
        } else {
            Err(StoreError::NotStored { why: why.into() })
        });
    }

    /// The rows of memory and file that are wanted, of each key the newest.
    pub fn gather(&self, filter: &Filter, ttl: Option<Duration>) -> Result<Vec<Record>, StoreError> {
        self.here()?;
        // Memory first: a row goes from there to the file, never back.
        let mut rows: Vec<Record> = self.memory().rows().filter(|r| filter.wants(&r.key)).cloned().collect();
        rows.extend(self.on_disk(filter)?);
        // The sort is stable: of equally new ones, that of memory comes first.
        rows.sort_by(|a, b| a.key.cmp(&b.key).then(b.measured_at.cmp(&a.measured_at)));
        rows.dedup_by(|later, first| later.key == first.key);
        if let Some(ttl) = ttl {
            let oldest = now_ms().saturating_sub(i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX));
            for record in rows.iter_mut().filter(|r| r.is_valid() && r.measured_at < oldest) {
                record.invalid = Some(format!("measured longer ago than counts ({} s)", ttl.as_secs()));
            }
        }
        rows.retain(|record| filter.takes(record));
        rows.truncate(filter.limit.unwrap_or(usize::MAX));
        Ok(rows)
    }

    fn on_disk(&self, filter: &Filter) -> Result<Vec<Record>, StoreError> {
        match self.scan(filter) {
            // Opening the file anew sets the damaged one aside.
            Err(StoreError::Damaged { .. }) if self.heal() => self.scan(filter),
            outcome => outcome,
        }
    }

    /// Has the file checked and put right; whether that went well.
    fn heal(&self) -> bool {
        let Some(disk) = &mut *self.disk() else { return false };
        let outcome = disk.reopen(Look::Thorough);
        let healed = outcome.is_ok();
        self.board.set(outcome.unwrap_or_else(|state| state));
        healed
    }

    fn scan(&self, filter: &Filter) -> Result<Vec<Record>, StoreError> {
        let Some(reader) = &mut *self.reader.lock().unwrap_or_else(PoisonError::into_inner) else {
            return Ok(Vec::new());
        };
        let (mut rows, mut unreadable) = (Vec::new(), 0);
        let read = reader.read(|connection| {
            filter.condition().scan(connection, |fetched| match fetched.record() {
                Ok(record) => rows.push(record),
                Err(_) => unreadable += 1,
            })
        });
        self.counters.unreadable.store(unreadable, Ordering::Relaxed);
        if unreadable > 0 {
            let path = self.path.as_deref().unwrap_or(Path::new("")).display().to_string();
            self.board.tell(format!(
                "'{path}' has rows that are not as they were written; they are left out, see 'layerzero perfdb verify'"
            ));
        }
        read.map(|_| rows)
    }

    pub fn disk(&self) -> MutexGuard<'_, Option<Disk>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells that the writer has ended, however it did.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.writer_gone("the thread that writes has ended by a panic".into());
        } else {
            self.0.queue.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, Mode, Outcome, PerfDb};

    fn row(kernel: &str) -> Record {
        Record::new(Key::new(kernel, "op", "d", Mode::Eager, ""), Outcome::Failed { error: "x".into() })
    }

    #[test]
    fn a_writer_that_panics_leaves_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("perfdb.sqlite");
        let (disk, state) = Disk::open(&path, &Options::default());
        let reader = Reader::new(&path, Duration::ZERO);
        let shared =
            Arc::new(Shared::new(Some(&path), Options::default(), Some(disk), Some(reader), Board::new(state)));
        shared.has_writer.store(true, Ordering::Release);
        let db = PerfDb { shared };
        assert_eq!(db.state(), State::Open);
        let waiting = db.put(vec![row("waiting")]);
        let writer = Arc::clone(&db.shared);
        let panicked = thread::spawn(move || {
            let _end = End(&writer);
            let _jobs = writer.queue.take();
            panic!("as if the writer had a bug");
        });
        assert!(panicked.join().is_err());
        assert!(matches!(waiting.wait(), Err(StoreError::Closed)));
        assert_eq!(db.state(), State::Memory { why: "the thread that writes has ended by a panic".into() });
        let error = db.put(vec![row("later")]).wait().unwrap_err();
        assert!(matches!(error, StoreError::NotStored { .. }), "{error}");
        let kernels: Vec<String> = db.records(&Filter::all()).unwrap().into_iter().map(|r| r.key.kernel_id).collect();
        assert_eq!(kernels, ["later"]);
    }

    #[test]
    fn a_fork_is_told_so_and_touches_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("perfdb.sqlite");
        let (disk, state) = Disk::open(&path, &Options::default());
        let mut shared = Shared::new(Some(&path), Options::default(), Some(disk), None, Board::new(state));
        shared.opener += 1;
        let opener = shared.opener;
        let db = PerfDb { shared: Arc::new(shared) };
        // Locks that some thread of the parent held.
        let shared = Arc::clone(&db.shared);
        let (_disk, _memory) = (shared.disk(), shared.memory());
        let is_forked = |error: StoreError| assert!(matches!(error, StoreError::Forked { opener: o } if o == opener));
        is_forked(db.put(vec![row("k")]).wait().unwrap_err());
        is_forked(db.flush().unwrap_err());
        is_forked(db.records(&Filter::all()).unwrap_err());
        is_forked(db.invalidate(|_| None).unwrap_err());
        is_forked(db.merge(Vec::new()).unwrap_err());
        is_forked(db.prune(&crate::Prune::default()).unwrap_err());
        is_forked(db.verify().unwrap_err());
        is_forked(db.export_jsonl(Vec::new()).unwrap_err());
        assert!(matches!(db.state(), State::Memory { .. }));
        assert_eq!((db.stats().rows, db.notes()), (0, Vec::new()));
        drop(db);
    }

    #[test]
    fn it_may_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<PerfDb>();
    }
}
