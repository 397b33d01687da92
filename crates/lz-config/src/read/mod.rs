//! A document, or what code says, as a layer of settings, locks and rules.

mod conditions;
mod dispatch;
mod kernels;
mod limits;
mod policies;
mod reader;
mod rollouts;
mod rules;

use std::collections::BTreeMap;
use std::path::PathBuf;

use lz_select::RuleSpec;

use crate::declare::Setting;
use crate::node::{Data, Entry, Node};
use crate::operation;
use crate::origin::{Origin, Position, Source};
use crate::problem::{ConfigWarning, ProblemKind};
use crate::rollout::Rollout;
use crate::settings::{GROUPS, SECTIONS, SETTINGS};
use crate::value::Value;
use crate::yaml::join;

pub(crate) use limits::MAX_PROBLEMS;
pub(crate) use reader::Reader;
pub(crate) use rules::RULE_KEYS;

/// The version of configuration files.
const VERSION: i64 = 1;
/// The newest kernels document.
pub(crate) const KERNELS_VERSION: i64 = 2;

/// One thing a layer says, as written and with its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Said<T> {
    pub what: T,
    pub value: Value,
    pub origin: Origin,
}

/// A lock; without a kernel it takes away those of lower layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lock {
    pub operation: String,
    pub kernel: Option<String>,
}

/// A policy of a kernels document.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NamedPolicy {
    pub rules: Vec<RuleSpec>,
    /// Whether every call is timed.
    pub profiling: Option<Origin>,
}

/// A file to be read as well, and where that is said.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Include {
    pub path: PathBuf,
    pub at: Position,
    pub key: String,
}

/// What one file, the environment or code says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Layer {
    /// By key of the setting.
    pub values: BTreeMap<&'static str, Said<()>>,
    pub locks: Vec<Said<Lock>>,
    /// Rules in order; one as written may do several things.
    pub rules: Vec<Said<Vec<RuleSpec>>>,
    pub rollouts: Vec<Said<Rollout>>,
    pub includes: Vec<Include>,
    /// Rules of a kernels document: its dispatch rules, then its kernels and defaults.
    pub document: Vec<RuleSpec>,
    pub policies: BTreeMap<String, NamedPolicy>,
    pub warnings: Vec<ConfigWarning>,
    /// The folder of the project's file that says this, if that file was found and not named.
    pub project: Option<PathBuf>,
}

impl Layer {
    /// Reads a document.
    pub fn read(root: &Node, reader: &mut Reader<'_>) -> Layer {
        let mut layer = Layer::default();
        let Some(entries) = reader.map(root, "", "a map of settings") else { return layer };
        let of_kernels = ["schema_version", "defaults", "kernels", "dispatch_rules", "policies"];
        let is_kernels = entries.iter().any(|e| of_kernels.contains(&e.key.as_str()));
        let mut document = kernels::Document::default();
        let is_file = matches!(reader.source, Source::User(_) | Source::Project(_) | Source::Included(_));
        for entry in entries {
            if reader.is_full() {
                break;
            }
            let Entry { key, value: node, .. } = entry;
            let for_files = SECTIONS.iter().any(|s| s.key == key) && !matches!(&**key, "locks" | "rules" | "rollouts");
            if for_files && !is_file {
                reader.contradiction(entry.at, key, "only files say this");
                continue;
            }
            match key.as_str() {
                "version" => version(entry, is_kernels, reader),
                "schema_version" => schema_version(node, reader),
                "include" => layer.read_includes(node, reader),
                "locks" => layer.read_locks(node, reader),
                "rules" => layer.rules = rules::read(node, key, reader),
                "rollouts" => layer.rollouts = rollouts::read(node, key, reader),
                "defaults" => document.read_defaults(node, reader),
                "kernels" => document.read_kernels(node, reader),
                "dispatch_rules" => document.read_rules(node, reader),
                "policies" => layer.policies = policies::read(node, reader),
                _ => layer.read_setting(entry, "", reader),
            }
        }
        document.finish(&mut layer, reader);
        layer
    }

    /// Whether a file may have this key at its top.
    pub fn knows(key: &str) -> bool {
        let named = SECTIONS.iter().any(|s| s.key == key) || GROUPS.iter().any(|(name, _)| *name == key);
        named || SETTINGS.iter().any(|s| s.key == key)
    }

