//! Layer normalisation of a sum.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::given;
use super::layer_norm::moments;
use super::rms_norm::{check, check_sum};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// `s = x + residual; (s - mean(s)) / sqrt(var(s) + eps) · w + b` over the last axis. Without w it is 1, without b it
/// is 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddLayerNorm {
    /// What is added to the variance.
    pub eps: f64,
}

impl OpDef for AddLayerNorm {
    const NAME: &'static str = "add_layer_norm";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(4)?;
        let (x, residual) = (inputs.need(0)?, inputs.need(1)?);
        check_sum(x, residual)?;
        check(x, &[(2, inputs.get(2)), (3, inputs.get(3))])?;
        Ok(x.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (x, residual) = (given(inputs, 0).to_f64(), given(inputs, 1).to_f64());
        let vector = |at: usize| inputs.get(at).and_then(|view| view.as_ref()).map(TensorView::to_f64);
        let (weight, bias) = (vector(2), vector(3));
        let width = *output.shape().last().expect("checked by the shape rule") as usize;
        let sums: Vec<f64> = x.iter().zip(&residual).map(|(a, b)| a + b).collect();
        let mut results = Vec::with_capacity(sums.len());
        for row in sums.chunks(width.max(1)) {
            let (mean, scale) = moments(row, self.eps);
            results.extend(row.iter().enumerate().map(|(i, x)| {
                let weight = weight.as_ref().map_or(1.0, |weight| weight[i]);
                (x - mean) * scale * weight + bias.as_ref().map_or(0.0, |bias| bias[i])
            }));
        }
        *output = Tensor::from_f64(output.dtype(), output.shape(), &results);
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let read: f64 = inputs.0.iter().flatten().map(|meta| bytes(meta)).sum();
        Cost { flops: 8.0 * output.len().known().unwrap_or(0) as f64, bytes: read + bytes(output) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta, refused, scattered};
    use super::super::layer_norm::LayerNorm;
    use super::*;
    use lz_abi::DType;

    #[test]
    fn it_is_the_norm_of_a_sum() {
        let (x, r) = (scattered(&[2, 3, 4], 1), scattered(&[2, 3, 4], 2));
        let (w, b) = (scattered(&[4], 3), scattered(&[4], 4));
        let sums: Vec<f64> = x.to_f64().iter().zip(r.to_f64()).map(|(a, b)| a + b).collect();
        let sum = Tensor::from_f64(x.dtype(), &[2, 3, 4], &sums);
        let expected = evaluated(LayerNorm { eps: 0.1, axes: 1 }, &[&sum, &w, &b]).to_f64();
        let found = evaluated(AddLayerNorm { eps: 0.1 }, &[&x, &r, &w, &b]).to_f64();
        for (a, b) in found.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-12, "{a} {b}");
        }
    }

    #[test]
    fn sizes_are_checked() {
        let (x, w) = (meta(DType::F32, &[2, 4]), meta(DType::F32, &[3]));
        assert_eq!(refused(&AddLayerNorm { eps: 0.1 }, &[&x, &x, &w]), "sizes 3 and 4 do not fit together");
        assert!(refused(&AddLayerNorm { eps: 0.1 }, &[&x, &w]).contains("as many as input 0"));
    }
}
