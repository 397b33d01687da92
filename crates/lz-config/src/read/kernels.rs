//! The kernels document: which implementations an operation has, within which constraints, and
//! what is done to them when.
//!
//! It turns into rules. A priority replaces the declared one; a constraint becomes a denial where
//! it does not hold, so that a kernel is used within its constraints only. A document can narrow
//! what a kernel says it can do, never widen it: `supports_causal: true` grants nothing.

use lz_model::{DType, Platform, nearest};
use lz_select::{Action, Condition, Pattern, RuleSpec};

use super::conditions::{operation, verify};
use super::limits::{MAX_EXPANDED, MAX_IMPLEMENTATIONS, MAX_PROBLEMS};
use super::reader::Reader;
use super::{Layer, Said};
use crate::node::{Data, Entry, Node};
use crate::origin::{Origin, Position};
use crate::problem::ConfigWarning;
use crate::value::Value;
use crate::yaml::join;

/// An implementation that the document lists.
struct Listed {
    name: String,
    operation: String,
}

/// A kernel the document speaks of elsewhere, and where.
pub(super) struct Mention {
    pub name: String,
    pub at: Origin,
}

/// A document while it is read.
#[derive(Default)]
pub(super) struct Document {
    listed: Vec<Listed>,
    values: Vec<(&'static str, Value, Origin)>,
    fallback: Option<String>,
    /// Conditions, operation, points and where.
    pub boosts: Vec<(Condition, Option<String>, i32, String)>,
    pub dispatch: Vec<RuleSpec>,
    kernels: Vec<RuleSpec>,
    pub mentions: Vec<Mention>,
}

/// Flags of `constraints` that narrow when they are false, each with what must hold then.
const FLAGS: &[(&str, &[&str])] = &[
    ("supports_causal", &["causal == false"]),
    ("supports_gqa", &["heads == kv_heads"]),
    ("supports_paged_kv", &["not operation matches '*.paged'"]),
    ("supports_bias", &["attn_mask.present == false", "alibi_slopes.present == false"]),
    ("supports_mask", &["attn_mask.present == false"]),
    ("supports_alibi", &["alibi_slopes.present == false"]),
    ("supports_autograd", &["context.requires_grad == false"]),
    ("cuda_graph_safe", &["context.capturing == false"]),
    ("deterministic", &["context.deterministic == false"]),
];

impl Document {
    pub fn read_defaults(&mut self, node: &Node, reader: &mut Reader<'_>) {
        let path = "defaults";
        for entry in reader.map(node, path, "a map").unwrap_or_default() {
            let (node, key) = (&entry.value, join(path, &entry.key));
            let at = reader.at(node.at);
            match entry.key.as_str() {
                "fallback_policy" => {
                    if let Some(name) = reader.text(node, &key, "the name of a kernel") {
                        self.fallback = Some(name.to_owned());
                        let rule = format!("fall to {name} ({})", at.short());
                        self.kernels.push(rule_of(rule, None, Condition::Always, Action::Fallback(named(name))));
                        self.mentions.push(Mention { name: name.to_owned(), at });
                    }
                }
                "autotuning" => {
                    self.values.extend(reader.bool(node, &key).map(|b| ("perfdb.auto_tune", Value::Bool(b), at)));
                }
                "cache_ttl_seconds" => {
                    let seconds = reader.int(node, &key, 0, 31_536_000);
                    self.values.extend(seconds.map(|n| ("cache.ttl_seconds", Value::Int(n), at)));
                }
                _ => reader.unknown(entry, path, ["fallback_policy", "autotuning", "cache_ttl_seconds"]),
            }
        }
    }

    pub fn read_kernels(&mut self, node: &Node, reader: &mut Reader<'_>) {
        for group in reader.map(node, "kernels", "a map of group to implementations").unwrap_or_default() {
            let path = join("kernels", &group.key);
            let expected = "a map with 'operation' and 'implementations'";
            let Some(entries) = reader.map(&group.value, &path, expected) else { continue };
            let find = |key: &str| entries.iter().find(|e| e.key == key);
            let operation = match find("operation") {
                Some(entry) => operation(&entry.value, &join(&path, "operation"), reader),
                None => {
                    reader.missing(&group.value, &path, "operation", "say which operation the kernels serve");
                    None
                }
            };
            for entry in entries {
                match entry.key.as_str() {
                    "operation" => {}
                    "implementations" => {
                        let key = join(&path, "implementations");
                        let items = reader.list(&entry.value, &key, "a list of implementations").unwrap_or_default();
                        let count = items.len() + self.listed.len();
                        if reader.too_many(entry.at, &key, count, MAX_IMPLEMENTATIONS) {
                            return;
                        }
                        let Some(operation) = &operation else { continue };
                        for (i, item) in items.iter().enumerate() {
                            self.read_implementation(item, operation, &format!("{key}[{i}]"), reader);
                        }
                    }
                    _ => reader.unknown(entry, &path, ["operation", "implementations"]),
                }
            }
        }
    }

