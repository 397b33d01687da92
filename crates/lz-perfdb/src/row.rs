//! A record as one flat row: the columns of the table, and of exported files.

use lz_predict::Parts;
use rusqlite::types::ValueRef;
use serde::{Deserialize, Serialize};

use crate::cell::{Cell, Checksum};
use crate::provenance::{Conditions, MemoryPressure, PowerState, Provenance, Temperature};
use crate::record::{Key, Mode, Outcome, Record, Shape, Timing};
use crate::schema::{OLDEST_READABLE, SCHEMA_VERSION};
use crate::words::words;

words! {
    /// The outcome in a row.
    Verdict {
        /// Right and timed.
        Ok = "ok",
        /// Wrong.
        Wrong = "wrong",
        /// Raised.
        Failed = "failed",
    }
}

/// Makes the row, and everything that goes over all columns, out of the list of them.
macro_rules! columns {
    ($($name:ident: $type:ty,)+) => {
        /// A record with all of its columns. The version stands in files only: a table has it once.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct Row { pub schema_version: u32, $(pub $name: $type),+ }

        /// The columns, in order.
        pub(crate) const COLUMNS: &[&str] = &[$(stringify!($name)),+];

        impl Row {
            /// The values, in the order of the columns.
            pub fn values(&self) -> Vec<ValueRef<'_>> {
                vec![$(Cell::value(&self.$name)),+]
            }

            /// From values in the order of the columns; the error says which is none of its type.
            pub fn from_values<'v>(mut values: impl FnMut(usize) -> Option<ValueRef<'v>>) -> Result<Row, String> {
                let mut next = 0..;
                Ok(Row {
                    schema_version: SCHEMA_VERSION,
                    $($name: {
                        let value = next.next().and_then(&mut values).ok_or("the row ends too early")?;
                        Cell::read(value).map_err(|what| format!("{}: {what}", stringify!($name)))?
                    }),+
                })
            }
        }
    };
}

columns! {
    kernel_id: String,
    operation: String,
    device_id: String,
    mode: Mode,
    call: String,
    sm_version: u32,
    dtype: String,
    head_dim: u32,
    seq_bucket: u32,
    batch_bucket: u32,
    outcome: Verdict,
    error: Option<String>,
    median_us: Option<f64>,
    p95_us: Option<f64>,
    spread_us: Option<f64>,
    variance_us: Option<f64>,
    samples: u32,
    warmup_ms: Option<f64>,
    max_error: Option<f64>,
    baseline: bool,
    kernel_version: Option<String>,
    backend_version: Option<String>,
    layerzero_version: Option<String>,
    capabilities_hash: Option<String>,
    torch_version: Option<String>,
    cuda_version: Option<String>,
    driver_version: Option<String>,
    device_uuid: Option<String>,
    temperature: Option<Temperature>,
    memory_pressure: Option<MemoryPressure>,
    power_state: Option<PowerState>,
    measured_at: i64,
    contest: Option<String>,
    valid: bool,
    invalid_why: Option<String>,
    host_us: Option<f64>,
    device_us: Option<f64>,
    threads: Option<u32>,
}

/// Where the columns begin that version 2 did not have. What comes later goes behind them.
pub(crate) const ADDED: usize = 35;
/// The same of version 3.
pub(crate) const ADDED_TO_3: usize = 37;

impl Row {
    /// A digest of all values. A change of any single byte of them changes it. A column that was added later counts where
    /// it has a value: rows from before keep the digest they had.
    pub fn checksum(&self) -> i64 {
        let mut checksum = Checksum::new();
        let values = self.values();
        values[..ADDED].iter().for_each(|value| checksum.add(*value));
        for (at, value) in values.iter().enumerate().skip(ADDED).filter(|(_, value)| **value != ValueRef::Null) {
            checksum.add(ValueRef::Integer(at as i64));
            checksum.add(*value);
        }
        checksum.finish()
    }
}

/// Errors longer than this are cut: what a compiler prints can be megabytes.
const MAX_ERROR: usize = 4000;

fn cut(text: String) -> String {
    if text.len() <= MAX_ERROR {
        return text;
    }
    text[..text.floor_char_boundary(MAX_ERROR)].to_owned()
}

