//! What can go wrong when an expression is read, and when it is evaluated.

use std::fmt;

use crate::Type;

/// Why an expression could not be read, and where.
///
/// `Display` prints the message, the source line, a caret under the column,
/// and a hint when there is one; `kind` alone prints the one-line message.
#[derive(Clone, Debug, PartialEq)]
pub struct ExprError {
    /// What is wrong.
    pub kind: ExprErrorKind,
    /// Where in `text`, counted in characters from 1.
    pub column: usize,
    /// The source (cut to the limit if it was too long), or for a match map the
    /// entry at fault, written `field: value`.
    pub text: String,
}

/// What is wrong with an expression.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ExprErrorKind {
    /// A name that is no field of the scope.
    #[error("unknown name `{name}`")]
    UnknownName {
        /// The name as written.
        name: String,
        /// The known name it most likely meant.
        nearest: Option<String>,
    },
    /// The operands of a binary operator do not go together.
    #[error("`{operator}` does not take {left} and {right}")]
    TypeMismatch {
        /// The operator.
        operator: &'static str,
        /// The type on its left.
        left: Type,
        /// The type on its right.
        right: Type,
    },
    /// A single operand or argument has a type its operator does not take.
    #[error("`{operator}` takes {wanted}, not {found}")]
    BadOperand {
        /// The operator or function.
        operator: &'static str,
        /// What it takes.
        wanted: &'static str,
        /// The type it was given.
        found: Type,
    },
    /// A token where another was called for, or the end of the text.
    #[error("unexpected {found}, wanted {expected}")]
    UnexpectedToken {
        /// The token in backquotes, or "end of expression".
        found: String,
        /// What could have stood there.
        expected: &'static str,
    },
    /// A character that is part of no token.
    #[error("unexpected character `{found}`")]
    UnexpectedCharacter {
        /// The character.
        found: char,
    },
    /// The source is longer than [`MAX_SOURCE_BYTES`](crate::MAX_SOURCE_BYTES).
    #[error("{length} bytes is longer than an expression may be ({limit})")]
    TooLong {
        /// The length of the source in bytes.
        length: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// The nesting is deeper than [`MAX_NESTING`](crate::MAX_NESTING).
    #[error("nested more than {limit} levels deep")]
    TooDeep {
        /// The deepest allowed.
        limit: usize,
    },
    /// A number that is malformed or does not fit its type.
    #[error("`{text}` is not a number, or is out of range")]
    BadNumber {
        /// The number as written.
        text: String,
    },
    /// A string without its closing quote.
    #[error("the string is never closed")]
    UnterminatedString,
    /// A backslash in a string before something other than a quote or a backslash.
    #[error("`\\{found}` is not an escape")]
    BadEscape {
        /// The character after the backslash.
        found: char,
    },
    /// The whole expression has another type than was asked for.
    #[error("the expression is {found}, but {expected} is wanted")]
    WrongType {
        /// The type asked for.
        expected: Type,
        /// The type of the expression.
        found: Type,
    },
    /// A call of a function that does not exist.
    #[error("unknown function `{name}`")]
    UnknownFunction {
        /// The name as written.
        name: String,
        /// The function it most likely meant.
        nearest: Option<&'static str>,
    },
    /// A call with the wrong number of arguments.
    #[error("`{function}` takes {expected}, not {found}")]
    Arity {
        /// The function.
        function: &'static str,
        /// How many arguments it takes, in words.
        expected: &'static str,
        /// How many it was given.
        found: usize,
    },
    /// `=` where a comparison was meant.
    #[error("`=` is not an operator; `==` compares")]
    SingleEquals,
    /// `a < b < c`.
    #[error("comparisons do not chain; join them with `and`")]
    ChainedComparison,
    /// A value of a match map that does not fit its field.
    #[error("`{value}` cannot be matched against `{field}`: {reason}")]
    BadMatchValue {
        /// The field.
        field: String,
        /// The value as written.
        value: String,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl ExprErrorKind {
    /// How to put it right, when that can be told.
    pub fn hint(&self) -> Option<String> {
        match self {
            ExprErrorKind::UnknownName { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            ExprErrorKind::UnknownFunction { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            ExprErrorKind::UnexpectedToken { found, .. } if found == "`[`" => {
                Some("a list may only follow `in` or `not in`".into())
            }
            ExprErrorKind::UnexpectedCharacter { found: '&' } => Some("write `and`".into()),
            ExprErrorKind::UnexpectedCharacter { found: '|' } => Some("write `or`".into()),
            ExprErrorKind::BadEscape { .. } => Some("write `\\\\` for a backslash".into()),
            ExprErrorKind::SingleEquals => Some("write `==`".into()),
            ExprErrorKind::ChainedComparison => Some("write `1 < x and x < 3`, not `1 < x < 3`".into()),
            _ => None,
        }
    }
}

impl ExprError {
    /// The error at byte `offset` of `text`.
    pub(crate) fn at(kind: ExprErrorKind, text: &str, offset: usize) -> ExprError {
        let offset = text.floor_char_boundary(offset);
        ExprError { kind, column: text[..offset].chars().count() + 1, text: text.to_owned() }
    }

    /// The line of `text` the column is on and the column within it, with a
    /// long line cut down to the neighbourhood of the column.
    fn excerpt(&self) -> (String, usize) {
        const AROUND: usize = 60;
        let mut column = self.column - 1;
        for line in self.text.split('\n') {
            let length = line.chars().count();
            if column <= length {
                let from = column.saturating_sub(AROUND);
                let shown: String = line.chars().skip(from).take(2 * AROUND).collect();
                let before = if from > 0 { "…" } else { "" };
                let after = if from + 2 * AROUND < length { "…" } else { "" };
                let caret = column - from + before.chars().count();
                return (format!("{before}{shown}{after}"), caret);
            }
            column -= length + 1;
        }
        (String::new(), 0)
    }
}

impl fmt::Display for ExprError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, caret) = self.excerpt();
        writeln!(f, "{}", self.kind)?;
        writeln!(f, "  {line}")?;
        // Tabs are copied so that the caret stays under its column.
        let margin: String = line.chars().take(caret).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        write!(f, "  {margin}^")?;
        match self.kind.hint() {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ExprError {}

/// Why an expression has no value in some environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    /// Integer arithmetic left the range of 64 bits.
    #[error("integer overflow")]
    Overflow,
    /// A division or remainder by zero.
    #[error("division by zero")]
    DivisionByZero,
    /// The environment gave a field a value of another type than its scope did.
    #[error("the field in slot {slot} is {found}, but was declared {expected}")]
    FieldType {
        /// The slot of the field.
        slot: u16,
        /// The type in the scope.
        expected: Type,
        /// The type of the value.
        found: Type,
    },
    /// [`test`](crate::Expr::test), [`int`](crate::Expr::int) or
    /// [`float`](crate::Expr::float) on an expression of another type.
    #[error("the expression is {found}, but was evaluated as {expected}")]
    WrongType {
        /// The type asked for.
        expected: Type,
        /// The type of the expression.
        found: Type,
    },
}
