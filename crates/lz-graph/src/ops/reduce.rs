//! One number of all elements along some axes.

use lz_abi::{DType, KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, axis_of, fill, given};
use crate::ir::{Dim, Inputs, Meta, ShapeError};

/// A number of all elements along some axes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reduce {
    /// Which number.
    pub kind: ReduceKind,
    /// Along which axes; negative ones count from the back.
    pub axes: Vec<i64>,
    /// Whether the axes stay, with size 1.
    #[serde(default)]
    pub keepdim: bool,
}

/// Numbers of several elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the names are the documentation
pub enum ReduceKind {
    Sum,
    Mean,
    Max,
    Min,
    Prod,
    /// Whether one of them is not zero.
    Any,
    /// Whether none of them is zero.
    All,
}

use ReduceKind::*;

impl ReduceKind {
    fn join(self, a: Number, b: Number) -> Number {
        use Number::{Float, Int};
        match (self, a, b) {
            (Any, a, b) => Int(i64::from(a.truth() || b.truth())),
            (All, a, b) => Int(i64::from(a.truth() && b.truth())),
            (Sum | Mean, Int(a), Int(b)) => Int(a.wrapping_add(b)),
            (Prod, Int(a), Int(b)) => Int(a.wrapping_mul(b)),
            (Max, Int(a), Int(b)) => Int(a.max(b)),
            (Min, Int(a), Int(b)) => Int(a.min(b)),
            (Sum | Mean, a, b) => Float(a.float() + b.float()),
            (Prod, a, b) => Float(a.float() * b.float()),
            (Max | Min, a, b) if a.float().is_nan() || b.float().is_nan() => Float(f64::NAN),
            (Max, a, b) => Float(a.float().max(b.float())),
            (Min, a, b) => Float(a.float().min(b.float())),
        }
    }

    /// What no elements give; nothing for the greatest and the least of none.
    fn of_none(self, dtype: DType) -> Option<Number> {
        let number = |i: i64| if dtype.is_float() { Number::Float(i as f64) } else { Number::Int(i) };
        match self {
            Sum | Mean => Some(number(0)),
            Prod => Some(number(1)),
            Any => Some(Number::Int(0)),
            All => Some(Number::Int(1)),
            Max | Min => None,
        }
    }
}

/// Which axes are joined, and the sizes of the result.
pub fn reduced(input: &Meta, axes: &[i64], keepdim: bool) -> Result<(Vec<bool>, Vec<Dim>), ShapeError> {
    let mut joined = vec![false; input.rank()];
    for &axis in axes {
        if std::mem::replace(&mut joined[input.axis(axis)?], true) {
            let expected = "each axis at most once".to_owned();
            return Err(ShapeError::Attribute { name: "axes", value: format!("{axes:?}"), expected });
        }
    }
    let kept = input.shape.iter().zip(&joined).filter_map(|(size, joined)| match (joined, keepdim) {
        (false, _) => Some(size.clone()),
        (true, true) => Some(Dim::from(1)),
        (true, false) => None,
    });
    let shape = kept.collect();
    Ok((joined, shape))
}

impl OpDef for Reduce {
    const NAME: &'static str = "reduce";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        if self.kind == Mean && !input.dtype.is_float() {
            return Err(ShapeError::Type { at: 0, dtype: input.dtype, expected: "floats".into() });
        }
        let (joined, shape) = reduced(input, &self.axes, self.keepdim)?;
        let empty = input.shape.iter().zip(joined).any(|(size, joined)| joined && size.is(0));
        if empty && self.kind.of_none(input.dtype).is_none() {
            let expected = format!("axes with elements, and the input is {input}");
            return Err(ShapeError::Attribute { name: "axes", value: format!("{:?}", self.axes), expected });
        }
        let dtype = if matches!(self.kind, Any | All) { DType::Bool } else { input.dtype };
        Ok(Meta::new(dtype, shape))
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let shape = input.shape();
        let axes: Vec<usize> = self.axes.iter().map(|&axis| axis_of(axis, shape.len())).collect();
        let sizes: Vec<i64> = axes.iter().map(|&axis| shape[axis]).collect();
        let count = sizes.iter().product::<i64>();
        fill(output, |index| {
            let mut rest = index.iter();
            let mut place: Vec<i64> = (0..shape.len())
                .map(|axis| match (axes.contains(&axis), self.keepdim) {
                    (false, _) => *rest.next().expect("an axis that stays"),
                    (true, true) => *rest.next().map(|_| &0).expect("an axis of size 1"),
                    (true, false) => 0,
                })
                .collect();
            let mut all = indices(&sizes).map(|along| {
                axes.iter().zip(&along).for_each(|(&axis, &i)| place[axis] = i);
                Number::of(input, &place)
            });
            let none = self.kind.of_none(input.dtype());
            let first = none.or_else(|| all.next()).expect("the shape rule refuses no elements");
            let joined = all.fold(first, |a, b| self.kind.join(a, b));
            if self.kind == Mean { Number::Float(joined.float() / count as f64) } else { joined }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::*;

    fn reduce(kind: ReduceKind, axes: &[i64], keepdim: bool) -> Reduce {
        Reduce { kind, axes: axes.to_vec(), keepdim }
    }

    #[test]
    fn each_kind_is_what_it_says() {
        let x = Tensor::from_f64(DType::F32, &[2, 3], &[1., -2., 3., 0., 5., -6.]);
        let of = |kind| evaluated(reduce(kind, &[1], false), &[&x]).to_f64();
        assert_eq!(of(Sum), [2., -1.]);
        assert!((of(Mean)[0] - 2. / 3.).abs() < 1e-7);
        assert_eq!(of(Max), [3., 5.]);
        assert_eq!(of(Min), [-2., -6.]);
        assert_eq!(of(Prod), [-6., 0.]);
        assert_eq!((of(Any), of(All)), (vec![1., 1.], vec![1., 0.]));
        let ints = counted(DType::I64, &[2, 3]);
        assert_eq!(evaluated(reduce(Sum, &[0, 1], false), &[&ints]).to_f64(), [15.]);
        let nan = Tensor::from_f64(DType::F32, &[2], &[f64::NAN, 1.0]);
        assert!(evaluated(reduce(Max, &[0], false), &[&nan]).to_f64()[0].is_nan());
    }

    #[test]
    fn axes_stay_or_go() {
        let x = counted(DType::I64, &[2, 3, 4]);
        assert_eq!(evaluated(reduce(Sum, &[0, -1], true), &[&x]).shape(), [1, 3, 1]);
        let flat = evaluated(reduce(Sum, &[-1, 0], false), &[&x]);
        assert_eq!(flat.to_f64(), [60., 92., 124.]);
        assert_eq!(evaluated(reduce(Sum, &[], false), &[&x]), x);
    }

    #[test]
    fn no_elements() {
        let none = Tensor::zeros(DType::F32, &[2, 0]);
        assert_eq!(evaluated(reduce(Prod, &[1], false), &[&none]).to_f64(), [1., 1.]);
        assert!(evaluated(reduce(Mean, &[1], false), &[&none]).to_f64()[0].is_nan());
        assert!(refused(&reduce(Max, &[1], false), &[&meta(DType::F32, &[2, 0])]).contains("axes with elements"));
    }

    #[test]
    fn wrong_axes_are_refused() {
        let x = meta(DType::I64, &[2, 3]);
        assert_eq!(refused(&reduce(Sum, &[1, -1], true), &[&x]), "'axes' is [1, -1], each axis at most once");
        assert_eq!(refused(&reduce(Mean, &[0], true), &[&x]), "input 0 is int64, the operation takes floats");
    }
}
