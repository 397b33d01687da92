//! `rules`: match or condition, and what to do.

use lz_select::{Action, Condition, FieldPattern, Pattern, RuleSpec};

use super::Said;
use super::conditions::{all, expressions, operation, verify};
use super::limits::{MAX_EXPANDED, MAX_NAMES, MAX_RULES, MAX_VALUES};
use super::reader::Reader;
use crate::node::{Data, Entry, Node};
use crate::origin::Position;
use crate::value::Value;
use crate::yaml::join;

/// The keys of a rule, with what they mean.
pub(crate) const RULE_KEYS: &[(&str, &str)] = &[
    ("name", "what to call it in explanations"),
    ("operation", "the operation, alias or function it is about, or a glob or list of them; all when not given"),
    ("match", "fields and what they must be: a value, a comparison such as `\">=90\"`, a glob, or a list of these"),
    ("condition", "an expression that must hold, or a list of them; `when` is the same"),
    ("prefer", "kernels that get 20 points: an id, an alias, a backend, a library, or a glob of these"),
    ("prefer_sources", "libraries whose kernels get 20 points"),
    ("avoid", "kernels that lose 50 points"),
    ("avoid_sources", "libraries whose kernels lose 50 points"),
    ("boost", "`{kernel or source, points}`: kernels that get this many points"),
    ("priority", "`{kernel or source, points}`: kernels whose declared priority is replaced"),
    ("override", "kernels that come first, if they can serve the call"),
    ("fallback", "kernels that are next in line when the chosen one fails"),
    ("filter", "an expression over a kernel's own fields; kernels for which it is not true may not run"),
    ("deny", "kernels that may not run"),
    ("deny_sources", "libraries whose kernels may not run"),
    ("lock", "the only kernels that may run"),
    ("optional", "`true`: what it names may be unknown or not installed; the rule then does nothing"),
];

pub(super) fn read(node: &Node, path: &str, reader: &mut Reader<'_>) -> Vec<Said<Vec<RuleSpec>>> {
    let items = reader.list(node, path, "a list of rules").unwrap_or_default();
    if reader.too_many(node.at, path, items.len(), MAX_RULES) {
        return Vec::new();
    }
    let (mut said, mut count) = (Vec::new(), 0);
    for (i, item) in items.iter().enumerate() {
        let Some(rules) = Draft::read(item, &format!("{path}[{i}]"), reader) else { continue };
        count += rules.len();
        if count > MAX_EXPANDED {
            reader.contradiction(item.at, path, format!("more than {MAX_EXPANDED} kernels and operations are named"));
            break;
        }
        said.push(Said { what: rules, value: Value::from(item), origin: reader.at(item.at) });
    }
    said
}

/// A rule while it is read.
struct Draft {
    name: String,
    /// Empty for all.
    operations: Vec<String>,
    optional: bool,
    conditions: Vec<Condition>,
    actions: Vec<(Action, Position, String)>,
}

impl Draft {
    fn read(node: &Node, path: &str, reader: &mut Reader<'_>) -> Option<Vec<RuleSpec>> {
        let before = reader.problems.len();
        let entries = reader.map(node, path, "a rule: a map with 'match' or 'condition', and what to do")?;
        let mut draft = Draft {
            name: reader.at(node.at).short(),
            operations: Vec::new(),
            optional: false,
            conditions: Vec::new(),
            actions: Vec::new(),
        };
        // Conditions are checked against the operation, so it comes first.
        for entry in entries.iter().filter(|e| matches!(e.key.as_str(), "operation" | "op")) {
            draft.read_operation(&entry.value, &join(path, &entry.key), reader);
        }
        for entry in entries {
            draft.read_entry(entry, path, reader);
        }
        if draft.actions.is_empty() && reader.problems.len() == before {
            reader.contradiction(node.at, path, "does nothing; say what to do: 'prefer', 'avoid', 'deny', 'lock', …");
        }
        let rules = draft.finish(node.at, path, reader);
        (reader.problems.len() == before).then_some(rules)
    }

