//! One side of a diagonal.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, fill, given};
use crate::ir::{Inputs, Meta, ShapeError};

/// Keeps the elements on one side of a diagonal of the last two axes and on it; the others are 0. Element (i, j) is on diagonal
/// `j - i`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Triangle {
    /// Whether the side to the right is kept.
    pub upper: bool,
    /// Which diagonal.
    #[serde(default)]
    pub diagonal: i64,
}

impl OpDef for Triangle {
    const NAME: &'static str = "triangle";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        match input.rank() {
            rank @ 0..2 => Err(ShapeError::Rank { at: 0, rank, expected: "two or more" }),
            _ => Ok(input.clone()),
        }
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        fill(output, |index| {
            let on = index[index.len() - 1] - index[index.len() - 2];
            let kept = if self.upper { on >= self.diagonal } else { on <= self.diagonal };
            if kept { Number::of(input, index) } else { Number::Int(0) }
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

    #[test]
    fn one_side_is_kept() {
        let x = counted(DType::F32, &[2, 3]);
        let keep = |upper, diagonal| evaluated(Triangle { upper, diagonal }, &[&x]).to_f64();
        assert_eq!(keep(false, 0), [0., 0., 0., 3., 4., 0.]);
        assert_eq!(keep(true, 1), [0., 1., 2., 0., 0., 5.]);
        assert_eq!(keep(false, -1), [0., 0., 0., 3., 0., 0.]);
        let flat = "input 0 has 1 dimensions, the operation takes two or more";
        assert_eq!(refused(&Triangle { upper: true, diagonal: 0 }, &[&meta(DType::F32, &[2])]), flat);
    }
}
