//! AMX: instructions that multiply matrices of 16 rows. 16×32 times 32×16 numbers of bfloat16 are one instruction.
//!
//! A tile is up to 32 rows by 32 columns: four registers of sums, two of rows, two of pairs. The instructions are written out, since
//! their intrinsics are not stable in Rust. They read and write subnormal numbers as zeros.

use super::vector::InOne;
use super::{Avx512, Isa, Work};

pub use instructions::{configure, multiply, multiply_parts, release};

/// Rows of a register.
pub const HEIGHT: usize = 16;
/// Bytes of a row that one instruction multiplies.
pub const STEP: usize = 64;
/// Bytes of a row of pairs, and of sums: of 32 columns.
pub const ROW: usize = 128;

/// CPUs with AMX for bfloat16, and AVX-512 for what surrounds it.
pub struct Amx;

impl Isa for Amx {
    const SUFFIX: &'static str = ".amx";
    const FEATURES: &'static [&'static str] = &["avx512f", "avx512bw", "avx512dq", "avx512vl", "amx-tile", "amx-bf16"];
    const PRIORITY: i32 = 4;
    const FUSED: bool = true;
    type Sixteen = InOne;

    fn vectorize<W: Work>(work: W) -> Option<W::Output> {
        if instructions::allowed() { Avx512::vectorize(work) } else { None }
    }
}

/// Bytes of the pairs of a step.
pub const PAIRS: usize = HEIGHT * ROW;

