//! A part of one axis.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::elements::{Number, axis_of, fill, given};
use super::{Alias, Cost, OpDef, View};
use crate::ir::{Dim, DimError, Inputs, Meta, ShapeError, Symbols};

/// Elements `start`, `start + step`, … below `end` of one axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// Which axis; negative ones count from the back.
    pub axis: i64,
    /// The first element; not negative.
    pub start: Dim,
    /// The element after the last; at most the size.
    pub end: Dim,
    /// From one element to the next; at least 1.
    #[serde(default = "one")]
    pub step: i64,
}

fn one() -> i64 {
    1
}

impl Slice {
    fn refuse(&self, size: &Dim) -> ShapeError {
        let value = format!("{}:{}:{}", self.start, self.end, self.step);
        ShapeError::Attribute { name: "start:end:step", value, expected: format!("a part of 0:{size}") }
    }
}

impl OpDef for Slice {
    const NAME: &'static str = "slice";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        let axis = input.axis(self.axis)?;
        let size = &input.shape[axis];
        let beyond = |a: &Dim, b: &Dim| (a.clone() - b.clone()).known().is_some_and(|difference| difference > 0);
        let negative = self.start.known().is_some_and(|start| start < 0);
        if self.step < 1 || negative || beyond(&self.start, &self.end) || beyond(&self.end, size) {
            return Err(self.refuse(size));
        }
        let mut found = input.clone();
        let length = self.end.clone() - self.start.clone();
        found.shape[axis] = (length + Dim::from(self.step - 1)).quotient(Dim::from(self.step));
        Ok(found)
    }

    fn at(&self, symbols: &Symbols) -> Result<Slice, DimError> {
        let number = |size: &Dim| size.at(symbols).map(Dim::from);
        Ok(Slice { start: number(&self.start)?, end: number(&self.end)?, ..*self })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let axis = axis_of(self.axis, input.shape().len());
        let start = self.start.known().expect("sizes are known here");
        fill(output, |index| {
            let mut place = index.to_vec();
            place[axis] = start + index[axis] * self.step;
            Number::of(input, &place)
        });
        Ok(())
    }

    fn view(&self, inputs: Inputs<'_>, output: &Meta) -> Option<View> {
        let axis = inputs.get(0)?.axis(self.axis).ok()?;
        let mut start: SmallVec<[i64; 4]> = SmallVec::from_elem(0, output.rank());
        start[axis] = self.start.known()?;
        let axes = (0..output.rank()).map(|own| (Some(own), if own == axis { self.step } else { 1 })).collect();
        Some(View { input: 0, start, axes })
    }

    /// A part of the outermost axis that is larger than 1 follows without gaps.
    fn alias(&self, inputs: Inputs<'_>, _: &Meta) -> Option<Alias> {
        let input = inputs.get(0)?;
        let axis = input.axis(self.axis).ok()?;
        let outermost = input.shape[..axis].iter().all(|size| size.is(1));
        let inner = input.shape[axis + 1..].iter().map(Dim::known).product::<Option<i64>>()?;
        (outermost && self.step == 1).then_some(Alias { input: 0, offset: self.start.known()? * inner })
    }

    fn cost(&self, _: Inputs<'_>, output: &Meta) -> Cost {
        let elements = output.len().known().unwrap_or(0) as usize;
        Cost { flops: 0.0, bytes: 2.0 * output.dtype.bytes_for(elements) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::*;
    use lz_abi::DType;
    use proptest::prelude::*;

    fn slice(axis: i64, start: i64, end: i64, step: i64) -> Slice {
        Slice { axis, start: start.into(), end: end.into(), step }
    }

    #[test]
    fn parts_are_taken() {
        let x = counted(DType::I64, &[3, 4]);
        assert_eq!(evaluated(slice(0, 1, 3, 1), &[&x]).to_f64(), [4., 5., 6., 7., 8., 9., 10., 11.]);
        assert_eq!(evaluated(slice(-1, 1, 4, 2), &[&x]).to_f64(), [1., 3., 5., 7., 9., 11.]);
        assert_eq!(evaluated(slice(1, 2, 2, 1), &[&x]).shape(), [3, 0]);
    }

    #[test]
    fn what_is_no_part_is_refused() {
        let x = meta(DType::F32, &[3, 4]);
        assert_eq!(refused(&slice(1, 1, 5, 1), &[&x]), "'start:end:step' is 1:5:1, a part of 0:4");
        for op in [slice(0, -1, 2, 1), slice(0, 2, 1, 1), slice(0, 0, 2, 0)] {
            assert!(refused(&op, &[&x]).contains("a part of 0:3"));
        }
        assert_eq!(refused(&slice(2, 0, 1, 1), &[&x]), "axis 2 does not exist in 2 dimensions");
    }

    #[test]
    fn sizes_may_be_symbols() {
        let s = |text: &str| Dim::parse(text).unwrap();
        let x = Meta::new(DType::F32, [s("s0 + 2"), Dim::from(4)]);
        let op = Slice { axis: 0, start: s("2"), end: s("s0 + 2"), step: 1 };
        assert_eq!(op.infer(Inputs(&[Some(&x)])).unwrap().shape[0], s("s0"));
        let over = Slice { end: s("s0 + 3"), ..op.clone() };
        assert!(over.infer(Inputs(&[Some(&x)])).is_err());
        assert_eq!(op.at(&Symbols::from_iter([("s0", 3)])), Ok(slice(0, 2, 5, 1)));
    }

    proptest! {
        /// An alias says where the first element lies, and that the others follow.
        #[test]
        fn an_alias_is_the_same_elements(
            (shape, axis) in proptest::collection::vec(1i64..4, 1..4).prop_flat_map(|s| (Just(s.clone()), 0..s.len())),
            a in 0i64..4, b in 0i64..4, step in 1i64..3,
        ) {
            let size = shape[axis];
            let (start, end) = (a.min(b).min(size), a.max(b).min(size));
            let (op, x) = (slice(axis as i64, start, end, step), counted(DType::I64, &shape));
            let given = meta(DType::I64, &shape);
            let output = op.infer(Inputs(&[Some(&given)])).unwrap();
            let taken = evaluated(op.clone(), &[&x]).to_f64();
            if let Some(alias) = op.alias(Inputs(&[Some(&given)]), &output) {
                let first = alias.offset as usize;
                prop_assert_eq!(&taken[..], &x.to_f64()[first..first + taken.len()]);
            }
            let outermost = step == 1 && shape[..axis].iter().all(|&n| n == 1);
            prop_assert_eq!(op.alias(Inputs(&[Some(&given)]), &output).is_some(), outermost);
        }
    }
}
