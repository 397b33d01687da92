//! Sixteen numbers in one register of AVX-512.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::of_eight;
use super::{LANES, Sixteen};

/// In one register of AVX-512.
#[derive(Clone, Copy)]
pub struct InOne(pub(in crate::simd) __m512);

// The functions read and write sixteen numbers at any alignment, with instructions of AVX-512.
impl Sixteen for InOne {
    const REGISTERS: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> InOne {
        InOne(unsafe { _mm512_set1_ps(x) })
    }

    #[inline(always)]
    unsafe fn load(from: &[f32; LANES]) -> InOne {
        InOne(unsafe { _mm512_loadu_ps(from.as_ptr()) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: &[bf16; LANES]) -> InOne {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            InOne(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn load_pairs(from: &[bf16; 2 * LANES]) -> (InOne, InOne) {
        // A bfloat16 is the upper half of a float32; the first of a pair is the lower half of 32 bits.
        unsafe {
            let pairs = _mm512_loadu_si512(from.as_ptr().cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(-0x1_0000));
            (InOne(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs))), InOne(_mm512_castsi512_ps(second)))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: &[f16; LANES]) -> InOne {
        InOne(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) })
    }

    #[inline(always)]
    unsafe fn load_i8(from: &[i8; LANES]) -> InOne {
        InOne(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) })
    }

    #[inline(always)]
    unsafe fn load_i4(from: &[[u8; 4]; LANES], at: usize) -> InOne {
        unsafe {
            // The lowest four bits choose one of sixteen numbers, and the others are not looked at.
            let numbers =
                _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0);
            let eights = _mm512_loadu_si512(from.as_ptr().cast());
            InOne(_mm512_permutexvar_ps(_mm512_srlv_epi32(eights, _mm512_set1_epi32(4 * at as i32)), numbers))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: &mut [f32; LANES]) {
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) };
    }

    #[inline(always)]
    unsafe fn store_pairs(first: InOne, second: InOne, to: &mut [bf16; 2 * LANES]) {
        // A bfloat16 is the upper half of a float32; the first of a pair is the lower half of 32 bits.
        unsafe {
            let first = _mm512_srli_epi32::<16>(_mm512_castps_si512(first.0));
            let pairs = _mm512_mask_blend_epi16(0xaaaa_aaaa, first, _mm512_castps_si512(second.0));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs);
        }
    }

    #[inline(always)]
    unsafe fn times(self, factor: InOne, other: InOne) -> InOne {
        InOne(unsafe { _mm512_fmadd_ps(self.0, factor.0, other.0) })
    }

    #[inline(always)]
    unsafe fn plus(self, other: InOne) -> InOne {
        InOne(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn or_larger(self, other: InOne) -> InOne {
        InOne(unsafe { _mm512_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    unsafe fn added(self) -> f32 {
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            of_eight(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }

    #[inline(always)]
    unsafe fn within(self, at: i32, first: &[i32; LANES], last: &[i32; LANES]) -> InOne {
        unsafe {
            let at = _mm512_set1_epi32(at);
            let after = _mm512_cmpge_epi32_mask(at, _mm512_loadu_si512(first.as_ptr().cast()));
            let inside = _mm512_mask_cmple_epi32_mask(after, at, _mm512_loadu_si512(last.as_ptr().cast()));
            InOne(_mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), inside, self.0))
        }
    }

    #[inline(always)]
    unsafe fn exp2<const N: usize>(self, polynomial: &[f32; N]) -> InOne {
        unsafe {
            let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            let r = _mm512_sub_ps(self.0, n);
            let mut power = _mm512_set1_ps(polynomial[0]);
            for &next in &polynomial[1..] {
                power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(next));
            }
            let some = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(-126.0));
            InOne(_mm512_maskz_scalef_ps(some, power, n))
        }
    }

    #[inline(always)]
    unsafe fn turned(rows: [InOne; LANES]) -> [InOne; LANES] {
        unsafe {
            // Each step joins twice as many rows: 2 of them, 4, then quarters of registers, twice.
            let zero = _mm512_setzero_ps();
            let mut twos = [zero; LANES];
            for i in 0..8 {
                twos[2 * i] = _mm512_unpacklo_ps(rows[2 * i].0, rows[2 * i + 1].0);
                twos[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].0, rows[2 * i + 1].0);
            }
            let mut fours = [zero; LANES];
            for i in 0..4 {
                for half in 0..2 {
                    let (low, high) = (twos[4 * i + half], twos[4 * i + 2 + half]);
                    let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
                    fours[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                    fours[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
                }
            }
            let mut eights = [zero; LANES];
            for i in 0..2 {
                for column in 0..4 {
                    let (low, high) = (fours[8 * i + column], fours[8 * i + 4 + column]);
                    eights[8 * i + column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
                    eights[8 * i + 4 + column] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
                }
            }
            let mut columns = rows;
            for column in 0..8 {
                let (low, high) = (eights[column], eights[8 + column]);
                columns[column] = InOne(_mm512_shuffle_f32x4::<0b10_00_10_00>(low, high));
                columns[8 + column] = InOne(_mm512_shuffle_f32x4::<0b11_01_11_01>(low, high));
            }
            columns
        }
    }
}
