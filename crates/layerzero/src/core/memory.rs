//! Free memory of the devices: what workspaces may take follows it.
//!
//! It is looked at on a thread of its own once a minute while calls are made, and again right after memory ran out, then
//! on the thread of the call that failed. New figures build no state and empty no cache: a remembered decision says with
//! how much memory it holds ([`lz_select::MemoryRange`]).

use std::sync::atomic::Ordering;

use lz_model::{DeviceIx, DeviceSpec, Platform};
use lz_select::{DeviceMemory, MemoryState};

use super::Core;
use super::errands::Errand;

/// How long figures of free memory are good for.
const LIFETIME_MS: u64 = 60_000;

/// A device's memory as an allocator of this process sees it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorMemory {
    /// What the driver has left.
    pub driver_free: i64,
    /// What the allocator holds and nobody uses: reserved − allocated.
    pub unused: i64,
    /// The largest block of that.
    pub largest_unused: i64,
}

impl AllocatorMemory {
    /// Free is what the driver has left and what the allocator holds unused; a block comes from one or the other.
    pub fn state(&self) -> MemoryState {
        MemoryState {
            free: self.driver_free.saturating_add(self.unused),
            largest_block: self.driver_free.max(self.largest_unused),
        }
    }
}

/// Tells of a device what an allocator of this process holds of its memory; `None` where it holds nothing.
pub type MemorySource = Box<dyn Fn(DeviceIx) -> Option<AllocatorMemory> + Send + Sync>;

/// Free memory of a device of this machine as its driver tells. Fragmentation is not visible from there, so the largest
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
    /// The free memory of the devices, as last looked at.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Who tells what an allocator of this process holds of a device's memory. The first to say so is heard.
    pub fn set_memory_source(&self, source: MemorySource) {
        let _ = self.memory_source.set(source);
    }

    /// Free memory of a device now.
    pub(crate) fn probe(&self, ix: DeviceIx, device: &DeviceSpec) -> Option<MemoryState> {
        let held = self.memory_source.get().and_then(|source| source(ix)).map(|held| held.state());
        held.or_else(|| probe_memory(device))
    }

    /// Looks at the memory of every device now, on this thread.
    pub fn refresh_memory(&self) {
        let devices = self.devices();
        self.guard.memory_seen_ms.store(self.guard.clock.now_ms(), Ordering::Relaxed);
        for (ix, device) in (0..).map(DeviceIx).zip(&devices) {
            self.memory.set(ix, self.probe(ix, device));
        }
    }

    /// Has the memory of the devices looked at, where that was not done for a minute.
    pub(super) fn look_at_memory_soon(&self, now_ms: u64) {
        let last = &self.guard.memory_seen_ms;
        let then = last.load(Ordering::Relaxed);
        if now_ms < then.saturating_add(LIFETIME_MS)
            || last.compare_exchange(then, now_ms, Ordering::Relaxed, Ordering::Relaxed).is_err()
            || then == 0
        {
            return;
        }
        self.errands.later(Errand::LookAtMemory);
    }

    /// Has the memory of devices that were just found looked at: soon, where somebody attends, else now.
    pub(crate) fn look_at_memory_of_new_devices(&self) {
        if self.errands.is_attended() {
            self.errands.later(Errand::LookAtMemory);
        } else {
            self.refresh_memory();
        }
    }
}
