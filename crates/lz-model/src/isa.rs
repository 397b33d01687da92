//! Levels of x86-64 instruction sets: how much of a processor kernels may be chosen for.

/// The most a processor is taken to have. Instruction sets of other architectures are not touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuIsa {
    /// SSE 4.2, which every x86-64 server has.
    Baseline,
    /// AVX2 with FMA and F16C (Haswell, Zen).
    Avx2,
    /// AVX-512 as Ice Lake has it, with VNNI and without half-precision arithmetic.
    Avx512,
    /// With AVX-512 BF16 (Cooper Lake, Zen 4).
    Avx512Bf16,
    /// With AVX-512 FP16 (Sapphire Rapids), without its matrix unit.
    Avx512Fp16,
    /// All that was detected.
    #[default]
    Native,
}

/// What each level adds to the one below it, by the names devices list.
const ADDED: [&[&str]; 6] = [
    &["sse4.2"],
    &["avx", "avx2", "fma", "f16c"],
    &["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni", "avx512ifma", "avx512vbmi"],
    &["avx512bf16"],
    &["avx512fp16", "avx-vnni"],
    &["amx-tile", "amx-int8", "amx-bf16"],
];

impl CpuIsa {
    /// Every level, by its name in settings, the least first.
    pub const LEVELS: [(&'static str, CpuIsa); 6] = [
        ("baseline", CpuIsa::Baseline),
        ("avx2", CpuIsa::Avx2),
        ("avx512", CpuIsa::Avx512),
        ("avx512_bf16", CpuIsa::Avx512Bf16),
        ("avx512_fp16", CpuIsa::Avx512Fp16),
        ("native", CpuIsa::Native),
    ];

    /// Whether an instruction set is within this level.
    pub fn allows(self, feature: &str) -> bool {
        !ADDED[self as usize + 1..].iter().any(|added| added.contains(&feature))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_has_what_the_levels_below_it_have_and_nothing_of_those_above() {
        for (index, (_, level)) in CpuIsa::LEVELS.into_iter().enumerate() {
            assert_eq!(level as usize, index);
            for (of, added) in ADDED.iter().enumerate() {
                assert!(added.iter().all(|feature| level.allows(feature) == (of <= index)), "{level:?} {added:?}");
            }
            assert!(level.allows("neon") && level.allows("sve") && level.allows("wgmma"));
        }
    }
}
