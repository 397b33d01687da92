//! Routes: what was decided for a call, prepared so that it can be carried out at once.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use layerzero::model::schema::{OpKind, Update};
use layerzero::model::{CallSpec, DeviceIx, Layout, Op, ParamValue, PluginOrigin, Query};
use layerzero::resilience::{Latency, Rollout};
use layerzero::selection::MemoryRange;
use layerzero::{Executable, Scope, Step};
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::finish::{self, Ending};
use crate::front::{Front, Slots};
use crate::native::NativeCall;
use crate::pycall::{Prepared, PyCall, PyKernel};
use crate::slow::Arguments;
use crate::torch::{Outline, Torch};

/// How a step is carried out. Most are Python functions, and those are to be in one piece with their step.
#[allow(clippy::large_enum_variant)]
pub enum Runner {
    /// By a Python function.
    Python(PyCall),
    /// By native code on host memory: as a call that can be made at once, where it can.
    Host(Option<NativeCall>),
    /// Not at all: it is only described.
    Nothing,
}

/// A call that can be made at once. It lives on the stack, and for one call.
#[allow(clippy::large_enum_variant)]
pub enum Ready<'a> {
    /// Of a Python function.
    Python(Prepared),
    /// Of native code.
    Native(&'a NativeCall),
}

impl Ready<'_> {
    /// Makes it: a new reference, or null with an exception set. `None` when it has to be made the other way after all.
    ///
    /// # Safety
    /// As [`Prepared::call`] and [`NativeCall::call`].
    #[inline]
    pub unsafe fn call(self, slots: &Slots) -> Option<*mut PyObject> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Ready::Python(prepared) => Some(prepared.call()),
                Ready::Native(call) => call.call(slots),
            }
        }
    }
}

/// A kernel to try.
pub struct RouteStep {
    /// The kernel, what must be done to the arguments first, its breaker and its counters.
    step: Step,
    /// How it is carried out.
    pub runner: Runner,
    /// Whether it can be called as it is. Cleared when it failed: the next calls look at what it gives.
    straight: AtomicBool,
    /// Whether every call of it is looked at: results are compared, tensors are updated in place, or the kernel is not
    /// LayerZero's own, so that nobody knows what it does to its inputs.
    pub watched: bool,
}

impl std::ops::Deref for RouteStep {
    type Target = Step;
    fn deref(&self) -> &Step {
        &self.step
    }
}

impl AsRef<Step> for RouteStep {
    fn as_ref(&self) -> &Step {
        &self.step
    }
}

impl RouteStep {
    fn new(py: Python<'_>, front: &'static Front, op: &'static Op, layout: Option<Layout>, step: Step) -> RouteStep {
        let runner = match &step.executable {
            Executable::Foreign(any) => match any.downcast_ref::<PyKernel>() {
                Some(kernel) => Runner::Python(PyCall::new(py, front, op, layout, kernel)),
                None => Runner::Nothing,
            },
            Executable::Described => Runner::Nothing,
            Executable::Static(_) | Executable::Dynamic(_) => Runner::Host(None),
        };
        RouteStep { step, runner, straight: AtomicBool::new(false), watched: false }
    }

    /// Imports the library of its kernel, where that was not done.
    pub fn import(&self, py: Python<'_>) -> PyResult<()> {
        if let Runner::Python(call) = &self.runner { call.import(py) } else { Ok(()) }
    }

    /// Whether a Python function runs it.
    pub fn is_python(&self) -> bool {
        matches!(self.runner, Runner::Python(_))
    }

    /// Whether its kernel draws from torch's generator where no seed is given.
    pub fn draws_itself(&self) -> bool {
        matches!(&self.runner, Runner::Python(call) if !call.wants_seed())
    }

    /// Whether native code runs it, on host memory.
    pub fn is_native(&self) -> bool {
        matches!(self.runner, Runner::Host(_))
    }

    /// No longer takes the straight path: it failed.
    pub fn doubt(&self) {
        self.straight.store(false, Ordering::Relaxed);
    }
}

