//! Gates: a function of one tensor times another.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill, given};
use super::unary::UnaryKind;
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// `f(gate) · up`, of two tensors of the same sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gated {
    /// Which function.
    pub kind: GatedKind,
}

/// Functions of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the documentation
pub enum GatedKind {
    SiluMul,
    GeluMul,
    GeluTanhMul,
}

impl GatedKind {
    /// The function of the gate.
    pub fn function(self) -> UnaryKind {
        match self {
            GatedKind::SiluMul => UnaryKind::Silu,
            GatedKind::GeluMul => UnaryKind::Gelu,
            GatedKind::GeluTanhMul => UnaryKind::GeluTanh,
        }
    }

    /// The gate with this function, if there is one.
    pub fn of(kind: UnaryKind) -> Option<GatedKind> {
        [GatedKind::SiluMul, GatedKind::GeluMul, GatedKind::GeluTanhMul]
            .into_iter()
            .find(|gated| gated.function() == kind)
    }
}

impl OpDef for Gated {
    const NAME: &'static str = "gated";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(2)?;
        let (gate, up) = (inputs.need(0)?, inputs.need(1)?);
        if !gate.dtype.is_float() {
            return Err(ShapeError::Type { at: 0, dtype: gate.dtype, expected: "floats".into() });
        }
        super::rms_norm::check_sum(gate, up)?;
        Ok(gate.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (gate, up) = (given(inputs, 0), given(inputs, 1));
        fill(output, |index| Number::Float(self.kind.function().of(gate.get(index)) * up.get(index)));
        Ok(())
    }

    fn in_place(&self, _: Inputs<'_>) -> &'static [usize] {
        &[0, 1]
    }

    fn cost(&self, _: Inputs<'_>, output: &Meta) -> Cost {
        let elements = output.len().known().unwrap_or(0) as f64;
        Cost { flops: 11.0 * elements, bytes: 3.0 * elements * f64::from(output.dtype.bits()) / 8.0 }
    }

    fn operation(&self) -> Option<&'static str> {
        (self.kind == GatedKind::SiluMul).then_some("activation.silu_mul")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_abi::DType;

    #[test]
    fn the_function_is_of_the_gate() {
        let (gate, up) =
            (Tensor::from_f64(DType::F64, &[2], &[1., -2.]), Tensor::from_f64(DType::F64, &[2], &[10., 100.]));
        for kind in [GatedKind::SiluMul, GatedKind::GeluMul, GatedKind::GeluTanhMul] {
            let mut output = Tensor::zeros(DType::F64, &[2]);
            Gated { kind }.evaluate(&[Some(gate.view()), Some(up.view())], &mut output).unwrap();
            assert_eq!(output.to_f64(), [kind.function().of(1.0) * 10.0, kind.function().of(-2.0) * 100.0]);
        }
        let metas = [Meta::known(DType::F64, &[2]), Meta::known(DType::F64, &[3])];
        let infer = |gate, up| Gated { kind: GatedKind::SiluMul }.infer(Inputs(&[Some(gate), Some(up)]));
        assert!(infer(&metas[0], &metas[0]).is_ok());
        assert!(matches!(infer(&metas[0], &metas[1]), Err(ShapeError::Sizes { .. })));
    }
}
