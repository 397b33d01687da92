//! Lockfiles: decisions, written down with their times in a text that is made to be read in a diff.
//!
//! The text is a small part of TOML: `key = value` by lines, in sections. Who made the decisions stands first, then one
//! block per call. The same decisions give the same text.
//!
//! ```
//! use layerzero::{Engine, Lockfile};
//! use layerzero::model::{CallSpec, DType, DeviceIx, DeviceSpec, Platform};
//!
//! let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).build();
//! let call = CallSpec::new("rms_norm").tensor("input", DType::F32, &[2, 64]);
//! let lockfile = engine.lockfile(&[(call, DeviceIx(0))])?;
//! let text = lockfile.to_string();
//! assert!(text.contains("kernel = \"lz_cpu.ref.norm.rms\"\n"));
//! assert_eq!(Lockfile::parse(&text)?, lockfile);
//! assert_eq!(engine.replay(&lockfile, "layerzero.lock")?, []);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod read;

use std::collections::BTreeMap;
use std::fmt;

use lz_model::{CallSpec, did_you_mean};
use serde::Serialize;

/// What the text is called in its first line.
const TITLE: &str = "\
# Decisions of LayerZero, written by 'layerzero lock'. LAYERZERO_LOCKFILE=<this file> puts them in force,
# 'layerzero lock --check <this file>' says which of them cannot be kept here.
";
/// The version of the format.
pub(crate) const FORMAT: u32 = 1;
/// What a decision may be based on.
pub(crate) const BASES: &[&str] = &["measured", "predicted", "prior", "declared", "locked", "rule", "pinned"];

/// One decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Locked {
    /// The signature of the device it was made for.
    pub device: String,
    /// The call.
    pub call: CallSpec,
    /// True: only for calls under CUDA graph capture. False: for all calls, except captured ones that have an entry of
    /// their own.
    pub graph: bool,
    /// The kernel.
    pub kernel: String,
    /// Its version; any will do when not given.
    pub version: Option<String>,
    /// How long it takes, in microseconds, where known.
    pub time_us: Option<f64>,
    /// What plain torch would run, where that can serve the call.
    pub baseline: Option<String>,
    /// How long that takes.
    pub baseline_us: Option<f64>,
    /// What the decision went by: `measured`, `predicted`, `declared`, `locked`, `rule` or `pinned`.
    pub basis: Option<String>,
}

/// Decisions, and what they were made with.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Lockfile {
    /// The version of LayerZero that made them.
    pub layerzero: String,
    /// The devices, by signature: their names.
    pub devices: BTreeMap<String, String>,
    /// The versions of the backends whose kernels were chosen.
    pub backends: BTreeMap<String, String>,
    /// The hashes of their capabilities documents, where they have one.
    pub capabilities: BTreeMap<String, String>,
    /// The versions of libraries and drivers.
    pub libraries: BTreeMap<String, String>,
    /// The decisions.
    pub entries: Vec<Locked>,
}

/// What can be wrong with the text of a lockfile.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LockfileProblem {
    /// It is larger than is read.
    #[error("{bytes} bytes are more than the {limit} that are read; lock fewer calls")]
    TooLarge {
        /// How large.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A line that is none.
    #[error("expected a section or 'key = value', found '{found}'")]
    Syntax {
        /// The line, cut to a sensible length.
        found: String,
    },
    /// A section nobody knows.
    #[error("unknown section '{name}'{}", did_you_mean(.nearest))]
    UnknownSection {
        /// Its name.
        name: String,
        /// The closest known one.
        nearest: Option<&'static str>,
    },
    /// A key nobody knows.
    #[error("unknown key '{key}' {place}{}", did_you_mean(.nearest))]
    UnknownKey {
        /// The key.
        key: String,
        /// Where it stands.
        place: &'static str,
        /// The closest known one.
        nearest: Option<&'static str>,
    },
    /// A key stated twice.
    #[error("'{key}' is stated twice, first on line {first}")]
    DuplicateKey {
        /// The key.
        key: String,
        /// Where first.
        first: usize,
    },
    /// A value that a key cannot have.
    #[error("'{key}' is {expected}, found {found}{}", did_you_mean(.nearest))]
    WrongValue {
        /// The key.
        key: String,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        found: String,
        /// The closest allowed one.
        nearest: Option<&'static str>,
    },
    /// A key that must be there.
    #[error("'{key}' is missing")]
    MissingKey {
        /// The key.
        key: &'static str,
    },
    /// A format this build does not read.
    #[error("format {found} is not supported; this build reads format {FORMAT}")]
    Format {
        /// What it says.
        found: f64,
    },
    /// A call that is none.
    #[error("the call cannot be made: {error}")]
    BadCall {
        /// Why.
        error: String,
    },
    /// An operation beside a call of another.
    #[error("'op' is {op}, but the call is one of {call}")]
    OtherOp {
        /// What stands beside the call.
        op: String,
        /// What stands in it.
        call: String,
    },
    /// One call decided twice.
    #[error("the call is decided before, in the block on line {first}")]
    DuplicateEntry {
        /// Where first.
        first: usize,
    },
}

