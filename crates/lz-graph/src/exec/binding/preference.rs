//! Where another library's kernel goes before those here, if nothing was measured.
//!
//! Measured against torch 2.11 on an Intel Xeon with AMX, one thread (`bench/results/README.md`). With `tune=True` the times of this
//! machine decide instead.

use lz_abi::DType;
use lz_cpu::primitives::matmul::split;
use lz_model::CpuIsa;

use super::{Arg, Candidate, Site};
use crate::ops::Op;

/// Whether the other library goes first: where there are only references here, and where the kernels here are known to be slower.
pub(super) fn is_ahead(site: &Site<'_>, found: &[Candidate]) -> bool {
    let is_reference = |one: &Candidate| one.name.contains("lz_cpu.ref.");
    // Products of float64 are a little slower here (`bench/results/README.md`).
    if found.iter().all(is_reference) || site.output.dtype == DType::F64 {
        return true;
    }
    let unit = Unit::of(site);
    match site.op {
        Op::MatMul(_) | Op::Linear(_) => product(Sizes::of(site), unit, &found[0].name),
        Op::Attention(_) => unit == Unit::Bfloat16 && site.need(0).shape[2] <= 128,
        Op::Conv(_) => {
            let count = |arg: &Arg| arg.shape.iter().product::<i64>();
            let weight = site.need(1);
            let work = count(site.output).saturating_mul(count(weight) / weight.shape[0].max(1));
            matches!(unit, Unit::Float32 | Unit::Bfloat16) && work >= 1 << 23
        }
        _ => false,
    }
}

/// What multiplies numbers of an element type, where other libraries use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Any vector unit, for float32.
    Float32,
    /// A matrix unit for bfloat16.
    Bfloat16,
    /// A vector unit for float16.
    Float16,
    /// None: narrow numbers are widened.
    Widened,
}

impl Unit {
    fn of(site: &Site<'_>) -> Unit {
        // Where instructions are limited, machines with different processors must choose alike.
        let native = site.terms.level == CpuIsa::Native;
        match site.output.dtype {
            DType::F32 => Unit::Float32,
            DType::Bf16 if native && split::is_here() => Unit::Bfloat16,
            DType::F16 if native && multiplies_halves() => Unit::Float16,
            _ => Unit::Widened,
        }
    }
}

/// Whether this processor multiplies float16.
fn multiplies_halves() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512fp16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The sizes of a product.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Rows of all batches.
    rows: i64,
    outs: i64,
    depth: i64,
}

impl Sizes {
    fn of(site: &Site<'_>) -> Sizes {
        let shape = &site.output.shape;
        let outs = shape.last().copied().unwrap_or(1).max(1);
        let a = &site.need(0).shape;
        let transposed = matches!(site.op, Op::MatMul(op) if op.transpose_a);
        let depth = a[a.len() - if transposed { 2 } else { 1 }];
        Sizes { rows: shape.iter().product::<i64>() / outs, outs, depth }
    }
}

/// A product whose first kernel here has this name.
fn product(Sizes { rows, outs, depth }: Sizes, unit: Unit, first: &str) -> bool {
    let work = rows.saturating_mul(outs).saturating_mul(depth);
    let packed = first.contains("packed");
    match unit {
        // Of two bfloat16 parts each, numbers are multiplied faster than float32.
        Unit::Float32 if first.contains(".split2") => false,
        Unit::Float32 if packed => rows >= 256 && outs <= 512,
        Unit::Float32 => work >= 1 << 17,
        Unit::Bfloat16 if packed => rows >= 256 && depth <= 1024,
        Unit::Bfloat16 => work >= 1 << 20,
        Unit::Float16 if packed => rows >= 128,
        Unit::Float16 => work >= 1 << 22,
        Unit::Widened => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_that_lose_here_go_to_the_other_library() {
        let ahead = |rows, outs, depth, unit, first| product(Sizes { rows, outs, depth }, unit, first);
        assert!(ahead(512, 256, 256, Unit::Float32, "lz_cpu.linear_packed.avx512"));
        assert!(!ahead(128, 768, 768, Unit::Float32, "lz_cpu.linear_packed.avx512"));
        assert!(!ahead(512, 3072, 768, Unit::Float32, "primitive.matmul.packed.split3"));
        assert!(ahead(12 * 128, 128, 64, Unit::Float32, "primitive.matmul"));
        assert!(!ahead(16, 16, 16, Unit::Float32, "primitive.matmul"));
        assert!(!ahead(512, 512, 512, Unit::Float32, "primitive.matmul.split2"));
        assert!(ahead(256, 256, 256, Unit::Bfloat16, "primitive.matmul"));
        assert!(!ahead(256, 256, 256, Unit::Widened, "primitive.matmul"));
    }
}
