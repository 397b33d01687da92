//! Root-mean-square normalisation over the last axis, alone and after a sum.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::given;
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// `x / sqrt(mean(x²) + eps) · w` over the last axis. Without w, it is 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsNorm {
    /// What is added to the mean of squares.
    pub eps: f64,
}

/// The same of a sum: `s = x + residual; s / sqrt(mean(s²) + eps) · w`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddRmsNorm {
    /// What is added to the mean of squares.
    pub eps: f64,
}

/// Checks a tensor of floats with an axis to normalise, and a vector for it.
pub(super) fn check(x: &Meta, vectors: &[(usize, Option<&Meta>)]) -> Result<(), ShapeError> {
    if !x.dtype.is_float() {
        return Err(ShapeError::Type { at: 0, dtype: x.dtype, expected: "floats".into() });
    }
    let Some(last) = x.shape.last() else {
        return Err(ShapeError::Rank { at: 0, rank: 0, expected: "one or more" });
    };
    for &(at, vector) in vectors {
        let Some(vector) = vector else { continue };
        if vector.dtype != x.dtype {
            let expected = format!("what input 0 is, {}", x.dtype);
            return Err(ShapeError::Type { at, dtype: vector.dtype, expected });
        }
        if vector.rank() != 1 {
            return Err(ShapeError::Rank { at, rank: vector.rank(), expected: "1" });
        }
        if vector.shape[0] != *last {
            return Err(ShapeError::sizes(&vector.shape[0], last));
        }
    }
    Ok(())
}

/// Checks that what is added has the same sizes.
pub(super) fn check_sum(x: &Meta, residual: &Meta) -> Result<(), ShapeError> {
    if x.dtype != residual.dtype {
        let expected = format!("what input 0 is, {}", x.dtype);
        return Err(ShapeError::Type { at: 1, dtype: residual.dtype, expected });
    }
    if x.rank() != residual.rank() {
        return Err(ShapeError::Rank { at: 1, rank: residual.rank(), expected: "as many as input 0" });
    }
    match x.shape.iter().zip(&residual.shape).find(|(a, b)| a != b) {
        Some((a, b)) => Err(ShapeError::sizes(a, b)),
        None => Ok(()),
    }
}

fn normalise(numbers: &[f64], eps: f64, weight: Option<&TensorView<'_>>, output: &mut Tensor) {
    let width = *output.shape().last().expect("checked by the shape rule") as usize;
    let weight = weight.map(TensorView::to_f64);
    let results: Vec<f64> = numbers
        .chunks(width.max(1))
        .flat_map(|row| {
            let root = (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + eps).sqrt();
            let weight = weight.as_ref();
            row.iter().enumerate().map(move |(i, x)| x / root * weight.map_or(1.0, |weight| weight[i]))
        })
        .collect();
    *output = Tensor::from_f64(output.dtype(), output.shape(), &results);
}

fn cost(inputs: Inputs<'_>, output: &Meta) -> Cost {
    let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
    let read: f64 = inputs.0.iter().flatten().map(|meta| bytes(meta)).sum();
    Cost { flops: 4.0 * output.len().known().unwrap_or(0) as f64, bytes: read + bytes(output) }
}

impl OpDef for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(2)?;
        let x = inputs.need(0)?;
        check(x, &[(1, inputs.get(1))])?;
        Ok(x.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        normalise(&given(inputs, 0).to_f64(), self.eps, inputs.get(1).and_then(|w| w.as_ref()), output);
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        cost(inputs, output)
    }

    fn operation(&self) -> Option<&'static str> {
        Some("norm.rms")
    }
}

impl OpDef for AddRmsNorm {
    const NAME: &'static str = "add_rms_norm";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(3)?;
        let (x, residual) = (inputs.need(0)?, inputs.need(1)?);
        check_sum(x, residual)?;
        check(x, &[(2, inputs.get(2))])?;
        Ok(x.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (x, residual) = (given(inputs, 0).to_f64(), given(inputs, 1).to_f64());
        let sums: Vec<f64> = x.iter().zip(&residual).map(|(a, b)| a + b).collect();
        normalise(&sums, self.eps, inputs.get(2).and_then(|w| w.as_ref()), output);
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        cost(inputs, output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_abi::DType;

    #[test]
    fn rows_have_a_mean_square_of_one() {
        let x = Tensor::from_f64(DType::F64, &[2, 2], &[3., 4., 0., 2.]);
        let w = Tensor::from_f64(DType::F64, &[2], &[1., 10.]);
        let mut output = Tensor::zeros(DType::F64, &[2, 2]);
        RmsNorm { eps: 0.0 }.evaluate(&[Some(x.view()), Some(w.view())], &mut output).unwrap();
        let root = 12.5f64.sqrt();
        assert_eq!(output.to_f64(), [3.0 / root, 4.0 / root * 10.0, 0.0, 2.0 / 2.0f64.sqrt() * 10.0]);
        let mut sum = Tensor::zeros(DType::F64, &[2, 2]);
        let half = Tensor::from_f64(DType::F64, &[2, 2], &[1.5, 2., 0., 1.]);
        AddRmsNorm { eps: 0.0 }.evaluate(&[Some(half.view()), Some(half.view()), Some(w.view())], &mut sum).unwrap();
        assert_eq!(sum.to_f64(), output.to_f64());
    }

    #[test]
    fn sizes_are_checked() {
        let meta = |shape: &[i64]| Meta::known(DType::F32, shape);
        let (x, w, other) = (meta(&[4, 3]), meta(&[3]), meta(&[4]));
        assert_eq!(RmsNorm { eps: 1e-6 }.infer(Inputs(&[Some(&x), Some(&w)])).unwrap(), x);
        assert!(matches!(
            RmsNorm { eps: 1e-6 }.infer(Inputs(&[Some(&x), Some(&other)])),
            Err(ShapeError::Sizes { .. })
        ));
        assert!(matches!(
            AddRmsNorm { eps: 1e-6 }.infer(Inputs(&[Some(&x), Some(&w)])),
            Err(ShapeError::Rank { at: 1, .. })
        ));
    }
}
