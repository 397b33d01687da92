//! YAML into a tree, within limits: one document, no anchors, aliases or tags, no key twice.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span};

use crate::node::{Data, Entry, Node};
use crate::origin::Position;
use crate::problem::ProblemKind;
use crate::read::MAX_PROBLEMS;

/// How deep lists and maps may nest.
pub const MAX_DEPTH: usize = 32;

/// What is wrong with a text, and where.
#[derive(Debug, PartialEq)]
pub(crate) struct Flaw {
    pub at: Position,
    pub key: String,
    pub value: Option<String>,
    pub kind: ProblemKind,
}

/// The document of a text; an empty one is null. Every flaw that does not end the reading is
/// reported along with the tree.
pub(crate) fn parse(text: &str) -> (Option<Node>, Vec<Flaw>) {
    let options = granit_parser::options! {
        flow_nesting_limit: MAX_DEPTH + 1,
        block_nesting_limit: MAX_DEPTH + 1,
        emit_unresolved_aliases: true,
    };
    let mut builder = Builder::default();
    for next in Parser::new_from_str_with_options(text, options) {
        let step = match next {
            Ok((event, span)) => builder.event(event, position(&span)),
            Err(error) => Err(Box::new(Flaw::of(&error))),
        };
        if let Err(flaw) = step {
            builder.flaws.push(*flaw);
            return (None, builder.flaws);
        }
    }
    let root = builder.root.unwrap_or(Node { data: Data::Null, at: Position { line: 1, column: 1 } });
    (Some(root), builder.flaws)
}

fn position(span: &Span) -> Position {
    Position { line: span.start.line(), column: span.start.col() + 1 }
}

impl Flaw {
    fn of(error: &ScanError) -> Flaw {
        use granit_parser::ErrorKind;
        let mark = error.marker();
        let kind = match error.kind() {
            ErrorKind::RecursionLimitExceeded => ProblemKind::TooDeep { limit: MAX_DEPTH },
            _ => ProblemKind::Syntax { message: error.info() },
        };
        let at = Position { line: mark.line(), column: mark.col() + 1 };
        Flaw { at, key: String::new(), value: None, kind }
    }
}

/// A list or map that is not closed yet.
enum Open {
    List(Position, Vec<Node>),
    Map { at: Position, entries: Vec<Entry>, lines: HashMap<String, usize>, key: Option<(String, Position)> },
}

#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    root: Option<Node>,
    documents: usize,
    flaws: Vec<Flaw>,
}

impl Builder {
    fn event(&mut self, event: Event<'_>, at: Position) -> Result<(), Box<Flaw>> {
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    let message = "a second document; a file holds one".into();
                    return Err(self.flaw(at, None, ProblemKind::Syntax { message }));
                }
                Ok(())
            }
            Event::Alias(_) | Event::UnresolvedAlias(_) => Err(self.flaw(at, None, ProblemKind::Alias)),
            Event::Scalar(text, style, anchor, tag) => {
                self.refuse(anchor, tag.is_some(), at)?;
                self.scalar(&text, style, at);
                Ok(())
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.refuse(anchor, tag.is_some(), at)?;
                self.enter(Open::List(at, Vec::new()), at)
            }
            Event::MappingStart(_, anchor, tag) => {
                self.refuse(anchor, tag.is_some(), at)?;
                self.enter(Open::Map { at, entries: Vec::new(), lines: HashMap::new(), key: None }, at)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                match self.open.pop() {
                    Some(Open::List(at, items)) => self.put(Node { data: Data::List(items), at }),
                    Some(Open::Map { at, entries, .. }) => self.put(Node { data: Data::Map(entries), at }),
                    None => {}
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn flaw(&self, at: Position, value: Option<String>, kind: ProblemKind) -> Box<Flaw> {
        Box::new(Flaw { at, key: self.path(), value, kind })
    }

    fn note(&mut self, flaw: Flaw) {
        if self.flaws.len() < MAX_PROBLEMS {
            self.flaws.push(flaw);
        }
    }

    fn refuse(&self, anchor: usize, tagged: bool, at: Position) -> Result<(), Box<Flaw>> {
        match (anchor, tagged) {
            (0, false) => Ok(()),
            (0, true) => Err(self.flaw(at, None, ProblemKind::Tag)),
            _ => Err(self.flaw(at, None, ProblemKind::Alias)),
        }
    }

    fn enter(&mut self, open: Open, at: Position) -> Result<(), Box<Flaw>> {
        if self.open.len() >= MAX_DEPTH {
            return Err(self.flaw(at, None, ProblemKind::TooDeep { limit: MAX_DEPTH }));
        }
        if let Some(Open::Map { key: None, .. }) = self.open.last() {
            let message = "a list or map as a key; keys are names".into();
            return Err(self.flaw(at, None, ProblemKind::Syntax { message }));
        }
        self.open.push(open);
        Ok(())
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, at: Position) {
        if let Some(Open::Map { key: key @ None, .. }) = self.open.last_mut() {
            *key = Some((text.to_owned(), at));
            return;
        }
        let data = if style == ScalarStyle::Plain { plain(text) } else { Some(Data::Str(text.to_owned())) };
        let data = data.unwrap_or_else(|| {
            let (expected, found) = (format!("an integer from {} to {}", i64::MIN, i64::MAX), cut(text));
            let kind = ProblemKind::WrongValue { expected, found: found.clone(), nearest: None };
            let flaw = self.flaw(at, Some(found), kind);
            self.note(*flaw);
            Data::Int(0)
        });
        self.put(Node { data, at });
    }

    fn put(&mut self, node: Node) {
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List(_, items)) => items.push(node),
            Some(Open::Map { entries, lines, key, .. }) => {
                let Some((key, at)) = key.take() else { return };
                match lines.get(&key).copied() {
                    None => {
                        lines.insert(key.clone(), at.line);
                        entries.push(Entry { key, at, value: node });
                    }
                    Some(first) => {
                        let mut flaw = self.flaw(at, None, ProblemKind::DuplicateKey { first });
                        flaw.key = join(&flaw.key, &key);
                        self.note(*flaw);
                    }
                }
            }
        }
    }

    /// The key path of what is being read.
    fn path(&self) -> String {
        let mut path = String::new();
        for open in &self.open {
            match open {
                Open::List(_, items) => path = format!("{path}[{}]", items.len()),
                Open::Map { key: Some((key, _)), .. } => path = join(&path, key),
                Open::Map { key: None, .. } => {}
            }
        }
        path
    }
}

