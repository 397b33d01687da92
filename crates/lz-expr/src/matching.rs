//! The `match:` form of a policy rule, as expression text.

use crate::Type;
use crate::error::{ExprError, ExprErrorKind};
use crate::lex::read_number;
use crate::scope::Scope;

/// A value of a match map, as a configuration file gives it.
#[derive(Clone, Debug, PartialEq)]
pub enum MatchValue<'a> {
    /// A string: a plain value, a comparison (`">=90"`) or a glob (`"a.*"`).
    Str(&'a str),
    /// An integer to be equal to.
    Int(i64),
    /// A float to be equal to.
    Float(f64),
    /// A bool to be equal to.
    Bool(bool),
    /// Any of these; not empty, and without lists in it.
    List(Vec<MatchValue<'a>>),
}

impl MatchValue<'_> {
    /// As a configuration file would show it.
    fn shown(&self) -> String {
        match self {
            MatchValue::Str(text) => format!("\"{text}\""),
            MatchValue::Int(value) => value.to_string(),
            MatchValue::Float(value) => format!("{value:?}"),
            MatchValue::Bool(value) => value.to_string(),
            MatchValue::List(items) if items.is_empty() => "[]".into(),
            MatchValue::List(_) => "[..]".into(),
        }
    }
}

/// One test of one field.
struct Test {
    operator: &'static str,
    /// The right side, as expression text.
    operand: String,
}

/// The expression text that holds when every entry does.
pub(crate) fn render<'a>(
    entries: impl IntoIterator<Item = (&'a str, MatchValue<'a>)>,
    scope: &Scope,
) -> Result<String, ExprError> {
    let clauses =
        entries.into_iter().map(|(field, value)| clause(field, &value, scope)).collect::<Result<Vec<_>, _>>()?;
    if clauses.is_empty() {
        return Ok("true".into());
    }
    Ok(clauses.join(" and "))
}

fn clause(field: &str, value: &MatchValue<'_>, scope: &Scope) -> Result<String, ExprError> {
    let Some(slot) = scope.slot(field) else {
        let kind =
            ExprErrorKind::UnknownName { name: field.to_owned(), nearest: scope.nearest(field).map(str::to_owned) };
        return Err(ExprError::at(kind, &entry_text(field, value), 0));
    };
    let ty = scope.ty(slot);
    let read = |value: &MatchValue<'_>| Test::read(value, ty).map_err(|reason| bad_value(field, value, reason));
    let MatchValue::List(items) = value else {
        return Ok(read(value)?.on(field));
    };
    if items.is_empty() {
        return Err(bad_value(field, value, "an empty list matches nothing"));
    }
    let tests = items.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    if ty != Type::Bool && tests.iter().all(|test| test.operator == "==") {
        let operands: Vec<_> = tests.into_iter().map(|test| test.operand).collect();
        return Ok(format!("{field} in [{}]", operands.join(", ")));
    }
    let tests: Vec<_> = tests.iter().map(|test| test.on(field)).collect();
    Ok(format!("({})", tests.join(" or ")))
}

fn entry_text(field: &str, value: &MatchValue<'_>) -> String {
    format!("{field}: {}", value.shown())
}

fn bad_value(field: &str, value: &MatchValue<'_>, reason: &'static str) -> ExprError {
    let kind = ExprErrorKind::BadMatchValue { field: field.to_owned(), value: value.shown(), reason };
    ExprError::at(kind, &entry_text(field, value), field.len() + 2)
}

impl Test {
    fn on(&self, field: &str) -> String {
        let Test { operator, operand } = self;
        match *operator {
            "not matches" => format!("not {field} matches {operand}"),
            operator => format!("{field} {operator} {operand}"),
        }
    }

    fn equals(operand: String) -> Test {
        Test { operator: "==", operand }
    }

    fn read(value: &MatchValue<'_>, ty: Type) -> Result<Test, &'static str> {
        match (value, ty) {
            (MatchValue::List(_), _) => Err("lists do not nest"),
            (MatchValue::Str(text), _) => Test::read_text(text, ty),
            (MatchValue::Bool(value), Type::Bool) => Ok(Test::equals(value.to_string())),
            (MatchValue::Int(value), Type::Int | Type::Float) => Ok(Test::equals(value.to_string())),
            (MatchValue::Float(value), Type::Int | Type::Float) if value.is_finite() => {
                Ok(Test::equals(format!("{value:?}")))
            }
            (_, ty) => Err(wanted(ty)),
        }
    }

    fn read_text(text: &str, ty: Type) -> Result<Test, &'static str> {
        // Longest first: `>=` starts with `>`.
        let operators = ["==", "!=", "<=", ">=", "<", ">"];
        let trimmed = text.trim();
        let operator = operators.into_iter().find(|op| trimmed.starts_with(op));
        let operand = match operator {
            Some(operator) => trimmed[operator.len()..].trim(),
            None if ty == Type::Str => text,
            None => trimmed,
        };
        let operator = operator.unwrap_or("==");
        let ordered = !matches!(operator, "==" | "!=");
        match ty {
            _ if trimmed.starts_with('=') && !trimmed.starts_with("==") => {
                Err("`=` is not an operator; write `==`, or the value alone")
            }
            Type::Int | Type::Float => {
                let unsigned = operand.strip_prefix('-').unwrap_or(operand);
                read_number(unsigned).ok_or(wanted(ty))?;
                let operand = operand.to_owned();
                Ok(Test { operator, operand })
            }
            Type::Bool | Type::Str if ordered => Err("only numbers have an order"),
            Type::Bool => match operand {
                "true" | "True" | "TRUE" | "false" | "False" | "FALSE" => {
                    Ok(Test { operator, operand: operand.to_owned() })
                }
                _ => Err(wanted(ty)),
            },
            Type::Str => {
                let operator = match (operator, operand.contains(['*', '?'])) {
                    ("!=", true) => "not matches",
                    (_, true) => "matches",
                    (operator, false) => operator,
                };
                let operand = quoted(operand);
                Ok(Test { operator, operand })
            }
        }
    }
}

fn wanted(ty: Type) -> &'static str {
    match ty {
        Type::Bool => "the field is a bool and takes true or false",
        Type::Int => "the field is an int and takes a number, or a comparison such as `>=8`",
        Type::Float => "the field is a float and takes a number, or a comparison such as `>=0.5`",
        Type::Str => "the field is a str and takes a string",
    }
}

/// A string literal that reads back as `text`.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('\'', "\\'");
    format!("'{escaped}'")
}
