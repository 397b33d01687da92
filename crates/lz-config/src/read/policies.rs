//! `policies` of a kernels document: locks and denials by name, in force when `policy` says so.

use std::collections::BTreeMap;

use lz_select::{Action, Condition};

use super::NamedPolicy;
use super::conditions::{all, expressions, operation, verify};
use super::kernels::{named, rule_of};
use super::limits::{MAX_NAMES, MAX_VALUES};
use super::reader::Reader;
use crate::node::Node;
use crate::yaml::join;

pub(super) fn read(node: &Node, reader: &mut Reader<'_>) -> BTreeMap<String, NamedPolicy> {
    let mut policies = BTreeMap::new();
    let entries = reader.map(node, "policies", "a map of name to policy").unwrap_or_default();
    if reader.too_many(node.at, "policies", entries.len(), MAX_VALUES) {
        return policies;
    }
    for entry in entries {
        let policy = one(&entry.value, &join("policies", &entry.key), reader);
        policies.insert(entry.key.clone(), policy);
    }
    policies
}

fn one(node: &Node, path: &str, reader: &mut Reader<'_>) -> NamedPolicy {
    let mut policy = NamedPolicy { rules: Vec::new(), profiling: None };
    for entry in reader.map(node, path, "a policy: a map of rules").unwrap_or_default() {
        let (node, key) = (&entry.value, join(path, &entry.key));
        match entry.key.as_str() {
            "lock_rules" | "deny_rules" => {
                let items = reader.list(node, &key, "a list of rules").unwrap_or_default();
                if reader.too_many(node.at, &key, items.len() + policy.rules.len(), MAX_NAMES) {
                    continue;
                }
                for (i, item) in items.iter().enumerate() {
                    read_rule(item, &format!("{key}[{i}]"), entry.key == "lock_rules", &mut policy, reader);
                }
            }
            "allow_experimental" => {
                if reader.bool(node, &key) == Some(false) {
                    let name = format!("no experimental kernels ({})", reader.at(node.at).short());
                    let action = Action::Filter("not experimental".into());
                    policy.rules.push(rule_of(name, None, Condition::Always, action));
                }
            }
            "enable_profiling" => {
                if reader.bool(node, &key) == Some(true) {
                    policy.profiling = Some(reader.at(node.at));
                }
            }
            _ => {
                let known = ["lock_rules", "deny_rules", "allow_experimental", "enable_profiling"];
                reader.unknown(entry, path, known);
            }
        }
    }
    policy
}

fn read_rule(node: &Node, path: &str, lock: bool, policy: &mut NamedPolicy, reader: &mut Reader<'_>) {
    let Some(entries) = reader.map(node, path, "a map with 'kernel' and 'conditions'") else { return };
    let before = reader.problems.len();
    let (mut kernel, mut about, mut conditions) = (None, None, Vec::new());
    for entry in entries {
        let (node, key) = (&entry.value, join(path, &entry.key));
        match entry.key.as_str() {
            "kernel" => kernel = reader.text(node, &key, "the name of a kernel"),
            "operation" => about = operation(node, &key, reader),
            "conditions" | "condition" => {
                for (text, at, key) in expressions(node, &key, reader).unwrap_or_default() {
                    let condition = Condition::When(text);
                    let probe = rule_of(String::new(), None, condition.clone(), Action::Deny(named("")));
                    if verify(&probe, at, &key, reader) {
                        conditions.push(condition);
                    }
                }
            }
            _ => reader.unknown(entry, path, ["kernel", "operation", "conditions"]),
        }
    }
    if !entries.iter().any(|e| e.key == "kernel") {
        reader.missing(node, path, "kernel", "say which kernel the rule is about");
    }
    let (Some(kernel), true) = (kernel, reader.problems.len() == before) else { return };
    let (verb, action) =
        if lock { ("lock", Action::Lock(named(kernel))) } else { ("deny", Action::Deny(named(kernel))) };
    let name = format!("{verb} {kernel} ({})", reader.at(node.at).short());
    let rule = rule_of(name, about, all(conditions), action);
    if verify(&rule, node.at, path, reader) {
        policy.rules.push(rule);
    }
}
