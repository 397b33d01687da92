//! Small files that outlive the process: read with a limit, replaced whole or not at all, for their user alone.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
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
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {limit} bytes")));
    }
    Ok(Some(bytes))
}

/// Puts bytes in the place of what a file held. After a crash it holds the one or the other.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = folder(path);
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let unfinished = dir.join(name);
    let _ = fs::remove_file(&unfinished);
    let put = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&unfinished, path)?;
        // The name is on disk when its directory is.
        File::open(dir).and_then(|dir| dir.sync_all())
    };
    put().inspect_err(|_| drop(fs::remove_file(&unfinished)))
}

/// Keeps other processes from changing a file until it is dropped, as long as they ask as well. Whoever cannot have it
/// within a second goes on without: what these files hold can be had again.
pub(crate) fn alone(path: &Path) -> Option<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder(path)).ok()?;
    let mut name = path.file_name()?.to_owned();
    name.push(".lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path.with_file_name(name));
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
