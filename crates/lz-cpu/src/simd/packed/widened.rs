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
use super::engine::{AHEAD, DEPTH, Engine, Packed, Panels, STRIDE, prefetch};

/// An instruction set with the size of its tiles.
pub trait Tile: Isa {
    /// Rows of the input.
    const ROWS: usize;
    /// Whether a tile has whole panels, or half of one at a time. A constant of its own, and not a comparison, so that the compiler
    /// leaves out the tiles of the other kind.
    const WHOLE: bool;
}

impl Tile for Avx512 {
    const ROWS: usize = 12;
    const WHOLE: bool = true;
}

impl Tile for Avx2 {
    const ROWS: usize = 6;
    const WHOLE: bool = false;
}

impl Tile for Portable {
    // Sixteen numbers are four registers, of which NEON has 32 and SSE2 has 16.
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };
    const WHOLE: bool = false;
}

/// Panels side by side, by the rows of a tile, for registers that hold whole panels: at most 24 registers of sums.
const ABREAST: [usize; 8] = [1, 4, 4, 2, 2, 2, 2, 1];

/// A dtype of packed weights, as float32 in registers.
#[allow(unsafe_code, clippy::missing_safety_doc)] // those of `Sixteen`
pub trait Widen: Packed + Narrow {
    /// Input features of a group, which are side by side.
    const INTERLEAVE: usize;

    /// The weights of sixteen output features for the input features of a group. There is no second one where
    /// `INTERLEAVE` is 1.
    ///
    /// # Safety
    /// As for [`Sixteen`], and sixteen groups are there.
    unsafe fn group<V: Sixteen>(from: *const Self) -> (V, V);
}

impl Widen for f32 {
    const INTERLEAVE: usize = 1;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn group<V: Sixteen>(from: *const f32) -> (V, V) {
        // SAFETY: the caller's.
        let one = unsafe { V::load(&*from.cast::<[f32; LANES]>()) };
        (one, one)
    }
}

impl Widen for f16 {
    const INTERLEAVE: usize = 1;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn group<V: Sixteen>(from: *const f16) -> (V, V) {
        // SAFETY: the caller's.
        let one = unsafe { V::load_f16(&*from.cast::<[f16; LANES]>()) };
        (one, one)
    }
}

impl Widen for bf16 {
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

impl<I: Tile, T: Widen> Engine for Widened<I, T> {
    type Isa = I;
    type Number = T;
    type Weight = T;
    type Row = f32;
    type Scratch = ();
    const INTERLEAVE: usize = T::INTERLEAVE;
    const ROWS: usize = I::ROWS;

    #[inline(always)]
    fn abreast(count: usize) -> usize {
        if I::WHOLE { ABREAST[count.min(ABREAST.len() - 1)] } else { 1 }
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn add_block(
        _: &mut (),
        rows: &[f32],
        count: usize,
        weight: Panels<'_, T>,
        sums: &mut [[f32; WIDTH]],
        first: bool,
    ) {
        assert!(rows.len() >= count * STRIDE && sums.len() >= count * weight.count && weight.block <= DEPTH * WIDTH);
        assert!(weight.count > 0 && weight.weight.len() >= (weight.count - 1) * weight.apart + weight.block);
        macro_rules! among {
            ($c:literal: $($r:literal $p:literal)+) => {
                match (count, weight.count) {
                    // SAFETY: just checked, and the caller's.
                    $(($r, $p) => unsafe { block::<I::Sixteen, T, $r, $c, $p>(rows, weight, sums, first) },)+
                    (count, panels) => unreachable!("a tile of {count} rows and {panels} panels"),
                }
            };
        }
        if I::WHOLE {
            among!(2: 1 1 1 4 2 1 2 4 3 1 3 2 4 1 4 2 5 1 5 2 6 1 6 2 7 1 8 1 9 1 10 1 11 1 12 1);
        } else {
            among!(1: 1 1 2 1 3 1 4 1 5 1 6 1);
        }
    }
}

/// Adds a block to the sums of `R` rows and `P` panels, `C` sixteens of output features at a time.
///
/// # Safety
/// As for [`Sixteen`]. `rows` are `R` rows that are [`STRIDE`] apart, `weight` are blocks of `P` panels, each of at most
/// [`DEPTH`] input features, and `sums` has `R · P` rows.
#[allow(unsafe_code)]
#[allow(clippy::needless_range_loop)] // an index names a row or a register of it, in several arrays at once
#[inline(always)]
unsafe fn block<V: Sixteen, T: Widen, const R: usize, const C: usize, const P: usize>(
    rows: &[f32],
    weight: Panels<'_, T>,
    sums: &mut [[f32; WIDTH]],
    first: bool,
) {
    let groups = weight.block / (WIDTH * T::INTERLEAVE);
    for part in 0..WIDTH / (C * LANES) {
        let mut row = rows.as_ptr();
        let mut from = weight.weight.as_ptr().wrapping_add(part * C * LANES * T::INTERLEAVE);
        // SAFETY: every number is inside the row, the block or the sums, whose sizes the caller vouches for.
        unsafe {
            let mut tile = [[[V::splat(0.0); C]; R]; P];
            for _ in 0..groups {
                for p in 0..P {
                    let from = from.wrapping_add(p * weight.apart);
                    let mut loaded = [(V::splat(0.0), V::splat(0.0)); C];
                    for c in 0..C {
                        let from = from.wrapping_add(c * LANES * T::INTERLEAVE);
                        loaded[c] = T::group::<V>(from);
                        prefetch(from, AHEAD);
                    }
                    for r in 0..R {
                        let x = V::splat(*row.wrapping_add(r * STRIDE));
                        for c in 0..C {
                            tile[p][r][c] = loaded[c].0.times(x, tile[p][r][c]);
                        }
                    }
                    if T::INTERLEAVE == 2 {
                        for r in 0..R {
                            let x = V::splat(*row.wrapping_add(r * STRIDE + 1));
                            for c in 0..C {
                                tile[p][r][c] = loaded[c].1.times(x, tile[p][r][c]);
                            }
                        }
                    }
                }
                from = from.wrapping_add(WIDTH * T::INTERLEAVE);
                row = row.wrapping_add(T::INTERLEAVE);
            }
            for p in 0..P {
                for r in 0..R {
                    for c in 0..C {
                        let sums =
                            &mut sums[p * R + r][(part * C + c) * LANES..][..LANES].as_chunks_mut::<LANES>().0[0];
                        let sum = if first { tile[p][r][c] } else { V::load(sums).plus(tile[p][r][c]) };
                        sum.store(sums);
                    }
                }
            }
        }
    }
}