/// A key below a path.
pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A scalar without quotes, by YAML's core schema; `None` for an integer that does not fit.
fn plain(text: &str) -> Option<Data> {
    let data = match text {
        "" | "~" | "null" | "Null" | "NULL" => Data::Null,
        "true" | "True" | "TRUE" => Data::Bool(true),
        "false" | "False" | "FALSE" => Data::Bool(false),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => Data::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => Data::Float(f64::NEG_INFINITY),
        ".nan" | ".NaN" | ".NAN" => Data::Float(f64::NAN),
        _ => return number(text).unwrap_or_else(|| Some(Data::Str(text.to_owned()))),
    };
    Some(data)
}

/// `None` for no number, `Some(None)` for an integer that does not fit.
fn number(text: &str) -> Option<Option<Data>> {
    let digits = |text: &str, radix| !text.is_empty() && text.chars().all(|c| c.is_digit(radix));
    for (prefix, radix) in [("0x", 16), ("0o", 8)] {
        if let Some(rest) = text.strip_prefix(prefix).filter(|rest| digits(rest, radix)) {
            return Some(i64::from_str_radix(rest, radix).ok().map(Data::Int));
        }
    }
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits(unsigned, 10) {
        return Some(text.parse().ok().map(Data::Int));
    }
    let starts = unsigned.trim_start_matches('.').starts_with(|c: char| c.is_ascii_digit());
    let made_of = unsigned.chars().all(|c| matches!(c, '0'..='9' | '.' | 'e' | 'E' | '+' | '-'));
    (starts && made_of).then(|| text.parse().ok()).flatten().map(|value| Some(Data::Float(value)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::value::Value;

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            prop::num::f64::NORMAL.prop_map(Value::Float),
            any::<String>().prop_map(Value::Str),
            "[a-z_.]{0,8}".prop_map(Value::Str),
        ];
        leaf.prop_recursive(5, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::List),
                prop::collection::btree_map("[a-z_. ]{0,6}|.{1,3}", inner, 0..6)
                    .prop_map(|m| Value::Map(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(value in value()) {
            let text = value.to_string();
            let (root, flaws) = parse(&text);
            prop_assert_eq!(flaws, vec![], "{}", text);
            prop_assert_eq!(Value::from(&root.unwrap()), value, "{}", text);
        }
    }

    #[test]
    fn scalars_without_quotes_follow_the_core_schema() {
        let read = |text: &str| plain(text);
        for (text, data) in [
            ("12", Data::Int(12)),
            ("-0", Data::Int(0)),
            ("+7", Data::Int(7)),
            ("010", Data::Int(10)),
            ("0x1F", Data::Int(31)),
            ("0o17", Data::Int(15)),
            ("9223372036854775807", Data::Int(i64::MAX)),
            ("1.5", Data::Float(1.5)),
            (".5", Data::Float(0.5)),
            ("1e3", Data::Float(1000.0)),
            ("-.inf", Data::Float(f64::NEG_INFINITY)),
            ("~", Data::Null),
            ("TRUE", Data::Bool(true)),
        ] {
            assert_eq!(read(text), Some(data), "{text}");
        }
        for text in ["yes", "off", "1_000", "1.2.3", "0x", "inf", "nan", "e5", "-", ".", "1e", "12a", "tRue"] {
            assert_eq!(read(text), Some(Data::Str(text.into())), "{text}");
        }
        assert_eq!(read("9223372036854775808"), None);
    }

    #[test]
    fn places_are_counted_from_one() {
        let (root, _) = parse("# comment\na:\n  - b: é\n    c: [1, 2]\n");
        let Data::Map(top) = root.unwrap().data else { panic!() };
        assert_eq!(top[0].at, Position { line: 2, column: 1 });
        let Data::List(items) = &top[0].value.data else { panic!() };
        let Data::Map(inner) = &items[0].data else { panic!() };
        assert_eq!(inner[0].at, Position { line: 3, column: 5 });
        assert_eq!(inner[0].value.at, Position { line: 3, column: 8 });
        let Data::List(numbers) = &inner[1].value.data else { panic!() };
        assert_eq!(numbers[1].at, Position { line: 4, column: 12 });
    }
}
