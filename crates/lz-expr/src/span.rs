//! Interval arithmetic: every value an operation can have when its operands
//! are only known to lie in ranges, and whether it can fail.

use crate::ast::{Arith, Cmp};
use crate::eval::float_step;

/// Which results a Bool expression can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Truths {
    pub(crate) yes: bool,
    pub(crate) no: bool,
    pub(crate) fails: bool,
}

impl Truths {
    pub(crate) const EITHER: Truths = Truths { yes: true, no: true, fails: false };

    pub(crate) fn just(value: bool) -> Truths {
        Truths { yes: value, no: !value, fails: false }
    }

    pub(crate) fn or_fails(self, fails: bool) -> Truths {
        Truths { fails: self.fails || fails, ..self }
    }

    pub(crate) fn negated(self) -> Truths {
        Truths { yes: self.no, no: self.yes, ..self }
    }
}

/// How two ranges, neither of which has a NaN in it, can compare.
fn compare<T: PartialOrd>(op: Cmp, left: (T, T), right: (T, T)) -> Truths {
    let (always, never) = match op {
        Cmp::Lt => (left.1 < right.0, left.0 >= right.1),
        Cmp::Le => (left.1 <= right.0, left.0 > right.1),
        Cmp::Gt | Cmp::Ge => return compare(op.flipped(), right, left),
        Cmp::Ne => return compare(Cmp::Eq, left, right).negated(),
        Cmp::Eq => (left.0 == left.1 && right.0 == right.1 && left.0 == right.0, left.1 < right.0 || right.1 < left.0),
    };
    match (always, never) {
        (true, _) => Truths::just(true),
        (_, true) => Truths::just(false),
        _ => Truths::EITHER,
    }
}

/// The ints an Int expression can be: all in `lo..=hi`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntSpan {
    pub(crate) lo: i64,
    pub(crate) hi: i64,
    pub(crate) fails: bool,
}

impl IntSpan {
    pub(crate) const ALL: IntSpan = IntSpan { lo: i64::MIN, hi: i64::MAX, fails: false };

    pub(crate) fn new(lo: i64, hi: i64) -> IntSpan {
        IntSpan { lo, hi, fails: false }
    }

    /// What lies outside 64 bits is an overflow.
    fn wide(lo: i128, hi: i128) -> IntSpan {
        let (min, max) = (i128::from(i64::MIN), i128::from(i64::MAX));
        IntSpan { lo: lo.clamp(min, max) as i64, hi: hi.clamp(min, max) as i64, fails: lo < min || hi > max }
    }

    pub(crate) fn or_fails(self, fails: bool) -> IntSpan {
        IntSpan { fails: self.fails || fails, ..self }
    }

    pub(crate) fn compare(self, op: Cmp, other: IntSpan) -> Truths {
        compare(op, (self.lo, self.hi), (other.lo, other.hi)).or_fails(self.fails || other.fails)
    }

    pub(crate) fn negated(self) -> IntSpan {
        IntSpan::wide(-i128::from(self.hi), -i128::from(self.lo)).or_fails(self.fails)
    }

    pub(crate) fn abs(self) -> IntSpan {
        let (lo, hi) = (i128::from(self.lo), i128::from(self.hi));
        let least = if lo > 0 {
            lo
        } else if hi < 0 {
            -hi
        } else {
            0
        };
        IntSpan::wide(least, lo.abs().max(hi.abs())).or_fails(self.fails)
    }

    pub(crate) fn least(self, other: IntSpan) -> IntSpan {
        IntSpan::new(self.lo.min(other.lo), self.hi.min(other.hi)).or_fails(self.fails || other.fails)
    }

    pub(crate) fn greatest(self, other: IntSpan) -> IntSpan {
        IntSpan::new(self.lo.max(other.lo), self.hi.max(other.hi)).or_fails(self.fails || other.fails)
    }

