//! Calls that somebody looks at: one in so many is timed, and kernels in a rollout are compared.

use std::sync::atomic::Ordering;

use layerzero::resilience::rollout::{Compared, RolloutCall};
use layerzero::selection::Evidence;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::front::{Front, Slots};
use crate::job::{Job, Making};
use crate::route::{Comparison, Ready, Route, RouteStep};
use crate::sampled::{self, Stopwatch, Wanted};
use crate::tensors::Purpose;
use crate::torch::Torch;
use crate::versions::Versions;
use crate::{context, error, host, interrupted, slow, written};

/// Makes a straight call and looks at it. The answer is the serving kernel's, whatever else happens; `None` when the call
/// must not be made like this. `sampled`: it is one of those that are timed.
///
/// # Safety
/// As [`Ready::call`].
#[cold]
pub unsafe fn call(
    front: &'static Front,
    slots: &Slots,
    route: &Route,
    at: usize,
    ready: Ready<'_>,
    sampled: bool,
) -> Option<*mut PyObject> {
    // SAFETY: the slots are live, and this thread holds the interpreter.
    if !front.updated.is_empty() && !unsafe { written::apart(front, slots) } {
        return None;
    }
    let (watching, versions, mut watch) = Python::attach(|py| {
        let versions = route.steps[at].watched.then(|| Versions::read(py, front, slots));
        let watching = Watching::begin(py, front, slots, route, at);
        let wanted = match (&watching, sampled) {
            (Some(_), _) => Wanted::Compared,
            (None, true) => Wanted::Sampled { every: route.sampled == 0 },
            (None, false) => Wanted::No,
        };
        let watch = Stopwatch::start(py, &route.query, wanted);
        (watching, versions, watch)
    });
    // SAFETY: passed on.
    let result = unsafe { ready.call(slots) }?;
    Python::attach(|py| watch.stop(py));
    if result.is_null() {
        if let Some(versions) = versions {
            Python::attach(|py| blame(py, front, slots, route, at, &versions));
        }
        return Some(result);
    }
    let calls = sampled.then_some(route.sampled + 1);
    let Some(watching) = watching else {
        if sampled {
            Python::attach(|py| sampled::note(py, route, at, &watch, calls, None));
        }
        return Some(result);
    };
    Some(Python::attach(|py| {
        // SAFETY: a live object this thread owns.
        let served = unsafe { Bound::from_borrowed_ptr(py, result) };
        let scope = context::scope(py);
        match watching.finish(Making { py, scope: &scope, front, route }, &served, &watch, calls) {
            Ok(()) => result,
            Err(interrupt) => {
                // SAFETY: the result is owned here, and no longer wanted.
                unsafe { ffi::Py_DECREF(result) };
                interrupt.restore(py);
                std::ptr::null_mut()
            }
        }
    }))
}

/// Puts an exception that says so in the place of the one that is set, if the kernel that failed has changed its inputs.
fn blame(py: Python<'_>, front: &'static Front, slots: &Slots, route: &Route, at: usize, versions: &Versions) {
    let Some(raised) = PyErr::take(py) else { return };
    let changed = versions.changed(py, front, slots);
    let raised = match changed.is_empty() || interrupted::by_the_caller(py, &raised, slots).is_some() {
        true => raised,
        false => error::input_modified(py, route.op.id(), &route.steps[at].kernel.id, &changed, raised),
    };
    raised.restore(py);
}

/// A call whose result will be compared with another kernel's.
pub struct Watching<'a> {
    comparison: &'a Comparison,
    before: Before,
    /// The step that serves it.
    at: usize,
}