/// What was decided for a call.
pub struct Decided {
    /// The operation it is.
    pub op: &'static Op,
    /// What selection looked at.
    pub query: Query,
    /// The layout of the call.
    pub layout: Option<Layout>,
    /// The kernels to try, in order.
    pub steps: Vec<RouteStep>,
    /// Whether random numbers are drawn.
    pub draws: bool,
    /// What the function gives of what a kernel gives.
    pub ending: Ending,
    /// One call in so many is timed, a power of two, less one.
    pub sampled: u64,
    /// How long its calls take: on a GPU the device, else the host.
    pub latency: Arc<Latency>,
    /// The call, written down; none for a kernel that somebody named.
    pub call: Option<Arc<CallSpec>>,
    /// A kernel in a rollout whose results are compared.
    pub comparison: Option<Comparison>,
    /// The free memory with which it was decided.
    memory: Option<Memory>,
    /// What its results look like, once one was seen.
    results: OnceLock<Vec<Outline>>,
}

/// With how much free memory a decision holds, where kernels take workspaces.
struct Memory {
    device: DeviceIx,
    /// Bytes that must stay free.
    headroom: i64,
    range: MemoryRange,
}

/// Two kernels whose results are compared: the candidate of a rollout and the one that serves, or the one that serves and the reference.
pub struct Comparison {
    /// The rollout; none when a share of the calls is compared with the reference (`verify: sample`).
    pub rollout: Option<Arc<Rollout>>,
    /// Whether the candidate serves the call, or runs beside it.
    pub serves: bool,
    /// The other of the two.
    pub other: RouteStep,
    /// Calls so far.
    pub calls: AtomicU64,
}

/// A shared [`Decided`]. Counted without atomics: it is only ever touched while holding the interpreter.
pub struct Route(Rc<Decided>);

impl std::ops::Deref for Route {
    type Target = Decided;
    fn deref(&self) -> &Decided {
        &self.0
    }
}

impl Route {
    /// The same route.
    pub fn share(&self) -> Route {
        Route(self.0.clone())
    }

