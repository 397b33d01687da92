//! One measurement: a kernel at a call, in a timing mode, on a device.

use std::time::{SystemTime, UNIX_EPOCH};

use lz_predict::Parts;
use serde::{Deserialize, Serialize};

use crate::provenance::{Conditions, Provenance};
use crate::row::Row;
use crate::words::words;

words! {
    /// How a kernel was run while it was timed.
    Mode {
        /// Call by call.
        Eager = "eager",
        /// Replayed from a captured graph.
        Graph = "graph",
    }
}

/// What tells measurements apart: the store keeps one row for each.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The operation, by the id it resolves to.
    pub operation: String,
    /// The device: its UUID, or a signature where it has none.
    pub device_id: String,
    /// The call, in a canonical text. The store compares it and never looks inside.
    pub call: String,
    /// How the kernel was run.
    pub mode: Mode,
    /// How many threads it could use on a CPU; 0 where that was not recorded, and on other devices.
    pub threads: u32,
    /// The kernel.
    pub kernel_id: String,
}

impl Key {
    /// A key, without a number of threads.
    pub fn new(
        kernel_id: impl Into<String>,
        operation: impl Into<String>,
        device_id: impl Into<String>,
        mode: Mode,
        call: impl Into<String>,
    ) -> Key {
        Key {
            operation: operation.into(),
            device_id: device_id.into(),
            call: call.into(),
            mode,
            threads: 0,
            kernel_id: kernel_id.into(),
        }
    }

    /// The same with so many threads.
    pub fn threads(self, threads: u32) -> Key {
        Key { threads, ..self }
    }
}

/// What of a call people ask for by name. Selection does not look at it: the call itself is in the [`Key`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// The device's compute capability times ten; 0 when it has none.
    pub sm_version: u32,
    /// The dtype of the data.
    pub dtype: String,
    /// The head dimension; 0 when the operation has none.
    pub head_dim: u32,
    /// The bucket of the sequence's length.
    pub seq_bucket: u32,
    /// The bucket of the batch.
    pub batch_bucket: u32,
}

/// How long a kernel took.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// The median, in microseconds.
    pub median_us: f64,
    /// The 95th percentile; never below the median.
    pub p95_us: f64,
    /// The noise: differences below it are ties.
    pub spread_us: f64,
    /// The variance of the samples.
    pub variance_us: Option<f64>,
    /// How many rounds stand behind it.
    pub samples: u32,
    /// What the first call took more: compilation, caches.
    pub warmup_ms: Option<f64>,
    /// What it took whom, where two work at the same time.
    pub parts: Option<Parts>,
}

impl Timing {
    /// A timing of which variance and warm-up are not known.
    pub fn new(median_us: f64, p95_us: f64, spread_us: f64, samples: u32) -> Timing {
        Timing { median_us, p95_us, spread_us, variance_us: None, samples, warmup_ms: None, parts: None }
    }

    /// The noise as a share of the time.
    pub fn relative_spread(&self) -> f64 {
        self.spread_us / self.median_us
    }
}

/// What became of measuring a kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It was right, and took so long.
    Ok(Timing),
    /// Its result differed from the reference by more than is allowed.
    Wrong {
        /// What differed.
        error: String,
    },
    /// It raised.
    Failed {
        /// What it raised.
        error: String,
    },
}

impl Outcome {
    /// How long it took, if it was right.
    pub fn timing(&self) -> Option<&Timing> {
        match self {
            Outcome::Ok(timing) => Some(timing),
            Outcome::Wrong { .. } | Outcome::Failed { .. } => None,
        }
    }
}

