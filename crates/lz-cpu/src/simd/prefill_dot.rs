//! Products of pairs of bfloat16 by the dot product of AVX-512 BF16: two products and two sums for each float32 of a register.
//!
//! The instruction reads and writes subnormal numbers as zeros.

use super::Avx512Bf16;
use super::prefill_bf16::{PairLanes, PairProducts, Piece};
use super::prefill_tile::Lanes;

/// The instructions.
pub struct Dots;

impl PairProducts for Dots {
    type Isa = Avx512Bf16;
    /// Below float32 on AVX-512: on an Intel Xeon with AMX it is as fast, and it rounds weights.
    const PREFERENCE: i32 = -2;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn multiply(rows: &[Piece], stride: usize, pairs: &[PairLanes], results: &mut [Lanes], adds: bool) {
        /// Rows of a block: its sums are 16 registers.
        const BLOCK: usize = 8;
        for (block, results) in results.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            // SAFETY: the caller's.
            unsafe { multiply_block(&rows[block * BLOCK * stride..], stride, pairs, results, adds) };
        }
    }
}

/// A block of rows.
///
/// # Safety
/// This CPU has AVX-512 BF16.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn multiply_block<const R: usize>(
    rows: &[Piece],
    stride: usize,
    pairs: &[PairLanes],
    results: &mut [Lanes; R],
    adds: bool,
) {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::prefill_tile::ROWS;
    use super::vector::LANES;

    const VECTORS: usize = ROWS / LANES;
    assert!(rows.len() >= (R - 1) * stride + pairs.len().div_ceil(LANES));
    let rows = rows.as_ptr();
    // SAFETY: every pair is inside its row, by the sizes checked above. The bits of a register mean what the instruction takes them
    // for.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; R];
        if adds {
            for (sums, results) in sums.iter_mut().zip(&*results) {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_load_ps(results.0.as_ptr().add(v * LANES));
                }
            }
        }
        for (pair, of) in pairs.iter().enumerate() {
            let mut loaded: [__m512bh; VECTORS] = [transmute::<__m512i, __m512bh>(_mm512_setzero_si512()); VECTORS];
            for (v, loaded) in loaded.iter_mut().enumerate() {
                *loaded = transmute::<__m512i, __m512bh>(_mm512_load_si512(of.0.as_ptr().add(v * LANES).cast()));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = rows.add(r * stride).cast::<i32>().add(pair).read();
                let x: __m512bh = transmute(_mm512_set1_epi32(x));
                for (sum, loaded) in sums.iter_mut().zip(loaded) {
                    *sum = _mm512_dpbf16_ps(*sum, x, loaded);
                }
            }
        }
        for (sums, results) in sums.iter().zip(results) {
            for (v, sum) in sums.iter().enumerate() {
                _mm512_store_ps(results.0.as_mut_ptr().add(v * LANES), *sum);
            }
        }
    }
}

/// Nothing here has the instructions: no call comes this far.
#[cfg(not(target_arch = "x86_64"))]
#[allow(unsafe_code)]
unsafe fn multiply_block<const R: usize>(_: &[Piece], _: usize, _: &[PairLanes], _: &mut [Lanes; R], _: bool) {
    unreachable!("only x86-64 has AVX-512")
}
