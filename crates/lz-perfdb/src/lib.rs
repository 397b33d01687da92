//! Measurements of kernels, kept in SQLite: a cache that is never in the way.
//!
//! A [`Record`] is one measurement: a kernel at a call, in one timing mode, on one device. All candidates of a call are
//! kept, also those that were wrong or raised. [`PerfDb`] keeps them in a file.
//!
//! ```
//! use lz_perfdb::{Filter, Key, Mode, Options, Outcome, PerfDb, Record, State, Timing};
//!
//! let folder = tempfile::tempdir()?;
//! let db = PerfDb::open(folder.path().join("perfdb.sqlite"), Options::default());
//! assert_eq!(db.state(), State::Open);
//!
//! let call = r#"{"seq_q":1024,"batch":8}"#;
//! let key = |kernel: &str| Key::new(kernel, "attention.gqa.prefill", "GPU-1f2a", Mode::Eager, call);
//! let fast = Record::new(key("flash_attn.v2"), Outcome::Ok(Timing::new(118.2, 121.0, 1.1, 20)));
//! let broken = Record::new(key("other.attention"), Outcome::Failed { error: "no kernel image".into() });
//!
//! // Rows go to a writer; whoever must know waits until they are on the disk.
//! db.put(vec![fast.clone(), broken]).wait()?;
//!
//! let found = db.records(&Filter::all().kernel("flash_attn.v2").valid())?;
//! assert_eq!(found, [fast]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # No failure of it is a failure of anything else
//!
//! [`PerfDb::open`] never fails, and [`PerfDb::state`] says what came of it:
//!
//! | what is found | what is done | state |
//! |---|---|---|
//! | no file, or an empty one | made, `0600`, in a directory `0700` | `Open` |
//! | a damaged database of ours | moved to `<name>.corrupt-<ms>`; rows that are still whole are saved | `Rebuilt` |
//! | a file that is not recognisably ours | not touched, unless [`Options::own_place`] | `Memory` |
//! | an older version | copied to `<name>.backup-v<N>`, then migrated | `Open` |
//! | a newer version, or another program's database | not touched | `Memory` |
//! | a file or a directory that cannot be written | read | `ReadOnly` |
//! | a path where no file can be | nothing | `Memory` |
//!
//! Rows the disk does not take (it is full, it fails, others hold it for too long) stay in memory, where this process
//! reads them, and are written with the next rows that can be. Each such change is told once, as a warning and by
//! [`PerfDb::notes`].
//!
//! # What is promised
//!
//! - A ticket that says `Ok` means that the rows are on the disk: neither `kill -9` nor a power failure takes them
//!   (WAL, `synchronous=FULL`; on file systems that machines share a rollback journal instead of the WAL).
//! - A row that is read is the row that was written: each has a checksum, and one that does not match is left out.
//! - One key, one row; a put never overwrites a newer one.
//! - Several processes may use one file.
//! - After a fork, the child touches neither the parent's connections nor its locks: everything says
//!   [`StoreError::Forked`], and a store opened there can read while the parent has the file open.
#![forbid(unsafe_code)]

mod cell;
mod connect;
mod disk;
mod error;
mod filter;
mod forks;
mod maintain;
mod memory;
mod open;
mod provenance;
mod queue;
mod reader;
mod recognise;
mod record;
mod row;
mod salvage;
mod schema;
mod shared;
mod sql;
mod state;
mod store;
mod support;
mod transfer;
mod verify;
mod words;

pub use error::StoreError;
pub use filter::Filter;
pub use lz_predict::Parts;
pub use maintain::{MergeReport, Prune, PruneReport};
pub use provenance::{Conditions, MemoryPressure, PowerState, Provenance, Temperature};
pub use queue::Ticket;
pub use record::{Impossible, Key, Mode, Outcome, Record, Shape, Timing};
pub use schema::SCHEMA_VERSION;
pub use state::State;
pub use store::{Options, PerfDb};
pub use transfer::{Format, read_records, write_records};
pub use verify::{Report, RowProblem, Stats, verify_file};
pub use words::UnknownWord;
