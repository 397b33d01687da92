//! The command, driven as a user drives it.

mod answers;
mod bad_documents;
mod bad_usage;
mod control;
mod process;
mod runs;
mod snapshots;
mod support;
