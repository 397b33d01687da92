//! What one can ask an engine: which kernel, why, what is there.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lz_model::{Bound, Catalog, DeviceSpec, KernelDescriptor, NamedCall, OrderedCall, Query, Reason, nearest};
use lz_resilience::{Breaker, BreakerState, Event, KernelHealth};
use lz_select::{BackendState, CacheStats, Candidate, Decision, KernelIx, Plan, Snapshot, Transforms};

use crate::engine::{Engine, State};
use crate::error::{Error, Rejection};
use crate::executable::Executable;
use crate::report::{ReasonReport, Report};
use crate::warn::Warning;

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
    /// Whether it is compiled on first use.
    pub jit: bool,
    /// How a call reaches it: `static`, `dynamic`, `foreign`, or `described` when it cannot run here.
    pub dispatch: &'static str,
    /// Why it cannot run on any device, whatever the call: what keeps it from the first one it is made for.
    pub unavailable: Vec<String>,
}

/// A kernel to try for a call.
#[derive(Clone)]
pub struct Step {
    /// The operation the call is.
    pub op: &'static str,
    /// Whether its backend is trusted with the operation now.
    pub breaker: Arc<Breaker>,
    /// How it has been doing.
    pub health: Arc<KernelHealth>,
    /// The kernel.
    pub kernel: Arc<KernelDescriptor>,
    /// What must be done to the arguments first.
    pub transforms: Transforms,
    /// What runs it.
    pub executable: Executable,
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

impl Selection {
    pub(crate) fn new(snapshot: &Snapshot, query: &Query, chosen: &Candidate) -> Selection {
        let kernel = snapshot.kernel(chosen.kernel);
        Selection {
            op: Catalog::get().op(query.op()).id(),
            kernel_id: kernel.id.clone(),
            version: kernel.version.clone(),
            score: chosen.terms.total(),
        }
    }
}

impl Engine {
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
        if let Some(verdict) = bound.layout
            && let Some(input) = verdict.contradicted_by
        {
            let op = Catalog::get().op(bound.query.op());
            let meta = op.input_index(input).and_then(|i| ordered.inputs[i]);
            let (shape, layout) = (meta.map(|m| m.shape.to_vec()).unwrap_or_default(), verdict.layout);
            self.warnings.give(&Warning::LayoutContradicted { op: op.id(), input, shape, layout });
        }
        Ok((ordered, bound))
    }

    /// The plan for a query: from the cache, or by selection. `None` when no kernel can serve it.
    pub fn plan(&self, query: &Query) -> Option<Plan> {
        self.plan_in(&self.state(), query)
    }

    pub(crate) fn plan_in(&self, state: &State, query: &Query) -> Option<Plan> {
        let snapshot = &state.snapshot;
        if state.overlaid {
            return snapshot.plan(&snapshot.select(query));
        }
        self.cache.plan(snapshot, query, || {
            self.control.seen(query);
            let decision = snapshot.select(query);
            (snapshot.plan(&decision), decision.uniform)
        })
    }

    /// The kernels to try for a query, in order, each with what runs it.
    pub fn steps(&self, query: &Query) -> Result<Vec<Step>, Error> {
        let state = self.state();
        let plan = self.plan_in(&state, query);
        let plan = plan.ok_or_else(|| no_kernel(&state.snapshot, &state.snapshot.select(query)))?;
        let op = Catalog::get().op(query.op()).id();
        let most = if state.snapshot.spec().settings.fallback_enabled { usize::MAX } else { 1 };
        let step = |(kernel, transforms)| state.step(&self.guard, op, kernel, transforms);
        Ok(plan.steps().take(most).map(step).collect())
    }

    /// One kernel for a query, whatever the ranking; an error with its reasons when it cannot serve it.
    pub fn step_of(&self, kernel_id: &str, query: &Query) -> Result<Step, Error> {
        self.step_in(&self.state(), kernel_id, query)
    }

