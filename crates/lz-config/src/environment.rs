//! The environment: which variables there are, and what they say.

use std::collections::BTreeMap;

use lz_model::nearest;

use crate::declare::{Fixed, Kind, Setting, Variable};
use crate::node::{Data, Node};
use crate::operation;
use crate::origin::{Origin, Position, Source};
use crate::problem::{ConfigWarning, Problem};
use crate::read::{Layer, Lock, Reader, Said};
use crate::settings::{SETTINGS, VARIABLES};
use crate::value::Value;

const PREFIX: &str = "LAYERZERO_";
const LOCK: &str = "LAYERZERO_LOCK_";

/// The variables of this process that are looked at: ours, and those that say where files are.
///
/// The one place where the library reads the environment.
pub fn environment() -> BTreeMap<String, String> {
    const PLACES: [&str; 4] = ["HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"];
    let ours = |name: &str| name.starts_with(PREFIX) || PLACES.contains(&name);
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| ours(name))
        .collect()
}

/// What the environment says. An empty variable says nothing.
pub(crate) fn read(variables: &BTreeMap<String, String>, problems: &mut Vec<Problem>) -> Layer {
    let mut layer = Layer::default();
    for (name, text) in variables.iter().filter(|(name, _)| name.starts_with(PREFIX)) {
        let setting = SETTINGS.iter().find(|setting| setting.variable_name() == *name);
        let locked = name.strip_prefix(LOCK).and_then(operation::of_variable);
        if text.is_empty() && (setting.is_some() || locked.is_some()) {
            continue;
        }
        let origin = Origin::Environment { name: name.clone() };
        if let Some(setting) = setting {
            let source = Source::Environment(name.clone());
            let mut reader = Reader::new(&source);
            if let Some(value) = value(setting, text, &mut reader) {
                layer.say(setting, value, origin);
            }
            problems.append(&mut reader.problems);
        } else if let Some(operation) = locked {
            let lock = Lock { operation, kernel: Some(text.clone()), optional: false };
            layer.lock(Said { what: lock, value: Value::Str(text.clone()), origin });
        } else if !VARIABLES.iter().any(|(known, _)| known == name) {
            layer.warnings.push(ConfigWarning::UnknownVariable { name: name.clone(), nearest: closest(name) });
        }
    }
    layer
}

/// The value of a variable: a truth value in any usual spelling, names separated by commas, …
fn value(setting: &Setting, text: &str, reader: &mut Reader<'_>) -> Option<Value> {
    let text = text.trim();
    let inverted = matches!(setting.variable, Variable::Inverted(_));
    let data = match setting.kind {
        Kind::Bool | Kind::Only { value: Fixed::False, .. } => match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Data::Bool(!inverted),
            "0" | "false" | "no" | "off" => Data::Bool(inverted),
            _ => Data::Str(text.to_owned()),
        },
        Kind::Int { .. } => text.parse().map_or_else(|_| Data::Str(text.to_owned()), Data::Int),
        Kind::Number { .. } => text.parse().map_or_else(|_| Data::Str(text.to_owned()), Data::Float),
        Kind::Names => {
            let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
            Data::List(names.map(|name| Node { data: Data::Str(name.to_owned()), at: Position::default() }).collect())
        }
        Kind::Name | Kind::Path | Kind::File | Kind::Choice(_) | Kind::Only { .. } => Data::Str(text.to_owned()),
    };
    let node = Node { data, at: Position::default() };
    reader.setting(&node, setting.key, setting.kind)
}

/// The variable that was most likely meant. All begin alike, so the beginnings are left out.
fn closest(name: &str) -> Option<String> {
    let (prefix, known): (_, Vec<String>) = if name.starts_with(LOCK) {
        (LOCK, operation::names().map(operation::spelling).collect())
    } else {
        let others = VARIABLES.iter().filter(|(name, _)| !name.contains('<')).map(|(name, _)| (*name).to_owned());
        let all = SETTINGS.iter().map(Setting::variable_name).chain(others);
        (PREFIX, all.map(|name| name[PREFIX.len()..].to_owned()).collect())
    };
    nearest(&name[prefix.len()..], known.iter().map(String::as_str)).map(|rest| format!("{prefix}{rest}"))
}
