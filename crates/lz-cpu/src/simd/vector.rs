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
    /// To memory.
    unsafe fn store(self, to: &mut [f32; LANES]);
    /// self · factor + other.
    unsafe fn times(self, factor: Self, other: Self) -> Self;
    /// self + other.
    unsafe fn plus(self, other: Self) -> Self;
    /// The larger of each two; `other` where one is NaN.
    unsafe fn or_larger(self, other: Self) -> Self;
    /// The sum of all, by halves: the first eight and the last eight, and so on.
    unsafe fn added(self) -> f32;
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
    unsafe fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
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
    pub struct InOne(__m512);

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
        unsafe fn store(self, to: &mut [f32; LANES]) {
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) };
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
        unsafe fn store(self, to: &mut [f32; LANES]) {
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), self.0);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
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
                let pairs = std::array::from_fn(|i| bf16::from_f32(numbers[i / 2] + (i % 2) as f32));
                let (first, second) = V::load_pairs(&pairs);
                keep(first);
                keep(second);
                keep(x.times(V::splat(2.0), V::splat(0.25)));
                keep(x.plus(x));
                keep(x.or_larger(V::splat(0.75)));
                keep(V::splat(f32::NAN).or_larger(x));
                results.push(x.added());
            }
            results
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
            each(&|x| x),
            each(&|x| x + 1.0),
            each(&|x| x * 2.0 + 0.25),
            each(&|x| x + x),
            each(&|x| x.max(0.75)),
            each(&|x| x),
            vec![numbers.iter().sum()],
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
