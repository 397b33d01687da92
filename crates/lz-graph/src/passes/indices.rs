//! Tensors as functions of their indices: what masks are made of.
//!
//! A mask computed from positions is `[i0, i1, …] ↦ keep`, where `keep` is made of comparisons of sums of indices. Such
//! a function
//! is found without sizes that are numbers: `where(iota(s) >= iota(s)[:, None], 0, -inf)` is known for every `s`.

use std::cell::Cell;

use crate::ir::{Constant, Dim, Graph, Meta, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::elements::Number;
use crate::ops::unary::UnaryKind;
use lz_abi::DType;

/// `Σ steps[a] · index[a] + start`: an integer that depends on the index.
#[derive(Clone, Debug, PartialEq)]
pub struct Lin {
    /// By axis.
    pub steps: Vec<i64>,
    /// At index 0.
    pub start: Dim,
}

/// A truth value that depends on the index.
#[derive(Clone, Debug, PartialEq)]
pub enum Truth {
    /// The same everywhere.
    Known(bool),
    /// Whether the integer is 0 or more.
    Positive(Lin),
    /// Whether all of them are true.
    All(Vec<Truth>),
    /// Whether one of them is true.
    One(Vec<Truth>),
}

/// An element that depends on the index.
#[derive(Clone, Debug, PartialEq)]
pub enum Term {
    /// An integer.
    Int(Lin),
    /// A truth value.
    Truth(Truth),
    /// One number if the truth value is true, another one otherwise.
    Choice(Truth, f64, f64),
}

impl Lin {
    fn constant(rank: usize, start: Dim) -> Lin {
        Lin { steps: vec![0; rank], start }
    }

    fn plus(self, other: Lin) -> Lin {
        let steps = self.steps.iter().zip(&other.steps).map(|(a, b)| a + b).collect();
        Lin { steps, start: self.start + other.start }
    }

    fn times(self, by: i64) -> Lin {
        Lin { steps: self.steps.iter().map(|step| step * by).collect(), start: self.start * Dim::from(by) }
    }

    fn known(&self) -> Option<i64> {
        self.steps.iter().all(|step| *step == 0).then(|| self.start.known()).flatten()
    }
}

impl Truth {
    /// The opposite. An integer is not 0 or more if it is −1 or less.
    pub fn not(self) -> Truth {
        match self {
            Truth::Known(known) => Truth::Known(!known),
            Truth::Positive(lin) => {
                let rank = lin.steps.len();
                Truth::Positive(lin.times(-1).plus(Lin::constant(rank, Dim::from(-1))))
            }
            Truth::All(parts) => Truth::One(parts.into_iter().map(Truth::not).collect()),
            Truth::One(parts) => Truth::All(parts.into_iter().map(Truth::not).collect()),
        }
    }

    fn and(self, other: Truth) -> Truth {
        match (self, other) {
            (Truth::Known(true), other) | (other, Truth::Known(true)) => other,
            (Truth::Known(false), _) | (_, Truth::Known(false)) => Truth::Known(false),
            (Truth::All(mut parts), Truth::All(others)) => {
                parts.extend(others);
                Truth::All(parts)
            }
            (Truth::All(mut parts), other) | (other, Truth::All(mut parts)) => {
                parts.push(other);
                Truth::All(parts)
            }
            (a, b) => Truth::All(vec![a, b]),
        }
    }

    fn or(self, other: Truth) -> Truth {
        self.not().and(other.not()).not()
    }

    fn map(self, f: &impl Fn(Lin) -> Option<Lin>) -> Option<Truth> {
        let all = |parts: Vec<Truth>| parts.into_iter().map(|part| part.map(f)).collect::<Option<Vec<Truth>>>();
        Some(match self {
            Truth::Known(known) => Truth::Known(known),
            Truth::Positive(lin) => Truth::Positive(f(lin)?),
            Truth::All(parts) => Truth::All(all(parts)?),
            Truth::One(parts) => Truth::One(all(parts)?),
        })
    }
}

impl Term {
    fn number(number: f64) -> Term {
        Term::Choice(Truth::Known(true), number, number)
    }

    /// The same with other indices.
    fn map(self, f: &impl Fn(Lin) -> Option<Lin>) -> Option<Term> {
        Some(match self {
            Term::Int(lin) => Term::Int(f(lin)?),
            Term::Truth(truth) => Term::Truth(truth.map(f)?),
            Term::Choice(truth, yes, no) => Term::Choice(truth.map(f)?, yes, no),
        })
    }

    /// As a choice of numbers.
    fn choice(self) -> Option<(Truth, f64, f64)> {
        match self {
            Term::Int(lin) => lin.known().map(|n| (Truth::Known(true), n as f64, n as f64)),
            Term::Truth(truth) => Some((truth, 1.0, 0.0)),
            Term::Choice(truth, yes, no) => Some((truth, yes, no)),
        }
    }

    /// Whether it is not 0.
    fn truth(self) -> Option<Truth> {
        match self.choice()? {
            (_, yes, no) if (yes != 0.0) == (no != 0.0) => Some(Truth::Known(yes != 0.0)),
            (truth, yes, _) => Some(if yes != 0.0 { truth } else { truth.not() }),
        }
    }
}

/// Reads values of a graph as functions of their indices.
pub struct Reader<'g> {
    graph: &'g Graph,
    /// How many values may still be looked at: a mask is made of few.
    left: Cell<usize>,
}

