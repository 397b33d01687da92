//! Products of pairs of bfloat16 by [AMX](super::super::amx): 32 rows by the 32 queries of a tile.

use super::super::amx::{self, Amx, HEIGHT, Product, ROW};
use super::super::{Avx512Bf16, Isa, Nothing, Work, vector};
use super::bf16::{PairLanes, PairProducts, Piece};
use super::tile::Lanes;

/// CPUs with AMX for bfloat16, and AVX-512 BF16 for what surrounds it.
pub struct AmxBeside;

impl Isa for AmxBeside {
    const SUFFIX: &'static str = Amx::SUFFIX;
    const FEATURES: &'static [&'static str] =
        &["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "amx-tile", "amx-bf16"];
    const PRIORITY: i32 = Amx::PRIORITY;
    const FUSED: bool = true;
    type Sixteen = vector::InOne;

    #[inline(always)]
    fn vectorize<W: Work>(work: W) -> Option<W::Output> {
        // Asks the system for the registers too.
        Amx::vectorize(Nothing)?;
        Avx512Bf16::vectorize(work)
    }
}

/// The instructions.
pub struct Tiles;

const _: () = assert!(size_of::<PairLanes>() == ROW && size_of::<Lanes>() == ROW && size_of::<Piece>() == amx::STEP);

#[allow(unsafe_code)]
impl PairProducts for Tiles {
    type Isa = AmxBeside;
    /// Above torch's fused kernel, whose priority is 10 more than that of native kernels in float32.
    const PREFERENCE: i32 = 8;

    #[inline(always)]
    unsafe fn begin() {
        // SAFETY: the caller's.
        unsafe { amx::configure(2 * HEIGHT) };
    }

    #[inline(always)]
    unsafe fn end() {
        // SAFETY: the caller's.
        unsafe { amx::release() };
    }

    #[inline(always)]
    unsafe fn multiply(rows: &[Piece], stride: usize, pairs: &[PairLanes], results: &mut [Lanes], adds: bool) {
        let steps = pairs.len() / HEIGHT;
        assert!(
            pairs.len() == steps * HEIGHT && results.len().is_multiple_of(HEIGHT),
            "rows and pairs are padded to registers"
        );
        assert!(results.is_empty() || rows.len() >= (results.len() - 1) * stride + steps);
        for (block, results) in results.chunks_mut(2 * HEIGHT).enumerate() {
            let product = Product {
                rows: rows[block * 2 * HEIGHT * stride..].as_ptr().cast(),
                apart: stride * size_of::<Piece>(),
                pairs: pairs.as_ptr().cast(),
                sums: results.as_mut_ptr().cast(),
                count: results.len(),
                steps,
            };
            // SAFETY: all is inside the slices, whose sizes are checked above; the registers are the caller's.
            unsafe { amx::multiply(product, adds, |_| ()) };
        }
    }
}
