//! The snapshot: everything a selection depends on, immutable.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use lz_model::{
    BackendDescriptor, BindRules, Catalog, CpuIsa, DefaultLayouts, DeviceIx, DeviceSpec, Facts, KernelDescriptor, Op,
    OpIx, Query, Reason, version,
};

use crate::cell::Cells;
use crate::check::device_reasons;
use crate::compiled::CompiledKernels;
use crate::constraint::{BadConstraint, Compiled, Rules};
use crate::decision::{Chain, KernelIx, MAX_KERNELS};
use crate::memory::DeviceMemory;
use crate::perf::{NoPerfData, PerfSource};
use crate::pin::Pins;
use crate::policy::{KernelName, Policy, PolicyError, PolicySpec};
use crate::proof::{self, Proofs, Verify};
use crate::restriction::Restriction;
use crate::rollout::RolloutRule;
use crate::warm::Warm;

/// Switches of selection.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Off: only references run, and plain torch where none can.
    pub enabled: bool,
    /// Refuse every transform, and strides that contradict the layout in force.
    pub strict: bool,
    /// Allow layout, contiguity and dtype transforms.
    pub allow_adaptation: bool,
    /// Only deterministic kernels.
    pub deterministic: bool,
    /// Only kernels whose result for a row does not depend on the rest of the batch.
    pub batch_invariant: bool,
    /// Allow kernels that would have to be compiled first.
    pub allow_jit: bool,
    /// The most a processor is taken to have.
    pub max_cpu_isa: CpuIsa,
    /// The most threads a native kernel uses.
    pub most_threads: usize,
    /// Memory that must stay free, in bytes.
    pub memory_headroom_bytes: i64,
    /// Under CUDA graph capture only kernels that were captured and replayed here before.
    pub graph_strict: bool,
    /// Whether a call falls through to the next kernel when one fails.
    pub fallback_enabled: bool,
    /// The layouts of calls that do not say theirs.
    pub default_layouts: DefaultLayouts,
    /// When results are compared with the reference's.
    pub verify: Verify,
    /// Whether explanations are given to whoever asks.
    pub explains: bool,
    /// Backends and libraries whose kernels may serve though they were never run on the hardware they are for.
    pub unproven: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            enabled: true,
            strict: false,
            allow_adaptation: true,
            deterministic: false,
            batch_invariant: false,
            allow_jit: true,
            max_cpu_isa: CpuIsa::Native,
            most_threads: usize::MAX,
            memory_headroom_bytes: 1024 << 20,
            graph_strict: false,
            fallback_enabled: true,
            default_layouts: DefaultLayouts::default(),
            verify: Verify::default(),
            explains: true,
            unproven: Vec::new(),
        }
    }
}

impl Settings {
    /// Why a kernel may not serve that was never run on the hardware it is for.
    pub(crate) fn unproven_reason(&self, kernel: &KernelDescriptor) -> Option<Reason> {
        let is_allowed = kernel.proven || self.unproven.iter().any(|n| *n == kernel.backend || *n == kernel.library());
        (!is_allowed).then(|| Reason::Unproven { name: kernel.backend.clone() })
    }

    pub(crate) fn allows_transforms(&self) -> bool {
        self.allow_adaptation && !self.strict
    }

    /// How arguments are read.
    pub fn bind_rules(&self) -> BindRules {
        BindRules { default_layouts: self.default_layouts, strict: self.strict, ..BindRules::default() }
    }
}

/// A backend as this process found it.
#[derive(Clone, Debug)]
pub struct BackendState {
    /// Its description.
    pub descriptor: BackendDescriptor,
    /// Why it cannot be used, if it cannot.
    pub unavailable: Option<Reason>,
    /// Instruction sets of the device that the library does not use here: it was told not to, or cannot.
    pub lacks: Vec<String>,
}

impl BackendState {
    /// A backend that can be used.
    pub fn available(descriptor: BackendDescriptor) -> BackendState {
        BackendState { descriptor, unavailable: None, lacks: Vec::new() }
    }

    /// A backend that cannot be used, and why.
    pub fn unavailable(descriptor: BackendDescriptor, reason: Reason) -> BackendState {
        BackendState { descriptor, unavailable: Some(reason), lacks: Vec::new() }
    }
}

/// What is known of a kernel's recent behaviour.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Set when it must not run: what went wrong.
    pub quarantined: Option<String>,
    /// Compiled on first use, and not compiled yet.
    pub cold: bool,
}

