//! What a path leads to, told apart without reading it.

use std::fs::Metadata;
use std::path::Path;

/// The file behind all links, or that there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    Missing,
    Found(Facts),
}

impl Identity {
    pub fn of(path: &Path) -> Identity {
        std::fs::metadata(path).map_or(Identity::Missing, |found| Identity::Found(facts(&found)))
    }
}

/// Device, inode, length, time of the last write, and of the last change of anything: `cp -p` keeps the time of
/// writing, and a file that becomes readable is news.
#[cfg(unix)]
type Facts = (u64, u64, u64, (i64, i64), (i64, i64));

#[cfg(unix)]
fn facts(found: &Metadata) -> Facts {
    use std::os::unix::fs::MetadataExt;
    let (written, changed) = ((found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec()));
    (found.dev(), found.ino(), found.len(), written, changed)
}

#[cfg(not(unix))]
type Facts = (u64, Option<std::time::SystemTime>);

#[cfg(not(unix))]
fn facts(found: &Metadata) -> Facts {
    (found.len(), found.modified().ok())
}
