//! Tiles whose numbers are multiplied and added as float32, for any instruction set.
//!
//! A step of the sum loads [`WIDTH`] weights once and multiplies them with one number of each row. How many rows fit depends
//! on the registers: the sums of 12 rows are 24 of AVX-512's 32, those of 6 rows and half a panel are 12 of AVX2's 16.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::super::half_floats::Narrow;
use super::super::vector::{LANES, Sixteen};
use super::super::{Avx2, Avx512, Isa, Portable};
use super::WIDTH;
use super::engine::{DEPTH, Engine, STRIDE};

/// An instruction set with the size of its tiles.
pub trait Tile: Isa {
    /// Rows of the input.
    const ROWS: usize;
    /// Sixteens of output features: 2 for a whole panel, 1 for half of one at a time.
    const SIXTEENS: usize;
}

impl Tile for Avx512 {
    const ROWS: usize = 12;
    const SIXTEENS: usize = 2;
}

impl Tile for Avx2 {
    const ROWS: usize = 6;
    const SIXTEENS: usize = 1;
}

impl Tile for Portable {
    // Sixteen numbers are four registers, of which NEON has 32 and SSE2 has 16.
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };
    const SIXTEENS: usize = 1;
}

/// A dtype of packed weights, as float32 in registers.
#[allow(unsafe_code, clippy::missing_safety_doc)] // those of `Sixteen`
pub trait Packed: Narrow {
    /// Input features side by side.
    const INTERLEAVE: usize;
    /// The weights of sixteen output features for the input features of a group. There is no second one where
    /// `INTERLEAVE` is 1.
    ///
    /// # Safety
    /// As for [`Sixteen`], and sixteen groups are there.
    unsafe fn group<V: Sixteen>(from: *const Self) -> (V, V);
}

impl Packed for f32 {
    const INTERLEAVE: usize = 1;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn group<V: Sixteen>(from: *const f32) -> (V, V) {
        // SAFETY: the caller's.
        let one = unsafe { V::load(&*from.cast::<[f32; LANES]>()) };
        (one, one)
    }
}

impl Packed for f16 {
    const INTERLEAVE: usize = 1;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn group<V: Sixteen>(from: *const f16) -> (V, V) {
        // SAFETY: the caller's.
        let one = unsafe { V::load_f16(&*from.cast::<[f16; LANES]>()) };
        (one, one)
    }
}

impl Packed for bf16 {
    const INTERLEAVE: usize = 2;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn group<V: Sixteen>(from: *const bf16) -> (V, V) {
        // SAFETY: the caller's.
        unsafe { V::load_pairs(&*from.cast::<[bf16; 2 * LANES]>()) }
    }
}

/// The engine, for an instruction set and a dtype.
pub struct Widened<I, T>(PhantomData<(I, T)>);

impl<I: Tile, T: Packed> Engine for Widened<I, T> {
    type Isa = I;
    type Number = T;
    type Row = f32;
    const ROWS: usize = I::ROWS;
    const INTERLEAVE: usize = T::INTERLEAVE;

    #[inline(always)]
    fn arrange(from: &[T], to: &mut [f32]) {
        let (to, rest) = to.split_at_mut(from.len());
        T::widen(from, to);
        rest.fill(0.0);
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn add_block(rows: &[f32], count: usize, weight: &[T], sums: &mut [[f32; WIDTH]], first: bool) {
        assert!(rows.len() >= count * STRIDE && sums.len() >= count && weight.len() <= DEPTH * WIDTH);
        // SAFETY: just checked, and the caller's.
        unsafe {
            if I::SIXTEENS == 2 {
                of_count::<I::Sixteen, T, 2>(rows, count, weight, sums, first);
            } else {
                of_count::<I::Sixteen, T, 1>(rows, count, weight, sums, first);
            }
        }
    }
}

/// Calls the function for the number of rows.
///
/// # Safety
/// As of [`block`]; there are 1 to 12 rows.
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn of_count<V: Sixteen, T: Packed, const C: usize>(
    rows: &[f32],
    count: usize,
    weight: &[T],
    sums: &mut [[f32; WIDTH]],
    first: bool,
) {
    macro_rules! among {
        ($($r:literal)+) => {
            match count {
                // SAFETY: the caller's.
                $($r => unsafe { block::<V, T, $r, C>(rows, weight, sums, first) },)+
                _ => unreachable!("a tile of {count} rows"),
            }
        };
    }
    if C == 2 { among!(1 2 3 4 5 6 7 8 9 10 11 12) } else { among!(1 2 3 4 5 6) }
}

/// Adds a block to the sums of `R` rows, `C` sixteens of output features at a time.
///
/// # Safety
/// As for [`Sixteen`]. `rows` are `R` rows that are [`STRIDE`] apart, `weight` is a block of at most [`DEPTH`] input
/// features, and `sums` has `R` rows.
#[allow(unsafe_code)]
#[allow(clippy::needless_range_loop)] // an index names a row or a register of it, in several arrays at once
#[inline(always)]
unsafe fn block<V: Sixteen, T: Packed, const R: usize, const C: usize>(
    rows: &[f32],
    weight: &[T],
    sums: &mut [[f32; WIDTH]],
    first: bool,
) {
    let groups = weight.len() / (WIDTH * T::INTERLEAVE);
    let (rows, weight) = (rows.as_ptr(), weight.as_ptr());
    for part in 0..WIDTH / (C * LANES) {
        // SAFETY: every number is inside the row, the block or the sums, whose sizes the caller vouches for.
        unsafe {
            let mut tile = [[V::splat(0.0); C]; R];
            for group in 0..groups {
                let weight = weight.add((group * WIDTH + part * C * LANES) * T::INTERLEAVE);
                let mut loaded = [(V::splat(0.0), V::splat(0.0)); C];
                for c in 0..C {
                    loaded[c] = T::group::<V>(weight.add(c * LANES * T::INTERLEAVE));
                }
                for r in 0..R {
                    let x = V::splat(*rows.add(r * STRIDE + group * T::INTERLEAVE));
                    for c in 0..C {
                        tile[r][c] = loaded[c].0.times(x, tile[r][c]);
                    }
                }
                if T::INTERLEAVE == 2 {
                    for r in 0..R {
                        let x = V::splat(*rows.add(r * STRIDE + group * 2 + 1));
                        for c in 0..C {
                            tile[r][c] = loaded[c].1.times(x, tile[r][c]);
                        }
                    }
                }
            }
            for r in 0..R {
                for c in 0..C {
                    let sums = &mut sums[r][(part * C + c) * LANES..][..LANES].as_chunks_mut::<LANES>().0[0];
                    let sum = if first { tile[r][c] } else { V::load(sums).plus(tile[r][c]) };
                    sum.store(sums);
                }
            }
        }
    }
}
