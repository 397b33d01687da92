//! Circuits that opened, kept for the next process: `failures.json` in the state directory.
//!
//! A kernel that kept failing is not trusted again by a restart alone: the next process finds its circuit open for what is
//! left of its time, and closes it when calls succeed. A record counts for the version of the kernel and its library that
//! failed. It goes when the circuit closes and with [`Engine::forget_failures`]; one older than [`LASTS`] is dropped. A
//! file that cannot be read is written anew, one that cannot be written costs the records, nothing else.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lz_model::KernelDescriptor;
use lz_resilience::Earlier;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::errands::Errand;
use crate::guard::backend_version;
use crate::kept_file::{alone, now_ms, read};
use crate::report::REPORT_VERSION;
use crate::written::replace;

const NAME: &str = "failures.json";
/// The largest file that is read.
const MOST_BYTES: u64 = 1 << 20;
/// How many records are kept; beyond that the oldest are dropped.
const MOST_RECORDS: usize = 1000;
/// How long a record counts.
const LASTS: Duration = Duration::from_secs(7 * 24 * 3600);

/// A circuit that opened: what failed, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    backend: String,
    /// The version of the backend's library, where that is known.
    backend_version: Option<String>,
    kernel: String,
    version: String,
    op: String,
    /// What it said last.
    error: String,
    /// How often the circuit opened since it was last closed.
    openings: u32,
    /// When it opened, in milliseconds since 1970.
    at: u64,
    /// When it may be tried again.
    retry_at: u64,
}

/// Whose circuit: backend, kernel and operation.
type Key = (String, String, String);

impl Failure {
    fn key(&self) -> Key {
        (self.backend.clone(), self.kernel.clone(), self.op.clone())
    }
}

#[derive(Serialize, Deserialize)]
struct Document {
    schema_version: String,
    failures: Vec<Failure>,
}

/// What the file is to learn.
enum Change {
    Opened(Failure),
    Closed(Key),
    Forgotten,
}

/// What earlier processes left, and what is not written yet.
#[derive(Default)]
pub(crate) struct Failures {
    earlier: Mutex<BTreeMap<Key, Failure>>,
    unwritten: Mutex<Vec<Change>>,
    /// The file that was read.
    read: Mutex<Option<PathBuf>>,
}

impl Failures {
    /// What an earlier process left of a kernel's circuit, by this process's clock. It is given once: from then on the
    /// circuit has a state of its own.
    pub fn earlier(
        &self,
        kernel: &KernelDescriptor,
        backend_version: Option<&str>,
        op: &str,
        clock_ms: u64,
    ) -> Option<Earlier> {
        let mut earlier = self.earlier.lock();
        if earlier.is_empty() {
            return None;
        }
        let found = earlier.remove(&(kernel.backend.clone(), kernel.id.clone(), op.to_owned()))?;
        let same = found.version == kernel.version && found.backend_version.as_deref() == backend_version;
        same.then(|| Earlier {
            openings: found.openings,
            retry_at_ms: clock_ms.saturating_add(found.retry_at.saturating_sub(now_ms())),
            error: found.error,
        })
    }
}

impl Engine {
    /// Takes note that a circuit opened.
    pub(crate) fn note_opened(
        &self,
        kernel: &KernelDescriptor,
        op: &str,
        openings: u32,
        retry_at_ms: u64,
        error: &str,
    ) {
        let (now, clock) = (now_ms(), self.guard.clock.now_ms());
        self.note(Change::Opened(Failure {
            backend: kernel.backend.clone(),
            backend_version: self.with_snapshot(|s| backend_version(s, &kernel.backend).map(str::to_owned)),
            kernel: kernel.id.clone(),
            version: kernel.version.clone(),
            op: op.to_owned(),
            error: error.to_owned(),
            openings,
            at: now,
            retry_at: now.saturating_add(retry_at_ms.saturating_sub(clock)),
        }));
    }

    /// Takes note that a circuit closed.
    pub(crate) fn note_closed(&self, kernel: &KernelDescriptor, op: &str) {
        self.note(Change::Closed((kernel.backend.clone(), kernel.id.clone(), op.to_owned())));
    }

    /// Forgets what earlier processes left, in the file as well.
    pub(crate) fn forget_earlier_failures(&self) {
        self.guard.failures.earlier.lock().clear();
        self.note(Change::Forgotten);
    }

    fn note(&self, change: Change) {
        let Some(path) = self.failures_path() else { return };
        let mut unwritten = self.guard.failures.unwritten.lock();
        // What only takes records away has nothing to do where there are none.
        if matches!(change, Change::Opened(_)) || !unwritten.is_empty() || path.exists() {
            unwritten.push(change);
            drop(unwritten);
            self.later(Errand::KeepFailures);
        }
    }

    fn failures_path(&self) -> Option<PathBuf> {
        self.status.folder().map(|dir| dir.join(NAME))
    }

    /// Reads what earlier processes left, once for each place it is kept at.
    pub(crate) fn read_failures(&self) {
        let Some(path) = self.failures_path() else { return };
        let mut known = self.guard.failures.read.lock();
        if known.as_ref() != Some(&path) {
            *self.guard.failures.earlier.lock() = kept(&path);
            *known = Some(path);
        }
    }

    /// Writes what happened since it was last written.
    pub(crate) fn keep_failures(&self) {
        let Some(path) = self.failures_path() else { return };
        let _alone = alone(&path);
        let changes = std::mem::take(&mut *self.guard.failures.unwritten.lock());
        let before = kept(&path);
        let mut failures = before.clone();
        for change in changes {
            match change {
                Change::Opened(failure) => drop(failures.insert(failure.key(), failure)),
                Change::Closed(key) => drop(failures.remove(&key)),
                Change::Forgotten => failures.clear(),
            }
        }
        if failures == before {
            return;
        }
        let mut failures: Vec<Failure> = failures.into_values().collect();
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
fn kept(path: &Path) -> BTreeMap<Key, Failure> {
    let bytes = read(path, MOST_BYTES).ok().flatten().unwrap_or_default();
    let document = serde_json::from_slice::<Document>(&bytes).ok().filter(|d| d.schema_version == REPORT_VERSION);
    let (now, lasts) = (now_ms(), u64::try_from(LASTS.as_millis()).unwrap_or(u64::MAX));
    // One from the future is of a clock that was wrong.
    let counts = |failure: &Failure| failure.at <= now && now - failure.at < lasts;
    let failures = document.into_iter().flat_map(|document| document.failures);
    failures.filter(counts).map(|failure| (failure.key(), failure)).collect()
}
