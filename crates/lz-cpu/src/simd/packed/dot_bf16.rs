//! Tiles of bfloat16 by the dot product of AVX-512 BF16: two products and two sums for each float32 of a register.
//!
//! The instruction reads and writes subnormal numbers as zeros, so that sums below 1.2e-38 are lost.

use half::bf16;

use super::super::Avx512Bf16;
use super::WIDTH;
use super::engine::{AHEAD, Engine, Panels, STRIDE, prefetch};

/// The engine.
pub struct DotBf16;

impl Engine for DotBf16 {
    type Isa = Avx512Bf16;
    type Number = bf16;
    type Weight = bf16;
    type Row = bf16;
    type Scratch = ();
    const INTERLEAVE: usize = 2;
    const ROWS: usize = 12;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn add_block(
        _: &mut (),
        rows: &[bf16],
        count: usize,
        weight: Panels<'_, bf16>,
        sums: &mut [[f32; WIDTH]],
        first: bool,
    ) {
        let weight = weight.only();
        assert!(rows.len() >= (count - 1) * STRIDE + weight.len() / WIDTH && sums.len() >= count);
        macro_rules! among {
            ($($r:literal)+) => {
                match count {
                    // SAFETY: just checked, and the caller's.
                    $($r => unsafe { block::<$r>(rows, weight, sums, first) },)+
                    _ => unreachable!("a tile of {count} rows"),
                }
            };
        }
        among!(1 2 3 4 5 6 7 8 9 10 11 12);
    }
}

/// Adds a block to the sums of `R` rows.
///
/// # Safety
/// This CPU has AVX-512 BF16. `rows` are `R` rows that are [`STRIDE`] apart and have the input features of `weight`, and `sums`
/// has `R` rows.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn block<const R: usize>(rows: &[bf16], weight: &[bf16], sums: &mut [[f32; WIDTH]], first: bool) {
    use std::arch::x86_64::{
        __m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
        _mm512_setzero_ps, _mm512_storeu_ps,
    };
    use std::mem::transmute;

    let pairs = weight.len() / (2 * WIDTH);
    let (rows, weight) = (rows.as_ptr(), weight.as_ptr());
    // SAFETY: every number is inside the row, the block or the sums, whose sizes the caller vouches for; two bfloat16 are
    // read as 32 bits at any alignment. The bits of a register mean what the instruction takes them for.
    unsafe {
        let mut tile = [[_mm512_setzero_ps(); 2]; R];
        for pair in 0..pairs {
            let weight = weight.add(pair * 2 * WIDTH);
            let load = |half: usize| -> __m512bh { transmute(_mm512_loadu_si512(weight.add(half * WIDTH).cast())) };
            let loaded = [load(0), load(1)];
            prefetch(weight, AHEAD);
            prefetch(weight.add(WIDTH), AHEAD);
            for (r, tile) in tile.iter_mut().enumerate() {
                let x = rows.add(r * STRIDE + 2 * pair).cast::<i32>().read_unaligned();
                let x: __m512bh = transmute(_mm512_set1_epi32(x));
                tile[0] = _mm512_dpbf16_ps(tile[0], x, loaded[0]);
                tile[1] = _mm512_dpbf16_ps(tile[1], x, loaded[1]);
            }
        }
        for (tile, sums) in tile.into_iter().zip(sums) {
            for (half, tile) in tile.into_iter().enumerate() {
                let place = sums.as_mut_ptr().add(half * WIDTH / 2);
                let sum = if first { tile } else { _mm512_add_ps(_mm512_loadu_ps(place), tile) };
                _mm512_storeu_ps(place, sum);
            }
        }
    }
}

/// Nothing here has the instructions: no call comes this far.
#[cfg(not(target_arch = "x86_64"))]
#[allow(unsafe_code)]
unsafe fn block<const R: usize>(_: &[bf16], _: &[bf16], _: &mut [[f32; WIDTH]], _: bool) {
    unreachable!("only x86-64 has AVX-512")
}
