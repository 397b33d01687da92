//! Decisions that were made before, as documents: lockfiles, dispatch tables, the plans of contexts.
//!
//! Here they are read, and turned into the pins they come to on these devices with these backends. Kernels, devices and
//! documents of backends may come later than a document, so what of it can be kept is found out whenever it is asked about,
//! never when it is read. An entry that cannot be kept costs that entry alone; a table for other hardware is out as a whole.

mod canonical;
mod judge;
mod lockfile;
mod mismatch;
mod plan;
mod source;
mod table;

pub(crate) use canonical::canonical;
pub(crate) use judge::status;
pub(crate) use lockfile::call_order;
pub use lockfile::{Locked, Lockfile, LockfileError, LockfileProblem};
pub use mismatch::{Mismatch, MismatchKind, PinKind, PinStatus};
pub use plan::Plan;
pub(crate) use source::{Pinned, Slot, Source};
pub use table::{BadBuckets, BucketPlan, Buckets, DispatchTable, Fallback, FallbackMode, PlannedOp, TableError};
pub(crate) use table::{Ranges, SCHEMA_VERSION};
