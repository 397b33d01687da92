//! Dispatch tables: decisions by buckets of sizes, made before a model serves.
//!
//! A table is a tree of ranges, not a list of shapes. Its axes (`seq_len`, `batch`) have upper ends; a size falls into
//! the first bucket whose end it does not exceed, and one above the last is selected for at run time. Each entry says the
//! call it was decided for: dtype, layout, parameters and the sizes kernels are compiled for must be the call's own, the
//! others may be anything within its buckets. Whatever a table says, a kernel that cannot serve a call does not.
//!
//! The format is that of the specification, with what is needed to trust it: the hashes of the capabilities documents,
//! the kernels' versions, and the calls. An entry without a call is for every call of its operation in the bucket that its
//! kernel can serve, whatever the dtype and layout; an entry with one goes before it.

mod buckets;

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use lz_model::{BindRules, CallSpec, Catalog, Context, DeviceIx, did_you_mean, nearest};
use schemars::JsonSchema;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::canonical::canonical;
pub(crate) use buckets::Ranges;
pub use buckets::{BadBuckets, Buckets};

/// The version of the format.
pub(crate) const SCHEMA_VERSION: &str = "1.0";

/// Decisions for a workload, by buckets of sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DispatchTable {
    /// The version of the format: `1.0`.
    pub schema_version: String,
    /// What it was made for.
    pub model_id: String,
    /// The device it was made for: `cuda_sm90_cu130`.
    pub hardware_signature: String,
    /// The version of LayerZero that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layerzero_version: Option<String>,
    /// By backend, the hash of its capabilities document. With another document the table is not in force.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "unique")]
    #[schemars(with = "BTreeMap<String, String>")]
    pub capabilities: BTreeMap<String, String>,
    /// By axis, the upper ends of its buckets, ascending.
    pub shape_buckets: Buckets,
    /// What to run, bucket by bucket.
    pub plans: Vec<BucketPlan>,
    /// What to do elsewhere.
    #[serde(default)]
    pub fallback: Fallback,
}

/// What to run in one bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BucketPlan {
    /// By axis, the bucket's upper end. An axis that an operation does not have does not matter to it.
    #[serde(deserialize_with = "unique")]
    #[schemars(with = "BTreeMap<String, i64>")]
    pub bucket: BTreeMap<String, i64>,
    /// The kernels.
    pub ops: Vec<PlannedOp>,
    /// What must have been compiled before; `kernel@version` for kernels that are compiled on first use.
    #[serde(default)]
    pub jit_artifacts: Vec<String>,
}

/// The kernel of one operation in a bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedOp {
    /// The operation or alias.
    pub op: String,
    /// The kernel.
    pub kernel_id: String,
    /// Its version; any will do when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The call it was decided for. Without one the entry is for every call of the operation in the bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "call_schema")]
    pub call: Option<CallSpec>,
    /// True: only for calls under CUDA graph capture. False: for all calls, except captured ones that have an entry of
    /// their own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub graph: bool,
    /// How long it takes, in microseconds, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_us: Option<f64>,
    /// What the decision went by: `measured`, `predicted`, `declared`, `locked`, `rule` or `pinned`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub basis: Option<String>,
}

/// What to do with calls the table says nothing about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fallback {
    /// How their kernel is found.
    pub mode: FallbackMode,
}

/// How the kernel of a call outside the buckets is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FallbackMode {
    /// By selection, when it is made.
    #[default]
    RuntimeSelect,
}

/// Why a text is no dispatch table.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TableError {
    /// It is larger than is read.
    #[error("{bytes} bytes are more than the {limit} that are read; solve for fewer calls")]
    TooLarge {
        /// How large.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// It is not JSON of the format.
    #[error("line {line}, column {column}: {message}{}", did_you_mean(.nearest))]
    Json {
        /// What is wrong.
        message: String,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// The key that was most likely meant.
        nearest: Option<String>,
    },
    /// A version this build does not read.
    #[error("schema_version {found} is not supported; this build reads {SCHEMA_VERSION}")]
    Version {
        /// What it says.
        found: String,
    },
    /// A bucket that `shape_buckets` does not have.
    #[error("plans[{plan}].bucket: {axis} = {end} is no bucket of shape_buckets")]
    UnknownBucket {
        /// Which plan, from 0.
        plan: usize,
        /// The axis.
        axis: String,
        /// Its end.
        end: i64,
    },
    /// An operation nobody knows, or a call that is none.
    #[error("{place}: {error}")]
    BadCall {
        /// Which entry: `plans[0].ops[2]`.
        place: String,
        /// Why.
        error: String,
    },
    /// One call decided twice.
    #[error("{place}: the call is decided before, in {first}")]
    DuplicateEntry {
        /// Which entry.
        place: String,
        /// Where first.
        first: String,
    },
}

impl DispatchTable {
    /// The largest text that is read.
    pub const MAX_BYTES: usize = 1 << 20;

