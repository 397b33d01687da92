//! The register that says which processor state the operating system saves.
#![allow(unsafe_code)]

use raw_cpuid::CpuId;
use std::arch::x86_64::_xgetbv;

/// Bits 17 and 18: the AMX tile configuration and the tiles.
const TILE_STATE: u64 = 0b11 << 17;

/// Whether the operating system saves the AMX tiles, without which using them faults.
pub(super) fn tiles_enabled() -> bool {
    // OSXSAVE, not XSAVE: only then may user code execute XGETBV.
    CpuId::new()
        .get_feature_info()
        .is_some_and(|leaf| leaf.has_xsave() && leaf.has_oxsave())
        // SAFETY: the processor has XSAVE and the operating system enabled it, just checked.
        && unsafe { read() } & TILE_STATE == TILE_STATE
}

#[target_feature(enable = "xsave")]
fn read() -> u64 {
    // SAFETY: `xsave` is enabled here, and register 0 exists wherever XGETBV does.
    unsafe { _xgetbv(0) }
}
