//! One of two tensors, element by element.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, at, broadcast, fill, given};
use crate::ir::{Inputs, Meta, ShapeError};

/// `condition ? a : b`, with broadcasting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Where {}

impl OpDef for Where {
    const NAME: &'static str = "where";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(3)?;
        let (condition, a, b) = (inputs.need(0)?, inputs.need(1)?, inputs.need(2)?);
        if condition.dtype != DType::Bool {
            return Err(ShapeError::Type { at: 0, dtype: condition.dtype, expected: "truth values".into() });
        }
        if a.dtype != b.dtype {
            let expected = format!("what input 1 is, {}", a.dtype);
            return Err(ShapeError::Type { at: 2, dtype: b.dtype, expected });
        }
        let both = Meta { dtype: a.dtype, shape: broadcast(a, b)? };
        Ok(Meta { dtype: a.dtype, shape: broadcast(condition, &both)? })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (condition, a, b) = (given(inputs, 0), given(inputs, 1), given(inputs, 2));
        fill(output, |index| {
            let chosen = if condition.get(&at(condition, index)) != 0.0 { a } else { b };
            Number::of(chosen, &at(chosen, index))
        });
        Ok(())
    }

    fn in_place(&self, inputs: Inputs<'_>) -> &'static [usize] {
        let Ok(output) = self.infer(inputs) else { return &[] };
        let whole = |i: usize| inputs.get(i).is_some_and(|input| *input == output);
        match (whole(1), whole(2)) {
            (true, true) => &[1, 2],
            (true, false) => &[1],
            (false, true) => &[2],
            (false, false) => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta, refused};
    use super::*;

    #[test]
    fn sizes_are_broadcast() {
        let condition = Tensor::from_ints(DType::Bool, &[2, 1], &[1, 0]);
        let a = Tensor::from_f64(DType::F32, &[3], &[1., 2., 3.]);
        let b = Tensor::from_f64(DType::F32, &[], &[f64::NEG_INFINITY]);
        let chosen = evaluated(Where {}, &[&condition, &a, &b]);
        assert_eq!(chosen.shape(), [2, 3]);
        assert_eq!(chosen.to_f64()[..4], [1., 2., 3., f64::NEG_INFINITY]);
    }

    #[test]
    fn wrong_inputs_are_refused() {
        let (truth, float, half) = (meta(DType::Bool, &[2]), meta(DType::F32, &[2]), meta(DType::F16, &[2]));
        let other = "input 2 is float16, the operation takes what input 1 is, float32";
        assert_eq!(refused(&Where {}, &[&truth, &float, &half]), other);
        let number = "input 0 is float32, the operation takes truth values";
        assert_eq!(refused(&Where {}, &[&float, &float, &float]), number);
        assert_eq!(refused(&Where {}, &[&truth, &float]), "input 2 is missing");
    }

    #[test]
    fn it_writes_over_what_has_its_sizes() {
        let (truth, float, one) = (meta(DType::Bool, &[2]), meta(DType::F32, &[2]), meta(DType::F32, &[1]));
        assert_eq!(Where {}.in_place(Inputs(&[Some(&truth), Some(&float), Some(&one)])), [1]);
    }
}
