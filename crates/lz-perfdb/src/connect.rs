//! Connections to a file: what it is without touching it, and how it is opened.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, MAIN_DB, OpenFlags};

use crate::error::{Fault, StoreError};
use crate::forks::{self, Mark};
use crate::recognise::{Header, accept_unmarked, header};
use crate::schema::{self, Kind, SCHEMA_VERSION};

/// Why a file cannot be used.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// There is none.
    Missing,
    /// It was ours, or nobody's, and is broken.
    Damaged(String),
    /// It is not ours to change: somebody else's, or of a later version.
    NotOurs(String),
    /// Nothing in it says that it is ours. It is left alone, unless its owner says that the place is ours.
    Unrecognised(String),
    /// It may be read at most.
    ReadOnly(String),
    /// Another reason, which may pass.
    Other(String),
}

impl From<rusqlite::Error> for Refusal {
    fn from(error: rusqlite::Error) -> Refusal {
        match Fault::of(&error) {
            // A statement that always works does not, on a file that is otherwise ours.
            Fault::Damaged | Fault::Statement => Refusal::Damaged(error.to_string()),
            Fault::ReadOnly => Refusal::ReadOnly(error.to_string()),
            Fault::Busy | Fault::Other => Refusal::Other(error.to_string()),
        }
    }
}

impl Refusal {
    /// As the error of reading the file.
    pub fn error(self, path: &Path) -> StoreError {
        let path = path.to_owned();
        match self {
            Refusal::Missing => StoreError::NotOurs { path, why: "does not exist".into() },
            Refusal::NotOurs(why) | Refusal::Unrecognised(why) => StoreError::NotOurs { path, why },
            Refusal::Damaged(why) => StoreError::Damaged { path, why },
            Refusal::ReadOnly(why) | Refusal::Other(why) => {
                StoreError::Io { doing: format!("read '{}'", path.display()), source: io::Error::other(why) }
            }
        }
    }

    pub fn newer(version: i64) -> Refusal {
        Refusal::NotOurs(format!(
            "is of version {version}, this LayerZero knows up to {SCHEMA_VERSION}; it is left as it is"
        ))
    }

    pub fn foreign() -> Refusal {
        Refusal::NotOurs("is a SQLite database of another program; it is left as it is".into())
    }
}

/// A connection, and the mark that this process has one.
pub(crate) struct Link {
    connection: Connection,
    // Dropped after the connection.
    _mark: Mark,
}

impl Deref for Link {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl DerefMut for Link {
    fn deref_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }
}

impl Link {
    fn open(target: impl AsRef<Path>, path: &Path, flags: OpenFlags, busy: Duration) -> rusqlite::Result<Link> {
        let connection = Connection::open_with_flags(target, flags | FLAGS)?;
        cautious(&connection, busy)?;
        Ok(Link { connection, _mark: Mark::new(identity(path)) })
    }

    fn in_memory() -> rusqlite::Result<Link> {
        Ok(Link { connection: Connection::open_in_memory()?, _mark: Mark::new(None) })
    }
}

/// A connection that writes, to a file that is there. Nothing was read through it yet.
pub(crate) fn writable(path: &Path, busy: Duration) -> Result<Link, Refusal> {
    if let Some(parent) = forks::inherited(identity(path)) {
        return Err(Refusal::ReadOnly(format!("process {parent}, of which this one is a fork, has it open")));
    }
    let link = Link::open(path, path, OpenFlags::SQLITE_OPEN_READ_WRITE, busy)?;
    if link.is_readonly(MAIN_DB)? {
        return Err(Refusal::ReadOnly("the file is write-protected".into()));
    }
    Ok(link)
}

const FLAGS: OpenFlags = OpenFlags::SQLITE_OPEN_NO_MUTEX.union(OpenFlags::SQLITE_OPEN_EXRESCODE);

/// Takes nothing in the file for granted.
fn cautious(connection: &Connection, busy: Duration) -> rusqlite::Result<()> {
    connection.busy_timeout(busy)?;
    connection.set_prepared_statement_cache_capacity(32);
    connection.pragma_update(None, "trusted_schema", false)?;
    connection.pragma_update(None, "cell_size_check", true)
}

