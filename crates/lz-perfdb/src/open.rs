//! Opening the file for writing: making it, migrating it, or setting it aside.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::connect::{self, Link, Refusal, beside};
use crate::error::Fault;
use crate::recognise::{self, Header};
use crate::record::now_ms;
use crate::salvage;
use crate::schema::{self, Kind, SCHEMA_VERSION};
use crate::sql;
use crate::state::State;
use crate::support;

/// A connection that writes, and how it came about.
pub(crate) struct Opened {
    pub connection: Link,
    /// [`State::Open`] or [`State::Rebuilt`].
    pub state: State,
}

/// How closely a file is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Are its pages in order.
    Quick,
    /// Do its indices fit the table as well: what a statement has stumbled upon may lie there.
    Thorough,
}

/// Why a file is ours though nothing in it says so any more.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Claim {
    /// The place is: nobody but LayerZero has a file there.
    pub place: bool,
    /// This file was a database of ours when it was last opened here.
    pub file: Option<(u64, u64)>,
}

impl Claim {
    fn covers(self, path: &Path) -> bool {
        // A link may lead to anybody's file.
        let in_place = || fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
        self.place && in_place() || self.file.is_some() && self.file == connect::identity(path)
    }
}

/// Opens the file, or says in which state the store is without it.
pub(crate) fn open(path: &Path, busy: Duration, look: Look, claim: Claim) -> Result<Opened, State> {
    let refused = |refusal: Refusal| without(path, busy, refusal);
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    make_directory(directory).map_err(|error| State::Memory {
        why: format!("the directory '{}' cannot be made: {error}", directory.display()),
    })?;
    // Only one process at a time makes, migrates or sets aside: a second would set aside what the first has made.
    let lock = Lock::take(directory, busy);
    match attempt(path, busy, look, lock.is_some()) {
        Ok(connection) => Ok(Opened { connection, state: State::Open }),
        Err(Refusal::Damaged(why)) if lock.is_some() => rebuild(path, busy, why),
        Err(Refusal::Unrecognised(_)) if lock.is_some() && claim.covers(path) => {
            rebuild(path, busy, "it is no SQLite database".into())
        }
        Err(refusal) => Err(refused(refusal)),
    }
}

/// What is left of the store when its file cannot be written.
fn without(path: &Path, busy: Duration, refusal: Refusal) -> State {
    let shown = path.display();
    match refusal {
        Refusal::ReadOnly(why) => match connect::readable(path, busy) {
            Ok(_) => State::ReadOnly { why: format!("'{shown}' cannot be written: {why}") },
            Err(_) => State::Memory { why: format!("'{shown}' can neither be written nor read: {why}") },
        },
        Refusal::NotOurs(why) | Refusal::Unrecognised(why) => State::Memory { why: format!("'{shown}' {why}") },
        Refusal::Damaged(why) => {
            State::Memory { why: format!("'{shown}' is damaged and cannot be set aside now: {why}") }
        }
        Refusal::Other(why) => State::Memory { why: format!("'{shown}' cannot be opened: {why}") },
        Refusal::Missing => State::Memory { why: format!("'{shown}' is missing and cannot be made") },
    }
}

fn make_directory(directory: &Path) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(directory)
}

/// Makes an empty file, where none is, that only its owner may read; SQLite gives its other files the same mode. A link
/// that leads nowhere yet is followed.
fn make_file(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path).map(drop)
}

/// One try at the file as it is.
fn attempt(path: &Path, busy: Duration, look: Look, may_change: bool) -> Result<Link, Refusal> {
    match recognise::header(path)? {
        Header::Missing => {
            recognise::refuse_neighbours(path)?;
            let unmade = |error: io::Error| match error.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    Refusal::ReadOnly(error.to_string())
                }
                _ => Refusal::Other(error.to_string()),
            };
            make_file(path).map_err(unmade)?;
        }
        Header::Empty => recognise::refuse_neighbours(path)?,
        Header::Unmarked => recognise::accept_unmarked(path)?,
        Header::Ours => {}
    }
    let mut connection = connect::writable(path, busy)?;
    let kind = schema::kind(&connection)?;
    if matches!(kind, Kind::Ours(_)) {
        check(&connection, look)?;
    }
    match kind {
        Kind::Ours(SCHEMA_VERSION) => {}
        Kind::Empty | Kind::Ours(_) if !may_change => {
            return Err(Refusal::Other("another process has been making or migrating it for too long".into()));
        }
        Kind::Empty => schema::migrate(&mut connection)?,
        Kind::Ours(from) => {
            let copy = back_up(&connection, path, from)?;
            schema::migrate(&mut connection).map_err(|error| {
                drop(fs::remove_file(copy));
                Refusal::Other(format!("it cannot be migrated from version {from}: {error}"))
            })?;
        }
        Kind::Maimed => return Err(Refusal::Damaged("its table is not the one it should have".into())),
        // What the first bytes do not say yet: it is still in the WAL of whoever writes it.
        Kind::Newer(version) => return Err(Refusal::newer(version)),
        Kind::Foreign => return Err(Refusal::foreign()),
    }
    patiently(busy, || connect::settle(&connection, path))?;
    Ok(connection)
}

