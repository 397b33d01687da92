//! Cuts and moduli divide the fields into cells on which an expression made of
//! thresholds and divisibility is constant, and `possible` can tell.

use std::collections::HashMap;

use lz_expr::{Bounds, Expr, Known, Possible, Value};
use proptest::prelude::*;

use crate::reference::{COMPARISONS, Tree, connected, scope};
use crate::support::Table;

const LOW: i64 = -4;
const HIGH: i64 = 12;

fn atoms() -> BoxedStrategy<Tree> {
    let field = || (0usize..2).prop_map(|i| Box::new(Tree::Field(i)));
    let constant = || (LOW..HIGH).prop_map(|value| Box::new(Tree::Int(value)));
    let op = || prop::sample::select(COMPARISONS.to_vec());
    let zero = || Box::new(Tree::Int(0));
    prop_oneof![
        3 => (op(), field(), constant()).prop_map(|(op, a, b)| Tree::Compare(op, a, b)),
        2 => (op(), constant(), field()).prop_map(|(op, a, b)| Tree::Compare(op, a, b)),
        1 => (op(), field(), -16i32..48).prop_map(|(op, a, b)| {
            Tree::Compare(op, a, Box::new(Tree::Float(f64::from(b) / 4.0)))
        }),
        2 => (field(), prop::collection::vec(constant(), 1..4), any::<bool>()).prop_map(
            |(a, list, negated)| Tree::In(a, list.into_iter().map(|item| *item).collect(), negated)
        ),
        3 => (field(), 1i64..6, any::<bool>()).prop_map(move |(a, m, equal)| {
            let remainder = Box::new(Tree::Arith('%', a, Box::new(Tree::Int(m))));
            Tree::Compare(if equal { "==" } else { "!=" }, remainder, zero())
        }),
    ]
    .boxed()
}

/// Which side of every cut, and whether a multiple of every modulus.
type Cell = (Vec<bool>, Vec<bool>);

fn cell(expr: &Expr, fields: [i64; 2]) -> Cell {
    let of = |slot: u16| fields[usize::from(slot)];
    let sides = expr.cuts().iter().map(|cut| of(cut.slot) >= cut.at);
    let multiples = expr.moduli().iter().map(|m| of(m.slot) % m.modulus == 0);
    (sides.collect(), multiples.collect())
}

/// What a caller that only keeps the cell knows of a field.
struct Corner<'a> {
    expr: &'a Expr,
    fields: [i64; 2],
}

impl Bounds for Corner<'_> {
    fn bounds(&self, slot: u16) -> Known<'_> {
        let value = self.fields[usize::from(slot)];
        let cuts = || self.expr.cuts().iter().filter(|cut| cut.slot == slot);
        let lo = cuts().map(|cut| cut.at).filter(|at| *at <= value).max();
        let hi = cuts().map(|cut| cut.at - 1).filter(|last| *last >= value).min();
        Known::Between(lo.unwrap_or(i64::MIN), hi.unwrap_or(i64::MAX))
    }

    fn divisible(&self, slot: u16, m: i64) -> Option<bool> {
        let known = self.expr.moduli().iter().any(|known| (known.slot, known.modulus) == (slot, m));
        known.then(|| self.fields[usize::from(slot)] % m == 0)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn an_expression_is_constant_on_a_cell_and_outcome_decides_it(tree in connected(atoms())) {
        let expr = Expr::compile(&tree.text(), &scope()).unwrap_or_else(|e| panic!("{e}"));
        let mut seen: HashMap<Cell, (bool, [i64; 2])> = HashMap::new();
        for x in LOW - 2..HIGH + 2 {
            for y in LOW - 2..HIGH + 2 {
                let table = Table(vec![Value::Int(x), Value::Int(y)]);
                let value = expr.test(&table).unwrap();
                let fields = [x, y];
                let (first, at) = *seen.entry(cell(&expr, fields)).or_insert((value, fields));
                prop_assert_eq!(value, first, "{} at {:?} and {:?}", expr.source(), fields, at);
                if at == fields {
                    let expected = if value { Possible::AlwaysTrue } else { Possible::AlwaysFalse };
                    let possible = expr.possible(&Corner { expr: &expr, fields });
                    prop_assert_eq!(possible, expected, "{} near {:?}", expr.source(), fields);
                }
            }
        }
    }
}
