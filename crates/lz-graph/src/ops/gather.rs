//! Elements by their places along one axis.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, axis_of, given, index_in, indices_at, try_fill};
use crate::ir::{Inputs, Meta, ShapeError};

/// Each index says where along the axis its element is; the other axes are those of the index. As in torch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gather {
    /// Which axis; negative ones count from the back.
    pub axis: i64,
}

impl OpDef for Gather {
    const NAME: &'static str = "gather";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(2)?;
        let (input, ids) = (inputs.need(0)?, inputs.need(1)?);
        indices_at(1, ids)?;
        let axis = input.axis(self.axis)?;
        if ids.rank() != input.rank() {
            return Err(ShapeError::Rank { at: 1, rank: ids.rank(), expected: "as many as input 0" });
        }
        for (i, (size, all)) in ids.shape.iter().zip(&input.shape).enumerate() {
            let beyond = (size.clone() - all.clone()).known().is_some_and(|difference| difference > 0);
            if i != axis && beyond {
                return Err(ShapeError::sizes(all, size));
            }
        }
        Ok(Meta { dtype: input.dtype, shape: ids.shape.clone() })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (input, ids) = (given(inputs, 0), given(inputs, 1));
        let axis = axis_of(self.axis, input.shape().len());
        try_fill(output, |index| {
            let mut place = index.to_vec();
            place[axis] = index_in(ids, index, input.shape()[axis])?;
            Ok(Number::of(input, &place))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused, tried};
    use super::*;
    use lz_abi::DType;

    #[test]
    fn elements_are_found() {
        let x = counted(DType::F32, &[2, 3]);
        let ids = Tensor::from_ints(DType::I64, &[2, 2], &[2, 0, 1, 1]);
        assert_eq!(evaluated(Gather { axis: 1 }, &[&x, &ids]).to_f64(), [2., 0., 4., 4.]);
        let rows = Tensor::from_ints(DType::I64, &[1, 3], &[1, 0, 1]);
        assert_eq!(evaluated(Gather { axis: -2 }, &[&x, &rows]).to_f64(), [3., 1., 5.]);
    }

    #[test]
    fn wrong_indices_are_errors() {
        let x = counted(DType::F32, &[2, 3]);
        let ids = Tensor::from_ints(DType::I64, &[1, 1], &[3]);
        let why = tried(Gather { axis: 1 }, &[Some(&x), Some(&ids)]).unwrap_err();
        assert_eq!(why.to_string(), "indices[0, 0] is 3, an index into 3 elements");
        let (x, many) = (meta(DType::F32, &[2, 3]), meta(DType::I64, &[3, 1]));
        assert_eq!(refused(&Gather { axis: 1 }, &[&x, &many]), "sizes 2 and 3 do not fit together");
    }
}
