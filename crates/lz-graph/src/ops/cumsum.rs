//! Running sums.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, axis_of, fill, given};
use crate::ir::{Inputs, Meta, ShapeError};

/// The sum of each element and those before it along one axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CumSum {
    /// Which axis; negative ones count from the back.
    pub axis: i64,
}

impl OpDef for CumSum {
    const NAME: &'static str = "cumsum";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        input.axis(self.axis)?;
        if input.dtype == DType::Bool {
            return Err(ShapeError::Type { at: 0, dtype: input.dtype, expected: "numbers".into() });
        }
        Ok(input.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let axis = axis_of(self.axis, input.shape().len());
        fill(output, |index| {
            let mut place = index.to_vec();
            let numbers = (0..=index[axis]).map(|i| {
                place[axis] = i;
                Number::of(input, &place)
            });
            let sum = numbers.reduce(|a, b| match (a, b) {
                (Number::Int(a), Number::Int(b)) => Number::Int(a.wrapping_add(b)),
                (a, b) => Number::Float(a.float() + b.float()),
            });
            sum.expect("at least the element itself")
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::*;

    #[test]
    fn sums_run_along_the_axis() {
        let x = counted(DType::I64, &[2, 3]);
        assert_eq!(evaluated(CumSum { axis: 1 }, &[&x]).to_f64(), [0., 1., 3., 3., 7., 12.]);
        assert_eq!(evaluated(CumSum { axis: -2 }, &[&x]).to_f64(), [0., 1., 2., 3., 5., 7.]);
        assert!(refused(&CumSum { axis: 0 }, &[&meta(DType::Bool, &[2])]).contains("numbers"));
    }
}