    pub(crate) fn step(self, op: Arith, other: IntSpan) -> IntSpan {
        let (al, ah) = (i128::from(self.lo), i128::from(self.hi));
        let (bl, bh) = (i128::from(other.lo), i128::from(other.hi));
        let span = match op {
            Arith::Add => IntSpan::wide(al + bl, ah + bh),
            Arith::Sub => IntSpan::wide(al - bh, ah - bl),
            Arith::Mul => {
                let corners = [al * bl, al * bh, ah * bl, ah * bh];
                IntSpan::wide(least_of(corners), greatest_of(corners))
            }
            Arith::Div => self.quotient(other, |a, b| a / b),
            Arith::Rem => self.remainder(other),
        };
        span.or_fails(self.fails || other.fails)
    }

    pub(crate) fn ceil_div(self, other: IntSpan) -> IntSpan {
        let rounded_up = |a: i128, b: i128| a / b + i128::from(a % b != 0 && (a < 0) == (b < 0));
        self.quotient(other, rounded_up).or_fails(self.fails || other.fails)
    }

    /// `divide` rounds a quotient monotonically, so that over divisors of one
    /// sign its extremes are at the corners.
    fn quotient(self, other: IntSpan, divide: impl Fn(i128, i128) -> i128) -> IntSpan {
        let (al, ah) = (i128::from(self.lo), i128::from(self.hi));
        let mut range: Option<(i128, i128)> = None;
        for (bl, bh) in [(other.lo, other.hi.min(-1)), (other.lo.max(1), other.hi)] {
            if bl > bh {
                continue;
            }
            let (bl, bh) = (i128::from(bl), i128::from(bh));
            let corners = [divide(al, bl), divide(al, bh), divide(ah, bl), divide(ah, bh)];
            let (lo, hi) = (least_of(corners), greatest_of(corners));
            range = Some(range.map_or((lo, hi), |(l, h)| (l.min(lo), h.max(hi))));
        }
        let by_zero = other.lo <= 0 && 0 <= other.hi;
        match range {
            Some((lo, hi)) => IntSpan::wide(lo, hi).or_fails(by_zero),
            None => IntSpan::ALL.or_fails(true),
        }
    }

    fn remainder(self, other: IntSpan) -> IntSpan {
        let by_zero = other.lo <= 0 && 0 <= other.hi;
        let (least, greatest) = {
            let size = other.abs_range();
            (size.0.max(1), size.1)
        };
        if greatest == 0 {
            return IntSpan::ALL.or_fails(true);
        }
        let (al, ah) = (i128::from(self.lo), i128::from(self.hi));
        let one_block = least == greatest && ah - al < greatest && al.rem_euclid(least) <= ah.rem_euclid(least);
        let (lo, hi) = if one_block {
            (al.rem_euclid(least), ah.rem_euclid(least))
        } else if al >= 0 && ah < least {
            (al, ah)
        } else if al >= 0 {
            (0, ah.min(greatest - 1))
        } else {
            (0, greatest - 1)
        };
        IntSpan::wide(lo, hi).or_fails(by_zero)
    }

    fn abs_range(self) -> (i128, i128) {
        let (lo, hi) = (i128::from(self.lo), i128::from(self.hi));
        let spans_zero = lo <= 0 && 0 <= hi;
        let least = if spans_zero { 0 } else { lo.abs().min(hi.abs()) };
        (least, lo.abs().max(hi.abs()))
    }
}

fn least_of(corners: [i128; 4]) -> i128 {
    corners.into_iter().fold(i128::MAX, i128::min)
}

fn greatest_of(corners: [i128; 4]) -> i128 {
    corners.into_iter().fold(i128::MIN, i128::max)
}

/// The floats a Float expression can be. A range is either one value, which may
/// be infinite or NaN, or has finite ends and no NaN in it; `None` is anything.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloatSpan {
    pub(crate) range: Option<(f64, f64)>,
    pub(crate) fails: bool,
}

impl FloatSpan {
    pub(crate) const ALL: FloatSpan = FloatSpan { range: None, fails: false };

    pub(crate) fn point(value: f64) -> FloatSpan {
        FloatSpan { range: Some((value, value)), fails: false }
    }

