//! One number everywhere.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill};
use super::{Cost, OpDef};
use crate::ir::{Dim, DimError, Inputs, Meta, ShapeError, Symbols};

/// A tensor of one number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Full {
    /// The sizes.
    pub shape: Vec<Dim>,
    /// The number.
    #[serde(with = "super::attribute::number")]
    pub value: Number,
    /// Element type.
    #[serde(with = "super::attribute::dtype")]
    pub dtype: DType,
}

impl OpDef for Full {
    const NAME: &'static str = "full";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(0)?;
        if self.shape.iter().any(|size| size.known().is_some_and(|n| n < 0)) {
            let expected = "sizes".to_owned();
            return Err(ShapeError::Attribute { name: "shape", value: format!("{:?}", self.shape), expected });
        }
        Ok(Meta::new(self.dtype, self.shape.iter().cloned()))
    }

    fn at(&self, symbols: &Symbols) -> Result<Full, DimError> {
        let shape = self.shape.iter().map(|size| size.at(symbols).map(Dim::from)).collect::<Result<_, _>>()?;
        Ok(Full { shape, ..*self })
    }

    fn evaluate(&self, _: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let number = self.value.of_type(self.dtype);
        fill(output, |_| number);
        Ok(())
    }

    fn cost(&self, _: Inputs<'_>, output: &Meta) -> Cost {
        let elements = output.len().known().unwrap_or(0) as usize;
        Cost { flops: 0.0, bytes: output.dtype.bytes_for(elements) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, refused};
    use super::*;

    #[test]
    fn every_element_is_the_number() {
        let full = |value: f64, dtype| Full { shape: vec![2.into()], value: value.into(), dtype };
        assert_eq!(evaluated(full(f64::NEG_INFINITY, DType::F32), &[]).to_f64(), [f64::NEG_INFINITY; 2]);
        assert!(evaluated(full(f64::NAN, DType::F16), &[]).to_f64()[0].is_nan());
        assert_eq!(evaluated(full(7.0, DType::I64), &[]).to_f64(), [7.0; 2]);
        assert_eq!(evaluated(full(7.0, DType::Bool), &[]).to_f64(), [1.0; 2]);
        assert_eq!(evaluated(full(0.5, DType::Bool), &[]).to_f64(), [1.0; 2]);
        let negative = Full { shape: vec![(-1).into()], value: 0.0.into(), dtype: DType::F32 };
        assert_eq!(refused(&negative, &[]), "'shape' is [-1], sizes");
    }

    #[test]
    fn integers_are_exact_and_older_documents_have_floats() {
        for (text, wanted) in [("9223372036854775807", i64::MAX), ("-1", -1), ("7.0", 7), ("7", 7)] {
            let attributes = format!(r#"{{"shape": [1], "value": {text}, "dtype": "int64"}}"#);
            let full: Full = serde_json::from_str(&attributes).unwrap();
            assert_eq!(evaluated(full.clone(), &[]).view().get_int(&[0]), wanted);
            let back: Full = serde_json::from_str(&serde_json::to_string(&full).unwrap()).unwrap();
            assert_eq!(back, full);
        }
        let full = |value: i64, dtype| Full { shape: vec![1.into()], value: value.into(), dtype };
        assert_eq!(evaluated(full(256, DType::U8), &[]).to_f64(), [0.0]);
        assert_eq!(evaluated(full(3, DType::F32), &[]).to_f64(), [3.0]);
    }
}