/// Everything a snapshot is made of, before it is checked and compiled. Cheap to clone: a reload
/// is a clone, a change, and a build.
#[derive(Clone)]
pub struct SnapshotSpec {
    /// The devices; a query's device is an index into these.
    pub devices: Vec<DeviceSpec>,
    /// Their free memory, where it was probed. It is shared and changes while snapshots stay as they are.
    pub memory: Arc<DeviceMemory>,
    /// Versions of installed libraries, by lower-case name.
    pub versions: BTreeMap<String, String>,
    /// The backends, by name.
    pub backends: BTreeMap<String, BackendState>,
    /// The kernels.
    pub kernels: Vec<Arc<KernelDescriptor>>,
    /// Kernels that are known by name though they are not registered: those that come with LayerZero and are not loaded,
    /// and those that were registered before. Naming one is no mistake.
    pub names: Arc<Vec<KernelName>>,
    /// The operator's will.
    pub policy: PolicySpec,
    /// Switches.
    pub settings: Settings,
    /// Health by kernel id, or by `id@version` for one version alone.
    pub health: HashMap<String, Health>,
    /// What may be chosen from while the process is degraded.
    pub restriction: Restriction,
    /// Kernels in a rollout.
    pub rollouts: Vec<RolloutRule>,
    /// What was measured here.
    pub perf: Arc<dyn PerfSource>,
    /// What was measured on other machines: asked where what was measured here does not decide.
    pub prior: Arc<dyn PerfSource>,
    /// What comparisons with the reference showed.
    pub proofs: Arc<Proofs>,
    /// Decisions that were made before.
    pub pins: Arc<Pins>,
    /// What kernels that are compiled on first use are ready for; `None` when nobody keeps count, and only
    /// [`Health::cold`] tells.
    pub warm: Option<Arc<Warm>>,
    /// What the kernels were compiled to.
    pub compiled: Arc<CompiledKernels>,
}

impl Default for SnapshotSpec {
    fn default() -> Self {
        SnapshotSpec {
            devices: Vec::new(),
            memory: Arc::default(),
            versions: BTreeMap::new(),
            backends: BTreeMap::new(),
            kernels: Vec::new(),
            names: Arc::default(),
            policy: PolicySpec::default(),
            settings: Settings::default(),
            health: HashMap::new(),
            restriction: Restriction::default(),
            rollouts: Vec::new(),
            perf: Arc::new(NoPerfData),
            prior: Arc::new(NoPerfData),
            proofs: Arc::default(),
            pins: Arc::default(),
            warm: None,
            compiled: Arc::default(),
        }
    }
}

