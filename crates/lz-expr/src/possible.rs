//! What an expression can be when its fields are only partly known.

use crate::ast::Cmp;
use crate::cuts::leading_modulus;
use crate::glob;
use crate::node::{BoolNode, FloatNode, IntNode, Node, StrNode};
use crate::span::{FloatSpan, IntSpan, Truths};
use crate::value::Value;

/// What is known about the fields of an expression without knowing their values.
///
/// The values spoken of are those an [`Env`](crate::Env) would give: of the type
/// the scope declares.
pub trait Bounds {
    /// What is known about the field in `slot`.
    fn bounds(&self, slot: u16) -> Known<'_>;

    /// Whether every possible value of the field is (`Some(true)`), or is not
    /// (`Some(false)`), a multiple of `m`; `None` if neither is known.
    fn divisible(&self, slot: u16, m: i64) -> Option<bool>;
}

/// What is known about one field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Known<'a> {
    /// It has this value.
    Exactly(Value<'a>),
    /// It is an integer in this range, both ends included.
    Between(i64, i64),
    /// Any value of its type.
    Nothing,
}

/// What an expression can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Possible {
    /// True for every assignment within the bounds.
    AlwaysTrue,
    /// False for every assignment within the bounds.
    AlwaysFalse,
    /// An Int expression that always has a value, and always in this range.
    Between(i64, i64),
    /// Nothing is claimed: it may differ between assignments, or fail for some.
    Varies,
}

impl Node {
    pub(crate) fn possible<B: Bounds + ?Sized>(&self, bounds: &B) -> Possible {
        match self {
            Node::Bool(node) => match node.truths(bounds) {
                Truths { yes: true, no: false, fails: false } => Possible::AlwaysTrue,
                Truths { yes: false, no: true, fails: false } => Possible::AlwaysFalse,
                _ => Possible::Varies,
            },
            Node::Int(node) => match node.span(bounds) {
                IntSpan { lo, hi, fails: false } => Possible::Between(lo, hi),
                _ => Possible::Varies,
            },
            Node::Float(_) | Node::Str(_) => Possible::Varies,
        }
    }
}

impl BoolNode {
    fn truths<B: Bounds + ?Sized>(&self, bounds: &B) -> Truths {
        match self {
            BoolNode::Const(value) => Truths::just(*value),
            BoolNode::Field(slot) => match bounds.bounds(*slot) {
                Known::Exactly(Value::Bool(value)) => Truths::just(value),
                Known::Nothing => Truths::EITHER,
                _ => Truths::EITHER.or_fails(true),
            },
            BoolNode::Not(inner) => inner.truths(bounds).negated(),
            BoolNode::All(parts) => first_no(parts.iter().map(|part| part.truths(bounds))),
            BoolNode::Any(parts) => first_no(parts.iter().map(|part| part.truths(bounds).negated())).negated(),
            BoolNode::Same { negated, sides } => {
                let (left, right) = (sides.0.truths(bounds), sides.1.truths(bounds));
                let same = Truths {
                    yes: (left.yes && right.yes) || (left.no && right.no),
                    no: (left.yes && right.no) || (left.no && right.yes),
                    fails: left.fails || right.fails,
                };
                if *negated { same.negated() } else { same }
            }
            BoolNode::IntCmp(op, sides) => sides.0.span(bounds).compare(*op, sides.1.span(bounds)),
            BoolNode::FloatCmp(op, sides) => sides.0.span(bounds).compare(*op, sides.1.span(bounds)),
            BoolNode::StrSame { negated, sides } => {
                let same = text_pair(&sides.0, &sides.1, bounds, |left, right| left == right);
                if *negated { same.negated() } else { same }
            }
            BoolNode::Glob(sides) => {
                text_pair(&sides.0, &sides.1, bounds, |text, pattern| glob::matches(pattern, text))
            }
            BoolNode::IntIn(both) => {
                let item = both.0.span(bounds);
                let equal = |element: &IntNode| item.compare(Cmp::Eq, element.span(bounds));
                first_no(both.1.iter().map(|element| equal(element).negated())).negated()
            }
            BoolNode::FloatIn(both) => {
                let item = both.0.span(bounds);
                let equal = |element: &FloatNode| item.compare(Cmp::Eq, element.span(bounds));
                first_no(both.1.iter().map(|element| equal(element).negated())).negated()
            }
            BoolNode::StrIn(both) => {
                let equal = |element: &StrNode| text_pair(&both.0, element, bounds, |item, element| item == element);
                first_no(both.1.iter().map(|element| equal(element).negated())).negated()
            }
        }
    }
}

/// `and` over parts in order: a part is reached only if those before it can all
/// be true, and what is not reached cannot fail.
fn first_no(parts: impl Iterator<Item = Truths>) -> Truths {
    let mut so_far = Truths::just(true);
    for part in parts {
        so_far = Truths { yes: part.yes, no: so_far.no || part.no, fails: so_far.fails || part.fails };
        if !so_far.yes {
            break;
        }
    }
    so_far
}

