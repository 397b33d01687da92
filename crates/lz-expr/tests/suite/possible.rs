//! What `possible` must decide, and what it must not.

use lz_expr::{Bounds, Expr, Known, Possible, Value};

use crate::support::{BATCH, CORES, DTYPE, SCALE, SEQ_LEN, compiled, table};

/// What is known, by slot.
#[derive(Default)]
struct Facts {
    known: Vec<(u16, Known<'static>)>,
    multiples: Vec<(u16, i64, bool)>,
}

impl Bounds for Facts {
    fn bounds(&self, slot: u16) -> Known<'_> {
        let found = self.known.iter().find(|(known, _)| *known == slot);
        found.map_or(Known::Nothing, |(_, known)| *known)
    }

    fn divisible(&self, slot: u16, m: i64) -> Option<bool> {
        let mut facts = self.multiples.iter();
        facts.find(|(s, of, _)| (*s, *of) == (slot, m)).map(|(_, _, is)| *is)
    }
}

fn known(facts: &[(u16, Known<'static>)]) -> Facts {
    Facts { known: facts.to_vec(), multiples: Vec::new() }
}

fn batch(lo: i64, hi: i64) -> Facts {
    known(&[(BATCH, Known::Between(lo, hi))])
}

#[track_caller]
fn is(source: &str, facts: &Facts, expected: Possible) {
    assert_eq!(compiled(source).possible(facts), expected, "{source}");
}

use Possible::{AlwaysFalse, AlwaysTrue, Between, Varies};

/// Whether `batch` being each of `lo..=hi` makes the expression true, by trying.
fn tried(expr: &Expr, lo: i64, hi: i64) -> Possible {
    let at = |value| table().with(BATCH, Value::Int(value));
    let holding = (lo..=hi).filter(|value| expr.test(&at(*value)) == Ok(true));
    match holding.count() as i64 {
        0 => AlwaysFalse,
        n if n == hi - lo + 1 => AlwaysTrue,
        _ => Varies,
    }
}

#[test]
fn single_comparisons_are_exact() {
    let mut atoms = Vec::new();
    for op in ["==", "!=", "<", "<=", ">", ">="] {
        for constant in [-3, 0, 4] {
            atoms.push(format!("batch {op} {constant}"));
            atoms.push(format!("{constant} {op} batch"));
            atoms.push(format!("batch {op} {constant}.0"));
        }
    }
    atoms.extend(["<", "<=", ">", ">="].map(|op| format!("batch {op} 2.5")));
    for atom in atoms {
        let expr = compiled(&atom);
        for lo in -5..=6 {
            for hi in lo..=6 {
                is(&atom, &batch(lo, hi), tried(&expr, lo, hi));
            }
        }
    }
}

#[test]
fn remainders() {
    let with = |is| Facts { known: vec![(BATCH, Known::Between(1, 1000))], multiples: vec![(BATCH, 8, is)] };
    is("batch % 8 == 0", &with(true), AlwaysTrue);
    is("batch % 8 == 0", &with(false), AlwaysFalse);
    is("batch % 8 != 0", &with(false), AlwaysTrue);
    is("batch % 8 > 0", &with(false), AlwaysTrue);
    is("batch % 8 == 0", &batch(1, 1000), Varies);
    is("batch % 8 == 0", &batch(9, 15), AlwaysFalse);
    is("batch % 8 == 0", &batch(16, 16), AlwaysTrue);
    is("batch % 8", &batch(9, 15), Between(1, 7));
    is("batch % 8", &batch(7, 9), Between(0, 7));
    is("batch % -8", &batch(-9, 15), Between(0, 7));
    is("batch % seq_len", &batch(3, 5), Varies);
    // What is known of the remainder is not known of what is made of it.
    is("batch % 8 / 4", &with(false), Between(0, 1));
    is("batch % 8 * 3", &with(true), Between(0, 0));
    is("batch % 8 < 8", &Facts::default(), AlwaysTrue);
    // Nothing is said of 4 just because something is said of 8.
    is("batch % 4 == 0", &with(false), Varies);
    // Contradictory facts must not panic.
    let none = Facts {
        known: vec![(BATCH, Known::Between(16, 16))],
        multiples: vec![(BATCH, 8, false), (BATCH, 1, false), (BATCH, 5, true)],
    };
    for m in [8, 1, 5] {
        let _ = compiled(&format!("batch % {m} == 0")).possible(&none);
    }
}

#[test]
fn anything_that_can_fail_varies() {
    is("batch + 1", &batch(0, i64::MAX - 1), Between(1, i64::MAX));
    is("batch + 1", &batch(0, i64::MAX), Varies);
    is("batch + 1 > 0", &batch(0, i64::MAX), Varies);
    is("-batch", &batch(i64::MIN, 0), Varies);
    is("abs(batch)", &batch(i64::MIN, 0), Varies);
    is("batch / -1", &batch(i64::MIN, 0), Varies);
    is("1 / batch >= 0", &batch(0, 5), Varies);
    is("1 / batch", &batch(-1, 1), Varies);
    is("1 / batch >= 0", &batch(1, 5), AlwaysTrue);
    is("1.5 / batch > 0", &batch(0, 5), Varies);
    is("1.5 / batch > 0", &batch(1, 5), AlwaysTrue);
    is("ceil_div(batch, 0) == 1", &batch(1, 2), Varies);
    is("1 / 0 == 1 and false", &Facts::default(), Varies);
}

#[test]
fn what_is_not_reached_cannot_fail() {
    is("batch > 0 and 1 / batch >= 0", &batch(-5, 0), AlwaysFalse);
    is("false and 1 / 0 == 1", &Facts::default(), AlwaysFalse);
    is("true or 1 / 0 == 1", &Facts::default(), AlwaysTrue);
    is("batch <= 0 or 1 / batch >= 0", &batch(-5, 0), AlwaysTrue);
    is("batch in [3, 1 / 0]", &batch(3, 3), AlwaysTrue);
    is("batch in [3, 1 / 0]", &batch(3, 4), Varies);
}

#[test]
fn divisors_of_either_sign() {
    is("batch / -2", &batch(3, 9), Between(-4, -1));
    is("ceil_div(batch, -2)", &batch(-9, -2), Between(1, 5));
    is("7 / batch", &batch(-3, -2), Between(-3, -2));
    is("seq_len / batch", &known(&[(BATCH, Known::Between(-3, -2)), (SEQ_LEN, Known::Between(-6, 5))]), Between(-2, 3));
}

#[test]
fn logic() {
    is("batch > 3 and seq_len > 3", &batch(0, 3), AlwaysFalse);
    is("batch > 3 and seq_len > 3", &batch(4, 9), Varies);
    is("batch <= 3 or seq_len > 3", &batch(0, 3), AlwaysTrue);
    is("not batch <= 3", &batch(0, 3), AlwaysFalse);
    is("(batch > 3) == (batch > 2)", &batch(4, 9), AlwaysTrue);
    is("(batch > 3) != (batch > 2)", &batch(3, 3), AlwaysTrue);
    is("batch in [3, 7]", &batch(4, 6), AlwaysFalse);
    is("batch in [3, 7]", &batch(7, 7), AlwaysTrue);
    is("batch not in [3, 7]", &batch(4, 6), AlwaysTrue);
    is("batch in [3, 7]", &batch(3, 4), Varies);
}

#[test]
fn other_types_are_exact_when_known() {
    let facts = known(&[
        (DTYPE, Known::Exactly(Value::Str("float16"))),
        (SCALE, Known::Exactly(Value::Float(0.5))),
        (CORES, Known::Exactly(Value::Bool(true))),
        (BATCH, Known::Exactly(Value::Int(8))),
        (SEQ_LEN, Known::Between(10, 20)),
    ]);
    is("dtype == float16", &facts, AlwaysTrue);
    is("dtype != float16", &facts, AlwaysFalse);
    is("dtype in [bfloat16, float16]", &facts, AlwaysTrue);
    is("dtype matches 'b*'", &facts, AlwaysFalse);
    is("dtype == operation", &facts, Varies);
    is("scale == 0.5", &facts, AlwaysTrue);
    is("scale > 1", &facts, AlwaysFalse);
    is("scale * seq_len >= 5", &facts, AlwaysTrue);
    is("scale * seq_len > 5", &facts, Varies);
    is("seq_len / scale <= 40", &facts, AlwaysTrue);
    is("seq_len - 0.5 > 9", &facts, AlwaysTrue);
    is("seq_len % 0.75 > 9", &facts, Varies);
    is("min(seq_len, scale) == 0.5", &facts, AlwaysTrue);
    is("abs(-(seq_len * 1.0)) < 21", &facts, AlwaysTrue);
    is("target.has_tensor_cores", &facts, AlwaysTrue);
    is("deterministic", &facts, Varies);
    is("batch == 8", &facts, AlwaysTrue);
    is("batch * 2", &facts, Between(16, 16));
    // Only Bool and Int expressions have outcomes.
    is("scale", &facts, Varies);
    is("dtype", &facts, Varies);
}

#[test]
fn floats_at_the_edge() {
    let scale = |value| known(&[(SCALE, Known::Exactly(value))]);
    let nan = scale(Value::Float(f64::NAN));
    is("scale > 1", &nan, AlwaysFalse);
    is("scale != scale", &nan, AlwaysTrue);
    is("max(scale, 2) == 2", &nan, AlwaysTrue);
    is("abs(-scale) + 1 <= 2", &nan, AlwaysFalse);
    let infinite = scale(Value::Float(f64::INFINITY));
    is("scale > 1e300", &infinite, AlwaysTrue);
    is("scale - scale == 0", &infinite, AlwaysFalse);
    // 0 * inf is NaN, for one of the batches only.
    let both = known(&[(SCALE, Known::Exactly(Value::Float(f64::INFINITY))), (BATCH, Known::Between(-1, 1))]);
    is("batch * scale <= scale", &both, Varies);
    is("scale > 1", &scale(Value::Int(2)), AlwaysTrue);
    is("scale > 1", &known(&[(SCALE, Known::Between(2, 9))]), AlwaysTrue);
    is("scale > 1", &Facts::default(), Varies);
}

#[test]
fn facts_of_the_wrong_type_decide_nothing() {
    for known_as in [Known::Exactly(Value::Bool(true)), Known::Exactly(Value::Str("x"))] {
        is("batch == 1 or batch != 1", &known(&[(BATCH, known_as)]), Varies);
        is("batch * 0", &known(&[(BATCH, known_as)]), Varies);
        is("scale * 0 == 1", &known(&[(SCALE, known_as)]), Varies);
    }
    let range = Known::Between(0, 1);
    is("dtype == x and false", &known(&[(DTYPE, range)]), Varies);
    is("target.has_tensor_cores and false", &known(&[(CORES, range)]), Varies);
    // An empty range has no assignments to be wrong about, and must not panic.
    let _ = compiled("batch % 8 == 0").possible(&batch(5, 1));
}
