//! Functions of two numbers, element by element, with broadcasting. Both have the same element type: exporters cast before.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, at, broadcast, fill, given};
use crate::ir::{Inputs, Meta, ShapeError};

/// A function of the elements of two tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binary {
    /// Which.
    pub kind: BinaryKind,
}

/// Functions of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the documentation
pub enum BinaryKind {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Max,
    Min,
    /// The remainder with the sign of the divisor.
    Remainder,
    /// The quotient, rounded down.
    FloorDiv,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    And,
    Or,
    Xor,
}

use BinaryKind::*;

/// The remainder with the sign of the divisor, as torch has it: of the exact remainder, so that an infinite divisor leaves `a`.
fn remainder(a: f64, b: f64) -> f64 {
    let rest = a % b;
    if rest != 0.0 && (b < 0.0) != (rest < 0.0) { rest + b } else { rest }
}

/// The quotient rounded down, as torch has it: from the exact remainder, so that rounding never reaches the next integer.
fn floor_quotient(a: f64, b: f64) -> f64 {
    if b == 0.0 {
        return a / b;
    }
    let rest = a % b;
    let quotient = (a - rest) / b - if rest != 0.0 && (b < 0.0) != (rest < 0.0) { 1.0 } else { 0.0 };
    match quotient.floor() {
        _ if quotient == 0.0 => 0f64.copysign(a / b),
        floor if quotient - floor > 0.5 => floor + 1.0,
        floor => floor,
    }
}

/// An integer power that wraps. With a negative exponent it is 0, unless the base is 1 or -1.
fn power(a: i64, b: i64) -> i64 {
    match (a, b) {
        (1, _) => 1,
        (-1, _) => 1 - 2 * (b & 1),
        (_, ..0) => 0,
        _ => {
            let (mut found, mut square, mut left) = (1i64, a, b);
            while left > 0 {
                if left & 1 == 1 {
                    found = found.wrapping_mul(square);
                }
                square = square.wrapping_mul(square);
                left >>= 1;
            }
            found
        }
    }
}

impl BinaryKind {
    /// Whether the result is a truth value.
    pub fn is_comparison(self) -> bool {
        matches!(self, Eq | Ne | Lt | Le | Gt | Ge)
    }

    /// Whether both sides can be swapped.
    pub fn commutes(self) -> bool {
        matches!(self, Add | Mul | Max | Min | Eq | Ne | And | Or | Xor)
    }

    fn floats(self, a: f64, b: f64) -> Number {
        Number::Float(match self {
            Add => a + b,
            Sub => a - b,
            Mul => a * b,
            Div => a / b,
            Pow => a.powf(b),
            Max | Min if a.is_nan() || b.is_nan() => f64::NAN,
            Max => a.max(b),
            Min => a.min(b),
            Remainder => remainder(a, b),
            FloorDiv => floor_quotient(a, b),
            kind => return Number::Int(i64::from(kind.truth(a.partial_cmp(&b), a != 0.0, b != 0.0))),
        })
    }

    fn ints(self, a: i64, b: i64) -> Result<Number, KernelError> {
        let zero = || KernelError::BadData { input: "divisor", at: Vec::new(), value: 0, expected: "not zero".into() };
        Ok(Number::Int(match self {
            Add => a.wrapping_add(b),
            Sub => a.wrapping_sub(b),
            Mul => a.wrapping_mul(b),
            Pow => power(a, b),
            Max => a.max(b),
            Min => a.min(b),
            Remainder | FloorDiv | Div if b == 0 => return Err(zero()),
            Remainder => a.wrapping_sub(floor_div(a, b).wrapping_mul(b)),
            FloorDiv | Div => floor_div(a, b),
            And => a & b,
            Or => a | b,
            Xor => a ^ b,
            kind => i64::from(kind.truth(Some(a.cmp(&b)), a != 0, b != 0)),
        }))
    }

    fn truth(self, order: Option<std::cmp::Ordering>, a: bool, b: bool) -> bool {
        match self {
            Eq => order.is_some_and(|o| o.is_eq()),
            Ne => !order.is_some_and(|o| o.is_eq()),
            Lt => order.is_some_and(|o| o.is_lt()),
            Le => order.is_some_and(|o| o.is_le()),
            Gt => order.is_some_and(|o| o.is_gt()),
            Ge => order.is_some_and(|o| o.is_ge()),
            And => a && b,
            Or => a || b,
            _ => a != b,
        }
    }
}

fn floor_div(a: i64, b: i64) -> i64 {
    let quotient = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
}

impl OpDef for Binary {
    const NAME: &'static str = "binary";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(2)?;
        let (left, right) = (inputs.need(0)?, inputs.need(1)?);
        if left.dtype != right.dtype {
            let expected = format!("what input 0 is, {}", left.dtype);
            return Err(ShapeError::Type { at: 1, dtype: right.dtype, expected });
        }
        if left.dtype.is_float() && matches!(self.kind, And | Or | Xor) {
            return Err(ShapeError::Type { at: 0, dtype: left.dtype, expected: "integers or truth values".into() });
        }
        if !left.dtype.is_float() && self.kind == Div {
            return Err(ShapeError::Type { at: 0, dtype: left.dtype, expected: "floats".into() });
        }
        let dtype = if self.kind.is_comparison() { DType::Bool } else { left.dtype };
        Ok(Meta { dtype, shape: broadcast(left, right)? })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (left, right) = (given(inputs, 0), given(inputs, 1));
        // The only thing that can be wrong with the data.
        let divides = !right.dtype().is_float() && matches!(self.kind, Remainder | FloorDiv);
        let mut indices = lz_abi::indices(right.shape());
        if let Some(index) = indices.find(|index| divides && right.as_ref().get_int(index) == 0) {
            let at = index.to_vec();
            return Err(KernelError::BadData { input: "divisor", at, value: 0, expected: "not zero".into() });
        }
        fill(output, |index| match (Number::of(left, &at(left, index)), Number::of(right, &at(right, index))) {
            (Number::Int(a), Number::Int(b)) => self.kind.ints(a, b).expect("no divisor is zero"),
            (a, b) => self.kind.floats(a.float(), b.float()),
        });
        Ok(())
    }

    fn in_place(&self, inputs: Inputs<'_>) -> &'static [usize] {
        let (Some(left), Some(right)) = (inputs.get(0), inputs.get(1)) else { return &[] };
        if self.kind.is_comparison() && left.dtype.bits() != 8 {
            return &[];
        }
        let whole = |one: &Meta, other: &Meta| {
            broadcast(left, right).is_ok_and(|shape| one.shape == shape) && {
                // Nothing of it is read twice.
                one.rank() >= other.rank()
            }
        };
        match (whole(left, right), whole(right, left)) {
            (true, true) => &[0, 1],
            (true, false) => &[0],
            (false, true) => &[1],
            (false, false) => &[],
        }
    }
}
