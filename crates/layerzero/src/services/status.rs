//! The figures of this process's rollouts, in a file where `layerzero rollout status` finds them.
//!
//! One file per process, `rollouts-<pid>.json` in `$XDG_STATE_HOME/layerzero` (`~/.local/state/layerzero`), for its user
//! alone. It is written when a verdict changes and otherwise once a second at most. A disk that is full or read-only costs
//! the figures, nothing else. Files of processes that have ended are removed by whoever reads them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use lz_resilience::RolloutStatus;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::core::Core;
use crate::files::{read, replace};
use crate::report::REPORT_VERSION;
use crate::warn::Warning;

/// The largest file that is read.
const MOST_BYTES: u64 = 16 << 20;
/// A file from another machine or container that is older than this is left over.
const LEFT_OVER: Duration = Duration::from_secs(24 * 3600);

/// The rollouts of one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessRollouts {
    /// Schema version of this document.
    pub schema_version: String,
    /// The process.
    pub pid: u32,
    /// When it started, in the kernel's ticks since boot: tells it from a later one of the same number.
    pub started: u64,
    /// The machine and namespace that number is of.
    pub place: String,
    /// When this was written, in milliseconds since 1970.
    pub written_at_ms: u64,
    /// How each rollout does.
    pub rollouts: Vec<RolloutStatus>,
}

/// Where a process with these variables keeps what outlives a command and is no cache.
pub fn state_dir(environment: &BTreeMap<String, String>) -> Option<PathBuf> {
    let variable = |name: &str| environment.get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = variable("XDG_STATE_HOME").or_else(|| variable("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("layerzero"))
}

/// The rollouts of every process of this user that is alive. Files of those that have ended are removed.
pub fn processes(dir: &Path) -> Vec<ProcessRollouts> {
    let mut found: Vec<ProcessRollouts> = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let Some((pid, extension)) = name.strip_prefix("rollouts-").and_then(|rest| rest.split_once('.')) else {
            continue;
        };
        let Ok(pid) = pid.parse::<u32>() else { continue };
        let bytes = read(&path, MOST_BYTES).ok().flatten().unwrap_or_default();
        match serde_json::from_slice::<ProcessRollouts>(&bytes) {
            Ok(process) if extension == "json" && process.place == place() => {
                if process.pid == pid && started(pid) == Some(process.started) {
                    found.push(process);
                } else {
                    let _ = fs::remove_file(&path);
                }
            }
            // Of another place, of another version, or half-written: whose it is cannot be told, only its age.
            _ if age(&path).is_some_and(|age| age > LEFT_OVER) => drop(fs::remove_file(&path)),
            _ => {}
        }
    }
    found.sort_by_key(|process| process.pid);
    found
}

fn age(path: &Path) -> Option<Duration> {
    fs::metadata(path).ok()?.modified().ok()?.elapsed().ok()
}

/// When a process started, if it is alive; 0 where that cannot be known.
fn started(pid: u32) -> Option<u64> {
    if !Path::new("/proc/self/stat").exists() {
        return Some(0);
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; the 22nd field is the 20th after it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// What numbers of processes are unique in: one boot of a machine, and a namespace of it.
fn place() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// Where an engine's file goes, and when it last did.
#[derive(Default)]
pub(crate) struct StatusFile {
    /// Said by the builder; stands above what the environment says.
    fixed: Option<PathBuf>,
    /// By the environment of the configuration.
    pub dir: Mutex<Option<PathBuf>>,
    /// Held while writing; whether there is a file, and whether it was said that there cannot be one.
    writing: Mutex<Written>,
}

#[derive(Default)]
struct Written {
    there: bool,
    warned: bool,
}

impl StatusFile {
    pub fn new(fixed: Option<PathBuf>) -> StatusFile {
        StatusFile { fixed, ..StatusFile::default() }
    }

    /// The folder, if there is one.
    pub fn folder(&self) -> Option<PathBuf> {
        self.fixed.clone().or_else(|| self.dir.lock().clone())
    }
}

impl StatusFile {
    /// Writes the file now.
    pub fn publish(&self, core: &Core) {
        let Some(dir) = self.folder() else { return };
        let mut written = self.writing.lock();
        let rollouts = core.rollouts();
        let pid = std::process::id();
        let path = dir.join(format!("rollouts-{pid}.json"));
        if rollouts.is_empty() {
            if std::mem::take(&mut written.there) {
                let _ = fs::remove_file(path);
            }
            return;
        }
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let document = ProcessRollouts {
            schema_version: REPORT_VERSION.to_owned(),
            pid,
            started: started(pid).unwrap_or(0),
            place: place(),
            written_at_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            rollouts,
        };
        match serde_json::to_vec(&document).map_err(Into::into).and_then(|text| replace(&path, &text)) {
            Ok(()) => written.there = true,
            Err(error) if !std::mem::replace(&mut written.warned, true) => {
                // Whoever is warned may wait for a thread that waits to write.
                drop(written);
                core.warn(&Warning::StatusNotWritten { path, error: error.to_string() });
            }
            Err(_) => {}
        }
    }

    /// Writes the file again if there is one: its rollouts have changed.
    pub fn republish(&self, core: &Core) {
        let there = self.writing.lock().there;
        if there {
            self.publish(core);
        }
    }
}
