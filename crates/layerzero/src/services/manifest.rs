//! The manifest: which calls a process really makes, so that the next one can prepare for them.
//!
//! A [`Manifest`] counts calls by kind while they are made. [`Manifest::save`] adds what was counted since it was last
//! saved to a [`ManifestFile`], which keeps the calls of several models apart by the hash of each.
//!
//! ```
//! use layerzero::model::{CallSpec, DType};
//! use layerzero::{Manifest, ManifestFile};
//!
//! let manifest = Manifest::default();
//! let call = CallSpec::new("norm.rms").tensor("input", DType::F32, &[2, 8]);
//! let id = manifest.seen(&call, "cpu");
//! manifest.seen_again(id, 9);
//! assert_eq!(manifest.entries()[0].count, 10);
//!
//! let dir = tempfile::tempdir()?;
//! let path = dir.path().join("calls.json");
//! manifest.save(&path, Some("5f2a"))?;
//! let kept = ManifestFile::read(&path)?;
//! assert_eq!(kept.calls(Some("5f2a"), 7)[0].call, call);
//! assert!(kept.calls(None, 7).is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use lz_model::{CallSpec, Catalog};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::files::{alone, now_ms, read, replace};
use crate::report::REPORT_VERSION;

/// How many kinds of calls are kept for one model; beyond that the one not seen for longest is dropped.
pub const MOST_ENTRIES: usize = 10_000;
/// How many models a file keeps; beyond that the one not seen for longest is dropped.
pub const MOST_MODELS: usize = 64;
/// The largest file that is read.
pub const MOST_BYTES: u64 = 64 << 20;

const DAY_MS: u64 = 24 * 3600 * 1000;

/// A kind of call, and how often it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestEntry {
    /// The call.
    pub call: CallSpec,
    /// Where it is made: `cpu`, `cuda:0`.
    pub device: String,
    /// How often it was seen; calls that are not looked at count by sampling.
    pub count: u64,
    /// When it was first seen, in milliseconds since 1970.
    pub first_seen: u64,
    /// When it was last seen.
    pub last_seen: u64,
}

/// A manifest that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file cannot be read.
    #[error("the manifest '{}' cannot be read: {source}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("the manifest '{}' cannot be written: {source}", path.display())]
    NotWritten {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no manifest.
    #[error("it is no manifest: {0}")]
    Malformed(String),
    /// It was written by another version.
    #[error("it has schema version '{found}', this version reads {REPORT_VERSION}")]
    OtherVersion {
        /// Its version.
        found: String,
    },
    /// An entry makes no sense.
    #[error("entry {entry} of model '{model}': {what}")]
    BadEntry {
        /// The model's hash.
        model: String,
        /// Which entry, from 0.
        entry: usize,
        /// What is wrong with it.
        what: String,
    },
    /// Nothing says where it is.
    #[error("nothing says where the manifest is: the home directory is not known")]
    Nowhere,
}

impl ManifestError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            ManifestError::Unreadable { .. } | ManifestError::NotWritten { .. } => "see who may read and write there",
            ManifestError::Malformed(_) | ManifestError::BadEntry { .. } | ManifestError::OtherVersion { .. } => {
                "remove the file; the next process that saves one writes it anew"
            }
            ManifestError::Nowhere => "set jit.manifest_path, or pass a path",
        }
    }
}

/// Which entry of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EntryId(u64);

/// The calls of this process, counted while they are made.
#[derive(Default)]
pub struct Manifest {
    recorded: Mutex<Recorded>,
}

#[derive(Default)]
struct Recorded {
    by_call: HashMap<(String, String), Counted>,
    ids: HashMap<EntryId, (String, String)>,
    next: u64,
    dropped: u64,
}

struct Counted {
    id: EntryId,
    entry: ManifestEntry,
    /// What of the count no file has.
    unsaved: u64,
    /// Larger for what was seen later.
    turn: u64,
}

impl Manifest {
    /// Counts a call that was looked at.
    pub fn seen(&self, call: &CallSpec, device: &str) -> EntryId {
        self.seen_at(call, device, now_ms())
    }

