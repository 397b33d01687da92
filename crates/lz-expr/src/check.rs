//! Names to slots and untyped trees to typed ones.

use crate::Type;
use crate::ast::{Ast, AstKind, Cmp};
use crate::error::{ExprError, ExprErrorKind};
use crate::node::{BoolNode, FloatNode, IntNode, Node, StrNode};
use crate::numeric::Numbers;
use crate::scope::Scope;

/// The typed form of `ast`, which was parsed from `text`.
pub(crate) fn check(ast: &Ast, text: &str, scope: &Scope) -> Result<Node, ExprError> {
    Checker { text, scope }.node(ast)
}

pub(crate) struct Checker<'a> {
    text: &'a str,
    scope: &'a Scope,
}

pub(crate) const NUMBER: &str = "an int or a float";

impl Checker<'_> {
    pub(crate) fn error(&self, kind: ExprErrorKind, at: usize) -> ExprError {
        ExprError::at(kind, self.text, at)
    }

    pub(crate) fn mismatch(&self, operator: &'static str, at: usize, left: Type, right: Type) -> ExprError {
        let kind = ExprErrorKind::TypeMismatch { operator, left, right };
        self.error(kind, at)
    }

    pub(crate) fn bad_operand(
        &self,
        operator: &'static str,
        wanted: &'static str,
        found: Type,
        at: usize,
    ) -> ExprError {
        let kind = ExprErrorKind::BadOperand { operator, wanted, found };
        self.error(kind, at)
    }

    pub(crate) fn node(&self, ast: &Ast) -> Result<Node, ExprError> {
        Ok(match &ast.kind {
            AstKind::Bool(value) => Node::Bool(BoolNode::Const(*value)),
            AstKind::Int(value) => Node::Int(IntNode::Const(*value)),
            AstKind::Float(value) => Node::Float(FloatNode::Const(*value)),
            AstKind::Str(value) => Node::Str(StrNode::Const(value.as_str().into())),
            AstKind::Name(name) => self.name(name, ast.at)?,
            AstKind::Not(inner) => {
                let inner = self.truth(inner, "not")?;
                Node::Bool(BoolNode::Not(Box::new(inner)))
            }
            AstKind::Neg(inner) => match self.node(inner)? {
                Node::Int(node) => Node::Int(IntNode::Neg(Box::new(node)).folded()),
                Node::Float(FloatNode::Const(value)) => Node::Float(FloatNode::Const(-value)),
                Node::Float(node) => Node::Float(FloatNode::Neg(Box::new(node))),
                other => return Err(self.bad_operand("-", NUMBER, other.ty(), inner.at)),
            },
            AstKind::All(parts) => Node::Bool(BoolNode::All(self.truths(parts, "and")?)),
            AstKind::Any(parts) => Node::Bool(BoolNode::Any(self.truths(parts, "or")?)),
            AstKind::Chain(first, links) => self.chain(first, links)?,
            AstKind::Compare { op, op_at, sides } => Node::Bool(self.compare(*op, *op_at, &sides.0, &sides.1)?),
            AstKind::In { negated, item, list } => {
                let member = self.member(item, list)?;
                Node::Bool(if *negated { BoolNode::Not(Box::new(member)) } else { member })
            }
            AstKind::Matches { op_at, sides } => match self.pair(&sides.0, &sides.1)? {
                (Node::Str(text), Node::Str(pattern)) => Node::Bool(BoolNode::Glob(Box::new((text, pattern)))),
                (left, right) => {
                    return Err(self.mismatch("matches", *op_at, left.ty(), right.ty()));
                }
            },
            AstKind::Call(name, arguments) => self.call(name, arguments, ast.at)?,
        })
    }

    fn name(&self, name: &str, at: usize) -> Result<Node, ExprError> {
        let Some(slot) = self.scope.slot(name) else {
            let kind = ExprErrorKind::UnknownName {
                name: name.to_owned(),
                nearest: self.scope.nearest(name).map(str::to_owned),
            };
            return Err(self.error(kind, at));
        };
        Ok(match self.scope.ty(slot) {
            Type::Bool => Node::Bool(BoolNode::Field(slot)),
            Type::Int => Node::Int(IntNode::Field(slot)),
            Type::Float => Node::Float(FloatNode::Field(slot)),
            Type::Str => Node::Str(StrNode::Field(slot)),
        })
    }

    /// The text of a name that is no field.
    fn bare_word<'w>(&self, ast: &'w Ast) -> Option<&'w str> {
        match &ast.kind {
            AstKind::Name(name) if self.scope.slot(name).is_none() => Some(name),
            _ => None,
        }
    }

    /// `ast`, which if it is a bare word is a string.
    fn node_or_word(&self, ast: &Ast) -> Result<Node, ExprError> {
        match self.bare_word(ast) {
            Some(word) => Ok(Node::Str(StrNode::Const(word.into()))),
            None => self.node(ast),
        }
    }

    /// Two operands, either of which may be a bare word if the other is Str.
    fn pair(&self, left: &Ast, right: &Ast) -> Result<(Node, Node), ExprError> {
        if self.bare_word(left).is_some() && self.bare_word(right).is_none() {
            let right = self.node(right)?;
            let left = match right.ty() {
                Type::Str => self.node_or_word(left)?,
                _ => self.node(left)?,
            };
            return Ok((left, right));
        }
        let left = self.node(left)?;
        let right = match left.ty() {
            Type::Str => self.node_or_word(right)?,
            _ => self.node(right)?,
        };
        Ok((left, right))
    }

    fn truth(&self, ast: &Ast, operator: &'static str) -> Result<BoolNode, ExprError> {
        match self.node(ast)? {
            Node::Bool(node) => Ok(node),
            other => Err(self.bad_operand(operator, "a bool", other.ty(), ast.at)),
        }
    }

    fn truths(&self, parts: &[Ast], operator: &'static str) -> Result<Box<[BoolNode]>, ExprError> {
        parts.iter().map(|part| self.truth(part, operator)).collect()
    }

    fn compare(&self, op: Cmp, at: usize, left: &Ast, right: &Ast) -> Result<BoolNode, ExprError> {
        let equality = matches!(op, Cmp::Eq | Cmp::Ne);
        let negated = op == Cmp::Ne;
        let (left, right) = if equality { self.pair(left, right)? } else { (self.node(left)?, self.node(right)?) };
        let (left_ty, right_ty) = (left.ty(), right.ty());
        match (left, right) {
            (Node::Bool(left), Node::Bool(right)) if equality => {
                Ok(BoolNode::Same { negated, sides: Box::new((left, right)) })
            }
            (Node::Str(left), Node::Str(right)) if equality => {
                Ok(BoolNode::StrSame { negated, sides: Box::new((left, right)) })
            }
            (Node::Int(left), Node::Int(right)) => Ok(BoolNode::IntCmp(op, Box::new((left, right)))),
            (left, right) => match (left.into_float(), right.into_float()) {
                (Ok(left), Ok(right)) => Ok(BoolNode::FloatCmp(op, Box::new((left, right)))),
                _ => Err(self.mismatch(op.symbol(), at, left_ty, right_ty)),
            },
        }
    }

    fn member(&self, item: &Ast, list: &[Ast]) -> Result<BoolNode, ExprError> {
        let item_at = item.at;
        match self.node(item)? {
            Node::Bool(_) => {
                let wanted = "an int, a float or a str";
                Err(self.bad_operand("in", wanted, Type::Bool, item_at))
            }
            Node::Str(item) => {
                let element = |ast: &Ast| match self.node_or_word(ast)? {
                    Node::Str(node) => Ok(node),
                    other => Err(self.mismatch("in", ast.at, Type::Str, other.ty())),
                };
                let list = list.iter().map(element).collect::<Result<_, _>>()?;
                Ok(BoolNode::StrIn(Box::new((item, list))))
            }
            item => {
                let ty = item.ty();
                let mut numbers = Numbers::default();
                for ast in list {
                    numbers.push(self.node(ast)?).map_err(|found| self.mismatch("in", ast.at, ty, found))?;
                }
                Ok(match (item, numbers) {
                    (Node::Int(item), Numbers::Ints(list)) => BoolNode::IntIn(Box::new((item, list.into()))),
                    (item, numbers) => {
                        let item = item.into_float().map_err(|found| self.mismatch("in", item_at, ty, found))?;
                        BoolNode::FloatIn(Box::new((item, numbers.into_floats().into())))
                    }
                })
            }
        }
    }
}
