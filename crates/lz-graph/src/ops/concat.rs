//! Tensors behind each other.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, axis_of, fill, given, same};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// Its inputs behind each other along one axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Concat {
    /// Which axis; negative ones count from the back.
    pub axis: i64,
}

impl OpDef for Concat {
    const NAME: &'static str = "concat";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        let mut found = inputs.need(0)?.clone();
        let axis = found.axis(self.axis)?;
        for at in 1..inputs.len() {
            let next = inputs.need(at)?;
            if next.dtype != found.dtype {
                let expected = format!("what input 0 is, {}", found.dtype);
                return Err(ShapeError::Type { at, dtype: next.dtype, expected });
            }
            if next.rank() != found.rank() {
                return Err(ShapeError::Rank { at, rank: next.rank(), expected: "as many as input 0" });
            }
            for (i, (own, other)) in found.shape.iter_mut().zip(&next.shape).enumerate() {
                if i == axis {
                    *own = own.clone() + other.clone();
                } else {
                    same(own, other)?;
                }
            }
        }
        Ok(found)
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let axis = axis_of(self.axis, output.shape().len());
        fill(output, |index| {
            let (mut which, mut place) = (0, index.to_vec());
            while place[axis] >= given(inputs, which).shape()[axis] {
                place[axis] -= given(inputs, which).shape()[axis];
                which += 1;
            }
            Number::of(given(inputs, which), &place)
        });
        Ok(())
    }

    fn cost(&self, _: Inputs<'_>, output: &Meta) -> Cost {
        let elements = output.len().known().unwrap_or(0) as usize;
        Cost { flops: 0.0, bytes: 2.0 * output.dtype.bytes_for(elements) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::super::slice::Slice;
    use super::*;
    use lz_abi::DType;
    use proptest::prelude::*;

    #[test]
    fn the_order_is_kept() {
        let (a, b) = (counted(DType::I64, &[2, 1]), counted(DType::I64, &[2, 2]));
        assert_eq!(evaluated(Concat { axis: 1 }, &[&a, &b, &a]).to_f64(), [0., 0., 1., 0., 1., 2., 3., 1.]);
    }

    #[test]
    fn wrong_inputs_are_refused() {
        let (a, b) = (meta(DType::F32, &[2, 3]), meta(DType::F32, &[3, 3]));
        assert_eq!(refused(&Concat { axis: 1 }, &[&a, &b]), "sizes 2 and 3 do not fit together");
        let (half, flat) = (meta(DType::F16, &[2, 3]), meta(DType::F32, &[2]));
        assert!(refused(&Concat { axis: 0 }, &[&a, &half]).contains("what input 0 is, float32"));
        assert!(refused(&Concat { axis: 0 }, &[&a, &flat]).contains("as many as input 0"));
        assert_eq!(refused(&Concat { axis: 0 }, &[]), "input 0 is missing");
    }

    proptest! {
        /// Slices put behind each other are the whole.
        #[test]
        fn slices_make_the_whole(cut in 0i64..5, axis in 0i64..3) {
            let x = counted(DType::F32, &[4, 4, 4]);
            let part = |start: i64, end: i64| {
                evaluated(Slice { axis, start: start.into(), end: end.into(), step: 1 }, &[&x])
            };
            prop_assert_eq!(evaluated(Concat { axis }, &[&part(0, cut), &part(cut, 4)]), x.clone());
        }
    }
}