    pub(crate) fn step_in(&self, state: &State, kernel_id: &str, query: &Query) -> Result<Step, Error> {
        let ix = find_kernel(&state.snapshot, kernel_id)?;
        let decision = state.snapshot.select(query);
        let op = Catalog::get().op(query.op()).id();
        let candidate = decision.candidates.iter().find(|c| c.kernel == ix);
        match candidate {
            Some(c) if c.accepted() => Ok(state.step(&self.guard, op, ix, c.transforms)),
            other => {
                let reasons = other.map_or_else(|| vec![elsewhere(&state.snapshot, ix, query)], |c| c.reasons.clone());
                Err(Error::NoKernel { op, rejections: vec![Rejection { kernel_id: kernel_id.to_owned(), reasons }] })
            }
        }
    }

    /// Whether a kernel takes a query as it is, without any transform.
    pub fn serves(&self, kernel: &KernelDescriptor, query: &Query) -> bool {
        let state = self.state();
        let is_it = |ix: KernelIx| {
            let other = state.snapshot.kernel(ix);
            other.id == kernel.id && other.version == kernel.version
        };
        let decision = state.snapshot.select(query);
        decision.candidates.iter().any(|c| is_it(c.kernel) && c.accepted() && c.transforms.is_empty())
    }

    /// How many times longer `served` takes for a query than `instead_of`, where both times are trusted.
    pub fn cost_of(&self, query: &Query, instead_of: &str, served: &str) -> Option<f64> {
        let state = self.state();
        let decision = state.snapshot.select(query);
        let time = |id: &str| {
            let candidate = decision.candidates.iter().find(|c| state.snapshot.kernel(c.kernel).id == id)?;
            candidate.estimate.filter(|e| e.trusted && e.median_us > 0.0).map(|e| e.median_us)
        };
        Some(time(served)? / time(instead_of)?)
    }

    /// A number that moves whenever an answer given before may no longer be the one given now: what was
    /// decided under one version holds as long as the version stands. Read it before deciding.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Gives a warning, unless its cause gave one a moment ago. A fallback is an event as well, each time.
    pub fn warn(&self, warning: &Warning) {
        if let Warning::FellBack { op, failed, error, served, .. } = warning {
            let (op, error) = ((*op).to_owned(), error.clone());
            self.guard.emit(Event::FellBack { op, failed: failed.clone(), served: served.clone(), error });
        }
        self.warnings.give(warning);
    }

    /// How much memory a kernel of a step takes beyond its arguments, in bytes.
    pub fn workspace_of(&self, step: &Step, query: &Query) -> i64 {
        let state = self.state();
        let is_it = |k: &KernelDescriptor| k.id == step.kernel.id && k.version == step.kernel.version;
        let found = state.snapshot.kernels().find(|(_, k)| is_it(k));
        found.map_or(0, |(ix, _)| state.snapshot.workspace(ix, query))
    }

    /// Warns when the reference serves a query although other kernels are registered.
    pub fn warn_of_reference(&self, query: &Query) {
        let state = self.state();
        let decision = state.snapshot.select(query);
        let op = Catalog::get().op(query.op()).id();
        let Some(served) = decision.chosen().map(|c| state.snapshot.kernel(c.kernel)).filter(|k| k.reference) else {
            return;
        };
        // Nobody can do anything about a kernel for other hardware, and what is not installed is not missed.
        let is_moot = |r: &Reason| r.is_other_hardware() || matches!(r, Reason::NotInstalled { .. });
        let others = decision.candidates.iter().filter(|c| !c.accepted() && !c.reasons.iter().any(is_moot));
        let why: Vec<(String, String)> = others
            .filter_map(|c| Some((state.snapshot.kernel(c.kernel).id.clone(), c.reasons.first()?.to_string())))
            .collect();
        if !why.is_empty() {
            let served = served.id.clone();
            self.warnings.give(&Warning::OnlyReference { op, served, why });
        }
    }

    /// Selection, and what stands in the way of its choice just now: circuits that are open.
    pub(crate) fn decide(&self, state: &State, query: &Query) -> Decision {
        let mut decision = state.snapshot.select(query);
        let op = Catalog::get().op(query.op()).id();
        let open = self.guard.breakers().report().into_iter().filter(|b| b.op == op);
        for circuit in open.filter(|b| matches!(b.view.state, BreakerState::Open | BreakerState::Disabled)) {
            let last = circuit.view.sticky.or(circuit.view.last_error.map(|e| e.message)).unwrap_or_default();
            let error = format!("the circuit of {} is {}: {last}", circuit.backend, circuit.view.state);
            for candidate in decision.candidates.iter_mut() {
                let kernel = state.snapshot.kernel(candidate.kernel);
                if kernel.backend == circuit.backend && !kernel.reference {
                    candidate.reasons.push(Reason::BackendError { error: error.clone() });
                }
            }
        }
        decision.strike_out(|kernel| state.snapshot.name(kernel));
        decision
    }

