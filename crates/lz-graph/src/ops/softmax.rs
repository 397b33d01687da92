//! Softmax over one axis.

use lz_abi::{KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill, given};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// `exp(x - max(x)) / sum(exp(x - max(x)))` over one axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Softmax {
    /// Which axis; negative ones count from the back.
    pub axis: i64,
}

impl OpDef for Softmax {
    const NAME: &'static str = "softmax";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        input.axis(self.axis)?;
        if input.dtype.is_float() {
            Ok(input.clone())
        } else {
            Err(ShapeError::Type { at: 0, dtype: input.dtype, expected: "floats".into() })
        }
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let axis = (self.axis + input.shape().len() as i64) as usize % input.shape().len();
        let mut sizes = input.shape().to_vec();
        let width = std::mem::replace(&mut sizes[axis], 1);
        // The maximum and the sum of each row, by its index with 0 along the axis.
        let rows: std::collections::HashMap<Vec<i64>, (f64, f64)> = indices(&sizes)
            .map(|index| {
                let mut at = index.to_vec();
                let row: Vec<f64> = (0..width)
                    .map(|i| {
                        at[axis] = i;
                        input.get(&at)
                    })
                    .collect();
                let most = row.iter().copied().fold(f64::NEG_INFINITY, |a, b| if b.is_nan() { b } else { a.max(b) });
                (index.to_vec(), (most, row.iter().map(|x| (x - most).exp()).sum()))
            })
            .collect();
        fill(output, |index| {
            let mut row = index.to_vec();
            row[axis] = 0;
            let (most, sum) = rows[&row];
            Number::Float((input.get(index) - most).exp() / sum)
        });
        Ok(())
    }

    fn in_place(&self, _: Inputs<'_>) -> &'static [usize] {
        &[0]
    }

    fn cost(&self, _: Inputs<'_>, output: &Meta) -> Cost {
        let elements = output.len().known().unwrap_or(0) as f64;
        Cost { flops: 5.0 * elements, bytes: 2.0 * elements * f64::from(output.dtype.bits()) / 8.0 }
    }

    fn operation(&self) -> Option<&'static str> {
        Some("activation.softmax")
    }
}
