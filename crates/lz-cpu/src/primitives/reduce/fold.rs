//! Folding numbers: many at a time, then their results.

use super::super::elementwise::binary::Arithmetic;
use super::super::elementwise::numbers::Number;
use super::ReduceOp;

/// Numbers that are added side by side.
const LANES: usize = 64;

/// What numbers are added up as.
pub trait Fold: Arithmetic {
    /// The largest one there is, and the smallest.
    const ENDS: (Self, Self);
    /// 0 or 1.
    fn truth(truth: bool) -> Self;
    /// Divided by a number.
    fn over(self, count: usize) -> Self;
}

/// A number that can be added up.
pub trait Sums: Arithmetic {
    /// What it is added up as.
    type Sum: Fold;
    /// As that.
    fn sum(self) -> Self::Sum;
    /// The sum of some numbers, of a block of them.
    fn block(numbers: &[Self]) -> Self::Sum;

    /// What an operation makes of nothing.
    fn begin(op: ReduceOp) -> Self::Sum {
        let (largest, smallest) = Self::Sum::ENDS;
        match op {
            ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Any => Self::Sum::truth(false),
            ReduceOp::Prod | ReduceOp::All => Self::Sum::truth(true),
            ReduceOp::Max => smallest,
            ReduceOp::Min => largest,
        }
    }

    /// What an operation makes of a result and one more number.
    #[inline(always)]
    fn one(op: ReduceOp, sum: Self::Sum, x: Self) -> Self::Sum {
        match op {
            ReduceOp::Sum | ReduceOp::Mean => Arithmetic::add(sum, x.sum()),
            ReduceOp::Prod => Arithmetic::mul(sum, x.sum()),
            ReduceOp::Max => Arithmetic::max(x.sum(), sum),
            ReduceOp::Min => Arithmetic::min(x.sum(), sum),
            ReduceOp::Any => Self::Sum::truth(sum.is_true() | x.is_true()),
            ReduceOp::All => Self::Sum::truth(sum.is_true() & x.is_true()),
        }
    }

    /// What it makes of a result and a block of numbers.
    #[inline(always)]
    fn fold_row(op: ReduceOp, numbers: &[Self], sum: Self::Sum) -> Self::Sum {
        match op {
            ReduceOp::Sum | ReduceOp::Mean => Arithmetic::add(sum, Self::block(numbers)),
            ReduceOp::Max | ReduceOp::Min => match extreme(op, numbers) {
                Some(found) => Self::one(op, sum, found),
                None => sum,
            },
            ReduceOp::Prod => numbers.iter().fold(sum, |sum, &x| Self::one(ReduceOp::Prod, sum, x)),
            ReduceOp::Any => numbers.iter().fold(sum, |sum, &x| Self::one(ReduceOp::Any, sum, x)),
            ReduceOp::All => numbers.iter().fold(sum, |sum, &x| Self::one(ReduceOp::All, sum, x)),
        }
    }

    /// What it makes of as many results as there are numbers.
    #[inline(always)]
    fn fold_columns(op: ReduceOp, numbers: &[Self], sums: &mut [u64]) {
        let all = sums.iter_mut().zip(numbers);
        macro_rules! each {
            ($op:expr) => {
                all.for_each(|(sum, &x)| *sum = bits(Self::one($op, number(*sum), x)))
            };
        }
        match op {
            ReduceOp::Sum | ReduceOp::Mean => each!(ReduceOp::Sum),
            ReduceOp::Prod => each!(ReduceOp::Prod),
            ReduceOp::Max => each!(ReduceOp::Max),
            ReduceOp::Min => each!(ReduceOp::Min),
            ReduceOp::Any => each!(ReduceOp::Any),
            ReduceOp::All => each!(ReduceOp::All),
        }
    }

    /// A sum divided by how many numbers there were.
    fn divided(sum: Self::Sum, count: usize) -> Self::Sum {
        sum.over(count)
    }
}

