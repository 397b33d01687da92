//! Axes of size 1 repeated.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::elements::{Number, at, fill, given, same};
use super::{OpDef, View};
use crate::ir::{Dim, DimError, Inputs, Meta, ShapeError, Symbols};

/// The input broadcast to other sizes: aligned at the last axis, axes of size 1 are repeated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expand {
    /// The sizes of the result.
    pub shape: Vec<Dim>,
}

impl OpDef for Expand {
    const NAME: &'static str = "expand";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        let Some(new) = self.shape.len().checked_sub(input.rank()) else {
            let expected = format!("at least {} sizes", input.rank());
            return Err(ShapeError::Attribute { name: "shape", value: format!("{:?}", self.shape), expected });
        };
        for (own, wanted) in input.shape.iter().zip(&self.shape[new..]) {
            if !own.is(1) {
                same(own, wanted)?;
            }
        }
        Ok(Meta::new(input.dtype, self.shape.iter().cloned()))
    }

    fn at(&self, symbols: &Symbols) -> Result<Expand, DimError> {
        let shape = self.shape.iter().map(|size| size.at(symbols).map(Dim::from)).collect::<Result<_, _>>()?;
        Ok(Expand { shape })
    }

    /// Axes that are new or repeated stay at their first element.
    fn view(&self, inputs: Inputs<'_>, output: &Meta) -> Option<View> {
        let input = inputs.get(0)?;
        let new = output.rank() - input.rank();
        let repeated = |axis: usize| axis < new || input.shape[axis - new] != output.shape[axis];
        let axes = (0..output.rank()).map(|axis| if repeated(axis) { (None, 0) } else { (Some(axis - new), 1) });
        Some(View { input: 0, start: SmallVec::from_elem(0, input.rank()), axes: axes.collect() })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        fill(output, |index| Number::of(input, &at(input, index)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::*;
    use lz_abi::DType;

    fn to(shape: &[i64]) -> Expand {
        Expand { shape: shape.iter().map(|&n| Dim::from(n)).collect() }
    }

    #[test]
    fn ones_are_repeated() {
        let x = counted(DType::I64, &[2, 1]);
        assert_eq!(evaluated(to(&[2, 2, 3]), &[&x]).to_f64(), [0., 0., 0., 1., 1., 1., 0., 0., 0., 1., 1., 1.]);
        assert_eq!(evaluated(to(&[2, 0]), &[&x]).shape(), [2, 0]);
    }

    #[test]
    fn other_sizes_are_refused() {
        let x = meta(DType::F32, &[2, 3]);
        assert_eq!(refused(&to(&[4, 3]), &[&x]), "sizes 2 and 4 do not fit together");
        assert_eq!(refused(&to(&[3]), &[&x]), "'shape' is [3], at least 2 sizes");
    }

    #[test]
    fn symbols_get_their_numbers() {
        let op = Expand { shape: vec![Dim::parse("2*s0").unwrap(), Dim::from(3)] };
        assert_eq!(op.at(&Symbols::from_iter([("s0", 4)])), Ok(to(&[8, 3])));
        assert!(op.at(&Symbols::new()).is_err());
    }
}
