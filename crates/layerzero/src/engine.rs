//! The engine: one immutable state behind an atomic pointer, and everything one can ask of it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use lz_model::{DeviceSpec, GenerationTable, KernelDescriptor, Platform};
use lz_resilience::{EventHook, Stamped};
use lz_select::{CacheConfig, SelectionCache, Snapshot, SnapshotSpec};
use parking_lot::Mutex;

use crate::baked::Baked;
use crate::change::probe_memory;
use crate::control::Control;
use crate::errands::Errands;
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
    /// What was decided in it, for a state that was built for a context; the process's own decisions are in
    /// [`Engine::cache`].
    pub own_cache: Option<SelectionCache>,
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
        Ok(State { snapshot, executables, own_cache: None, tables, learner: Weak::new() })
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

    /// Where the figures of rollouts and circuits that opened are kept for other processes, instead of the user's state
    /// directory.
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
        for (kernel, descriptor) in lz_cpu::descriptors().filter(|(_, descriptor)| descriptor.reference) {
            draft.executables.insert((descriptor.id.clone(), descriptor.version.clone()), Executable::Static(kernel));
            draft.spec.kernels.push(Arc::new(descriptor));
        }
        let cpu = draft.spec.devices.iter().find(|device| device.platform == Platform::Cpu);
        let threads = cpu.map_or(0, |cpu| u16::try_from(cpu.cores).unwrap_or(u16::MAX));
        let state = draft.build().expect("the built-in kernels fit together; a test builds them");
        let engine = Engine {
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
            errands: Errands::default(),
            guard: Guard::new(self.cache.clock.clone(), self.events),
            warnings: Warnings::new(self.cache.clock.clone(), self.hook),
            cache: SelectionCache::new(self.cache),
            unseen: AtomicBool::new(self.cpu_only),
            threads: AtomicU16::new(threads),
        };
        engine.read_failures();
        engine
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
    pub(crate) errands: Errands,
    /// Whether GPUs were not looked for yet.
    pub(crate) unseen: AtomicBool,
    /// Threads of calls on the CPU that do not say theirs.
    threads: AtomicU16,
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

    /// How many threads kernels use in calls on the CPU that do not say (`Context::threads`). One per core, as long as
    /// [`Engine::set_threads`] says nothing else.
    pub fn threads(&self) -> u16 {
        self.threads.load(Ordering::Relaxed)
    }

    /// Says how many threads kernels use from now on in calls on the CPU that do not say; 0 for not known. Nothing is
    /// built anew: the number is part of each query, and what was measured with another one is not asked.
    pub fn set_threads(&self, threads: u16) {
        self.threads.store(threads, Ordering::Relaxed);
    }
}

impl Default for Engine {
    fn default() -> Self {
        Engine::new()
    }
}
