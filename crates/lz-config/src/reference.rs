//! The reference of all settings, and the JSON schema of a file: both made from the list.

use std::fmt::Write;

use serde_json::{Map, Value as Json, json};

use crate::declare::{Kind, Setting, Variable};
use crate::read::{KERNELS_VERSION, RULE_KEYS};
use crate::rollout::ROLLOUT_KEYS;
use crate::settings::{GROUPS, SECTIONS, SETTINGS, VARIABLES};
use crate::value::Value;

/// The reference of every setting, section and environment variable, as Markdown.
pub fn reference_markdown() -> String {
    let mut out =
        String::from("# Configuration reference\n\nMade from the list in `crates/lz-config/src/settings.rs`.\n");
    let mut table = |title: &str, settings: &mut dyn Iterator<Item = &'static Setting>| {
        let _ = writeln!(out, "\n{title}\n\n| key | default | values | environment | |\n|---|---|---|---|---|");
        for setting in settings {
            let inverted = matches!(setting.variable, Variable::Inverted(_));
            let variable =
                format!("`{}`{}", setting.variable_name(), if inverted { " (the other way round)" } else { "" });
            let (key, doc) = (setting.key, one_line(setting.doc));
            let (default, expected) = (setting.default(), setting.kind.expected());
            let _ = writeln!(out, "| `{key}` | `{default}` | {expected} | {variable} | {doc} |");
        }
    };
    table("## Settings", &mut SETTINGS.iter().filter(|s| !s.key.contains('.')));
    for (group, doc) in GROUPS {
        let members = format!("{group}.");
        let title = format!("## `{group}`\n\n{}", one_line(doc));
        table(&title, &mut SETTINGS.iter().filter(|s| s.key.starts_with(&members)));
    }
    out.push_str("\n## Other keys of a file\n\n| key | what to write | |\n|---|---|---|\n");
    for section in SECTIONS {
        let _ = writeln!(out, "| `{}` | {} | {} |", section.key, section.expected, section.doc);
    }
    for (title, keys) in [("A rule", RULE_KEYS), ("A rollout", ROLLOUT_KEYS)] {
        let _ = writeln!(out, "\n## {title}\n\n| key | |\n|---|---|");
        for (key, doc) in keys {
            let _ = writeln!(out, "| `{key}` | {doc} |");
        }
    }
    out.push_str("\n## Other environment variables\n\n| name | |\n|---|---|\n");
    for (name, doc) in VARIABLES {
        let _ = writeln!(out, "| `{name}` | {doc} |");
    }
    out
}

fn one_line(doc: &str) -> String {
    doc.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// The JSON schema of a configuration file.
pub fn schema() -> Json {
    let mut properties = Map::new();
    for setting in SETTINGS {
        match setting.key.split_once('.') {
            None => {
                properties.insert(setting.key.to_owned(), setting_schema(setting));
            }
            Some((group, name)) => {
                let doc = GROUPS.iter().find(|(known, _)| *known == group).map_or("", |(_, doc)| *doc);
                let object = properties.entry(group).or_insert_with(|| {
                    json!({ "type": ["object", "null"], "description": one_line(doc), "additionalProperties": false,
                            "properties": {} })
                });
                object["properties"][name] = setting_schema(setting);
            }
        }
    }
    for section in SECTIONS {
        let mut object = section_schema(section.key);
        object["description"] = section.doc.into();
        properties.insert(section.key.to_owned(), object);
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "LayerZero configuration",
        "type": ["object", "null"],
        "additionalProperties": false,
        "properties": properties,
    })
}

fn setting_schema(setting: &Setting) -> Json {
    let mut object = match setting.kind {
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Int { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Number { min, max } => json!({ "type": "number", "minimum": min, "maximum": max }),
        Kind::Name | Kind::File => json!({ "type": ["string", "null"], "minLength": 1 }),
        Kind::Path => json!({ "type": "string", "minLength": 1 }),
        Kind::Choice(words) => json!({ "enum": words }),
        Kind::Names => names_schema(),
        Kind::Only { value, .. } => json!({ "const": json_of(&value.value()) }),
    };
    object["description"] = one_line(setting.doc).into();
    object["default"] = json_of(&setting.default());
    object
}

fn json_of(value: &Value) -> Json {
    serde_json::to_value(value).unwrap_or(Json::Null)
}

fn names_schema() -> Json {
    let name = json!({ "type": "string", "minLength": 1 });
    json!({ "anyOf": [name, { "type": ["array", "null"], "items": name }] })
}

fn section_schema(key: &str) -> Json {
    let map = || json!({ "type": ["object", "null"] });
    let described = |keys: &[(&str, &str)], also: &[&str]| {
        let known = keys.iter().map(|(key, doc)| ((*key).to_owned(), json!({ "description": doc })));
        let also = also.iter().map(|key| ((*key).to_owned(), json!({})));
        let properties: Map<String, Json> = known.chain(also).collect();
        json!({ "type": "object", "additionalProperties": false, "properties": properties })
    };
    match key {
        // A kernels document has a version of its own.
        "version" => json!({ "type": ["integer", "string"] }),
        "schema_version" => json!({ "type": "integer", "minimum": 1, "maximum": KERNELS_VERSION }),
        "include" => names_schema(),
        "locks" => {
            let name = json!({ "type": "string", "minLength": 1 });
            let map = json!({
                "type": "object", "additionalProperties": false, "required": ["kernel"],
                "properties": { "kernel": name, "optional": { "type": "boolean" } },
            });
            json!({ "type": ["object", "null"], "additionalProperties": { "anyOf": [name, map] } })
        }
        "rules" => {
            json!({ "type": ["array", "null"], "items": described(RULE_KEYS, &["op", "when", "conditions"]) })
        }
        "rollouts" => {
            let mut items = described(ROLLOUT_KEYS, &["op"]);
            items["required"] = json!(["name", "candidate", "mode"]);
            json!({ "type": ["array", "null"], "items": items })
        }
        "dispatch_rules" => json!({ "type": ["array", "null"], "items": { "type": "object" } }),
        _ => map(),
    }
}