    /// Reads a text. Whoever wrote it, the answer is a table or what is wrong, and where.
    pub fn parse(text: &str) -> Result<DispatchTable, TableError> {
        if text.len() > DispatchTable::MAX_BYTES {
            return Err(TableError::TooLarge { bytes: text.len(), limit: DispatchTable::MAX_BYTES });
        }
        let table: DispatchTable = serde_json::from_str(text).map_err(|error| json_error(&error))?;
        table.check()?;
        Ok(table)
    }

    /// As text: the same table gives the same text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// The JSON Schema of the format.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(DispatchTable).to_value()
    }

    /// Adds the decisions of a table for the same hardware and the same buckets.
    pub(crate) fn take(&mut self, other: DispatchTable) {
        self.capabilities.extend(other.capabilities);
        for plan in other.plans {
            match self.plans.iter_mut().find(|known| known.bucket == plan.bucket) {
                Some(known) => {
                    known.ops.extend(plan.ops);
                    known.jit_artifacts.extend(plan.jit_artifacts);
                    known.jit_artifacts.sort();
                    known.jit_artifacts.dedup();
                }
                None => self.plans.push(plan),
            }
        }
    }

    /// Every entry with its plan, and how to name it.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (String, &BucketPlan, &PlannedOp)> {
        self.plans.iter().enumerate().flat_map(|(p, plan)| {
            plan.ops.iter().enumerate().map(move |(o, op)| (format!("plans[{p}].ops[{o}]"), plan, op))
        })
    }

    fn check(&self) -> Result<(), TableError> {
        if self.schema_version != SCHEMA_VERSION {
            return Err(TableError::Version { found: self.schema_version.clone() });
        }
        for (plan, BucketPlan { bucket, .. }) in self.plans.iter().enumerate() {
            let unknown = bucket.iter().find(|(axis, end)| !self.shape_buckets.has(axis, **end));
            if let Some((axis, &end)) = unknown {
                return Err(TableError::UnknownBucket { plan, axis: axis.clone(), end });
            }
        }
        let mut seen: HashMap<(String, bool), String> = HashMap::new();
        for (place, plan, planned) in self.entries() {
            let bad = |error: String| TableError::BadCall { place: place.clone(), error };
            Catalog::get().find(&planned.op).map_err(|error| bad(error.to_string()))?;
            let Some(call) = &planned.call else {
                let named = format!("{} {:?}", planned.op, plan.bucket);
                if let Some(first) = seen.insert((named, planned.graph), place.clone()) {
                    return Err(TableError::DuplicateEntry { place, first });
                }
                continue;
            };
            if call.op != planned.op {
                let (op, other) = (planned.op.escape_debug(), call.op.escape_debug());
                return Err(bad(format!("'op' is {op}, but the call is one of {other}")));
            }
            let named = call.named(DeviceIx(0), Context::default());
            let resolved = Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None);
            let (_, bound) = resolved.map_err(|error| bad(format!("the call cannot be made: {error}")))?;
            let canonical = canonical(call, &bound).to_string();
            if let Some(first) = seen.insert((canonical, planned.graph), place.clone()) {
                return Err(TableError::DuplicateEntry { place, first });
            }
        }
        Ok(())
    }
}

impl fmt::Display for DispatchTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_json())
    }
}

/// A key that is not known is most likely a known one, misspelt: serde names them all, the unknown first.
fn json_error(error: &serde_json::Error) -> TableError {
    let text = error.to_string();
    let message = text.strip_suffix(&format!(" at line {} column {}", error.line(), error.column()));
    let message = message.unwrap_or(&text).to_owned();
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = quoted.next().filter(|_| message.starts_with("unknown "));
    let nearest = unknown.and_then(|unknown| nearest(unknown, quoted)).map(str::to_owned);
    TableError::Json { message, line: error.line(), column: error.column(), nearest }
}

/// A map in which no key is stated twice.
fn unique<'de, D: Deserializer<'de>, V: DeserializeOwned>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error> {
    struct Unique<V>(std::marker::PhantomData<V>);
    impl<'de, V: DeserializeOwned> Visitor<'de> for Unique<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some((key, value)) = entries.next_entry::<String, V>()? {
                if map.contains_key(&key) {
                    return Err(serde::de::Error::custom(format!("the key '{key}' is stated twice")));
                }
                map.insert(key, value);
            }
            Ok(map)
        }
    }
    deserializer.deserialize_map(Unique(std::marker::PhantomData))
}

fn call_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": ["object", "null"],
        "description": "The call it was decided for. Without one the entry is for every call of the operation in the bucket.",
        "additionalProperties": false,
        "required": ["op", "tensors"],
        "properties": {
            "op": { "type": "string", "description": "The operation or alias." },
            "tensors": {
                "type": "object",
                "description": "Tensors by name.",
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": false,
                    "required": ["dtype", "shape"],
                    "properties": {
                        "dtype": { "type": "string" },
                        "shape": { "type": "array", "items": { "type": "integer" } },
                        "strides": { "type": ["array", "null"], "items": { "type": "integer" } },
                    },
                },
            },
            "params": {
                "type": "object",
                "description": "Parameters by name; those at their default may be left out.",
                "additionalProperties": { "type": ["boolean", "number", "string"] },
            },
            "layout": { "type": ["string", "null"], "description": "The layout, where the operation has several." },
        },
    })
}
