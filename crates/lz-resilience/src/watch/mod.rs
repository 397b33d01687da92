//! Watching files: one call after each burst of changes, once the files are quiet.
//!
//! What a path leads to is what counts: device, inode, times and length of the file behind all links. A burst that
//! leaves these as they were calls nobody. So it does not matter how a file changes: rewritten in place, replaced by a
//! rename, deleted and made again, or swapped behind a symlink as Kubernetes does with a ConfigMap.
//!
//! On Linux inotify tells when to look: it watches the directory of every link on the way to a file, not the file, so
//! that it survives the file. Whatever it misses (writes through another hard link, network file systems, a full
//! queue) is found by looking once a second. Where there is no inotify, looking four times a second must do.

mod chain;
mod identity;
#[cfg(target_os = "linux")]
#[path = "inotify.rs"]
mod source;
#[cfg(not(target_os = "linux"))]
#[path = "no_events.rs"]
mod source;

use std::io;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use identity::Identity;
use source::Events;

/// How often to look where events are to be had.
const LOOK: Duration = Duration::from_secs(1);
/// How often to look where they are not.
const LOOK_ALONE: Duration = Duration::from_millis(250);
/// Longest time of quiet that is waited for.
const MOST_QUIET: Duration = Duration::from_secs(3600);
/// How long a dropped watch waits for its thread, which may be inside the callback.
const FAREWELL: Duration = Duration::from_secs(2);

/// Why files cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// There is nothing to watch.
    #[error("no files to watch")]
    NoFiles,
    /// A path means nothing.
    #[error("cannot watch {}: {error}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        error: io::Error,
    },
    /// The system gave no thread.
    #[error("cannot start a thread to watch files: {0}")]
    Thread(io::Error),
}

/// How changes are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchMode {
    /// The system tells, and once a second is looked as well.
    Events,
    /// By looking four times a second.
    Polling,
}

/// Files being watched. Dropping it ends that.
#[derive(Debug)]
pub struct Watch {
    mode: WatchMode,
    stop: Stop,
    ended: mpsc::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `on_change`, on a thread of its own, each time the files have changed and then been quiet for
    /// `debounce` (an hour at most). They need not exist. Every change after this returns is seen.
    pub fn start(
        files: Vec<PathBuf>,
        debounce: Duration,
        on_change: impl Fn() + Send + 'static,
    ) -> Result<Watch, WatchError> {
        Watch::with(files, debounce, Events::new().ok(), on_change)
    }

    /// As [`start`](Watch::start), without asking the system for events: for file systems known to have none.
    pub fn polling(
        files: Vec<PathBuf>,
        debounce: Duration,
        on_change: impl Fn() + Send + 'static,
    ) -> Result<Watch, WatchError> {
        Watch::with(files, debounce, None, on_change)
    }

    fn with(
        files: Vec<PathBuf>,
        debounce: Duration,
        events: Option<Events>,
        on_change: impl Fn() + Send + 'static,
    ) -> Result<Watch, WatchError> {
        if files.is_empty() {
            return Err(WatchError::NoFiles);
        }
        let absolute = |path: PathBuf| std::path::absolute(&path).map_err(|error| WatchError::Path { path, error });
        let files = files.into_iter().map(absolute).collect::<Result<Vec<_>, _>>()?;
        let mode = if events.is_some() { WatchMode::Events } else { WatchMode::Polling };
        let (stop, stopped) = mpsc::channel();
        let stop = Stop { asked: stop, waker: events.as_ref().map(Events::waker) };
        let (end, ended) = mpsc::channel();
        // Before the thread: what changes from now on is a change.
        let watcher = Watcher::new(files, debounce.min(MOST_QUIET), events, stopped);
        let run = move || {
            watcher.run(on_change);
            drop(end);
        };
        let thread =
            std::thread::Builder::new().name("layerzero-watch".into()).spawn(run).map_err(WatchError::Thread)?;
        Ok(Watch { mode, stop, ended, thread: Some(thread) })
    }

    /// How changes are found.
    pub fn mode(&self) -> WatchMode {
        self.mode
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.ask();
        let Some(thread) = self.thread.take() else { return };
        // The callback may own the watch, and may be slow; neither is waited for without end.
        if thread.thread().id() != std::thread::current().id()
            && self.ended.recv_timeout(FAREWELL) != Err(mpsc::RecvTimeoutError::Timeout)
        {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Stop {
    asked: mpsc::Sender<()>,
    waker: Option<source::Waker>,
}

impl Stop {
    fn ask(&self) {
        let _ = self.asked.send(());
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }
}

struct Watcher {
    files: Vec<PathBuf>,
    debounce: Duration,
    events: Option<Events>,
    stopped: mpsc::Receiver<()>,
    /// What was seen last, and what was there when the callback was last called.
    seen: Vec<Identity>,
    told: Vec<Identity>,
}

impl Watcher {
    fn new(files: Vec<PathBuf>, debounce: Duration, events: Option<Events>, stopped: mpsc::Receiver<()>) -> Watcher {
        let mut watcher = Watcher { files, debounce, events, stopped, seen: Vec::new(), told: Vec::new() };
        watcher.seen = watcher.look();
        watcher.told = watcher.seen.clone();
        watcher
    }

    /// What the paths lead to. The directories first: what changes after that sends an event.
    fn look(&mut self) -> Vec<Identity> {
        if let Some(events) = &mut self.events {
            events.follow(&chain::links(&self.files));
        }
        self.files.iter().map(|file| Identity::of(Path::new(file))).collect()
    }

    fn run(mut self, on_change: impl Fn()) {
        // When it will have been quiet for long enough.
        let mut due: Option<Instant> = None;
        loop {
            let left = due.map(|due| due.saturating_duration_since(Instant::now()));
            if !self.wait(left) {
                return;
            }
            let now = self.look();
            if now != self.seen {
                self.seen = now;
                due = Some(Instant::now() + self.debounce);
            }
            if due.is_some_and(|due| due <= Instant::now()) {
                due = None;
                if self.seen != self.told {
                    self.told = self.seen.clone();
                    call(&on_change);
                }
            }
        }
    }

    /// Waits until there may be something to see, `left` at most. `false`: the watch was dropped.
    fn wait(&mut self, left: Option<Duration>) -> bool {
        match &mut self.events {
            Some(events) => {
                let look = if events.misses_nothing() { LOOK } else { LOOK_ALONE };
                events.wait(left.map_or(look, |left| left.min(look)));
                matches!(self.stopped.try_recv(), Err(mpsc::TryRecvError::Empty))
            }
            None => {
                let look = left.map_or(LOOK_ALONE, |left| left.min(LOOK_ALONE));
                self.stopped.recv_timeout(look) == Err(mpsc::RecvTimeoutError::Timeout)
            }
        }
    }
}

/// A callback that panics must not end the watching.
fn call(on_change: &impl Fn()) {
    if std::panic::catch_unwind(AssertUnwindSafe(on_change)).is_err() {
        tracing::error!(target: "layerzero", "what watches a file panicked; it will be called again");
    }
}
