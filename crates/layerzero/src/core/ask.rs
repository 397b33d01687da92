//! What one can ask an engine: which kernel, why, what is there.

use lz_model::{
    BindRules, Bound, CallSpec, Catalog, Context, DeviceIx, DeviceSpec, Facts, KernelDescriptor, NamedCall,
    OrderedCall, Query, Reason, nearest,
};
use lz_resilience::{BreakerReport, BreakerState, Event};
use lz_select::{BackendState, CacheStats, Candidate, Chain, Decision, KernelIx, MemoryRange, Snapshot};

use super::Core;
use super::guard::always_runs;
use super::scope::Scope;
use super::step::Step;
use crate::error::Error;
use crate::rejections::Rejection;
use crate::report::{ReasonReport, Report};
use crate::warn::Warning;

/// A kernel as listings show it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KernelInfo {
    /// Its id.
    pub kernel_id: String,
    /// Its version.
    pub version: String,
    /// The backend it comes from.
    pub backend: String,
    /// The library that belongs to.
    pub library: String,
    /// Other names it answers to.
    pub aliases: Vec<String>,
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

impl Scope<'_> {
    /// Finds the operation a call is and checks its arguments.
    pub fn bind<'a>(&self, op: &str, call: &NamedCall<'a>) -> Result<(OrderedCall<'a>, Bound), Error> {
        let snapshot = self.snapshot();
        let devices = call.inputs.iter().map(|(_, meta)| meta.device).chain([call.device]);
        if let Some(unknown) = devices.into_iter().find(|&ix| snapshot.device(ix).is_none()) {
            return Err(Error::UnknownDevice(unknown.0));
        }
        let rules = BindRules { threads: self.core.threads(), ..snapshot.spec().settings.bind_rules() };
        let (ordered, bound) = Catalog::get().resolve(op, call, &rules, |ix| snapshot.device(ix))?;
        if let Some(verdict) = bound.layout
            && let Some(input) = verdict.contradicted_by
        {
            let op = Catalog::get().op(bound.query.op());
            let meta = op.input_index(input).and_then(|i| ordered.inputs[i]);
            let (shape, layout) = (meta.map(|m| m.shape.to_vec()).unwrap_or_default(), verdict.layout);
            self.core.warnings.give(&Warning::LayoutContradicted { op: op.id(), input, shape, layout });
        }
        Ok((ordered, bound))
    }

    /// The chain for a query: from the cache, or by selection. `None` when no kernel can serve it.
    pub fn chain(&self, query: &Query) -> Option<Chain> {
        let snapshot = self.snapshot();
        let cache = self.state.own_cache.as_ref().unwrap_or(&self.core.cache);
        cache.chain(snapshot, query, || {
            if self.state.own_cache.is_none() {
                self.core.remember(query);
            }
            let decision = snapshot.select(query);
            (snapshot.chain(&decision), decision.uniform)
        })
    }

    /// The kernels to try for a query, in order, each with what runs it.
    pub fn steps(&self, query: &Query) -> Result<Vec<Step>, Error> {
        self.steps_within(query).map(|(steps, _)| steps)
    }

    /// As [`Scope::steps`], with the available bytes with which they are the ones to try: whoever remembers them compares
    /// with [`Core::memory`] first.
    pub fn steps_within(&self, query: &Query) -> Result<(Vec<Step>, MemoryRange), Error> {
        let (mut steps, memory) = self.all_steps(query)?;
        if !self.snapshot().spec().settings.fallback_enabled {
            steps.truncate(1);
        }
        Ok((steps, memory))
    }

    /// As [`Scope::steps_within`], also where the configuration wants no fallback.
    pub(crate) fn all_steps(&self, query: &Query) -> Result<(Vec<Step>, MemoryRange), Error> {
        let state = &self.state;
        let chain = self.chain(query);
        let chain = chain.ok_or_else(|| no_kernel(&state.snapshot, &state.snapshot.select(query)))?;
        let op = Catalog::get().op(query.op()).id();
        let step = |(kernel, transforms)| {
            let unproven = state.snapshot.needs_proof(kernel, query);
            Step { unproven, ..state.step(&self.core.guard, op, kernel, transforms) }
        };
        Ok((chain.steps().map(step).collect(), chain.memory()))
    }

    /// One kernel for a query, whatever the ranking; an error with its reasons when it cannot serve it.
    pub fn step_of(&self, kernel_id: &str, query: &Query) -> Result<Step, Error> {
        let state = &self.state;
        let named = find_kernels(&state.snapshot, kernel_id)?;
        let decision = state.snapshot.select(query);
        let op = Catalog::get().op(query.op()).id();
        // Of several behind an alias, the best that can.
        if let Some(c) = decision.ranked().find(|c| named.contains(&c.kernel)) {
            return Ok(state.step(&self.core.guard, op, c.kernel, c.transforms));
        }
        let candidate = |ix: &KernelIx| decision.candidates.iter().find(|c| c.kernel == *ix);
        let reasons = named.iter().find_map(candidate).map(|c| c.reasons.clone());
        let reasons = reasons.unwrap_or_else(|| vec![elsewhere(&state.snapshot, named[0], query)]);
        Err(Error::NoKernel { op, rejections: vec![Rejection { kernel_id: kernel_id.to_owned(), reasons }] })
    }

    /// Whether a kernel takes a query as it is, without any transform.
    pub fn serves(&self, kernel: &KernelDescriptor, query: &Query) -> bool {
        let state = &self.state;
        let is_it = |ix: KernelIx| {
            let other = state.snapshot.kernel(ix);
            other.id == kernel.id && other.version == kernel.version
        };
        let decision = state.snapshot.select(query);
        decision.candidates.iter().any(|c| is_it(c.kernel) && c.accepted() && c.transforms.is_empty())
    }

    /// How many times longer `served` takes for a query than `instead_of`, where both times are trusted.
    pub fn cost_of(&self, query: &Query, instead_of: &str, served: &str) -> Option<f64> {
        let state = &self.state;
        let decision = state.snapshot.select(query);
        let time = |id: &str| {
            let candidate = decision.candidates.iter().find(|c| state.snapshot.kernel(c.kernel).id == id)?;
            candidate.estimate.filter(|e| e.trusted && e.median_us > 0.0).map(|e| e.median_us)
        };
        Some(time(served)? / time(instead_of)?)
    }

    /// How much memory a kernel of a step takes beyond its arguments, in bytes.
    pub fn workspace_of(&self, step: &Step, query: &Query) -> i64 {
        let state = &self.state;
        let is_it = |k: &KernelDescriptor| k.id == step.kernel.id && k.version == step.kernel.version;
        let found = state.snapshot.kernels().find(|(_, k)| is_it(k));
        found.map_or(0, |(ix, _)| state.snapshot.workspace(ix, query))
    }

    /// The most threads a native kernel uses: the setting `num_threads`.
    pub fn most_threads(&self) -> usize {
        self.state.snapshot.spec().settings.most_threads
    }

    /// How many bytes a call reads and writes at least.
    pub fn bytes_of(&self, query: &Query) -> f64 {
        let op = Catalog::get().op(query.op());
        self.state.snapshot.device(query.device()).map_or(0.0, |device| op.bytes(&Facts { op, query, device }))
    }

    /// Warns when the reference serves a query although other kernels are registered.
    pub fn warn_of_reference(&self, query: &Query) {
        let state = &self.state;
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
            self.core.warnings.give(&Warning::OnlyReference { op, served, why });
        }
    }

    /// Selection, and what stands in the way of its choice just now: circuits that are open.
    pub(crate) fn decide(&self, query: &Query) -> Decision {
        let state = &self.state;
        let mut decision = state.snapshot.select(query);
        let op = Catalog::get().op(query.op()).id();
        let breakers = self.core.guard.breakers();
        let open: Vec<BreakerReport> =
            breakers.report().into_iter().filter(|b| b.op == op && b.view.state == BreakerState::Open).collect();
        for candidate in decision.candidates.iter_mut() {
            let kernel = state.snapshot.kernel(candidate.kernel);
            let circuit = || open.iter().find(|b| b.kernel == kernel.id && b.backend == kernel.backend);
            let error = match breakers.disabled_because(&kernel.backend) {
                _ if always_runs(kernel) => continue,
                Some(why) => format!("{} is disabled for this process: {why}", kernel.backend),
                None => match circuit() {
                    Some(circuit) => {
                        let last = circuit.view.last_error.as_ref().map_or("", |e| e.message.as_str());
                        format!("the circuit of {} is open: {last}", kernel.id)
                    }
                    None => continue,
                },
            };
            candidate.reasons.push(Reason::BackendError { error });
        }
        decision.strike_out(|kernel| state.snapshot.name(kernel));
        decision
    }

    /// Everything about the choice of a kernel for a call, for whoever asks; refused where explanations are switched off.
    pub fn explain(&self, op: &str, call: &NamedCall<'_>) -> Result<Report, Error> {
        self.may_explain()?;
        self.report(op, call)
    }

    /// Whether the configuration lets explanations out.
    pub fn may_explain(&self) -> Result<(), Error> {
        if self.state.snapshot.spec().settings.explains { Ok(()) } else { Err(Error::ExplainDisabled) }
    }

    /// Everything about the choice of a kernel for a call, for LayerZero's own reports.
    pub fn report(&self, op: &str, call: &NamedCall<'_>) -> Result<Report, Error> {
        let state = &self.state;
        let (_, bound) = self.bind(op, call)?;
        let decision = self.decide(&bound.query);
        let mut report = Report::new(&state.snapshot, &decision);
        if decision.chosen().is_none()
            && let Error::NoKernel { rejections, .. } = no_kernel(&state.snapshot, &decision)
        {
            let pieces = self.pieces(op, call, &bound, &rejections);
            report.pieces = pieces.and_then(Result::ok).map(|pieces| pieces.count);
        }
        let outside = self.outside_table(&bound.query);
        report.outside_table = outside.map(|reason| ReasonReport { message: reason.to_string(), reason });
        for candidate in &mut report.candidates {
            let is_it = |k: &KernelDescriptor| k.id == candidate.kernel_id && k.version == candidate.version;
            let kernel = state.snapshot.kernels().map(|(_, k)| k).find(|k| is_it(k));
            let drifted = kernel.and_then(|k| self.core.live.of(&state.snapshot, k, &bound.query));
            candidate.live_us = drifted.map(|drifted| drifted.live_us);
        }
        Ok(report)
    }

    /// The kernel that serves a call.
    pub fn which(&self, op: &str, call: &NamedCall<'_>) -> Result<Selection, Error> {
        let state = &self.state;
        let (_, bound) = self.bind(op, call)?;
        let decision = self.decide(&bound.query);
        let Some(chosen) = decision.chosen() else {
            return Err(no_kernel(&state.snapshot, &decision));
        };
        Ok(Selection::new(&state.snapshot, &bound.query, chosen))
    }

    /// The chain for a call: the kernels that would be tried, in order, with `@version` where an id has several.
    pub fn select(&self, op: &str, call: &NamedCall<'_>) -> Result<Vec<String>, Error> {
        let state = &self.state;
        let (_, bound) = self.bind(op, call)?;
        match self.chain(&bound.query) {
            Some(chain) => Ok(chain.steps().map(|(kernel, _)| state.snapshot.name(kernel)).collect()),
            None => Err(no_kernel(&state.snapshot, &state.snapshot.select(&bound.query))),
        }
    }

    /// Why a kernel cannot serve a call; empty when it can. `kernel_id` may carry `@version`. Of an alias, whether one of
    /// its kernels can, and otherwise why the first cannot.
    pub fn validate(&self, kernel_id: &str, call: &NamedCall<'_>) -> Result<Vec<Reason>, Error> {
        let state = &self.state;
        let mut first = None;
        for ix in find_kernels(&state.snapshot, kernel_id)? {
            let (_, bound) = self.bind(&state.snapshot.kernel(ix).operation, call)?;
            let decision = self.decide(&bound.query);
            let elsewhere = || vec![elsewhere(&state.snapshot, ix, &bound.query)];
            let reasons =
                decision.candidates.into_iter().find(|c| c.kernel == ix).map_or_else(elsewhere, |c| c.reasons);
            if reasons.is_empty() {
                return Ok(reasons);
            }
            first = first.or(Some(reasons));
        }
        Ok(first.unwrap_or_default())
    }
}

