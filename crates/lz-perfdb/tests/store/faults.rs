//! System calls that fail: no room, no access, a broken disk, at the Nth call, for every N.

use std::fs;
use std::path::Path;
use std::process::Command;

use lz_perfdb::{PerfDb, State};

use crate::child::{Running, command};
use crate::support::{Place, all, by_key, options, record, scaled};

const BATCHES: u64 = 4;

/// The library that makes calls fail.
fn library(folder: &Path) -> Option<std::path::PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/store/fail_nth.c");
    let library = folder.join("fail_nth.so");
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).args([source, "-ldl"]).output();
    match compiled {
        Ok(output) if output.status.success() => Some(library),
        other => {
            println!("skipped: no C compiler makes a library here: {other:?}");
            None
        }
    }
}

#[test]
fn no_failing_call_loses_an_acknowledged_row_or_yields_a_wrong_one() {
    let tools = Place::new();
    let Some(library) = library(tools.folder.path()) else { return };
    let step = scaled(11, 1);
    let mut acknowledged_at_all = 0;
    for (kind, (errno, forever)) in
        [(28, "0"), (28, "1"), (5, "0"), (5, "1"), (13, "0"), (13, "1")].into_iter().enumerate()
    {
        // Below a directory that is made too; and once on a file that is there.
        for existing in [false, true] {
            let mut at = 1 + (kind * 5 + usize::from(existing)) % step;
            loop {
                let place = Place::new();
                let path = place.folder.path().join("inner/perfdb.sqlite");
                if existing {
                    PerfDb::open(&path, options()).put(vec![record(900)]).wait().unwrap();
                }
                let report = tools.folder.path().join("report");
                let mut child = command("write_in_spite_of_faults", &path, &[BATCHES]);
                child.env("LD_PRELOAD", &library).env("LZ_FAIL_UNDER", place.folder.path());
                child.env("LZ_FAIL_AT", at.to_string()).env("LZ_FAIL_ERRNO", errno.to_string());
                child.env("LZ_FAIL_FOREVER", forever).env("LZ_FAIL_REPORT", &report);
                let said = Running::start(child).finish();
                let what = format!("errno {errno} at call {at}, forever: {forever}, existing: {existing}");
                let acknowledged: Vec<u64> = said.iter().map(|line| line.parse().unwrap()).collect();
                acknowledged_at_all += acknowledged.len();
                let db = PerfDb::open(&path, options());
                assert_eq!(db.state(), State::Open, "{what}: {:?}", db.notes());
                let rows = by_key(all(&db));
                for number in &acknowledged {
                    assert_eq!(rows.get(&record(*number).key), Some(&record(*number)), "{what}");
                }
                assert_eq!(rows.contains_key(&record(900).key), existing, "{what}");
                let known = by_key((0..BATCHES).chain([900]).map(record));
                assert!(rows.iter().all(|(key, row)| known.get(key) == Some(row)), "{what}: a wrong row");
                let calls: usize = fs::read_to_string(&report).unwrap().parse().unwrap();
                if calls == 0 {
                    println!("skipped: calls cannot be made to fail here");
                    return;
                }
                if calls < at {
                    // It was clean: everything went as if nothing could fail.
                    assert_eq!(acknowledged.len() as u64, BATCHES, "{what}");
                    break;
                }
                at += step;
            }
        }
    }
    assert!(acknowledged_at_all > 0);
}