    fn read_entry(&mut self, entry: &Entry, path: &str, reader: &mut Reader<'_>) {
        let (node, key) = (&entry.value, join(path, &entry.key));
        match entry.key.as_str() {
            "operation" | "op" => {}
            "name" => {
                if let Some(name) = reader.text(node, &key, "a name") {
                    self.name = format!("{name} ({})", self.name);
                }
            }
            "optional" => self.optional = reader.bool(node, &key).unwrap_or(false),
            "match" => self.read_match(node, &key, reader),
            "condition" | "when" | "conditions" => {
                for (text, at, key) in expressions(node, &key, reader).unwrap_or_default() {
                    self.add_condition(Condition::When(text), at, &key, reader);
                }
            }
            "boost" | "priority" => self.read_points(node, &entry.key, &key, reader),
            "filter" => {
                for (text, at, key) in expressions(node, &key, reader).unwrap_or_default() {
                    self.actions.push((Action::Filter(text), at, key));
                }
            }
            other => match action_of(other) {
                Some(action) => {
                    let expected = if other.ends_with("_sources") {
                        "a list of libraries"
                    } else {
                        "a kernel or library, or a list"
                    };
                    for name in reader.names(node, &key, expected).unwrap_or_default() {
                        self.actions.push((action(name), node.at, key.clone()));
                    }
                }
                None => reader.unknown(entry, path, RULE_KEYS.iter().map(|(key, _)| *key).chain(["op", "when"])),
            },
        }
    }

    fn read_operation(&mut self, node: &Node, key: &str, reader: &mut Reader<'_>) {
        if !self.operations.is_empty() {
            reader.contradiction(node.at, key, "the operation is stated twice; state all of them in one list");
            return;
        }
        match &node.data {
            // Not the same as saying nothing, which is about all.
            Data::List(items) if items.is_empty() => reader.wrong(node, key, "at least one operation"),
            Data::List(items) => {
                if reader.too_many(node.at, key, items.len(), MAX_VALUES) {
                    return;
                }
                for (i, item) in items.iter().enumerate() {
                    self.operations.extend(operation(item, &format!("{key}[{i}]"), reader));
                }
            }
            _ => self.operations.extend(operation(node, key, reader)),
        }
    }

    fn read_match(&mut self, node: &Node, path: &str, reader: &mut Reader<'_>) {
        // A match with nothing below it would hold always, which nobody means.
        if node.data == Data::Null {
            return reader.wrong(node, path, "a map of fields to what they must be");
        }
        let entries = reader.map(node, path, "a map of fields to what they must be").unwrap_or_default();
        if reader.too_many(node.at, path, entries.len(), MAX_VALUES) {
            return;
        }
        for entry in entries.iter().filter(|e| names_operations(e)) {
            self.read_operation(&entry.value, &join(path, &entry.key), reader);
        }
        let mut fields = Vec::new();
        for entry in entries.iter().filter(|e| !names_operations(e)) {
            let key = join(path, &entry.key);
            if let Some(pattern) = pattern(&entry.value, &key, reader) {
                let field = Condition::Match(vec![(entry.key.clone(), pattern.clone())]);
                if verify(&self.probe(field), entry.at, &key, reader) {
                    fields.push((entry.key.clone(), pattern));
                }
            }
        }
        if fields.is_empty() {
            return;
        }
        // Each field was looked at alone; together they must be those of one operation.
        let condition = Condition::Match(fields);
        match self.probe(condition.clone()).check() {
            Ok(()) => self.conditions.push(condition),
            Err(_) => reader.contradiction(node.at, path, "no operation has all of these fields"),
        }
    }

    fn add_condition(&mut self, condition: Condition, at: Position, key: &str, reader: &mut Reader<'_>) {
        if verify(&self.probe(condition.clone()), at, key, reader) {
            self.conditions.push(condition);
        }
    }

    /// A rule with a condition, to see whether it can be read.
    fn probe(&self, condition: Condition) -> RuleSpec {
        let action = Action::Deny(Pattern::Kernel(String::new()));
        RuleSpec::new(String::new(), self.operations.first().cloned(), condition, action)
    }

