//! `dispatch_rules` of a kernels document: conditions, and what they do to kernels.

use lz_select::{Action, Condition};

use super::conditions::{all, expressions, operation, verify};
use super::kernels::{Document, Mention, named, rule_of};
use super::limits::MAX_RULES;
use super::reader::Reader;
use crate::node::Node;
use crate::yaml::join;

impl Document {
    pub fn read_rules(&mut self, node: &Node, reader: &mut Reader<'_>) {
        let path = "dispatch_rules";
        let items = reader.list(node, path, "a list of dispatch rules").unwrap_or_default();
        if reader.too_many(node.at, path, items.len(), MAX_RULES) {
            return;
        }
        for (i, item) in items.iter().enumerate() {
            self.read_rule(item, &format!("{path}[{i}]"), reader);
        }
    }

    fn read_rule(&mut self, node: &Node, path: &str, reader: &mut Reader<'_>) {
        let Some(entries) = reader.map(node, path, "a map with 'condition' and 'action'") else { return };
        let mut name = reader.at(node.at).short();
        let (mut conditions, mut about) = (Vec::new(), None);
        for entry in entries {
            let (node, key) = (&entry.value, join(path, &entry.key));
            match entry.key.as_str() {
                "name" => name = reader.text(node, &key, "a name").map_or(name.clone(), |n| format!("{n} ({name})")),
                "operation" => about = operation(node, &key, reader),
                "condition" | "conditions" => {
                    for (text, at, key) in expressions(node, &key, reader).unwrap_or_default() {
                        let probe =
                            rule_of(String::new(), None, Condition::When(text.clone()), Action::Deny(named("")));
                        if verify(&probe, at, &key, reader) {
                            conditions.push(Condition::When(text));
                        }
                    }
                }
                "action" => {}
                _ => reader.unknown(entry, path, ["name", "operation", "condition", "action"]),
            }
        }
        let Some(action) = entries.iter().find(|e| e.key == "action") else {
            reader.missing(node, path, "action", "say what to do: priority_boost, kernel_override or filter_kernels");
            return;
        };
        self.read_action(&action.value, &join(path, "action"), name, about, all(conditions), reader);
    }

    fn read_action(
        &mut self,
        node: &Node,
        path: &str,
        name: String,
        about: Option<String>,
        condition: Condition,
        reader: &mut Reader<'_>,
    ) {
        let expected = "a map with 'priority_boost', 'kernel_override' or 'filter_kernels'";
        let Some(entries) = reader.map(node, path, expected) else { return };
        let boosted = entries.iter().find(|e| e.key == "kernel");
        let boosted = boosted.and_then(|e| reader.names(&e.value, &join(path, "kernel"), "the name of a kernel"));
        for entry in entries {
            let (node, key) = (&entry.value, join(path, &entry.key));
            let rule = |action| rule_of(name.clone(), about.clone(), condition.clone(), action);
            match entry.key.as_str() {
                "kernel" => {}
                "priority_boost" => match (reader.int(node, &key, -10_000, 10_000), &boosted) {
                    (Some(points), Some(kernels)) => {
                        self.dispatch.extend(kernels.iter().map(|k| rule(Action::Boost(named(k), points as i32))));
                    }
                    (Some(points), None) => {
                        self.boosts.push((condition.clone(), about.clone(), points as i32, name.clone()));
                    }
                    (None, _) => {}
                },
                "kernel_override" => {
                    if let Some(kernel) = reader.text(node, &key, "the name of a kernel") {
                        self.dispatch.push(rule(Action::Override(named(kernel))));
                        self.mentions.push(Mention { name: kernel.to_owned(), at: reader.at(node.at) });
                    }
                }
                "filter_kernels" => {
                    for (text, at, key) in expressions(node, &key, reader).unwrap_or_default() {
                        let rule = rule(Action::Filter(text));
                        if verify(&rule, at, &key, reader) {
                            self.dispatch.push(rule);
                        }
                    }
                }
                _ => reader.unknown(entry, path, ["priority_boost", "kernel_override", "filter_kernels", "kernel"]),
            }
        }
    }
}
