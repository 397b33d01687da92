//! Files that are not what was written: torn, flipped, cut off, emptied, overwritten.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lz_perfdb::{Key, PerfDb, Record, State};
use rusqlite::Connection;

use crate::support::{Place, Random, all, by_key, options, record, scaled};

const ROWS: u64 = 60;
const PAGE: usize = 4096;

fn whole_file() -> Vec<u8> {
    let place = Place::new();
    place.open().put((0..ROWS).map(record).collect()).wait().unwrap();
    fs::read(place.path()).unwrap()
}

/// Some damage, and what it is called.
fn damage(bytes: &mut Vec<u8>, random: &mut Random) -> String {
    let at = random.below(bytes.len());
    let pages = bytes.len() / PAGE;
    match random.below(12) {
        0..=3 => {
            let bit = random.below(8);
            bytes[at] ^= 1 << bit;
            format!("bit {bit} of byte {at} flipped")
        }
        4 => {
            // Where it tells most: the header, the headers of pages.
            let at = random.below(pages) * PAGE + random.below(108).min(PAGE - 1);
            bytes[at] ^= 1 << random.below(8);
            format!("a bit of byte {at} flipped")
        }
        5 => {
            bytes.truncate(at);
            format!("cut off at {at}")
        }
        6 => {
            let end = (at / 512 * 512 + 512).min(bytes.len());
            bytes[at / 512 * 512..end].fill(0);
            format!("the sector of {at} emptied")
        }
        7 => {
            let end = (at + 1 + random.below(300)).min(bytes.len());
            bytes[at..end].iter_mut().for_each(|byte| *byte = random.next() as u8);
            format!("{at}..{end} overwritten")
        }
        8 => {
            let (a, b) = (random.below(pages), random.below(pages));
            for i in 0..PAGE {
                bytes.swap(a * PAGE + i, b * PAGE + i);
            }
            format!("pages {a} and {b} swapped")
        }
        9 => {
            let (from, to) = (random.below(pages), random.below(pages));
            bytes.copy_within(from * PAGE..(from + 1) * PAGE, to * PAGE);
            format!("page {from} written over page {to}")
        }
        10 => {
            bytes.truncate(at / PAGE * PAGE);
            format!("cut off at the page of {at}")
        }
        _ => {
            for _ in 0..20 {
                let at = random.below(bytes.len());
                bytes[at] ^= 1 << random.below(8);
            }
            "20 bits flipped".into()
        }
    }
}

/// What holds of any file: rows that are read are right, and the store works on.
fn look(path: &Path, written: &BTreeMap<Key, Record>, what: &str) -> (State, usize, u64) {
    let db = PerfDb::open(path, options());
    let rows = by_key(all(&db));
    for (key, row) in &rows {
        assert_eq!(written.get(key), Some(row), "{what}: a wrong row");
    }
    let (state, unreadable) = (db.state(), db.stats().unreadable);
    let new = record(1000);
    let acknowledged = db.put(vec![new.clone()]).wait();
    assert_eq!(acknowledged.is_ok(), state.is_durable(), "{what}: {acknowledged:?}, {state}");
    assert!(all(&db).contains(&new), "{what}");
    drop(db);
    if state.is_durable() {
        let again = PerfDb::open(path, options());
        assert_eq!(again.state(), State::Open, "{what}: {:?}", again.notes());
        let mut expected = rows.clone();
        expected.insert(new.key.clone(), new);
        assert_eq!(by_key(all(&again)), expected, "{what}: not the same when opened again");
    }
    if let State::Rebuilt { set_aside, saved, .. } = &state {
        assert!(set_aside.is_file(), "{what}");
        assert_eq!(*saved, rows.len(), "{what}");
    }
    (state, rows.len(), unreadable)
}

#[test]
fn no_damage_yields_a_wrong_row_or_hides_one_silently() {
    let whole = whole_file();
    let written = by_key((0..ROWS).map(record));
    let mut random = Random::new(7);
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for case in 0..scaled(250, 10_000) {
        let place = Place::new();
        let mut bytes = whole.clone();
        let what = format!("case {case}: {}", damage(&mut bytes, &mut random));
        fs::write(place.path(), &bytes).unwrap();
        let (state, rows, unreadable) = look(&place.path(), &written, &what);
        // A row is read, or counted as unreadable, or the file was set aside, or it is said that it is not read.
        let outcome = match state {
            State::Open => {
                let cut_to_nothing = bytes.is_empty();
                assert!(cut_to_nothing || rows + unreadable as usize >= ROWS as usize, "{what}: {rows} + {unreadable}");
                if unreadable > 0 { "rows left out" } else { "harmless" }
            }
            State::Rebuilt { .. } => "rebuilt",
            State::Memory { why } => {
                // Its mark or its version is not what it was: it could be anybody's.
                assert!(why.contains("left as it is"), "{what}: {why}");
                "not ours"
            }
            State::ReadOnly { why } => panic!("{what}: {why}"),
        };
        *seen.entry(outcome).or_default() += 1;
    }
    for outcome in ["rows left out", "harmless", "rebuilt"] {
        assert!(seen.contains_key(outcome), "the damage is too tame: {seen:?}");
    }
}