    pub(crate) fn of_ints(span: IntSpan) -> FloatSpan {
        FloatSpan { range: Some((span.lo as f64, span.hi as f64)), fails: span.fails }
    }

    pub(crate) fn or_fails(self, fails: bool) -> FloatSpan {
        FloatSpan { fails: self.fails || fails, ..self }
    }

    fn single(self) -> Option<f64> {
        self.range.filter(|(lo, hi)| lo.to_bits() == hi.to_bits()).map(|(lo, _)| lo)
    }

    fn is_nan(self) -> bool {
        self.single().is_some_and(f64::is_nan)
    }

    fn finite(self) -> Option<(f64, f64)> {
        self.range.filter(|(lo, hi)| lo.is_finite() && hi.is_finite())
    }

    pub(crate) fn compare(self, op: Cmp, other: FloatSpan) -> Truths {
        let truths = if self.is_nan() || other.is_nan() {
            Truths::just(op == Cmp::Ne)
        } else {
            match (self.range, other.range) {
                (Some(left), Some(right)) => compare(op, left, right),
                _ => Truths::EITHER,
            }
        };
        truths.or_fails(self.fails || other.fails)
    }

    pub(crate) fn negated(self) -> FloatSpan {
        FloatSpan { range: self.range.map(|(lo, hi)| (-hi, -lo)), ..self }
    }

    pub(crate) fn abs(self) -> FloatSpan {
        let range = self.range.map(|(lo, hi)| {
            let (a, b) = (lo.abs(), hi.abs());
            let spans_zero = lo < 0.0 && hi > 0.0;
            if spans_zero {
                (0.0, a.max(b))
            } else if a <= b {
                (a, b)
            } else {
                (b, a)
            }
        });
        FloatSpan { range, ..self }
    }

    /// `choose` is `f64::min` or `f64::max`, which pass over a NaN.
    pub(crate) fn choose(self, other: FloatSpan, choose: fn(f64, f64) -> f64) -> FloatSpan {
        let range = match (self.range, other.range) {
            (Some(_), Some(right)) if self.is_nan() => Some(right),
            (Some(left), Some(_)) if other.is_nan() => Some(left),
            (Some(left), Some(right)) => Some((choose(left.0, right.0), choose(left.1, right.1))),
            _ => None,
        };
        FloatSpan { range, fails: self.fails || other.fails }
    }

    pub(crate) fn step(self, op: Arith, other: FloatSpan) -> FloatSpan {
        let fails = self.fails || other.fails;
        if let (Some(left), Some(right)) = (self.single(), other.single()) {
            return match float_step(op, left, right) {
                Ok(value) => FloatSpan::point(value).or_fails(fails),
                Err(_) => FloatSpan::ALL.or_fails(true),
            };
        }
        let divides = matches!(op, Arith::Div | Arith::Rem);
        let by_zero = divides
            && match other.range {
                // Written so that a NaN counts as not zero.
                Some((lo, hi)) => lo <= 0.0 && 0.0 <= hi,
                None => true,
            };
        let range = match (self.finite(), other.finite()) {
            (Some(left), Some(right)) if !by_zero => corners(op, left, right),
            _ => None,
        };
        FloatSpan { range, fails: fails || by_zero }
    }
}

/// Rounding is monotone, so the extremes of a rounded `+ - * /` are at the
/// corners just as those of the exact one are. A remainder has no such shape.
fn corners(op: Arith, left: (f64, f64), right: (f64, f64)) -> Option<(f64, f64)> {
    if op == Arith::Rem {
        return None;
    }
    let mut range = (f64::INFINITY, f64::NEG_INFINITY);
    for (a, b) in [(left.0, right.0), (left.0, right.1), (left.1, right.0), (left.1, right.1)] {
        let value = float_step(op, a, b).ok()?;
        range = (range.0.min(value), range.1.max(value));
    }
    (range.0.is_finite() && range.1.is_finite()).then_some(range)
}
