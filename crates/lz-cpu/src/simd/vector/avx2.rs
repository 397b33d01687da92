//! Sixteen numbers in two registers of AVX2.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Sixteen};

/// In two registers of AVX2.
#[derive(Clone, Copy)]
pub struct InTwo(__m256, __m256);

// The functions read and write sixteen numbers at any alignment, with instructions of AVX2, FMA and F16C.
impl Sixteen for InTwo {
    const REGISTERS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> InTwo {
        let all = unsafe { _mm256_set1_ps(x) };
        InTwo(all, all)
    }

    #[inline(always)]
    unsafe fn load(from: &[f32; LANES]) -> InTwo {
        unsafe { InTwo(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: &[bf16; LANES]) -> InTwo {
        unsafe {
            let half = |at: usize| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(at).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            };
            InTwo(half(0), half(8))
        }
    }

    #[inline(always)]
    unsafe fn load_pairs(from: &[bf16; 2 * LANES]) -> (InTwo, InTwo) {
        unsafe {
            let half = |at: usize| {
                let pairs = _mm256_loadu_si256(from.as_ptr().add(at).cast());
                let second = _mm256_and_si256(pairs, _mm256_set1_epi32(-0x1_0000));
                (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(second))
            };
            let (low, high) = (half(0), half(LANES));
            (InTwo(low.0, high.0), InTwo(low.1, high.1))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: &[f16; LANES]) -> InTwo {
        unsafe {
            let (low, high) = (_mm_loadu_si128(from.as_ptr().cast()), _mm_loadu_si128(from.as_ptr().add(8).cast()));
            InTwo(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: &[i8; LANES]) -> InTwo {
        unsafe {
            let half =
                |at: usize| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().add(at).cast())));
            InTwo(half(0), half(8))
        }
    }

    #[inline(always)]
    unsafe fn load_i4(from: &[[u8; 4]; LANES], at: usize) -> InTwo {
        unsafe {
            // To the upper end, and back with the sign.
            let half = |first: usize| {
                let eights = _mm256_loadu_si256(from.as_ptr().add(first).cast());
                let upper = _mm256_sllv_epi32(eights, _mm256_set1_epi32(28 - 4 * at as i32));
                _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(upper))
            };
            InTwo(half(0), half(8))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: &mut [f32; LANES]) {
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn store_pairs(first: InTwo, second: InTwo, to: &mut [bf16; 2 * LANES]) {
        unsafe {
            let pairs = |first: __m256, second: __m256| {
                let first = _mm256_srli_epi32::<16>(_mm256_castps_si256(first));
                _mm256_blend_epi16::<0b1010_1010>(first, _mm256_castps_si256(second))
            };
            _mm256_storeu_si256(to.as_mut_ptr().cast(), pairs(first.0, second.0));
            _mm256_storeu_si256(to.as_mut_ptr().add(LANES).cast(), pairs(first.1, second.1));
        }
    }

    #[inline(always)]
    unsafe fn times(self, factor: InTwo, other: InTwo) -> InTwo {
        unsafe { InTwo(_mm256_fmadd_ps(self.0, factor.0, other.0), _mm256_fmadd_ps(self.1, factor.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn plus(self, other: InTwo) -> InTwo {
        unsafe { InTwo(_mm256_add_ps(self.0, other.0), _mm256_add_ps(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn or_larger(self, other: InTwo) -> InTwo {
        unsafe { InTwo(_mm256_max_ps(self.0, other.0), _mm256_max_ps(self.1, other.1)) }
    }

    #[inline(always)]
    unsafe fn added(self) -> f32 {
        unsafe { of_eight(_mm256_add_ps(self.0, self.1)) }
    }

    #[inline(always)]
    unsafe fn within(self, at: i32, first: &[i32; LANES], last: &[i32; LANES]) -> InTwo {
        let ((first, first_rest), (last, last_rest)) = (first.split_at(8), last.split_at(8));
        unsafe { InTwo(eight_within(self.0, at, first, last), eight_within(self.1, at, first_rest, last_rest)) }
    }

    #[inline(always)]
    unsafe fn exp2<const N: usize>(self, polynomial: &[f32; N]) -> InTwo {
        unsafe { InTwo(exp2_of_eight(self.0, polynomial), exp2_of_eight(self.1, polynomial)) }
    }
}

/// As of [`Sixteen`], for eight numbers and as many bounds.
#[inline(always)]
unsafe fn eight_within(x: __m256, at: i32, first: &[i32], last: &[i32]) -> __m256 {
    assert!(first.len() == 8 && last.len() == 8);
    // SAFETY: the caller's; eight bounds are read.
    unsafe {
        let at = _mm256_set1_epi32(at);
        let before = _mm256_cmpgt_epi32(_mm256_loadu_si256(first.as_ptr().cast()), at);
        let after = _mm256_cmpgt_epi32(at, _mm256_loadu_si256(last.as_ptr().cast()));
        let outside = _mm256_castsi256_ps(_mm256_or_si256(before, after));
        _mm256_blendv_ps(x, _mm256_set1_ps(f32::NEG_INFINITY), outside)
    }
}

/// As of [`Sixteen`], for eight numbers.
#[inline(always)]
unsafe fn exp2_of_eight<const N: usize>(x: __m256, polynomial: &[f32; N]) -> __m256 {
    // SAFETY: the caller's.
    unsafe {
        let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        let r = _mm256_sub_ps(x, n);
        let mut power = _mm256_set1_ps(polynomial[0]);
        for &next in &polynomial[1..] {
            power = _mm256_fmadd_ps(power, r, _mm256_set1_ps(next));
        }
        // n joins the exponent. That of a NaN would leave its range.
        let bits = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
        let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(power), bits));
        let some = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(-126.0));
        let scaled = _mm256_blendv_ps(scaled, x, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_and_ps(scaled, some)
    }
}

/// The sum of eight numbers, by halves.
#[inline(always)]
pub(super) unsafe fn of_eight(all: __m256) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
