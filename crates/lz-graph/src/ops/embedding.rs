//! Rows of a table.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill, given, indices_at};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// The rows of a table (rows, width) whose numbers are given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Embedding {}

impl OpDef for Embedding {
    const NAME: &'static str = "embedding";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(2)?;
        let (table, ids) = (inputs.need(0)?, inputs.need(1)?);
        if table.rank() != 2 {
            return Err(ShapeError::Rank { at: 0, rank: table.rank(), expected: "two" });
        }
        indices_at(1, ids)?;
        Ok(Meta::new(table.dtype, ids.shape.iter().chain([&table.shape[1]]).cloned()))
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (table, ids) = (given(inputs, 0), given(inputs, 1));
        let rows = table.shape()[0];
        // All of them, also where the result has no elements.
        for place in lz_abi::indices(ids.shape()) {
            let value = ids.as_ref().get_int(&place);
            if !(0..rows).contains(&value) {
                let expected = format!("a row of a table of {rows}");
                return Err(KernelError::BadData { input: "indices", at: place.to_vec(), value, expected });
            }
        }
        fill(output, |index| {
            let (place, column) = index.split_at(index.len() - 1);
            Number::of(table, &[ids.as_ref().get_int(place), column[0]])
        });
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        Cost { flops: 0.0, bytes: 2.0 * bytes(output) + inputs.get(1).map_or(0.0, bytes) }
    }

    fn operation(&self) -> Option<&'static str> {
        Some("embedding.lookup")
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused, tried};
    use super::*;
    use lz_abi::DType;

    #[test]
    fn rows_are_found() {
        let table = counted(DType::F32, &[3, 2]);
        let ids = Tensor::from_ints(DType::I64, &[2, 2], &[2, 0, 1, 2]);
        let found = evaluated(Embedding {}, &[&table, &ids]);
        assert_eq!((found.shape(), found.to_f64()), (&[2, 2, 2][..], vec![4., 5., 0., 1., 2., 3., 4., 5.]));
    }

    #[test]
    fn rows_outside_the_table_are_errors() {
        let table = counted(DType::F32, &[3, 2]);
        for (row, text) in [(3, "3"), (-1, "-1")] {
            let ids = Tensor::from_ints(DType::I32, &[2], &[0, row]);
            let why = tried(Embedding {}, &[Some(&table), Some(&ids)]).unwrap_err();
            assert_eq!(why.to_string(), format!("indices[1] is {text}, a row of a table of 3"));
        }
        let floats = meta(DType::F32, &[2]);
        let wrong = "input 1 is float32, the operation takes int64 or int32";
        assert_eq!(refused(&Embedding {}, &[&meta(DType::F32, &[3, 2]), &floats]), wrong);
    }
}
