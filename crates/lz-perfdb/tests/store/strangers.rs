//! Somebody else's files: whatever lies at the path or beside it, nothing of it changes, and the store works in memory.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use lz_perfdb::{Options, PerfDb, State};
use proptest::prelude::*;
use rusqlite::Connection;

use crate::support::{Place, all, options, record, scaled};

/// Everything below a folder: what it is, its inode, its content. Times of reading are not part of it.
fn everything(folder: &Path) -> BTreeMap<String, (u64, u32, u64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        let content = match () {
            () if metadata.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
            () if metadata.is_file() => fs::read(&path).unwrap(),
            () if metadata.is_dir() => format!("{:?}", everything(&path)).into_bytes(),
            () => format!("{:?}", metadata.file_type().is_fifo()).into_bytes(),
        };
        found.insert(path.display().to_string(), (metadata.ino(), metadata.mode(), metadata.len(), content));
    }
    found
}

/// Opens a store there, puts a row, reads it, and sees that everything in the folder is as it was.
fn left_alone(folder: &Path, path: &Path, what: &str) {
    let before = everything(folder);
    for read_only in [false, true] {
        let db = PerfDb::open(path, Options { read_only, ..options() });
        assert!(matches!(db.state(), State::Memory { .. }), "{what}: {}", db.state());
        assert!(db.put(vec![record(1)]).wait().is_err(), "{what}");
        let _ = db.flush();
        assert!(db.prune(&lz_perfdb::Prune { invalid: true, ..Default::default() }).is_err(), "{what}");
        assert_eq!(all(&db), [record(1)], "{what}");
        assert_eq!(db.notes().len(), 1, "{what}: it is told once: {:?}", db.notes());
    }
    let _ = lz_perfdb::verify_file(path);
    let after = everything(folder);
    let changed: Vec<&String> = after.keys().chain(before.keys()).filter(|k| after.get(*k) != before.get(*k)).collect();
    assert!(changed.is_empty(), "{what}: {changed:?}");
}

fn sqlite(path: &Path, sql: &str) {
    Connection::open(path).unwrap().execute_batch(sql).unwrap();
}

#[test]
fn no_kind_of_file_that_is_not_ours_changes() {
    type Make = Box<dyn Fn(&Path)>;
    let kinds: Vec<(&str, Make)> = vec![
        ("a directory", Box::new(|path| fs::create_dir(path).unwrap())),
        ("a pipe", Box::new(|path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()))),
        ("a socket", Box::new(|path| drop(UnixListener::bind(path).unwrap()))),
        ("a link to itself", Box::new(|path| symlink(path, path).unwrap())),
        ("a link to a device", Box::new(|path| symlink("/dev/zero", path).unwrap())),
        ("a text", Box::new(|path| fs::write(path, "ssh-ed25519 AAAA somebody@somewhere\n").unwrap())),
        ("a sparse file of 1 TiB", Box::new(|path| fs::File::create(path).unwrap().set_len(1 << 40).unwrap())),
        ("zeros", Box::new(|path| fs::write(path, [0; 8192]).unwrap())),
        ("an archive", Box::new(|path| fs::write(path, [&b"perfdb.sqlite"[..], &[0; 9000]].concat()).unwrap())),
        ("SQLite's header alone", Box::new(|path| fs::write(path, b"SQLite format 3\0").unwrap())),
        ("another program's database", Box::new(|path| sqlite(path, "CREATE TABLE users (name TEXT)"))),
        (
            "another program's damaged database",
            Box::new(|path| {
                sqlite(path, "CREATE TABLE users (name TEXT)");
                let mut bytes = fs::read(path).unwrap();
                bytes[100..200].fill(0xff);
                fs::write(path, bytes).unwrap();
            }),
        ),
        (
            "another program's database with everything in its WAL",
            Box::new(|path| {
                let from = path.with_extension("being made");
                let other = Connection::open(&from).unwrap();
                other.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE users (name TEXT)").unwrap();
                fs::copy(&from, path).unwrap();
                let with = |path: &Path| format!("{}-wal", path.display());
                fs::copy(with(&from), with(path)).unwrap();
            }),
        ),
    ];
    for (what, make) in kinds {
        let place = Place::new();
        make(&place.path());
        if what.starts_with("a sparse") {
            // Too large to read; its first and last pages and its size say enough.
            let metadata = |path: &Path| (fs::metadata(path).unwrap().ino(), fs::metadata(path).unwrap().len());
            let before = metadata(&place.path());
            assert!(matches!(place.open().state(), State::Memory { .. }), "{what}");
            assert_eq!((metadata(&place.path()), place.files().len()), (before, 1));
            continue;
        }
        left_alone(place.folder.path(), &place.path(), what);
        let link = Place::new();
        symlink(place.path(), link.path()).unwrap();
        if what != "a link to itself" {
            left_alone(place.folder.path(), &link.path(), &format!("a link to {what}"));
        }
    }
}

#[test]
fn what_lies_beside_a_new_database_is_not_removed() {
    for suffix in ["-wal", "-journal", "-shm"] {
        let place = Place::new();
        let neighbour = format!("{}{suffix}", place.path().display());
        fs::write(&neighbour, "somebody's notes").unwrap();
        left_alone(place.folder.path(), &place.path(), suffix);
        // By a link that leads to a file that is yet to be.
        let link = Place::new();
        symlink(place.path(), link.path()).unwrap();
        left_alone(place.folder.path(), &link.path(), suffix);
        fs::write(place.path(), "").unwrap();
        let db = place.open();
        let State::Memory { why } = db.state() else { panic!("{}", db.state()) };
        assert!(why.contains(&format!("{suffix}' is in the way and is not SQLite's")), "{why}");
        assert_eq!(fs::read(&neighbour).unwrap(), b"somebody's notes");
        fs::remove_file(&neighbour).unwrap();
        db.flush().unwrap();
        db.put(vec![record(1)]).wait().unwrap();
        assert_eq!(db.state(), State::Open, "once it is out of the way");
    }
}

#[test]
fn what_a_killed_process_left_beside_it_is_no_strangers() {
    let place = Place::new();
    let db = place.open();
    db.put(vec![record(1)]).wait().unwrap();
    let left = ["-wal", "-shm"].map(|suffix| {
        let path = format!("{}{suffix}", place.path().display());
        (fs::read(&path).unwrap(), suffix)
    });
    let other = Place::new();
    for (bytes, suffix) in left {
        fs::write(format!("{}{suffix}", other.path().display()), bytes).unwrap();
    }
    assert_eq!(other.open().state(), State::Open);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(scaled(150, 5000) as u32))]

    /// Any bytes, also such as begin like a database.
    #[test]
    fn no_bytes_that_are_not_ours_change(
        start in prop::sample::select(vec![&b""[..], b"SQLite", b"SQLite format 3\0", b"SQLite format 3\0\x10\0\x01\x01\0\x40\x20\x20"]),
        rest in prop::collection::vec(any::<u8>(), 1..600),
        last in 0..3u8,
    ) {
        let place = Place::new();
        let mut bytes = [start, &rest].concat();
        if last == 0 {
            bytes.resize(8192, 0);
        }
        fs::write(place.path(), &bytes).unwrap();
        left_alone(place.folder.path(), &place.path(), "bytes");
    }
}
