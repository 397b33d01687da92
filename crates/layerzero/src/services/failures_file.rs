//! Circuits that opened, kept for the next process: `failures.json` in the state directory.
//!
//! A kernel that kept failing is not trusted again by a restart alone: the next process finds its circuit open for what is
//! left of its time, and closes it when calls succeed. A record counts for the version of the kernel and its library that
//! failed. It goes when the circuit closes and with [`Core::forget_failures`]; one older than [`LASTS`] is dropped. A
//! file that cannot be read is written anew, one that cannot be written costs the records, nothing else.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::core::{CircuitChange, CircuitKey, CircuitRecord, Core};
use crate::files::{alone, now_ms, read, replace};
use crate::report::REPORT_VERSION;

const NAME: &str = "failures.json";
/// The largest file that is read.
const MOST_BYTES: u64 = 1 << 20;
/// How many records are kept; beyond that the oldest are dropped.
const MOST_RECORDS: usize = 1000;
/// How long a record counts.
const LASTS: Duration = Duration::from_secs(7 * 24 * 3600);

#[derive(Serialize, Deserialize)]
struct Document {
    schema_version: String,
    failures: Vec<CircuitRecord>,
}

/// The file: at which path it was read.
#[derive(Default)]
pub(crate) struct FailuresFile {
    read: Mutex<Option<PathBuf>>,
    /// Held from taking changes until they are written.
    writing: Mutex<()>,
}

impl FailuresFile {
    /// Reads what earlier processes left, once for each place it is kept at.
    pub fn read(&self, core: &Core, folder: &Path) {
        let path = folder.join(NAME);
        let mut known = self.read.lock();
        if known.as_ref() != Some(&path) {
            core.guard.circuits.go_by(kept(&path));
            *known = Some(path);
        }
    }

    /// Writes what happened to circuits, in the order in which it happened.
    pub fn keep(&self, core: &Core, folder: &Path) {
        let path = folder.join(NAME);
        let _in_turn = self.writing.lock();
        let changes = core.guard.circuits.take_changes();
        // What only takes records away has nothing to do where there are none.
        if !path.exists() && !changes.iter().any(|change| matches!(change, CircuitChange::Opened(_))) {
            return;
        }
        let _alone = alone(&path);
        let before = kept(&path);
        let mut failures = before.clone();
        for change in changes {
            match change {
                CircuitChange::Opened(failure) => drop(failures.insert(failure.key(), failure)),
                CircuitChange::Closed(key) => drop(failures.remove(&key)),
                CircuitChange::Forgotten => failures.clear(),
            }
        }
        if failures == before {
            return;
        }
        let mut failures: Vec<CircuitRecord> = failures.into_values().collect();
        if failures.len() > MOST_RECORDS {
            failures.sort_by_key(|failure| std::cmp::Reverse(failure.at));
            failures.truncate(MOST_RECORDS);
        }
        let document = Document { schema_version: REPORT_VERSION.to_owned(), failures };
        let written = serde_json::to_vec_pretty(&document).map_err(Into::into).and_then(|text| replace(&path, &text));
        if let Err(error) = written {
            tracing::debug!(target: "layerzero", "'{}' cannot be written: {error}", path.display());
        }
    }
}

/// The records of a file that count.
fn kept(path: &Path) -> BTreeMap<CircuitKey, CircuitRecord> {
    let bytes = read(path, MOST_BYTES).ok().flatten().unwrap_or_default();
    let document = serde_json::from_slice::<Document>(&bytes).ok().filter(|d| d.schema_version == REPORT_VERSION);
    let (now, lasts) = (now_ms(), u64::try_from(LASTS.as_millis()).unwrap_or(u64::MAX));
    // One from the future is of a clock that was wrong.
    let counts = |failure: &CircuitRecord| failure.at <= now && now - failure.at < lasts;
    let failures = document.into_iter().flat_map(|document| document.failures);
    failures.filter(counts).map(|failure| (failure.key(), failure)).collect()
}