    /// `{kernel: .., points: ..}`, or a list of these.
    fn read_points(&mut self, node: &Node, kind: &str, path: &str, reader: &mut Reader<'_>) {
        if let Data::List(items) = &node.data {
            if reader.too_many(node.at, path, items.len(), MAX_NAMES) {
                return;
            }
            for (i, item) in items.iter().enumerate() {
                self.read_points(item, kind, &format!("{path}[{i}]"), reader);
            }
            return;
        }
        let expected = "a map with 'kernel' or 'source', and 'points'";
        let Some(entries) = reader.map(node, path, expected) else { return };
        let (mut patterns, mut points) = (Vec::new(), None);
        for entry in entries {
            let key = join(path, &entry.key);
            match entry.key.as_str() {
                "kernel" => {
                    patterns.extend(
                        reader.text(&entry.value, &key, "the id of a kernel").map(|t| Pattern::Kernel(t.into())),
                    );
                }
                "source" => {
                    patterns.extend(reader.text(&entry.value, &key, "a library").map(|t| Pattern::Source(t.into())));
                }
                "points" => points = reader.int(&entry.value, &key, -10_000, 10_000),
                _ => reader.unknown(entry, path, ["kernel", "source", "points"]),
            }
        }
        let (Some(points), false) = (points, patterns.is_empty()) else {
            reader.contradiction(node.at, path, format!("needs {expected}"));
            return;
        };
        let points = points as i32;
        let action =
            |pattern| if kind == "boost" { Action::Boost(pattern, points) } else { Action::Priority(pattern, points) };
        self.actions.extend(patterns.into_iter().map(|pattern| (action(pattern), node.at, path.to_owned())));
    }

    fn finish(self, at: Position, path: &str, reader: &mut Reader<'_>) -> Vec<RuleSpec> {
        let condition = all(self.conditions);
        let operations: Vec<Option<String>> = match self.operations.is_empty() {
            true => vec![None],
            false => self.operations.into_iter().map(Some).collect(),
        };
        let mut rules = Vec::new();
        for (action, action_at, key) in self.actions {
            for operation in &operations {
                let (name, condition) = (self.name.clone(), condition.clone());
                let (operation, action) = (operation.clone(), action.clone());
                let rule = RuleSpec { name, operation, condition, action, optional: self.optional };
                let (at, key) =
                    if matches!(rule.action, Action::Filter(_)) { (action_at, key.as_str()) } else { (at, path) };
                if verify(&rule, at, key, reader) {
                    rules.push(rule);
                } else {
                    return rules;
                }
            }
        }
        rules
    }
}

/// `operation: "attention.*"` says what a rule is about; `operation: "!=x"` is a field like others.
fn names_operations(entry: &Entry) -> bool {
    let plain = |node: &Node| matches!(&node.data, Data::Str(text) if !text.trim_start().starts_with(['!', '=']));
    matches!(entry.key.as_str(), "operation" | "op")
        && match &entry.value.data {
            Data::List(items) => items.iter().all(plain),
            _ => plain(&entry.value),
        }
}

fn action_of(key: &str) -> Option<fn(String) -> Action> {
    Some(match key {
        "prefer" => |name| Action::Prefer(Pattern::Kernel(name)),
        "prefer_sources" => |name| Action::Prefer(Pattern::Source(name)),
        "avoid" => |name| Action::Avoid(Pattern::Kernel(name)),
        "avoid_sources" => |name| Action::Avoid(Pattern::Source(name)),
        "override" => |name| Action::Override(Pattern::Kernel(name)),
        "fallback" => |name| Action::Fallback(Pattern::Kernel(name)),
        "deny" => |name| Action::Deny(Pattern::Kernel(name)),
        "deny_sources" => |name| Action::Deny(Pattern::Source(name)),
        "lock" => |name| Action::Lock(Pattern::Kernel(name)),
        _ => return None,
    })
}

/// What a field must be.
fn pattern(node: &Node, key: &str, reader: &mut Reader<'_>) -> Option<FieldPattern> {
    let scalar = |node: &Node| match &node.data {
        Data::Bool(value) => Some(value.to_string()),
        Data::Int(value) => Some(value.to_string()),
        Data::Float(value) => Some(format!("{value:?}")),
        Data::Str(text) => Some(text.clone()),
        Data::Null | Data::List(_) | Data::Map(_) => None,
    };
    let pattern = match &node.data {
        Data::List(items) if items.len() > MAX_VALUES => {
            reader.too_many(node.at, key, items.len(), MAX_VALUES);
            return None;
        }
        Data::List(items) if !items.is_empty() => {
            items.iter().map(scalar).collect::<Option<_>>().map(FieldPattern::Any)
        }
        _ => scalar(node).map(FieldPattern::One),
    };
    if pattern.is_none() {
        reader.wrong(node, key, "a value, a comparison such as \">=90\", a glob, or a list of these");
    }
    pattern
}
