//! What sampled calls take beside what was measured: see [`super::live`].

use lz_model::{CallSpec, KernelDescriptor, Query};

use super::Core;
use super::live::Drifted;

impl Core {
    /// A kernel took so many microseconds for a sampled call: the device, where it is a GPU, else the host. `call` writes it
    /// down, where that is known.
    pub fn took(&self, kernel: &KernelDescriptor, query: &Query, call: impl FnOnce() -> Option<CallSpec>, us: f64) {
        self.with_snapshot(|snapshot| self.live.took(snapshot, kernel, query, call, us));
    }

    /// The calls to measure again, the one that drifted most first. Whoever measures one need not say so: with another
    /// measurement in force it is off the list.
    pub fn drifted(&self) -> Vec<Drifted> {
        self.with_snapshot(|snapshot| self.live.drifted(snapshot))
    }
}
