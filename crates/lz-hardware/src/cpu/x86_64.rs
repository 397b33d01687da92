//! x86-64, from the CPUID instruction.

use std::arch::is_x86_feature_detected;
use std::path::Path;

use lz_model::CpuCaches;
use raw_cpuid::{CacheType, CpuId, TopologyType};

use super::{Identity, present, xcr0};

pub(super) fn identity(_root: &Path) -> Identity {
    let cpuid = CpuId::new();
    let vendor = cpuid.get_vendor_info();
    let name = cpuid.get_processor_brand_string();
    Identity {
        vendor: match vendor.as_ref().map_or("", |vendor| vendor.as_str()) {
            "GenuineIntel" => "intel".into(),
            "AuthenticAMD" => "amd".into(),
            "HygonGenuine" => "hygon".into(),
            "CentaurHauls" | "  Shanghai  " => "zhaoxin".into(),
            other => other.trim().to_lowercase(),
        },
        name: name
            .map(|name| name.as_str().trim().to_owned())
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "x86-64 processor".into()),
    }
}

pub(super) fn features() -> Vec<String> {
    // The macro checks that the operating system saves the registers, and does not know AMX yet.
    let leaf = CpuId::new().get_extended_feature_info();
    let amx = leaf.filter(|leaf| leaf.has_amx_tile() && xcr0::tiles_enabled());
    present(&[
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx-vnni", is_x86_feature_detected!("avxvnni")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512cd", is_x86_feature_detected!("avx512cd")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("avx512fp16", is_x86_feature_detected!("avx512fp16")),
        ("avx512ifma", is_x86_feature_detected!("avx512ifma")),
        ("avx512vbmi", is_x86_feature_detected!("avx512vbmi")),
        ("amx-tile", amx.is_some()),
        ("amx-int8", amx.as_ref().is_some_and(|leaf| leaf.has_amx_int8())),
        ("amx-bf16", amx.as_ref().is_some_and(|leaf| leaf.has_amx_bf16())),
    ])
}

pub(super) fn caches() -> CpuCaches {
    let mut caches = CpuCaches::default();
    for cache in CpuId::new().get_cache_parameters().into_iter().flatten() {
        let size = [cache.associativity(), cache.physical_line_partitions(), cache.coherency_line_size(), cache.sets()]
            .into_iter()
            .fold(1u64, |size, factor| size.saturating_mul(factor as u64));
        match (cache.level(), cache.cache_type()) {
            (1, CacheType::Data | CacheType::Unified) => caches.l1d = size,
            (2, CacheType::Data | CacheType::Unified) => caches.l2 = size,
            (3, CacheType::Data | CacheType::Unified) => caches.l3 = size,
            _ => {}
        }
    }
    caches
}

pub(super) fn threads_per_core() -> Option<u32> {
    CpuId::new()
        .get_extended_topology_info()?
        .find(|level| level.level_type() == TopologyType::SMT)
        .map(|level| u32::from(level.processors()))
        .filter(|&threads| threads > 0)
}