#[test]
fn a_flipped_bit_in_a_row_costs_that_row_alone() {
    let whole = whole_file();
    let written = by_key((0..ROWS).map(record));
    let needle = b"CUDA error 54";
    let at = whole.windows(needle.len()).position(|window| window == needle).expect("the row's text");
    let place = Place::new();
    let mut bytes = whole;
    bytes[at + 6] ^= 4;
    fs::write(place.path(), &bytes).unwrap();
    let db = place.open();
    let rows = by_key(all(&db));
    assert_eq!((db.state(), rows.len(), db.stats().unreadable), (State::Open, ROWS as usize - 1, 1));
    assert!(rows.iter().all(|(key, row)| written[key] == *row) && !rows.contains_key(&record(54).key));
    assert_eq!(db.notes().len(), 1, "{:?}", db.notes());
    let report = db.verify().unwrap();
    assert!(!report.is_clean() && report.damaged.len() == 1 && report.impossible.is_empty(), "{report:?}");
    // Measured again it is whole again, though its time says nothing against the new one.
    db.put(vec![record(54)]).wait().unwrap();
    assert_eq!(by_key(all(&db)), written);
    assert!(db.verify().unwrap().is_clean());
}

#[test]
fn a_damaged_row_is_replaced_whatever_time_it_claims() {
    let place = Place::new();
    place.open().put(vec![record(1)]);
    let sql = "UPDATE perf_records SET measured_at = 9000000000000000000, median_us = 0.001";
    Connection::open(place.path()).unwrap().execute_batch(sql).unwrap();
    let db = place.open();
    assert_eq!(all(&db), []);
    db.put(vec![record(1)]).wait().unwrap();
    assert_eq!(all(&db), [record(1)]);
}

/// The header of a database of ours, with the first bytes overwritten.
fn headless() -> Vec<u8> {
    let mut bytes = whole_file();
    bytes[..60].fill(0x55);
    bytes
}

#[test]
fn a_damaged_header_is_still_recognised_and_its_rows_are_lost_with_a_word() {
    let place = Place::new();
    let mut flipped = whole_file();
    flipped[3] ^= 8;
    for bytes in [headless(), flipped] {
        fs::write(place.path(), &bytes).unwrap();
        let (state, _, _) = look(&place.path(), &BTreeMap::new(), "a damaged header");
        let State::Rebuilt { set_aside, why, saved: 0 } = state else { panic!("{state}") };
        assert_eq!(fs::read(&set_aside).unwrap(), bytes, "{why}");
        assert!(set_aside.to_str().unwrap().starts_with(&format!("{}.corrupt-", place.path().display())));
    }
}

#[test]
fn what_is_no_database_is_set_aside_only_where_the_place_is_ours() {
    for bytes in [&b"x"[..], b"not a database, but a text that somebody wrote here", &[0; 5000], b"SQLite format 3\0"] {
        let place = Place::new();
        fs::write(place.path(), bytes).unwrap();
        let (state, rows, _) = look(&place.path(), &BTreeMap::new(), "garbage");
        let State::Memory { why } = state else { panic!("{state}") };
        assert!(why.contains(&format!("a file of {} bytes without SQLite's header", bytes.len())), "{why}");
        assert!(why.ends_with("it is left as it is: move it away, or set perfdb.path to another path"), "{why}");
        assert_eq!((fs::read(place.path()).unwrap(), rows, place.files().len()), (bytes.to_vec(), 0, 1));

        let own = lz_perfdb::Options { own_place: true, ..options() };
        let db = PerfDb::open(place.path(), own.clone());
        let State::Rebuilt { set_aside, saved: 0, .. } = db.state() else { panic!("{}", db.state()) };
        assert_eq!(fs::read(&set_aside).unwrap(), bytes);
        drop(db);
        // A link leads out of it.
        let (elsewhere, link) = (place.folder.path().join("somebody's"), place.folder.path().join("link"));
        fs::write(&elsewhere, bytes).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        assert!(matches!(PerfDb::open(&link, own).state(), State::Memory { .. }));
        assert_eq!(fs::read(&elsewhere).unwrap(), bytes);
    }
}