impl From<Record> for Row {
    fn from(record: Record) -> Row {
        let known = |text: Option<String>| text.filter(|text| !text.is_empty());
        let Record { key, shape, provenance, conditions, .. } = record;
        let (outcome, error, timing) = match record.outcome {
            Outcome::Ok(timing) => (Verdict::Ok, None, Some(timing)),
            Outcome::Wrong { error } => (Verdict::Wrong, known(Some(cut(error))), None),
            Outcome::Failed { error } => (Verdict::Failed, known(Some(cut(error))), None),
        };
        Row {
            schema_version: SCHEMA_VERSION,
            kernel_id: key.kernel_id,
            operation: key.operation,
            device_id: key.device_id,
            mode: key.mode,
            call: key.call,
            sm_version: shape.sm_version,
            dtype: shape.dtype,
            head_dim: shape.head_dim,
            seq_bucket: shape.seq_bucket,
            batch_bucket: shape.batch_bucket,
            outcome,
            error,
            median_us: timing.as_ref().map(|t| t.median_us),
            p95_us: timing.as_ref().map(|t| t.p95_us),
            spread_us: timing.as_ref().map(|t| t.spread_us),
            variance_us: timing.as_ref().and_then(|t| t.variance_us),
            samples: timing.as_ref().map_or(0, |t| t.samples),
            warmup_ms: timing.as_ref().and_then(|t| t.warmup_ms),
            max_error: record.max_error,
            baseline: record.baseline,
            kernel_version: known(provenance.kernel_version),
            backend_version: known(provenance.backend_version),
            layerzero_version: known(provenance.layerzero_version),
            capabilities_hash: known(provenance.capabilities_hash),
            torch_version: known(provenance.torch_version),
            cuda_version: known(provenance.cuda_version),
            driver_version: known(provenance.driver_version),
            device_uuid: known(provenance.device_uuid),
            temperature: conditions.temperature,
            memory_pressure: conditions.memory_pressure,
            power_state: conditions.power_state,
            measured_at: record.measured_at,
            contest: known(record.contest),
            valid: record.invalid.is_none(),
            invalid_why: known(record.invalid),
            host_us: timing.as_ref().and_then(|t| t.parts).map(|p| p.host_us),
            device_us: timing.as_ref().and_then(|t| t.parts).map(|p| p.device_us),
            threads: Some(key.threads).filter(|threads| *threads > 0),
        }
    }
}

/// A row whose columns contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Contradiction(String);

impl TryFrom<Row> for Record {
    type Error = Contradiction;

    fn try_from(row: Row) -> Result<Record, Contradiction> {
        if !(OLDEST_READABLE..=SCHEMA_VERSION).contains(&row.schema_version) {
            let found = row.schema_version;
            let readable = format!("{OLDEST_READABLE} to {SCHEMA_VERSION}");
            return Err(Contradiction(format!("schema_version is {found}, this version reads {readable}")));
        }
        let outcome = outcome(&row).map_err(Contradiction)?;
        let invalid = match (row.valid, row.invalid_why) {
            (true, None) => None,
            (true, Some(why)) => return Err(Contradiction(format!("valid, yet invalid_why is '{why}'"))),
            (false, why) => Some(why.unwrap_or_else(|| "no reason was recorded".into())),
        };
        let record = Record {
            key: Key {
                operation: row.operation,
                device_id: row.device_id,
                call: row.call,
                mode: row.mode,
                threads: row.threads.unwrap_or(0),
                kernel_id: row.kernel_id,
            },
            shape: Shape {
                sm_version: row.sm_version,
                dtype: row.dtype,
                head_dim: row.head_dim,
                seq_bucket: row.seq_bucket,
                batch_bucket: row.batch_bucket,
            },
            outcome,
            max_error: row.max_error,
            baseline: row.baseline,
            provenance: Provenance {
                kernel_version: row.kernel_version,
                backend_version: row.backend_version,
                layerzero_version: row.layerzero_version,
                capabilities_hash: row.capabilities_hash,
                torch_version: row.torch_version,
                cuda_version: row.cuda_version,
                driver_version: row.driver_version,
                device_uuid: row.device_uuid,
            },
            conditions: Conditions {
                temperature: row.temperature,
                memory_pressure: row.memory_pressure,
                power_state: row.power_state,
            },
            measured_at: row.measured_at,
            contest: row.contest,
            invalid,
        };
        record.check().map_err(|impossible| Contradiction(impossible.what))?;
        Ok(record)
    }
}

fn outcome(row: &Row) -> Result<Outcome, String> {
    let error = || row.error.clone().unwrap_or_default();
    let times = [
        ("median_us", row.median_us),
        ("p95_us", row.p95_us),
        ("spread_us", row.spread_us),
        ("variance_us", row.variance_us),
        ("warmup_ms", row.warmup_ms),
        ("host_us", row.host_us),
        ("device_us", row.device_us),
    ];
    match row.outcome {
        Verdict::Ok => {
            if let Some(error) = &row.error {
                return Err(format!("outcome is ok, yet error is '{error}'"));
            }
            let missing = |name: &str| format!("outcome is ok, but {name} is missing");
            let parts = match (row.host_us, row.device_us) {
                (Some(host_us), Some(device_us)) => Some(Parts { host_us, device_us }),
                (None, None) => None,
                (host, _) => {
                    let (there, missing) = if host.is_some() { ("host", "device") } else { ("device", "host") };
                    return Err(format!("{there}_us has a value, but {missing}_us is missing"));
                }
            };
            Ok(Outcome::Ok(Timing {
                median_us: row.median_us.ok_or_else(|| missing("median_us"))?,
                p95_us: row.p95_us.ok_or_else(|| missing("p95_us"))?,
                spread_us: row.spread_us.ok_or_else(|| missing("spread_us"))?,
                variance_us: row.variance_us,
                samples: row.samples,
                warmup_ms: row.warmup_ms,
                parts,
            }))
        }
        verdict => {
            if let Some((name, _)) = times.iter().find(|(_, time)| time.is_some()) {
                return Err(format!("outcome is {verdict}, yet {name} has a value"));
            }
            if row.samples != 0 {
                return Err(format!("outcome is {verdict}, yet samples is {}", row.samples));
            }
            Ok(if verdict == Verdict::Wrong {
                Outcome::Wrong { error: error() }
            } else {
                Outcome::Failed { error: error() }
            })
        }
    }
}
