//! Any other architecture: nothing beyond what the operating system publishes.

use std::path::Path;

use lz_model::CpuCaches;

use super::Identity;

pub(super) fn identity(_root: &Path) -> Identity {
    Identity { vendor: "unknown".into(), name: format!("{} processor", std::env::consts::ARCH) }
}

pub(super) fn features() -> Vec<String> {
    Vec::new()
}

pub(super) fn caches() -> CpuCaches {
    CpuCaches::default()
}

pub(super) fn threads_per_core() -> Option<u32> {
    None
}