    /// As [`Manifest::seen`], at a time in milliseconds since 1970.
    pub fn seen_at(&self, call: &CallSpec, device: &str, now_ms: u64) -> EntryId {
        let key = (call.to_string(), device.to_owned());
        let mut recorded = self.recorded.lock();
        recorded.next += 1;
        let turn = recorded.next;
        if let Some(counted) = recorded.by_call.get_mut(&key) {
            counted.add(1, now_ms, turn);
            return counted.id;
        }
        if recorded.by_call.len() == MOST_ENTRIES {
            recorded.drop_oldest();
        }
        let (id, call, device) = (EntryId(turn), call.clone(), device.to_owned());
        let entry = ManifestEntry { call, device, count: 1, first_seen: now_ms, last_seen: now_ms };
        recorded.ids.insert(id, key.clone());
        recorded.by_call.insert(key, Counted { id, entry, unsaved: 1, turn });
        id
    }

    /// Counts calls of a kind that was seen before. One that was dropped meanwhile is not counted.
    pub fn seen_again(&self, id: EntryId, calls: u64) {
        let now_ms = now_ms();
        let mut recorded = self.recorded.lock();
        recorded.next += 1;
        let turn = recorded.next;
        let Recorded { by_call, ids, .. } = &mut *recorded;
        if let Some(counted) = ids.get(&id).and_then(|key| by_call.get_mut(key)) {
            counted.add(calls, now_ms, turn);
        }
    }

    /// Every kind of call, the one last seen first.
    pub fn entries(&self) -> Vec<ManifestEntry> {
        let recorded = self.recorded.lock();
        let mut counted: Vec<&Counted> = recorded.by_call.values().collect();
        counted.sort_by_key(|counted| std::cmp::Reverse(counted.turn));
        counted.into_iter().map(|counted| counted.entry.clone()).collect()
    }

    /// How many kinds were dropped because there were too many.
    pub fn dropped(&self) -> u64 {
        self.recorded.lock().dropped
    }

    /// Adds what was counted since the last time to a file, under the hash of a model.
    pub fn save(&self, path: &Path, model_hash: Option<&str>) -> Result<(), ManifestError> {
        let _alone = alone(path);
        let mut file = ManifestFile::read(path)?;
        let counted: Vec<(EntryId, u64, ManifestEntry)> = {
            let recorded = self.recorded.lock();
            recorded.by_call.values().map(|c| (c.id, c.unsaved, c.entry.clone())).collect()
        };
        let news = counted.iter().map(|(_, unsaved, entry)| ManifestEntry { count: *unsaved, ..entry.clone() });
        file.merge(model_hash, news.filter(|entry| entry.count > 0).collect());
        file.write(path)?;
        let mut recorded = self.recorded.lock();
        let Recorded { by_call, ids, .. } = &mut *recorded;
        for (id, unsaved, _) in counted {
            if let Some(counted) = ids.get(&id).and_then(|key| by_call.get_mut(key)) {
                counted.unsaved -= unsaved;
            }
        }
        Ok(())
    }
}

impl Counted {
    fn add(&mut self, calls: u64, now_ms: u64, turn: u64) {
        self.entry.count = self.entry.count.saturating_add(calls);
        self.unsaved = self.unsaved.saturating_add(calls);
        self.entry.last_seen = self.entry.last_seen.max(now_ms);
        self.turn = turn;
    }
}

impl Recorded {
    fn drop_oldest(&mut self) {
        let oldest = self.by_call.iter().min_by_key(|(_, counted)| counted.turn).map(|(key, _)| key.clone());
        if let Some(counted) = oldest.and_then(|key| self.by_call.remove(&key)) {
            self.ids.remove(&counted.id);
            self.dropped += 1;
        }
    }
}

/// The calls of earlier processes, by model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ManifestFile {
    /// By the hash of a model; the empty one for calls of which no model is known.
    models: BTreeMap<String, Vec<ManifestEntry>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    schema_version: String,
    models: BTreeMap<String, Vec<ManifestEntry>>,
}

impl ManifestFile {
    /// The one in a file; an empty one when there is no file.
    pub fn read(path: &Path) -> Result<ManifestFile, ManifestError> {
        let bytes = read(path, MOST_BYTES)
            .map_err(|source| ManifestError::Unreadable { path: path.to_owned(), source })?
            .unwrap_or_default();
        if bytes.is_empty() {
            return Ok(ManifestFile::default());
        }
        ManifestFile::parse(&String::from_utf8_lossy(&bytes))
    }

    /// The one in a text.
    pub fn parse(text: &str) -> Result<ManifestFile, ManifestError> {
        #[derive(Deserialize)]
        struct Version {
            schema_version: String,
        }
        let malformed = |e: serde_json::Error| ManifestError::Malformed(e.to_string());
        let Version { schema_version } = serde_json::from_str(text).map_err(malformed)?;
        if schema_version != REPORT_VERSION {
            return Err(ManifestError::OtherVersion { found: schema_version.chars().take(40).collect() });
        }
        let Document { models, .. } = serde_json::from_str(text).map_err(malformed)?;
        for (model, entries) in &models {
            for (at, entry) in entries.iter().enumerate() {
                entry.check().map_err(|what| ManifestError::BadEntry { model: model.clone(), entry: at, what })?;
            }
        }
        Ok(ManifestFile { models })
    }