/// Two matrices and where their product goes. Each is given by its first byte; its rows are so many bytes apart.
#[derive(Clone, Copy)]
pub struct Product {
    /// `count` rows of `steps` times [`STEP`] bytes.
    pub rows: *const u8,
    /// From one of them to the next.
    pub apart: usize,
    /// `steps` times [`HEIGHT`] rows of [`ROW`] bytes: 32 columns, each a pair of bfloat16.
    pub pairs: *const u8,
    /// `count` rows of [`ROW`] bytes: 32 numbers of float32.
    pub sums: *mut u8,
    /// From 1 to 32.
    pub count: usize,
    pub steps: usize,
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod instructions {
    use std::arch::asm;
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::{HEIGHT, PAIRS, Product, ROW, STEP};

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
    /// the upper and lower rows, 6 and 7 the pairs of the left and right columns.
    ///
    /// # Safety
    /// The process may use AMX. `count` is from 1 to 32.
    #[inline(always)]
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
    #[inline(always)]
    pub unsafe fn release() {
        // SAFETY: nothing of them is needed any more.
        unsafe { asm!("tilerelease", options(nostack)) };
    }

    /// Reads the sums of a product into their registers, or zeros.
    ///
    /// # Safety
    /// As of [`multiply`].
    #[inline(always)]
    unsafe fn begin(sums: *mut u8, two: bool, adds: bool) {
        // SAFETY: the caller's.
        unsafe {
            if adds {
                asm!(
                    "tileloadd tmm0, [{sum} + {row}]",
                    "tileloadd tmm1, [{sum} + {row} + 64]",
                    sum = in(reg) sums, row = in(reg) ROW, out("tmm0") _, out("tmm1") _, options(nostack),
                );
            } else {
                asm!("tilezero tmm0", "tilezero tmm1", out("tmm0") _, out("tmm1") _, options(nostack));
            }
            if two && adds {
                asm!(
                    "tileloadd tmm2, [{sum} + {row}]",
                    "tileloadd tmm3, [{sum} + {row} + 64]",
                    sum = in(reg) sums.add(HEIGHT * ROW), row = in(reg) ROW, out("tmm2") _, out("tmm3") _, options(nostack),
                );
            } else if two {
                asm!("tilezero tmm2", "tilezero tmm3", out("tmm2") _, out("tmm3") _, options(nostack));
            }
        }
    }

    /// Writes the sums of a product.
    ///
    /// # Safety
    /// As of [`multiply`].
    #[inline(always)]
    unsafe fn end(sums: *mut u8, two: bool) {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tilestored [{sum} + {row}], tmm0",
                "tilestored [{sum} + {row} + 64], tmm1",
                sum = in(reg) sums, row = in(reg) ROW, options(nostack),
            );
            if two {
                asm!(
                    "tilestored [{sum} + {row}], tmm2",
                    "tilestored [{sum} + {row} + 64], tmm3",
                    sum = in(reg) sums.add(HEIGHT * ROW), row = in(reg) ROW, options(nostack),
                );
            }
        }
    }

    /// sums = rows · pairs, or more of them if `adds`, where each number is the sum of two or three parts, the largest first. The parts
    /// of a row are `plane` bytes apart. Those of pairs follow each other in each step. Of four products of parts three are made,
    /// of nine six: those left out are smaller than what float32 rounds off, or than the last part.
    ///
    /// # Safety
    /// As of [`multiply`], for every part.
    #[inline(always)]
    pub unsafe fn multiply_parts<const PARTS: usize>(of: Product, plane: usize, adds: bool) {
        let Product { rows, apart, pairs, sums, count, steps } = of;
        let two = count > HEIGHT;
        let (mut upper, mut pair) = (rows, pairs);
        macro_rules! rows {
            ($part:expr) => {
                asm!(
                    "tileloadd tmm4, [{upper} + {apart}]",
                    upper = in(reg) upper.add($part * plane), apart = in(reg) apart, out("tmm4") _, options(nostack),
                );
                if two {
                    asm!(
                        "tileloadd tmm5, [{lower} + {apart}]",
                        lower = in(reg) upper.add($part * plane + HEIGHT * apart), apart = in(reg) apart,
                        out("tmm5") _, options(nostack),
                    );
                }
            };
        }
        macro_rules! pairs {
            ($part:expr) => {
                asm!(
                    "tileloadd tmm6, [{pair} + {row}]",
                    "tileloadd tmm7, [{pair} + {row} + 64]",
                    pair = in(reg) pair.add($part * PAIRS), row = in(reg) ROW, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            };
        }
        macro_rules! times {
            () => {
                asm!(
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    out("tmm0") _, out("tmm1") _, options(nostack),
                );
                if two {
                    asm!(
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                        out("tmm2") _, out("tmm3") _, options(nostack),
                    );
                }
            };
        }
        // SAFETY: as in `multiply`.
        unsafe {
            begin(sums, two, adds);
            for _ in 0..steps {
                // Neighbouring products have one matrix in common.
                rows!(0);
                if PARTS == 3 {
                    pairs!(2);
                    times!();
                }
                pairs!(1);
                times!();
                rows!(1);
                if PARTS == 3 {
                    times!();
                }
                pairs!(0);
                times!();
                if PARTS == 3 {
                    rows!(2);
                    times!();
                }
                rows!(0);
                times!();
                upper = upper.add(STEP);
                pair = pair.add(PARTS * PAIRS);
            }
            end(sums, two);
        }
    }

    /// sums = rows · pairs, or more of them if `adds`. `each_step` is called with the pairs of a step, after its instructions were
    /// issued, to prefetch others.
    ///
    /// # Safety
    /// The registers are configured for `count` rows, or for 32 if it is 16. What the product names can be read, and its
    /// sums written.
    #[inline(always)]
    pub unsafe fn multiply(of: Product, adds: bool, each_step: impl Fn(*const u8)) {
        let Product { rows, apart, pairs, sums, count, steps } = of;
        let two = count > HEIGHT;
        let (mut upper, mut pair) = (rows, pairs);
        // SAFETY: a step reads 64 bytes of each row and 16 rows of pairs, which the caller says can be read; sums are read and written
        // where they are. No other code uses these registers.
        unsafe {
            begin(sums, two, adds);
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
                each_step(pair);
                upper = upper.add(STEP);
                pair = pair.add(PAIRS);
            }
            end(sums, two);
        }
    }
}

/// Nothing here has the instructions: no call comes this far.
#[cfg(not(target_arch = "x86_64"))]
#[allow(unsafe_code, clippy::missing_safety_doc)]
mod instructions {
    pub fn allowed() -> bool {
        false
    }

    pub unsafe fn configure(_: usize) {
        unreachable!("only x86-64 has AMX")
    }

    pub unsafe fn release() {
        unreachable!("only x86-64 has AMX")
    }

    pub unsafe fn multiply(_: super::Product, _: bool, _: impl Fn(*const u8)) {
        unreachable!("only x86-64 has AMX")
    }

    pub unsafe fn multiply_parts<const PARTS: usize>(_: super::Product, _: usize, _: bool) {
        unreachable!("only x86-64 has AMX")
    }
}