#[test]
fn a_damaged_file_that_is_linked_to_is_set_aside_where_it_is() {
    let place = Place::new();
    fs::write(place.folder.path().join("real"), headless()).unwrap();
    std::os::unix::fs::symlink(place.folder.path().join("real"), place.path()).unwrap();
    let db = place.open();
    let State::Rebuilt { set_aside, .. } = db.state() else { panic!("{}", db.state()) };
    assert!(set_aside.file_name().unwrap().to_str().unwrap().starts_with("real.corrupt-"));
    assert!(place.path().is_symlink());
    db.put(vec![record(1)]).wait().unwrap();
    drop(db);
    assert_eq!(all(&place.open()), [record(1)]);
}

#[test]
fn a_table_that_is_not_ours_any_more_is_damage() {
    for sql in ["DROP TABLE perf_records", "ALTER TABLE perf_records DROP COLUMN spread_us"] {
        let place = Place::new();
        place.open().put(vec![record(1)]);
        Connection::open(place.path()).unwrap().execute_batch(sql).unwrap();
        let db = place.open();
        assert!(matches!(db.state(), State::Rebuilt { .. }), "{sql}: {}", db.state());
        // And while it is open.
        Connection::open(place.path()).unwrap().execute_batch(sql).unwrap();
        db.put(vec![record(2)]).wait().unwrap();
        assert!(matches!(db.state(), State::Rebuilt { .. }), "{sql}: {}", db.state());
        assert_eq!(all(&db), [record(2)]);
    }
}

#[test]
fn a_file_damaged_under_an_open_store_is_set_aside() {
    let place = Place::new();
    let db = place.open();
    db.put((0..ROWS).map(record).collect()).wait().unwrap();
    Connection::open(place.path()).unwrap().execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    let mut bytes = fs::read(place.path()).unwrap();
    // The file itself is changed, not replaced: the connections still lead to it.
    bytes[..PAGE].iter_mut().for_each(|byte| *byte = 0x55);
    std::io::Write::write_all(&mut fs::OpenOptions::new().write(true).open(place.path()).unwrap(), &bytes).unwrap();
    // One of the two notices first; afterwards both work.
    let read = db.records(&lz_perfdb::Filter::all());
    let put = db.put(vec![record(1000)]).wait();
    assert!(put.is_ok(), "{put:?} after {read:?}");
    let rows = by_key(all(&db));
    assert_eq!(rows.get(&record(1000).key), Some(&record(1000)));
    drop(db);
    let again = place.open();
    assert!(by_key(all(&again)).contains_key(&record(1000).key), "{}", again.state());
}

#[test]
fn damage_in_the_wal_yields_no_wrong_row() {
    // The files as a process that was killed leaves them.
    let place = Place::new();
    let db = place.open();
    db.put((0..20).map(record).collect()).wait().unwrap();
    Connection::open(place.path()).unwrap().execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").unwrap();
    (20..ROWS).for_each(|i| db.put(vec![record(i)]).wait().unwrap());
    let suffixes = ["", "-wal", "-shm"];
    let left: Vec<Vec<u8>> =
        suffixes.map(|suffix| fs::read(format!("{}{suffix}", place.path().display())).unwrap()).into();
    drop(db);
    assert!(left[1].len() > PAGE, "there is something in the WAL");
    let written = by_key((0..ROWS).map(record));
    let mut random = Random::new(11);
    for case in 0..scaled(60, 3000) {
        let place = Place::new();
        let (mut files, which) = (left.clone(), 1 + random.below(2));
        let mut what = "nothing".to_owned();
        if case > 0 {
            what = damage(&mut files[which], &mut random);
        }
        for (suffix, bytes) in suffixes.iter().zip(&files) {
            fs::write(format!("{}{suffix}", place.path().display()), bytes).unwrap();
        }
        let what = format!("case {case}, {}: {what}", suffixes[which]);
        let (state, rows, unreadable) = look(&place.path(), &written, &what);
        if state == State::Open {
            // What was in the file itself is still there; of the WAL what comes before the damage.
            assert!(rows + unreadable as usize >= 20, "{what}: {rows}");
            assert!(case > 0 || rows == ROWS as usize, "{what}: {rows}");
        }
    }
}