/// The largest or smallest of some numbers; none of none.
#[inline(always)]
fn extreme<A: Arithmetic>(op: ReduceOp, numbers: &[A]) -> Option<A> {
    #[inline(always)]
    fn of<A: Arithmetic>(numbers: &[A], first: A, better: impl Fn(A, A) -> A) -> A {
        let (chunks, rest) = numbers.as_chunks::<LANES>();
        let mut lanes = [first; LANES];
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = better(chunk[i], lanes[i]);
            }
        }
        lanes.iter().chain(rest).fold(first, |best, &x| better(x, best))
    }
    let &first = numbers.first()?;
    Some(match op {
        ReduceOp::Min => of(numbers, first, A::min),
        _ => of(numbers, first, A::max),
    })
}

/// A number that beats the one before, and its place.
pub struct Found {
    pub number: u64,
    pub at: usize,
}

/// The first place of the largest or smallest number, if it beats the best one before.
#[inline(always)]
pub fn find<A: Sums>(op: ReduceOp, numbers: &[A], best: Option<u64>) -> Option<Found> {
    let found = extreme(op, numbers)?;
    let nan = found.partial_cmp(&found).is_none();
    if let Some(best) = best.map(number::<A::Sum>) {
        let beaten = match op {
            ReduceOp::Min => found.sum() < best,
            _ => found.sum() > best,
        };
        if best.partial_cmp(&best).is_none() || !(beaten || nan) {
            return None;
        }
    }
    let at = numbers.iter().position(|x| if nan { x.partial_cmp(x).is_none() } else { *x == found })?;
    Some(Found { number: bits(found.sum()), at })
}

/// The bits of a sum, which has eight bytes.
#[inline(always)]
pub fn bits<S: Fold>(sum: S) -> u64 {
    const { assert!(size_of::<S>() == 8) };
    // SAFETY: eight bytes of each, without padding.
    unsafe { std::mem::transmute_copy(&sum) }
}

/// A sum of its bits.
#[inline(always)]
pub fn number<S: Fold>(bits: u64) -> S {
    const { assert!(size_of::<S>() == 8) };
    // SAFETY: sums are float64 and int64, of which any bits make one.
    unsafe { std::mem::transmute_copy(&bits) }
}

impl Fold for f64 {
    const ENDS: (f64, f64) = (f64::INFINITY, f64::NEG_INFINITY);

    #[inline(always)]
    fn truth(truth: bool) -> f64 {
        if truth { 1.0 } else { 0.0 }
    }

    fn over(self, count: usize) -> f64 {
        self / count as f64
    }
}

impl Fold for i64 {
    const ENDS: (i64, i64) = (i64::MAX, i64::MIN);

    #[inline(always)]
    fn truth(truth: bool) -> i64 {
        truth.into()
    }

    fn over(self, count: usize) -> i64 {
        self.checked_div(count as i64).unwrap_or(0)
    }
}

macro_rules! sums {
    ($($type:ty => $sum:ty;)+) => {
        $(impl Sums for $type {
            type Sum = $sum;

            #[inline(always)]
            fn sum(self) -> $sum {
                self.into()
            }

            #[inline(always)]
            fn block(numbers: &[$type]) -> $sum {
                let (chunks, rest) = numbers.as_chunks::<LANES>();
                let mut lanes = [<$type>::default(); LANES];
                for chunk in chunks {
                    for i in 0..LANES {
                        lanes[i] = Arithmetic::add(lanes[i], chunk[i]);
                    }
                }
                lanes.iter().chain(rest).fold(<$sum>::default(), |sum, &x| Arithmetic::add(sum, <$sum>::from(x)))
            }
        })+
    };
}

sums! {
    f32 => f64;
    f64 => f64;
    i64 => i64;
}

impl Sums for i32 {
    type Sum = i64;

    #[inline(always)]
    fn sum(self) -> i64 {
        self.into()
    }

    /// Sums of int32 may be beyond it.
    #[inline(always)]
    fn block(numbers: &[i32]) -> i64 {
        numbers.iter().fold(0i64, |sum, &x| sum.wrapping_add(x.into()))
    }
}
