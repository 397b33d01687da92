//! Where the greatest or the least element is.

use lz_abi::{DType, KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, axis_of, fill, given};
use super::reduce::reduced;
use crate::ir::{Inputs, Meta, ShapeError};

/// The first place of the greatest or the least element. NaN is both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArgReduce {
    /// Which.
    pub kind: ArgKind,
    /// Along which axis; without one, among all elements in row-major order.
    #[serde(default)]
    pub axis: Option<i64>,
    /// Whether the axes stay, with size 1.
    #[serde(default)]
    pub keepdim: bool,
}

/// Which element is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgKind {
    /// The greatest.
    Argmax,
    /// The least.
    Argmin,
}

impl ArgKind {
    /// Whether `a` is to be preferred to `b`, which comes before it.
    fn prefers(self, a: Number, b: Number) -> bool {
        match (a, b) {
            (Number::Int(a), Number::Int(b)) => {
                if self == ArgKind::Argmax {
                    a > b
                } else {
                    a < b
                }
            }
            (a, b) if b.float().is_nan() || a.float().is_nan() => !b.float().is_nan(),
            (a, b) if self == ArgKind::Argmax => a.float() > b.float(),
            (a, b) => a.float() < b.float(),
        }
    }
}

impl ArgReduce {
    fn axes(&self, rank: usize) -> Vec<i64> {
        self.axis.map_or_else(|| (0..rank as i64).collect(), |axis| vec![axis])
    }
}

impl OpDef for ArgReduce {
    const NAME: &'static str = "argreduce";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        let (joined, shape) = reduced(input, &self.axes(input.rank()), self.keepdim)?;
        if input.shape.iter().zip(joined).any(|(size, joined)| joined && size.is(0)) {
            let expected = format!("an axis with elements, and the input is {input}");
            return Err(ShapeError::Attribute { name: "axis", value: format!("{:?}", self.axis), expected });
        }
        Ok(Meta::new(DType::I64, shape))
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let rank = input.shape().len();
        let best = |places: &mut dyn Iterator<Item = Vec<i64>>| {
            let mut found: Option<(i64, Number)> = None;
            for (i, place) in places.enumerate() {
                let number = Number::of(input, &place);
                if found.is_none_or(|(_, best)| self.kind.prefers(number, best)) {
                    found = Some((i as i64, number));
                }
            }
            Number::Int(found.map_or(0, |(i, _)| i))
        };
        let Some(axis) = self.axis.map(|axis| axis_of(axis, rank)) else {
            let place = best(&mut indices(input.shape()).map(|index| index.to_vec()));
            fill(output, |_| place);
            return Ok(());
        };
        fill(output, |index| {
            let mut place = index.to_vec();
            if !self.keepdim {
                place.insert(axis, 0);
            }
            best(&mut (0..input.shape()[axis]).map(|i| {
                place[axis] = i;
                place.clone()
            }))
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta, refused};
    use super::*;

    #[test]
    fn the_first_of_equals_is_found() {
        let x = Tensor::from_f64(DType::F32, &[2, 3], &[1., 5., 5., 0., -1., -1.]);
        let find = |kind, axis| evaluated(ArgReduce { kind, axis, keepdim: false }, &[&x]).to_f64();
        assert_eq!(find(ArgKind::Argmax, Some(1)), [1., 0.]);
        assert_eq!(find(ArgKind::Argmin, Some(-1)), [0., 1.]);
        assert_eq!(find(ArgKind::Argmin, Some(0)), [1., 1., 1.]);
        assert_eq!((find(ArgKind::Argmax, None), find(ArgKind::Argmin, None)), (vec![1.], vec![4.]));
        let kept = evaluated(ArgReduce { kind: ArgKind::Argmax, axis: Some(1), keepdim: true }, &[&x]);
        assert_eq!(kept.shape(), [2, 1]);
    }

    #[test]
    fn nan_is_found_first() {
        let x = Tensor::from_f64(DType::F32, &[4], &[9., f64::NAN, 10., f64::NAN]);
        for kind in [ArgKind::Argmax, ArgKind::Argmin] {
            assert_eq!(evaluated(ArgReduce { kind, axis: Some(0), keepdim: false }, &[&x]).to_f64(), [1.]);
        }
    }

    #[test]
    fn nothing_has_no_place() {
        let op = ArgReduce { kind: ArgKind::Argmax, axis: Some(0), keepdim: false };
        assert!(refused(&op, &[&meta(DType::F32, &[0, 2])]).contains("an axis with elements"));
    }
}
