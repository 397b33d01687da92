//! Real files, changed in every way that configuration files change.
#![cfg(unix)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lz_resilience::watch::WatchMode;
use lz_resilience::{Watch, WatchError};

const QUIET: Duration = Duration::from_millis(60);
/// Longer than any change may take to be seen.
const LONG: Duration = Duration::from_secs(20);
/// Longer than two rounds of looking: what has not come by then does not come.
const NEVER: Duration = Duration::from_millis(2500);

struct Site {
    root: PathBuf,
    _temp: tempfile::TempDir,
}

impl Site {
    fn new() -> Site {
        let temp = tempfile::tempdir().unwrap();
        Site { root: temp.path().canonicalize().unwrap(), _temp: temp }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }
}

/// Watches, and says what the file held when it was called.
fn watch(file: &Path) -> (Watch, Receiver<Option<String>>) {
    let (tell, told) = channel();
    let read = file.to_owned();
    let on_change = move || drop(tell.send(fs::read_to_string(&read).ok()));
    (Watch::start(vec![file.to_owned()], QUIET, on_change).unwrap(), told)
}

fn tells(told: &Receiver<Option<String>>, expected: Option<&str>) {
    assert_eq!(told.recv_timeout(LONG).expect("a change is seen").as_deref(), expected);
}

fn is_silent(told: &Receiver<Option<String>>) {
    assert_eq!(told.recv_timeout(NEVER), Err(RecvTimeoutError::Timeout));
}

#[test]
fn a_file_rewritten_in_place_is_seen() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    let (watch, told) = watch(&file);
    #[cfg(target_os = "linux")]
    assert_eq!(watch.mode(), WatchMode::Events);
    for content in ["two", "three", "three", ""] {
        site.write("a.yaml", content);
        tells(&told, Some(content));
    }
    drop(watch);
}

#[test]
fn a_file_replaced_by_a_rename_is_seen_again_and_again() {
    let site = Site::new();
    let file = site.write("a.yaml", "0");
    let (_watch, told) = watch(&file);
    for n in 1..=4 {
        let new = site.write(".a.yaml.tmp", &n.to_string());
        fs::rename(new, &file).unwrap();
        tells(&told, Some(&n.to_string()));
    }
}

#[test]
fn a_file_that_goes_and_comes_is_seen() {
    let site = Site::new();
    let file = site.path("a.yaml");
    let (_watch, told) = watch(&file);
    site.write("a.yaml", "made");
    tells(&told, Some("made"));
    fs::remove_file(&file).unwrap();
    tells(&told, None);
    site.write("a.yaml", "made again");
    tells(&told, Some("made again"));
}

#[test]
fn a_directory_that_goes_and_comes_is_seen() {
    let site = Site::new();
    let file = site.path("etc/app/a.yaml");
    let (_watch, told) = watch(&file);
    for content in ["one", "two"] {
        fs::create_dir_all(site.path("etc/app")).unwrap();
        fs::write(&file, content).unwrap();
        tells(&told, Some(content));
        fs::remove_dir_all(site.path("etc")).unwrap();
        tells(&told, None);
    }
}

/// What the kubelet does: a directory for each version, `..data` leading to the present one, swapped by a rename, the
/// old one removed afterwards.
#[test]
fn a_config_map_that_is_swapped_is_seen() {
    let site = Site::new();
    let publish = |version: u32| {
        let dir = format!("..v{version}");
        fs::create_dir(site.path(&dir)).unwrap();
        site.write(&format!("{dir}/app.yaml"), &format!("version {version}"));
        symlink(&dir, site.path("..data_tmp")).unwrap();
        fs::rename(site.path("..data_tmp"), site.path("..data")).unwrap();
        if version > 0 {
            fs::remove_dir_all(site.path(&format!("..v{}", version - 1))).unwrap();
        }
    };
    publish(0);
    symlink("..data/app.yaml", site.path("app.yaml")).unwrap();
    let (_watch, told) = watch(&site.path("app.yaml"));
    for version in 1..=4 {
        publish(version);
        tells(&told, Some(&format!("version {version}")));
    }
}

#[test]
fn a_directory_that_is_a_link_may_be_swapped() {
    let site = Site::new();
    fs::create_dir(site.path("blue")).unwrap();
    fs::create_dir(site.path("green")).unwrap();
    site.write("blue/a.yaml", "blue");
    site.write("green/a.yaml", "green");
    symlink("blue", site.path("current")).unwrap();
    let (_watch, told) = watch(&site.path("current/a.yaml"));
    symlink("green", site.path("next")).unwrap();
    fs::rename(site.path("next"), site.path("current")).unwrap();
    tells(&told, Some("green"));
    // Now it is the green one that counts.
    site.write("blue/a.yaml", "not this one");
    is_silent(&told);
    site.write("green/a.yaml", "greener");
    tells(&told, Some("greener"));
}

/// Events come from where the links lead now: looking alone would take a second each time.
#[test]
fn after_a_swap_the_new_directory_sends_the_events() {
    let site = Site::new();
    fs::create_dir(site.path("blue")).unwrap();
    fs::create_dir(site.path("green")).unwrap();
    site.write("blue/a.yaml", "blue");
    site.write("green/a.yaml", "green");
    symlink("blue", site.path("current")).unwrap();
    let (_watch, told) = watch(&site.path("current/a.yaml"));
    symlink("green", site.path("next")).unwrap();
    fs::rename(site.path("next"), site.path("current")).unwrap();
    tells(&told, Some("green"));
    for n in 0..10 {
        site.write("green/a.yaml", &n.to_string());
        tells(&told, Some(&n.to_string()));
    }
}

