//! The engine: one immutable state behind an atomic pointer, and everything one can ask of it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use lz_model::{DeviceSpec, GenerationTable, KernelDescriptor};
use lz_resilience::{EventHook, Stamped};
use lz_select::{CacheConfig, SelectionCache, Snapshot, SnapshotSpec};
use parking_lot::Mutex;

use crate::baked::Baked;
use crate::change::probe_memory;
use crate::control::Control;
use crate::error::Error;
use crate::executable::Executable;
use crate::guard::Guard;
use crate::jit::Jit;
use crate::manifest::Manifest;
use crate::names::SHIPPED;
use crate::overlay::Overlays;
use crate::perf::Perf;
use crate::pinned::{Pinned, Source};
use crate::proof::Proving;
use crate::status::StatusFile;
use crate::warn::{Warning, WarningHook, Warnings};

/// A snapshot with what runs its kernels.
pub(crate) struct State {
    pub snapshot: Snapshot,
    pub executables: Vec<Executable>,
    /// Built for a context: what it decides is not remembered for others.
    pub overlaid: bool,
    /// The names of the dispatch tables its pins come from.
    pub tables: Vec<Arc<str>>,
    /// The plan that takes note of the calls made here, if one does.
    pub learner: Weak<Baked>,
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
        Ok(State { snapshot, executables, overlaid: false, tables, learner: Weak::new() })
    }
}

/// Makes an [`Engine`].
#[derive(Default)]
pub struct EngineBuilder {
    devices: Option<Vec<DeviceSpec>>,
    cpu_only: bool,
    cache: CacheConfig,
    hook: Option<WarningHook>,
    events: Option<EventHook>,
    state_dir: Option<PathBuf>,
    compiled_elsewhere: bool,
    kernels_follow: bool,
}

impl EngineBuilder {
    /// These devices instead of the ones found on this machine. Selection then answers for them;
    /// kernels for hardware that is not here can be chosen and explained, not run.
    pub fn devices(mut self, devices: Vec<DeviceSpec>) -> EngineBuilder {
        self.devices = Some(devices);
        self
    }

    /// Only the CPU of this machine, until [`Engine::detect_accelerators`]: looking for GPUs initialises
    /// their driver, and a process that forks workers must not have done that.
    pub fn cpu_only(mut self) -> EngineBuilder {
        self.cpu_only = true;
        self
    }

    /// How the selection cache is sized.
    pub fn cache(mut self, config: CacheConfig) -> EngineBuilder {
        self.cache = config;
        self
    }

    /// Who receives warnings, instead of the log.
    pub fn on_warning(mut self, hook: impl Fn(&Warning) + Send + Sync + 'static) -> EngineBuilder {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Who receives events, besides the log.
    pub fn on_event(mut self, hook: impl Fn(&Stamped) + Send + Sync + 'static) -> EngineBuilder {
        self.events = Some(Box::new(hook));
        self
    }

    /// Where the figures of rollouts are kept for other processes to see, instead of the user's state directory.
    pub fn state_dir(mut self, dir: impl Into<PathBuf>) -> EngineBuilder {
        self.state_dir = Some(dir.into());
        self
    }

    /// Kernels that are compiled on first use are not compiled by the calls that want them: whoever makes this engine
    /// takes them from [`Engine::next_compile`] and does so.
    pub fn compiled_elsewhere(mut self) -> EngineBuilder {
        self.compiled_elsewhere = true;
        self
    }

    /// Kernels will be registered that a configuration may name before they are: names are checked from
    /// [`Engine::settle_names`] on. Without it, they are checked at once.
    pub fn kernels_follow(mut self) -> EngineBuilder {
        self.kernels_follow = true;
        self
    }

    /// An engine with the built-in kernels registered.
    pub fn build(self) -> Engine {
        let mut draft = Draft { epoch: 1, ..Draft::default() };
        let described = self.devices.is_some();
        let found = || if self.cpu_only { vec![lz_hardware::detect_cpu()] } else { lz_hardware::detect().devices };
        draft.spec.devices = self.devices.unwrap_or_else(found);
        if !described {
            draft.spec.memory = draft.spec.devices.iter().map(probe_memory).collect();
        }
        draft.spec.warm = self.compiled_elsewhere.then(Arc::default);
        draft.spec.names = SHIPPED.clone();
        draft.spec.backend(lz_cpu::backend());
        for (kernel, descriptor) in lz_cpu::descriptors() {
            draft.executables.insert((descriptor.id.clone(), descriptor.version.clone()), Executable::Static(kernel));
            draft.spec.kernels.push(Arc::new(descriptor));
        }
        let state = draft.build().expect("the built-in kernels fit together; a test builds them");
        Engine {
            state: ArcSwap::from_pointee(state),
            draft: Mutex::new(draft),
            version: AtomicU64::new(1),
            control: Control::new(self.kernels_follow),
            jit: Jit::new(self.compiled_elsewhere),
            manifest: Manifest::default(),
            perf: Perf::default(),
            proving: Proving::default(),
            perf_known: AtomicUsize::new(0),
            overlays: Overlays::default(),
            status: StatusFile::new(self.state_dir),
            guard: Guard::new(self.cache.clock.clone(), self.events),
            warnings: Warnings::new(self.cache.clock.clone(), self.hook),
            cache: SelectionCache::new(self.cache),
            unseen: AtomicBool::new(self.cpu_only),
        }
    }
}

/// Selects, explains and runs kernels.
///
/// All of it is behind `&self` and safe to share between threads. Reading never locks; a change
/// builds a whole new state, checks it, and swaps it in, or leaves everything as it was.
pub struct Engine {
    pub(crate) state: ArcSwap<State>,
    pub(crate) draft: Mutex<Draft>,
    /// Moves whenever an answer given before may no longer be the one given now.
    pub(crate) version: AtomicU64,
    pub(crate) cache: SelectionCache,
    pub(crate) warnings: Warnings,
    pub(crate) guard: Guard,
    pub(crate) control: Control,
    pub(crate) jit: Jit,
    pub(crate) manifest: Manifest,
    pub(crate) perf: Perf,
    pub(crate) proving: Proving,
    /// How many measurements selection goes by.
    pub(crate) perf_known: AtomicUsize,
    pub(crate) overlays: Overlays,
    pub(crate) status: StatusFile,
    /// Whether GPUs were not looked for yet.
    pub(crate) unseen: AtomicBool,
}

impl Engine {
    /// Starts to make an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// An engine for this machine, with the built-in kernels.
    pub fn new() -> Engine {
        Engine::builder().build()
    }

    pub(crate) fn state(&self) -> arc_swap::Guard<Arc<State>> {
        self.overlaid().map_or_else(|| self.state.load(), arc_swap::Guard::from_inner)
    }

    /// Runs `read` on the current snapshot.
    pub fn with_snapshot<R>(&self, read: impl FnOnce(&Snapshot) -> R) -> R {
        read(&self.state().snapshot)
    }
}

impl Default for Engine {
    fn default() -> Self {
        Engine::new()
    }
}
