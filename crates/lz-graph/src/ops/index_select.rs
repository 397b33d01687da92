//! Parts of one axis in any order.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, axis_of, fill, given, index_in, indices_at};
use crate::ir::{Inputs, Meta, ShapeError};

/// The input at some places along one axis. Negative indices count from the back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexSelect {
    /// Which axis; negative ones count from the back.
    pub axis: i64,
}

impl OpDef for IndexSelect {
    const NAME: &'static str = "index_select";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(2)?;
        let (input, ids) = (inputs.need(0)?, inputs.need(1)?);
        indices_at(1, ids)?;
        if ids.rank() != 1 {
            return Err(ShapeError::Rank { at: 1, rank: ids.rank(), expected: "one" });
        }
        let mut found = input.clone();
        found.shape[input.axis(self.axis)?] = ids.shape[0].clone();
        Ok(found)
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (input, ids) = (given(inputs, 0), given(inputs, 1));
        let axis = axis_of(self.axis, input.shape().len());
        // All of them, also where the result has no elements.
        let chosen = (0..ids.len() as i64).map(|i| index_in(ids, &[i], input.shape()[axis]));
        let chosen: Vec<i64> = chosen.collect::<Result<_, _>>()?;
        fill(output, |index| {
            let mut place = index.to_vec();
            place[axis] = chosen[index[axis] as usize];
            Number::of(input, &place)
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused, tried};
    use super::*;
    use lz_abi::DType;

    #[test]
    fn parts_are_found() {
        let x = counted(DType::F32, &[2, 3]);
        let ids = Tensor::from_ints(DType::I64, &[4], &[2, 0, -1, 1]);
        assert_eq!(evaluated(IndexSelect { axis: 1 }, &[&x, &ids]).to_f64(), [2., 0., 2., 1., 5., 3., 5., 4.]);
        assert!(tried(IndexSelect { axis: 0 }, &[Some(&x), Some(&ids)]).is_err());
        let square = meta(DType::I64, &[1, 1]);
        assert!(refused(&IndexSelect { axis: 0 }, &[&meta(DType::F32, &[2]), &square]).contains("takes one"));
    }
}
