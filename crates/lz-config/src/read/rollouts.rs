//! `rollouts`: kernels that are tried on a part of the calls.

use super::Said;
use super::conditions::operation;
use super::limits::MAX_ROLLOUTS;
use super::reader::Reader;
use crate::node::{Data, Node};
use crate::rollout::{ROLLOUT_KEYS, Rollout, RolloutMode};
use crate::value::Value;
use crate::yaml::join;

pub(super) fn read(node: &Node, path: &str, reader: &mut Reader<'_>) -> Vec<Said<Rollout>> {
    let items = reader.list(node, path, "a list of rollouts").unwrap_or_default();
    if reader.too_many(node.at, path, items.len(), MAX_ROLLOUTS) {
        return Vec::new();
    }
    let mut rollouts: Vec<Said<Rollout>> = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let path = format!("{path}[{i}]");
        let Some(rollout) = one(item, &path, reader) else { continue };
        if rollouts.iter().any(|known| known.what.name == rollout.name) {
            reader.contradiction(
                item.at,
                &join(&path, "name"),
                format!("'{}' is the name of two rollouts", rollout.name),
            );
        }
        rollouts.push(Said { what: rollout, value: Value::from(item), origin: reader.at(item.at) });
    }
    rollouts
}

fn one(node: &Node, path: &str, reader: &mut Reader<'_>) -> Option<Rollout> {
    let before = reader.problems.len();
    let entries = reader.map(node, path, "a rollout: a map with 'name', 'operation', 'candidate' and 'mode'")?;
    let mut rollout = Rollout {
        name: String::new(),
        operation: String::new(),
        candidate: String::new(),
        mode: RolloutMode::Shadow,
        fraction: 0.01,
        seed: 0,
        max_error_rate: 0.01,
        max_mismatch_rate: 0.0,
        max_slowdown: 1.25,
        min_samples: 50,
    };
    for entry in entries {
        let (node, key) = (&entry.value, join(path, &entry.key));
        match entry.key.as_str() {
            "name" => take(&mut rollout.name, reader.text(node, &key, "a name").map(str::to_owned)),
            "operation" | "op" => take(&mut rollout.operation, operation(node, &key, reader)),
            "candidate" => {
                take(&mut rollout.candidate, reader.text(node, &key, "the id of a kernel").map(str::to_owned))
            }
            "mode" => {
                if let Some(word) = reader.choice(node, &key, RolloutMode::WORDS) {
                    rollout.mode = if word == "canary" { RolloutMode::Canary } else { RolloutMode::Shadow };
                }
            }
            "fraction" => {
                let fraction = part(node, &key, reader).filter(|&f| {
                    if f <= 0.0 {
                        reader.wrong(node, &key, "a part above 0, such as 0.01 or 1%");
                    }
                    f > 0.0
                });
                take(&mut rollout.fraction, fraction);
            }
            "seed" => take(&mut rollout.seed, reader.int(node, &key, 0, i64::MAX).map(|n| n as u64)),
            "max_error_rate" => take(&mut rollout.max_error_rate, part(node, &key, reader)),
            "max_mismatch_rate" => take(&mut rollout.max_mismatch_rate, part(node, &key, reader)),
            "max_slowdown" => take(&mut rollout.max_slowdown, factor(node, &key, reader)),
            "min_samples" => take(&mut rollout.min_samples, reader.int(node, &key, 1, 1_000_000_000).map(|n| n as u64)),
            _ => reader.unknown(entry, path, ROLLOUT_KEYS.iter().map(|(key, _)| *key)),
        }
    }
    let needed: [(&'static str, &'static str); 4] = [
        ("name", "say what to call it"),
        ("operation", "say which operation"),
        ("candidate", "say which kernel is tried"),
        ("mode", "say shadow or canary"),
    ];
    for (key, expected) in needed {
        if !entries.iter().any(|e| e.key == key || key == "operation" && e.key == "op") {
            reader.missing(node, path, key, expected);
        }
    }
    (reader.problems.len() == before).then_some(rollout)
}

fn take<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

/// A part of a whole: `0.01` or `1%`.
fn part(node: &Node, key: &str, reader: &mut Reader<'_>) -> Option<f64> {
    let value = match &node.data {
        Data::Int(value) => Some(*value as f64),
        Data::Float(value) => Some(*value),
        Data::Str(text) => text.trim().strip_suffix('%').and_then(|p| p.trim().parse::<f64>().ok()).map(|p| p / 100.0),
        _ => None,
    };
    let value = value.filter(|value| (0.0..=1.0).contains(value));
    if value.is_none() {
        reader.wrong(node, key, "a part from 0 to 1, or 0% to 100%");
    }
    value
}

fn factor(node: &Node, key: &str, reader: &mut Reader<'_>) -> Option<f64> {
    let value = match node.data {
        Data::Int(value) => Some(value as f64),
        Data::Float(value) => Some(value),
        _ => None,
    };
    let value = value.filter(|value| (1.0..=1000.0).contains(value));
    if value.is_none() {
        reader.wrong(node, key, "a factor from 1 to 1000");
    }
    value
}
