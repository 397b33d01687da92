//! What references of several operations do with elements: broadcasting, exact integers.

use lz_abi::{DType, KernelError, Tensor, TensorView, indices};
use smallvec::SmallVec;

use crate::ir::{Dim, Meta, Shape, ShapeError};

/// The sizes of two tensors that are broadcast to each other: aligned at the last axis, a size of 1 is repeated.
pub fn broadcast(left: &Meta, right: &Meta) -> Result<Shape, ShapeError> {
    let rank = left.rank().max(right.rank());
    let size = |meta: &Meta, axis: usize| (axis + meta.rank()).checked_sub(rank).map(|axis| meta.shape[axis].clone());
    (0..rank)
        .map(|axis| match (size(left, axis), size(right, axis)) {
            (Some(a), Some(b)) if a == b || b.is(1) => Ok(a),
            (Some(a), Some(b)) if a.is(1) => Ok(b),
            (Some(a), Some(b)) => Err(ShapeError::sizes(&a, &b)),
            (Some(a), None) | (None, Some(a)) => Ok(a),
            (None, None) => unreachable!("an axis of neither"),
        })
        .collect()
}

/// The element of a tensor that is broadcast, for an index of the result.
pub fn at(view: &TensorView<'_>, index: &[i64]) -> SmallVec<[i64; 6]> {
    let skipped = index.len() - view.shape().len();
    view.shape().iter().zip(&index[skipped..]).map(|(&n, &i)| if n == 1 { 0 } else { i }).collect()
}

/// A number, as exactly as its element type holds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// Of a float type.
    Float(f64),
    /// Of an integer type, or a truth value.
    Int(i64),
}

impl Number {
    /// An element of a tensor.
    pub fn of(view: &TensorView<'_>, index: &[i64]) -> Number {
        if view.dtype().is_float() { Number::Float(view.get(index)) } else { Number::Int(view.as_ref().get_int(index)) }
    }

    /// As a float.
    pub fn float(self) -> f64 {
        match self {
            Number::Float(x) => x,
            Number::Int(i) => i as f64,
        }
    }

    /// As a number of an element type that is not rounded yet: an integer for integers and truth values.
    pub fn of_type(self, dtype: DType) -> Number {
        match dtype {
            DType::Bool => Number::Int(i64::from(self.truth())),
            dtype if dtype.is_float() => Number::Float(self.float()),
            _ => Number::Int(self.int()),
        }
    }

    /// As an integer, rounded towards zero.
    pub fn int(self) -> i64 {
        match self {
            Number::Float(x) => x as i64,
            Number::Int(i) => i,
        }
    }

    /// Whether it is not zero. NaN is not zero.
    pub fn truth(self) -> bool {
        match self {
            Number::Float(x) => x != 0.0,
            Number::Int(i) => i != 0,
        }
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Number {
        Number::Float(number)
    }
}

impl From<i64> for Number {
    fn from(number: i64) -> Number {
        Number::Int(number)
    }
}

/// Fills a tensor: `f` gives the number for each index, and is rounded to the element type once. Integers keep their lowest bits;
/// floats become integers towards zero, as kernels have it: at the ends of int32, or of int64 for int64.
pub fn fill(output: &mut Tensor, f: impl Fn(&[i64]) -> Number) {
    let (dtype, shape) = (output.dtype(), output.shape().to_vec());
    let numbers = indices(&shape).map(|index| f(&index));
    *output = match dtype {
        dtype if dtype.is_float() => Tensor::from_f64(dtype, &shape, &numbers.map(Number::float).collect::<Vec<_>>()),
        DType::Bool => Tensor::from_ints(dtype, &shape, &numbers.map(|n| i64::from(n.truth())).collect::<Vec<_>>()),
        DType::I64 => Tensor::from_ints(dtype, &shape, &numbers.map(Number::int).collect::<Vec<_>>()),
        dtype => {
            let int = |number| if let Number::Float(x) = number { i64::from(x as i32) } else { number.int() };
            Tensor::from_ints(dtype, &shape, &numbers.map(int).collect::<Vec<_>>())
        }
    };
}

/// An input that [`crate::ops::OpDef::infer`] has seen to be there.
pub fn given<'a>(inputs: &'a [Option<TensorView<'a>>], at: usize) -> &'a TensorView<'a> {
    inputs[at].as_ref().expect("checked by the shape rule")
}

/// One size for two that must be equal: the one that is a number, if there is one. Sizes with symbols may be equal without
/// having the same form: they are compared when the symbols have numbers.
pub fn same(left: &Dim, right: &Dim) -> Result<Dim, ShapeError> {
    match (left.known(), right.known()) {
        (Some(a), Some(b)) if a != b => Err(ShapeError::sizes(left, right)),
        (None, Some(_)) => Ok(right.clone()),
        _ => Ok(left.clone()),
    }
}

/// An axis counted from the front, of one the shape rule has seen.
pub fn axis_of(axis: i64, rank: usize) -> usize {
    if axis < 0 { (axis + rank as i64) as usize } else { axis as usize }
}

/// Checks that an input holds indices.
pub fn indices_at(at: usize, meta: &Meta) -> Result<(), ShapeError> {
    if matches!(meta.dtype, DType::I64 | DType::I32) {
        Ok(())
    } else {
        Err(ShapeError::Type { at, dtype: meta.dtype, expected: "int64 or int32".into() })
    }
}

/// An index in `0..size` at a place of an input; negative ones count from the back.
pub fn index_in(view: &TensorView<'_>, at: &[i64], size: i64) -> Result<i64, KernelError> {
    let found = view.as_ref().get_int(at);
    let index = if found < 0 { found + size } else { found };
    if (0..size).contains(&index) {
        return Ok(index);
    }
    let expected = format!("an index into {size} elements");
    Err(KernelError::BadData { input: "indices", at: at.to_vec(), value: found, expected })
}

/// As [`fill`], with a function that may fail. The first failure is the result.
pub fn try_fill(output: &mut Tensor, f: impl Fn(&[i64]) -> Result<Number, KernelError>) -> Result<(), KernelError> {
    let failed = std::cell::RefCell::new(None);
    fill(output, |index| {
        f(index).unwrap_or_else(|why| {
            failed.borrow_mut().get_or_insert(why);
            Number::Int(0)
        })
    });
    failed.into_inner().map_or(Ok(()), Err)
}
