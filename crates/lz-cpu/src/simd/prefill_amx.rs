//! Products of pairs of bfloat16 by AMX, which multiplies 16×32 by 32×16 numbers in one instruction.
//!
//! A block is 32 rows by the 32 queries of a tile: four registers of sums, two of rows, two of pairs. The instructions are written
//! out, since their intrinsics are not stable in Rust. They read and write subnormal numbers as zeros.

use super::packed::amx::Amx;
use super::prefill_bf16::{PairLanes, PairProducts, Piece};
use super::prefill_tile::Lanes;
use super::{Avx512Bf16, Isa, Nothing, Work, vector};

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

#[allow(unsafe_code)]
impl PairProducts for Tiles {
    type Isa = AmxBeside;
    /// Above torch's fused kernel, whose priority is 10 more than that of native kernels in float32.
    const PREFERENCE: i32 = 8;

    #[inline(always)]
    unsafe fn begin() {
        // SAFETY: the caller's.
        unsafe { instructions::configure() };
    }

    #[inline(always)]
    unsafe fn end() {
        // SAFETY: the caller's.
        unsafe { instructions::release() };
    }

    #[inline(always)]
    unsafe fn multiply(rows: &[Piece], stride: usize, pairs: &[PairLanes], results: &mut [Lanes], adds: bool) {
        // SAFETY: the caller's.
        unsafe { instructions::multiply(rows, stride, pairs, results, adds) };
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod instructions {
    use std::arch::asm;

    use super::{Lanes, PairLanes, Piece};

    /// Rows of a register.
    const HEIGHT: usize = 16;
    /// Bytes of a row of pairs, and of results.
    const ROW: usize = size_of::<PairLanes>();
    const _: () = assert!(size_of::<Lanes>() == ROW && size_of::<Piece>() == 64);

    /// The shapes of the eight registers, as the instruction reads them.
    #[repr(C, align(64))]
    struct Shapes {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        /// Bytes of a row.
        widths: [u16; 16],
        rows: [u8; 16],
    }

    /// Shapes the registers: all are 16 rows of 64 bytes. 0 to 3 hold sums (upper left and right, lower left and right), 4 and 5 the
    /// upper and lower rows, 6 and 7 the pairs of the left and right queries.
    ///
    /// # Safety
    /// The process may use AMX.
    #[inline(always)]
    pub unsafe fn configure() {
        static SHAPES: Shapes = Shapes {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            widths: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        // SAFETY: 64 bytes are read, which describe registers that there are.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly)) };
    }

    /// Gives the registers up, so that nobody has to save them.
    ///
    /// # Safety
    /// The process may use AMX.
    #[inline(always)]
    pub unsafe fn release() {
        // SAFETY: nothing of them is needed any more.
        unsafe { asm!("tilerelease", options(nostack)) };
    }

    /// As of `PairProducts`, for results of a multiple of 16 rows.
    ///
    /// # Safety
    /// The registers are configured.
    #[inline(always)]
    pub unsafe fn multiply(rows: &[Piece], stride: usize, pairs: &[PairLanes], results: &mut [Lanes], adds: bool) {
        let steps = pairs.len() / HEIGHT;
        assert!(
            pairs.len() == steps * HEIGHT && results.len().is_multiple_of(HEIGHT),
            "rows and pairs are padded to registers"
        );
        assert!(results.is_empty() || rows.len() >= (results.len() - 1) * stride + steps);
        let apart = stride * size_of::<Piece>();
        for (block, results) in results.chunks_mut(2 * HEIGHT).enumerate() {
            let two = results.len() > HEIGHT;
            let sum = results.as_mut_ptr().cast::<u8>();
            // SAFETY: a step reads 64 bytes of each row and 16 rows of pairs, all of them inside the slices, whose sizes are
            // checked above; results are read and written where they are. No other code uses these registers.
            unsafe {
                let mut upper = rows.as_ptr().add(block * 2 * HEIGHT * stride).cast::<u8>();
                let mut pair = pairs.as_ptr().cast::<u8>();
                if adds {
                    asm!(
                        "tileloadd tmm0, [{sum} + {row}]",
                        "tileloadd tmm1, [{sum} + {row} + 64]",
                        sum = in(reg) sum, row = in(reg) ROW, out("tmm0") _, out("tmm1") _, options(nostack),
                    );
                } else {
                    asm!("tilezero tmm0", "tilezero tmm1", out("tmm0") _, out("tmm1") _, options(nostack));
                }
                if two && adds {
                    asm!(
                        "tileloadd tmm2, [{sum} + {row}]",
                        "tileloadd tmm3, [{sum} + {row} + 64]",
                        sum = in(reg) sum.add(HEIGHT * ROW), row = in(reg) ROW, out("tmm2") _, out("tmm3") _,
                        options(nostack),
                    );
                } else if two {
                    asm!("tilezero tmm2", "tilezero tmm3", out("tmm2") _, out("tmm3") _, options(nostack));
                }
                for _ in 0..steps {
                    asm!(
                        "tileloadd tmm4, [{upper} + {apart}]",
                        "tileloadd tmm6, [{pair} + {row}]",
                        "tileloadd tmm7, [{pair} + {row} + 64]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        upper = in(reg) upper, apart = in(reg) apart, pair = in(reg) pair, row = in(reg) ROW,
                        out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                    if two {
                        asm!(
                            "tileloadd tmm5, [{lower} + {apart}]",
                            "tdpbf16ps tmm2, tmm5, tmm6",
                            "tdpbf16ps tmm3, tmm5, tmm7",
                            lower = in(reg) upper.add(HEIGHT * apart), apart = in(reg) apart,
                            out("tmm2") _, out("tmm3") _, out("tmm5") _,
                            options(nostack),
                        );
                    }
                    upper = upper.add(size_of::<Piece>());
                    pair = pair.add(HEIGHT * ROW);
                }
                asm!(
                    "tilestored [{sum} + {row}], tmm0",
                    "tilestored [{sum} + {row} + 64], tmm1",
                    sum = in(reg) sum, row = in(reg) ROW, options(nostack),
                );
                if two {
                    asm!(
                        "tilestored [{sum} + {row}], tmm2",
                        "tilestored [{sum} + {row} + 64], tmm3",
                        sum = in(reg) sum.add(HEIGHT * ROW), row = in(reg) ROW, options(nostack),
                    );
                }
            }
        }
    }
}

/// Nothing here has the instructions: no call comes this far.
#[cfg(not(target_arch = "x86_64"))]
#[allow(unsafe_code)]
mod instructions {
    use super::{Lanes, PairLanes, Piece};

    pub unsafe fn configure() {
        unreachable!("only x86-64 has AMX")
    }

    pub unsafe fn release() {
        unreachable!("only x86-64 has AMX")
    }

    pub unsafe fn multiply(_: &[Piece], _: usize, _: &[PairLanes], _: &mut [Lanes], _: bool) {
        unreachable!("only x86-64 has AMX")
    }
}
