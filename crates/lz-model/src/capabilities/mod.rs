//! Capabilities documents: a backend's kernels and constraints as JSON (or YAML), version 1.0.
//!
//! Reading fails closed and completely: whatever is not stated is not supported, anything not
//! understood disables the backend, and *every* problem of a document is reported with its path.
//!
//! ```
//! let document = r#"{
//!   "schema_version": "1.0", "backend": "mine", "backend_version": "1.0", "platform": "cpu",
//!   "ops": {"norm.rms": [{"kernel_id": "mine.rms", "dtypes": ["float32"], "requires_layouts": ["contiguous"]}]}
//! }"#;
//! let capabilities = lz_model::capabilities::read(document).unwrap();
//! assert_eq!(capabilities.kernels[0].id, "mine.rms");
//! assert!(!capabilities.kernels[0].graph_safe); // not stated, so not supported
//! ```

mod doc;
mod json;
mod resolve;
mod schema;

use std::fmt;
use std::sync::LazyLock;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::generation::GenerationRow;
use crate::kernel::{BackendDescriptor, KernelDescriptor};
use crate::reason::Reason;

/// The schema version this build reads.
pub const SCHEMA_VERSION: &str = "1.0";

/// Longest document that is read.
pub const MAX_BYTES: usize = 1 << 20;

/// A document that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Capabilities {
    /// The backend.
    pub backend: BackendDescriptor,
    /// Its kernels.
    pub kernels: Vec<KernelDescriptor>,
    /// GPU generations it adds to the table.
    pub generations: Vec<GenerationRow>,
}

/// One thing wrong with a document.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where, as a JSON pointer.
    pub path: String,
    /// What, with the offending value and the remedy.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = if self.path.is_empty() { "(document)" } else { &self.path };
        write!(f, "{path}: {}", self.message)
    }
}

/// Why a document was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapabilitiesError {
    /// It is neither JSON nor YAML.
    #[error("not a capabilities document: {0}")]
    Syntax(String),
    /// It is of a version this build does not know.
    #[error("capabilities schema version '{found}' is not supported; this build reads '{SCHEMA_VERSION}'")]
    UnknownSchemaVersion {
        /// The version it says.
        found: String,
    },
    /// It has these problems.
    #[error("{} problem(s) in the capabilities document:\n{}", .0.len(), .0.iter().map(|p| format!("  {p}")).collect::<Vec<_>>().join("\n"))]
    Problems(Vec<Problem>),
}

impl CapabilitiesError {
    /// The reason the backend's kernels are out.
    pub fn reason(&self, backend: &str) -> Reason {
        match self {
            CapabilitiesError::UnknownSchemaVersion { found } => {
                Reason::CapabilitiesSchemaMismatch { found: found.clone(), supported: SCHEMA_VERSION.into() }
            }
            other => Reason::BackendImportFailed { library: backend.into(), error: other.to_string() },
        }
    }
}

/// Reads a document: JSON when it starts with `{`, else YAML.
pub fn read(text: &str) -> Result<Capabilities, CapabilitiesError> {
    read_value(&parse(text)?)
}

/// A document as data, not looked at yet.
pub fn parse(text: &str) -> Result<Value, CapabilitiesError> {
    if text.len() > MAX_BYTES {
        return Err(CapabilitiesError::Syntax(format!("{} bytes; at most {MAX_BYTES} are read", text.len())));
    }
    if text.trim_start().starts_with('{') {
        let read = serde_json::from_str::<json::Strict>(text);
        read.map(|strict| strict.0).map_err(|e| CapabilitiesError::Syntax(e.to_string()))
    } else {
        let read = serde_saphyr::from_str_with_options(text, yaml_limits());
        read.map_err(|e| CapabilitiesError::Syntax(e.to_string()))
    }
}

/// No aliases, and no deeper than a document needs: a small file must not become a large one.
fn yaml_limits() -> serde_saphyr::Options {
    let budget = serde_saphyr::budget! { max_depth: 32, max_aliases: 0, max_anchors: 0 };
    serde_saphyr::options! { budget: budget }
}

/// Reads a document that is already JSON data.
pub fn read_value(value: &Value) -> Result<Capabilities, CapabilitiesError> {
    match value.get("schema_version") {
        Some(Value::String(version)) if version == SCHEMA_VERSION => {}
        Some(Value::String(version)) => {
            return Err(CapabilitiesError::UnknownSchemaVersion { found: version.clone() });
        }
        Some(other) => {
            let message = format!("{other} is not a string; write \"{SCHEMA_VERSION}\", in quotes");
            let problem = Problem { path: "/schema_version".into(), message };
            return Err(CapabilitiesError::Problems(vec![problem]));
        }
        None => {
            let problem = Problem {
                path: String::new(),
                message: format!("'schema_version' is missing; write \"{SCHEMA_VERSION}\""),
            };
            return Err(CapabilitiesError::Problems(vec![problem]));
        }
    }
    static SCHEMA: LazyLock<Value> = LazyLock::new(json_schema);
    let problems = schema::problems(&SCHEMA, value);
    if !problems.is_empty() {
        return Err(CapabilitiesError::Problems(problems));
    }
    let document: doc::Document = serde_path_to_error::deserialize(value).map_err(|e| {
        let path = e.path().iter().map(|segment| match segment {
            serde_path_to_error::Segment::Seq { index } => format!("/{index}"),
            other => format!("/{other}"),
        });
        let path = path.collect();
        CapabilitiesError::Problems(vec![Problem { path, message: e.into_inner().to_string() }])
    })?;
    resolve::resolve(document, canonical_hash(value)).map_err(CapabilitiesError::Problems)
}

/// The JSON Schema of a document, generated from the types that read it.
pub fn json_schema() -> Value {
    schemars::schema_for!(doc::Document).to_value()
}

/// SHA-256 of the document with keys sorted and white space removed: the same for documents that
/// say the same.
pub fn canonical_hash(value: &Value) -> String {
    // serde_json keeps object keys sorted unless told otherwise, so its text is canonical.
    let digest = Sha256::digest(value.to_string().as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
