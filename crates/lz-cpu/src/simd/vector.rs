//! Sixteen float32 numbers in registers, for sums that the compiler does not keep there by itself.

use half::{bf16, f16};

/// How many numbers these are.
pub const LANES: usize = 16;

/// Sixteen float32 numbers. Its functions need the instructions of their type: they are called by work that
/// [`super::Isa::vectorize`] runs, with the type of that instruction set.
#[allow(clippy::missing_safety_doc)] // said above, of all of them
pub trait Sixteen: Copy {
    /// How many registers they take, of 16 or, if it is one, of 32.
    const REGISTERS: usize;
    /// One number sixteen times.
    unsafe fn splat(x: f32) -> Self;
    /// From memory.
    unsafe fn load(from: &[f32; LANES]) -> Self;
    /// From memory, widened.
    unsafe fn load_bf16(from: &[bf16; LANES]) -> Self;
    /// Sixteen pairs from memory, widened: the first of each, and the second of each.
    unsafe fn load_pairs(from: &[bf16; 2 * LANES]) -> (Self, Self);
    /// From memory, widened.
    unsafe fn load_f16(from: &[f16; LANES]) -> Self;
    /// From memory, as floats.
    unsafe fn load_i8(from: &[i8; LANES]) -> Self;
    /// One of eight integers of 4 bits, in two's complement, of each 32 bits in memory, as floats.
    unsafe fn load_i4(from: &[[u8; 4]; LANES], at: usize) -> Self;
    /// To memory.
    unsafe fn store(self, to: &mut [f32; LANES]);
    /// To memory as sixteen pairs, the first of each from `first`. What is stored must be bfloat16 numbers: nothing is rounded.
    unsafe fn store_pairs(first: Self, second: Self, to: &mut [bf16; 2 * LANES]);
    /// self · factor + other.
    unsafe fn times(self, factor: Self, other: Self) -> Self;
    /// self + other.
    unsafe fn plus(self, other: Self) -> Self;
    /// The larger of each two; `other` where one is NaN.
    unsafe fn or_larger(self, other: Self) -> Self;
    /// The sum of all, by halves: the first eight and the last eight, and so on.
    unsafe fn added(self) -> f32;
    /// The numbers of lanes with `first` ≤ `at` ≤ `last`, and minus infinity in the others.
    unsafe fn within(self, at: i32, first: &[i32; LANES], last: &[i32; LANES]) -> Self;
    /// 2^x = 2^n · 2^r with n = round(x): `polynomial` approximates 2^r for |r| ≤ 1/2, highest power first. Below -126 the result is
    /// 0, and of a NaN it is NaN. Nothing is promised above 127.
    unsafe fn exp2<const N: usize>(self, polynomial: &[f32; N]) -> Self;
    /// Rows to columns. The bits of the numbers stay what they are, whatever they mean.
    #[inline(always)]
    unsafe fn turned(rows: [Self; LANES]) -> [Self; LANES] {
        let (mut from, mut to) = ([[0f32; LANES]; LANES], rows);
        // SAFETY: the caller's.
        unsafe {
            for (from, row) in from.iter_mut().zip(rows) {
                row.store(from);
            }
            for (column, to) in to.iter_mut().enumerate() {
                let mut numbers = [0f32; LANES];
                numbers.iter_mut().zip(&from).for_each(|(number, row)| *number = row[column]);
                *to = Self::load(&numbers);
            }
        }
        to
    }
}

/// Without instructions of their own.
#[derive(Clone, Copy)]
pub struct Plain([f32; LANES]);

