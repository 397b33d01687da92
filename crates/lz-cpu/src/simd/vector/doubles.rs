//! Eight float64 numbers in registers.

/// How many numbers these are.
pub const DOUBLES: usize = 8;

/// Eight float64 numbers. Its functions need the instructions of their type, as those of [`super::Sixteen`].
#[allow(clippy::missing_safety_doc)] // said above, of all of them
pub trait Eight: Copy {
    /// Rows of sums, each of [`Eight::SIDE`] of these, that fit into the registers beside what is multiplied.
    const ROWS: usize;
    /// How many of these a row of sums has: 1 or 2.
    const SIDE: usize;
    /// One number eight times.
    unsafe fn splat(x: f64) -> Self;
    /// From memory.
    unsafe fn load(from: &[f64; DOUBLES]) -> Self;
    /// To memory.
    unsafe fn store(self, to: &mut [f64; DOUBLES]);
    /// self · factor + other.
    unsafe fn times(self, factor: Self, other: Self) -> Self;
    /// self + other.
    unsafe fn plus(self, other: Self) -> Self;
}

/// Without instructions of their own.
#[derive(Clone, Copy)]
pub struct PlainEight([f64; DOUBLES]);

impl Eight for PlainEight {
    const ROWS: usize = 2;
    const SIDE: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        PlainEight([x; DOUBLES])
    }

    #[inline(always)]
    unsafe fn load(from: &[f64; DOUBLES]) -> Self {
        PlainEight(*from)
    }

    #[inline(always)]
    unsafe fn store(self, to: &mut [f64; DOUBLES]) {
        *to = self.0;
    }

    #[inline(always)]
    unsafe fn times(self, factor: Self, other: Self) -> Self {
        PlainEight(std::array::from_fn(|i| self.0[i] * factor.0[i] + other.0[i]))
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        PlainEight(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{EightInOne, EightInTwo};

/// On other architectures nothing is compiled for them.
#[cfg(not(target_arch = "x86_64"))]
pub use {PlainEight as EightInOne, PlainEight as EightInTwo};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{DOUBLES, Eight};

    /// In one register of AVX-512.
    #[derive(Clone, Copy)]
    pub struct EightInOne(__m512d);

    // The functions read and write eight numbers at any alignment, with instructions of AVX-512.
    impl Eight for EightInOne {
        const ROWS: usize = 8;
        const SIDE: usize = 2;

        #[inline(always)]
        unsafe fn splat(x: f64) -> Self {
            EightInOne(unsafe { _mm512_set1_pd(x) })
        }

        #[inline(always)]
        unsafe fn load(from: &[f64; DOUBLES]) -> Self {
            EightInOne(unsafe { _mm512_loadu_pd(from.as_ptr()) })
        }

        #[inline(always)]
        unsafe fn store(self, to: &mut [f64; DOUBLES]) {
            unsafe { _mm512_storeu_pd(to.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        unsafe fn times(self, factor: Self, other: Self) -> Self {
            EightInOne(unsafe { _mm512_fmadd_pd(self.0, factor.0, other.0) })
        }

        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            EightInOne(unsafe { _mm512_add_pd(self.0, other.0) })
        }
    }

    /// In two registers of AVX2.
    #[derive(Clone, Copy)]
    pub struct EightInTwo([__m256d; 2]);

    // The functions read and write eight numbers at any alignment, with instructions of AVX2 and FMA.
    impl Eight for EightInTwo {
        const ROWS: usize = 6;
        const SIDE: usize = 1;

        #[inline(always)]
        unsafe fn splat(x: f64) -> Self {
            EightInTwo([unsafe { _mm256_set1_pd(x) }; 2])
        }

        #[inline(always)]
        unsafe fn load(from: &[f64; DOUBLES]) -> Self {
            unsafe { EightInTwo([_mm256_loadu_pd(from.as_ptr()), _mm256_loadu_pd(from.as_ptr().add(4))]) }
        }

        #[inline(always)]
        unsafe fn store(self, to: &mut [f64; DOUBLES]) {
            unsafe {
                _mm256_storeu_pd(to.as_mut_ptr(), self.0[0]);
                _mm256_storeu_pd(to.as_mut_ptr().add(4), self.0[1]);
            }
        }

        #[inline(always)]
        unsafe fn times(self, factor: Self, other: Self) -> Self {
            let of = |i: usize| unsafe { _mm256_fmadd_pd(self.0[i], factor.0[i], other.0[i]) };
            EightInTwo([of(0), of(1)])
        }

        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            let of = |i: usize| unsafe { _mm256_add_pd(self.0[i], other.0[i]) };
            EightInTwo([of(0), of(1)])
        }
    }
}
