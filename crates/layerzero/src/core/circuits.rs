//! Circuits that opened, as records that outlive the process.
//!
//! A kernel that kept failing is not trusted again by a restart alone: the next process finds its circuit open for what is
//! left of its time. The core holds what earlier processes left and what is not kept yet; a service above it has the file.

use std::collections::BTreeMap;
use std::time::SystemTime;

use lz_model::KernelDescriptor;
use lz_resilience::Earlier;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// A circuit that opened: what failed, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CircuitRecord {
    pub backend: String,
    /// The version of the backend's library, where that is known.
    pub backend_version: Option<String>,
    pub kernel: String,
    pub version: String,
    pub op: String,
    /// What it said last.
    pub error: String,
    /// How often the circuit opened since it was last closed.
    pub openings: u32,
    /// When it opened, in milliseconds since 1970.
    pub at: u64,
    /// When it may be tried again.
    pub retry_at: u64,
}

/// Whose circuit: backend, kernel and operation.
pub(crate) type CircuitKey = (String, String, String);

impl CircuitRecord {
    pub fn key(&self) -> CircuitKey {
        (self.backend.clone(), self.kernel.clone(), self.op.clone())
    }
}

/// What happened to a circuit.
pub(crate) enum CircuitChange {
    Opened(CircuitRecord),
    Closed(CircuitKey),
    /// All records are to go.
    Forgotten,
}

/// What earlier processes left, and what is not kept yet.
#[derive(Default)]
pub(crate) struct Circuits {
    earlier: Mutex<BTreeMap<CircuitKey, CircuitRecord>>,
    changes: Mutex<Vec<CircuitChange>>,
}

impl Circuits {
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
            retry_at_ms: clock_ms.saturating_add(found.retry_at.saturating_sub(since_1970_ms())),
            error: found.error,
        })
    }

    /// Goes by these records of earlier processes, instead of those before.
    pub fn go_by(&self, earlier: BTreeMap<CircuitKey, CircuitRecord>) {
        *self.earlier.lock() = earlier;
    }

    pub fn note(&self, change: CircuitChange) {
        self.changes.lock().push(change);
    }

    /// What happened since this was asked last.
    pub fn take_changes(&self) -> Vec<CircuitChange> {
        std::mem::take(&mut *self.changes.lock())
    }
}

/// Milliseconds since 1970: what records of several processes have in common.
pub(super) fn since_1970_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}
