//! Free memory of the devices: what workspaces may take follows it.

use std::sync::atomic::Ordering;

use lz_model::{DeviceSpec, Platform};
use lz_select::MemoryState;

use super::Core;
use super::errands::Errand;
use crate::error::Error;

/// Free memory of a device of this machine. Fragmentation is not visible from here, so the largest
/// block is taken to be all that is free.
pub(crate) fn probe_memory(device: &DeviceSpec) -> Option<MemoryState> {
    let memory = match device.platform {
        Platform::Cpu => lz_hardware::cpu_memory(),
        Platform::Cuda => lz_hardware::cuda_memory(device.uuid.as_deref()?),
        _ => None,
    }?;
    let free = i64::try_from(memory.free).unwrap_or(i64::MAX);
    Some(MemoryState { free, largest_block: free })
}

impl Core {
    /// Looks at the memory of every device again: what workspaces may take follows it.
    pub fn refresh_memory(&self) -> Result<(), Error> {
        self.update(|spec| spec.memory = spec.devices.iter().map(probe_memory).collect())
    }

    /// Has the memory of the devices looked at, once a minute.
    pub(super) fn look_at_memory_soon(&self, now_ms: u64) {
        const EVERY_MS: u64 = 60_000;
        let last = &self.guard.memory_seen_ms;
        let then = last.load(Ordering::Relaxed);
        if now_ms < then.saturating_add(EVERY_MS)
            || last.compare_exchange(then, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_err()
            || then == 0
        {
            return;
        }
        self.errands.later(Errand::LookAtMemory);
    }

    /// Looks at the memory of the devices; what workspaces may take follows it when it has changed much.
    pub(crate) fn look_at_memory(&self) {
        let (devices, known) = self.with_snapshot(|s| (s.spec().devices.clone(), s.spec().memory.clone()));
        let much = |now: i64, before: i64| now > before.saturating_mul(5) / 4 || now < before.saturating_mul(4) / 5;
        let changed = devices.iter().zip(&known).any(|(device, known)| match (probe_memory(device), known) {
            (Some(now), Some(before)) => much(now.free, before.free),
            _ => false,
        });
        if changed {
            let _ = self.refresh_memory();
        }
    }
}
