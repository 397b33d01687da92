//! Events from inotify.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch};
use rustix::io::Errno;

use super::chain::Links;

/// Directories that are watched, and what in them is waited for.
#[derive(Debug)]
pub(super) struct Events {
    inotify: OwnedFd,
    waker: Arc<OwnedFd>,
    links: Links,
    /// The directory of each watch.
    watches: BTreeMap<i32, PathBuf>,
    /// Whether every directory could be watched.
    complete: bool,
}

/// Ends a wait from another thread.
#[derive(Debug)]
pub(super) struct Waker(Arc<OwnedFd>);

impl Waker {
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

impl Events {
    pub fn new() -> Result<Events, Errno> {
        let inotify = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Events { inotify, waker, links: Links::new(), watches: BTreeMap::new(), complete: true })
    }

    pub fn waker(&self) -> Waker {
        Waker(self.waker.clone())
    }

    /// Whether looking more often than now and then would be of use.
    pub fn misses_nothing(&self) -> bool {
        self.complete
    }

    /// Watches the directories of these links, and no others. A directory that was replaced is watched anew: the
    /// system tells watches apart by what they lead to.
    pub fn follow(&mut self, links: &Links) {
        let wanted = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let before = std::mem::take(&mut self.watches);
        self.complete = true;
        let mut last = None;
        for (dir, _) in links.iter().filter(|(dir, _)| last.replace(dir) != Some(dir)) {
            match add_watch(&self.inotify, dir, wanted) {
                Ok(watch) => {
                    self.watches.insert(watch, dir.clone());
                }
                Err(_) => self.complete = false,
            }
        }
        for watch in before.keys().filter(|watch| !self.watches.contains_key(watch)) {
            // Fails where the directory was deleted, and the watch with it.
            let _ = remove_watch(&self.inotify, *watch);
        }
        self.links = links.clone();
    }

    /// Waits for an event about one of the links, or to be woken.
    pub fn wait(&self, at_most: Duration) {
        let end = Instant::now() + at_most;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds = [PollFd::new(&self.inotify, PollFlags::IN), PollFd::new(&*self.waker, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return,
                Err(Errno::INTR) => continue,
                // Never known to happen; without a pause it would keep a core busy.
                Err(_) => return std::thread::sleep(at_most),
                Ok(_) => {}
            }
            let woken = !fds[1].revents().is_empty();
            if self.heard() || woken {
                return;
            }
        }
    }

    /// Takes all events there are; says whether one was about a link.
    fn heard(&self) -> bool {
        let mut heard = false;
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(&self.inotify, &mut space);
        loop {
            match events.next() {
                Ok(event) => {
                    let lost = ReadFlags::QUEUE_OVERFLOW
                        | ReadFlags::IGNORED
                        | ReadFlags::DELETE_SELF
                        | ReadFlags::MOVE_SELF
                        | ReadFlags::UNMOUNT;
                    heard |= event.events().intersects(lost);
                    heard |= event
                        .file_name()
                        .is_some_and(|name| self.concerns(event.wd(), OsStr::from_bytes(name.to_bytes())));
                }
                Err(Errno::INTR) => {}
                Err(_) => return heard,
            }
        }
    }

    fn concerns(&self, watch: i32, name: &OsStr) -> bool {
        let Some(dir) = self.watches.get(&watch) else { return false };
        self.links.contains(&(dir.clone(), name.to_owned()))
    }
}
