//! What an engine had at a moment, to be put back: a plugin that fails leaves nothing behind.

use std::collections::BTreeSet;

use lz_config::Layers;

use super::Engine;
use crate::core::Draft;
use crate::error::Error;

/// Kernels, backends, documents and configuration of an engine at a moment.
#[derive(Clone)]
pub struct Checkpoint {
    layers: Layers,
    draft: Draft,
    last_error: Option<String>,
}

impl Engine {
    /// What is registered and configured now.
    pub fn checkpoint(&self) -> Checkpoint {
        // In the order in which a change of the configuration takes these locks.
        let layers = self.control.layers.lock();
        let draft = self.draft.lock().clone();
        Checkpoint { layers: layers.clone(), draft, last_error: self.control.last_error.lock().clone() }
    }

    /// Takes back everything that was registered and configured since: all of it, or nothing. Devices that were found and
    /// measurements that were made since stay: those are facts.
    pub fn restore(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let mut removed = BTreeSet::new();
        self.reinstate(checkpoint.layers.clone(), |now| {
            let mut draft = checkpoint.draft.clone();
            let known = draft.spec.devices.len();
            draft.spec.devices.extend(now.spec.devices.drain(known.min(now.spec.devices.len())..));
            (draft.spec.perf, draft.spec.prior) = (now.spec.perf.clone(), now.spec.prior.clone());
            draft.spec.warm = now.spec.warm.clone();
            draft.spec.restriction = now.spec.restriction.clone();
            removed.extend(now.spec.kernels.iter().map(|kernel| kernel.id.clone()));
            for kernel in &draft.spec.kernels {
                removed.remove(&kernel.id);
            }
            *now = draft;
        })?;
        *self.control.last_error.lock() = checkpoint.last_error.clone();
        for id in &removed {
            self.jit.forget(self, id)?;
        }
        self.forget_removed_kernels();
        Ok(())
    }
}