impl Core {
    /// [`Scope::bind`] outside of any context.
    pub fn bind<'a>(&self, op: &str, call: &NamedCall<'a>) -> Result<(OrderedCall<'a>, Bound), Error> {
        self.process().bind(op, call)
    }

    /// A call that is written down, as selection sees it.
    pub(crate) fn bind_call(&self, call: &CallSpec, device: DeviceIx) -> Result<Query, Error> {
        self.bind(&call.op, &call.named(device, Context::default())).map(|(_, bound)| bound.query)
    }

    /// [`Scope::chain`] outside of any context.
    pub fn chain(&self, query: &Query) -> Option<Chain> {
        self.process().chain(query)
    }

    /// [`Scope::steps`] outside of any context.
    pub fn steps(&self, query: &Query) -> Result<Vec<Step>, Error> {
        self.process().steps(query)
    }

    /// [`Scope::explain`] outside of any context.
    pub fn explain(&self, op: &str, call: &NamedCall<'_>) -> Result<Report, Error> {
        self.process().explain(op, call)
    }

    /// [`Scope::report`] outside of any context.
    pub fn report(&self, op: &str, call: &NamedCall<'_>) -> Result<Report, Error> {
        self.process().report(op, call)
    }

    /// [`Scope::which`] outside of any context.
    pub fn which(&self, op: &str, call: &NamedCall<'_>) -> Result<Selection, Error> {
        self.process().which(op, call)
    }

    /// [`Scope::select`] outside of any context.
    pub fn select(&self, op: &str, call: &NamedCall<'_>) -> Result<Vec<String>, Error> {
        self.process().select(op, call)
    }

    /// [`Scope::validate`] outside of any context.
    pub fn validate(&self, kernel_id: &str, call: &NamedCall<'_>) -> Result<Vec<Reason>, Error> {
        self.process().validate(kernel_id, call)
    }

    /// Gives a warning, unless its cause gave one a moment ago. A fallback is an event as well, each time.
    pub fn warn(&self, warning: &Warning) {
        if let Warning::FellBack { op, failed, error, served, .. } = warning {
            let (op, error) = ((*op).to_owned(), error.clone());
            self.guard.emit(Event::FellBack { op, failed: failed.clone(), served: served.clone(), error });
        }
        self.warnings.give(warning);
    }

    /// The registered kernels, of one operation (or alias) or of all.
    pub fn list_kernels(&self, op: Option<&str>) -> Result<Vec<KernelInfo>, Error> {
        let state = self.state.load();
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
            let ready = || devices().find(|(_, at)| state.snapshot.static_reasons(ix, *at).is_empty());
            let made_for = || devices().find(|(device, _)| kernel.platforms.contains(&device.platform));
            let device = ready().or_else(made_for).map_or(lz_model::DeviceIx(0), |(_, at)| at);
            state.snapshot.static_reasons(ix, device).iter().map(ToString::to_string).collect()
        };
        let info = |ix: KernelIx, kernel: &KernelDescriptor| KernelInfo {
            kernel_id: kernel.id.clone(),
            version: kernel.version.clone(),
            backend: kernel.backend.clone(),
            library: kernel.library().to_owned(),
            aliases: kernel.aliases.clone(),
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
        self.state.load().snapshot.spec().backends.values().cloned().collect()
    }

    /// The devices.
    pub fn devices(&self) -> Vec<DeviceSpec> {
        self.state.load().snapshot.spec().devices.clone()
    }

    /// What the cache did so far.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }
}