/// One measurement. Serialized flat: one object with the columns of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "Row", try_from = "Row")]
pub struct Record {
    /// Of what.
    pub key: Key,
    /// The same, for people.
    pub shape: Shape,
    /// What became of it.
    pub outcome: Outcome,
    /// The largest difference from the reference that was seen. Where that is no finite number it is `None`, and the
    /// outcome's error says so.
    pub max_error: Option<f64>,
    /// Whether this kernel is what torch alone would have run.
    pub baseline: bool,
    /// With what it was measured.
    pub provenance: Provenance,
    /// Under which conditions, in rows of older versions.
    pub conditions: Conditions,
    /// When, in milliseconds since 1970.
    pub measured_at: i64,
    /// Which measurements were taken side by side: they share it, and only their times compare well.
    pub contest: Option<String>,
    /// Why it no longer counts; `None` for one that does.
    pub invalid: Option<String>,
}

impl Record {
    /// A measurement taken now, of which nothing else is known.
    pub fn new(key: Key, outcome: Outcome) -> Record {
        Record {
            key,
            shape: Shape::default(),
            outcome,
            max_error: None,
            baseline: false,
            provenance: Provenance::default(),
            conditions: Conditions::default(),
            measured_at: now_ms(),
            contest: None,
            invalid: None,
        }
    }

    /// Whether it still counts.
    pub fn is_valid(&self) -> bool {
        self.invalid.is_none()
    }

    /// Whether such a measurement can exist. The store takes no other.
    pub fn check(&self) -> Result<(), Impossible> {
        match self.impossible() {
            Some(what) => Err(Impossible { kernel_id: self.key.kernel_id.clone(), what }),
            None => Ok(()),
        }
    }

    fn impossible(&self) -> Option<String> {
        let key = &self.key;
        let texts = [("kernel_id", &key.kernel_id), ("operation", &key.operation), ("device_id", &key.device_id)];
        if let Some((name, _)) = texts.iter().find(|(_, text)| text.is_empty()) {
            return Some(format!("{name} is empty; a measurement is of a kernel, for an operation, on a device"));
        }
        let optional =
            self.provenance.facts().into_iter().chain([("contest", &self.contest), ("invalid", &self.invalid)]);
        let optional = optional.filter_map(|(name, text)| Some((name, text.as_ref()?)));
        let mut texts = texts.into_iter().chain([("call", &key.call), ("dtype", &self.shape.dtype)]).chain(optional);
        if let Some((name, text)) = texts.find(|(_, text)| text.len() > MAX_TEXT) {
            return Some(format!("{name} has {} bytes; at most {MAX_TEXT} are kept", text.len()));
        }
        if self.measured_at < 0 {
            return Some(format!("measured_at is {}; it counts from 1970", self.measured_at));
        }
        let least = |name: &str, value: f64, positive: bool| {
            let fine = value.is_finite() && if positive { value > 0.0 } else { value >= 0.0 };
            let expected = if positive { "a number above 0" } else { "0 or a number above it" };
            (!fine).then(|| format!("{name} is {value}; expected {expected}"))
        };
        if let Some(what) = self.max_error.and_then(|value| least("max_error", value, false)) {
            return Some(what);
        }
        let timing = self.outcome.timing()?;
        let (median, p95) = (timing.median_us, timing.p95_us);
        least("median_us", median, true)
            .or_else(|| least("p95_us", p95, true))
            .or_else(|| (p95 < median).then(|| format!("p95_us is {p95}, below median_us, which is {median}")))
            .or_else(|| least("spread_us", timing.spread_us, false))
            .or_else(|| timing.variance_us.and_then(|value| least("variance_us", value, false)))
            .or_else(|| timing.warmup_ms.and_then(|value| least("warmup_ms", value, false)))
            .or_else(|| timing.parts.and_then(|parts| least("host_us", parts.host_us, true)))
            .or_else(|| timing.parts.and_then(|parts| least("device_us", parts.device_us, true)))
            .or_else(|| (timing.samples == 0).then(|| "samples is 0; a time needs at least one".to_owned()))
    }
}

/// The longest text. Calls are described in a few hundred bytes.
const MAX_TEXT: usize = 64 << 10;

/// A measurement that cannot exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a measurement of '{kernel_id}' cannot be: {what}")]
pub struct Impossible {
    /// Of which kernel.
    pub kernel_id: String,
    /// What is wrong with it.
    pub what: String,
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
