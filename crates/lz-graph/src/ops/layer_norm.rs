//! Layer normalization.

use lz_abi::{KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill, given, same};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// `(x - mean(x)) / sqrt(var(x) + eps) · weight + bias` over the last axes, with the biased variance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
    /// How many of the last axes are normalized together.
    #[serde(default = "one")]
    pub axes: usize,
}

fn one() -> usize {
    1
}

/// Mean and `1 / sqrt(variance + eps)`.
pub fn moments(numbers: &[f64], eps: f64) -> (f64, f64) {
    let n = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / n;
    let variance = numbers.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// Checks the input of a normalization, which works on floats.
pub fn floats(at: usize, meta: &Meta) -> Result<(), ShapeError> {
    if meta.dtype.is_float() {
        Ok(())
    } else {
        Err(ShapeError::Type { at, dtype: meta.dtype, expected: "floats".into() })
    }
}

impl OpDef for LayerNorm {
    const NAME: &'static str = "layer_norm";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(3)?;
        let input = inputs.need(0)?;
        floats(0, input)?;
        if self.axes == 0 || self.axes > input.rank() {
            let expected = format!("1 to {}", input.rank());
            return Err(ShapeError::Attribute { name: "axes", value: self.axes.to_string(), expected });
        }
        for at in [1, 2] {
            let Some(meta) = inputs.get(at) else { continue };
            floats(at, meta)?;
            if meta.rank() != self.axes {
                return Err(ShapeError::Rank { at, rank: meta.rank(), expected: "as many as are normalized" });
            }
            for (own, other) in input.shape[input.rank() - self.axes..].iter().zip(&meta.shape) {
                same(own, other)?;
            }
        }
        Ok(input.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let (leading, last) = input.shape().split_at(input.shape().len() - self.axes);
        let (leading, last) = (leading.to_vec(), last.to_vec());
        let rows: Vec<(f64, f64)> = indices(&leading)
            .map(|row| {
                let place = |i: &[i64]| row.iter().chain(i).copied().collect::<Vec<_>>();
                moments(&indices(&last).map(|i| input.get(&place(&i))).collect::<Vec<_>>(), self.eps)
            })
            .collect();
        fill(output, |index| {
            let (row, column) = index.split_at(leading.len());
            let number = row.iter().zip(&leading).fold(0, |number, (i, n)| number * n + i);
            let (mean, scale) = rows[number as usize];
            let of = |i: usize, none: f64| inputs.get(i).and_then(Option::as_ref).map_or(none, |view| view.get(column));
            Number::Float((input.get(index) - mean) * scale * of(1, 1.0) + of(2, 0.0))
        });
        Ok(())
    }

    fn in_place(&self, _: Inputs<'_>) -> &'static [usize] {
        &[0]
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let read: f64 = inputs.0.iter().flatten().map(|meta| bytes(meta)).sum();
        Cost { flops: 8.0 * output.len().known().unwrap_or(0) as f64, bytes: read + bytes(output) }
    }

    /// The catalog's normalizes one axis.
    fn operation(&self) -> Option<&'static str> {
        (self.axes == 1).then_some("norm.layer")
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta, refused, scattered, tried};
    use super::*;
    use lz_abi::DType;
    use proptest::prelude::*;

    #[test]
    fn a_row_by_hand() {
        let x = Tensor::from_f64(DType::F64, &[1, 2], &[1., 3.]);
        let (w, b) = (Tensor::from_f64(DType::F64, &[2], &[2., 5.]), Tensor::from_f64(DType::F64, &[2], &[1., 0.]));
        let op = LayerNorm { eps: 3.0, axes: 1 };
        assert_eq!(evaluated(op.clone(), &[&x, &w, &b]).to_f64(), [0.0, 2.5]);
        assert_eq!(tried(op, &[Some(&x), None, Some(&b)]).unwrap().to_f64(), [0.5, 0.5]);
    }

    #[test]
    fn wrong_inputs_are_refused() {
        let (x, w) = (meta(DType::F32, &[2, 3]), meta(DType::F32, &[2]));
        let op = LayerNorm { eps: 1e-5, axes: 1 };
        assert_eq!(refused(&op, &[&x, &w]), "sizes 3 and 2 do not fit together");
        assert!(refused(&LayerNorm { axes: 3, ..op.clone() }, &[&x]).contains("1 to 2"));
        assert!(refused(&op, &[&meta(DType::I64, &[2])]).contains("floats"));
    }

    proptest! {
        /// Each group has mean 0 and, but for eps, variance 1, whatever was added and multiplied.
        #[test]
        fn groups_are_normalized(rows in 1i64..4, a in 1i64..5, b in 2i64..5, axes in 1usize..3, seed in 0u64..99) {
            let normal = evaluated(LayerNorm { eps: 0.0, axes }, &[&scattered(&[rows, a, b], seed)]).to_f64();
            let width = if axes == 1 { b } else { a * b } as usize;
            for row in normal.chunks(width) {
                let (mean, scale) = moments(row, 0.0);
                prop_assert!(mean.abs() < 1e-9 && (scale - 1.0).abs() < 1e-9, "{mean} {scale}");
            }
        }
    }
}
