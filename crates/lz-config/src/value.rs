//! Values as settings have them, whoever says them.

use std::fmt;

use serde::Serialize;

/// A value: of a YAML document, of `configure(key=value)`, or of a setting in force.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// Nothing.
    Null,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A number.
    Float(f64),
    /// Text.
    Str(String),
    /// A list.
    List(Vec<Value>),
    /// Keys and values, in the order they were written.
    #[serde(serialize_with = "as_map")]
    Map(Vec<(String, Value)>),
}

fn as_map<S: serde::Serializer>(entries: &[(String, Value)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(key, value)| (key, value)))
}

impl Value {
    /// Whether lists and maps nest no deeper than this.
    pub(crate) fn is_within(&self, levels: usize) -> bool {
        match self {
            Value::List(items) => levels > 0 && items.iter().all(|item| item.is_within(levels - 1)),
            Value::Map(entries) => levels > 0 && entries.iter().all(|(_, value)| value.is_within(levels - 1)),
            _ => true,
        }
    }

    /// A list of names.
    pub fn names<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Value {
        Value::List(names.into_iter().map(|name| Value::Str(name.into())).collect())
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Value {
        Value::Int(value)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Value {
        Value::Float(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::Str(value.to_owned())
    }
}

/// In double quotes, with everything escaped that YAML does not take as it is.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}') => {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// As YAML on one line.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Null => f.write_str("null"),
            Value::Bool(value) => write!(f, "{value}"),
            Value::Int(value) => write!(f, "{value}"),
            Value::Float(value) if value.is_nan() => f.write_str(".nan"),
            Value::Float(value) if value.is_infinite() => f.write_str(if *value > 0.0 { ".inf" } else { "-.inf" }),
            Value::Float(value) => write!(f, "{value:?}"),
            Value::Str(text) => f.write_str(&quoted(text)),
            Value::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Value::Map(entries) => {
                f.write_str("{")?;
                for (i, (key, value)) in entries.iter().enumerate() {
                    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
                    let key = if !key.is_empty() && key.chars().all(plain) { key.clone() } else { quoted(key) };
                    write!(f, "{}{key}: {value}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("}")
            }
        }
    }
}
