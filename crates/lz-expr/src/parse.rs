//! Tokens to a tree, by precedence climbing.

use crate::MAX_NESTING;
use crate::MAX_SOURCE_BYTES;
use crate::ast::{Arith, Ast, AstKind, ChainLink};
use crate::error::{ExprError, ExprErrorKind};
use crate::lex::{Token, TokenKind, tokens};

/// The tree of a whole source.
pub(crate) fn parse(text: &str) -> Result<Ast, ExprError> {
    if text.len() > MAX_SOURCE_BYTES {
        let kept = &text[..text.floor_char_boundary(MAX_SOURCE_BYTES)];
        let kind = ExprErrorKind::TooLong { length: text.len(), limit: MAX_SOURCE_BYTES };
        return Err(ExprError::at(kind, kept, kept.len()));
    }
    let mut parser = Parser { text, tokens: tokens(text)?, next: 0, depth: 0 };
    let ast = parser.expression(Level::Or)?;
    match parser.kind() {
        TokenKind::End => Ok(ast),
        _ => Err(parser.unexpected("an operator or the end")),
    }
}

/// How tightly an operator binds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Or,
    And,
    Not,
    Compare,
    Add,
    Multiply,
    Prefix,
}

impl Level {
    fn of_arith(op: Arith) -> Level {
        match op {
            Arith::Add | Arith::Sub => Level::Add,
            Arith::Mul | Arith::Div | Arith::Rem => Level::Multiply,
        }
    }

    /// The level of the right operand of a left-associative operator.
    fn tighter(self) -> Level {
        match self {
            Level::Or => Level::And,
            Level::And => Level::Not,
            Level::Not => Level::Compare,
            Level::Compare => Level::Add,
            Level::Add => Level::Multiply,
            Level::Multiply | Level::Prefix => Level::Prefix,
        }
    }
}

struct Parser<'t> {
    text: &'t str,
    tokens: Vec<Token>,
    next: usize,
    depth: usize,
}