/// What only our own file may be set to. A row that is acknowledged is on the disk, not only in its cache: writing is
/// rare and nobody waits for it, so that is worth a sync.
pub(crate) fn settle(connection: &Connection, path: &Path) -> rusqlite::Result<()> {
    let journal = if on_this_machine(path) { "WAL" } else { "DELETE" };
    connection.pragma_update_and_check(None, "journal_mode", journal, |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update_and_check(None, "journal_size_limit", 8 << 20, |_| Ok(()))
}

/// A connection that only reads, to a database in the current version.
pub(crate) struct Readable {
    pub connection: Link,
    /// Whether it sees what others write from now on.
    pub lasting: bool,
}

/// Opens a file for reading alone. One of an older version is copied to memory and migrated there.
pub(crate) fn readable(path: &Path, busy: Duration) -> Result<Readable, Refusal> {
    let still = |connection: Link| Readable { connection, lasting: false };
    match header(path)? {
        Header::Missing => return Err(Refusal::Missing),
        Header::Empty => return empty().map(still),
        Header::Unmarked => accept_unmarked(path)?,
        Header::Ours => {}
    }
    let usable = |link: Link| schema::kind(&link).map(|kind| (link, kind));
    let alone = || immutable(path).and_then(usable).map(|(link, kind)| (link, kind, false));
    let (connection, kind, lasting) = match forks::inherited(identity(path)) {
        Some(_) => alone()?,
        None => match reading(path, busy).and_then(usable) {
            Ok((link, kind)) => (link, kind, true),
            // A WAL needs a file beside it. Where none can be made, the database alone is the best there is.
            Err(error) if matches!(Fault::of(&error), Fault::ReadOnly | Fault::Other) => alone()?,
            Err(error) => return Err(error.into()),
        },
    };
    match kind {
        Kind::Ours(SCHEMA_VERSION) => Ok(Readable { connection, lasting }),
        Kind::Ours(_) => migrated_copy(&connection).map(still),
        Kind::Empty => empty().map(still),
        Kind::Newer(version) => Err(Refusal::newer(version)),
        Kind::Foreign => Err(Refusal::foreign()),
        Kind::Maimed => Err(Refusal::Damaged("its table is not the one it should have".into())),
    }
}

/// A connection that only reads whatever is there.
pub(crate) fn reading(path: &Path, busy: Duration) -> rusqlite::Result<Link> {
    Link::open(path, path, OpenFlags::SQLITE_OPEN_READ_ONLY, busy)
}

/// A connection that reads the file as it lies there: no locks, no WAL, nothing beside it.
pub(crate) fn immutable(path: &Path) -> rusqlite::Result<Link> {
    let uri = format!("file:{}?mode=ro&immutable=1", escaped(path));
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    Link::open(uri, path, flags, Duration::ZERO)
}

fn empty() -> Result<Link, Refusal> {
    let mut memory = Link::in_memory()?;
    schema::migrate(&mut memory)?;
    Ok(memory)
}

fn migrated_copy(connection: &Connection) -> Result<Link, Refusal> {
    let mut memory = Link::in_memory()?;
    {
        let backup = Backup::new(connection, &mut memory)?;
        while backup.step(1000)? == StepResult::More {}
    }
    schema::migrate(&mut memory)?;
    match schema::kind(&memory)? {
        Kind::Ours(SCHEMA_VERSION) => Ok(memory),
        kind => Err(Refusal::Other(format!("the copy of an older version could not be migrated ({kind:?})"))),
    }
}

/// A path as part of a URI.
fn escaped(path: &Path) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/-_.".contains(byte);
    let escape = |byte: &u8| if plain(byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") };
    path.as_os_str().as_encoded_bytes().iter().map(escape).collect()
}

/// The file's name with something appended.
pub(crate) fn beside(path: &Path, suffix: impl AsRef<OsStr>) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// What tells whether a path still leads to the file that was opened.
#[cfg(unix)]
pub(crate) fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

#[cfg(not(unix))]
pub(crate) fn identity(path: &Path) -> Option<(u64, u64)> {
    path.exists().then_some((0, 0))
}

/// File systems that other machines write to as well. Readers and writers of a WAL share memory, which they cannot.
#[cfg(target_os = "linux")]
const SHARED: &[i64] = &[
    0x6969,      // NFS
    0xff53_4d42, // CIFS
    0xfe53_4d42, // SMB
    0x0bd0_0bd0, // Lustre
    0x4750_4653, // GPFS
    0x00c3_6400, // Ceph
    0x1983_0326, // BeeGFS
    0x5346_414f, // AFS
    0x0102_1997, // 9P
    0x6573_5546, // FUSE
];

#[cfg(target_os = "linux")]
fn on_this_machine(path: &Path) -> bool {
    // The constants are 32 bits wide, the field is as wide as the platform's word and may have been sign-extended.
    rustix::fs::statfs(path).map_or(true, |found| !SHARED.contains(&(i64::from(found.f_type as u32))))
}

#[cfg(not(target_os = "linux"))]
fn on_this_machine(_: &Path) -> bool {
    true
}