/// Repeats what SQLite itself does not wait for: a change of the journal's mode.
fn patiently(busy: Duration, mut job: impl FnMut() -> rusqlite::Result<()>) -> rusqlite::Result<()> {
    let deadline = Instant::now() + busy;
    loop {
        match job() {
            Err(error) if Fault::of(&error) == Fault::Busy && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(5));
            }
            outcome => return outcome,
        }
    }
}

fn check(connection: &Connection, look: Look) -> Result<(), Refusal> {
    let sql = match look {
        Look::Quick => "PRAGMA quick_check(1)",
        Look::Thorough => "PRAGMA integrity_check(1)",
    };
    let found: String = connection.query_row(sql, [], |row| row.get(0))?;
    if found == "ok" { Ok(()) } else { Err(Refusal::Damaged(found)) }
}

/// Copies the file before it is migrated. A copy that is there from before stays.
fn back_up(connection: &Connection, path: &Path, version: u32) -> Result<PathBuf, Refusal> {
    let plain = beside(path, format!(".backup-v{version}"));
    let stamped = beside(path, format!(".backup-v{version}-{}", now_ms()));
    let copy = if plain.symlink_metadata().is_ok() { stamped } else { plain };
    let unmade = |error| Refusal::Other(format!("no copy can be made before it is migrated: {error}"));
    make_file(&copy).map_err(unmade)?;
    let target = copy.to_str().ok_or_else(|| Refusal::Other("its path is not UTF-8".into()))?;
    connection.execute("VACUUM INTO ?1", [target]).inspect_err(|_| drop(fs::remove_file(&copy)))?;
    Ok(copy)
}

/// Moves a damaged file away, makes a new one, and puts into it what could still be read.
fn rebuild(path: &Path, busy: Duration, why: String) -> Result<Opened, State> {
    let failed = |why: String| State::Memory { why: format!("'{}' is damaged, and {why}", path.display()) };
    let set_aside = set_aside(path).map_err(|error| failed(format!("cannot be set aside: {error}")))?;
    let mut connection = match attempt(path, busy, Look::Quick, true) {
        Ok(connection) => connection,
        Err(refusal) => return Err(without(path, busy, refusal)),
    };
    let records = salvage::records(&set_aside);
    let saved = put_back(&mut connection, &records).unwrap_or(0);
    Ok(Opened { connection, state: State::Rebuilt { set_aside, why, saved } })
}

fn put_back(connection: &mut Connection, records: &[crate::Record]) -> rusqlite::Result<usize> {
    let transaction = connection.transaction()?;
    for record in records {
        sql::upsert(&transaction, record, support::newer)?;
    }
    transaction.commit()?;
    Ok(records.len())
}

/// Moves the file and those that belong to it. Links are followed: what they lead to is moved.
fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let path = fs::canonicalize(path)?;
    let mut stamp = now_ms();
    let mut aside = beside(&path, format!(".corrupt-{stamp}"));
    while aside.symlink_metadata().is_ok() {
        stamp += 1;
        aside = beside(&path, format!(".corrupt-{stamp}"));
    }
    fs::rename(&path, &aside)?;
    // A WAL or a journal that stayed would be taken for one of the new file.
    for suffix in ["-wal", "-shm", "-journal"] {
        match fs::rename(beside(&path, suffix), beside(&aside, suffix)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(aside)
}

/// The right to change which file is at the path, among processes that ask for it.
struct Lock {
    _directory: File,
}

impl Lock {
    /// Waits for it; `None` where it cannot be had in time, or at all.
    fn take(directory: &Path, patience: Duration) -> Option<Lock> {
        let directory = File::open(directory).ok()?;
        let deadline = Instant::now() + patience;
        loop {
            match directory.try_lock() {
                Ok(()) => return Some(Lock { _directory: directory }),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return None,
                // No locks on this file system: then nobody has one, and there is no choice but to go on.
                Err(TryLockError::Error(_)) => return Some(Lock { _directory: directory }),
            }
        }
    }
}
