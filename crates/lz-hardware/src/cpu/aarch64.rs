//! 64-bit Arm, from what the operating system tells user space.

use std::arch::is_aarch64_feature_detected;
use std::fs;
use std::path::Path;

use lz_model::CpuCaches;

use super::{Identity, present};

/// Implementer codes of the MIDR_EL1 register.
const IMPLEMENTERS: [(&str, &str); 7] = [
    ("0x41", "arm"),
    ("0x46", "fujitsu"),
    ("0x48", "hisilicon"),
    ("0x4e", "nvidia"),
    ("0x51", "qualcomm"),
    ("0x61", "apple"),
    ("0xc0", "ampere"),
];

/// Part numbers of Arm's own server cores.
const ARM_PARTS: [(&str, &str); 4] =
    [("0xd0c", "Neoverse N1"), ("0xd40", "Neoverse V1"), ("0xd49", "Neoverse N2"), ("0xd4f", "Neoverse V2")];

pub(super) fn identity(root: &Path) -> Identity {
    let cpuinfo = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let field = |name: &str| {
        cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim())
        })
    };
    let named = |table: &[(&str, &'static str)], code: &str| table.iter().find(|row| row.0 == code).map(|row| row.1);
    let apple = cfg!(target_vendor = "apple").then_some("apple");
    let vendor = field("CPU implementer").and_then(|code| named(&IMPLEMENTERS, code)).or(apple).unwrap_or("unknown");
    let part = field("CPU part").filter(|_| vendor == "arm");
    let name = field("model name").or_else(|| named(&ARM_PARTS, part?)).unwrap_or("AArch64 processor");
    Identity { vendor: vendor.into(), name: name.into() }
}

pub(super) fn features() -> Vec<String> {
    present(&[
        ("neon", is_aarch64_feature_detected!("neon")),
        ("dotprod", is_aarch64_feature_detected!("dotprod")),
        ("sve", is_aarch64_feature_detected!("sve")),
        ("bf16", is_aarch64_feature_detected!("bf16")),
        ("i8mm", is_aarch64_feature_detected!("i8mm")),
    ])
}

/// User space cannot read the cache registers.
pub(super) fn caches() -> CpuCaches {
    CpuCaches::default()
}

pub(super) fn threads_per_core() -> Option<u32> {
    None
}
