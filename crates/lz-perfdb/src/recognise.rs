//! Whose file is it? Found out by reading alone: opening somebody else's database may already change it.
//!
//! A file is ours if its first page says so: SQLite's magic bytes together with our application id. A damaged header is
//! still ours if two independent traces are left: magic bytes with a few flipped bits, our application id, the statement
//! that made our table. Everything else is somebody else's file, and is never moved or written.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::connect::{Refusal, beside, immutable};
use crate::schema::{self, APPLICATION_ID, Kind, SCHEMA_VERSION};

const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// The size of SQLite's header.
const HEADER: usize = 100;
/// The first page holds the header and the statements that made the tables.
const FIRST_PAGE: u64 = 4096;
/// So many flipped bits in the 128 bits of the magic bytes are damage; a text differs in about half of them.
const FLIPPED_BITS: u32 = 16;
/// How SQLite keeps the statement: quoted after the table was renamed by a migration, as written in version 1.
const TABLE: [&[u8]; 2] = [b"CREATE TABLE \"perf_records\" (", b"CREATE TABLE perf_records ("];

/// What the first bytes of a file say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    /// No file.
    Missing,
    /// An empty one.
    Empty,
    /// Marked as ours.
    Ours,
    /// A SQLite database without any mark: it may be new, or of version 1.
    Unmarked,
}

/// Reads the first bytes of a file.
pub(crate) fn header(path: &Path) -> Result<Header, Refusal> {
    // What may not be looked at is nobody's to use, and there is nothing to read in it.
    let other = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            Refusal::NotOurs("may not be read; set perfdb.path to another path".to_owned())
        }
        _ => Refusal::Other(error.to_string()),
    };
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Header::Missing);
        }
        Err(error) if fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) => {
            return Err(Refusal::NotOurs(format!(
                "is a link that leads nowhere: {error}; set perfdb.path to another path"
            )));
        }
        Err(error) => return Err(other(error)),
    };
    if !metadata.is_file() {
        return Err(Refusal::NotOurs("is no regular file; set perfdb.path to another path".into()));
    }
    let page = first_page(path).map_err(other)?;
    if page.is_empty() {
        return Ok(Header::Empty);
    }
    if !page.starts_with(MAGIC) || page.len() < HEADER {
        return Err(if has_traces(&page) {
            Refusal::Damaged("its header is damaged".into())
        } else {
            unrecognised(&format!("a file of {} bytes without SQLite's header", metadata.len()))
        });
    }
    match (number(&page, 68), i64::from(number(&page, 60))) {
        (APPLICATION_ID, version) if version > i64::from(SCHEMA_VERSION) => Err(Refusal::newer(version)),
        (APPLICATION_ID, _) => Ok(Header::Ours),
        (0, _) => Ok(Header::Unmarked),
        _ => Err(Refusal::foreign()),
    }
}

fn first_page(path: &Path) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    File::open(path)?.take(FIRST_PAGE).read_to_end(&mut page)?;
    Ok(page)
}

fn number(page: &[u8], at: usize) -> i32 {
    page.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, i32::from_be_bytes)
}

fn has_table(page: &[u8]) -> bool {
    TABLE.iter().any(|table| page.windows(table.len()).any(|window| window == *table))
}

/// Whether enough is left of a damaged first page to say that it was ours.
fn has_traces(page: &[u8]) -> bool {
    let flipped = |(found, magic): (&u8, &u8)| (found ^ magic).count_ones();
    let magic = page.len() >= MAGIC.len() && page.iter().zip(MAGIC).map(flipped).sum::<u32>() <= FLIPPED_BITS;
    // A sector that was never written reads as zeros.
    let unwritten = page.len() >= HEADER && page[..HEADER].iter().all(|byte| *byte == 0);
    let marked = number(page, 68) == APPLICATION_ID;
    [magic || unwritten, marked, has_table(page)].into_iter().filter(|trace| *trace).count() >= 2
}

fn unrecognised(what: &str) -> Refusal {
    Refusal::Unrecognised(format!(
        "is no LayerZero database ({what}); it is left as it is: move it away, or set perfdb.path to another path"
    ))
}

/// Where a path leads. SQLite follows links before it looks beside a database, also those to a file that is yet to be.
fn followed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    // Systems follow as many links.
    for _ in 0..40 {
        let Ok(target) = fs::read_link(&path) else { break };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    path
}

