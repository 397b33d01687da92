//! Half-precision floats to float32 and back, many at a time.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use lz_abi::Scalar;

use super::vector::{LANES, Sixteen};

/// A float of at most 32 bits that is computed with as float32.
pub trait Narrow: Scalar {
    /// Writes the same numbers as float32. Both slices have one length.
    fn widen(from: &[Self], to: &mut [f32]);
    /// Rounds to nearest, half to even. Both slices have one length.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// The same numbers as float32: where they are, or in a buffer that is at least as long.
    #[inline(always)]
    fn wide<'a>(from: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
        let buffer = &mut buffer[..from.len()];
        Self::widen(from, buffer);
        buffer
    }

    /// Where float32 numbers that become these are written: there, or in a buffer that is at least as long. [`Narrow::settle`] comes
    /// after that.
    #[inline(always)]
    fn place<'a>(to: &'a mut [Self], buffer: &'a mut [f32]) -> &'a mut [f32] {
        &mut buffer[..to.len()]
    }

    /// Rounds what [`Narrow::place`] gave to be written.
    #[inline(always)]
    fn settle(buffer: &[f32], to: &mut [Self]) {
        Self::narrow(&buffer[..to.len()], to);
    }

    /// Sixteen of them as float32, in registers.
    ///
    /// # Safety
    /// As for [`Sixteen`].
    #[allow(unsafe_code)]
    unsafe fn load<V: Sixteen>(from: &[Self; LANES]) -> V;
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

    #[inline(always)]
    fn wide<'a>(from: &'a [f32], _: &'a mut [f32]) -> &'a [f32] {
        from
    }

    #[inline(always)]
    fn place<'a>(to: &'a mut [f32], _: &'a mut [f32]) -> &'a mut [f32] {
        to
    }

    #[inline(always)]
    fn settle(_: &[f32], _: &mut [f32]) {}

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn load<V: Sixteen>(from: &[f32; LANES]) -> V {
        // SAFETY: the caller's.
        unsafe { V::load(from) }
    }
}

impl Narrow for f16 {
    #[inline(always)]
    fn widen(from: &[f16], to: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("f16c") {
            // SAFETY: this CPU has the instructions.
            #[allow(unsafe_code)]
            return unsafe { f16c::widen(from, to) };
        }
        widen_without(from, to);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [f16]) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("f16c") {
            // SAFETY: this CPU has the instructions.
            #[allow(unsafe_code)]
            return unsafe { f16c::narrow(from, to) };
        }
        narrow_without(from, to);
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn load<V: Sixteen>(from: &[f16; LANES]) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_f16(from) }
    }
}

/// On a CPU without the instructions. One copy for all kernels.
#[inline(never)]
fn widen_without(from: &[f16], to: &mut [f32]) {
    from.convert_to_f32_slice(to);
}

/// See above.
#[inline(never)]
fn narrow_without(from: &[f32], to: &mut [f16]) {
    to.convert_from_f32_slice(from);
}

/// Eight at a time. In a function that is compiled for these instructions, they become part of it.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod f16c {
    use std::arch::x86_64::{
        _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
        _mm256_loadu_ps, _mm256_storeu_ps,
    };

    use half::f16;

    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub fn widen(from: &[f16], to: &mut [f32]) {
        let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<8>(), to.as_chunks_mut::<8>());
        for (from, to) in from.iter().zip(to) {
            // SAFETY: eight numbers are read and eight are written, at any alignment.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()))) };
        }
        for (from, to) in from_rest.iter().zip(to_rest) {
            *to = from.to_f32();
        }
    }

    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub fn narrow(from: &[f32], to: &mut [f16]) {
        let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<8>(), to.as_chunks_mut::<8>());
        for (from, to) in from.iter().zip(to) {
            // SAFETY: eight numbers are read and eight are written, at any alignment.
            unsafe {
                let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(from.as_ptr()));
                _mm_storeu_si128(to.as_mut_ptr().cast(), rounded);
            }
        }
        for (from, to) in from_rest.iter().zip(to_rest) {
            *to = f16::from_f32(*from);
        }
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

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn load<V: Sixteen>(from: &[bf16; LANES]) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_bf16(from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_model::{DType, numeric};

    #[test]
    fn whole_vectors_and_what_is_left_of_them_are_alike() {
        let codes: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for len in [0, 1, 7, 8, 9, 31, 65_536] {
            for codes in codes.chunks_exact(len.max(1)).map(|codes| &codes[..len]) {
                let mut wide = vec![0f32; len];
                f16::widen(codes, &mut wide);
                let mut back = vec![f16::ZERO; len];
                f16::narrow(&wide, &mut back);
                for ((code, wide), back) in codes.iter().zip(&wide).zip(&back) {
                    assert!(code.to_f64() == f64::from(*wide) || code.is_nan() && wide.is_nan());
                    assert!(code == back || code.is_nan() && back.is_nan());
                }
            }
        }
    }

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
