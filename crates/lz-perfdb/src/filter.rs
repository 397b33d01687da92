//! Which rows are wanted.

use crate::record::{Key, Mode, Record};
use crate::sql::Condition;

/// Which rows are wanted; those that meet all that is said.
///
/// ```
/// use lz_perfdb::{Filter, Mode};
///
/// let filter = Filter::all().device("GPU-0").operation("attention.gqa.prefill").mode(Mode::Eager).valid();
/// assert!(filter.valid_only && filter.kernel_id.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Of this kernel.
    pub kernel_id: Option<String>,
    /// Of this operation.
    pub operation: Option<String>,
    /// On this device.
    pub device_id: Option<String>,
    /// In this timing mode.
    pub mode: Option<Mode>,
    /// Of this call.
    pub call: Option<String>,
    /// With this number of threads; 0 for those of which it was not recorded.
    pub threads: Option<u32>,
    /// Measured side by side with others of this contest.
    pub contest: Option<String>,
    /// Only what torch alone would have run, or only what it would not.
    pub baseline: Option<bool>,
    /// Only rows that still count.
    pub valid_only: bool,
    /// Measured at this time or later, in milliseconds since 1970.
    pub since: Option<i64>,
    /// So many rows at most, the first by operation, device, call, mode, threads and kernel.
    pub limit: Option<usize>,
}

impl Filter {
    /// Everything.
    pub fn all() -> Filter {
        Filter::default()
    }

    /// Of this kernel.
    pub fn kernel(self, kernel_id: impl Into<String>) -> Filter {
        Filter { kernel_id: Some(kernel_id.into()), ..self }
    }

    /// Of this operation.
    pub fn operation(self, operation: impl Into<String>) -> Filter {
        Filter { operation: Some(operation.into()), ..self }
    }

    /// On this device.
    pub fn device(self, device_id: impl Into<String>) -> Filter {
        Filter { device_id: Some(device_id.into()), ..self }
    }

    /// In this timing mode.
    pub fn mode(self, mode: Mode) -> Filter {
        Filter { mode: Some(mode), ..self }
    }

    /// Of this call.
    pub fn call(self, call: impl Into<String>) -> Filter {
        Filter { call: Some(call.into()), ..self }
    }

    /// With this number of threads.
    pub fn threads(self, threads: u32) -> Filter {
        Filter { threads: Some(threads), ..self }
    }

    /// Of this contest.
    pub fn contest(self, contest: impl Into<String>) -> Filter {
        Filter { contest: Some(contest.into()), ..self }
    }

    /// Only rows that still count.
    pub fn valid(self) -> Filter {
        Filter { valid_only: true, ..self }
    }

    /// What of it can be said in SQL before newer rows in memory are known: the key.
    pub(crate) fn condition(&self) -> Condition {
        Condition::default()
            .and("operation", self.operation.clone())
            .and("device_id", self.device_id.clone())
            .and("kernel_id", self.kernel_id.clone())
            .and("mode", self.mode.map(Mode::as_str))
            .and("call", self.call.clone())
            .and("coalesce(threads, 0)", self.threads)
    }

    /// Whether rows of this key can be wanted.
    pub(crate) fn wants(&self, key: &Key) -> bool {
        let is = |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|wanted| wanted == found);
        is(&self.kernel_id, &key.kernel_id)
            && is(&self.operation, &key.operation)
            && is(&self.device_id, &key.device_id)
            && is(&self.call, &key.call)
            && self.mode.is_none_or(|mode| mode == key.mode)
            && self.threads.is_none_or(|threads| threads == key.threads)
    }

    /// Whether a row is wanted whose key is.
    pub(crate) fn takes(&self, record: &Record) -> bool {
        self.contest.as_ref().is_none_or(|contest| record.contest.as_ref() == Some(contest))
            && self.baseline.is_none_or(|baseline| record.baseline == baseline)
            && self.since.is_none_or(|since| record.measured_at >= since)
            && (!self.valid_only || record.is_valid())
    }
}