#[test]
fn a_burst_is_one_call_after_it_is_over() {
    let site = Site::new();
    let file = site.write("a.yaml", "0");
    let (tell, told) = channel();
    let quiet = Duration::from_millis(400);
    let read = file.clone();
    let on_change = move || drop(tell.send((Instant::now(), fs::read_to_string(&read).ok())));
    let _watch = Watch::start(vec![file.clone()], quiet, on_change).unwrap();
    let mut open = fs::OpenOptions::new().append(true).open(&file).unwrap();
    let (begun, mut last) = (Instant::now(), Instant::now());
    while begun.elapsed() < Duration::from_millis(600) {
        last = Instant::now();
        open.write_all(b".").unwrap();
    }
    let (at, content) = told.recv_timeout(LONG).expect("a change is seen");
    assert!(at.duration_since(last) >= quiet - Duration::from_millis(20), "{:?}", at.duration_since(last));
    assert_eq!(content, fs::read_to_string(&file).ok());
    assert_eq!(told.recv_timeout(NEVER).map(drop), Err(RecvTimeoutError::Timeout));
}

#[test]
fn what_changes_nothing_is_not_told() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    let (_watch, told) = watch(&file);
    site.write("other.yaml", "noise");
    fs::remove_file(site.path("other.yaml")).unwrap();
    fs::read(&file).unwrap();
    fs::create_dir(site.path("dir")).unwrap();
    is_silent(&told);
}

/// inotify does not tell of writes that come through another directory's name for the file; looking finds them.
#[test]
fn what_sends_no_event_is_found_by_looking() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    fs::create_dir(site.path("elsewhere")).unwrap();
    fs::hard_link(&file, site.path("elsewhere/same")).unwrap();
    let (_watch, told) = watch(&file);
    site.write("elsewhere/same", "two");
    tells(&told, Some("two"));
}

#[test]
fn several_files_are_one_burst() {
    let site = Site::new();
    let files = vec![site.write("a.yaml", "a"), site.write("b.yaml", "b"), site.path("c.yaml")];
    let (tell, told) = channel();
    let _watch = Watch::start(files.clone(), Duration::from_millis(300), move || {
        let _ = tell.send(());
    })
    .unwrap();
    files.iter().for_each(|file| fs::write(file, "new").unwrap());
    assert!(told.recv_timeout(LONG).is_ok());
    assert!(told.recv_timeout(NEVER).is_err());
    fs::write(&files[2], "newer").unwrap();
    assert!(told.recv_timeout(LONG).is_ok());
}

#[test]
fn without_events_it_looks() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    let (tell, told) = channel();
    let read = file.clone();
    let on_change = move || drop(tell.send(fs::read_to_string(&read).ok()));
    let watch = Watch::polling(vec![file.clone()], QUIET, on_change).unwrap();
    assert_eq!(watch.mode(), WatchMode::Polling);
    let new = site.write("new", "two");
    fs::rename(new, &file).unwrap();
    tells(&told, Some("two"));
    fs::remove_file(&file).unwrap();
    tells(&told, None);
    drop(watch);
    assert_eq!(told.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected), "the thread has ended");
}

#[test]
fn dropping_it_ends_its_thread() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    let (watch, told) = watch(&file);
    drop(watch);
    // The callback, and the sender in it, went with the thread.
    assert!(matches!(told.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected)));
}

#[test]
fn a_callback_that_hangs_is_not_waited_for_without_end() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    let (entered, inside) = channel();
    let (let_go, held) = channel::<()>();
    let on_change = move || {
        let _ = entered.send(());
        let _ = held.recv();
    };
    let watch = Watch::start(vec![file], QUIET, on_change).unwrap();
    site.write("a.yaml", "two");
    inside.recv_timeout(LONG).unwrap();
    drop(watch);
    drop(let_go);
}

#[test]
fn a_callback_may_drop_its_own_watch() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    let own: Arc<Mutex<Option<Watch>>> = Arc::default();
    let (tell, told) = channel();
    let inner = own.clone();
    let on_change = move || {
        drop(inner.lock().unwrap().take());
        let _ = tell.send(());
    };
    *own.lock().unwrap() = Some(Watch::start(vec![file], QUIET, on_change).unwrap());
    site.write("a.yaml", "two");
    assert!(told.recv_timeout(LONG).is_ok());
    assert_eq!(told.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected), "the thread has ended");
}

#[test]
fn a_callback_that_panics_is_called_again() {
    let site = Site::new();
    let file = site.write("a.yaml", "one");
    let (tell, told) = channel();
    let on_change = move || {
        let _ = tell.send(());
        panic!("on purpose");
    };
    let _watch = Watch::start(vec![file], QUIET, on_change).unwrap();
    for content in ["two", "three"] {
        site.write("a.yaml", content);
        assert!(told.recv_timeout(LONG).is_ok());
    }
}

#[test]
fn what_cannot_be_watched_is_an_error() {
    assert!(matches!(Watch::start(vec![], QUIET, || ()), Err(WatchError::NoFiles)));
    let error = Watch::start(vec![PathBuf::new()], QUIET, || ()).unwrap_err();
    assert!(matches!(error, WatchError::Path { .. }), "{error}");
    // Any time of quiet will do, also one without end.
    let site = Site::new();
    let watch = Watch::start(vec![site.path("a")], Duration::MAX, || ()).unwrap();
    site.write("a", "x");
    drop(watch);
}
