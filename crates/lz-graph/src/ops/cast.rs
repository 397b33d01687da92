//! Another element type.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill, given};
use super::{Alias, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// Each element as another type: floats to integers towards zero, integers to narrower ones by their lowest bits, anything to
/// a truth value by whether it is zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cast {
    /// Which type.
    #[serde(with = "super::attribute::dtype")]
    pub dtype: DType,
}

impl OpDef for Cast {
    const NAME: &'static str = "cast";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        Ok(Meta { dtype: self.dtype, shape: inputs.need(0)?.shape.clone() })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        fill(output, |index| Number::of(input, index));
        Ok(())
    }

    fn alias(&self, inputs: Inputs<'_>, output: &Meta) -> Option<Alias> {
        (inputs.get(0)?.dtype == output.dtype).then_some(Alias { input: 0, offset: 0 })
    }

    fn in_place(&self, inputs: Inputs<'_>) -> &'static [usize] {
        let same = inputs.get(0).is_some_and(|input| input.dtype.bits() == self.dtype.bits());
        if same { &[0] } else { &[] }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta};
    use super::*;

    #[test]
    fn numbers_are_cut_and_wrapped() {
        let x = Tensor::from_f64(DType::F32, &[5], &[1.9, -1.9, 0.0, 300.0, 0.25]);
        let to = |dtype| evaluated(Cast { dtype }, &[&x]).to_f64();
        assert_eq!(to(DType::I64), [1.0, -1.0, 0.0, 300.0, 0.0]);
        assert_eq!(to(DType::U8), [1.0, 255.0, 0.0, 44.0, 0.0]);
        assert_eq!(to(DType::Bool), [1.0, 1.0, 0.0, 1.0, 1.0]);
        let i = Tensor::from_ints(DType::I64, &[2], &[130, -1]);
        assert_eq!(evaluated(Cast { dtype: DType::I8 }, &[&i]).to_f64(), [-126.0, -1.0]);
    }

    #[test]
    fn memory_is_shared_where_the_bits_are() {
        let (float, half) = (meta(DType::F32, &[2]), meta(DType::F16, &[2]));
        let cast = Cast { dtype: DType::F32 };
        assert!(cast.alias(Inputs(&[Some(&float)]), &float).is_some());
        assert!(cast.alias(Inputs(&[Some(&half)]), &float).is_none());
        assert_eq!(cast.in_place(Inputs(&[Some(&meta(DType::I32, &[2]))])), [0]);
        assert!(cast.in_place(Inputs(&[Some(&half)])).is_empty());
    }
}