/// What is wrong, with what would break the line written as it is in strings: names are quoted as they were found.
fn in_one_line(problem: &LockfileProblem) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    problem.to_string().chars().map(escaped).collect()
}

/// Why a text is no lockfile.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("line {line}: {}", in_one_line(.problem))]
pub struct LockfileError {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub problem: LockfileProblem,
}

impl Lockfile {
    /// The largest text that is read.
    pub const MAX_BYTES: usize = 1 << 20;

    /// Reads a text. Whoever wrote it, the answer is a lockfile or what is wrong, with the line.
    pub fn parse(text: &str) -> Result<Lockfile, LockfileError> {
        read::parse(text)
    }

    /// Puts the decisions into the order they are written in: by operation, device and sizes.
    pub fn sort(&mut self) {
        self.entries.sort_by_cached_key(|e| (call_order(&e.call), e.device.clone(), e.graph));
    }
}

/// Calls stand in this order in files: by operation, then by sizes as numbers, then by all the rest.
pub(crate) fn call_order(call: &CallSpec) -> (String, Vec<i64>, String) {
    let sizes = call.tensors.values().flat_map(|tensor| tensor.shape.iter().copied()).collect();
    (call.op.clone(), sizes, call.to_string())
}

/// In double quotes, as TOML and JSON have it.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default().replace('\u{7f}', "\\u007f")
}

/// A key: as it is, if TOML takes it so.
fn key(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    if !name.is_empty() && name.chars().all(plain) { name.to_owned() } else { quoted(name) }
}

/// JSON, in single quotes where that can be: nothing of it has to be escaped then.
fn verbatim(json: &str) -> String {
    let plain = |c: char| c != '\'' && !c.is_control();
    if json.chars().all(plain) { format!("'{json}'") } else { quoted(json) }
}

impl fmt::Display for Lockfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(TITLE)?;
        writeln!(f, "format = {FORMAT}\nlayerzero = {}", quoted(&self.layerzero))?;
        let sections = [
            ("devices", &self.devices),
            ("backends", &self.backends),
            ("capabilities", &self.capabilities),
            ("libraries", &self.libraries),
        ];
        for (name, map) in sections.into_iter().filter(|(_, map)| !map.is_empty()) {
            writeln!(f, "\n[{name}]")?;
            for (name, value) in map {
                writeln!(f, "{} = {}", key(name), quoted(value))?;
            }
        }
        self.entries.iter().try_for_each(|entry| write!(f, "\n{entry}"))
    }
}

/// As a block.
impl fmt::Display for Locked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "[[call]]")?;
        writeln!(f, "op = {}", quoted(&self.call.op))?;
        writeln!(f, "device = {}", quoted(&self.device))?;
        writeln!(f, "call = {}", verbatim(&self.call.to_string()))?;
        if self.graph {
            writeln!(f, "graph = true")?;
        }
        writeln!(f, "kernel = {}", quoted(&self.kernel))?;
        let text = |f: &mut fmt::Formatter<'_>, name: &str, value: &Option<String>| match value {
            Some(value) => writeln!(f, "{name} = {}", quoted(value)),
            None => Ok(()),
        };
        let number = |f: &mut fmt::Formatter<'_>, name: &str, value: Option<f64>| match value {
            Some(value) if value.is_finite() => writeln!(f, "{name} = {value}"),
            _ => Ok(()),
        };
        text(f, "version", &self.version)?;
        number(f, "time_us", self.time_us)?;
        text(f, "baseline", &self.baseline)?;
        number(f, "baseline_us", self.baseline_us)?;
        text(f, "basis", &self.basis)
    }
}

impl std::str::FromStr for Lockfile {
    type Err = LockfileError;

    fn from_str(text: &str) -> Result<Lockfile, LockfileError> {
        Lockfile::parse(text)
    }
}