impl<'a> Watching<'a> {
    /// Begins to look at a call, if it is one of those that are compared. `at`: the step that will serve it.
    pub fn begin(
        py: Python<'_>,
        front: &'static Front,
        slots: &Slots,
        route: &'a Route,
        at: usize,
    ) -> Option<Watching<'a>> {
        let comparison = route.comparison.as_ref()?;
        // Who records torch's operations would miss what a native kernel does: it is not run, and not held to have failed.
        if comparison.other.is_native() && host::recorder(py).map_or(true, |recorder| recorder.is_some()) {
            return None;
        }
        // A candidate that serves is looked at now and then; one that runs beside, in its share of the calls.
        let call = comparison.calls.fetch_add(1, Ordering::Relaxed);
        let due = match comparison.serves {
            true => at == 0 && call & route.sampled == 0,
            false => comparison.rollout.as_ref().is_some_and(|rollout| rollout.samples(call)),
        };
        // A candidate beside others gets nothing of the caller's: who knows what it writes to. References give no gradients,
        // so that they get tensors that want none.
        let all = !comparison.serves || comparison.rollout.is_none() && route.query.context().requires_grad;
        let before = due.then(|| Before::new(py, front, slots, all))?.ok()?;
        Some(Watching { comparison, before, at })
    }

    /// Runs the other kernel and compares. Nothing that happens here reaches the caller but an interrupt. `watch`: what the
    /// call took; `calls`: how many it stands for, if it is sampled.
    pub fn finish(
        self,
        making: Making<'_, '_>,
        served: &Bound<'_, PyAny>,
        watch: &Stopwatch,
        calls: Option<u64>,
    ) -> PyResult<()> {
        let Watching { comparison, before, at } = self;
        let Making { py, route, .. } = making;
        // What it takes to import a library is no time of its kernel's; one that cannot be imported fails below.
        let _ = comparison.other.import(py);
        let (other, other_watch) = before.timed(making, &comparison.other);
        let rollout = comparison.rollout.as_ref().filter(|_| other.is_ok());
        let beside = other_watch.as_ref().zip(rollout).map(|(watch, r)| (watch, r.clone(), comparison.serves));
        sampled::note(py, route, at, watch, calls, beside);
        let micros = |watch: &Stopwatch| watch.on_host().map(|took| took.as_secs_f64() * 1e6);
        let (took, other_took) = (micros(watch), other_watch.as_ref().and_then(micros));
        // Of a GPU they come when it is done.
        let (serving_us, candidate_us) = if comparison.serves { (other_took, took) } else { (took, other_took) };
        let compared = other.and_then(|other| before.difference(py, route, served, &other));
        if let Err(error) = &compared
            && let Some(interruption) = interrupted::by_the_caller(py, error, &before.given)
        {
            return Err(interruption);
        }
        let Some(rollout) = &comparison.rollout else {
            return match compared {
                Ok((max_error, false)) => {
                    let evidence = differing(route, "a call that was sampled", &comparison.other, max_error);
                    engine().found_wrong(&route.steps[0].kernel, &route.query, evidence);
                    Ok(())
                }
                // The other kernel failed: that says nothing of this one.
                Ok(_) | Err(_) => Ok(()),
            };
        };
        let differs = compared.as_ref().ok().filter(|(_, agrees)| !agrees).map(|(max_error, _)| *max_error);
        let outcome = match compared {
            Ok((max_error, true)) => {
                RolloutCall { ok: true, compared: Compared::Agrees { max_error }, serving_us, candidate_us }
            }
            Ok((max_error, false)) => {
                engine().mismatched(rollout, &route.steps[0].kernel.id, max_error);
                RolloutCall { ok: true, compared: Compared::Differs { max_error }, serving_us, candidate_us }
            }
            // The kernel it is compared with failed: that says nothing of the candidate.
            Err(_) if comparison.serves => RolloutCall::OK,
            Err(_) => RolloutCall::FAILED,
        };
        engine().tried(rollout, outcome);
        if let Some(max_error) = differs.filter(|_| !rollout.is_armed()) {
            // It was rolled back: it is out of the operation, too, whoever would choose it.
            let (candidate, other) = match comparison.serves {
                true => (&route.steps[0], &comparison.other),
                false => (&comparison.other, &route.steps[0]),
            };
            let evidence = differing(route, "a call of a rollout", other, max_error);
            engine().take_out(&candidate.kernel, &route.query, evidence);
        }
        Ok(())
    }
}

