//! The one way files are written: whole or not at all, never in the place of something that is no file.
//!
//! - A link is followed: the file it leads to is replaced, the link stays.
//! - A pipe, a terminal or another character device is written to. A directory, a socket or a disk is refused.
//! - The bytes go to a new file beside the target, made exclusively under a name nobody can foresee, which then takes the
//!   target's place and its permissions.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use lz_config::resolve_path;

/// Writes a file that somebody named. `job` is given the place to write to; when it fails, a file that was there is as it
/// was.
///
/// ```
/// use std::io;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("report.txt");
/// layerzero::write_file(&path, |to| to.write_all(b"before"))?;
/// let failed = layerzero::write_file(&path, |to| to.write_all(b"af").and(Err::<(), _>(io::Error::other("no more"))));
/// assert!(failed.is_err());
/// assert_eq!(std::fs::read(&path)?, b"before");
/// # Ok::<(), io::Error>(())
/// ```
pub fn write_file<T, E: From<io::Error>>(
    path: &Path,
    job: impl FnOnce(&mut dyn Write) -> Result<T, E>,
) -> Result<T, E> {
    // What is open in this process has a name below these; a file put in its place would be another one.
    let is_open = ["/dev", "/proc"].iter().any(|folder| path.starts_with(folder));
    match fs::metadata(path) {
        Ok(found) if is_open || !found.is_file() => write_through(path, &found, job),
        _ => put(&resolve_path(path)?, 0o666, job),
    }
}

/// Puts bytes in the place of what a file of ours held. After a crash it holds the one or the other. Missing folders are
/// made, for their user alone. Nothing but a regular file is replaced, and nothing is waited for.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder(path))?;
    let target = resolve_path(path)?;
    match fs::symlink_metadata(&target) {
        Ok(found) if !found.is_file() => Err(unfit(&found)),
        _ => put(&target, 0o600, |to| to.write_all(bytes)),
    }
}

/// Writes to what is no regular file: there is nothing whose place could be taken.
fn write_through<T, E: From<io::Error>>(
    path: &Path,
    found: &Metadata,
    job: impl FnOnce(&mut dyn Write) -> Result<T, E>,
) -> Result<T, E> {
    let kind = found.file_type();
    if !(kind.is_fifo() || kind.is_char_device() || kind.is_file()) {
        return Err(unfit(found).into());
    }
    let file = OpenOptions::new().append(kind.is_file()).write(true).open(path)?;
    let mut writer = BufWriter::new(file);
    let done = job(&mut writer)?;
    writer.flush()?;
    Ok(done)
}

fn unfit(found: &Metadata) -> io::Error {
    let kind = found.file_type();
    let what = match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_block_device() => "a disk",
        () => "a device",
    };
    io::Error::new(io::ErrorKind::InvalidInput, format!("it is {what}; name a file"))
}

/// Puts a new file in the place of the target, which is a regular file or missing. `mode` is that of a file that is new.
fn put<T, E: From<io::Error>>(
    target: &Path,
    mode: u32,
    job: impl FnOnce(&mut dyn Write) -> Result<T, E>,
) -> Result<T, E> {
    let before = fs::metadata(target).ok().map(|found| found.permissions());
    // Until it is complete, a file that replaces another is for its owner alone.
    let unfinished = match Unfinished::beside(target, if before.is_some() { 0o600 } else { mode }) {
        Ok(unfinished) => unfinished,
        // In a folder that cannot be written the file itself may be.
        Err(error) if before.is_some() && is_forbidden(&error) => {
            let file = OpenOptions::new().write(true).truncate(true).open(target).map_err(|_| error)?;
            return fill(&file, job);
        }
        Err(error) => return Err(error.into()),
    };
    let done = fill(&unfinished.file, job)?;
    unfinished.finish(target, before)?;
    // The name is on disk when its folder is. A file system that cannot say so has taken the file all the same.
    let _ = File::open(folder(target)).and_then(|folder| folder.sync_all());
    Ok(done)
}

fn fill<T, E: From<io::Error>>(file: &File, job: impl FnOnce(&mut dyn Write) -> Result<T, E>) -> Result<T, E> {
    let mut writer = BufWriter::new(file);
    let done = job(&mut writer)?;
    writer.flush()?;
    file.sync_all()?;
    Ok(done)
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// A file that is not what it is to be yet. It is removed if it never becomes that.
struct Unfinished {
    file: File,
    path: Option<PathBuf>,
}

/// So many names are tried.
const NAMES: usize = 100;

impl Unfinished {
    /// A new file in the target's folder. `create_new` takes nothing that is there, not even a link that leads nowhere.
    fn beside(target: &Path, mode: u32) -> io::Result<Unfinished> {
        let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
        for _ in 0..NAMES {
            // The keys of a hasher are random, and nobody outside this process knows them.
            let number = RandomState::new().hash_one(target);
            let path = folder(target).join(format!(".layerzero-{number:016x}.tmp"));
            match OpenOptions::new().write(true).create_new(true).mode(mode).open(&path) {
                Ok(file) => return Ok(Unfinished { file, path: Some(path) }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn finish(mut self, target: &Path, permissions: Option<Permissions>) -> io::Result<()> {
        if let Some(permissions) = permissions {
            // Not the bits that let it run as its owner: that may be somebody else now.
            self.file.set_permissions(Permissions::from_mode(permissions.mode() & 0o777))?;
        }
        if let Some(path) = &self.path {
            fs::rename(path, target)?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}
