//! A state: everything that selection and dispatch read, and what the next one is built from.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use lz_model::{GenerationTable, KernelDescriptor};
use lz_select::{SelectionCache, Snapshot, SnapshotSpec};

use super::executable::Executable;
use crate::documents::{Pinned, Plan, Source};
use crate::error::Error;

/// A snapshot with what runs its kernels.
pub(crate) struct State {
    pub snapshot: Snapshot,
    pub executables: Vec<Executable>,
    /// What was decided in it, for a state that was built for a context; the process's own decisions are in
    /// [`super::Core::cache`].
    pub own_cache: Option<SelectionCache>,
    /// The names of the dispatch tables its pins come from.
    pub tables: Vec<Arc<str>>,
    /// The plan that takes note of the calls made here, if one does.
    pub learner: Weak<Plan>,
}

/// What the next state is built from.
#[derive(Clone, Default)]
pub(crate) struct Draft {
    pub spec: SnapshotSpec,
    pub pinned: Pinned,
    pub executables: HashMap<(String, String), Executable>,
    /// What documents say about generations of devices.
    pub generations: Vec<GenerationTable>,
    pub epoch: u64,
}

impl Draft {
    pub fn build(&self) -> Result<State, Error> {
        let snapshot = self.spec.build(self.epoch).map_err(Error::Snapshot)?;
        let executable = |kernel: &KernelDescriptor| {
            self.executables.get(&(kernel.id.clone(), kernel.version.clone())).cloned().unwrap_or(Executable::Described)
        };
        let executables = snapshot.kernels().map(|(_, kernel)| executable(kernel)).collect();
        let is_table = |source: &&Arc<Source>| source.is_table();
        let tables = self.pinned.sources().filter(is_table).map(|source| source.origin.clone()).collect();
        Ok(State { snapshot, executables, own_cache: None, tables, learner: Weak::new() })
    }

    /// Puts the documents in force in this draft's devices and backends.
    pub fn repin(&mut self) {
        self.pinned.refresh(&mut self.spec);
    }
}