/// The kernel of an id, or the kernels of an alias; never none.
pub(crate) fn find_kernels(snapshot: &Snapshot, kernel_id: &str) -> Result<Vec<KernelIx>, Error> {
    let (id, version) = kernel_id.rsplit_once('@').map_or((kernel_id, None), |(id, v)| (id, Some(v)));
    let in_version = |k: &KernelDescriptor| version.is_none_or(|v| k.version == v);
    if let Some((ix, _)) = snapshot.kernels().find(|(_, kernel)| kernel.id == id && in_version(kernel)) {
        return Ok(vec![ix]);
    }
    let answers = |k: &KernelDescriptor| in_version(k) && k.aliases.iter().any(|alias| alias == id);
    let named: Vec<KernelIx> = snapshot.kernels().filter(|(_, kernel)| answers(kernel)).map(|(ix, _)| ix).collect();
    if named.is_empty() {
        let names = snapshot.kernels().flat_map(|(_, k)| [&k.id].into_iter().chain(&k.aliases));
        let nearest = nearest(id, names.map(String::as_str)).map(str::to_owned);
        return Err(Error::UnknownKernel { id: kernel_id.to_owned(), nearest });
    }
    Ok(named)
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
    let only_unsafe = |r: &Rejection| matches!(r.reasons[..], [Reason::CudaGraphUnsafe { .. }]);
    if decision.query.context().capturing && rejections.iter().any(only_unsafe) {
        return Error::CudaGraphUnsafe { op, rejections };
    }
    Error::NoKernel { op, rejections }
}
