//! The texts an expression compares fields with.

use crate::node::{BoolNode, Node, StrNode};

/// A text that a field is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared<'a> {
    /// The field's slot.
    pub slot: u16,
    /// The text.
    pub text: &'a str,
    /// Whether the text is a glob.
    pub glob: bool,
    /// Whether the field must be another: `field != "text"`.
    pub negated: bool,
}

impl Node {
    pub(crate) fn compared(&self) -> Vec<Compared<'_>> {
        let mut found = Vec::new();
        if let Node::Bool(node) = self {
            node.compared(&mut found);
        }
        found
    }
}

impl BoolNode {
    fn compared<'a>(&'a self, found: &mut Vec<Compared<'a>>) {
        let mut add = |one: &StrNode, other: &'a StrNode, glob, negated| {
            if let (&StrNode::Field(slot), StrNode::Const(text)) = (one, other) {
                found.push(Compared { slot, text, glob, negated });
            }
        };
        match self {
            BoolNode::StrSame { negated, sides } => {
                add(&sides.0, &sides.1, false, *negated);
                add(&sides.1, &sides.0, false, *negated);
            }
            BoolNode::StrIn(sides) => sides.1.iter().for_each(|text| add(&sides.0, text, false, false)),
            BoolNode::Glob(sides) => add(&sides.0, &sides.1, true, false),
            BoolNode::Not(inner) => inner.compared(found),
            BoolNode::All(items) | BoolNode::Any(items) => items.iter().for_each(|item| item.compared(found)),
            BoolNode::Same { sides, .. } => {
                sides.0.compared(found);
                sides.1.compared(found);
            }
            BoolNode::Const(_)
            | BoolNode::Field(_)
            | BoolNode::IntCmp(..)
            | BoolNode::FloatCmp(..)
            | BoolNode::IntIn(_)
            | BoolNode::FloatIn(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Expr, Scope, Type};

    #[test]
    fn every_text_is_found_with_its_field() {
        let mut scope = Scope::new();
        let (a, b, n) = (scope.field("a", Type::Str), scope.field("b", Type::Str), scope.field("n", Type::Int));
        let texts = |source: &str| {
            let expr = Expr::compile(source, &scope).unwrap();
            expr.compared().iter().map(|c| (c.slot, c.text.to_owned(), c.glob, c.negated)).collect::<Vec<_>>()
        };
        let of = |slot: u16, text: &str, glob: bool, negated: bool| (slot, text.to_owned(), glob, negated);
        assert_eq!(texts("a == 'x'"), [of(a, "x", false, false)]);
        assert_eq!(texts("'x' == a"), [of(a, "x", false, false)]);
        assert_eq!(texts("a != 'x' and n > 3"), [of(a, "x", false, true)]);
        assert_eq!(
            texts("not (a in ['x', 'y'] or b == 'z')"),
            [of(a, "x", false, false), of(a, "y", false, false), of(b, "z", false, false),]
        );
        assert_eq!(texts("(a == 'x') == (b == 'y')"), [of(a, "x", false, false), of(b, "y", false, false)]);
        assert_eq!(texts("a == b or n == 1"), []);
        assert!(n > b);
    }
}
