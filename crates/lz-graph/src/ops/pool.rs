//! The greatest or the mean of windows over one or two axes.

use lz_abi::{KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::conv::per_axis;
use super::elements::{Number, fill, given};
use super::layer_norm::floats;
use crate::ir::{Dim, Inputs, Meta, ShapeError};

/// A number for each window over the last axes of x (batch, channels, sizes…).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Which number.
    pub kind: PoolKind,
    /// Sizes of a window.
    pub kernel: Vec<i64>,
    /// From one window to the next.
    pub stride: Vec<i64>,
    /// How far windows may begin before and end after each axis.
    pub padding: Vec<i64>,
    /// Whether a last window counts that is not whole, if it begins inside.
    #[serde(default)]
    pub ceil: bool,
    /// Whether a mean counts the elements of the padding, as zeros.
    #[serde(default = "yes")]
    pub count_padding: bool,
}

fn yes() -> bool {
    true
}

/// Numbers of windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolKind {
    /// The greatest element.
    Max,
    /// The mean.
    Avg,
}

impl Pool {
    /// How many windows there are along an axis.
    fn windows(&self, size: &Dim, axis: usize) -> Dim {
        let (stride, padding) = (Dim::from(self.stride[axis]), self.padding[axis]);
        let room = size.clone() + Dim::from(2 * padding - self.kernel[axis]);
        if !self.ceil {
            return room.quotient(stride) + Dim::from(1);
        }
        let more = (room + Dim::from(self.stride[axis] - 1)).quotient(stride.clone()) + Dim::from(1);
        // A window that begins behind the elements and the padding before them does not count.
        let inside = (size.clone() + Dim::from(padding - 1)).quotient(stride) + Dim::from(1);
        more.least(inside)
    }
}

impl OpDef for Pool {
    const NAME: &'static str = "pool";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let x = inputs.need(0)?;
        floats(0, x)?;
        let axes = match x.rank() {
            rank @ 3..=4 => rank - 2,
            rank => return Err(ShapeError::Rank { at: 0, rank, expected: "three or four" }),
        };
        per_axis("kernel", &self.kernel, axes, 1)?;
        per_axis("stride", &self.stride, axes, 1)?;
        per_axis("padding", &self.padding, axes, 0)?;
        if self.padding.iter().zip(&self.kernel).any(|(padding, kernel)| 2 * padding > *kernel) {
            let expected = format!("at most half of the kernel {:?}", self.kernel);
            return Err(ShapeError::Attribute { name: "padding", value: format!("{:?}", self.padding), expected });
        }
        let mut found = x.clone();
        for axis in 0..axes {
            let size = self.windows(&x.shape[axis + 2], axis);
            if size.known().is_some_and(|n| n < 1) {
                return Err(ShapeError::sizes(&x.shape[axis + 2], &Dim::from(self.kernel[axis])));
            }
            found.shape[axis + 2] = size;
        }
        Ok(found)
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let x = given(inputs, 0);
        let sizes = &x.shape()[2..];
        fill(output, |index| {
            let first: Vec<i64> = (0..sizes.len()).map(|i| index[i + 2] * self.stride[i] - self.padding[i]).collect();
            // A window ends with the padding.
            let counted: i64 = (0..sizes.len())
                .map(|i| (first[i] + self.kernel[i]).min(sizes[i] + self.padding[i]) - first[i])
                .product();
            let elements: Vec<f64> = indices(&self.kernel)
                .filter_map(|k| {
                    let mut place = index[..2].to_vec();
                    place.extend(first.iter().zip(&k).map(|(first, k)| first + k));
                    let inside = place[2..].iter().zip(sizes).all(|(i, n)| (0..*n).contains(i));
                    inside.then(|| x.get(&place))
                })
                .collect();
            let divisor = if self.count_padding { counted } else { elements.len() as i64 };
            Number::Float(match self.kind {
                PoolKind::Avg => elements.iter().sum::<f64>() / divisor as f64,
                PoolKind::Max => elements
                    .iter()
                    .fold(f64::NEG_INFINITY, |a, &b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }),
            })
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused};
    use super::*;
    use lz_abi::DType;

    fn pool(kind: PoolKind, kernel: i64, stride: i64, padding: i64) -> Pool {
        let (kernel, stride, padding) = (vec![kernel], vec![stride], vec![padding]);
        Pool { kind, kernel, stride, padding, ceil: false, count_padding: true }
    }

    #[test]
    fn windows_by_hand() {
        let x = counted(DType::F32, &[1, 1, 6]);
        assert_eq!(evaluated(pool(PoolKind::Max, 2, 2, 0), &[&x]).to_f64(), [1., 3., 5.]);
        assert_eq!(evaluated(pool(PoolKind::Avg, 2, 2, 1), &[&x]).to_f64(), [0., 1.5, 3.5, 2.5]);
        let own = Pool { count_padding: false, ..pool(PoolKind::Avg, 2, 2, 1) };
        assert_eq!(evaluated(own, &[&x]).to_f64(), [0., 1.5, 3.5, 5.]);
        // The last window has two elements; one that began at element 6 would have none.
        let ceil = Pool { ceil: true, ..pool(PoolKind::Avg, 4, 4, 0) };
        assert_eq!(evaluated(ceil, &[&x]).to_f64(), [1.5, 4.5]);
        let none = Pool { ceil: true, ..pool(PoolKind::Max, 2, 3, 0) };
        assert_eq!(evaluated(none, &[&x]).to_f64(), [1., 4.]);
    }

    #[test]
    fn two_axes() {
        let x = counted(DType::F32, &[1, 1, 2, 4]);
        let two = |kind| Pool { kernel: vec![2, 2], stride: vec![2, 2], padding: vec![0, 0], ..pool(kind, 1, 1, 0) };
        assert_eq!(evaluated(two(PoolKind::Max), &[&x]).to_f64(), [5., 7.]);
        assert_eq!(evaluated(two(PoolKind::Avg), &[&x]).to_f64(), [2.5, 4.5]);
    }

    #[test]
    fn wrong_attributes_are_refused() {
        let x = meta(DType::F32, &[1, 1, 3]);
        assert!(refused(&pool(PoolKind::Max, 2, 1, 2), &[&x]).contains("at most half of the kernel [2]"));
        assert_eq!(refused(&pool(PoolKind::Max, 5, 1, 0), &[&x]), "sizes 3 and 5 do not fit together");
        assert!(refused(&pool(PoolKind::Max, 2, 0, 0), &[&x]).contains("'stride'"));
    }
}
