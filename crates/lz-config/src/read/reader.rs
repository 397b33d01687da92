//! Typed values out of a tree, every problem with its place and key.

use lz_model::nearest;

use super::limits::{MAX_NAMES, MAX_PROBLEMS};
use crate::declare::{Fixed, Kind};
use crate::node::{Data, Entry, Node};
use crate::origin::{Origin, Position, Source};
use crate::problem::{Problem, ProblemKind};
use crate::value::Value;
use crate::yaml::join;

/// Reads values, and collects what is wrong with them.
pub(crate) struct Reader<'a> {
    pub source: &'a Source,
    pub problems: Vec<Problem>,
}

impl<'a> Reader<'a> {
    pub fn new(source: &'a Source) -> Reader<'a> {
        Reader { source, problems: Vec::new() }
    }

    pub fn at(&self, at: Position) -> Origin {
        self.source.at(at)
    }

    /// Whether enough is wrong: looking further would only take time.
    pub fn is_full(&self) -> bool {
        self.problems.len() >= MAX_PROBLEMS
    }

    pub fn report(&mut self, at: Position, key: &str, value: Option<String>, kind: ProblemKind) {
        if !self.is_full() {
            self.problems.push(Problem { at: self.at(at), key: key.to_owned(), value, kind });
        }
    }

    /// A value that is not what was expected.
    pub fn wrong(&mut self, node: &Node, key: &str, expected: impl Into<String>) {
        self.wrong_near(node, key, expected, None);
    }

    pub fn wrong_near(&mut self, node: &Node, key: &str, expected: impl Into<String>, nearest: Option<String>) {
        let found = node.shown();
        let kind = ProblemKind::WrongValue { expected: expected.into(), found: found.clone(), nearest };
        self.report(node.at, key, Some(found), kind);
    }

    /// A key that is none of `known`.
    pub fn unknown<'k>(&mut self, entry: &Entry, path: &str, known: impl IntoIterator<Item = &'k str>) {
        if !self.is_full() {
            let nearest = nearest(&entry.key, known).map(str::to_owned);
            let key = join(path, &entry.key);
            self.report(entry.at, &key, Some(entry.value.shown()), ProblemKind::UnknownKey { nearest });
        }
    }

    /// Whether there are more of something than are read; then that is reported.
    pub fn too_many(&mut self, at: Position, key: &str, count: usize, limit: usize) -> bool {
        if count > limit {
            self.contradiction(at, key, format!("{count} entries; at most {limit} are read"));
        }
        count > limit
    }

    pub fn contradiction(&mut self, at: Position, key: &str, message: impl Into<String>) {
        self.report(at, key, None, ProblemKind::Contradiction { message: message.into() });
    }

    pub fn missing(&mut self, node: &Node, path: &str, key: &'static str, expected: &'static str) {
        self.report(node.at, path, None, ProblemKind::MissingKey { key, expected });
    }

