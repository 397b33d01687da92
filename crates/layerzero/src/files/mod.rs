//! Small files that outlive the process: how they are read, and how they are replaced.

mod kept;
mod written;

pub(crate) use kept::{alone, beside, now_ms, read};
pub(crate) use written::replace;
pub use written::write_file;
