//! Rows replaced at places of several axes.

use std::collections::HashMap;

use lz_abi::{KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, at, broadcast, fill, given, index_in, indices_at};
use crate::ir::{Inputs, Meta, Shape, ShapeError};

/// The input, with rows of the source at some places.
///
/// Inputs: x, source, and indices of its first axes, which are broadcast to each other. A row is what the other axes hold. The
/// source has the sizes of the indices and then those of a row, or is broadcast to them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexPut {
    /// Whether rows are added to what is there. Otherwise, of equal places the last one counts.
    #[serde(default)]
    pub accumulate: bool,
}

impl IndexPut {
    /// The sizes of all indices together.
    fn places(inputs: Inputs<'_>) -> Result<Shape, ShapeError> {
        let mut all = Meta::known(inputs.need(2)?.dtype, &[]);
        for at in 2..inputs.len() {
            let ids = inputs.need(at)?;
            indices_at(at, ids)?;
            all.shape = broadcast(&all, ids)?;
        }
        Ok(all.shape)
    }
}

impl OpDef for IndexPut {
    const NAME: &'static str = "index_put";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        let (input, source) = (inputs.need(0)?, inputs.need(1)?);
        inputs.at_most(input.rank() + 2)?;
        if source.dtype != input.dtype {
            let expected = format!("what input 0 is, {}", input.dtype);
            return Err(ShapeError::Type { at: 1, dtype: source.dtype, expected });
        }
        let mut rows = Meta { dtype: input.dtype, shape: IndexPut::places(inputs)? };
        rows.shape.extend(input.shape[inputs.len() - 2..].iter().cloned());
        if broadcast(&rows, source)? != rows.shape {
            return Err(ShapeError::Sizes { left: rows.to_string(), right: source.to_string() });
        }
        Ok(input.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (input, source) = (given(inputs, 0), given(inputs, 1));
        let ids: Vec<&TensorView<'_>> = (2..inputs.len()).map(|i| given(inputs, i)).collect();
        let metas: Vec<Meta> = inputs.iter().flatten().map(|view| Meta::known(view.dtype(), view.shape())).collect();
        let borrowed: Vec<Option<&Meta>> = metas.iter().map(Some).collect();
        let sizes = IndexPut::places(Inputs(&borrowed)).map_err(|why| KernelError::Failed(why.to_string()))?;
        let sizes: Vec<i64> = sizes.iter().map(|size| size.known().expect("sizes are known here")).collect();
        // Which rows of the source go where, in order.
        let mut rows: HashMap<Vec<i64>, Vec<Vec<i64>>> = HashMap::new();
        for place in indices(&sizes) {
            let row = ids
                .iter()
                .enumerate()
                .map(|(axis, ids)| index_in(ids, &at(ids, &place), input.shape()[axis]))
                .collect::<Result<Vec<i64>, _>>()?;
            rows.entry(row).or_default().push(place.to_vec());
        }
        fill(output, |index| {
            let (row, rest) = index.split_at(ids.len());
            let own = Number::of(input, index);
            let of_source = |place: &Vec<i64>| {
                let whole: Vec<i64> = place.iter().chain(rest).copied().collect();
                Number::of(source, &at(source, &whole))
            };
            match rows.get(row) {
                None => own,
                Some(places) if !self.accumulate => of_source(places.last().expect("a place")),
                Some(places) => places.iter().map(of_source).fold(own, |a, b| match (a, b) {
                    (Number::Int(a), Number::Int(b)) => Number::Int(a.wrapping_add(b)),
                    (a, b) => Number::Float(a.float() + b.float()),
                }),
            }
        });
        Ok(())
    }

    fn in_place(&self, _: Inputs<'_>) -> &'static [usize] {
        &[0]
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::*;
    use lz_abi::DType;

    fn ids(shape: &[i64], values: &[i64]) -> Tensor {
        Tensor::from_ints(DType::I64, shape, values)
    }

    #[test]
    fn rows_are_replaced_or_added_to() {
        let x = counted(DType::F32, &[3, 2]);
        let source = Tensor::from_f64(DType::F32, &[2, 2], &[10., 20., 30., 40.]);
        let (twice, once) = (ids(&[2], &[1, 1]), ids(&[2], &[-1, 0]));
        let put = |accumulate, ids| evaluated(IndexPut { accumulate }, &[&x, &source, ids]).to_f64();
        assert_eq!(put(false, &once), [30., 40., 2., 3., 10., 20.]);
        assert_eq!(put(false, &twice)[2..4], [30., 40.]);
        assert_eq!(put(true, &twice)[2..4], [42., 63.]);
    }

    #[test]
    fn indices_and_sources_are_broadcast() {
        let x = counted(DType::F32, &[2, 3]);
        let one = Tensor::from_f64(DType::F32, &[], &[9.]);
        let found = evaluated(IndexPut { accumulate: false }, &[&x, &one, &ids(&[2, 1], &[0, 1]), &ids(&[1], &[2])]);
        assert_eq!(found.to_f64(), [0., 1., 9., 3., 4., 9.]);
    }

    #[test]
    fn wrong_sources_are_refused() {
        let (x, three, places) = (meta(DType::F32, &[3, 2]), meta(DType::F32, &[3, 2]), meta(DType::I64, &[2]));
        assert_eq!(
            refused(&IndexPut { accumulate: false }, &[&x, &three, &places]),
            "sizes 2 and 3 do not fit together"
        );
        let many = meta(DType::F32, &[4, 2, 2]);
        assert!(refused(&IndexPut { accumulate: false }, &[&x, &many, &places]).contains("do not fit"));
    }
}
