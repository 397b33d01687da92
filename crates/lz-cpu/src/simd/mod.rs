//! Kernels for the vector instructions of CPUs, and how one body of code is compiled for several of them.
//!
//! A kernel is written once, as plain loops over slices that the compiler turns into vector instructions. [`Isa::vectorize`]
//! compiles it again for each instruction set. Each is a kernel of its own, which declares the instruction sets it needs:
//! which of them runs is decided, explained and limited (`max_cpu_isa`) like any other choice.

use crate::reference::descriptor;
use lz_model::{KernelDescriptor, Op};

pub mod half_floats;
pub mod rms_norm;

/// Work to be compiled for an instruction set. `run` and all it calls are `#[inline(always)]`, so that they become part of
/// the function that has the instructions.
pub trait Work {
    /// What it gives.
    type Output;
    /// Does it.
    fn run(self) -> Self::Output;
}

/// An instruction set.
pub trait Isa {
    /// Added to the kernel's id; nothing for the one every CPU of the architecture has.
    const SUFFIX: &'static str;
    /// What a device must list.
    const FEATURES: &'static [&'static str];
    /// More than the others of its kernel: declared first while nothing is measured.
    const PRIORITY: i32;

    /// Does the work with these instructions; `None` when this CPU does not have them.
    fn vectorize<W: Work>(work: W) -> Option<W::Output>;
}

/// What every CPU of the architecture has: SSE2 on x86-64, NEON on ARM.
pub struct Portable;

impl Isa for Portable {
    const SUFFIX: &'static str = "";
    const FEATURES: &'static [&'static str] = &[];
    const PRIORITY: i32 = 0;

    fn vectorize<W: Work>(work: W) -> Option<W::Output> {
        Some(work.run())
    }
}

macro_rules! isas {
    ($($name:ident: $suffix:literal, $priority:literal, [$($feature:tt)+], $all:literal;)+) => {
        $(
            #[doc = concat!("CPUs with ", $all, ".")]
            pub struct $name;

            impl Isa for $name {
                const SUFFIX: &'static str = $suffix;
                const FEATURES: &'static [&'static str] = &[$($feature),+];
                const PRIORITY: i32 = $priority;

                #[cfg(target_arch = "x86_64")]
                fn vectorize<W: Work>(work: W) -> Option<W::Output> {
                    #[target_feature(enable = $all)]
                    fn with<W: Work>(work: W) -> W::Output {
                        work.run()
                    }
                    let here = $(std::arch::is_x86_feature_detected!($feature))&&+;
                    // SAFETY: this CPU has the instructions.
                    #[allow(unsafe_code)]
                    here.then(|| unsafe { with(work) })
                }

                #[cfg(not(target_arch = "x86_64"))]
                fn vectorize<W: Work>(_: W) -> Option<W::Output> {
                    None
                }
            }
        )+
    };
}

isas! {
    Avx2: ".avx2", 1, ["avx2" "fma" "f16c"], "avx2,fma,f16c";
    Avx512: ".avx512", 2, ["avx512f" "avx512bw" "avx512dq" "avx512vl"], "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c";
}

/// The descriptor of a kernel for one instruction set: what its operation's reference takes, to be narrowed by the kernel.
pub fn describe<I: Isa>(op: &Op, name: &str, priority: i32) -> KernelDescriptor {
    KernelDescriptor {
        id: format!("{}.{name}{}", crate::BACKEND, I::SUFFIX),
        instruction_sets: I::FEATURES.iter().map(|&feature| feature.to_owned()).collect(),
        priority: priority + I::PRIORITY,
        reference: false,
        quant: None,
        kv_strategies: Vec::new(),
        ..descriptor(op)
    }
}
