//! Numbers at equal distances.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, fill};
use crate::ir::{Dim, DimError, Inputs, Meta, ShapeError, Symbols};

/// `start, start + step, …`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Iota {
    /// The first number.
    pub start: Dim,
    /// From one number to the next.
    pub step: i64,
    /// How many there are.
    pub len: Dim,
    /// Element type.
    #[serde(with = "super::attribute::dtype")]
    pub dtype: DType,
}

impl OpDef for Iota {
    const NAME: &'static str = "iota";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(0)?;
        if self.len.known().is_some_and(|n| n < 0) {
            let expected = "a size".to_owned();
            return Err(ShapeError::Attribute { name: "len", value: self.len.to_string(), expected });
        }
        Ok(Meta::new(self.dtype, [self.len.clone()]))
    }

    fn at(&self, symbols: &Symbols) -> Result<Iota, DimError> {
        let number = |size: &Dim| size.at(symbols).map(Dim::from);
        Ok(Iota { start: number(&self.start)?, len: number(&self.len)?, ..*self })
    }

    fn evaluate(&self, _: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let start = self.start.known().expect("sizes are known here");
        fill(output, |index| Number::Int(start.wrapping_add(self.step.wrapping_mul(index[0]))));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, refused};
    use super::*;

    #[test]
    fn numbers_follow_at_the_step() {
        let iota = |start: i64, step, len: i64, dtype| Iota { start: start.into(), step, len: len.into(), dtype };
        assert_eq!(evaluated(iota(3, -2, 3, DType::I64), &[]).to_f64(), [3., 1., -1.]);
        assert_eq!(evaluated(iota(0, 1, 2, DType::F32), &[]).to_f64(), [0., 1.]);
        assert_eq!(refused(&iota(0, 1, -1, DType::I64), &[]), "'len' is -1, a size");
    }

    #[test]
    fn its_length_may_be_a_symbol() {
        let op = Iota { start: Dim::symbol("s1"), step: 1, len: Dim::symbol("s0"), dtype: DType::I64 };
        assert_eq!(op.infer(Inputs(&[])).unwrap().shape[0], Dim::symbol("s0"));
        let at = op.at(&Symbols::from_iter([("s0", 2), ("s1", 7)])).unwrap();
        assert_eq!(evaluated(at, &[]).to_f64(), [7., 8.]);
    }
}
