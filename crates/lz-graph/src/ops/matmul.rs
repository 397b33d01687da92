//! Products of matrices, with any number of leading axes.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, broadcast, fill, given};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// `alpha · op(a) · op(b)`: a is (…, m, k), b is (…, k, n); leading axes are broadcast.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MatMul {
    /// Whether a is given as (…, k, m).
    pub transpose_a: bool,
    /// Whether b is given as (…, n, k).
    pub transpose_b: bool,
    /// What the product is multiplied with.
    pub alpha: f64,
}

impl Default for MatMul {
    fn default() -> MatMul {
        MatMul { transpose_a: false, transpose_b: false, alpha: 1.0 }
    }
}

impl OpDef for MatMul {
    const NAME: &'static str = "matmul";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(2)?;
        let (a, b) = (inputs.need(0)?, inputs.need(1)?);
        for (at, meta) in [a, b].into_iter().enumerate() {
            if meta.rank() < 2 {
                return Err(ShapeError::Rank { at, rank: meta.rank(), expected: "two or more" });
            }
        }
        if a.dtype != b.dtype {
            let expected = format!("what input 0 is, {}", a.dtype);
            return Err(ShapeError::Type { at: 1, dtype: b.dtype, expected });
        }
        let last = |meta: &Meta, transposed: bool| {
            let (first, second) = (meta.shape[meta.rank() - 2].clone(), meta.shape[meta.rank() - 1].clone());
            if transposed { (second, first) } else { (first, second) }
        };
        let ((m, k), (depth, n)) = (last(a, self.transpose_a), last(b, self.transpose_b));
        if k != depth {
            return Err(ShapeError::sizes(&k, &depth));
        }
        let leading = |meta: &Meta| Meta::new(meta.dtype, meta.shape[..meta.rank() - 2].iter().cloned());
        let mut shape = broadcast(&leading(a), &leading(b))?;
        shape.extend([m, n]);
        Ok(Meta { dtype: a.dtype, shape })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let laid = |view: &TensorView<'_>, transposed: bool| {
            let rank = view.shape().len();
            let mut axes: Vec<usize> = (0..rank).collect();
            if transposed {
                axes.swap(rank - 2, rank - 1);
            }
            view.permuted(&axes).to_tensor()
        };
        let (a, b) = (laid(given(inputs, 0), self.transpose_a), laid(given(inputs, 1), self.transpose_b));
        let (a, b) = (a.view(), b.view());
        let depth = a.shape()[a.shape().len() - 1];
        let exact = !a.dtype().is_float();
        fill(output, |index| {
            let (leading, last) = index.split_at(index.len() - 2);
            let place = |view: &TensorView<'_>, row: i64, column: i64| {
                let rank = view.shape().len();
                let skipped = leading.len() - (rank - 2);
                let mut place: Vec<i64> = view.shape()[..rank - 2]
                    .iter()
                    .zip(&leading[skipped..])
                    .map(|(&n, &i)| if n == 1 { 0 } else { i })
                    .collect();
                place.extend([row, column]);
                place
            };
            let pairs = (0..depth).map(|k| (place(&a, last[0], k), place(&b, k, last[1])));
            if exact {
                let sum = pairs.fold(0i64, |sum, (i, j)| {
                    sum.wrapping_add(a.as_ref().get_int(&i).wrapping_mul(b.as_ref().get_int(&j)))
                });
                Number::Int(if self.alpha == 1.0 { sum } else { (sum as f64 * self.alpha) as i64 })
            } else {
                Number::Float(self.alpha * pairs.map(|(i, j)| a.get(&i) * b.get(&j)).sum::<f64>())
            }
        });
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let depth = inputs.get(0).and_then(|a| a.shape[a.rank() - if self.transpose_a { 2 } else { 1 }].known());
        let products = output.len().known().unwrap_or(0) as f64 * depth.unwrap_or(0) as f64;
        Cost {
            flops: 2.0 * products,
            bytes: inputs.0.iter().flatten().map(|meta| bytes(meta)).sum::<f64>() + bytes(output),
        }
    }
}
