//! Random trees: evaluation agrees with the reference, `possible` is sound, and
//! no text makes the compiler panic.

use lz_expr::{Bounds, Env, Expr, Known, Possible, Value};
use proptest::prelude::*;

use crate::reference::{Tree, WORDS, floats, ints, scope, truths};
use crate::support::Table;

fn same(a: &Value<'_>, b: &Value<'_>) -> bool {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => a == b || (a.is_nan() && b.is_nan()),
        (a, b) => a == b,
    }
}

fn compile(tree: &Tree) -> Option<Expr> {
    let text = tree.text();
    (text.len() <= lz_expr::MAX_SOURCE_BYTES)
        .then(|| Expr::compile(&text, &scope()).unwrap_or_else(|error| panic!("{tree:?}\n{error}")))
}

fn fields() -> impl Strategy<Value = Vec<Value<'static>>> {
    let int = || prop_oneof![9 => -6i64..20, 1 => any::<i64>()].prop_map(Value::Int);
    (int(), int(), int(), -9i32..9, any::<bool>(), prop::sample::select(WORDS.to_vec())).prop_map(
        |(x, y, z, f, flag, s)| {
            let f = Value::Float(f64::from(f) / 2.0);
            vec![x, y, z, f, Value::Bool(flag), Value::Str(s)]
        },
    )
}

fn any_tree() -> impl Strategy<Value = Tree> {
    prop_oneof![2 => ints(), 1 => floats(), 3 => truths()]
}

/// Ranges for x, y, z; exact values for the rest, or nothing for flag and s.
#[derive(Clone, Debug)]
struct Box3 {
    ranges: [(i64, i64); 3],
    f: f64,
    flag: Option<bool>,
    s: Option<&'static str>,
    divisibility: bool,
}

impl Bounds for Box3 {
    fn bounds(&self, slot: u16) -> Known<'_> {
        match slot {
            0..3 => {
                let (lo, hi) = self.ranges[usize::from(slot)];
                Known::Between(lo, hi)
            }
            3 => Known::Exactly(Value::Float(self.f)),
            4 => self.flag.map_or(Known::Nothing, |flag| Known::Exactly(Value::Bool(flag))),
            _ => self.s.map_or(Known::Nothing, |s| Known::Exactly(Value::Str(s))),
        }
    }

    fn divisible(&self, slot: u16, m: i64) -> Option<bool> {
        let (lo, hi) = self.ranges[usize::from(slot)];
        let mut multiples = (lo..=hi).map(|value| value % m == 0);
        let first = multiples.next()?;
        (self.divisibility && multiples.all(|other| other == first)).then_some(first)
    }
}

impl Box3 {
    fn assignments(&self) -> Vec<Table> {
        let flags = self.flag.map_or(vec![true, false], |flag| vec![flag]);
        let words = self.s.map_or(WORDS.to_vec(), |s| vec![s]);
        let [x, y, z] = self.ranges.map(|(lo, hi)| lo..=hi);
        let mut all = Vec::new();
        for x in x {
            for y in y.clone() {
                for z in z.clone() {
                    for &flag in &flags {
                        for s in &words {
                            let ints = [x, y, z].map(Value::Int);
                            let rest = [Value::Float(self.f), Value::Bool(flag), Value::Str(s)];
                            all.push(Table([ints, rest].concat()));
                        }
                    }
                }
            }
        }
        all
    }
}

fn boxes() -> impl Strategy<Value = Box3> {
    let near = (-7i64..12, 0i64..5).prop_map(|(lo, width)| (lo, lo + width));
    let edge = prop_oneof![
        (0i64..3).prop_map(|width| (i64::MAX - width, i64::MAX)),
        (0i64..3).prop_map(|width| (i64::MIN, i64::MIN + width)),
    ];
    let range = prop_oneof![12 => near, 1 => edge];
    let word = prop::sample::select(WORDS.to_vec());
    (
        prop::array::uniform3(range),
        prop_oneof![4 => (-9i32..9).prop_map(|f| f64::from(f) / 2.0), 1 => Just(f64::NAN)],
        any::<Option<bool>>(),
        prop::option::of(word),
        any::<bool>(),
    )
        .prop_map(|(ranges, f, flag, s, divisibility)| Box3 { ranges, f, flag, s, divisibility })
}