impl<'g> Reader<'g> {
    /// Of this graph.
    pub fn new(graph: &'g Graph) -> Reader<'g> {
        Reader { graph, left: Cell::new(1000) }
    }

    /// An element of a value; `None` if it is not known to be such a function.
    pub fn term(&self, value: ValueId) -> Option<Term> {
        self.left.set(self.left.get().checked_sub(1)?);
        let meta = self.graph.meta(value);
        if let Some(constant) = self.graph.constant(value) {
            return of_constant(constant, meta);
        }
        let (_, made) = self.graph.made_by(value)?;
        let input = |at: usize| made.inputs.get(at).copied().flatten();
        let rank = meta.rank();
        // An input, broadcast to the result.
        let wide = |at: usize| {
            let input = input(at)?;
            let from = self.graph.meta(input);
            let skipped = rank.checked_sub(from.rank())?;
            self.term(input)?.map(&|lin: Lin| {
                let mut steps = vec![0; rank];
                for (axis, step) in lin.steps.iter().enumerate() {
                    // An axis of size 1 has index 0.
                    steps[axis + skipped] = if from.shape[axis].is(1) { 0 } else { *step };
                }
                Some(Lin { steps, start: lin.start })
            })
        };
        match &made.op {
            Op::Iota(iota) if !iota.dtype.is_float() || iota.dtype == DType::F64 || iota.dtype == DType::F32 => {
                Some(Term::Int(Lin { steps: vec![iota.step], start: iota.start.clone() }))
            }
            Op::Full(full) => Some(match full.value.of_type(full.dtype) {
                Number::Int(i) if full.dtype != DType::Bool => Term::Int(Lin::constant(rank, Dim::from(i))),
                number => of_number(full.dtype, number.float(), rank),
            }),
            Op::Cast(cast) => {
                let term = self.term(input(0)?)?;
                Some(match (term, cast.dtype) {
                    (term, DType::Bool) => Term::Truth(term.truth()?),
                    (Term::Int(lin), DType::I64 | DType::I32 | DType::F64 | DType::F32) => Term::Int(lin),
                    (Term::Int(_), _) => return None,
                    (Term::Truth(truth), _) => Term::Choice(truth, 1.0, 0.0),
                    (Term::Choice(truth, yes, no), dtype) => {
                        let round = |x| lz_abi::numeric::rounded(dtype, x);
                        Term::Choice(truth, round(yes), round(no))
                    }
                })
            }
            Op::Unary(unary) => match (unary.kind, self.term(input(0)?)?) {
                (UnaryKind::Not, term) => Some(Term::Truth(term.truth()?.not())),
                (UnaryKind::Neg, Term::Int(lin)) => Some(Term::Int(lin.times(-1))),
                (UnaryKind::Neg, Term::Choice(truth, yes, no)) => Some(Term::Choice(truth, -yes, -no)),
                _ => None,
            },
            Op::Binary(binary) => self.binary(binary.kind, wide(0)?, wide(1)?),
            Op::Where(_) => chosen(wide(0)?.truth()?, wide(1)?, wide(2)?),
            Op::Triangle(triangle) => {
                let (truth, yes, no) = self.term(input(0)?)?.choice()?;
                // j − i − diagonal is 0 or more above the diagonal, 0 or less below it.
                let mut lin = Lin::constant(rank, Dim::from(-triangle.diagonal));
                (lin.steps[rank - 1], lin.steps[rank - 2]) = (1, -1);
                let kept = Truth::Positive(if triangle.upper { lin } else { lin.times(-1) });
                let whole = match no {
                    0.0 => Term::Choice(kept.and(truth), yes, 0.0),
                    _ if yes == no => Term::Choice(kept, yes, 0.0),
                    _ => return None,
                };
                if meta.dtype == DType::Bool { whole.truth().map(Term::Truth) } else { Some(whole) }
            }
            Op::Expand(_) => wide(0),
            Op::Permute(permute) => self.term(input(0)?)?.map(&|lin: Lin| {
                Some(Lin { steps: permute.axes.iter().map(|&axis| lin.steps[axis]).collect(), start: lin.start })
            }),
            Op::Reshape(_) => {
                let source = input(0)?;
                let axes = kept_axes(self.graph.meta(source), meta)?;
                self.term(source)?.map(&|lin: Lin| {
                    let mut steps = vec![0; rank];
                    axes.iter().for_each(|&(from, to)| steps[to] = lin.steps[from]);
                    Some(Lin { steps, start: lin.start })
                })
            }
            Op::Slice(slice) => {
                let axis = meta.axis(slice.axis).ok()?;
                self.term(input(0)?)?.map(&|mut lin: Lin| {
                    lin.start = lin.start + slice.start.clone() * Dim::from(lin.steps[axis]);
                    lin.steps[axis] *= slice.step;
                    Some(lin)
                })
            }
            Op::IndexSelect(select) => {
                let axis = meta.axis(select.axis).ok()?;
                // The index of that axis is itself a function of the index.
                let Term::Int(place) = self.term(input(1)?)? else { return None };
                self.term(input(0)?)?.map(&|mut lin: Lin| {
                    lin.start = lin.start + place.start.clone() * Dim::from(lin.steps[axis]);
                    lin.steps[axis] *= place.steps[0];
                    Some(lin)
                })
            }
            _ => None,
        }
    }

    fn binary(&self, kind: BinaryKind, left: Term, right: Term) -> Option<Term> {
        use BinaryKind::*;
        if let (Term::Int(a), Term::Int(b)) = (&left, &right) {
            let (a, b, rank) = (a.clone(), b.clone(), a.steps.len());
            let less = |a: Lin, b: Lin| Truth::Positive(b.plus(a.times(-1)).plus(Lin::constant(rank, Dim::from(-1))));
            let truth = match kind {
                Add => return Some(Term::Int(a.plus(b))),
                Sub => return Some(Term::Int(a.plus(b.times(-1)))),
                Mul => {
                    return match (a.known(), b.known()) {
                        (_, Some(n)) => Some(Term::Int(a.times(n))),
                        (Some(n), _) => Some(Term::Int(b.times(n))),
                        _ => None,
                    };
                }
                Lt => less(a, b),
                Gt => less(b, a),
                Ge => less(a, b).not(),
                Le => less(b, a).not(),
                Eq => less(a.clone(), b.clone()).not().and(less(b, a).not()),
                Ne => less(a.clone(), b.clone()).or(less(b, a)),
                _ => return None,
            };
            return Some(Term::Truth(truth));
        }
        let is_bool = |term: &Term| matches!(term, Term::Truth(_));
        match kind {
            And if is_bool(&left) && is_bool(&right) => return Some(Term::Truth(left.truth()?.and(right.truth()?))),
            Or if is_bool(&left) && is_bool(&right) => return Some(Term::Truth(left.truth()?.or(right.truth()?))),
            _ => {}
        }
        let ((a, yes, no), (b, also, neither)) = (left.choice()?, right.choice()?);
        let same = |x: f64, y: f64| x == y;
        if same(also, neither) || same(yes, no) {
            // One side is a number.
            let apply = |x: f64, y: f64| match kind {
                Add => Some(x + y),
                Sub => Some(x - y),
                Mul => Some(x * y).filter(|z| !z.is_nan()),
                Eq => Some(f64::from(u8::from(x == y))),
                Ne => Some(f64::from(u8::from(x != y))),
                Lt => Some(f64::from(u8::from(x < y))),
                Le => Some(f64::from(u8::from(x <= y))),
                Gt => Some(f64::from(u8::from(x > y))),
                Ge => Some(f64::from(u8::from(x >= y))),
                _ => None,
            };
            let (truth, first, second) = match same(also, neither) {
                true => (a, apply(yes, also)?, apply(no, also)?),
                false => (b, apply(yes, also)?, apply(yes, neither)?),
            };
            let term = Term::Choice(truth, first, second);
            return if kind.is_comparison() { term.truth().map(Term::Truth) } else { Some(term) };
        }
        // Where one of them is 0 the product is, unless the other one is infinite.
        let finite = (yes * also).is_finite();
        (kind == Mul && no == 0.0 && neither == 0.0 && finite).then(|| Term::Choice(a.and(b), yes * also, 0.0))
    }
}

/// `condition ? a : b` of two choices of the same two numbers, or of truth values.
fn chosen(condition: Truth, a: Term, b: Term) -> Option<Term> {
    let is_bool = matches!((&a, &b), (Term::Truth(_), Term::Truth(_)));
    let ((one, yes, no), (other, also, neither)) = (a.choice()?, b.choice()?);
    let mut numbers = Vec::new();
    for (number, stands) in [
        (yes, one != Truth::Known(false)),
        (no, yes != no && one != Truth::Known(true)),
        (also, other != Truth::Known(false)),
        (neither, also != neither && other != Truth::Known(true)),
    ] {
        if stands && !numbers.contains(&number) {
            numbers.push(number);
        }
    }
    let (first, second) = match numbers[..] {
        [only] => (only, only),
        [first, second] => (first, second),
        _ => return None,
    };
    // Where each of them is the first number.
    let is_first = |truth: Truth, yes: f64, no: f64| match (yes == first, no == first) {
        (true, true) => Truth::Known(true),
        (true, false) => truth,
        (false, true) => truth.not(),
        (false, false) => Truth::Known(false),
    };
    let (one, other) = (is_first(one, yes, no), is_first(other, also, neither));
    let truth = condition.clone().and(one).or(condition.not().and(other));
    let term = Term::Choice(simple(truth), first, second);
    if is_bool { term.truth().map(Term::Truth) } else { Some(term) }
}

/// Without parts that say nothing.
fn simple(truth: Truth) -> Truth {
    match truth {
        Truth::All(parts) => parts.into_iter().map(simple).fold(Truth::Known(true), Truth::and),
        Truth::One(parts) => parts.into_iter().map(simple).fold(Truth::Known(false), Truth::or),
        other => other,
    }
}

fn of_number(dtype: DType, number: f64, rank: usize) -> Term {
    match dtype {
        DType::Bool => Term::Truth(Truth::Known(number != 0.0)),
        dtype if dtype.is_float() => Term::number(lz_abi::numeric::rounded(dtype, number)),
        _ => Term::Int(Lin::constant(rank, Dim::from(number as i64))),
    }
}

/// Axes of a reshape that only adds or removes axes of size 1: pairs of one there and one here.
fn kept_axes(from: &Meta, to: &Meta) -> Option<Vec<(usize, usize)>> {
    let large = |meta: &Meta| (0..meta.rank()).filter(|&axis| !meta.shape[axis].is(1)).collect::<Vec<_>>();
    let (there, here) = (large(from), large(to));
    let same = there.len() == here.len() && there.iter().zip(&here).all(|(&a, &b)| from.shape[a] == to.shape[b]);
    same.then(|| there.into_iter().zip(here).collect())
}

/// A constant: a number, numbers at equal distances along one axis, or two numbers on two sides of a diagonal of the
/// last two
/// axes, or inside and outside of a band along it.
fn of_constant(constant: &Constant, meta: &Meta) -> Option<Term> {
    let (view, rank) = (constant.view(), meta.rank());
    let dtype = view.dtype();
    if view.is_empty() {
        return None;
    }
    let shape = view.shape().to_vec();
    let (width, height) = (*shape.last().unwrap_or(&1), if rank < 2 { 1 } else { shape[rank - 2] });
    let numbers = view.to_f64();
    if numbers.iter().all(|number| *number == numbers[0]) {
        return Some(of_number(dtype, numbers[0], rank));
    }
    if !dtype.is_float() && dtype != DType::Bool {
        // Along one axis only.
        let axis = shape.iter().position(|&n| n as usize == numbers.len())?;
        let step = numbers[1] - numbers[0];
        let even = numbers.iter().enumerate().all(|(i, number)| *number == numbers[0] + step * i as f64);
        let mut lin = Lin::constant(rank, Dim::from(numbers[0] as i64));
        lin.steps[axis] = step as i64;
        return even.then_some(Term::Int(lin));
    }
    let (first, second) = (numbers[0], *numbers.iter().find(|number| **number != numbers[0])?);
    if rank < 2 || numbers.iter().any(|number| *number != first && *number != second) {
        return None;
    }
    // The inside of the band is one of both.
    for inside in [first, second] {
        let diagonals = || {
            numbers.iter().enumerate().map(|(i, number)| {
                let (row, column) = ((i as i64 / width) % height, i as i64 % width);
                (column - row, *number == inside)
            })
        };
        let kept = || diagonals().filter(|(_, inside)| *inside).map(|(diagonal, _)| diagonal);
        let (low, high) = (kept().min()?, kept().max()?);
        if diagonals().any(|(diagonal, inside)| inside != (low <= diagonal && diagonal <= high)) {
            continue;
        }
        let mut ahead = Lin::constant(rank, Dim::from(0));
        (ahead.steps[rank - 1], ahead.steps[rank - 2]) = (1, -1);
        let at_most = ahead.clone().times(-1).plus(Lin::constant(rank, Dim::from(high)));
        let at_least = ahead.plus(Lin::constant(rank, Dim::from(-low)));
        let mut truth = Truth::Known(true);
        // What excludes nothing is left out.
        if high < width - 1 {
            truth = truth.and(Truth::Positive(at_most));
        }
        if low > 1 - height {
            truth = truth.and(Truth::Positive(at_least));
        }
        let outside = if inside == first { second } else { first };
        let term = Term::Choice(truth, inside, outside);
        return if dtype == DType::Bool { term.truth().map(Term::Truth) } else { Some(term) };
    }
    None
}
