//! The engine: the core with its services, put together.
//!
//! ```text
//! documents   lockfiles, tables, plans: read, and turned into pins
//! core        selects and runs; knows none of what follows
//! services    configuration, overlays, compilation, performance database, state files: each a struct of its own
//! engine      what somebody asks of all of them together: one file for each subject
//! ```

mod checkpoint;
mod control;
mod decide;
mod devices;
mod graphs;
mod health;
mod jit;
mod kernels;
mod names;
mod overlay;
pub mod perf;
mod pins;
mod plans;
mod readiness;
mod solve;

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use lz_model::{DeviceSpec, Platform};
use lz_resilience::{EventHook, Stamped};
use lz_select::{CacheConfig, DeviceMemory};

use crate::core::{Core, Draft, Executable, probe_memory};
use crate::services::StateFiles;
use crate::services::control::Control;
use crate::services::jit::Jit;
use crate::services::manifest::Manifest;
use crate::services::names::NAMES;
use crate::services::overlays::Overlays;
use crate::services::perf::Perf;
use crate::warn::{Warning, WarningHook};

pub use checkpoint::Checkpoint;
pub use health::{Health, percent, rollout_line};
pub use readiness::{Check, CheckStatus, Readiness};
pub use solve::{Disagreement, SolveRequest, Solved};

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
    simd_kernels: bool,
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

    /// With LayerZero's own kernels for vector instructions beside the references. Which of them this machine can run is a
    /// matter of selection.
    pub fn simd_kernels(mut self) -> EngineBuilder {
        self.simd_kernels = true;
        self
    }

    /// An engine with the built-in kernels registered.
    pub fn build(self) -> Engine {
        let mut draft = Draft { epoch: 1, ..Draft::default() };
        let described = self.devices.is_some();
        let found = || if self.cpu_only { vec![lz_hardware::detect_cpu()] } else { lz_hardware::detect().devices };
        draft.spec.devices = self.devices.unwrap_or_else(found);
        if !described {
            draft.spec.memory = Arc::new(DeviceMemory::of(draft.spec.devices.iter().map(probe_memory)));
        }
        draft.spec.warm = self.compiled_elsewhere.then(Arc::default);
        draft.spec.names = NAMES.clone();
        draft.spec.backend(lz_cpu::backend());
        for (kernel, descriptor) in lz_cpu::descriptors().filter(|(_, kernel)| self.simd_kernels || kernel.reference) {
            draft.executables.insert((descriptor.id.clone(), descriptor.version.clone()), Executable::Static(kernel));
            draft.spec.kernels.push(Arc::new(descriptor));
        }
        let cpu = draft.spec.devices.iter().find(|device| device.platform == Platform::Cpu);
        let threads = cpu.map_or(0, |cpu| u16::try_from(cpu.cores).unwrap_or(u16::MAX));
        let core = Arc::new(Core::new(draft, self.cache, threads, self.hook, self.events));
        let files = Arc::new(StateFiles::new(self.state_dir));
        let (below, done_by) = (Arc::downgrade(&core), files.clone());
        core.errands.done_by(move |errand| {
            if let Some(core) = below.upgrade() {
                done_by.run(&core, errand);
            }
        });
        files.read_circuits(&core);
        Engine {
            core,
            control: Control::new(self.kernels_follow),
            overlays: Overlays::default(),
            jit: Jit::new(self.compiled_elsewhere),
            manifest: Manifest::default(),
            perf: Perf::default(),
            files,
            unseen: AtomicBool::new(self.cpu_only),
        }
    }
}

/// Selects, explains and runs kernels, by the operator's configuration and by what was measured.
///
/// It is a [`Core`] with services around it: whatever can be asked of a core can be asked of an engine.
pub struct Engine {
    core: Arc<Core>,
    control: Control,
    overlays: Overlays,
    jit: Jit,
    manifest: Manifest,
    perf: Perf,
    files: Arc<StateFiles>,
    /// Whether GPUs were not looked for yet.
    unseen: AtomicBool,
}

impl Deref for Engine {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
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

    /// From now on work that follows from calls is done on a thread of its own. An engine nobody attends writes its files
    /// while it serves a call, and does not look at free memory by itself: see [`Core::refresh_memory`].
    pub fn attend(&self) {
        self.errands.attend();
    }
}

impl Default for Engine {
    fn default() -> Self {
        Engine::new()
    }
}