/// What a call showed that was compared with another kernel's.
fn differing(route: &Route, call: &str, other: &RouteStep, max_error: f64) -> Evidence {
    let rtol = tolerance(route);
    let allowed = format!("at most {:?} of the value's size is allowed", 2.0 * rtol);
    Evidence {
        error: format!("{call} differs from {} by up to {max_error:?}; {allowed}", other.kernel.id),
        call: format!("{:?}", route.query),
        max_error: max_error.is_finite().then_some(max_error),
        tolerance: Some(2.0 * rtol),
    }
}

/// The operation's tolerance for the call, relative.
fn tolerance(route: &Route) -> f64 {
    route.op.tolerance(&route.query).rtol
}

/// Arguments for another kernel: what is updated in place is a copy, or everything is.
pub struct Before {
    given: Slots,
    slots: Slots,
    /// Copies of what is updated in place, with their places.
    updated: Vec<(usize, Py<PyAny>)>,
    _others: Vec<Py<PyAny>>,
}

impl Before {
    /// Copies what the call updates in place, or all its tensors.
    pub fn new(py: Python<'_>, front: &'static Front, slots: &Slots, all: bool) -> PyResult<Before> {
        let mut before = Before { given: *slots, slots: *slots, updated: Vec::new(), _others: Vec::new() };
        let updates = front.signature.updates();
        for &at in &front.tensors {
            let updated = updates.contains(&front.signature.arguments[at].name);
            let Some(tensor) = slow::given(py, slots, at).filter(|_| updated || all) else { continue };
            let copy = tensor.call_method0("detach")?.call_method0("clone")?;
            before.slots[at] = copy.as_ptr();
            match updated {
                true => before.updated.push((at, copy.unbind())),
                false => before._others.push(copy.unbind()),
            }
        }
        Ok(before)
    }

    /// Runs a step on the copies.
    pub fn run<'py>(&self, making: Making<'_, 'py>, step: &RouteStep) -> PyResult<Bound<'py, PyAny>> {
        self.timed(making, step).0
    }

    /// Runs a step on the copies, and times the kernel alone. No time when it did not come to that.
    fn timed<'py>(
        &self,
        making: Making<'_, 'py>,
        step: &RouteStep,
    ) -> (PyResult<Bound<'py, PyAny>>, Option<Stopwatch>) {
        let mut watch = None;
        (self.run_with(making, step, &mut watch), watch)
    }

    fn run_with<'py>(
        &self,
        making: Making<'_, 'py>,
        step: &RouteStep,
        watch: &mut Option<Stopwatch>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = making.py;
        let mut run = || {
            let arguments = slow::read(py, making.front, &self.slots, Purpose::Run)?;
            let job = Job::new(making, &self.slots, &arguments)?;
            let mut started = Stopwatch::start(py, &making.route.query, Wanted::Compared);
            let result = job.run(step);
            started.stop(py);
            *watch = Some(started);
            result
        };
        if Torch::known().is_none() {
            return run();
        }
        // Nobody wants its gradients, and hooks for saved tensors count what a call saves.
        let no_grad = py.import("torch")?.call_method0("no_grad")?;
        no_grad.call_method0("__enter__")?;
        let result = run();
        no_grad.call_method1("__exit__", (py.None(), py.None(), py.None()))?;
        result
    }

    /// What the call updated, and the copies, in pairs.
    pub fn updated<'py>(&self, py: Python<'py>) -> Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let pair = |(at, copy): &(usize, Py<PyAny>)| Some((slow::given(py, &self.given, *at)?, copy.bind(py).clone()));
        self.updated.iter().filter_map(pair).collect()
    }

    /// The largest difference, and whether it is within the operation's tolerance.
    fn difference(
        &self,
        py: Python<'_>,
        route: &Route,
        served: &Bound<'_, PyAny>,
        other: &Bound<'_, PyAny>,
    ) -> PyResult<(f64, bool)> {
        let rtol = tolerance(route);
        let checks = py.import("layerzero.checks")?;
        if self.updated.is_empty() {
            return checks.call_method1("difference", (served, other, rtol))?.extract();
        }
        let mut worst = (0.0f64, true);
        for (tensor, copy) in self.updated(py) {
            let (error, within): (f64, bool) = checks.call_method1("difference", (tensor, copy, rtol))?.extract()?;
            worst = (worst.0.max(error), worst.1 && within);
        }
        Ok(worst)
    }
}