impl Sixteen for Plain {
    const REGISTERS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Plain {
        Plain([x; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: &[f32; LANES]) -> Plain {
        Plain(*from)
    }

    #[inline(always)]
    unsafe fn load_bf16(from: &[bf16; LANES]) -> Plain {
        Plain(from.map(bf16::to_f32))
    }

    #[inline(always)]
    unsafe fn load_pairs(from: &[bf16; 2 * LANES]) -> (Plain, Plain) {
        let of = |second: usize| Plain(std::array::from_fn(|i| from[2 * i + second].to_f32()));
        (of(0), of(1))
    }

    #[inline(always)]
    unsafe fn load_f16(from: &[f16; LANES]) -> Plain {
        Plain(from.map(f16::to_f32))
    }

    #[inline(always)]
    unsafe fn load_i8(from: &[i8; LANES]) -> Plain {
        Plain(from.map(f32::from))
    }

    #[inline(always)]
    unsafe fn load_i4(from: &[[u8; 4]; LANES], at: usize) -> Plain {
        // To the upper end, and back with the sign.
        Plain(from.map(|eight| (i32::from_le_bytes(eight) << (28 - 4 * at) >> 28) as f32))
    }

    #[inline(always)]
    unsafe fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }

    #[inline(always)]
    unsafe fn store_pairs(first: Plain, second: Plain, to: &mut [bf16; 2 * LANES]) {
        let pairs = to.as_chunks_mut::<2>().0.iter_mut().zip(first.0.into_iter().zip(second.0));
        pairs.for_each(|(to, (first, second))| *to = [bf16::from_f32(first), bf16::from_f32(second)]);
    }

    #[inline(always)]
    unsafe fn times(self, factor: Plain, other: Plain) -> Plain {
        let mut sums = other.0;
        for ((sum, x), factor) in sums.iter_mut().zip(self.0).zip(factor.0) {
            *sum += x * factor;
        }
        Plain(sums)
    }

    #[inline(always)]
    unsafe fn plus(self, other: Plain) -> Plain {
        let mut sums = other.0;
        sums.iter_mut().zip(self.0).for_each(|(sum, x)| *sum += x);
        Plain(sums)
    }

    #[inline(always)]
    unsafe fn or_larger(self, other: Plain) -> Plain {
        let mut most = other.0;
        most.iter_mut().zip(self.0).for_each(|(most, x)| *most = if x > *most { x } else { *most });
        Plain(most)
    }

    #[inline(always)]
    unsafe fn added(self) -> f32 {
        let (mut all, mut width) = (self.0, LANES / 2);
        while width > 0 {
            let (low, high) = all.split_at_mut(width);
            low.iter_mut().zip(&*high).for_each(|(low, high)| *low += high);
            width /= 2;
        }
        all[0]
    }

    #[inline(always)]
    unsafe fn within(self, at: i32, first: &[i32; LANES], last: &[i32; LANES]) -> Plain {
        let mut numbers = self.0;
        for ((number, first), last) in numbers.iter_mut().zip(first).zip(last) {
            *number = if at < *first || at > *last { f32::NEG_INFINITY } else { *number };
        }
        Plain(numbers)
    }

    #[inline(always)]
    unsafe fn exp2<const N: usize>(self, polynomial: &[f32; N]) -> Plain {
        /// Added to a number below 2^22, it leaves the nearest integer in the lowest bits.
        const INTEGERS: f32 = 12_582_912.0;
        Plain(self.0.map(|x| {
            let shifted = x + INTEGERS;
            let r = x - (shifted - INTEGERS);
            let power = polynomial.iter().fold(0.0, |sum, &next| sum * r + next);
            let n = shifted.to_bits().wrapping_sub(INTEGERS.to_bits());
            let scaled = f32::from_bits(power.to_bits().wrapping_add(n << 23));
            if x < -126.0 {
                0.0
            } else if x.is_nan() {
                x
            } else {
                scaled
            }
        }))
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{InOne, InTwo};

/// On other architectures nothing is compiled for them.
#[cfg(not(target_arch = "x86_64"))]
pub use {Plain as InOne, Plain as InTwo};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::{LANES, Sixteen};

    /// The sum of eight numbers, by halves.
    #[inline(always)]
    unsafe fn of_eight(all: __m256) -> f32 {
        // SAFETY: the caller's.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

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
                let numbers = _mm512_setr_ps(
                    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0,
                );
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
}

#[cfg(test)]
mod tests {
    use super::super::{Avx2, Avx512, Isa, Portable, Work};
    use super::*;

    struct Everything<V>(std::marker::PhantomData<V>);

    impl<V: Sixteen> Work for Everything<V> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run(self) -> Vec<f32> {
            let numbers: [f32; LANES] = std::array::from_fn(|i| i as f32 * 0.5 - 3.0);
            let mut results = Vec::new();
            // SAFETY: `vectorize` runs it where the instructions are.
            unsafe {
                let x = V::load(&numbers);
                let mut keep = |v: V| {
                    let mut all = [0f32; LANES];
                    v.store(&mut all);
                    results.extend(all);
                };
                keep(x);
                keep(V::splat(1.5));
                keep(V::load_bf16(&numbers.map(bf16::from_f32)));
                keep(V::load_f16(&numbers.map(f16::from_f32)));
                keep(V::load_i8(&std::array::from_fn(|i| (i as i32 * 17 - 128) as i8)));
                let eights: [[u8; 4]; LANES] = std::array::from_fn(|i| [i as u8 * 17, 0x3f, 0x0c, 0xa8]);
                [0, 1, 2, 6, 7].into_iter().for_each(|at| keep(V::load_i4(&eights, at)));
                let pairs = std::array::from_fn(|i| bf16::from_f32(numbers[i / 2] + (i % 2) as f32));
                let (first, second) = V::load_pairs(&pairs);
                keep(first);
                keep(second);
                let mut stored = [bf16::ZERO; 2 * LANES];
                V::store_pairs(first, second, &mut stored);
                assert_eq!(stored, pairs);
                keep(x.times(V::splat(2.0), V::splat(0.25)));
                keep(x.plus(x));
                keep(x.or_larger(V::splat(0.75)));
                keep(V::splat(f32::NAN).or_larger(x));
                keep(x.within(9, &std::array::from_fn(|i| i as i32), &std::array::from_fn(|i| i as i32 + 5)));
                results.push(x.added());
                // The next row is the one before, times two.
                let mut rows = [x; LANES];
                (1..LANES).for_each(|i| rows[i] = rows[i - 1].plus(rows[i - 1]));
                V::turned(rows).into_iter().for_each(|column| {
                    let mut all = [0f32; LANES];
                    column.store(&mut all);
                    results.extend(all);
                });
            }
            results
        }
    }

    /// 2^x for sixteen numbers, by a polynomial of degree 6.
    struct Powers<V>([f32; LANES], std::marker::PhantomData<V>);

    impl<V: Sixteen> Work for Powers<V> {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run(self) -> [f32; LANES] {
            let mut found = [0f32; LANES];
            // SAFETY: `vectorize` runs it where the instructions are.
            unsafe { V::load(&self.0).exp2(&crate::simd::exp::TWO_TO).store(&mut found) };
            found
        }
    }

    fn powers(of: [f32; LANES]) -> impl Iterator<Item = [f32; LANES]> {
        let all = [
            Portable::vectorize(Powers::<Plain>(of, std::marker::PhantomData)),
            Avx2::vectorize(Powers::<InTwo>(of, std::marker::PhantomData)),
            Avx512::vectorize(Powers::<InOne>(of, std::marker::PhantomData)),
        ];
        all.into_iter().flatten()
    }

    #[test]
    fn powers_of_two_are_right_to_the_last_places() {
        for start in -125_990..=100 {
            let numbers: [f32; LANES] = std::array::from_fn(|i| (start as f32 + i as f32 / 16.0) * 1e-3);
            for found in powers(numbers) {
                for (x, found) in numbers.iter().zip(found) {
                    let wanted = f64::from(*x).exp2();
                    assert!((f64::from(found) - wanted).abs() <= 2.5e-7 * wanted, "{x}: {found} {wanted}");
                }
            }
        }
    }

    #[test]
    fn powers_of_two_at_the_ends() {
        let mut numbers = [0f32; LANES];
        numbers[..4].copy_from_slice(&[f32::NAN, f32::NEG_INFINITY, -126.1, -1e30]);
        for found in powers(numbers) {
            assert!(found[0].is_nan());
            assert_eq!(found[1..4], [0.0; 3]);
            assert_eq!(found[4..], [1.0; 12]);
        }
    }

    #[test]
    fn every_type_computes_the_same() {
        let numbers: Vec<f32> = (0..LANES).map(|i| i as f32 * 0.5 - 3.0).collect();
        let each = |f: &dyn Fn(f32) -> f32| numbers.iter().map(|&x| f(x)).collect::<Vec<_>>();
        let expected: Vec<f32> = [
            each(&|x| x),
            each(&|_| 1.5),
            each(&|x| x),
            each(&|x| x),
            (0..16).map(|i| i as f32 * 17.0 - 128.0).collect(),
            (0..32).map(|i| if i % 16 < 8 { i as f32 % 16.0 } else { i as f32 % 16.0 - 16.0 }).collect(),
            each(&|_| -1.0),
            each(&|_| -8.0),
            each(&|_| -6.0),
            each(&|x| x),
            each(&|x| x + 1.0),
            each(&|x| x * 2.0 + 0.25),
            each(&|x| x + x),
            each(&|x| x.max(0.75)),
            each(&|x| x),
            each(&|x| if (-1.0..=1.5).contains(&x) { x } else { f32::NEG_INFINITY }),
            vec![numbers.iter().sum()],
            each(&|x| x).iter().flat_map(|x| (0..LANES).map(move |i| x * f32::from(1u16 << i))).collect(),
        ]
        .concat();
        let all = [
            Portable::vectorize(Everything::<Plain>(std::marker::PhantomData)),
            Avx2::vectorize(Everything::<InTwo>(std::marker::PhantomData)),
            Avx512::vectorize(Everything::<InOne>(std::marker::PhantomData)),
        ];
        for found in all.into_iter().flatten() {
            assert_eq!(found, expected);
        }
    }
}
