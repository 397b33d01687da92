//! The engine: one immutable state behind an atomic pointer, and everything one can ask of it.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use lz_model::{
    BackendDescriptor, Bound, Catalog, DeviceSpec, GenerationTable, KernelDescriptor, LayoutEvidence, NamedCall,
    OrderedCall, Platform, PluginOrigin, Query, Reason, capabilities, nearest,
};
use lz_select::{
    BackendState, CacheConfig, CacheStats, Decision, Invalidate, KernelIx, MemoryState, Plan, SelectionCache, Snapshot,
    SnapshotSpec,
};
use parking_lot::Mutex;

use lz_model::capabilities::{CapabilitiesError, Problem};

use crate::error::{Error, Rejection};
use crate::executable::{DynamicKernel, Executable};
use crate::report::Report;
use crate::warn::{Warning, WarningHook, Warnings};

/// A snapshot with what runs its kernels.
pub(crate) struct State {
    pub snapshot: Snapshot,
    pub executables: Vec<Executable>,
}

/// What the next state is built from.
#[derive(Clone, Default)]
struct Draft {
    spec: SnapshotSpec,
    executables: HashMap<(String, String), Executable>,
    epoch: u64,
}

impl Draft {
    fn build(&self) -> Result<State, Error> {
        let snapshot = self.spec.build(self.epoch).map_err(Error::Snapshot)?;
        let executable = |kernel: &KernelDescriptor| {
            self.executables.get(&(kernel.id.clone(), kernel.version.clone())).cloned().unwrap_or(Executable::Described)
        };
        let executables = snapshot.kernels().map(|(_, kernel)| executable(kernel)).collect();
        Ok(State { snapshot, executables })
    }
}

/// Makes an [`Engine`].
#[derive(Default)]
pub struct EngineBuilder {
    devices: Option<Vec<DeviceSpec>>,
    cache: CacheConfig,
    hook: Option<WarningHook>,
}

impl EngineBuilder {
    /// These devices instead of the ones found on this machine. Selection then answers for them;
    /// kernels for hardware that is not here can be chosen and explained, not run.
    pub fn devices(mut self, devices: Vec<DeviceSpec>) -> EngineBuilder {
        self.devices = Some(devices);
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

    /// An engine with the built-in kernels registered.
    pub fn build(self) -> Engine {
        let mut draft = Draft { epoch: 1, ..Draft::default() };
        let described = self.devices.is_some();
        draft.spec.devices = self.devices.unwrap_or_else(|| lz_hardware::detect().devices);
        if !described {
            draft.spec.memory = draft.spec.devices.iter().map(probe_memory).collect();
        }
        draft.spec.backend(lz_cpu::backend());
        for (kernel, descriptor) in lz_cpu::descriptors() {
            draft.executables.insert((descriptor.id.clone(), descriptor.version.clone()), Executable::Static(kernel));
            draft.spec.kernels.push(Arc::new(descriptor));
        }
        let state = draft.build().expect("the built-in kernels fit together; a test builds them");
        Engine {
            state: ArcSwap::from_pointee(state),
            draft: Mutex::new(draft),
            warnings: Warnings::new(self.cache.clock.clone(), self.hook),
            cache: SelectionCache::new(self.cache),
        }
    }
}

/// Selects, explains and runs kernels.
///
/// All of it is behind `&self` and safe to share between threads. Reading never locks; a change
/// builds a whole new state, checks it, and swaps it in, or leaves everything as it was.
pub struct Engine {
    state: ArcSwap<State>,
    draft: Mutex<Draft>,
    cache: SelectionCache,
    pub(crate) warnings: Warnings,
}

/// A kernel as listings show it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KernelInfo {
    /// Its id.
    pub kernel_id: String,
    /// Its version.
    pub version: String,
    /// The library it comes from.
    pub backend: String,
    /// The operation or alias it was written against.
    pub operation: String,
    /// Its declared priority.
    pub priority: i32,
    /// Processors it runs on.
    pub platforms: Vec<&'static str>,
    /// Dtypes it takes.
    pub dtypes: Vec<&'static str>,
    /// Whether it is a reference.
    pub reference: bool,
    /// How a call reaches it: `static`, `dynamic`, or `described` when it cannot run here.
    pub dispatch: &'static str,
    /// Why it cannot run on the first device, whatever the call.
    pub unavailable: Vec<String>,
}