    /// The hashes of the models it has calls of.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.models.keys().map(String::as_str)
    }

    /// The calls of a model that were made in the last days (0: ever), those made most often first.
    pub fn calls(&self, model_hash: Option<&str>, within_days: u32) -> Vec<ManifestEntry> {
        self.calls_at(model_hash, within_days, now_ms())
    }

    /// As [`ManifestFile::calls`], at a time in milliseconds since 1970.
    pub fn calls_at(&self, model_hash: Option<&str>, within_days: u32, now_ms: u64) -> Vec<ManifestEntry> {
        let oldest = if within_days == 0 { 0 } else { now_ms.saturating_sub(u64::from(within_days) * DAY_MS) };
        let all = self.models.get(model_hash.unwrap_or_default()).map_or(&[][..], Vec::as_slice);
        let mut fresh: Vec<ManifestEntry> = all.iter().filter(|entry| entry.last_seen >= oldest).cloned().collect();
        fresh.sort_by_key(|entry| std::cmp::Reverse(entry.count));
        fresh
    }

    /// Adds calls of a model: counts add up, times span both. Of too many those not seen for longest are dropped.
    pub fn merge(&mut self, model_hash: Option<&str>, entries: Vec<ManifestEntry>) {
        if entries.is_empty() {
            return;
        }
        let model = model_hash.unwrap_or_default().to_owned();
        let known = self.models.entry(model.clone()).or_default();
        let mut places: HashMap<(String, String), usize> =
            known.iter().enumerate().map(|(at, e)| ((e.call.to_string(), e.device.clone()), at)).collect();
        for entry in entries {
            let key = (entry.call.to_string(), entry.device.clone());
            match places.get(&key) {
                Some(&at) => {
                    let old = &mut known[at];
                    old.count = old.count.saturating_add(entry.count);
                    old.first_seen = old.first_seen.min(entry.first_seen);
                    old.last_seen = old.last_seen.max(entry.last_seen);
                }
                None => {
                    places.insert(key, known.len());
                    known.push(entry);
                }
            }
        }
        // In one order, so that the same calls make the same file.
        let text = |entry: &ManifestEntry| (entry.call.to_string(), entry.device.clone());
        known.sort_by_cached_key(|entry| (std::cmp::Reverse(entry.last_seen), text(entry)));
        known.truncate(MOST_ENTRIES);
        while self.models.len() > MOST_MODELS {
            let last = |entries: &Vec<ManifestEntry>| entries.iter().map(|entry| entry.last_seen).max();
            let others = self.models.iter().filter(|(hash, _)| **hash != model);
            let Some(oldest) = others.min_by_key(|(_, entries)| last(entries)).map(|(hash, _)| hash.clone()) else {
                break;
            };
            self.models.remove(&oldest);
        }
    }

    /// Puts it in the place of a file.
    pub fn write(&self, path: &Path) -> Result<(), ManifestError> {
        let failed = |source| ManifestError::NotWritten { path: path.to_owned(), source };
        let document = Document { schema_version: REPORT_VERSION.to_owned(), models: self.models.clone() };
        let text = serde_json::to_string_pretty(&document).map_err(|e| failed(e.into()))?;
        replace(path, text.as_bytes()).map_err(failed)
    }
}

impl ManifestEntry {
    fn check(&self) -> Result<(), String> {
        Catalog::get().find(&self.call.op).map_err(|e| e.to_string())?;
        if self.count == 0 {
            return Err("its count is 0".into());
        }
        if self.first_seen > self.last_seen {
            return Err(format!("it was first seen at {}, after it was last ({})", self.first_seen, self.last_seen));
        }
        if self.call.tensors.values().any(|tensor| tensor.shape.iter().any(|&size| size < 0)) {
            return Err("a size is negative".into());
        }
        let (kind, number) = self.device.split_once(':').unwrap_or((&self.device, "0"));
        let known = kind.parse::<lz_model::Platform>().is_ok() && number.parse::<u16>().is_ok();
        if known {
            Ok(())
        } else {
            Err(format!("its device is '{}', expected one like 'cpu' or 'cuda:0'", self.device))
        }
    }
}
