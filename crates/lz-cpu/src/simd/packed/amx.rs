//! Tiles of bfloat16 by AMX, which multiplies matrices of 16 rows: 16×32 times 32×16 numbers in one instruction.
//!
//! A tile is up to 32 rows by a whole panel: four registers of sums, two of rows, two of weights. The instructions are
//! written out, since their intrinsics are not stable in Rust. They read and write subnormal numbers as zeros.

use half::bf16;

use super::super::{Isa, Work};
use super::WIDTH;
use super::engine::{Engine, Panels};

/// CPUs with AMX for bfloat16, and AVX-512 for what surrounds it.
pub struct Amx;

impl Isa for Amx {
    const SUFFIX: &'static str = ".amx";
    const FEATURES: &'static [&'static str] = &["avx512f", "avx512bw", "avx512dq", "avx512vl", "amx-tile", "amx-bf16"];
    const PRIORITY: i32 = 4;
    const FUSED: bool = true;
    type Sixteen = super::super::vector::InOne;

    fn vectorize<W: Work>(work: W) -> Option<W::Output> {
        if instructions::allowed() { super::super::Avx512::vectorize(work) } else { None }
    }
}

/// The engine.
pub struct AmxBf16;

impl Engine for AmxBf16 {
    type Isa = Amx;
    type Number = bf16;
    type Row = bf16;
    const ROWS: usize = 32;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn begin(count: usize) {
        // SAFETY: the caller's.
        unsafe { instructions::configure(count) };
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn end() {
        // SAFETY: the caller's.
        unsafe { instructions::release() };
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn add_block(rows: &[bf16], count: usize, weight: Panels<'_, bf16>, sums: &mut [[f32; WIDTH]], first: bool) {
        // SAFETY: the caller's.
        unsafe { instructions::add_block(rows, count, weight.only(), sums, first) };
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod instructions {
    use std::arch::asm;
    use std::sync::atomic::{AtomicU8, Ordering};

    use half::bf16;

    use super::super::WIDTH;
    use super::super::engine::{DEPTH, STRIDE, prefetch};

    /// Rows of a register.
    const HEIGHT: usize = 16;
    /// Input features that one instruction multiplies.
    const STEP: usize = 32;
    /// Bytes of a cache line.
    const LINE: usize = 64;
    /// Bytes between the weights that are multiplied and those that are prefetched: four steps, which take about as long as
    /// the memory.
    const FAR: usize = 4 * STEP * WIDTH * size_of::<bf16>();
    /// Bytes from a row of rows, of weights or of sums to the next.
    const ROW: usize = STRIDE * size_of::<bf16>();
    const WEIGHT: usize = 2 * WIDTH * size_of::<bf16>();
    const SUM: usize = WIDTH * size_of::<f32>();

    /// Whether this CPU has the instructions and the system lets the process use them. Linux wants to be asked, once in a
    /// process, and answers for all of its threads.
    pub fn allowed() -> bool {
        const NO: u8 = 1;
        const YES: u8 = 2;
        static KNOWN: AtomicU8 = AtomicU8::new(0);
        match KNOWN.load(Ordering::Relaxed) {
            0 => {
                let found = cfg!(target_os = "linux") && has_instructions() && permission();
                KNOWN.store(if found { YES } else { NO }, Ordering::Relaxed);
                found
            }
            known => known == YES,
        }
    }

    /// By CPUID, leaf 7: bits 22 (AMX-BF16) and 24 (AMX-TILE) of EDX.
    fn has_instructions() -> bool {
        let (bf16, tile) = (1 << 22, 1 << 24);
        std::arch::x86_64::__cpuid(0).eax >= 7
            && std::arch::x86_64::__cpuid_count(7, 0).edx & (bf16 | tile) == (bf16 | tile)
    }

    /// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`: whether the registers may be used.
    fn permission() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const XFEATURE_XTILEDATA: i64 = 18;
        let answer: i64;
        // SAFETY: a system call on Linux, which reads its two numbers and no memory. It changes rcx and r11.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => answer,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        answer == 0
    }

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

    /// Shapes the registers for tiles of `count` rows: 0 to 3 hold sums (upper left and right, lower left and right), 4 and 5
    /// the upper and lower rows, 6 and 7 the weights of the left and right half of a panel.
    ///
    /// # Safety
    /// The process may use AMX. `count` is from 1 to 32.
    pub unsafe fn configure(count: usize) {
        assert!((1..=2 * HEIGHT).contains(&count));
        let (upper, lower) = (count.min(HEIGHT) as u8, count.saturating_sub(HEIGHT).max(1) as u8);
        let mut shapes = Shapes { palette: 1, start_row: 0, reserved: [0; 14], widths: [0; 16], rows: [0; 16] };
        for (register, rows) in
            [upper, upper, lower, lower, upper, lower, HEIGHT as u8, HEIGHT as u8].into_iter().enumerate()
        {
            (shapes.widths[register], shapes.rows[register]) = (64, rows);
        }
        // SAFETY: 64 bytes are read, which describe registers that there are.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack)) };
    }

    /// Gives the registers up, so that nobody has to save them.
    ///
    /// # Safety
    /// The process may use AMX.
    pub unsafe fn release() {
        // SAFETY: nothing of them is needed any more.
        unsafe { asm!("tilerelease", options(nostack)) };
    }

    /// Adds a block to the sums of `count` rows, or begins them.
    ///
    /// # Safety
    /// The registers are configured for `count`.
    pub unsafe fn add_block(rows: &[bf16], count: usize, weight: &[bf16], sums: &mut [[f32; WIDTH]], first: bool) {
        let steps = weight.len() / (STEP * WIDTH);
        assert!(rows.len() >= count * STRIDE && sums.len() >= count && weight.len() <= DEPTH * WIDTH);
        assert!(weight.len() == steps * STEP * WIDTH, "panels are padded to whole steps");
        let (mut upper, mut weight) = (rows.as_ptr().cast::<u8>(), weight.as_ptr().cast::<u8>());
        let sum = sums.as_mut_ptr().cast::<u8>();
        let two = count > HEIGHT;
        // SAFETY: a step reads 64 bytes of each row, and 16 rows of both halves of the weights, all of them inside the slices,
        // whose sizes are checked above; sums are read and written where they are. No other code uses these registers.
        unsafe {
            if first {
                asm!("tilezero tmm0", "tilezero tmm1", out("tmm0") _, out("tmm1") _, options(nostack));
            } else {
                asm!(
                    "tileloadd tmm0, [{sum} + {stride}]",
                    "tileloadd tmm1, [{sum} + {stride} + 64]",
                    sum = in(reg) sum, stride = in(reg) SUM, out("tmm0") _, out("tmm1") _, options(nostack),
                );
            }
            if two && first {
                asm!("tilezero tmm2", "tilezero tmm3", out("tmm2") _, out("tmm3") _, options(nostack));
            } else if two {
                asm!(
                    "tileloadd tmm2, [{sum} + {stride}]",
                    "tileloadd tmm3, [{sum} + {stride} + 64]",
                    sum = in(reg) sum.add(HEIGHT * SUM), stride = in(reg) SUM, out("tmm2") _, out("tmm3") _,
                    options(nostack),
                );
            }
            for _ in 0..steps {
                asm!(
                    "tileloadd tmm4, [{upper} + {row}]",
                    "tileloadd tmm6, [{weight} + {group}]",
                    "tileloadd tmm7, [{weight} + {group} + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    upper = in(reg) upper, row = in(reg) ROW, weight = in(reg) weight, group = in(reg) WEIGHT,
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
                if two {
                    asm!(
                        "tileloadd tmm5, [{lower} + {row}]",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                        lower = in(reg) upper.add(HEIGHT * ROW), row = in(reg) ROW,
                        out("tmm2") _, out("tmm3") _, out("tmm5") _,
                        options(nostack),
                    );
                } else {
                    // So few rows wait for the weights; more wait for the products.
                    for line in 0..STEP * WIDTH * size_of::<bf16>() / LINE {
                        prefetch(weight.wrapping_add(line * LINE), FAR);
                    }
                }
                upper = upper.add(STEP * size_of::<bf16>());
                weight = weight.add(STEP * WIDTH * size_of::<bf16>());
            }
            asm!(
                "tilestored [{sum} + {stride}], tmm0",
                "tilestored [{sum} + {stride} + 64], tmm1",
                sum = in(reg) sum, stride = in(reg) SUM, options(nostack),
            );
            if two {
                asm!(
                    "tilestored [{sum} + {stride}], tmm2",
                    "tilestored [{sum} + {stride} + 64], tmm3",
                    sum = in(reg) sum.add(HEIGHT * SUM), stride = in(reg) SUM, options(nostack),
                );
            }
        }
    }
}

/// Nothing here has the instructions: no call comes this far.
#[cfg(not(target_arch = "x86_64"))]
#[allow(unsafe_code)]
mod instructions {
    use super::{WIDTH, bf16};

    pub fn allowed() -> bool {
        false
    }

    pub unsafe fn configure(_: usize) {
        unreachable!("only x86-64 has AMX")
    }

    pub unsafe fn release() {
        unreachable!("only x86-64 has AMX")
    }

    pub unsafe fn add_block(_: &[bf16], _: usize, _: &[bf16], _: &mut [[f32; WIDTH]], _: bool) {
        unreachable!("only x86-64 has AMX")
    }
}