/// Which kernel serves a call.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Selection {
    /// The operation the call is.
    pub op: &'static str,
    /// The kernel.
    pub kernel_id: String,
    /// Its version.
    pub version: String,
    /// Its score.
    pub score: f64,
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
        self.state.load()
    }

    /// Runs `read` on the current snapshot.
    pub fn with_snapshot<R>(&self, read: impl FnOnce(&Snapshot) -> R) -> R {
        read(&self.state().snapshot)
    }

    // --- asking ---------------------------------------------------------------------------

    /// Finds the operation a call is and checks its arguments.
    pub fn bind<'a>(&self, op: &str, call: &NamedCall<'a>) -> Result<(OrderedCall<'a>, Bound), Error> {
        self.bind_in(&self.state(), op, call)
    }

    pub(crate) fn bind_in<'a>(
        &self,
        state: &State,
        op: &str,
        call: &NamedCall<'a>,
    ) -> Result<(OrderedCall<'a>, Bound), Error> {
        let snapshot = &state.snapshot;
        let devices = call.inputs.iter().map(|(_, meta)| meta.device).chain([call.device]);
        if let Some(unknown) = devices.into_iter().find(|&ix| snapshot.device(ix).is_none()) {
            return Err(Error::UnknownDevice(unknown.0));
        }
        let rules = snapshot.spec().settings.bind_rules();
        let (ordered, bound) = Catalog::get().resolve(op, call, &rules, |ix| snapshot.device(ix))?;
        if bound.layout.is_some_and(|v| v.evidence == LayoutEvidence::Ambiguous) {
            let shape = ordered.inputs[0].map(|m| m.shape.to_vec()).unwrap_or_default();
            let op = Catalog::get().op(bound.query.op()).id();
            self.warnings.give(&Warning::AmbiguousLayout { op, shape });
        }
        Ok((ordered, bound))
    }

    /// The plan for a query: from the cache, or by selection. `None` when no kernel can serve it.
    pub fn plan(&self, query: &Query) -> Option<Plan> {
        self.plan_in(&self.state(), query)
    }

    pub(crate) fn plan_in(&self, state: &State, query: &Query) -> Option<Plan> {
        let snapshot = &state.snapshot;
        self.cache.plan(snapshot, query, || {
            let decision = snapshot.select(query);
            (snapshot.plan(&decision), decision.uniform)
        })
    }

    /// Everything about the choice of a kernel for a call.
    pub fn explain(&self, op: &str, call: &NamedCall<'_>) -> Result<Report, Error> {
        let state = self.state();
        let (_, bound) = self.bind_in(&state, op, call)?;
        Ok(Report::new(&state.snapshot, &state.snapshot.select(&bound.query)))
    }

    /// The kernel that serves a call.
    pub fn which(&self, op: &str, call: &NamedCall<'_>) -> Result<Selection, Error> {
        let state = self.state();
        let (_, bound) = self.bind_in(&state, op, call)?;
        let decision = state.snapshot.select(&bound.query);
        let Some(chosen) = decision.chosen() else {
            return Err(no_kernel(&state.snapshot, &decision));
        };
        let kernel = state.snapshot.kernel(chosen.kernel);
        Ok(Selection {
            op: Catalog::get().op(bound.query.op()).id(),
            kernel_id: kernel.id.clone(),
            version: kernel.version.clone(),
            score: chosen.terms.total(),
        })
    }

    /// The plan for a call: the kernels that would be tried, in order, with `@version` where an id has several.
    pub fn select(&self, op: &str, call: &NamedCall<'_>) -> Result<Vec<String>, Error> {
        let state = self.state();
        let (_, bound) = self.bind_in(&state, op, call)?;
        match self.plan_in(&state, &bound.query) {
            Some(plan) => Ok(plan.steps().map(|(kernel, _)| state.snapshot.name(kernel)).collect()),
            None => Err(no_kernel(&state.snapshot, &state.snapshot.select(&bound.query))),
        }
    }

    /// Why a kernel cannot serve a call; empty when it can. `kernel_id` may carry `@version`.
    pub fn validate(&self, kernel_id: &str, call: &NamedCall<'_>) -> Result<Vec<Reason>, Error> {
        let state = self.state();
        let (id, version) = kernel_id.rsplit_once('@').map_or((kernel_id, None), |(id, v)| (id, Some(v)));
        let wanted = |k: &KernelDescriptor| k.id == id && version.is_none_or(|v| k.version == v);
        let found = state.snapshot.kernels().find(|(_, kernel)| wanted(kernel));
        let Some((ix, kernel)) = found else {
            let nearest = nearest(id, state.snapshot.kernels().map(|(_, k)| k.id.as_str())).map(str::to_owned);
            return Err(Error::UnknownKernel { id: kernel_id.to_owned(), nearest });
        };
        let (_, bound) = self.bind_in(&state, &kernel.operation, call)?;
        let decision = state.snapshot.select(&bound.query);
        // A kernel written for some operations behind an alias is no candidate for the others.
        let elsewhere = || {
            let (required, found) = (kernel.operation.clone(), Catalog::get().op(bound.query.op()).id().to_owned());
            vec![Reason::ConstraintFailed { constraint: format!("the operation is {required}"), found }]
        };
        Ok(decision.candidates.into_iter().find(|c| c.kernel == ix).map_or_else(elsewhere, |c| c.reasons))
    }

    /// The registered kernels, of one operation (or alias) or of all.
    pub fn list_kernels(&self, op: Option<&str>) -> Result<Vec<KernelInfo>, Error> {
        let state = self.state();
        let wanted: Option<Vec<KernelIx>> = match op {
            None => None,
            Some(name) => {
                let target = Catalog::get().find(name)?;
                Some(target.ops.iter().flat_map(|&op| state.snapshot.kernels_for(op).collect::<Vec<_>>()).collect())
            }
        };
        let first_device = lz_model::DeviceIx(0);
        let info = |ix: KernelIx, kernel: &KernelDescriptor| KernelInfo {
            kernel_id: kernel.id.clone(),
            version: kernel.version.clone(),
            backend: kernel.backend.clone(),
            operation: kernel.operation.clone(),
            priority: kernel.priority,
            platforms: kernel.platforms.iter().map(|p| p.name()).collect(),
            dtypes: kernel.dtypes.iter().map(|d| d.name()).collect(),
            reference: kernel.reference,
            dispatch: match state.executables[ix.0 as usize] {
                Executable::Static(_) => "static",
                Executable::Dynamic(_) => "dynamic",
                Executable::Described => "described",
            },
            unavailable: state.snapshot.standing_reasons(ix, first_device).iter().map(ToString::to_string).collect(),
        };
        let listed = |ix: &KernelIx| wanted.as_ref().is_none_or(|w| w.contains(ix));
        Ok(state.snapshot.kernels().filter(|(ix, _)| listed(ix)).map(|(ix, kernel)| info(ix, kernel)).collect())
    }

    /// The backends, with why one cannot be used.
    pub fn backends(&self) -> Vec<BackendState> {
        self.state().snapshot.spec().backends.values().cloned().collect()
    }

    /// The devices.
    pub fn devices(&self) -> Vec<DeviceSpec> {
        self.state().snapshot.spec().devices.clone()
    }

    /// What the cache did so far.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    // --- changing -------------------------------------------------------------------------

    /// Changes what selection depends on. The new state is built and checked first; when that
    /// fails nothing changes.
    pub fn update(&self, change: impl FnOnce(&mut SnapshotSpec)) -> Result<(), Error> {
        self.change(|draft| change(&mut draft.spec))
    }

    fn change(&self, change: impl FnOnce(&mut Draft)) -> Result<(), Error> {
        let mut current = self.draft.lock();
        let mut next = current.clone();
        change(&mut next);
        next.epoch = current.epoch + 1;
        let state = next.build()?;
        self.state.store(Arc::new(state));
        *current = next;
        Ok(())
    }

    /// Registers a kernel with its implementation. Several versions of one id may be registered;
    /// the newest is preferred, and `id@version` names one of them.
    pub fn register(&self, descriptor: KernelDescriptor, kernel: Arc<dyn DynamicKernel>) -> Result<(), Error> {
        self.change(|draft| {
            let name = descriptor.backend.clone();
            draft.spec.backends.entry(name.clone()).or_insert_with(|| BackendState {
                descriptor: BackendDescriptor::native(name, descriptor.version.clone(), descriptor.platforms.clone()),
                unavailable: None,
            });
            let key = (descriptor.id.clone(), descriptor.version.clone());
            draft.executables.entry(key).or_insert(Executable::Dynamic(kernel));
            draft.spec.kernels.push(Arc::new(descriptor));
        })
    }

    /// Gives an implementation to a kernel that so far was only described, by a document.
    pub fn attach(&self, id: &str, version: &str, kernel: Arc<dyn DynamicKernel>) -> Result<(), Error> {
        self.known(id, version)?;
        self.change(|draft| {
            draft.executables.insert((id.to_owned(), version.to_owned()), Executable::Dynamic(kernel));
        })
    }

    fn known(&self, id: &str, version: &str) -> Result<(), Error> {
        let known = self.with_snapshot(|s| s.kernels().any(|(_, k)| k.id == id && k.version == version));
        if known { Ok(()) } else { Err(Error::UnknownKernel { id: format!("{id}@{version}"), nearest: None }) }
    }

    /// Removes one version of a kernel. Calls under way finish with it.
    pub fn unregister(&self, id: &str, version: &str) -> Result<(), Error> {
        self.known(id, version)?;
        self.change(|draft| {
            draft.spec.kernels.retain(|k| k.id != id || k.version != version);
            draft.executables.remove(&(id.to_owned(), version.to_owned()));
        })
    }

    /// Loads a backend's capabilities document. Its kernels can be selected; they run once
    /// implementations are attached. A document that is refused leaves the backend known and
    /// disabled, with its reason. Loading a document again replaces what it said before.
    pub fn load_capabilities(&self, name: &str, text: &str) -> Result<(), Error> {
        let read = capabilities::read(text);
        let backend = read.as_ref().map_or(name, |document| document.backend.name.as_str()).to_owned();
        // Code that is registered stays registered, whatever a file calls itself.
        let taken = self.with_snapshot(|s| s.spec().backends.get(&backend).is_some_and(|b| b.descriptor.is_code()));
        if taken {
            let message = format!("'{backend}' is a backend made of code; name the document's backend otherwise");
            let error = CapabilitiesError::Problems(vec![Problem { path: "/backend".into(), message }]);
            return Err(Error::Capabilities { backend, error });
        }
        match read {
            Ok(document) => self.change(|draft| {
                let spec = &mut draft.spec;
                // What a refused document left under the name it was loaded by.
                if spec.backends.get(name).is_some_and(|b| b.unavailable.is_some() && b.descriptor.version == "unknown")
                {
                    spec.backends.remove(name);
                }
                spec.kernels.retain(|kernel| kernel.backend != backend);
                spec.kernels.extend(document.kernels.into_iter().map(Arc::new));
                if !document.generations.is_empty() {
                    let table = GenerationTable::builtin().overlaid(document.generations);
                    spec.devices.iter_mut().for_each(|device| *device = device.clone().completed(&table));
                }
                spec.backend(document.backend);
            }),
            Err(error) => {
                let reason = error.reason(name);
                self.change(|draft| {
                    let mut descriptor = BackendDescriptor::native(name, "unknown", Vec::new());
                    descriptor.origin = PluginOrigin::EntryPoint;
                    draft.spec.kernels.retain(|kernel| kernel.backend != name);
                    draft.spec.backends.insert(name.to_owned(), BackendState { descriptor, unavailable: Some(reason) });
                })?;
                Err(Error::Capabilities { backend: name.to_owned(), error })
            }
        }
    }

    /// Looks at the memory of every device again: what workspaces may take follows it.
    pub fn refresh_memory(&self) -> Result<(), Error> {
        self.update(|spec| spec.memory = spec.devices.iter().map(probe_memory).collect())
    }

    /// Forgets cached decisions.
    pub fn invalidate(&self, what: &Invalidate) {
        self.cache.invalidate(what);
    }

    /// Forgets cached decisions that would run a backend's kernels.
    pub fn invalidate_backend(&self, backend: &str) {
        let kernels =
            self.with_snapshot(|s| s.kernels().filter(|(_, k)| k.backend == backend).map(|(ix, _)| ix).collect());
        self.cache.invalidate(&Invalidate::Kernels(kernels));
    }
}

impl Default for Engine {
    fn default() -> Self {
        Engine::new()
    }
}

/// Free memory of a device of this machine. Fragmentation is not visible from here, so the largest
/// block is taken to be all that is free.
fn probe_memory(device: &DeviceSpec) -> Option<MemoryState> {
    let memory = match device.platform {
        Platform::Cpu => lz_hardware::cpu_memory(),
        _ => lz_hardware::cuda_memory(device.uuid.as_deref()?),
    }?;
    let free = i64::try_from(memory.free).unwrap_or(i64::MAX);
    Some(MemoryState { free, largest_block: free })
}

pub(crate) fn no_kernel(snapshot: &Snapshot, decision: &Decision) -> Error {
    let op = Catalog::get().op(decision.query.op()).id();
    let rejections: Vec<Rejection> = decision
        .candidates
        .iter()
        .map(|c| Rejection { kernel_id: snapshot.kernel(c.kernel).id.clone(), reasons: c.reasons.clone() })
        .collect();
    if decision.query.context().capturing && rejections.iter().any(|r| r.reasons == [Reason::CudaGraphUnsafe]) {
        return Error::CudaGraphUnsafe { op, rejections };
    }
    Error::NoKernel { op, rejections }
}
