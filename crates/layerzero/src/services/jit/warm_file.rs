//! What was compiled, kept for the next process: `warm.json` beside the manifest.
//!
//! Libraries keep what they compiled on disk, so that a kernel compiled once is loaded in no time by the next process.
//! This file says for which calls that holds, with the versions it holds for. A record counts only while the folders of
//! its library's cache are still there. It is a cache: one that cannot be read is written anew. A file of that name that
//! is something else is left alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lz_model::{CallSpec, DeviceIx};
use lz_select::SnapshotSpec;
use serde::{Deserialize, Serialize};

use crate::files::{alone, beside, now_ms, read, replace};
use crate::report::REPORT_VERSION;

const NAME: &str = "warm.json";
/// The largest file that is read.
const MOST_BYTES: u64 = 64 << 20;
/// How many records are kept; beyond that the oldest are dropped.
const MOST_RECORDS: usize = 10_000;

/// A kernel that was compiled for a kind of call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WarmRecord {
    /// The kernel's id.
    pub kernel: String,
    /// Where: `cpu`, `cuda:0`.
    pub device: String,
    /// A call of the kind.
    pub call: CallSpec,
    /// What it was compiled by and for.
    versions: BTreeMap<String, String>,
    /// How long that took.
    compile_ms: f64,
    /// When, in milliseconds since 1970.
    at: u64,
    /// Where its library keeps it.
    caches: Vec<PathBuf>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    schema_version: String,
    compiled: Vec<WarmRecord>,
}

impl WarmRecord {
    /// Of a kernel that was compiled on a device of this name; none where nobody knows what it depends on.
    pub fn of(spec: &SnapshotSpec, device: String, compiled: Compiled<'_>) -> Option<WarmRecord> {
        let Compiled { kernel, call, device: ix, compile_ms, caches } = compiled;
        let versions = versions(spec, kernel, ix)?;
        let (kernel, call, at) = (kernel.to_owned(), call.clone(), now_ms());
        Some(WarmRecord { kernel, device, call, versions, compile_ms, at, caches })
    }

    /// Whether it holds for an engine's kernel and device as they are now.
    pub fn is_of(&self, spec: &SnapshotSpec, device: DeviceIx) -> bool {
        let there = |dir: &PathBuf| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
        versions(spec, &self.kernel, device).as_ref() == Some(&self.versions)
            && !self.caches.is_empty()
            && self.caches.iter().all(there)
    }

    fn is_about(&self, other: &WarmRecord) -> bool {
        (&self.kernel, &self.device, &self.call) == (&other.kernel, &other.device, &other.call)
    }
}

/// What a compiled kernel depends on; `None` for one that is not there, or that is code of the program's own, of which
/// nobody knows when it changes.
fn versions(spec: &SnapshotSpec, kernel: &str, device: DeviceIx) -> Option<BTreeMap<String, String>> {
    let kernel = spec.kernels.iter().find(|k| k.id == kernel && k.jit)?;
    let backend = spec.backends.get(&kernel.backend).filter(|b| b.unavailable.is_none() && !b.descriptor.is_code())?;
    let device = spec.devices.get(device.0 as usize)?;
    let mut versions = device.versions.clone();
    versions.extend(spec.versions.iter().filter(|(name, _)| *name == "torch").map(|(n, v)| (n.clone(), v.clone())));
    versions.insert(backend.descriptor.name.clone(), backend.descriptor.version.clone());
    versions.insert("kernel".into(), kernel.version.clone());
    versions.insert("device".into(), format!("{}/{}", device.signature(), device.name));
    versions.insert("layerzero".into(), env!("CARGO_PKG_VERSION").into());
    Some(versions)
}

/// What earlier processes compiled: the file beside a manifest.
pub(super) fn kept(manifest: &Path) -> Vec<WarmRecord> {
    records(&beside(manifest, NAME))
}

/// A kernel that was compiled for a call.
pub(crate) struct Compiled<'a> {
    pub kernel: &'a str,
    pub call: &'a CallSpec,
    pub device: DeviceIx,
    /// How long that took.
    pub compile_ms: f64,
    /// The folders where its library keeps it.
    pub caches: Vec<PathBuf>,
}

/// Keeps a record in the file beside a manifest.
pub(super) fn keep(manifest: &Path, record: WarmRecord) {
    let path = beside(manifest, NAME);
    if let Err(error) = add(&path, record) {
        tracing::warn!(target: "layerzero", "'{}' cannot be written: {error}", path.display());
    }
}

fn records(path: &Path) -> Vec<WarmRecord> {
    let document = match read(path, MOST_BYTES) {
        Ok(None) => return Vec::new(),
        Ok(Some(bytes)) => serde_json::from_slice::<Document>(&bytes).map_err(|e| e.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match document {
        Ok(Document { schema_version, compiled }) if schema_version == REPORT_VERSION => compiled,
        Ok(Document { schema_version, .. }) => {
            tracing::warn!(target: "layerzero", "'{}' is of version '{schema_version}' and not used", path.display());
            Vec::new()
        }
        Err(error) => {
            tracing::warn!(target: "layerzero", "'{}' cannot be read and is not used: {error}", path.display());
            Vec::new()
        }
    }
}

/// Whether what is at the path may be replaced: nothing, or a file of ours, damaged as it may be.
fn is_ours(path: &Path) -> std::io::Result<bool> {
    let Some(bytes) = read(path, MOST_BYTES)? else { return Ok(true) };
    let has = |key: &[u8]| bytes.windows(key.len()).any(|window| window == key);
    Ok(bytes.is_empty() || (bytes.starts_with(b"{") && has(b"\"schema_version\"") && has(b"\"compiled\"")))
}

fn add(path: &Path, record: WarmRecord) -> std::io::Result<()> {
    let _alone = alone(path);
    if !is_ours(path)? {
        let why = "it is not LayerZero's and left as it is; move it away, or set jit.manifest_path to another folder";
        return Err(std::io::Error::new(std::io::ErrorKind::AlreadyExists, why));
    }
    let mut compiled = records(path);
    compiled.retain(|known| !known.is_about(&record));
    compiled.push(record);
    let surplus = compiled.len().saturating_sub(MOST_RECORDS);
    compiled.drain(..surplus);
    let document = Document { schema_version: REPORT_VERSION.to_owned(), compiled };
    replace(path, serde_json::to_string_pretty(&document)?.as_bytes())
}
