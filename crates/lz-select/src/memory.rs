//! Free memory of the devices, and for which amounts of it a decision holds.
//!
//! Memory is no part of a snapshot's identity: it changes with every allocation, and a new figure builds nothing anew. A
//! decision carries the range of available bytes in which every verdict on a workspace stays what it was
//! ([`MemoryRange`]); whoever remembers the decision compares before using it.

use std::sync::atomic::{AtomicI64, Ordering};

use lz_model::DeviceIx;

/// Devices whose memory is kept; that of others counts as unknown.
const DEVICES: usize = 64;
/// In place of a figure that is not known.
const UNKNOWN: i64 = -1;

/// Memory of a device, as last probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryState {
    /// Free bytes: what the driver has left, and what an allocator of this process holds unused.
    pub free: i64,
    /// The largest block that can be had in one piece.
    pub largest_block: i64,
}

impl MemoryState {
    /// What a workspace may take when `headroom` must stay free: min(largest_block, free − headroom).
    pub fn available(&self, headroom: i64) -> i64 {
        self.largest_block.min(self.free.saturating_sub(headroom)).max(0)
    }
}

/// The memory of all devices. Read and written by any thread without a lock; all snapshots of an engine share one.
#[derive(Debug)]
pub struct DeviceMemory {
    devices: Box<[Figures]>,
}

#[derive(Debug)]
struct Figures {
    free: AtomicI64,
    largest_block: AtomicI64,
}

impl Default for DeviceMemory {
    /// Nothing is known.
    fn default() -> Self {
        let unknown = || Figures { free: AtomicI64::new(UNKNOWN), largest_block: AtomicI64::new(UNKNOWN) };
        DeviceMemory { devices: (0..DEVICES).map(|_| unknown()).collect() }
    }
}

impl DeviceMemory {
    /// The memory of the first devices.
    pub fn of(states: impl IntoIterator<Item = Option<MemoryState>>) -> DeviceMemory {
        let memory = DeviceMemory::default();
        for (i, state) in (0..).zip(states) {
            memory.set(DeviceIx(i), state);
        }
        memory
    }

    /// What is known of a device. The two figures may be of two probes, if one is just being written.
    #[inline]
    pub fn get(&self, device: DeviceIx) -> Option<MemoryState> {
        let figures = self.devices.get(device.0 as usize)?;
        let free = figures.free.load(Ordering::Relaxed);
        let largest_block = figures.largest_block.load(Ordering::Relaxed);
        (free >= 0 && largest_block >= 0).then_some(MemoryState { free, largest_block })
    }

    /// Goes by another figure from now on.
    pub fn set(&self, device: DeviceIx, state: Option<MemoryState>) {
        let Some(figures) = self.devices.get(device.0 as usize) else { return };
        figures.free.store(state.map_or(UNKNOWN, |s| s.free.max(0)), Ordering::Relaxed);
        figures.largest_block.store(state.map_or(UNKNOWN, |s| s.largest_block.max(0)), Ordering::Relaxed);
    }

    /// What a workspace on a device may take; everything where nothing is known.
    #[inline]
    pub fn available(&self, device: DeviceIx, headroom: i64) -> i64 {
        self.get(device).map_or(i64::MAX, |state| state.available(headroom))
    }
}

/// The available bytes with which a decision holds: `least ≤ available < limit`.
///
/// `least` is the largest workspace that fitted, `limit` the smallest that did not. Between them no verdict on a workspace
/// differs from the one that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    least: i64,
    limit: i64,
}

impl MemoryRange {
    /// Any amount: no kernel takes a workspace.
    pub const ANY: MemoryRange = MemoryRange { least: 0, limit: i64::MAX };

    /// Workspaces between `low` and `high` bytes were compared with `available`, and all came out on one side.
    pub(crate) fn compared(&mut self, (low, high): (i64, i64), available: i64) {
        if high <= available {
            self.least = self.least.max(high);
        } else {
            self.limit = self.limit.min(low);
        }
    }

    /// Whether it holds with any amount.
    #[inline]
    pub fn is_any(&self) -> bool {
        *self == MemoryRange::ANY
    }

    /// Whether it holds with so many bytes available.
    #[inline]
    pub fn contains(&self, available: i64) -> bool {
        // No limit was seen: more is never too much.
        self.least <= available && (available < self.limit || self.limit == i64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_unknown_until_it_was_probed() {
        let memory = DeviceMemory::of([None, Some(MemoryState { free: 100, largest_block: 60 })]);
        assert_eq!(memory.get(DeviceIx(0)), None);
        assert_eq!(memory.available(DeviceIx(0), 10), i64::MAX);
        assert_eq!(memory.available(DeviceIx(1), 10), 60);
        assert_eq!(memory.available(DeviceIx(1), 70), 30);
        assert_eq!(memory.available(DeviceIx(1), 200), 0);
        memory.set(DeviceIx(1), None);
        assert_eq!(memory.get(DeviceIx(1)), None);
        // One more than there is room for is unknown, and nothing else.
        memory.set(DeviceIx(DEVICES as u16), Some(MemoryState { free: 1, largest_block: 1 }));
        assert_eq!(memory.get(DeviceIx(DEVICES as u16)), None);
    }

    #[test]
    fn a_range_lies_between_what_fitted_and_what_did_not() {
        let mut range = MemoryRange::ANY;
        for workspace in [(0, 0), (30, 40), (10, 20), (90, 95), (70, 80)] {
            range.compared(workspace, 50);
        }
        assert!(!range.contains(39) && range.contains(40) && range.contains(69) && !range.contains(70));
        let mut unlimited = MemoryRange::ANY;
        assert!(unlimited.is_any() && unlimited.contains(0) && unlimited.contains(i64::MAX));
        unlimited.compared((5, 5), i64::MAX);
        assert!(!unlimited.is_any() && unlimited.contains(i64::MAX) && unlimited.contains(5) && !unlimited.contains(4));
    }
}
