//! More elements around a tensor, or fewer.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, fill, given};
use crate::ir::{Dim, DimError, Inputs, Meta, ShapeError, Symbols};

/// One number before and after the elements of each axis. Negative numbers of elements take some away.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pad {
    /// How many elements go before and after, for each axis.
    pub pads: Vec<(Dim, Dim)>,
    /// The number.
    #[serde(default = "super::attribute::number::zero", with = "super::attribute::number")]
    pub value: Number,
}

impl OpDef for Pad {
    const NAME: &'static str = "pad";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        let wrong =
            |expected: String| ShapeError::Attribute { name: "pads", value: format!("{:?}", self.pads), expected };
        if self.pads.len() != input.rank() {
            return Err(wrong(format!("a pair for each of {} axes", input.rank())));
        }
        let padded = input.shape.iter().zip(&self.pads);
        let found = Meta::new(input.dtype, padded.map(|(size, (a, b))| size.clone() + a.clone() + b.clone()));
        match found.shape.iter().any(|size| size.known().is_some_and(|n| n < 0)) {
            true => Err(wrong(format!("no more taken away than there is in {input}"))),
            false => Ok(found),
        }
    }

    fn at(&self, symbols: &Symbols) -> Result<Pad, DimError> {
        let number = |size: &Dim| size.at(symbols).map(Dim::from);
        let pads = self.pads.iter().map(|(a, b)| Ok((number(a)?, number(b)?))).collect::<Result<_, DimError>>()?;
        Ok(Pad { pads, value: self.value })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let before: Vec<i64> = self.pads.iter().map(|(a, _)| a.known().expect("sizes are known here")).collect();
        let value = self.value.of_type(input.dtype());
        fill(output, |index| {
            let place: Vec<i64> = index.iter().zip(&before).map(|(i, n)| i - n).collect();
            let inside = place.iter().zip(input.shape()).all(|(i, n)| (0..*n).contains(i));
            if inside { Number::of(input, &place) } else { value }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::*;
    use lz_abi::DType;

    fn pad(pads: &[(i64, i64)], value: f64) -> Pad {
        Pad { pads: pads.iter().map(|&(a, b)| (a.into(), b.into())).collect(), value: value.into() }
    }

    #[test]
    fn elements_are_added_and_taken_away() {
        let x = counted(DType::F32, &[2, 2]);
        assert_eq!(evaluated(pad(&[(0, 0), (1, 0)], 9.0), &[&x]).to_f64(), [9., 0., 1., 9., 2., 3.]);
        assert_eq!(evaluated(pad(&[(-1, 1), (0, 0)], f64::NEG_INFINITY), &[&x]).to_f64()[..2], [2., 3.]);
        assert_eq!(evaluated(pad(&[(-1, 1), (0, 0)], f64::NEG_INFINITY), &[&x]).to_f64()[2], f64::NEG_INFINITY);
    }

    #[test]
    fn wrong_pads_are_refused() {
        let x = meta(DType::F32, &[2, 2]);
        assert_eq!(refused(&pad(&[(1, 1)], 0.0), &[&x]), "'pads' is [(1, 1)], a pair for each of 2 axes");
        assert!(refused(&pad(&[(-2, -1), (0, 0)], 0.0), &[&x]).contains("no more taken away"));
    }
}