/// Accepts a database without a mark if it is ours to use: one of version 1, or an empty one.
pub(crate) fn accept_unmarked(path: &Path) -> Result<(), Refusal> {
    let path = &*followed(path);
    // No lock, no WAL, nothing beside it: others may be writing, but this is enough to say whose the file is.
    match immutable(path).and_then(|connection| schema::kind(&connection)) {
        Ok(Kind::Ours(_)) => Ok(()),
        // The tables of another program may still be in its WAL or journal alone.
        Ok(Kind::Empty) if ["-wal", "-journal"].iter().all(|suffix| is_nothing(&beside(path, suffix))) => Ok(()),
        Ok(Kind::Newer(version)) => Err(Refusal::newer(version)),
        Ok(Kind::Empty | Kind::Foreign | Kind::Maimed) => Err(Refusal::foreign()),
        Err(error) if first_page(path).is_ok_and(|page| has_table(&page)) => Err(Refusal::Damaged(error.to_string())),
        Err(error) => {
            Err(unrecognised(&format!("a SQLite database without LayerZero's mark that cannot be read: {error}")))
        }
    }
}

fn is_nothing(path: &Path) -> bool {
    fs::symlink_metadata(path).map_or_else(|error| error.kind() == io::ErrorKind::NotFound, |found| found.len() == 0)
}

/// The files SQLite keeps beside a database, and how they begin. For a database that is new, SQLite removes or empties
/// whatever it finds under these names.
const BESIDE: [(&str, &[&[u8]]); 3] = [
    ("-wal", &[&[0x37, 0x7f, 0x06, 0x82], &[0x37, 0x7f, 0x06, 0x83]]),
    ("-journal", &[&[0xd9, 0xd5, 0x05, 0xf9, 0x20, 0xa1, 0x63, 0xd7]]),
    ("-shm", &[&3_007_000u32.to_ne_bytes()]),
];

/// Refuses a path for a new database if somebody else's file lies where SQLite would put its own.
pub(crate) fn refuse_neighbours(path: &Path) -> Result<(), Refusal> {
    let path = &*followed(path);
    for (suffix, beginnings) in BESIDE {
        let neighbour = beside(path, suffix);
        let found = match fs::metadata(&neighbour) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(Refusal::Other(format!("'{}': {error}", neighbour.display()))),
        };
        // One that was cut off begins like a whole one; one that was finished or reset begins with zeros.
        let begins = |bytes: &[u8]| {
            let fits = |beginning: &&[u8]| beginning.starts_with(&bytes[..bytes.len().min(beginning.len())]);
            bytes.iter().take(8).all(|byte| *byte == 0) || beginnings.iter().any(fits)
        };
        if !found.is_file() || !first_page(&neighbour).is_ok_and(|bytes| begins(&bytes)) {
            let why = format!(
                "cannot be a database: '{}' is in the way and is not SQLite's; it is left as it is: set perfdb.path to \
                 another path",
                neighbour.display()
            );
            return Err(Refusal::NotOurs(why));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, clippy::cloned_ref_to_slice_refs)]
mod tests {
    use super::*;

    fn page() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db");
        drop(crate::PerfDb::open(&path, crate::Options::default()));
        let page = first_page(&path).unwrap();
        assert!(has_traces(&page) && page.len() == 4096);
        page
    }

    #[test]
    fn two_traces_are_enough_and_one_is_not() {
        let whole = page();
        let without = |ranges: &[std::ops::Range<usize>]| {
            let mut page = whole.clone();
            ranges.iter().for_each(|range| page[range.clone()].fill(0x55));
            has_traces(&page)
        };
        let table = 512..4096;
        assert!(without(&[0..16]) && without(&[68..72]) && without(&[table.clone()]));
        assert!(!without(&[0..16, 68..72]) && !without(&[0..16, table.clone()]) && !without(&[68..72, table]));
        let mut torn = whole.clone();
        torn[..512].fill(0);
        assert!(has_traces(&torn), "the first sector was never written");
        torn[99] = 1;
        assert!(!has_traces(&torn));
    }

    #[test]
    fn texts_about_us_are_not_ours() {
        for text in
            [&include_bytes!("schema.rs")[..], include_bytes!("recognise.rs"), b"SQLite format 3\0", b"", b"LZPD"]
        {
            assert!(!has_traces(&text[..text.len().min(4096)]));
        }
        // An archive of a database of ours: everything is there, and nothing where it should be.
        let archive = [vec![b'a'; 512], page()].concat();
        assert!(!has_traces(&archive[..4096]));
    }
}