    /// Prepares what the engine decided. `compared`: a kernel to be compared, and whether it is the one that serves.
    pub fn new(
        py: Python<'_>,
        front: &'static Front,
        (op, query, layout): (&'static Op, Query, Option<Layout>),
        (steps, memory): (Vec<Step>, MemoryRange),
        compared: Option<(Option<Arc<Rollout>>, Step, bool)>,
    ) -> Route {
        let draws = draws(op, &query);
        let settings = &engine().config().settings;
        // Results that need more than to be handed back, arguments that need more than to be handed over, and calls
        // that somebody wants to look at. Rows that are overwritten and read are saved first.
        let saves_rows = matches!(op.schema().update, Some(Update::Rows { .. }));
        let plain = !settings.checked && !settings.debug && !saves_rows && finish::prepare(py);
        let mut steps: Vec<RouteStep> =
            steps.into_iter().map(|step| RouteStep::new(py, front, op, layout, step)).collect();
        for step in steps.iter().filter(|_| plain) {
            let at_once = match &step.runner {
                Runner::Python(_) | Runner::Host(_) => true,
                Runner::Nothing => false,
            };
            step.straight.store(at_once && step.transforms.is_empty() && !step.unproven, Ordering::Relaxed);
        }
        // What is drawn differs from kernel to kernel.
        let compared = compared.filter(|(rollout, ..)| rollout.is_some() || !draws);
        let comparison = compared.map(|(rollout, other, serves)| Comparison {
            rollout,
            serves,
            other: RouteStep::new(py, front, op, layout, other),
            calls: AtomicU64::new(0),
        });
        let always = comparison.is_some() || !front.updated.is_empty();
        for step in &mut steps {
            step.watched = always || is_foreign(step);
        }
        // Another headroom is another version of the engine, which forgets the route.
        let headroom = i64::try_from(settings.memory_headroom_mb).unwrap_or(i64::MAX).saturating_mul(1 << 20);
        let memory = Memory { device: query.device(), headroom, range: memory };
        Route(Rc::new(Decided {
            op,
            query,
            layout,
            steps,
            draws,
            ending: Ending::of(op, &query),
            sampled: settings.health.sample_every.clamp(1, 1 << 32).next_power_of_two() - 1,
            latency: Arc::default(),
            call: None,
            comparison,
            memory: Some(memory).filter(|memory| !memory.range.is_any()),
            results: OnceLock::new(),
        }))
    }

    /// What call it is for, before anybody shares it.
    pub fn of_call(&mut self, call: CallSpec) {
        if let Some(decided) = Rc::get_mut(&mut self.0) {
            decided.call = Some(Arc::new(call));
        }
    }

    /// Whether what was decided still is: free memory has not moved past a workspace since. Free of charge where no kernel
    /// takes one.
    #[inline]
    pub fn still_holds(&self) -> bool {
        let fits = |m: &Memory| m.range.contains(engine().memory().available(m.device, m.headroom));
        self.memory.as_ref().is_none_or(fits)
    }

    /// The step to run as a call that can be made at once, if nothing else is to be done, and its place. The caller holds
    /// the route until the call is over. Steps whose breaker refuses them are passed over; one that may be probed is not
    /// for this path.
    #[inline]
    pub fn straight(&self, slots: &Slots) -> Option<(usize, Ready<'_>)> {
        for (at, step) in self.steps.iter().enumerate() {
            if !step.breaker.is_closed() {
                if engine().refuses(step) {
                    continue;
                }
                return None;
            }
            if !step.straight.load(Ordering::Relaxed) {
                return None;
            }
            return match &step.runner {
                Runner::Python(call) => Some((at, Ready::Python(call.prepare_settled(slots)?))),
                Runner::Host(call) => Some((at, Ready::Native(call.as_ref()?))),
                Runner::Nothing => None,
            };
        }
        None
    }

    /// Remembers what results look like. Those that cannot be described are not looked at again.
    pub fn expect(&self, torch: &Torch, results: &[Bound<'_, PyAny>]) {
        // SAFETY: live objects.
        let outline = |result: &Bound<'_, PyAny>| unsafe { torch.outline(result.as_ptr()) };
        if let Some(outlines) = results.iter().map(outline).collect::<Option<Vec<_>>>() {
            let _ = self.results.set(outlines);
        }
    }

    /// Remembers that there are no results.
    pub fn expect_nothing(&self) {
        let _ = self.results.set(Vec::new());
    }

    /// Whether a result looks as those before it did; also when none was seen.
    ///
    /// # Safety
    /// A live object, and this thread holds the interpreter.
    #[inline]
    pub unsafe fn looks_right(&self, torch: &Torch, result: *mut PyObject) -> bool {
        // SAFETY: live objects; the items of a tuple live as long as it.
        unsafe {
            match self.results.get().map(Vec::as_slice) {
                None => true,
                Some([]) => result == ffi::Py_None(),
                Some([one]) => torch.fits(result, one),
                Some(several) => {
                    ffi::PyTuple_CheckExact(result) != 0
                        && ffi::PyTuple_Size(result) as usize == several.len()
                        && (0..several.len())
                            .all(|i| torch.fits(ffi::PyTuple_GetItem(result, i as ffi::Py_ssize_t), &several[i]))
                }
            }
        }
    }

    /// Finds out which one call each step comes down to for arguments like these.
    pub fn shorten(
        &mut self,
        py: Python<'_>,
        scope: &Scope<'_>,
        front: &'static Front,
        slots: &Slots,
        arguments: &Arguments,
    ) {
        let Some(decided) = Rc::get_mut(&mut self.0) else { return };
        let (query, draws) = (decided.query, decided.draws);
        let requires_grad = query.context().requires_grad;
        let settled = arguments.settled(front, decided.op, &query).ok();
        for step in decided.steps.iter_mut().filter(|step| step.transforms.is_empty()) {
            match &mut step.runner {
                Runner::Python(call) => call.shorten(py, slots, draws, requires_grad),
                Runner::Host(call) => {
                    let memory = (scope.workspace_of(&step.step, &query), scope.bytes_of(&query), scope.most_threads());
                    *call = settled.as_ref().and_then(|(params, expected)| {
                        NativeCall::new(front, &step.step, (&query, draws), (params, expected), memory)
                    });
                }
                Runner::Nothing => {}
            }
        }
    }
}

/// Whether a kernel was not shipped with LayerZero.
fn is_foreign(step: &RouteStep) -> bool {
    let is_shipped = || {
        engine().with_snapshot(|s| {
            let backend = s.spec().backends.get(&step.kernel.backend);
            backend.is_some_and(|b| b.descriptor.origin == PluginOrigin::Builtin)
        })
    };
    matches!(step.runner, Runner::Python(_)) && (step.kernel.standalone || !is_shipped())
}

/// Whether a call draws random numbers: sampling does, attention when it drops weights.
fn draws(op: &Op, query: &Query) -> bool {
    let dropout = op.param_index("dropout_p").map(|i| query.param(i, &op.schema().params[i]));
    op.schema().kind == OpKind::Sampling || dropout.and_then(ParamValue::as_float).is_some_and(|p| p != 0.0)
}