    fn read_implementation(&mut self, node: &Node, operation: &str, path: &str, reader: &mut Reader<'_>) {
        let expected = "an implementation: a map with 'name', 'dispatch_key', 'priority' and 'constraints'";
        let Some(entries) = reader.map(node, path, expected) else { return };
        let name = match entries.iter().find(|e| e.key == "name") {
            Some(entry) => reader.text(&entry.value, &join(path, "name"), "the name of a kernel"),
            None => {
                reader.missing(node, path, "name", "say which kernel it is");
                None
            }
        };
        let Some(name) = name else { return };
        if self.listed.iter().any(|k| k.name == name && k.operation == operation) {
            reader.contradiction(node.at, path, format!("'{name}' is listed twice for {operation}"));
        }
        self.listed.push(Listed { name: name.to_owned(), operation: operation.to_owned() });
        for entry in entries {
            let (node, key) = (&entry.value, join(path, &entry.key));
            match entry.key.as_str() {
                "name" => {}
                "dispatch_key" => {
                    if let Some(holds) = dispatch_key(node, &key, reader) {
                        self.only_with(name, operation, &holds, node, &key, reader);
                    }
                }
                "priority" => {
                    if let Some(priority) = reader.int(node, &key, -1000, 1000) {
                        let rule = format!("priority {priority} for {name} ({})", reader.at(node.at).short());
                        let action = Action::Priority(named(name), priority as i32);
                        self.kernels.push(rule_of(rule, Some(operation.to_owned()), Condition::Always, action));
                    }
                }
                "constraints" => {
                    let expected = "a map of constraints such as 'dtypes' or 'max_head_dim'";
                    for constraint in reader.map(node, &key, expected).unwrap_or_default() {
                        self.read_constraint(constraint, name, operation, &key, reader);
                    }
                }
                _ => reader.unknown(entry, path, ["name", "dispatch_key", "priority", "constraints"]),
            }
        }
    }

    fn read_constraint(&mut self, entry: &Entry, name: &str, operation: &str, path: &str, reader: &mut Reader<'_>) {
        let (node, key) = (&entry.value, join(path, &entry.key));
        let bound = |prefix: &str| entry.key.strip_prefix(prefix).filter(|field| !field.is_empty());
        if let Some((_, conditions)) = FLAGS.iter().find(|(flag, _)| *flag == entry.key) {
            if reader.bool(node, &key) == Some(false) {
                for holds in *conditions {
                    let rule = self.denial(name, operation, holds, reader.at(entry.at));
                    // An operation that has no such thing needs no rule against it.
                    self.kernels.extend(rule.check().is_ok().then_some(rule));
                }
            }
        } else if entry.key == "dtypes" {
            if let Some(dtypes) = dtypes(node, &key, reader) {
                let holds = format!("dtype in [{}]", dtypes.join(", "));
                self.only_with(name, operation, &holds, node, &key, reader);
            }
        } else if let Some(field) = bound("min_") {
            if let Some(least) = reader.int(node, &key, i64::MIN + 1, i64::MAX) {
                self.only_with(name, operation, &format!("{field} >= {least}"), node, &key, reader);
            }
        } else if let Some(field) = bound("max_") {
            if let Some(most) = reader.int(node, &key, i64::MIN + 1, i64::MAX) {
                self.only_with(name, operation, &format!("{field} <= {most}"), node, &key, reader);
            }
        } else {
            let usual = [
                "dtypes",
                "min_batch_size",
                "max_batch_size",
                "min_head_dim",
                "max_head_dim",
                "min_seq_len",
                "max_seq_len",
            ];
            reader.unknown(entry, path, usual.into_iter().chain(FLAGS.iter().map(|(flag, _)| *flag)));
        }
    }

    fn denial(&self, name: &str, operation: &str, holds: &str, at: Origin) -> RuleSpec {
        let rule = format!("{name} only with {holds} ({})", at.short());
        let condition = Condition::When(format!("not ({holds})"));
        rule_of(rule, Some(operation.to_owned()), condition, Action::Deny(named(name)))
    }

    fn only_with(&mut self, name: &str, operation: &str, holds: &str, node: &Node, key: &str, reader: &mut Reader<'_>) {
        let rule = self.denial(name, operation, holds, reader.at(node.at));
        if verify(&rule, node.at, key, reader) {
            self.kernels.push(rule);
        }
    }

