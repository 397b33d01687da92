//! Sixteen numbers without instructions of their own: what the compiler makes of arrays.

use half::{bf16, f16};

use super::{LANES, Sixteen};

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
