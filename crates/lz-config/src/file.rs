//! Files, read with care: only regular ones, never more than a limit, never waiting.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::problem::ProblemKind;

/// The largest file that is read, in bytes.
pub(crate) const MAX_BYTES: u64 = 1 << 20;

/// The text of a file: a regular one of at most 1 MiB, in UTF-8.
pub fn read(path: &Path) -> Result<String, ProblemKind> {
    let unreadable = |error: std::io::Error| ProblemKind::Unreadable { error: error.to_string() };
    // Opening some devices does things, so what it is comes first.
    regular(&std::fs::metadata(path).map_err(unreadable)?)?;
    // Should it have become a pipe since, opening must not wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| unreadable(e.into()))?;
    let file = File::from(file);
    let metadata = file.metadata().map_err(unreadable)?;
    regular(&metadata)?;
    if metadata.len() > MAX_BYTES {
        return Err(ProblemKind::TooLarge { limit: MAX_BYTES });
    }
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(ProblemKind::TooLarge { limit: MAX_BYTES });
    }
    String::from_utf8(bytes).map_err(|e| ProblemKind::NotUtf8 { offset: e.utf8_error().valid_up_to() })
}

fn regular(metadata: &std::fs::Metadata) -> Result<(), ProblemKind> {
    use std::os::unix::fs::FileTypeExt;
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(ProblemKind::NotAFile { what })
}
