//! Text to tokens.

use crate::ast::{Arith, Cmp};
use crate::error::{ExprError, ExprErrorKind};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum TokenKind {
    /// Up to 2^63 inclusive: the negative of that is still an i64.
    Int(u64),
    Float(f64),
    Str(String),
    Name(String),
    Bool(bool),
    Or,
    And,
    Not,
    In,
    Matches,
    Cmp(Cmp),
    Arith(Arith),
    LeftParen,
    RightParen,
    LeftBracket,
    RightBracket,
    Comma,
    End,
}

/// A token and the bytes of the source it covers.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) kind: TokenKind,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// The tokens of `text`, the last of which is [`TokenKind::End`].
pub(crate) fn tokens(text: &str) -> Result<Vec<Token>, ExprError> {
    let mut lexer = Lexer { text, at: 0 };
    let mut tokens = Vec::new();
    loop {
        lexer.skip_space();
        let start = lexer.at;
        let kind = lexer.next().map_err(|(kind, offset)| ExprError::at(kind, text, offset))?;
        let done = kind == TokenKind::End;
        tokens.push(Token { kind, start, end: lexer.at });
        if done {
            return Ok(tokens);
        }
    }
}

/// What went wrong and at which byte.
type Fault = (ExprErrorKind, usize);

struct Lexer<'t> {
    text: &'t str,
    at: usize,
}

impl Lexer<'_> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn skip_space(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    fn next(&mut self) -> Result<TokenKind, Fault> {
        let Some(c) = self.peek() else {
            return Ok(TokenKind::End);
        };
        match c {
            '0'..='9' => self.number(),
            'a'..='z' | 'A'..='Z' | '_' => Ok(self.word()),
            '\'' | '"' => self.string(c),
            _ => self.symbol(c),
        }
    }

    fn symbol(&mut self, c: char) -> Result<TokenKind, Fault> {
        let doubled = [
            ("||", TokenKind::Or),
            ("&&", TokenKind::And),
            ("==", TokenKind::Cmp(Cmp::Eq)),
            ("!=", TokenKind::Cmp(Cmp::Ne)),
            ("<=", TokenKind::Cmp(Cmp::Le)),
            (">=", TokenKind::Cmp(Cmp::Ge)),
        ];
        let rest = &self.text[self.at..];
        if let Some((_, kind)) = doubled.into_iter().find(|(s, _)| rest.starts_with(s)) {
            self.at += 2;
            return Ok(kind);
        }
        let kind = match c {
            '!' => TokenKind::Not,
            '<' => TokenKind::Cmp(Cmp::Lt),
            '>' => TokenKind::Cmp(Cmp::Gt),
            '+' => TokenKind::Arith(Arith::Add),
            '-' => TokenKind::Arith(Arith::Sub),
            '*' => TokenKind::Arith(Arith::Mul),
            '/' => TokenKind::Arith(Arith::Div),
            '%' => TokenKind::Arith(Arith::Rem),
            '(' => TokenKind::LeftParen,
            ')' => TokenKind::RightParen,
            '[' => TokenKind::LeftBracket,
            ']' => TokenKind::RightBracket,
            ',' => TokenKind::Comma,
            '=' => return Err((ExprErrorKind::SingleEquals, self.at)),
            found => return Err((ExprErrorKind::UnexpectedCharacter { found }, self.at)),
        };
        self.at += 1;
        Ok(kind)
    }

    fn word(&mut self) -> TokenKind {
        let bytes = self.text.as_bytes();
        let part = |i: usize| bytes.get(i).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
        let start = self.at;
        while part(self.at) || (bytes.get(self.at) == Some(&b'.') && part(self.at + 1)) {
            self.at += 1;
        }
        match &self.text[start..self.at] {
            "or" | "OR" => TokenKind::Or,
            "and" | "AND" => TokenKind::And,
            "not" | "NOT" => TokenKind::Not,
            "in" | "IN" => TokenKind::In,
            "matches" | "MATCHES" => TokenKind::Matches,
            "true" | "True" | "TRUE" => TokenKind::Bool(true),
            "false" | "False" | "FALSE" => TokenKind::Bool(false),
            name => TokenKind::Name(name.to_owned()),
        }
    }

    fn number(&mut self) -> Result<TokenKind, Fault> {
        let bytes = self.text.as_bytes();
        let start = self.at;
        while let Some(&b) = bytes.get(self.at) {
            let exponent_sign = matches!(b, b'+' | b'-')
                && matches!(bytes[self.at - 1], b'e' | b'E')
                && bytes.get(self.at + 1).is_some_and(u8::is_ascii_digit);
            if !(b.is_ascii_alphanumeric() || b == b'_' || b == b'.' || exponent_sign) {
                break;
            }
            self.at += 1;
        }
        let text = &self.text[start..self.at];
        read_number(text).ok_or_else(|| {
            let text = text.to_owned();
            (ExprErrorKind::BadNumber { text }, start)
        })
    }

    fn string(&mut self, quote: char) -> Result<TokenKind, Fault> {
        let start = self.at;
        let mut value = String::new();
        let mut chars = self.text[start..].char_indices().skip(1);
        while let Some((i, c)) = chars.next() {
            if c == quote {
                self.at = start + i + 1;
                return Ok(TokenKind::Str(value));
            }
            if c != '\\' {
                value.push(c);
                continue;
            }
            match chars.next() {
                Some((_, escaped @ ('\\' | '\'' | '"'))) => value.push(escaped),
                Some((_, found)) => return Err((ExprErrorKind::BadEscape { found }, start + i)),
                None => break,
            }
        }
        Err((ExprErrorKind::UnterminatedString, start))
    }
}

/// An unsigned number: digits with single or repeated `_` between them, then
/// optionally a fraction and an exponent.
pub(crate) fn read_number(text: &str) -> Option<TokenKind> {
    let bytes = text.as_bytes();
    let digit = |i: Option<usize>| i.and_then(|i| bytes.get(i)).is_some_and(u8::is_ascii_digit);
    for (i, b) in bytes.iter().enumerate() {
        let sound = match b {
            b'0'..=b'9' => true,
            b'_' => {
                let before = text[..i].trim_end_matches('_').len().checked_sub(1);
                let after = text.len() - text[i..].trim_start_matches('_').len();
                digit(before) && digit(Some(after))
            }
            b'.' => digit(i.checked_sub(1)) && digit(Some(i + 1)),
            b'e' | b'E' => digit(i.checked_sub(1)),
            b'+' | b'-' => i > 0 && matches!(bytes[i - 1], b'e' | b'E'),
            _ => false,
        };
        if !sound {
            return None;
        }
    }
    let plain = text.replace('_', "");
    if !plain.is_empty() && plain.bytes().all(|b| b.is_ascii_digit()) {
        let value = plain.parse::<u64>().ok()?;
        return (value <= 1 << 63).then_some(TokenKind::Int(value));
    }
    let value = plain.parse::<f64>().ok()?;
    value.is_finite().then_some(TokenKind::Float(value))
}
