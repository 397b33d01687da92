//! Typing of arithmetic: where Int stays Int and where it becomes Float.

use crate::Type;
use crate::ast::{Arith, Ast, ChainLink};
use crate::check::{Checker, NUMBER};
use crate::error::{ExprError, ExprErrorKind};
use crate::node::{FloatNode, IntNode, Node};
use crate::scope::closest;

/// Numbers that go together: all Int, or all Float once one of them is.
pub(crate) enum Numbers {
    Ints(Vec<IntNode>),
    Floats(Vec<FloatNode>),
}

impl Default for Numbers {
    fn default() -> Numbers {
        Numbers::Ints(Vec::new())
    }
}

impl Numbers {
    /// Adds a number, or says what it is instead of one.
    pub(crate) fn push(&mut self, node: Node) -> Result<(), Type> {
        match (&mut *self, node) {
            (Numbers::Ints(ints), Node::Int(node)) => ints.push(node),
            (_, node) => {
                let node = node.into_float()?;
                let mut floats = std::mem::take(self).into_floats();
                floats.push(node);
                *self = Numbers::Floats(floats);
            }
        }
        Ok(())
    }

    pub(crate) fn into_floats(self) -> Vec<FloatNode> {
        match self {
            Numbers::Ints(ints) => ints.into_iter().map(IntNode::into_float).collect(),
            Numbers::Floats(floats) => floats,
        }
    }
}

/// A chain under construction. It turns Float at its first Float operand, and
/// what stands to the left of that is still computed as Int.
enum Chain {
    Int(IntNode, Vec<(Arith, IntNode)>),
    Float(FloatNode, Vec<(Arith, FloatNode)>),
}

impl Chain {
    fn new(first: Node) -> Result<Chain, Type> {
        match first {
            Node::Int(node) => Ok(Chain::Int(node, Vec::new())),
            node => Ok(Chain::Float(node.into_float()?, Vec::new())),
        }
    }

    fn ty(&self) -> Type {
        match self {
            Chain::Int(..) => Type::Int,
            Chain::Float(..) => Type::Float,
        }
    }

    fn push(self, op: Arith, operand: Node) -> Result<Chain, Type> {
        match (self, operand) {
            (Chain::Int(first, mut links), Node::Int(node)) => {
                links.push((op, node));
                Ok(Chain::Int(first, links))
            }
            (chain @ Chain::Int(..), operand) => {
                let operand = operand.into_float()?;
                let first = chain.finish().into_float()?;
                Ok(Chain::Float(first, vec![(op, operand)]))
            }
            (Chain::Float(first, mut links), operand) => {
                links.push((op, operand.into_float()?));
                Ok(Chain::Float(first, links))
            }
        }
    }

    fn finish(self) -> Node {
        match self {
            Chain::Int(first, links) if links.is_empty() => Node::Int(first),
            Chain::Int(first, links) => Node::Int(IntNode::Chain(Box::new(first), links.into()).folded()),
            Chain::Float(first, links) => Node::Float(FloatNode::Chain(Box::new(first), links.into())),
        }
    }
}

/// The functions and how many arguments each takes.
const FUNCTIONS: [(&str, &str); 4] = [
    ("min", "two or more arguments"),
    ("max", "two or more arguments"),
    ("ceil_div", "two arguments"),
    ("abs", "one argument"),
];

impl Checker<'_> {
    pub(crate) fn chain(&self, first: &Ast, links: &[ChainLink]) -> Result<Node, ExprError> {
        let mut chain = Err(self.node(first)?);
        for link in links {
            let operand = self.node(&link.operand)?;
            let right = operand.ty();
            let mismatch = |left| self.mismatch(link.op.symbol(), link.op_at, left, right);
            let so_far = match chain {
                Ok(chain) => chain,
                Err(node) => Chain::new(node).map_err(mismatch)?,
            };
            let left = so_far.ty();
            chain = Ok(so_far.push(link.op, operand).map_err(|_| mismatch(left))?);
        }
        Ok(chain.map_or_else(|node| node, Chain::finish))
    }

    pub(crate) fn call(&self, name: &str, arguments: &[Ast], at: usize) -> Result<Node, ExprError> {
        let Some(&(function, expected)) = FUNCTIONS.iter().find(|(known, _)| *known == name) else {
            let kind = ExprErrorKind::UnknownFunction {
                name: name.to_owned(),
                nearest: closest(name, FUNCTIONS.iter().map(|(known, _)| *known)),
            };
            return Err(self.error(kind, at));
        };
        let found = arguments.len();
        let right_number = match function {
            "abs" => found == 1,
            "ceil_div" => found == 2,
            _ => found >= 2,
        };
        if !right_number {
            let kind = ExprErrorKind::Arity { function, expected, found };
            return Err(self.error(kind, at));
        }
        match (function, arguments) {
            ("abs", [argument]) => match self.node(argument)? {
                Node::Int(node) => Ok(Node::Int(IntNode::Abs(Box::new(node)).folded())),
                Node::Float(node) => Ok(Node::Float(FloatNode::Abs(Box::new(node)))),
                other => Err(self.bad_operand(function, NUMBER, other.ty(), argument.at)),
            },
            ("ceil_div", [left, right]) => {
                let sides = (self.whole(function, left)?, self.whole(function, right)?);
                Ok(Node::Int(IntNode::CeilDiv(Box::new(sides)).folded()))
            }
            _ => {
                let mut numbers = Numbers::default();
                for argument in arguments {
                    numbers
                        .push(self.node(argument)?)
                        .map_err(|found| self.bad_operand(function, NUMBER, found, argument.at))?;
                }
                Ok(match (function, numbers) {
                    ("min", Numbers::Ints(items)) => Node::Int(IntNode::Least(items.into()).folded()),
                    (_, Numbers::Ints(items)) => Node::Int(IntNode::Greatest(items.into()).folded()),
                    ("min", Numbers::Floats(items)) => Node::Float(FloatNode::Least(items.into())),
                    (_, Numbers::Floats(items)) => Node::Float(FloatNode::Greatest(items.into())),
                })
            }
        }
    }

    fn whole(&self, function: &'static str, ast: &Ast) -> Result<IntNode, ExprError> {
        match self.node(ast)? {
            Node::Int(node) => Ok(node),
            other => Err(self.bad_operand(function, "ints", other.ty(), ast.at)),
        }
    }
}