impl IntNode {
    fn span<B: Bounds + ?Sized>(&self, bounds: &B) -> IntSpan {
        match self {
            IntNode::Const(value) => IntSpan::new(*value, *value),
            IntNode::Field(slot) => match bounds.bounds(*slot) {
                Known::Exactly(Value::Int(value)) => IntSpan::new(value, value),
                Known::Between(lo, hi) if lo <= hi => IntSpan::new(lo, hi),
                Known::Exactly(_) => IntSpan::ALL.or_fails(true),
                Known::Between(..) | Known::Nothing => IntSpan::ALL,
            },
            IntNode::Neg(inner) => inner.span(bounds).negated(),
            IntNode::Abs(inner) => inner.span(bounds).abs(),
            IntNode::Chain(first, links) => {
                let mut span = first.span(bounds);
                let modulus = leading_modulus(first, links);
                for (i, (op, operand)) in links.iter().enumerate() {
                    span = span.step(*op, operand.span(bounds));
                    if let (0, Some(modulus)) = (i, modulus) {
                        let multiple = bounds.divisible(modulus.slot, modulus.modulus);
                        span = with_divisibility(span, multiple);
                    }
                }
                span
            }
            IntNode::Least(items) => {
                let spans = items.iter().map(|item| item.span(bounds));
                spans.reduce(IntSpan::least).unwrap_or(IntSpan::ALL)
            }
            IntNode::Greatest(items) => {
                let spans = items.iter().map(|item| item.span(bounds));
                spans.reduce(IntSpan::greatest).unwrap_or(IntSpan::ALL)
            }
            IntNode::CeilDiv(sides) => sides.0.span(bounds).ceil_div(sides.1.span(bounds)),
        }
    }
}

/// A remainder, given whether the dividend is a multiple. Bounds that contradict
/// each other are left as they are: there is no assignment to be wrong about.
fn with_divisibility(span: IntSpan, multiple: Option<bool>) -> IntSpan {
    match multiple {
        Some(true) if span.lo <= 0 => IntSpan { lo: 0, hi: 0, ..span },
        Some(false) if span.hi >= 1 => IntSpan { lo: span.lo.max(1), ..span },
        _ => span,
    }
}

impl FloatNode {
    fn span<B: Bounds + ?Sized>(&self, bounds: &B) -> FloatSpan {
        match self {
            FloatNode::Const(value) => FloatSpan::point(*value),
            FloatNode::Field(slot) => match bounds.bounds(*slot) {
                Known::Exactly(Value::Float(value)) => FloatSpan::point(value),
                Known::Exactly(Value::Int(value)) => FloatSpan::point(value as f64),
                Known::Exactly(_) => FloatSpan::ALL.or_fails(true),
                Known::Between(lo, hi) if lo <= hi => FloatSpan::of_ints(IntSpan::new(lo, hi)),
                Known::Between(..) | Known::Nothing => FloatSpan::ALL,
            },
            FloatNode::FromInt(inner) => FloatSpan::of_ints(inner.span(bounds)),
            FloatNode::Neg(inner) => inner.span(bounds).negated(),
            FloatNode::Abs(inner) => inner.span(bounds).abs(),
            FloatNode::Chain(first, links) => {
                let start = first.span(bounds);
                links.iter().fold(start, |span, (op, operand)| span.step(*op, operand.span(bounds)))
            }
            FloatNode::Least(items) => {
                let spans = items.iter().map(|item| item.span(bounds));
                spans.reduce(|a, b| a.choose(b, f64::min)).unwrap_or(FloatSpan::ALL)
            }
            FloatNode::Greatest(items) => {
                let spans = items.iter().map(|item| item.span(bounds));
                spans.reduce(|a, b| a.choose(b, f64::max)).unwrap_or(FloatSpan::ALL)
            }
        }
    }
}

/// What is known of a string, and whether reading it fails.
fn text<'a, B: Bounds + ?Sized>(node: &'a StrNode, bounds: &'a B) -> (Option<&'a str>, bool) {
    match node {
        StrNode::Const(value) => (Some(value), false),
        StrNode::Field(slot) => match bounds.bounds(*slot) {
            Known::Exactly(Value::Str(value)) => (Some(value), false),
            Known::Nothing => (None, false),
            _ => (None, true),
        },
    }
}

fn text_pair<B: Bounds + ?Sized>(
    left: &StrNode,
    right: &StrNode,
    bounds: &B,
    test: impl Fn(&str, &str) -> bool,
) -> Truths {
    let (left, left_fails) = text(left, bounds);
    let (right, right_fails) = text(right, bounds);
    let truths = match (left, right) {
        (Some(left), Some(right)) => Truths::just(test(left, right)),
        _ => Truths::EITHER,
    };
    truths.or_fails(left_fails || right_fails)
}
