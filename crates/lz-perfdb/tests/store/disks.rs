//! Disks that are full, or may not be written.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use lz_perfdb::{PerfDb, State, StoreError};

use crate::child::{Running, command, set_task};
use crate::support::{Place, all, by_key, options, record};

/// A small file system of its own, where that is permitted.
struct Mount {
    folder: tempfile::TempDir,
}

impl Mount {
    fn new(kilobytes: usize) -> Option<Mount> {
        let folder = tempfile::tempdir().unwrap();
        let size = format!("size={kilobytes}k");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(folder.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Mount { folder }),
            other => {
                println!("skipped: no file system can be mounted here: {other:?}");
                None
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("perfdb.sqlite")
    }

    fn remount(&self, how: &str) {
        let status =
            Command::new("mount").args(["-o", &format!("remount,{how}")]).arg(self.folder.path()).status().unwrap();
        assert!(status.success());
    }

    /// Takes all the space there is.
    fn fill(&self) -> PathBuf {
        let filler = self.folder.path().join("filler");
        let mut file = fs::OpenOptions::new().append(true).create(true).open(&filler).unwrap();
        while std::io::Write::write_all(&mut file, &[0; 1024]).is_ok() {}
        filler
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).status();
    }
}

#[test]
fn a_full_disk_costs_nothing_but_space() {
    let Some(mount) = Mount::new(512) else { return };
    let db = PerfDb::open(mount.path(), options());
    db.put((0..10).map(record).collect()).wait().unwrap();
    let filler = mount.fill();
    let refused = (10..4000).find(|i| db.put(vec![record(*i)]).wait().is_err()).expect("the disk is full");
    let State::Memory { why } = db.state() else { panic!("{}", db.state()) };
    assert!(why.contains("full") || why.contains("disk I/O"), "{why}");
    let last = refused + 5;
    for i in refused + 1..=last {
        // A new connection makes room by tidying up; that is taken too.
        mount.fill();
        if let Err(error) = db.put(vec![record(i)]).wait() {
            assert!(matches!(error, StoreError::NotStored { .. }), "{error}");
        }
    }
    assert_eq!(by_key(all(&db)), by_key((0..=last).map(record)), "all of them are read");
    assert!(db.stats().not_written >= 2, "{:?}", db.stats());
    assert!(db.notes().len() <= 3, "it is told once: {:?}", db.notes());

    fs::remove_file(filler).unwrap();
    db.put(vec![record(last + 1)]).wait().unwrap();
    assert_eq!((db.state(), db.stats().in_memory), (State::Open, 0));
    drop(db);
    assert_eq!(by_key(all(&PerfDb::open(mount.path(), options()))), by_key((0..=last + 1).map(record)));
}

#[test]
fn a_full_disk_from_the_beginning() {
    let Some(mount) = Mount::new(512) else { return };
    let filler = mount.fill();
    let db = PerfDb::open(mount.path(), options());
    assert!(!db.state().is_durable(), "{}", db.state());
    assert!(db.put(vec![record(1)]).wait().is_err());
    assert_eq!(all(&db), [record(1)]);
    fs::remove_file(filler).unwrap();
    db.flush().unwrap();
    assert_eq!(db.state(), State::Open);
    drop(db);
    assert_eq!(all(&PerfDb::open(mount.path(), options())), [record(1)]);
}

#[test]
fn no_room_to_set_aside_or_migrate_harms_nothing() {
    let Some(mount) = Mount::new(512) else { return };
    fs::write(mount.path(), "garbage").unwrap();
    let filler = mount.fill();
    let db = PerfDb::open(mount.path(), lz_perfdb::Options { own_place: true, ..options() });
    assert!(!db.state().is_durable(), "{}", db.state());
    assert!(db.put(vec![record(1)]).wait().is_err());
    fs::remove_file(filler).unwrap();
    db.flush().unwrap();
    assert!(db.state().is_durable(), "{}", db.state());
    drop(db);
    assert_eq!(all(&PerfDb::open(mount.path(), options())), [record(1)]);
}

#[test]
fn a_read_only_file_system_is_read() {
    let Some(mount) = Mount::new(4096) else { return };
    PerfDb::open(mount.path(), options()).put((0..20).map(record).collect());
    mount.remount("ro");
    let db = PerfDb::open(mount.path(), options());
    let State::ReadOnly { why } = db.state() else { panic!("{}", db.state()) };
    assert!(why.contains("cannot be written"), "{why}");
    assert_eq!(by_key(all(&db)), by_key((0..20).map(record)));
    assert!(matches!(db.put(vec![record(20)]).wait(), Err(StoreError::NotStored { .. })));
    assert_eq!(all(&db).len(), 21);
    assert!(lz_perfdb::verify_file(&mount.path()).unwrap().is_clean());
    // It may be written again.
    mount.remount("rw");
    db.put(vec![record(21)]).wait().unwrap();
    assert_eq!(db.state(), State::Open);
    drop(db);
    assert_eq!(by_key(all(&PerfDb::open(mount.path(), options()))), by_key((0..22).map(record)));

    mount.remount("ro");
    let missing = mount.folder.path().join("other.sqlite");
    let db = PerfDb::open(missing, options());
    assert!(matches!(db.state(), State::Memory { .. }), "{}", db.state());
}

/// A copy of this test binary that any user may run.
fn for_any_user(folder: &Path) -> PathBuf {
    let copy = folder.join("tests");
    fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
    copy
}

#[test]
fn files_that_may_not_be_written_are_read() {
    let place = Place::new();
    let inner = place.folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let path = inner.join("perfdb.sqlite");
    PerfDb::open(&path, options()).put((0..20).map(record).collect());
    let binary = for_any_user(place.folder.path());
    fs::set_permissions(place.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let is_root = fs::metadata("/proc/self").map(|found| std::os::unix::fs::MetadataExt::uid(&found)).unwrap_or(1) == 0;
    for (file, directory) in [(0o444, 0o755), (0o666, 0o555), (0o444, 0o555)] {
        fs::set_permissions(&path, fs::Permissions::from_mode(file)).unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(directory)).unwrap();
        let mut child = Command::new(&binary);
        set_task(&mut child, "read_what_cannot_be_written", &path, &[]);
        if is_root {
            // What may not be does not bind root; it binds nobody.
            child.uid(65534).gid(65534);
        }
        let said = Running::start(child).finish();
        assert!(said[0].contains("new ones are kept in memory only"), "{file:o} in {directory:o}: {said:?}");
    }
    fs::set_permissions(&inner, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(all(&PerfDb::open(&path, options())).len(), 20, "and nothing was written");
}

#[test]
fn a_limit_on_the_size_of_files_is_a_full_disk() {
    let place = Place::new();
    let inner = command("write_until_too_large", &place.path(), &[]);
    // A write beyond the limit is an error only if the signal that comes with it is ignored.
    let mut limited = Command::new("sh");
    limited
        .args(["-c", r#"trap "" XFSZ; ulimit -f 400; exec "$0" "$@""#])
        .arg(inner.get_program())
        .args(inner.get_args());
    limited.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    limited.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let said = Running::start(limited).finish();
    assert_eq!(said[0], State::Open.to_string());
    let refused: u64 = said[1].parse().unwrap();
    assert!(refused > 10, "{refused}");
    // Without the limit everything that was acknowledged is there.
    let db = place.open();
    assert_eq!(db.state(), State::Open);
    let rows = by_key(all(&db));
    assert!((0..refused).all(|i| rows.get(&record(i).key) == Some(&record(i))), "{refused}: {} rows", rows.len());
}
