//! Files that a parent process has open.
//!
//! SQLite remembers per process which locks it holds on a file. After a fork the child remembers those of its parent
//! and holds none of them: were it to open the file again, it would believe itself protected, and the parent, when it
//! closes the file, would remove the WAL under the child. So a child does not open such a file for more than a look.

use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file: its device and its number there.
type Identity = (u64, u64);

/// Which process has which files open. A fork gets a copy of it. The lock is held for a few instructions each time a file
/// is opened or closed, and nothing in between can wait.
static OPEN: Mutex<Vec<(u32, Identity)>> = Mutex::new(Vec::new());

fn open() -> MutexGuard<'static, Vec<(u32, Identity)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// That this process has a connection to a file.
pub(crate) struct Mark(Option<Identity>);

impl Mark {
    pub fn new(file: Option<Identity>) -> Mark {
        open().extend(file.map(|file| (process::id(), file)));
        Mark(file)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let Some(file) = self.0 else { return };
        let mut open = open();
        if let Some(at) = open.iter().position(|entry| *entry == (process::id(), file)) {
            open.swap_remove(at);
        }
    }
}

/// The process that had this file open when it was forked into this one.
pub(crate) fn inherited(file: Option<Identity>) -> Option<u32> {
    let here = process::id();
    let others = |entry: &&(u32, Identity)| Some(entry.1) == file && entry.0 != here;
    open().iter().find(others).map(|(process, _)| *process)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Filter, Key, Mode, Options, Outcome, PerfDb, Record, State, connect};

    #[test]
    fn what_a_parent_has_open_is_only_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("perfdb.sqlite");
        let row = |kernel: &str| {
            Record::new(Key::new(kernel, "op", "d", Mode::Eager, ""), Outcome::Failed { error: "x".into() })
        };
        let (first, second) = (row("first"), row("second"));
        PerfDb::open(&path, Options::default()).put(vec![first.clone()]).wait().unwrap();
        let before = std::fs::read(&path).unwrap();
        let theirs = (process::id() + 1, connect::identity(&path).unwrap());
        open().push(theirs);
        let db = PerfDb::open(&path, Options::default());
        let State::ReadOnly { why } = db.state() else { panic!("{}", db.state()) };
        assert!(why.ends_with(&format!("process {}, of which this one is a fork, has it open", theirs.0)), "{why}");
        assert!(db.put(vec![second.clone()]).wait().is_err());
        assert_eq!(db.records(&Filter::all()).unwrap(), [first, second]);
        drop(db);
        open().retain(|entry| *entry != theirs);
        assert_eq!(std::fs::read(&path).unwrap(), before);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_files_of_another_process_are_inherited() {
        let (ours, theirs) = ((1, 7), (1, 8));
        let mark = Mark::new(Some(ours));
        let second = Mark::new(Some(ours));
        open().push((process::id() + 1, theirs));
        assert_eq!(inherited(Some(ours)), None);
        assert_eq!(inherited(Some(theirs)), Some(process::id() + 1));
        assert_eq!(inherited(None), None);
        drop(mark);
        assert_eq!(open().iter().filter(|entry| entry.1 == ours).count(), 1);
        drop(second);
        assert_eq!(open().len(), 1);
        open().clear();
    }
}
