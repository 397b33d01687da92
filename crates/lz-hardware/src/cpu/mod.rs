//! The host processor.
//!
//! Each architecture is a file with the same four functions: `identity`, `features`, `caches`
//! and `threads_per_core`.

use std::fs;
use std::path::Path;
use std::thread;

use lz_model::{CpuCaches, DeviceSpec, GenerationTable, Platform};

use crate::{Note, cpu_memory, topology};

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), path = "generic.rs")]
mod arch;
#[cfg(target_arch = "x86_64")]
mod xcr0;

/// Who made the processor and what it is called.
struct Identity {
    vendor: String,
    name: String,
}

/// Detects the processor, adding to `notes` what stays unknown.
pub(crate) fn probe(notes: &mut Vec<Note>) -> DeviceSpec {
    let root = Path::new("/");
    let identity = arch::identity(root);
    let mut spec = DeviceSpec::new(Platform::Cpu, identity.name);
    spec.vendor = identity.vendor;
    spec.features = arch::features();
    let mut unknown = |fact, reason: &str| {
        notes.push(Note::Unknown { device: spec.name.clone(), fact, reason: reason.into() });
    };

    match thread::available_parallelism() {
        Ok(threads) => spec.threads = u32::try_from(threads.get()).unwrap_or(u32::MAX),
        Err(error) => {
            spec.threads = 1;
            unknown("threads", &error.to_string());
        }
    }
    let cores = topology::physical_cores(root).unwrap_or_else(|| {
        let per_core = arch::threads_per_core().unwrap_or_else(|| {
            unknown("cores", "no topology published; taken to be the threads");
            1
        });
        spec.threads.div_ceil(per_core)
    });
    // A CPU quota can leave fewer threads than there are cores to run them on.
    spec.cores = cores.min(spec.threads);

    let caches = or_published(arch::caches(), topology::caches(root));
    if caches == CpuCaches::default() {
        unknown("caches", "neither the processor nor the system says");
    } else {
        spec.caches = Some(caches);
    }
    match cpu_memory() {
        Some(memory) => spec.memory_bytes = memory.total,
        None => unknown("memory_bytes", "no readable /proc/meminfo"),
    }
    match fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(release) => {
            spec.versions.insert("os".into(), release.trim().into());
        }
        Err(error) => unknown("versions", &format!("/proc/sys/kernel/osrelease: {error}")),
    }
    spec.completed(&GenerationTable::builtin())
}

/// `told` with the levels it misses taken from `published`.
fn or_published(told: CpuCaches, published: CpuCaches) -> CpuCaches {
    let either = |told: u64, published| if told == 0 { published } else { told };
    CpuCaches {
        l1d: either(told.l1d, published.l1d),
        l2: either(told.l2, published.l2),
        l3: either(told.l3, published.l3),
    }
}

/// The names of the features that are there.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn present(features: &[(&str, bool)]) -> Vec<String> {
    let there = features.iter().filter(|(_, there)| *there);
    there.map(|(name, _)| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_sizes_only_fill_gaps() {
        let told = CpuCaches { l1d: 1, l2: 0, l3: 3 };
        let published = CpuCaches { l1d: 9, l2: 2, l3: 9 };
        let both = or_published(told, published);
        assert_eq!((both.l1d, both.l2, both.l3), (1, 2, 3));
    }
}
