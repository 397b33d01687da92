//! Conditions and operations of rules, checked where they are written.

use lz_select::{Condition, PolicyError, RuleSpec};

use super::reader::Reader;
use crate::node::{Data, Node};
use crate::operation;
use crate::origin::Position;
use crate::problem::ProblemKind;

/// Whether a rule can be used; what is wrong is reported at a place and key.
pub(super) fn verify(rule: &RuleSpec, at: Position, key: &str, reader: &mut Reader<'_>) -> bool {
    if reader.is_full() {
        return false;
    }
    match rule.check() {
        Ok(()) => return true,
        Err(PolicyError::UnknownOperation { name, nearest, .. }) => {
            reader.report(at, key, Some(name.clone()), ProblemKind::UnknownOperation { name, nearest });
        }
        Err(PolicyError::BadCondition { error, .. }) => {
            let kind = ProblemKind::BadExpression {
                message: error.kind.to_string(),
                column: error.column,
                text: shortened(&error.text),
                hint: error.kind.hint(),
            };
            reader.report(at, key, Some(shortened(&error.text)), kind);
        }
    }
    false
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// An operation, alias or function, or a glob over their names.
pub(super) fn operation(node: &Node, key: &str, reader: &mut Reader<'_>) -> Option<String> {
    let name = reader.text(node, key, "the name of an operation")?;
    match operation::canonical(name) {
        Ok(canonical) => Some(canonical),
        Err(nearest) => {
            let kind = ProblemKind::UnknownOperation { name: name.to_owned(), nearest };
            reader.report(node.at, key, Some(name.to_owned()), kind);
            None
        }
    }
}

/// An expression, or a list of expressions that must all hold.
pub(super) fn expressions(node: &Node, key: &str, reader: &mut Reader<'_>) -> Option<Vec<(String, Position, String)>> {
    let one = |node: &Node, key: String, reader: &mut Reader<'_>| {
        reader.text(node, &key, "an expression").map(|text| (text.to_owned(), node.at, key))
    };
    match &node.data {
        Data::List(items) => items.iter().enumerate().map(|(i, n)| one(n, format!("{key}[{i}]"), reader)).collect(),
        _ => one(node, key.to_owned(), reader).map(|text| vec![text]),
    }
}

/// All of some conditions.
pub(super) fn all(mut conditions: Vec<Condition>) -> Condition {
    match conditions.len() {
        0 => Condition::Always,
        1 => conditions.remove(0),
        _ => Condition::All(conditions),
    }
}