    pub fn map<'n>(&mut self, node: &'n Node, key: &str, expected: &str) -> Option<&'n [Entry]> {
        match &node.data {
            Data::Map(entries) => Some(entries),
            // `locks:` with nothing below it.
            Data::Null => Some(&[]),
            _ => {
                self.wrong(node, key, expected);
                None
            }
        }
    }

    pub fn list<'n>(&mut self, node: &'n Node, key: &str, expected: &str) -> Option<&'n [Node]> {
        match &node.data {
            Data::List(items) => Some(items),
            Data::Null => Some(&[]),
            _ => {
                self.wrong(node, key, expected);
                None
            }
        }
    }

    pub fn bool(&mut self, node: &Node, key: &str) -> Option<bool> {
        match node.data {
            Data::Bool(value) => Some(value),
            _ => {
                self.wrong(node, key, Kind::Bool.expected());
                None
            }
        }
    }

    pub fn int(&mut self, node: &Node, key: &str, min: i64, max: i64) -> Option<i64> {
        match node.data {
            Data::Int(value) if (min..=max).contains(&value) => Some(value),
            _ => {
                self.wrong(node, key, Kind::Int { min, max }.expected());
                None
            }
        }
    }

    pub fn number(&mut self, node: &Node, key: &str, min: i64, max: i64) -> Option<f64> {
        let value = match node.data {
            Data::Int(value) => Some(value as f64),
            Data::Float(value) => Some(value),
            _ => None,
        };
        let within = value.filter(|value| (min as f64..=max as f64).contains(value));
        if within.is_none() {
            self.wrong(node, key, Kind::Number { min, max }.expected());
        }
        within
    }

    pub fn text<'n>(&mut self, node: &'n Node, key: &str, expected: &str) -> Option<&'n str> {
        match &node.data {
            Data::Str(text) if !text.trim().is_empty() => Some(text),
            Data::Str(_) | Data::Null | Data::List(_) | Data::Map(_) => {
                self.wrong(node, key, expected);
                None
            }
            Data::Bool(_) | Data::Int(_) | Data::Float(_) => {
                self.wrong(node, key, format!("{expected} (in quotes)"));
                None
            }
        }
    }

    /// A name, or a list of names.
    pub fn names(&mut self, node: &Node, key: &str, expected: &str) -> Option<Vec<String>> {
        match &node.data {
            Data::List(items) if items.len() > MAX_NAMES => {
                self.wrong(node, key, format!("at most {MAX_NAMES} names"));
                None
            }
            Data::List(items) => {
                let named = items
                    .iter()
                    .enumerate()
                    .map(|(i, item)| self.text(item, &format!("{key}[{i}]"), "a name").map(str::to_owned));
                named.collect()
            }
            Data::Str(_) => self.text(node, key, expected).map(|name| vec![name.to_owned()]),
            _ => {
                self.wrong(node, key, expected);
                None
            }
        }
    }

    pub fn choice(&mut self, node: &Node, key: &str, words: &'static [&'static str]) -> Option<&'static str> {
        if let Data::Str(text) = &node.data
            && let Some(word) = words.iter().find(|word| *word == text)
        {
            return Some(word);
        }
        let near = match &node.data {
            Data::Str(text) => nearest(text, words.iter().copied()).map(str::to_owned),
            _ => None,
        };
        self.wrong_near(node, key, Kind::Choice(words).expected(), near);
        None
    }

    /// The one value that is supported.
    fn only(&mut self, node: &Node, key: &str, value: Fixed, why: &'static str) -> Option<Value> {
        let is_it = match (&node.data, value) {
            (Data::Bool(given), Fixed::False) => !given,
            (Data::Str(given), Fixed::Word(word)) => given == word,
            _ => false,
        };
        if !is_it {
            let (found, only) = (node.shown(), value.text());
            self.report(node.at, key, Some(found.clone()), ProblemKind::NotSupported { found, why, only });
        }
        is_it.then(|| value.value())
    }

    /// The value of a setting.
    pub fn setting(&mut self, node: &Node, key: &str, kind: Kind) -> Option<Value> {
        match kind {
            Kind::Bool => self.bool(node, key).map(Value::Bool),
            Kind::Int { min, max } => self.int(node, key, min, max).map(Value::Int),
            Kind::Number { min, max } => self.number(node, key, min, max).map(Value::Float),
            Kind::Name | Kind::File if node.data == Data::Null => Some(Value::Null),
            Kind::Name | Kind::Path | Kind::File => self.text(node, key, &kind.expected()).map(Value::from),
            Kind::Choice(words) => self.choice(node, key, words).map(Value::from),
            Kind::Names if node.data == Data::Null => Some(Value::List(Vec::new())),
            Kind::Names => self.names(node, key, &kind.expected()).map(Value::names),
            Kind::Only { value, why } => self.only(node, key, value, why),
        }
    }
}
