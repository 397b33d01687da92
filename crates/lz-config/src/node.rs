//! A document as a tree that knows where everything stands.

use crate::origin::Position;
use crate::value::Value;

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub data: Data,
    pub at: Position,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Data {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key with its place, and its value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub key: String,
    pub at: Position,
    pub value: Node,
}

/// A value that code gave: it stands nowhere.
impl From<&Value> for Node {
    fn from(value: &Value) -> Node {
        let at = Position::default();
        let data = match value {
            Value::Null => Data::Null,
            Value::Bool(value) => Data::Bool(*value),
            Value::Int(value) => Data::Int(*value),
            Value::Float(value) => Data::Float(*value),
            Value::Str(text) => Data::Str(text.clone()),
            Value::List(items) => Data::List(items.iter().map(Node::from).collect()),
            Value::Map(entries) => {
                let entry = |(key, value): &(String, Value)| Entry { key: key.clone(), at, value: value.into() };
                Data::Map(entries.iter().map(entry).collect())
            }
        };
        Node { data, at }
    }
}

impl From<&Node> for Value {
    fn from(node: &Node) -> Value {
        match &node.data {
            Data::Null => Value::Null,
            Data::Bool(value) => Value::Bool(*value),
            Data::Int(value) => Value::Int(*value),
            Data::Float(value) => Value::Float(*value),
            Data::Str(text) => Value::Str(text.clone()),
            Data::List(items) => Value::List(items.iter().map(Value::from).collect()),
            Data::Map(entries) => Value::Map(entries.iter().map(|e| (e.key.clone(), Value::from(&e.value))).collect()),
        }
    }
}

impl Node {
    /// On one line, cut to a sensible length.
    pub fn shown(&self) -> String {
        const LONGEST: usize = 80;
        match &self.data {
            Data::List(items) if items.len() > 4 => format!("a list of {}", items.len()),
            Data::Map(entries) if entries.len() > 2 => format!("a map of {}", entries.len()),
            _ => {
                let text = Value::from(self).to_string();
                match text.char_indices().nth(LONGEST) {
                    Some((end, _)) => format!("{}…", &text[..end]),
                    None => text,
                }
            }
        }
    }
}
