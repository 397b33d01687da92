//! The compiled form: one tree per type, so that evaluation never asks what
//! type it has in hand.

use crate::Type;
use crate::ast::{Arith, Cmp};

/// A compiled expression of any type.
#[derive(Debug)]
pub(crate) enum Node {
    Bool(BoolNode),
    Int(IntNode),
    Float(FloatNode),
    Str(StrNode),
}

impl Node {
    pub(crate) fn ty(&self) -> Type {
        match self {
            Node::Bool(_) => Type::Bool,
            Node::Int(_) => Type::Int,
            Node::Float(_) => Type::Float,
            Node::Str(_) => Type::Str,
        }
    }

    /// A number as a float, or the type this is instead.
    pub(crate) fn into_float(self) -> Result<FloatNode, Type> {
        match self {
            Node::Int(node) => Ok(node.into_float()),
            Node::Float(node) => Ok(node),
            other => Err(other.ty()),
        }
    }
}

#[derive(Debug)]
pub(crate) enum BoolNode {
    Const(bool),
    Field(u16),
    Not(Box<BoolNode>),
    All(Box<[BoolNode]>),
    Any(Box<[BoolNode]>),
    /// Whether the two are equal, or if `negated` are not.
    Same {
        negated: bool,
        sides: Box<(BoolNode, BoolNode)>,
    },
    IntCmp(Cmp, Box<(IntNode, IntNode)>),
    FloatCmp(Cmp, Box<(FloatNode, FloatNode)>),
    StrSame {
        negated: bool,
        sides: Box<(StrNode, StrNode)>,
    },
    IntIn(Box<(IntNode, Box<[IntNode]>)>),
    FloatIn(Box<(FloatNode, Box<[FloatNode]>)>),
    StrIn(Box<(StrNode, Box<[StrNode]>)>),
    /// Text, then pattern.
    Glob(Box<(StrNode, StrNode)>),
}

#[derive(Debug)]
pub(crate) enum IntNode {
    Const(i64),
    Field(u16),
    Neg(Box<IntNode>),
    Abs(Box<IntNode>),
    Chain(Box<IntNode>, Box<[(Arith, IntNode)]>),
    Least(Box<[IntNode]>),
    Greatest(Box<[IntNode]>),
    CeilDiv(Box<(IntNode, IntNode)>),
}

#[derive(Debug)]
pub(crate) enum FloatNode {
    Const(f64),
    Field(u16),
    FromInt(Box<IntNode>),
    Neg(Box<FloatNode>),
    Abs(Box<FloatNode>),
    Chain(Box<FloatNode>, Box<[(Arith, FloatNode)]>),
    Least(Box<[FloatNode]>),
    Greatest(Box<[FloatNode]>),
}

#[derive(Debug)]
pub(crate) enum StrNode {
    Const(Box<str>),
    Field(u16),
}

impl IntNode {
    /// A constant tree becomes its value, unless evaluating it fails: that
    /// failure belongs to evaluation, which may short-circuit past it.
    pub(crate) fn folded(self) -> IntNode {
        match self.constant() {
            Some(value) => IntNode::Const(value),
            None => self,
        }
    }

    fn constant(&self) -> Option<i64> {
        let is_const = |node: &IntNode| matches!(node, IntNode::Const(_));
        // Children are folded before their parents, so one level is enough.
        let ready = match self {
            IntNode::Const(_) => true,
            IntNode::Field(_) => false,
            IntNode::Neg(inner) | IntNode::Abs(inner) => is_const(inner),
            IntNode::Chain(first, links) => is_const(first) && links.iter().all(|(_, node)| is_const(node)),
            IntNode::Least(items) | IntNode::Greatest(items) => items.iter().all(is_const),
            IntNode::CeilDiv(sides) => is_const(&sides.0) && is_const(&sides.1),
        };
        if ready { self.eval(&crate::eval::NoFields).ok() } else { None }
    }

    pub(crate) fn into_float(self) -> FloatNode {
        match self {
            IntNode::Const(value) => FloatNode::Const(value as f64),
            node => FloatNode::FromInt(Box::new(node)),
        }
    }
}
