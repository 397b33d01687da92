//! Rotary positional embedding.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::{Number, at, broadcast, fill, given};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// Rotates pairs of elements of the last axis: (a, b) becomes (a·cos − b·sin, b·cos + a·sin).
///
/// Pairs are (i, i + D/2), or (2i, 2i + 1) when interleaved. The tables are broadcast to the leading axes of x. Tables
/// with
/// D/2 columns have one column per pair; those with D columns have one per element, so a and b may be given different
/// angles.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rope {
    /// Whether the elements of a pair are neighbours.
    pub interleaved: bool,
}

impl OpDef for Rope {
    const NAME: &'static str = "rope";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(3)?;
        let (x, cos, sin) = (inputs.need(0)?, inputs.need(1)?, inputs.need(2)?);
        if !x.dtype.is_float() {
            return Err(ShapeError::Type { at: 0, dtype: x.dtype, expected: "floats".into() });
        }
        let leading = |meta: &Meta| Meta::new(meta.dtype, meta.shape[..meta.rank() - 1].iter().cloned());
        if x.rank() == 0 {
            return Err(ShapeError::Rank { at: 0, rank: 0, expected: "one or more" });
        }
        let width = x.shape[x.rank() - 1].clone();
        if width.known().is_some_and(|width| width % 2 != 0) {
            return Err(ShapeError::sizes(&width, &crate::ir::Dim::from(2)));
        }
        for (at, table) in [(1, cos), (2, sin)] {
            if table.dtype != x.dtype {
                let expected = format!("what input 0 is, {}", x.dtype);
                return Err(ShapeError::Type { at, dtype: table.dtype, expected });
            }
            if table.rank() == 0 || table.rank() > x.rank() {
                return Err(ShapeError::Rank { at, rank: table.rank(), expected: "at most as many as input 0" });
            }
            let columns = &table.shape[table.rank() - 1];
            if *columns != width && columns.clone() * 2.into() != width {
                return Err(ShapeError::sizes(columns, &width));
            }
            let whole = broadcast(&leading(x), &leading(table))?;
            if whole != leading(x).shape {
                return Err(ShapeError::Attribute {
                    name: "shape",
                    value: table.to_string(),
                    expected: format!("a table that can be broadcast to {x}"),
                });
            }
        }
        if cos.shape.last() != sin.shape.last() {
            return Err(ShapeError::sizes(&cos.shape[cos.rank() - 1], &sin.shape[sin.rank() - 1]));
        }
        Ok(x.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (x, cos, sin) = (given(inputs, 0), given(inputs, 1), given(inputs, 2));
        let width = *x.shape().last().expect("checked by the shape rule");
        let half = width / 2;
        let number = |table: &TensorView<'_>, index: &[i64], own: i64, pair: i64| {
            let columns = *table.shape().last().expect("checked by the shape rule");
            let mut index = index.to_vec();
            *index.last_mut().expect("an axis") = if columns == width { own } else { pair };
            // A table with one column is not broadcast along it: it has one pair.
            table.get(&at(table, &index))
        };
        fill(output, |index| {
            let own = index[index.len() - 1];
            let (other, pair, first) = match self.interleaved {
                false if own < half => (own + half, own, true),
                false => (own - half, own - half, false),
                true => (own ^ 1, own / 2, own % 2 == 0),
            };
            let mut across = index.to_vec();
            *across.last_mut().expect("an axis") = other;
            let (c, s) = (number(cos, index, own, pair), number(sin, index, own, pair));
            let (a, b) = (x.get(index), x.get(&across));
            Number::Float(if first { a * c - b * s } else { a * c + b * s })
        });
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let read: f64 = inputs.0.iter().flatten().map(|meta| bytes(meta)).sum();
        Cost { flops: 3.0 * output.len().known().unwrap_or(0) as f64, bytes: read + bytes(output) }
    }

    fn operation(&self) -> Option<&'static str> {
        Some("posenc.rope")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_abi::DType;

    fn rotated(interleaved: bool, columns: usize) -> Vec<f64> {
        let x = Tensor::from_f64(DType::F64, &[1, 4], &[1., 2., 3., 4.]);
        // A quarter turn for the first pair, none for the second.
        let (cos, sin): (Vec<f64>, Vec<f64>) = match (columns, interleaved) {
            (2, _) => (vec![0., 1.], vec![1., 0.]),
            (_, false) => (vec![0., 1., 0., 1.], vec![1., 0., 1., 0.]),
            (_, true) => (vec![0., 0., 1., 1.], vec![1., 1., 0., 0.]),
        };
        let table = |numbers: &[f64]| Tensor::from_f64(DType::F64, &[1, numbers.len() as i64], numbers);
        let mut output = Tensor::zeros(DType::F64, &[1, 4]);
        let (cos, sin) = (table(&cos), table(&sin));
        Rope { interleaved }.evaluate(&[Some(x.view()), Some(cos.view()), Some(sin.view())], &mut output).unwrap();
        output.to_f64()
    }

    #[test]
    fn pairs_are_turned() {
        for columns in [2, 4] {
            assert_eq!(rotated(false, columns), [-3., 2., 1., 4.]);
            assert_eq!(rotated(true, columns), [-2., 1., 3., 4.]);
        }
    }

    #[test]
    fn tables_must_fit() {
        let meta = |shape: &[i64]| Meta::known(DType::F32, shape);
        let infer = |x: &[i64], table: &[i64]| {
            Rope::default().infer(Inputs(&[Some(&meta(x)), Some(&meta(table)), Some(&meta(table))]))
        };
        assert!(infer(&[1, 2, 3, 4], &[1, 1, 3, 4]).is_ok());
        assert!(infer(&[1, 2, 3, 4], &[3, 2]).is_ok());
        assert!(matches!(infer(&[1, 2, 3, 4], &[3, 3]), Err(ShapeError::Sizes { .. })));
        assert!(matches!(infer(&[1, 1, 3, 4], &[1, 2, 3, 4]), Err(ShapeError::Attribute { .. })));
        assert!(matches!(infer(&[3, 3], &[3, 3]), Err(ShapeError::Sizes { .. })));
    }
}
