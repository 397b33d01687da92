//! A linear layer: a product with weights, and what fits into its last step.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::given;
use super::unary::UnaryKind;
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// `activation(x · Wᵀ + b) + residual`: x is (…, in), W is (out, in), b is (out), the residual is (…, out).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Linear {
    /// What is applied to the product with its bias.
    pub activation: Activation,
}

/// A function that kernels of linear layers can apply before they store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the documentation
pub enum Activation {
    #[default]
    None,
    Relu,
    Gelu,
    GeluTanh,
    Silu,
}

impl Activation {
    /// The function as an operation of its own; `None` if there is nothing to do.
    pub fn kind(self) -> Option<UnaryKind> {
        match self {
            Activation::None => None,
            Activation::Relu => Some(UnaryKind::Relu),
            Activation::Gelu => Some(UnaryKind::Gelu),
            Activation::GeluTanh => Some(UnaryKind::GeluTanh),
            Activation::Silu => Some(UnaryKind::Silu),
        }
    }

    /// The activation that is this function, if there is one.
    pub fn of(kind: UnaryKind) -> Option<Activation> {
        [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu]
            .into_iter()
            .find(|activation| activation.kind() == Some(kind))
    }
}

impl OpDef for Linear {
    const NAME: &'static str = "linear";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(4)?;
        let (x, w) = (inputs.need(0)?, inputs.need(1)?);
        let rank = |at, meta: &Meta, fits: bool, expected| {
            if fits { Ok(()) } else { Err(ShapeError::Rank { at, rank: meta.rank(), expected }) }
        };
        rank(0, x, x.rank() >= 1, "one or more")?;
        rank(1, w, w.rank() == 2, "2")?;
        if !x.dtype.is_float() {
            return Err(ShapeError::Type { at: 0, dtype: x.dtype, expected: "floats".into() });
        }
        for at in 1..4 {
            if let Some(other) = inputs.get(at).filter(|other| other.dtype != x.dtype) {
                let expected = format!("what input 0 is, {}", x.dtype);
                return Err(ShapeError::Type { at, dtype: other.dtype, expected });
            }
        }
        let last = x.rank() - 1;
        if x.shape[last] != w.shape[1] {
            return Err(ShapeError::sizes(&x.shape[last], &w.shape[1]));
        }
        let mut shape = x.shape.clone();
        shape[last] = w.shape[0].clone();
        if let Some(bias) = inputs.get(2) {
            rank(2, bias, bias.rank() == 1, "1")?;
            if bias.shape[0] != w.shape[0] {
                return Err(ShapeError::sizes(&bias.shape[0], &w.shape[0]));
            }
        }
        if let Some(residual) = inputs.get(3) {
            rank(3, residual, residual.rank() == x.rank(), "as many as input 0")?;
            if let Some((a, b)) = residual.shape.iter().zip(&shape).find(|(a, b)| a != b) {
                return Err(ShapeError::sizes(a, b));
            }
        }
        Ok(Meta { dtype: x.dtype, shape })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (x, w) = (given(inputs, 0), given(inputs, 1));
        let numbers = |at: usize| inputs.get(at).and_then(|view| view.as_ref()).map(TensorView::to_f64);
        let (n, k) = (w.shape()[0] as usize, w.shape()[1] as usize);
        let (x, w, bias, residual) = (x.to_f64(), w.to_f64(), numbers(2), numbers(3));
        let rows = output.view().len() / n.max(1);
        let apply = |sum: f64| self.activation.kind().map_or(sum, |kind| kind.of(sum));
        let results: Vec<f64> = (0..rows * n)
            .map(|i| {
                let (row, column) = (i / n, i % n);
                let pairs = x[row * k..][..k].iter().zip(&w[column * k..][..k]);
                let sum = pairs.map(|(a, b)| a * b).sum::<f64>() + bias.as_ref().map_or(0.0, |bias| bias[column]);
                apply(sum) + residual.as_ref().map_or(0.0, |residual| residual[i])
            })
            .collect();
        *output = Tensor::from_f64(output.dtype(), output.shape(), &results);
        Ok(())
    }

    fn in_place(&self, inputs: Inputs<'_>) -> &'static [usize] {
        if inputs.get(3).is_some() { &[3] } else { &[] }
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let depth = inputs.get(1).and_then(|w| w.shape[1].known()).unwrap_or(0) as f64;
        Cost {
            flops: 2.0 * output.len().known().unwrap_or(0) as f64 * depth,
            bytes: inputs.0.iter().flatten().map(|meta| bytes(meta)).sum::<f64>() + bytes(output),
        }
    }

    fn operation(&self) -> Option<&'static str> {
        (self.activation == Activation::None).then_some("mlp.linear")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Op;
    use lz_abi::DType;

    fn metas(shapes: &[&[i64]]) -> Vec<Meta> {
        shapes.iter().map(|shape| Meta::known(DType::F64, shape)).collect()
    }

    fn infer(shapes: &[&[i64]]) -> Result<Meta, ShapeError> {
        let metas = metas(shapes);
        Linear::default().infer(Inputs(&metas.iter().map(Some).collect::<Vec<_>>()))
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(infer(&[&[4, 2, 3], &[5, 3], &[5], &[4, 2, 5]]).unwrap().to_string(), "float64[4, 2, 5]");
        assert_eq!(infer(&[&[3], &[5, 3]]).unwrap().to_string(), "float64[5]");
        assert!(matches!(infer(&[&[2, 4], &[5, 3]]), Err(ShapeError::Sizes { .. })));
        assert!(matches!(infer(&[&[2, 3], &[5, 3], &[3]]), Err(ShapeError::Sizes { .. })));
        assert!(matches!(infer(&[&[2, 3], &[5, 3], &[5], &[1, 5]]), Err(ShapeError::Sizes { .. })));
        assert!(matches!(infer(&[&[2, 3], &[5, 3, 1]]), Err(ShapeError::Rank { at: 1, .. })));
        assert!(matches!(infer(&[&[2, 3]]), Err(ShapeError::Missing { at: 1 })));
    }

    #[test]
    fn the_activation_comes_before_the_residual() {
        let x = Tensor::from_f64(DType::F64, &[2, 2], &[1., 2., -3., 1.]);
        let w = Tensor::from_f64(DType::F64, &[1, 2], &[1., 1.]);
        let (b, r) = (Tensor::from_f64(DType::F64, &[1], &[0.5]), Tensor::from_f64(DType::F64, &[2, 1], &[-10., -20.]));
        let op = Op::named("linear", serde_json::json!({"activation": "relu"})).unwrap();
        let mut output = Tensor::zeros(DType::F64, &[2, 1]);
        op.evaluate(&[Some(x.view()), Some(w.view()), Some(b.view()), Some(r.view())], &mut output).unwrap();
        assert_eq!(output.to_f64(), [3.5 - 10.0, -20.0]);
    }
}