    fn read_setting(&mut self, entry: &Entry, path: &str, reader: &mut Reader<'_>) {
        let key = join(path, &entry.key);
        if let Some(setting) = SETTINGS.iter().find(|s| s.key == key) {
            if let Some(value) = reader.setting(&entry.value, &key, setting.kind) {
                self.say(setting, value, reader.at(entry.at));
            }
        } else if let (true, Some((group, _))) = (path.is_empty(), GROUPS.iter().find(|(name, _)| *name == key)) {
            let expected = format!("a map of settings such as '{}'", members(group).next().unwrap_or_default());
            for inner in reader.map(&entry.value, &key, &expected).unwrap_or_default() {
                self.read_setting(inner, group, reader);
            }
        } else if path.is_empty() {
            let known = SETTINGS.iter().map(|s| s.key).chain(SECTIONS.iter().map(|s| s.key));
            reader.unknown(entry, path, known.chain(GROUPS.iter().map(|(name, _)| *name)));
        } else {
            reader.unknown(entry, path, members(path));
        }
    }

    /// Sets a setting.
    pub fn say(&mut self, setting: &Setting, value: Value, origin: Origin) {
        self.values.insert(setting.key, Said { what: (), value, origin });
    }

    fn read_locks(&mut self, node: &Node, reader: &mut Reader<'_>) {
        let entries = reader.map(node, "locks", "a map of operation to kernel").unwrap_or_default();
        if reader.too_many(node.at, "locks", entries.len(), limits::MAX_LOCKS) {
            return;
        }
        for entry in entries {
            let key = join("locks", &entry.key);
            let operation = match operation::canonical(&entry.key) {
                Ok(operation) => operation,
                Err(nearest) => {
                    let name = entry.key.clone();
                    reader.report(entry.at, &key, Some(name.clone()), ProblemKind::UnknownOperation { name, nearest });
                    continue;
                }
            };
            if let Some(kernel) = reader.text(&entry.value, &key, "the id of a kernel") {
                let lock = Lock { operation, kernel: Some(kernel.to_owned()) };
                self.lock(Said { what: lock, value: Value::from(kernel), origin: reader.at(entry.at) });
            }
        }
    }

    /// Adds a lock, in place of the one on the same operation.
    pub fn lock(&mut self, lock: Said<Lock>) {
        self.locks.retain(|known| known.what.operation != lock.what.operation);
        self.locks.push(lock);
    }

    fn read_includes(&mut self, node: &Node, reader: &mut Reader<'_>) {
        let items = match &node.data {
            Data::Str(_) => std::slice::from_ref(node),
            _ => reader.list(node, "include", "a list of paths").unwrap_or_default(),
        };
        if reader.too_many(node.at, "include", items.len(), limits::MAX_NAMES) {
            return;
        }
        for (i, item) in items.iter().enumerate() {
            let key = format!("include[{i}]");
            if let Some(path) = reader.text(item, &key, "a path") {
                self.includes.push(Include { path: reader.source.folder().join(path), at: item.at, key });
            }
        }
    }
}

/// The names of a group's settings.
fn members(group: &str) -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().filter_map(move |s| s.key.strip_prefix(group)?.strip_prefix('.'))
}

/// `version: 1`; a kernels document has a version of its own, which is not looked at.
fn version(entry: &Entry, is_kernels: bool, reader: &mut Reader<'_>) {
    if is_kernels {
        return;
    }
    if let Some(found) = reader.int(&entry.value, "version", 1, i64::MAX).filter(|&v| v > VERSION) {
        let kind = ProblemKind::Version { found, supported: VERSION };
        reader.report(entry.value.at, "version", Some(found.to_string()), kind);
    }
}

fn schema_version(node: &Node, reader: &mut Reader<'_>) {
    if let Some(found) = reader.int(node, "schema_version", 1, i64::MAX).filter(|&v| v > KERNELS_VERSION) {
        let kind = ProblemKind::Version { found, supported: KERNELS_VERSION };
        reader.report(node.at, "schema_version", Some(found.to_string()), kind);
    }
}