impl Parser<'_> {
    fn token(&self) -> &Token {
        // `advance` never moves past the final End.
        &self.tokens[self.next]
    }

    fn kind(&self) -> &TokenKind {
        &self.token().kind
    }

    fn at(&self) -> usize {
        self.token().start
    }

    fn advance(&mut self) {
        self.next = (self.next + 1).min(self.tokens.len() - 1);
    }

    fn error(&self, kind: ExprErrorKind, at: usize) -> ExprError {
        ExprError::at(kind, self.text, at)
    }

    fn unexpected(&self, expected: &'static str) -> ExprError {
        let token = self.token();
        let found = match token.kind {
            TokenKind::End => "end of expression".to_owned(),
            _ => format!("`{}`", &self.text[token.start..token.end]),
        };
        let kind = ExprErrorKind::UnexpectedToken { found, expected };
        self.error(kind, token.start)
    }

    fn expect(&mut self, kind: TokenKind, expected: &'static str) -> Result<(), ExprError> {
        if *self.kind() != kind {
            return Err(self.unexpected(expected));
        }
        self.advance();
        Ok(())
    }

    /// The node, unless it is too tall. Operators that follow one another nest
    /// to the left without `nested`, as in `(a * b) + c`; this is where they count.
    fn node(&self, at: usize, height: usize, kind: AstKind) -> Result<Ast, ExprError> {
        if height > MAX_NESTING {
            let limit = MAX_NESTING;
            return Err(self.error(ExprErrorKind::TooDeep { limit }, at));
        }
        Ok(Ast { at, height, kind })
    }

    /// Runs `inner` one level deeper; `at` is what the error points to.
    fn nested<T>(&mut self, at: usize, inner: impl FnOnce(&mut Self) -> Result<T, ExprError>) -> Result<T, ExprError> {
        if self.depth == MAX_NESTING {
            let limit = MAX_NESTING;
            return Err(self.error(ExprErrorKind::TooDeep { limit }, at));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// The level of the operator at the current token, if it is one.
    fn infix(&self) -> Option<Level> {
        match self.kind() {
            TokenKind::Or => Some(Level::Or),
            TokenKind::And => Some(Level::And),
            TokenKind::Cmp(_) | TokenKind::In | TokenKind::Matches => Some(Level::Compare),
            TokenKind::Not if self.tokens[self.next + 1].kind == TokenKind::In => Some(Level::Compare),
            TokenKind::Arith(op) => Some(Level::of_arith(*op)),
            _ => None,
        }
    }

    fn expression(&mut self, least: Level) -> Result<Ast, ExprError> {
        let mut left = self.prefix(least)?;
        // The level of the chain `left` is, if this loop built it: only then
        // may it be extended (a parenthesised chain stays whole).
        let mut open: Option<Level> = None;
        while let Some(level) = self.infix() {
            if level < least {
                break;
            }
            let extend = open == Some(level);
            if extend && level == Level::Compare {
                return Err(self.error(ExprErrorKind::ChainedComparison, self.at()));
            }
            left = self.operator(left, level, extend)?;
            open = Some(level);
        }
        Ok(left)
    }

    fn operator(&mut self, left: Ast, level: Level, extend: bool) -> Result<Ast, ExprError> {
        let Ast { at, height, .. } = left;
        let op_at = self.at();
        let op = self.kind().clone();
        self.advance();
        match op {
            TokenKind::In => return self.membership(left, false),
            TokenKind::Not => {
                self.advance();
                return self.membership(left, true);
            }
            _ => {}
        }
        let right = self.nested(op_at, |p| p.expression(level.tighter()))?;
        let height = match extend {
            true => height.max(right.height + 1),
            false => height.max(right.height) + 1,
        };
        let kind = match (op, left.kind) {
            (TokenKind::Or, AstKind::Any(mut parts)) if extend => {
                parts.push(right);
                AstKind::Any(parts)
            }
            (TokenKind::And, AstKind::All(mut parts)) if extend => {
                parts.push(right);
                AstKind::All(parts)
            }
            (TokenKind::Arith(op), AstKind::Chain(first, mut links)) if extend => {
                links.push(ChainLink { op, op_at, operand: right });
                AstKind::Chain(first, links)
            }
            (op, kind) => {
                let left = Ast { kind, ..left };
                binary(op, op_at, left, right)
            }
        };
        self.node(at, height, kind)
    }

    fn membership(&mut self, item: Ast, negated: bool) -> Result<Ast, ExprError> {
        let bracket = self.at();
        self.expect(TokenKind::LeftBracket, "a list such as `[a, b]`")?;
        let list = self.nested(bracket, |p| p.separated(TokenKind::RightBracket, "`,` or `]`"))?;
        let height = tallest(&list).max(item.height) + 1;
        let at = item.at;
        let kind = AstKind::In { negated, item: Box::new(item), list };
        self.node(at, height, kind)
    }

    /// One or more expressions between commas, and the closing token.
    fn separated(&mut self, close: TokenKind, expected: &'static str) -> Result<Vec<Ast>, ExprError> {
        let mut items = vec![self.expression(Level::Or)?];
        while *self.kind() == TokenKind::Comma {
            self.advance();
            items.push(self.expression(Level::Or)?);
        }
        self.expect(close, expected)?;
        Ok(items)
    }

    fn prefix(&mut self, least: Level) -> Result<Ast, ExprError> {
        let at = self.at();
        let kind = match self.kind().clone() {
            TokenKind::Bool(value) => AstKind::Bool(value),
            TokenKind::Float(value) => AstKind::Float(value),
            TokenKind::Str(value) => AstKind::Str(value),
            TokenKind::Int(value) => {
                let value = i64::try_from(value).map_err(|_| self.too_large())?;
                AstKind::Int(value)
            }
            TokenKind::Name(name) => {
                if self.tokens[self.next + 1].kind == TokenKind::LeftParen {
                    return self.call(name, at);
                }
                AstKind::Name(name)
            }
            TokenKind::LeftParen => return self.parenthesised(at),
            TokenKind::Not => {
                self.advance();
                // `a == !b`: opposite a tighter operator, `not` binds as tightly.
                let inner = self.nested(at, |p| p.expression(least.max(Level::Not)))?;
                return self.node(at, inner.height + 1, AstKind::Not(Box::new(inner)));
            }
            TokenKind::Arith(Arith::Sub) => return self.negative(at),
            _ => return Err(self.unexpected("a value")),
        };
        self.advance();
        self.node(at, 0, kind)
    }

    fn call(&mut self, name: String, at: usize) -> Result<Ast, ExprError> {
        self.advance();
        self.advance();
        let arguments = self.nested(at, Parser::arguments)?;
        let height = tallest(&arguments) + 1;
        self.node(at, height, AstKind::Call(name, arguments))
    }

    fn parenthesised(&mut self, at: usize) -> Result<Ast, ExprError> {
        self.advance();
        let inner = self.nested(at, |p| p.expression(Level::Or))?;
        self.expect(TokenKind::RightParen, "an operator or `)`")?;
        self.node(at, inner.height + 1, inner.kind)
    }

    fn arguments(&mut self) -> Result<Vec<Ast>, ExprError> {
        if *self.kind() == TokenKind::RightParen {
            self.advance();
            return Ok(Vec::new());
        }
        self.separated(TokenKind::RightParen, "`,` or `)`")
    }

    fn negative(&mut self, at: usize) -> Result<Ast, ExprError> {
        self.advance();
        // A literal takes its sign here: i64::MIN has no positive counterpart.
        if let TokenKind::Int(magnitude) = *self.kind() {
            self.advance();
            let value = 0i64.wrapping_sub_unsigned(magnitude);
            return self.node(at, 0, AstKind::Int(value));
        }
        let inner = self.nested(at, |p| p.expression(Level::Prefix))?;
        self.node(at, inner.height + 1, AstKind::Neg(Box::new(inner)))
    }

    fn too_large(&self) -> ExprError {
        let token = self.token();
        let text = self.text[token.start..token.end].to_owned();
        self.error(ExprErrorKind::BadNumber { text }, token.start)
    }
}

fn tallest(items: &[Ast]) -> usize {
    items.iter().map(|item| item.height).max().unwrap_or(0)
}

/// A binary operator that does not extend a chain.
fn binary(op: TokenKind, op_at: usize, left: Ast, right: Ast) -> AstKind {
    match op {
        TokenKind::Or => AstKind::Any(vec![left, right]),
        TokenKind::And => AstKind::All(vec![left, right]),
        TokenKind::Arith(op) => AstKind::Chain(Box::new(left), vec![ChainLink { op, op_at, operand: right }]),
        TokenKind::Cmp(op) => AstKind::Compare { op, op_at, sides: Box::new((left, right)) },
        _ => AstKind::Matches { op_at, sides: Box::new((left, right)) },
    }
}
