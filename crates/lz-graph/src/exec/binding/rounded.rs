//! Weights rounded to integers with scales, as `lz.pack` does it: weight = integer · scale.

use std::sync::Arc;

use lz_abi::{DType, Scalar, Storage, Tensor, TensorRef};
use lz_model::ops::mlp::{PACKED_GROUPS, PACKED_ROWS};

use super::packs::{Weights, each};

/// A weight as integers in blocks, and what they are multiplied with.
#[derive(Clone)]
pub struct Rounded {
    /// [blocks of 32 outputs, groups of inputs, 32, side by side]: int8, or two integers of 4 bits in a byte.
    pub blocks: Arc<dyn Storage>,
    /// [blocks of 32 outputs, groups of a scale, 32].
    pub scales: Arc<dyn Storage>,
    /// Inputs that share a scale; 0 for all of them.
    pub group: i64,
}

/// Inputs that share a scale of integers of 4 bits.
const GROUP: usize = 64;

/// Rounds a weight (out, in). `None` if a number is not finite, which no integer is.
pub fn round<T: Scalar + Into<f32>>(weight: TensorRef<'_>, to: Weights) -> Option<Rounded> {
    let (outs, ins) = (weight.shape()[0] as usize, weight.shape()[1] as usize);
    let (width, panels) = (PACKED_ROWS as usize, outs.div_ceil(PACKED_ROWS as usize));
    let half = to == Weights::Int4;
    let (largest, group) = if half { (7.0, GROUP) } else { (127.0, ins.max(1)) };
    let scale_groups = ins.div_ceil(group);
    let scale_at = |n: usize, k: usize| (n / width * scale_groups + k / group) * width + n % width;
    let mut scales = Tensor::zeros(DType::F32, &[panels as i64, scale_groups as i64, width as i64]);
    // Features of the input side by side, and in how many bytes.
    let (features, side) = if half { (8, 4) } else { (1, 1) };
    let groups = if half { ins.div_ceil(features).next_multiple_of(PACKED_GROUPS as usize) } else { ins };
    let dtype = if half { DType::U8 } else { DType::I8 };
    let mut blocks = Tensor::zeros(dtype, &[panels as i64, groups as i64, width as i64, side as i64]);
    {
        let (mut view, mut integers) = (scales.view_mut(), blocks.view_mut());
        let (mut scales, mut integers) = (view.as_mut(), integers.as_mut());
        let scales = scales.as_slice::<f32>().ok()?;
        let mut finite = true;
        each::<T>(&weight, |n, k, number| {
            let size = number.into().abs();
            finite &= size.is_finite();
            let scale = &mut scales[scale_at(n, k)];
            *scale = scale.max(size);
        })
        .ok()?;
        if !finite {
            return None;
        }
        scales.iter_mut().for_each(|scale| *scale /= largest);
        let integer = |n: usize, k: usize, number: T| {
            let scale = scales[scale_at(n, k)];
            // A scale of zero is of zeros, or of numbers too small for it.
            (number.into() / if scale > 0.0 { scale } else { 1.0 }).round_ties_even() as i8
        };
        let byte = |n: usize, k: usize| (n / width * groups + k / features) * width * side + n % width * side;
        if half {
            let target = integers.as_slice::<u8>().ok()?;
            each::<T>(&weight, |n, k, number| {
                let bits = integer(n, k, number) as u8 & 15;
                target[byte(n, k) + k % features / 2] |= bits << (k % 2 * 4);
            })
            .ok()?;
        } else {
            let target = integers.as_slice::<i8>().ok()?;
            each::<T>(&weight, |n, k, number| target[byte(n, k)] = integer(n, k, number)).ok()?;
        }
    }
    let group = if half { group as i64 } else { 0 };
    Some(Rounded { blocks: Arc::new(blocks), scales: Arc::new(scales), group })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(outs: i64, ins: i64) -> Tensor {
        let numbers: Vec<f64> = (0..outs * ins).map(|i| ((i * 37) % 101 - 50) as f64 / 50.0).collect();
        Tensor::from_f64(DType::F32, &[outs, ins], &numbers)
    }

    /// The number that integer and scale stand for.
    fn restored(found: &Rounded, n: i64, k: i64, half: bool) -> f64 {
        let (panel, lane) = (n / 32, n % 32);
        let group = if found.group == 0 { 0 } else { k / found.group };
        let scale = found.scales.view().get(&[panel, group, lane]);
        let integer = match half {
            false => found.blocks.view().get_int(&[panel, k, lane, 0]),
            true => {
                let byte = found.blocks.view().get_int(&[panel, k / 8, lane, k % 8 / 2]);
                ((byte >> (k % 2 * 4) & 15) ^ 8) - 8
            }
        };
        integer as f64 * scale
    }

    #[test]
    fn rounded_weights_are_near() {
        for (to, off) in [(Weights::Int8, 0.5 / 127.0), (Weights::Int4, 0.5 / 7.0)] {
            let weight = weight(40, 70);
            // As it is, and as the transposed view of another order of memory.
            let other = weight.view().permuted(&[1, 0]).to_tensor();
            for view in [weight.view(), other.view().permuted(&[1, 0])] {
                let found = round::<f32>(view.as_ref(), to).unwrap();
                for (n, k) in (0..40).flat_map(|n| (0..70).map(move |k| (n, k))) {
                    let (is, was) = (restored(&found, n, k, to == Weights::Int4), weight.view().get(&[n, k]));
                    assert!((is - was).abs() <= off + 1e-6, "{to:?} [{n}, {k}]: {is}, was {was}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_is_not_rounded() {
        let weight = Tensor::from_f64(DType::F32, &[1, 2], &[1.0, f64::INFINITY]);
        assert!(round::<f32>(weight.view().as_ref(), Weights::Int8).is_none());
    }
}