    /// Puts everything into the layer.
    pub fn finish(mut self, layer: &mut Layer, reader: &mut Reader<'_>) {
        for (key, value, origin) in std::mem::take(&mut self.values) {
            layer.values.entry(key).or_insert(Said { what: (), value, origin });
        }
        let count = self.boosts.len() * self.listed.len();
        if reader.too_many(Position { line: 1, column: 1 }, "dispatch_rules", count, MAX_EXPANDED) {
            return;
        }
        layer.policies.values_mut().for_each(|policy| self.narrow_locks(&mut policy.rules));
        layer.warnings.extend(self.unlisted());
        layer.document = self.spread_boosts();
        layer.document.extend(self.dispatch);
        layer.document.extend(self.kernels);
    }

    /// A boost that names no kernel raises what the document lists over everything else; what it
    /// falls to is no choice of its own.
    fn spread_boosts(&mut self) -> Vec<RuleSpec> {
        let mut rules = Vec::new();
        for (condition, about, points, name) in self.boosts.drain(..) {
            for kernel in self.listed.iter().filter(|k| Some(&k.name) != self.fallback.as_ref()) {
                let operation = about.clone().unwrap_or_else(|| kernel.operation.clone());
                let action = Action::Boost(named(&kernel.name), points);
                let rule = rule_of(name.clone(), Some(operation), condition.clone(), action);
                // An operation without the condition's fields is none it is about.
                rules.extend(rule.check().is_ok().then_some(rule));
            }
        }
        rules
    }

    /// A lock that names no operation is about those its kernel is listed for.
    fn narrow_locks(&self, rules: &mut Vec<RuleSpec>) {
        let mut narrowed = Vec::new();
        for rule in rules.drain(..) {
            let operations: Vec<&String> = match (&rule.operation, &rule.action) {
                (None, Action::Lock(pattern)) => {
                    self.listed.iter().filter(|k| k.name == pattern.as_str()).map(|k| &k.operation).collect()
                }
                _ => Vec::new(),
            };
            if operations.is_empty() {
                narrowed.push(rule);
                continue;
            }
            for operation in operations {
                let rule = RuleSpec { operation: Some(operation.clone()), ..rule.clone() };
                narrowed.extend(rule.check().is_ok().then_some(rule));
            }
        }
        *rules = narrowed;
    }

    /// Kernels the document speaks of and does not list, where it lists one of nearly that name.
    fn unlisted(&self) -> Vec<ConfigWarning> {
        let known = || self.listed.iter().map(|k| k.name.as_str());
        let strange =
            self.mentions.iter().filter(|m| !m.name.contains(['*', '?']) && !known().any(|name| name == m.name));
        let warning = |mention: &Mention| {
            let nearest = Some(nearest(&mention.name, known())?.to_owned());
            Some(ConfigWarning::UnlistedKernel { at: mention.at.to_string(), name: mention.name.clone(), nearest })
        };
        strange.take(MAX_PROBLEMS).filter_map(warning).collect()
    }
}

pub(super) fn named(name: &str) -> Pattern {
    Pattern::Name(name.to_owned())
}

pub(super) fn rule_of(name: String, operation: Option<String>, condition: Condition, action: Action) -> RuleSpec {
    RuleSpec::new(name, operation, condition, action)
}

/// `any`, a platform, or `cuda_sm80` for CUDA from SM 80 on.
fn dispatch_key(node: &Node, key: &str, reader: &mut Reader<'_>) -> Option<String> {
    let expected = "any, cuda, cuda_sm<version>, rocm, cpu, hpu or xpu";
    let text = reader.text(node, key, expected)?;
    if text == "any" {
        return None;
    }
    if let Some(sm) = text.strip_prefix("cuda_sm").and_then(|sm| sm.parse::<u16>().ok()) {
        return Some(format!("platform == cuda and sm >= {sm}"));
    }
    match text.parse::<Platform>() {
        Ok(platform) => Some(format!("platform == {}", platform.name())),
        Err(_) => {
            reader.wrong(node, key, expected);
            None
        }
    }
}

fn dtypes(node: &Node, key: &str, reader: &mut Reader<'_>) -> Option<Vec<&'static str>> {
    let Data::List(items) = &node.data else {
        reader.wrong(node, key, "a list of dtypes");
        return None;
    };
    let mut read = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let key = format!("{key}[{i}]");
        match reader.text(item, &key, "a dtype")?.parse::<DType>() {
            Ok(dtype) => read.push(dtype.name()),
            Err(error) => {
                reader.wrong_near(item, &key, "a dtype", error.nearest.map(str::to_owned));
                return None;
            }
        }
    }
    if read.is_empty() {
        reader.wrong(node, key, "at least one dtype");
        return None;
    }
    Some(read)
}
