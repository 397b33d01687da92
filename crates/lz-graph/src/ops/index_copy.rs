//! Parts of one axis replaced: how a cache is written.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, axis_of, fill, given, index_in, indices_at, same};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// The input, with the parts of the source at some places along one axis. Of equal places the last one counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexCopy {
    /// Which axis; negative ones count from the back.
    pub axis: i64,
}

impl OpDef for IndexCopy {
    const NAME: &'static str = "index_copy";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(3)?;
        let (input, ids, source) = (inputs.need(0)?, inputs.need(1)?, inputs.need(2)?);
        indices_at(1, ids)?;
        let axis = input.axis(self.axis)?;
        if ids.rank() != 1 {
            return Err(ShapeError::Rank { at: 1, rank: ids.rank(), expected: "one" });
        }
        if source.rank() != input.rank() {
            return Err(ShapeError::Rank { at: 2, rank: source.rank(), expected: "as many as input 0" });
        }
        if source.dtype != input.dtype {
            let expected = format!("what input 0 is, {}", input.dtype);
            return Err(ShapeError::Type { at: 2, dtype: source.dtype, expected });
        }
        for (i, (own, other)) in input.shape.iter().zip(&source.shape).enumerate() {
            same(if i == axis { &ids.shape[0] } else { own }, other)?;
        }
        Ok(input.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (input, ids, source) = (given(inputs, 0), given(inputs, 1), given(inputs, 2));
        let axis = axis_of(self.axis, input.shape().len());
        let mut replaced = vec![None; input.shape()[axis] as usize];
        for i in 0..ids.len() as i64 {
            replaced[index_in(ids, &[i], input.shape()[axis])? as usize] = Some(i);
        }
        fill(output, |index| match replaced[index[axis] as usize] {
            None => Number::of(input, index),
            Some(i) => {
                let mut place = index.to_vec();
                place[axis] = i;
                Number::of(source, &place)
            }
        });
        Ok(())
    }

    fn in_place(&self, _: Inputs<'_>) -> &'static [usize] {
        &[0]
    }

    /// Of one that is done in place: what is replaced.
    fn cost(&self, inputs: Inputs<'_>, _: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        Cost { flops: 0.0, bytes: 2.0 * inputs.get(2).map_or(0.0, bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused, tried};
    use super::*;
    use lz_abi::DType;

    #[test]
    fn parts_are_replaced() {
        let x = counted(DType::F32, &[3, 2]);
        let source = Tensor::from_f64(DType::F32, &[3, 2], &[-1., -2., -3., -4., -5., -6.]);
        let ids = Tensor::from_ints(DType::I64, &[3], &[2, 0, -1]);
        let found = evaluated(IndexCopy { axis: 0 }, &[&x, &ids, &source]);
        assert_eq!(found.to_f64(), [-3., -4., 2., 3., -5., -6.]);
    }

    #[test]
    fn wrong_inputs_are_refused() {
        let (x, ids) = (meta(DType::F32, &[3, 2]), meta(DType::I64, &[1]));
        let few = meta(DType::F32, &[2, 2]);
        assert_eq!(refused(&IndexCopy { axis: 0 }, &[&x, &ids, &few]), "sizes 1 and 2 do not fit together");
        let (x, ids) = (counted(DType::F32, &[2]), Tensor::from_ints(DType::I64, &[1], &[2]));
        let source = counted(DType::F32, &[1]);
        assert!(tried(IndexCopy { axis: 0 }, &[Some(&x), Some(&ids), Some(&source)]).is_err());
    }
}
