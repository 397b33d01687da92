//! Kernels for the vector instructions of CPUs, and how one body of code is compiled for several of them.
//!
//! A kernel is written once, as plain loops over slices that the compiler turns into vector instructions. [`Isa::vectorize`]
//! compiles it again for each instruction set. Each is a kernel of its own, which declares the instruction sets it needs:
//! which of them runs is decided, explained and limited (`max_cpu_isa`) like any other choice.

use std::collections::BTreeMap;

use crate::reference::descriptor;
use lz_model::{DType, DTypeSet, InputRule, KernelDescriptor, KernelError, Op, ParamRule, Scalar};

pub mod add_rms_norm;
pub mod amx;
pub mod attention;
#[cfg(test)]
mod checking;
mod decode_heads;
pub mod dequantize;
pub mod embedding;
pub mod exp;
pub mod exp64;
pub mod gelu;
pub mod half_floats;
pub mod kv_append;
pub mod layer_norm;
pub mod linear;
pub mod packed;
pub mod prefill;
pub mod quantize;
pub mod rms_norm;
pub mod rope;
mod sample_bins;
mod sample_row;
pub mod sample_topk;
pub mod sample_topp;
pub mod silu_mul;
pub mod softmax;
#[allow(unsafe_code)]
pub mod vector;

/// What they compute with, as float32.
const FLOATS: DTypeSet = DTypeSet::of(&[DType::F32, DType::F16, DType::Bf16]);

/// Numbers that are converted at a time: 2 KiB of float32, which stay in the first cache.
const BLOCK: usize = 512;

/// Bytes of a result below which one thread does all: two threads start within about 1 µs of each other, in which one reads
/// about 16 KiB.
const ONE_THREAD: usize = 64 << 10;

/// How many rows each thread gets of a result of so many bytes.
fn rows_per_thread(rows: usize, bytes: usize, threads: usize) -> usize {
    rows.div_ceil(if bytes < ONE_THREAD { 1 } else { threads })
}

/// Nothing, to ask whether the instructions are there.
struct Nothing;

impl Work for Nothing {
    type Output = ();
    #[inline(always)]
    fn run(self) {}
}

/// Fails where this CPU lacks the instructions.
pub(crate) fn check<I: Isa>() -> Result<(), KernelError> {
    let lacks = || KernelError::Failed(format!("this CPU lacks one of {}", I::FEATURES.join(", ")));
    I::vectorize(Nothing).ok_or_else(lacks)
}

/// Rules for inputs that hold floats.
fn floats(names: &[&str]) -> BTreeMap<String, InputRule> {
    let rule = InputRule { dtypes: Some(FLOATS), ..InputRule::default() };
    names.iter().map(|&name| (name.to_owned(), rule.clone())).collect()
}

/// A rule for a parameter that must have one of these values.
fn one_of(name: &str, values: &[Scalar]) -> (String, ParamRule) {
    (name.to_owned(), ParamRule { one_of: Some(values.to_vec()), ..ParamRule::default() })
}

/// Calls a function with the Rust type of a dtype of [`FLOATS`].
macro_rules! with_float {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            lz_model::DType::F32 => {
                type $T = f32;
                $call
            }
            lz_model::DType::F16 => {
                type $T = half::f16;
                $call
            }
            lz_model::DType::Bf16 => {
                type $T = half::bf16;
                $call
            }
            other => Err(lz_model::KernelError::Failed(format!("does not take {other}"))),
        }
    };
}
use with_float;

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
    /// Whether a product and a sum are one instruction: `mul_add` is a slow call where they are not.
    const FUSED: bool;

    /// Sixteen numbers in its registers.
    type Sixteen: vector::Sixteen;

    /// Does the work with these instructions; `None` when this CPU does not have them.
    fn vectorize<W: Work>(work: W) -> Option<W::Output>;

    /// Does the work with these instructions, as a function of its own: what calls it from several places holds one copy of
    /// its code.
    ///
    /// # Safety
    /// This CPU has the instructions.
    #[allow(unsafe_code)]
    unsafe fn call<W: Work>(work: W) -> W::Output {
        Self::vectorize(work).expect("this CPU has the instructions")
    }
}

/// What every CPU of the architecture has: SSE2 on x86-64, NEON on ARM.
pub struct Portable;

impl Isa for Portable {
    const SUFFIX: &'static str = "";
    const FEATURES: &'static [&'static str] = &[];
    const PRIORITY: i32 = 0;
    const FUSED: bool = cfg!(target_arch = "aarch64");
    type Sixteen = vector::Plain;

    fn vectorize<W: Work>(work: W) -> Option<W::Output> {
        Some(work.run())
    }

    #[allow(unsafe_code)]
    #[inline(never)]
    unsafe fn call<W: Work>(work: W) -> W::Output {
        work.run()
    }
}

macro_rules! isas {
    ($($name:ident: $suffix:literal, $priority:literal, $sixteen:ty, [$($feature:tt)+], $all:literal;)+) => {
        $(
            #[doc = concat!("CPUs with ", $all, ".")]
            pub struct $name;

            impl Isa for $name {
                const SUFFIX: &'static str = $suffix;
                const FEATURES: &'static [&'static str] = &[$($feature),+];
                const PRIORITY: i32 = $priority;
                const FUSED: bool = true;
                type Sixteen = $sixteen;

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

                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code)]
                unsafe fn call<W: Work>(work: W) -> W::Output {
                    #[inline(never)]
                    #[target_feature(enable = $all)]
                    fn with<W: Work>(work: W) -> W::Output {
                        work.run()
                    }
                    // SAFETY: the caller says that this CPU has the instructions.
                    unsafe { with(work) }
                }

                #[cfg(not(target_arch = "x86_64"))]
                #[allow(unsafe_code)]
                unsafe fn call<W: Work>(work: W) -> W::Output {
                    work.run()
                }
            }
        )+
    };
}

isas! {
    Avx2: ".avx2", 1, vector::InTwo, ["avx2" "fma" "f16c"], "avx2,fma,f16c";
    Avx512: ".avx512", 2, vector::InOne, ["avx512f" "avx512bw" "avx512dq" "avx512vl"], "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c";
    Avx512Bf16: ".avx512_bf16", 3, vector::InOne, ["avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512bf16"], "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c";
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
