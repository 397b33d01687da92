//! Random expression trees, how they are written, and what they mean, worked
//! out from the language description alone.

use lz_expr::{EvalError, Scope, Type, Value};
use proptest::prelude::*;

/// The fields trees are over: x, y, z (Int), f (Float), flag (Bool), s (Str).
pub fn scope() -> Scope {
    let mut scope = Scope::new();
    for name in ["x", "y", "z"] {
        scope.field(name, Type::Int);
    }
    scope.field("f", Type::Float);
    scope.field("flag", Type::Bool);
    scope.field("s", Type::Str);
    scope
}

pub const NAMES: [&str; 6] = ["x", "y", "z", "f", "flag", "s"];
pub const WORDS: [&str; 4] = ["", "ab", "abc", "b"];

#[derive(Clone, Debug)]
pub enum Tree {
    Int(i64),
    Float(f64),
    Bool(bool),
    Word(&'static str),
    Field(usize),
    Neg(Box<Tree>),
    Arith(char, Box<Tree>, Box<Tree>),
    Call(&'static str, Vec<Tree>),
    Compare(&'static str, Box<Tree>, Box<Tree>),
    /// Item, list, negated.
    In(Box<Tree>, Vec<Tree>, bool),
    Matches(Box<Tree>, &'static str),
    /// Spelling, operands.
    And(&'static str, Box<Tree>, Box<Tree>),
    Or(&'static str, Box<Tree>, Box<Tree>),
    Not(&'static str, Box<Tree>),
}

impl Tree {
    fn level(&self) -> u8 {
        match self {
            Tree::Or(..) => 1,
            Tree::And(..) => 2,
            Tree::Not(..) => 3,
            Tree::Compare(..) | Tree::In(..) | Tree::Matches(..) => 4,
            Tree::Arith('+' | '-', ..) => 5,
            Tree::Arith(..) => 6,
            Tree::Neg(_) => 7,
            _ => 8,
        }
    }

    /// The tree as text, with no more parentheses than it needs.
    pub fn text(&self) -> String {
        let at = |tree: &Tree, least: u8| {
            if tree.level() < least { format!("({})", tree.text()) } else { tree.text() }
        };
        let list = |items: &[Tree]| items.iter().map(Tree::text).collect::<Vec<_>>().join(", ");
        match self {
            Tree::Int(value) => value.to_string(),
            Tree::Float(value) => format!("{value:?}"),
            Tree::Bool(value) => value.to_string(),
            Tree::Word(word) => format!("'{word}'"),
            Tree::Field(i) => NAMES[*i].to_owned(),
            Tree::Neg(a) => format!("-{}", at(a, 7)),
            Tree::Arith(op @ ('+' | '-'), a, b) => format!("{} {op} {}", at(a, 5), at(b, 6)),
            Tree::Arith(op, a, b) => format!("{}{op}{}", at(a, 6), at(b, 7)),
            Tree::Call(name, items) => format!("{name}({})", list(items)),
            Tree::Compare(op, a, b) => format!("{} {op} {}", at(a, 5), at(b, 5)),
            Tree::In(a, items, false) => format!("{} in [{}]", at(a, 5), list(items)),
            Tree::In(a, items, true) => format!("{} not in [{}]", at(a, 5), list(items)),
            Tree::Matches(a, pattern) => format!("{} matches \"{pattern}\"", at(a, 5)),
            Tree::And(word, a, b) => format!("{} {word} {}", at(a, 2), at(b, 3)),
            Tree::Or(word, a, b) => format!("{} {word} {}", at(a, 1), at(b, 2)),
            Tree::Not(word, a) => format!("{word} {}", at(a, 3)),
        }
    }

    fn is_float(&self) -> bool {
        match self {
            Tree::Float(_) | Tree::Field(3) => true,
            Tree::Neg(a) => a.is_float(),
            Tree::Arith(_, a, b) => a.is_float() || b.is_float(),
            Tree::Call(_, items) => items.iter().any(Tree::is_float),
            _ => false,
        }
    }

    pub fn eval(&self, fields: &[Value<'static>]) -> Result<Value<'static>, EvalError> {
        let truth = |tree: &Tree| match tree.eval(fields)? {
            Value::Bool(value) => Ok(value),
            other => panic!("{other:?} is no bool"),
        };
        Ok(match self {
            Tree::Int(value) => Value::Int(*value),
            Tree::Float(value) => Value::Float(*value),
            Tree::Bool(value) => Value::Bool(*value),
            Tree::Word(word) => Value::Str(word),
            Tree::Field(i) => fields[*i],
            Tree::Neg(a) => match a.eval(fields)? {
                Value::Int(value) => narrow(-i128::from(value))?,
                other => Value::Float(-float(other)),
            },
            Tree::Arith(op, a, b) => arith(*op, a.eval(fields)?, b.eval(fields)?)?,
            Tree::Call(name, items) => {
                let items = items.iter().map(|item| item.eval(fields));
                call(name, &items.collect::<Result<Vec<_>, _>>()?)?
            }
            Tree::Compare(op, a, b) => Value::Bool(compare(op, a.eval(fields)?, b.eval(fields)?)),
            Tree::In(a, items, negated) => {
                // One Float makes every comparison a Float one.
                let floats = a.is_float() || items.iter().any(Tree::is_float);
                let alike = |value| {
                    if floats { Value::Float(float(value)) } else { value }
                };
                let item = alike(a.eval(fields)?);
                let mut found = false;
                for element in items {
                    found = compare("==", item, alike(element.eval(fields)?));
                    if found {
                        break;
                    }
                }
                Value::Bool(found != *negated)
            }
            Tree::Matches(a, pattern) => {
                let Value::Str(text) = a.eval(fields)? else { panic!("not a string") };
                let text: Vec<char> = text.chars().collect();
                let pattern: Vec<char> = pattern.chars().collect();
                Value::Bool(glob(&pattern, &text))
            }
            Tree::And(_, a, b) => Value::Bool(truth(a)? && truth(b)?),
            Tree::Or(_, a, b) => Value::Bool(truth(a)? || truth(b)?),
            Tree::Not(_, a) => Value::Bool(!truth(a)?),
        })
    }
}

fn narrow(value: i128) -> Result<Value<'static>, EvalError> {
    let value = i64::try_from(value).map_err(|_| EvalError::Overflow)?;
    Ok(Value::Int(value))
}

fn float(value: Value<'_>) -> f64 {
    match value {
        Value::Int(value) => value as f64,
        Value::Float(value) => value,
        other => panic!("{other:?} is no number"),
    }
}

fn arith(op: char, a: Value<'_>, b: Value<'_>) -> Result<Value<'static>, EvalError> {
    if let (Value::Int(a), Value::Int(b)) = (a, b) {
        let (a, b) = (i128::from(a), i128::from(b));
        if b == 0 && "/%".contains(op) {
            return Err(EvalError::DivisionByZero);
        }
        return narrow(match op {
            '+' => a + b,
            '-' => a - b,
            '*' => a * b,
            '/' => a / b,
            _ => ((a % b) + b.abs()) % b.abs(),
        });
    }
    let (a, b) = (float(a), float(b));
    if b == 0.0 && "/%".contains(op) {
        return Err(EvalError::DivisionByZero);
    }
    Ok(Value::Float(match op {
        '+' => a + b,
        '-' => a - b,
        '*' => a * b,
        '/' => a / b,
        _ if a % b < 0.0 => a % b + b.abs(),
        _ => a % b,
    }))
}

fn call(name: &str, items: &[Value<'static>]) -> Result<Value<'static>, EvalError> {
    match (name, items) {
        ("abs", [Value::Int(a)]) => narrow(i128::from(*a).abs()),
        ("abs", [a]) => Ok(Value::Float(float(*a).abs())),
        ("ceil_div", [_, Value::Int(0)]) => Err(EvalError::DivisionByZero),
        ("ceil_div", [Value::Int(a), Value::Int(b)]) => {
            // The least q with q * b at or beyond a, seen from a positive b.
            let (a, b) = (i128::from(*a) * i128::from(b.signum()), i128::from(*b).abs());
            narrow(-((-a).div_euclid(b)))
        }
        _ => {
            let best = if name == "min" { "<" } else { ">" };
            // A NaN is passed over: it is not equal even to itself.
            let better = |a, b| {
                if compare(best, b, a) || compare("!=", a, a) { b } else { a }
            };
            let chosen = items.iter().copied().reduce(better).unwrap();
            let all_int = items.iter().all(|item| matches!(item, Value::Int(_)));
            Ok(if all_int { chosen } else { Value::Float(float(chosen)) })
        }
    }
}

fn compare(op: &str, a: Value<'_>, b: Value<'_>) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let order = match (a, b) {
        (Value::Int(a), Value::Int(b)) => Some(a.cmp(&b)),
        (Value::Bool(a), Value::Bool(b)) => Some(a.cmp(&b)),
        (Value::Str(a), Value::Str(b)) => Some(a.cmp(b)),
        (a, b) => float(a).partial_cmp(&float(b)),
    };
    match op {
        "==" => order == Some(Equal),
        "!=" => order != Some(Equal),
        "<" => order == Some(Less),
        "<=" => matches!(order, Some(Less | Equal)),
        ">" => order == Some(Greater),
        ">=" => matches!(order, Some(Greater | Equal)),
        _ => panic!("{op}"),
    }
}

fn glob(pattern: &[char], text: &[char]) -> bool {
    match (pattern, text) {
        ([], []) => true,
        (['*', rest @ ..], _) => glob(rest, text) || (!text.is_empty() && glob(pattern, &text[1..])),
        (['?', p @ ..], [_, t @ ..]) => glob(p, t),
        ([a, p @ ..], [b, t @ ..]) => a == b && glob(p, t),
        _ => false,
    }
}

fn boxed(pair: (Tree, Tree)) -> (Box<Tree>, Box<Tree>) {
    (Box::new(pair.0), Box::new(pair.1))
}

pub const COMPARISONS: [&str; 6] = ["==", "!=", "<", "<=", ">", ">="];

pub fn ints() -> BoxedStrategy<Tree> {
    let leaf = prop_oneof![
        6 => (0usize..3).prop_map(Tree::Field),
        6 => (-9i64..40).prop_map(Tree::Int),
        1 => prop_oneof![Just(i64::MAX), Just(i64::MIN), any::<i64>()].prop_map(Tree::Int),
    ];
    leaf.prop_recursive(4, 16, 3, |inner| numbers(inner, true)).boxed()
}

pub fn floats() -> BoxedStrategy<Tree> {
    let leaf = prop_oneof![
        2 => Just(Tree::Field(3)),
        2 => (-8i32..8).prop_map(|n| Tree::Float(f64::from(n) / 4.0)),
        1 => Just(Tree::Float(1e300)),
        2 => ints(),
    ];
    // A Float tree has a Float somewhere: an Int one gets it here.
    leaf.prop_recursive(3, 10, 3, |inner| numbers(inner, false))
        .prop_map(|tree| Tree::Arith('+', Box::new(tree), Box::new(Tree::Float(0.5))))
        .boxed()
}

fn numbers(inner: BoxedStrategy<Tree>, whole: bool) -> BoxedStrategy<Tree> {
    let pair = (inner.clone(), inner.clone());
    let op = prop::sample::select(vec!['+', '-', '*', '/', '%']);
    let arith = (op, pair.clone()).prop_map(|(op, pair)| {
        let (a, b) = boxed(pair);
        Tree::Arith(op, a, b)
    });
    let choose = (prop::sample::select(vec!["min", "max"]), prop::collection::vec(inner.clone(), 2..4))
        .prop_map(|(name, items)| Tree::Call(name, items));
    let unary = prop_oneof![
        inner.clone().prop_map(|a| Tree::Neg(Box::new(a))),
        inner.prop_map(|a| Tree::Call("abs", vec![a])),
    ];
    if whole {
        let ceil = pair.prop_map(|(a, b)| Tree::Call("ceil_div", vec![a, b]));
        prop_oneof![5 => arith, 1 => choose, 1 => unary, 1 => ceil].boxed()
    } else {
        prop_oneof![5 => arith, 1 => choose, 1 => unary].boxed()
    }
}

fn words() -> BoxedStrategy<Tree> {
    prop_oneof![Just(Tree::Field(5)), prop::sample::select(WORDS.to_vec()).prop_map(Tree::Word),].boxed()
}

/// Bool trees over all fields.
pub fn truths() -> BoxedStrategy<Tree> {
    let number = prop_oneof![4 => ints(), 1 => floats()];
    let compare =
        (prop::sample::select(COMPARISONS.to_vec()), (number.clone(), number.clone())).prop_map(|(op, pair)| {
            let (a, b) = boxed(pair);
            Tree::Compare(op, a, b)
        });
    let member = (number.clone(), prop::collection::vec(number, 1..3), any::<bool>())
        .prop_map(|(a, items, negated)| Tree::In(Box::new(a), items, negated));
    let text = (words(), words(), 0..4).prop_map(|(a, b, form)| match form {
        0 => Tree::Compare("==", Box::new(a), Box::new(b)),
        1 => Tree::Compare("!=", Box::new(a), Box::new(b)),
        2 => Tree::In(Box::new(a), vec![b], false),
        _ => Tree::Matches(Box::new(a), "a?*"),
    });
    let leaf = prop_oneof![
        6 => compare,
        2 => member,
        1 => text,
        1 => Just(Tree::Field(4)),
        1 => any::<bool>().prop_map(Tree::Bool),
    ];
    connected(leaf.boxed())
}

/// `leaf` under and, or, not and equality.
pub fn connected(leaf: BoxedStrategy<Tree>) -> BoxedStrategy<Tree> {
    leaf.prop_recursive(4, 12, 2, |inner| {
        let pair = || (inner.clone(), inner.clone());
        let and = prop::sample::select(vec!["and", "AND", "&&"]);
        let or = prop::sample::select(vec!["or", "OR", "||"]);
        let not = prop::sample::select(vec!["not", "NOT", "!"]);
        prop_oneof![
            3 => (and, pair()).prop_map(|(word, pair)| {
                let (a, b) = boxed(pair);
                Tree::And(word, a, b)
            }),
            3 => (or, pair()).prop_map(|(word, pair)| {
                let (a, b) = boxed(pair);
                Tree::Or(word, a, b)
            }),
            2 => (not, inner.clone()).prop_map(|(word, a)| Tree::Not(word, Box::new(a))),
            1 => (any::<bool>(), pair()).prop_map(|(same, pair)| {
                let (a, b) = boxed(pair);
                Tree::Compare(if same { "==" } else { "!=" }, a, b)
            }),
        ]
    })
    .boxed()
}
