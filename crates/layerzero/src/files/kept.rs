//! Small files that outlive the process: read with a limit, and changed by one process at a time. How they are written is
//! in `written.rs`.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How long a process waits for another that changes the same file.
const PATIENCE: Duration = Duration::from_secs(1);

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

/// What a file holds; `None` when there is none. One of more than `limit` bytes is an error of kind `FileTooLarge`.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    // Opening a pipe would wait for somebody to write to it.
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {limit} bytes")));
    }
    Ok(Some(bytes))
}

/// Keeps other processes from changing a file until it is dropped, as long as they ask as well. Whoever cannot have it
/// within a second goes on without: what these files hold can be had again.
pub(crate) fn alone(path: &Path) -> Option<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder(path)).ok()?;
    let mut name = path.file_name()?.to_owned();
    name.push(".lock");
    let lock = path.with_file_name(name);
    // Whatever else has that name is left alone.
    if fs::symlink_metadata(&lock).is_ok_and(|found| !found.is_file()) {
        return None;
    }
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(lock);
    let (file, begun) = (file.ok()?, std::time::Instant::now());
    loop {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(TryLockError::WouldBlock) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(_) => return None,
        }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// A file beside another.
pub(crate) fn beside(path: &Path, name: &str) -> PathBuf {
    path.with_file_name(name)
}