/// Why a snapshot could not be built.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SnapshotError {
    /// Two kernels of one id and version.
    #[error("kernel '{id}' version {version} is registered twice; give it another id or version")]
    DuplicateKernel {
        /// The id.
        id: String,
        /// The version.
        version: String,
    },
    /// More kernels than a chain can name.
    #[error("{found} kernels are registered, {MAX_KERNELS} can be; unregister some")]
    TooManyKernels {
        /// How many there are.
        found: usize,
    },
    /// A kernel of a backend nobody registered.
    #[error("kernel '{kernel}' belongs to backend '{backend}', which is not registered")]
    UnknownBackend {
        /// The kernel.
        kernel: String,
        /// The backend.
        backend: String,
    },
    /// A kernel for an operation that does not exist.
    #[error("kernel '{kernel}': {error}")]
    UnknownOperation {
        /// The kernel.
        kernel: String,
        /// What is wrong, with the nearest name.
        error: String,
    },
    /// A constraint that makes no sense.
    #[error(transparent)]
    Constraint(#[from] BadConstraint),
    /// A policy that cannot be used.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// A kernel in a snapshot.
pub(crate) struct Entry {
    pub descriptor: Arc<KernelDescriptor>,
    pub health: Health,
    /// What rules it out whatever the call, by device.
    pub static_reasons: Vec<Vec<Reason>>,
}

/// Everything a selection depends on: registry, devices, policy, health, performance knowledge.
///
/// Immutable; a change is a new snapshot with a new epoch. Selection is a pure function of the
/// snapshot, the query and the free memory of its device, which alone changes under a snapshot.
pub struct Snapshot {
    pub(crate) epoch: u64,
    pub(crate) spec: SnapshotSpec,
    /// Sorted by id, newest version first: the order that resolves ties.
    pub(crate) entries: Vec<Entry>,
    pub(crate) by_op: Vec<Vec<Compiled>>,
    pub(crate) policy: Policy,
    pub(crate) cells: Vec<Cells>,
    /// The cells of proofs in CUDA graphs: those of decisions, without the edges of what was measured or pinned.
    pub(crate) proof_cells: Vec<Cells>,
}

impl SnapshotSpec {
    /// Registers a backend as available.
    pub fn backend(&mut self, descriptor: BackendDescriptor) {
        self.backends.insert(descriptor.name.clone(), BackendState::available(descriptor));
    }

    /// Checks and compiles everything. All problems are reported, not only the first.
    pub fn build(&self, epoch: u64) -> Result<Snapshot, Vec<SnapshotError>> {
        if self.kernels.len() > MAX_KERNELS {
            return Err(vec![SnapshotError::TooManyKernels { found: self.kernels.len() }]);
        }
        let mut problems = Vec::new();
        let mut kernels = self.kernels.clone();
        kernels.sort_by(|a, b| {
            a.id.cmp(&b.id)
                .then_with(|| version::compare(&b.version, &a.version))
                .then_with(|| a.version.cmp(&b.version))
        });
        for pair in kernels.windows(2) {
            if (&pair[0].id, &pair[0].version) == (&pair[1].id, &pair[1].version) {
                let (id, version) = (pair[0].id.clone(), pair[0].version.clone());
                problems.push(SnapshotError::DuplicateKernel { id, version });
            }
        }
        let policy =
            Policy::compile(&self.policy, &kernels, &|kernel| self.runs_here(kernel)).unwrap_or_else(|errors| {
                problems.extend(errors.into_iter().map(SnapshotError::from));
                Policy::default()
            });
        let catalog = Catalog::get();
        let mut by_op: Vec<Vec<Compiled>> = catalog.ops().iter().map(|_| Vec::new()).collect();
        for (i, kernel) in kernels.iter().enumerate() {
            if let Err(error) = self.compile(KernelIx(i as u32), kernel, &mut by_op) {
                problems.push(error);
            }
        }
        self.compiled.forget_removed();
        if !problems.is_empty() {
            return Err(problems);
        }
        let entries = kernels.into_iter().map(|kernel| self.entry(kernel)).collect();
        let both = catalog.ops().iter().map(|op| self.cells(op, &by_op[op.ix().0 as usize], &policy));
        let (cells, proof_cells) = both.unzip();
        Ok(Snapshot { epoch, spec: self.clone(), entries, by_op, policy, cells, proof_cells })
    }

    /// Whether a kernel's library is installed, and one of the devices can run it.
    pub(crate) fn runs_here(&self, kernel: &KernelDescriptor) -> bool {
        let backend = self.backends.get(&kernel.backend);
        let installed = kernel.standalone || backend.is_some_and(|backend| backend.unavailable.is_none());
        let lacks = backend.map_or(&[][..], |backend| &backend.lacks[..]);
        let usable = |set: &str| self.settings.max_cpu_isa.allows(set) && !lacks.iter().any(|lacked| lacked == set);
        let version_of = |name: &str| self.versions.get(name).cloned();
        let runs_on = |device: &DeviceSpec| device_reasons(kernel, device, usable, version_of).is_empty();
        installed && self.settings.unproven_reason(kernel).is_none() && self.devices.iter().any(runs_on)
    }

    fn compile(
        &self,
        ix: KernelIx,
        kernel: &Arc<KernelDescriptor>,
        by_op: &mut [Vec<Compiled>],
    ) -> Result<(), SnapshotError> {
        if !self.backends.contains_key(&kernel.backend) {
            let (kernel, backend) = (kernel.id.clone(), kernel.backend.clone());
            return Err(SnapshotError::UnknownBackend { kernel, backend });
        }
        let catalog = Catalog::get();
        let target = catalog
            .find(&kernel.operation)
            .map_err(|e| SnapshotError::UnknownOperation { kernel: kernel.id.clone(), error: e.to_string() })?;
        let compile = || target.ops.iter().map(|&op| Rules::new(kernel, catalog.op(op)).map(Arc::new)).collect();
        for (&op, rules) in target.ops.iter().zip(self.compiled.rules(kernel, compile)?) {
            by_op[op.0 as usize].push(Compiled { kernel: ix, rules });
        }
        Ok(())
    }

    fn entry(&self, descriptor: Arc<KernelDescriptor>) -> Entry {
        let backend = &self.backends[&descriptor.backend];
        let unavailable = backend.unavailable.clone().filter(|_| !descriptor.standalone);
        let unproven = self.settings.unproven_reason(&descriptor).filter(|reason| unavailable.as_ref() != Some(reason));
        let versioned = format!("{}@{}", descriptor.id, descriptor.version);
        let health =
            self.health.get(&versioned).or_else(|| self.health.get(&descriptor.id)).cloned().unwrap_or_default();
        let quarantined = health.quarantined.clone().map(|error| Reason::BackendError { error });
        let usable = |set: &str| self.settings.max_cpu_isa.allows(set) && !backend.lacks.iter().any(|l| l == set);
        let static_reasons = self
            .devices
            .iter()
            .map(|device| {
                let mut reasons = device_reasons(&descriptor, device, usable, |name| self.versions.get(name).cloned());
                reasons.extend(unavailable.clone());
                reasons.extend(unproven.clone());
                reasons.extend(quarantined.clone());
                reasons
            })
            .collect();
        Entry { descriptor, health, static_reasons }
    }

    /// The cells of decisions, and of proofs in graphs.
    fn cells(&self, op: &Op, kernels: &[Compiled], policy: &Policy) -> (Cells, Cells) {
        let mut cells = Cells::new(op);
        for compiled in kernels {
            compiled.dims.iter().for_each(|(dim, rule)| cells.add_rule(*dim, rule));
            compiled.expressions().for_each(|expr| cells.add_expr(op, expr));
        }
        for rule in policy.rules(op.ix()) {
            rule.when.iter().for_each(|expr| cells.add_expr(op, expr));
        }
        let mut of_proofs = cells.clone();
        of_proofs.finish();
        let measured = [&self.perf, &self.prior].into_iter().flat_map(|source| source.edges(op.ix()));
        for (dim, at) in measured.chain(self.pins.edges(op.ix())) {
            cells.cut(dim, at);
        }
        cells.finish();
        (cells, of_proofs)
    }
}

impl Snapshot {
    /// Different for every snapshot of an engine.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// What it was built from.
    pub fn spec(&self) -> &SnapshotSpec {
        &self.spec
    }

    /// A device.
    pub fn device(&self, ix: DeviceIx) -> Option<&DeviceSpec> {
        self.spec.devices.get(ix.0 as usize)
    }

    /// A kernel.
    pub fn kernel(&self, ix: KernelIx) -> &Arc<KernelDescriptor> {
        &self.entries[ix.0 as usize].descriptor
    }

    /// What to call a kernel: its id, with `@version` where several are registered under it.
    pub fn name(&self, ix: KernelIx) -> String {
        let kernel = self.kernel(ix);
        match self.entries.iter().filter(|e| e.descriptor.id == kernel.id).count() {
            1 => kernel.id.clone(),
            _ => format!("{}@{}", kernel.id, kernel.version),
        }
    }

    /// Every kernel, in the fixed order.
    pub fn kernels(&self) -> impl Iterator<Item = (KernelIx, &Arc<KernelDescriptor>)> {
        self.entries.iter().enumerate().map(|(i, e)| (KernelIx(i as u32), &e.descriptor))
    }

    /// The kernels registered for an operation, in the fixed order.
    pub fn kernels_for(&self, op: OpIx) -> impl Iterator<Item = KernelIx> + '_ {
        self.by_op[op.0 as usize].iter().map(|c| c.kernel)
    }

    /// What rules a kernel out on a device, whatever the call.
    pub fn static_reasons(&self, kernel: KernelIx, device: DeviceIx) -> &[Reason] {
        self.entries[kernel.0 as usize].static_reasons.get(device.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Whether a kernel must be compared with the reference before it serves a call: it is not built in, nobody vouches for
    /// it, and that was not done for calls like this one.
    pub fn needs_proof(&self, kernel: KernelIx, query: &Query) -> bool {
        proof::is_needed(self.spec.settings.verify, &self.spec.proofs, self.kernel(kernel), query)
    }

    /// How much memory a kernel takes for a call beyond its arguments, in bytes, as far as it says.
    pub fn workspace(&self, kernel: KernelIx, query: &Query) -> i64 {
        let op = Catalog::get().op(query.op());
        let compiled = self.by_op[query.op().0 as usize].iter().find(|c| c.kernel == kernel);
        let workspace = compiled.and_then(|c| c.workspace.as_ref()).zip(self.device(query.device()));
        workspace.and_then(|(expr, device)| expr.int(&Facts { op, query, device }).ok()).unwrap_or(0)
    }

    /// What a workspace may take on a device now, beyond the headroom; everything where its memory is not known.
    #[inline]
    pub fn available_memory(&self, device: DeviceIx) -> i64 {
        self.spec.memory.available(device, self.spec.settings.memory_headroom_bytes)
    }

    /// Whether a chain decided before is still the one: every workspace that fitted fits, and no other does.
    #[inline]
    pub fn still_holds(&self, chain: &Chain, device: DeviceIx) -> bool {
        chain.memory().is_any() || chain.memory().contains(self.available_memory(device))
    }

    /// The key of the cell a query lies in: queries with one key get one decision, unless the
    /// decision says it is not uniform.
    pub fn cell_key(&self, query: &Query) -> Query {
        self.cells[query.op().0 as usize].key(query)
    }
}
