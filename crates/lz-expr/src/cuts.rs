//! Where a compiled expression can change its mind.

use crate::ast::{Arith, Cmp};
use crate::node::{BoolNode, FloatNode, IntNode, Node, StrNode};

/// A threshold on an Int field: values `< at` and values `>= at` may behave
/// differently. `x > 5` cuts at 6; `x == 5` cuts at 5 and at 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cut {
    /// The field.
    pub slot: u16,
    /// The first value of the upper side.
    pub at: i64,
}

/// A sub-expression `field % modulus`: values that are multiples of `modulus`
/// may behave differently from those that are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Modulus {
    /// The field.
    pub slot: u16,
    /// The positive constant it is divided by.
    pub modulus: i64,
}

/// What an expression depends on, each list sorted and without repeats.
#[derive(Debug, Default)]
pub(crate) struct Dependence {
    pub(crate) slots: Vec<u16>,
    pub(crate) cuts: Vec<Cut>,
    pub(crate) moduli: Vec<Modulus>,
}

impl Dependence {
    pub(crate) fn of(node: &Node) -> Dependence {
        let mut found = Dependence::default();
        match node {
            Node::Bool(node) => found.truth(node),
            Node::Int(node) => found.int(node),
            Node::Float(node) => found.float(node),
            Node::Str(node) => found.text(node),
        }
        found.slots.sort_unstable();
        found.slots.dedup();
        found.cuts.sort_unstable();
        found.cuts.dedup();
        found.moduli.sort_unstable();
        found.moduli.dedup();
        found
    }

    fn truth(&mut self, node: &BoolNode) {
        match node {
            BoolNode::Const(_) => {}
            BoolNode::Field(slot) => self.slots.push(*slot),
            BoolNode::Not(inner) => self.truth(inner),
            BoolNode::All(parts) | BoolNode::Any(parts) => {
                parts.iter().for_each(|part| self.truth(part));
            }
            BoolNode::Same { sides, .. } => {
                self.truth(&sides.0);
                self.truth(&sides.1);
            }
            BoolNode::IntCmp(op, sides) => {
                self.int(&sides.0);
                self.int(&sides.1);
                self.int_atom(*op, &sides.0, &sides.1);
            }
            BoolNode::FloatCmp(op, sides) => {
                self.float(&sides.0);
                self.float(&sides.1);
                self.float_atom(*op, &sides.0, &sides.1);
            }
            BoolNode::StrSame { sides, .. } | BoolNode::Glob(sides) => {
                self.text(&sides.0);
                self.text(&sides.1);
            }
            BoolNode::IntIn(both) => {
                self.int(&both.0);
                for element in &both.1 {
                    self.int(element);
                    self.int_atom(Cmp::Eq, &both.0, element);
                }
            }
            BoolNode::FloatIn(both) => {
                self.float(&both.0);
                for element in &both.1 {
                    self.float(element);
                    self.float_atom(Cmp::Eq, &both.0, element);
                }
            }
            BoolNode::StrIn(both) => {
                self.text(&both.0);
                both.1.iter().for_each(|element| self.text(element));
            }
        }
    }

    fn int(&mut self, node: &IntNode) {
        match node {
            IntNode::Const(_) => {}
            IntNode::Field(slot) => self.slots.push(*slot),
            IntNode::Neg(inner) | IntNode::Abs(inner) => self.int(inner),
            IntNode::Chain(first, links) => {
                if let Some(modulus) = leading_modulus(first, links) {
                    self.moduli.push(modulus);
                }
                self.int(first);
                links.iter().for_each(|(_, operand)| self.int(operand));
            }
            IntNode::Least(items) | IntNode::Greatest(items) => {
                items.iter().for_each(|item| self.int(item));
            }
            IntNode::CeilDiv(sides) => {
                self.int(&sides.0);
                self.int(&sides.1);
            }
        }
    }

    fn float(&mut self, node: &FloatNode) {
        match node {
            FloatNode::Const(_) => {}
            FloatNode::Field(slot) => self.slots.push(*slot),
            FloatNode::FromInt(inner) => self.int(inner),
            FloatNode::Neg(inner) | FloatNode::Abs(inner) => self.float(inner),
            FloatNode::Chain(first, links) => {
                self.float(first);
                links.iter().for_each(|(_, operand)| self.float(operand));
            }
            FloatNode::Least(items) | FloatNode::Greatest(items) => {
                items.iter().for_each(|item| self.float(item));
            }
        }
    }

    fn text(&mut self, node: &StrNode) {
        if let StrNode::Field(slot) = node {
            self.slots.push(*slot);
        }
    }

    fn int_atom(&mut self, op: Cmp, left: &IntNode, right: &IntNode) {
        let (slot, op, at) = match (left, right) {
            (IntNode::Field(slot), IntNode::Const(at)) => (*slot, op, *at),
            (IntNode::Const(at), IntNode::Field(slot)) => (*slot, op.flipped(), *at),
            _ => return,
        };
        self.compared(slot, op, Some(at), at.checked_add(1));
    }

    /// An Int field compared with a Float constant: `x > 1.5` cuts at 2.
    fn float_atom(&mut self, op: Cmp, left: &FloatNode, right: &FloatNode) {
        let (field, op, at) = match (left, right) {
            (FloatNode::FromInt(field), FloatNode::Const(at)) => (field, op, *at),
            (FloatNode::Const(at), FloatNode::FromInt(field)) => (field, op.flipped(), *at),
            _ => return,
        };
        // Beyond 2^53 ints round when they become floats.
        let exact = at.abs() < (1i64 << 53) as f64;
        if let (IntNode::Field(slot), true) = (&**field, exact) {
            let (from, after) = (at.ceil() as i64, at.floor() as i64 + 1);
            self.compared(*slot, op, Some(from), Some(after));
        }
    }

    /// `from` is the first int not below the constant, `after` the first above
    /// it; neither exists past the last int.
    fn compared(&mut self, slot: u16, op: Cmp, from: Option<i64>, after: Option<i64>) {
        let (from, after) = match op {
            Cmp::Lt | Cmp::Ge => (from, None),
            Cmp::Le | Cmp::Gt => (None, after),
            Cmp::Eq | Cmp::Ne => (from, after),
        };
        let cuts = [from, after].into_iter().flatten();
        self.cuts.extend(cuts.map(|at| Cut { slot, at }));
    }
}

/// The `field % constant` an arithmetic chain begins with.
pub(crate) fn leading_modulus(first: &IntNode, links: &[(Arith, IntNode)]) -> Option<Modulus> {
    match (first, links) {
        (&IntNode::Field(slot), &[(Arith::Rem, IntNode::Const(modulus)), ..]) if modulus > 0 => {
            Some(Modulus { slot, modulus })
        }
        _ => None,
    }
}