    /// Everything about the choice of a kernel for a call.
    pub fn explain(&self, op: &str, call: &NamedCall<'_>) -> Result<Report, Error> {
        let state = self.state();
        let (_, bound) = self.bind_in(&state, op, call)?;
        let mut report = Report::new(&state.snapshot, &self.decide(&state, &bound.query));
        let outside = self.outside_table(&bound.query);
        report.outside_table = outside.map(|reason| ReasonReport { message: reason.to_string(), reason });
        Ok(report)
    }

    /// The kernel that serves a call.
    pub fn which(&self, op: &str, call: &NamedCall<'_>) -> Result<Selection, Error> {
        let state = self.state();
        let (_, bound) = self.bind_in(&state, op, call)?;
        let decision = self.decide(&state, &bound.query);
        let Some(chosen) = decision.chosen() else {
            return Err(no_kernel(&state.snapshot, &decision));
        };
        Ok(Selection::new(&state.snapshot, &bound.query, chosen))
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
        let ix = find_kernel(&state.snapshot, kernel_id)?;
        let (_, bound) = self.bind_in(&state, &state.snapshot.kernel(ix).operation, call)?;
        let decision = self.decide(&state, &bound.query);
        let elsewhere = || vec![elsewhere(&state.snapshot, ix, &bound.query)];
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
        // Of several devices the one it could run on, or at least the kind it is made for.
        let reasons = |ix: KernelIx, kernel: &KernelDescriptor| {
            let devices = || state.snapshot.spec().devices.iter().zip(0..).map(|(d, i)| (d, lz_model::DeviceIx(i)));
            let ready = || devices().find(|(_, at)| state.snapshot.standing_reasons(ix, *at).is_empty());
            let made_for = || devices().find(|(device, _)| kernel.platforms.contains(&device.platform));
            let device = ready().or_else(made_for).map_or(lz_model::DeviceIx(0), |(_, at)| at);
            state.snapshot.standing_reasons(ix, device).iter().map(ToString::to_string).collect()
        };
        let info = |ix: KernelIx, kernel: &KernelDescriptor| KernelInfo {
            kernel_id: kernel.id.clone(),
            version: kernel.version.clone(),
            backend: kernel.backend.clone(),
            operation: kernel.operation.clone(),
            priority: kernel.priority,
            platforms: kernel.platforms.iter().map(|p| p.name()).collect(),
            dtypes: kernel.dtypes.iter().map(|d| d.name()).collect(),
            reference: kernel.reference,
            jit: kernel.jit,
            dispatch: state.executables[ix.0 as usize].name(),
            unavailable: reasons(ix, kernel),
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
}

fn find_kernel(snapshot: &Snapshot, kernel_id: &str) -> Result<KernelIx, Error> {
    let (id, version) = kernel_id.rsplit_once('@').map_or((kernel_id, None), |(id, v)| (id, Some(v)));
    let wanted = |k: &KernelDescriptor| k.id == id && version.is_none_or(|v| k.version == v);
    snapshot.kernels().find(|(_, kernel)| wanted(kernel)).map(|(ix, _)| ix).ok_or_else(|| {
        let nearest = nearest(id, snapshot.kernels().map(|(_, k)| k.id.as_str())).map(str::to_owned);
        Error::UnknownKernel { id: kernel_id.to_owned(), nearest }
    })
}

/// A kernel written for some operations behind an alias is no candidate for the others.
fn elsewhere(snapshot: &Snapshot, kernel: KernelIx, query: &Query) -> Reason {
    let required = &snapshot.kernel(kernel).operation;
    let found = Catalog::get().op(query.op()).id().to_owned();
    Reason::ConstraintFailed { constraint: format!("the operation is {required}"), found }
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
