//! Functions of one number, element by element.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill, given};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// A function of each element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unary {
    /// Which.
    pub kind: UnaryKind,
}

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the documentation
pub enum UnaryKind {
    Neg,
    Abs,
    Sign,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Sin,
    Cos,
    Tanh,
    Sigmoid,
    Relu,
    Silu,
    Erf,
    Gelu,
    GeluTanh,
    Floor,
    Ceil,
    Round,
    Not,
}

use UnaryKind::*;

impl UnaryKind {
    /// The right number for one number.
    pub fn of(self, x: f64) -> f64 {
        match self {
            Neg => -x,
            Abs => x.abs(),
            // As torch: 0 for a NaN.
            Sign => f64::from(i8::from(x > 0.0) - i8::from(x < 0.0)),
            Exp => x.exp(),
            Log => x.ln(),
            Sqrt => x.sqrt(),
            Rsqrt => 1.0 / x.sqrt(),
            Reciprocal => 1.0 / x,
            Sin => x.sin(),
            Cos => x.cos(),
            Tanh => x.tanh(),
            Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Relu if x < 0.0 => 0.0,
            Relu => x,
            Silu if x == f64::NEG_INFINITY => 0.0,
            Silu => x / (1.0 + (-x).exp()),
            Erf => libm::erf(x),
            Gelu | GeluTanh if x == f64::NEG_INFINITY => 0.0,
            Gelu => 0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)),
            GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                x / (1.0 + (-2.0 * u).exp())
            }
            Floor => x.floor(),
            Ceil => x.ceil(),
            Round => x.round_ties_even(),
            Not => f64::from(u8::from(x == 0.0)),
        }
    }

    /// Whether integers stay integers. Others are floats already: exporters cast before.
    fn of_integers(self) -> bool {
        matches!(self, Neg | Abs | Sign | Relu | Floor | Ceil | Round | Not)
    }
}

impl OpDef for Unary {
    const NAME: &'static str = "unary";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        if !input.dtype.is_float() && !self.kind.of_integers() {
            return Err(ShapeError::Type { at: 0, dtype: input.dtype, expected: "floats".into() });
        }
        let dtype = if self.kind == Not { DType::Bool } else { input.dtype };
        Ok(Meta { dtype, shape: input.shape.clone() })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        fill(output, |index| match (self.kind, Number::of(input, index)) {
            (Not, x) => Number::Int(i64::from(!x.truth())),
            (kind, Number::Float(x)) => Number::Float(kind.of(x)),
            (Neg, Number::Int(i)) => Number::Int(i.wrapping_neg()),
            (Abs, Number::Int(i)) => Number::Int(i.wrapping_abs()),
            (Sign, Number::Int(i)) => Number::Int(i.signum()),
            (Relu, Number::Int(i)) => Number::Int(i.max(0)),
            (_, Number::Int(i)) => Number::Int(i),
        });
        Ok(())
    }

    fn in_place(&self, inputs: Inputs<'_>) -> &'static [usize] {
        let changes = self.kind == Not && inputs.get(0).is_some_and(|input| input.dtype.bits() != 8);
        if changes { &[] } else { &[0] }
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let (elements, each) =
            (output.len().known().unwrap_or(0) as f64, if self.kind.of_integers() { 1.0 } else { 10.0 });
        let bits = |meta: &Meta| f64::from(meta.dtype.bits()) / 8.0;
        let read = inputs.get(0).map_or(0.0, bits);
        Cost { flops: elements * each, bytes: elements * (read + bits(output)) }
    }
}
