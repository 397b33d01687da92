//! Half-precision floats to float32 and back, many at a time.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use lz_abi::Scalar;

/// A float of at most 32 bits that is computed with as float32.
pub trait Narrow: Scalar {
    /// Writes the same numbers as float32. Both slices have one length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Rounds to nearest, half to even. Both slices have one length.
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Narrow for f32 {
    #[inline(always)]
    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Narrow for f16 {
    #[inline(always)]
    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
}

impl Narrow for bf16 {
    #[inline(always)]
    fn widen(from: &[bf16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [bf16]) {
        for (to, from) in to.iter_mut().zip(from) {
            let bits = from.to_bits();
            // The upper half, plus one if the lower half is more than half of its range, or just half and the upper half
            // is odd. A NaN keeps its upper half, with a bit set that must be.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let kept = bits >> 16 | 0x40;
            *to = bf16::from_bits(if from.is_nan() { kept } else { rounded } as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_model::{DType, numeric};

    #[test]
    fn every_half_widens_exactly() {
        for code in 0..=u16::MAX {
            let mut wide = [0f32; 2];
            bf16::widen(&[bf16::from_bits(code)], &mut wide[..1]);
            f16::widen(&[f16::from_bits(code)], &mut wide[1..]);
            let exact = [DType::Bf16, DType::F16].map(|dtype| numeric::load(dtype, &code.to_le_bytes(), 0));
            for (wide, exact) in wide.iter().zip(exact) {
                assert!(f64::from(*wide) == exact || wide.is_nan() && exact.is_nan(), "{code:#x}");
            }
        }
    }

    #[test]
    fn rounding_is_the_references() {
        // Every upper half with lower halves around the ties, and every exponent f16 cares about.
        for upper in 0..=u16::MAX {
            for lower in [0u16, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let number = f32::from_bits(u32::from(upper) << 16 | u32::from(lower));
                let (mut b, mut h) = ([bf16::ZERO], [f16::ZERO]);
                bf16::narrow(&[number], &mut b);
                f16::narrow(&[number], &mut h);
                for (dtype, got) in [(DType::Bf16, b[0].to_f64()), (DType::F16, h[0].to_f64())] {
                    let expected = numeric::rounded(dtype, f64::from(number));
                    assert!(got == expected || got.is_nan() && expected.is_nan(), "{number:e} as {dtype}: {got}");
                }
            }
        }
    }
}