/// Checks a claim against every assignment there is.
fn check_outcome(expr: &Expr, bounds: &Box3) -> Result<Possible, TestCaseError> {
    let possible = expr.possible(bounds);
    for table in bounds.assignments() {
        let value = expr.eval(&table);
        let sound = match possible {
            Possible::AlwaysTrue => value == Ok(Value::Bool(true)),
            Possible::AlwaysFalse => value == Ok(Value::Bool(false)),
            Possible::Between(lo, hi) => {
                matches!(value, Ok(Value::Int(value)) if (lo..=hi).contains(&value))
            }
            Possible::Varies => true,
        };
        let source = expr.source();
        prop_assert!(sound, "{source} is {possible:?} but {value:?} in {bounds:?}");
    }
    Ok(possible)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn evaluation_agrees_with_the_reference(tree in any_tree(), fields in fields()) {
        let Some(expr) = compile(&tree) else { return Ok(()) };
        let expected = tree.eval(&fields);
        let table = Table(fields);
        let found = expr.eval(&table);
        let agree = match (&found, &expected) {
            (Ok(a), Ok(b)) => same(a, b) && a.ty() == expr.ty(),
            (a, b) => a == b,
        };
        prop_assert!(agree, "{}: {:?}, not {:?}", expr.source(), found, expected);
        // Every field that is read is reported.
        let read = std::cell::RefCell::new(Vec::new());
        struct Watch<'a>(&'a Table, &'a std::cell::RefCell<Vec<u16>>);
        impl Env for Watch<'_> {
            fn get(&self, slot: u16) -> Value<'_> {
                self.1.borrow_mut().push(slot);
                self.0.get(slot)
            }
        }
        let _ = expr.eval(&Watch(&table, &read));
        prop_assert!(read.borrow().iter().all(|slot| expr.slots().contains(slot)));
        prop_assert!(expr.slots().is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn outcomes_are_sound(tree in prop_oneof![1 => ints(), 3 => truths()], bounds in boxes()) {
        let Some(expr) = compile(&tree) else { return Ok(()) };
        check_outcome(&expr, &bounds)?;
    }

    /// Monotone operations on non-negative ranges, each field used once: the
    /// ends of the range claimed are reached.
    #[test]
    fn monotone_arithmetic_is_tight(
        source in prop::sample::select(vec![
            "x", "x + y", "x * y", "x * y * z", "x - y", "ceil_div(x, 3)", "ceil_div(x, y + 1)",
            "min(x, y)", "max(x, y, z)", "ceil_div(x, 2) * y + z", "x / 2", "(x + 1) / (y + 1)",
            "max(x - y, 0) * z", "-x", "abs(x - y)", "x * 128 + 7",
        ]),
        lows in prop::array::uniform3(0i64..6),
        widths in prop::array::uniform3(0i64..6),
    ) {
        let bounds = Box3 {
            ranges: [0, 1, 2].map(|i| (lows[i], lows[i] + widths[i])),
            f: 0.0, flag: Some(true), s: Some(""), divisibility: false,
        };
        let expr = Expr::compile(source, &scope()).unwrap();
        let values: Vec<i64> =
            bounds.assignments().iter().map(|table| expr.int(table).unwrap()).collect();
        let (lo, hi) = (*values.iter().min().unwrap(), *values.iter().max().unwrap());
        prop_assert_eq!(expr.possible(&bounds), Possible::Between(lo, hi), "{}", source);
    }

    #[test]
    fn no_text_makes_the_compiler_panic(text in any::<String>()) {
        let result = Expr::compile(&text, &scope());
        if let Err(error) = result {
            prop_assert!(error.column >= 1 && error.column <= text.chars().count() + 1);
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn no_shuffle_of_tokens_makes_the_compiler_panic(
        parts in prop::collection::vec(prop::sample::select(vec![
            "x", "f", "flag", "s", "foo", "1", "2.5", "'a'", "\"", "'", "\\", "true", "(", ")",
            "[", "]", ",", "and", "or", "not", "!", "in", "matches", "==", "!=", "<", "<=", ">",
            "=", "+", "-", "*", "/", "%", "min", "max", "ceil_div", "abs", "min(", " ", "\n", "é",
            "9223372036854775808", ".", "_", "1e", "&&", "||",
        ]), 0..40),
        spaced in any::<bool>(),
    ) {
        let text = parts.join(if spaced { " " } else { "" });
        match Expr::compile(&text, &scope()) {
            Ok(expr) => {
                let table = Table([Value::Int(1); 3].into_iter()
                    .chain([Value::Float(1.0), Value::Bool(true), Value::Str("a")]).collect());
                let value = expr.eval(&table);
                prop_assert!(value.is_err() || value.unwrap().ty() == expr.ty());
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// Soundness alone would be satisfied by never claiming anything.
#[test]
fn outcomes_are_often_decided() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let mut decided = 0;
    let total = 1000;
    for _ in 0..total {
        let tree = truths().new_tree(&mut runner).unwrap().current();
        let bounds = boxes().new_tree(&mut runner).unwrap().current();
        let possible = compile(&tree).map(|expr| expr.possible(&bounds));
        decided += u32::from(possible.is_some_and(|possible| possible != Possible::Varies));
    }
    assert!(decided > total / 4, "{decided} of {total}");
}
