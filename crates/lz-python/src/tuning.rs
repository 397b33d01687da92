//! Measuring: kernels run on the arguments of one call, and a bench made of Python.

use layerzero::model::{CallSpec, Catalog, Context, DeviceIx, Facts, Meaning, Signature};
use layerzero::perf::bench::{Bench, Checked};
use layerzero::perf::request::{Request, RequestError};
use layerzero::perf::tune::{Progress, TuneOptions, Wanted};
use layerzero::perfdb::{Mode, Parts};
use layerzero::selection::MemoryRange;
use layerzero::{Engine, Error};
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::engine::engine;
use crate::front::{Front, Slots};
use crate::inspect::{json, slots};
use crate::job::{Job, Making};
use crate::process::{self, Call, detached};
use crate::route::{Route, Runner};
use crate::slow::{self, Arguments};
use crate::tensors::Purpose;
use crate::{context, error, registry};

/// The arguments of one call, on which kernels are run one by one, whatever the ranking.
#[pyclass(unsendable, frozen, module = "layerzero._native")]
pub struct Subject {
    front: &'static Front,
    kwargs: Py<PyDict>,
    /// Whether only legality counts, and not what the operator wants.
    legal: bool,
    /// By kernel. What a kernel settles at its first call (a plan, a launch) serves the later ones, as it does outside.
    routes: RefCell<HashMap<String, Route>>,
}

#[pymethods]
impl Subject {
    /// The call of a function with these arguments. `legal`: kernels run that can, whatever the operator wants.
    #[new]
    #[pyo3(signature = (function, kwargs, legal=false))]
    fn new(py: Python<'_>, function: &str, kwargs: Py<PyDict>, legal: bool) -> PyResult<Subject> {
        registry::ensure_loaded(py)?;
        Ok(Subject { front: Front::find(py, function)?, kwargs, legal, routes: RefCell::default() })
    }

    /// What a kernel gives.
    fn run<'py>(&self, py: Python<'py>, kernel: &str) -> PyResult<Bound<'py, PyAny>> {
        self.with(py, kernel, |job, _| {
            let step = &job.route.steps[0];
            let result = job.checked(step, job.run(step)?, None)?;
            job.finish(result)
        })
    }

    /// Calls a kernel so many times, each between `before` and `after`, and gives what `after` gave: microseconds.
    fn time_between(
        &self,
        py: Python<'_>,
        kernel: &str,
        calls: u32,
        before: Bound<'_, PyAny>,
        after: Bound<'_, PyAny>,
    ) -> PyResult<Vec<f64>> {
        self.with(py, kernel, |job, route| {
            let mut times = Vec::with_capacity(calls as usize);
            for _ in 0..calls.max(1) {
                before.call0()?;
                let result = remembered(py, job, route)?;
                times.push(after.call0()?.extract()?);
                drop(result);
            }
            Ok(times)
        })
    }

    /// How many microseconds one of so many calls of a kernel takes, one right after the other.
    fn time(&self, py: Python<'_>, kernel: &str, calls: u32) -> PyResult<f64> {
        self.with(py, kernel, |job, route| {
            let begun = Instant::now();
            for _ in 0..calls.max(1) {
                drop(remembered(py, job, route)?);
            }
            Ok(begun.elapsed().as_secs_f64() * 1e6 / f64::from(calls.max(1)))
        })
    }
}

/// Makes a call as one that is remembered is made.
#[inline]
fn remembered<'py>(py: Python<'py>, job: &Job<'_, 'py>, route: &Route) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the arguments are held by the job's dictionary; a new reference or an exception comes back.
    match route.straight(&job.slots).and_then(|(_, ready)| unsafe { ready.call(&job.slots) }) {
        // SAFETY: as above.
        Some(result) => unsafe { Bound::from_owned_ptr_or_err(py, result) },
        None => job.run(&route.steps[0]),
    }
}

impl Subject {
    fn with<'py, R>(
        &self,
        py: Python<'py>,
        kernel: &str,
        run: impl FnOnce(&Job<'_, 'py>, &Route) -> PyResult<R>,
    ) -> PyResult<R> {
        let _call = Call::begin();
        let slots: Slots = slots(py, self.front, &PyTuple::empty(py), Some(self.kwargs.bind(py)))?;
        let arguments: Arguments = slow::read(py, self.front, &slots, Purpose::Run)?;
        let kept = self.routes.borrow().get(kernel).map(Route::share);
        let route = match kept {
            Some(route) => route,
            None => {
                let route = self.route(py, kernel, &slots, &arguments)?;
                self.routes.borrow_mut().insert(kernel.to_owned(), route.share());
                route
            }
        };
        let scope = context::scope(py);
        let job = Job::new(Making { py, scope: &scope, front: self.front, route: &route }, &slots, &arguments)?;
        run(&job, &route)
    }

    fn route(&self, py: Python<'_>, kernel: &str, slots: &Slots, arguments: &Arguments) -> PyResult<Route> {
        let raise = |e: Error| error::engine(py, &e);
        let front = self.front;
        let named = arguments.named(front, registry::context(py)?);
        let scope = context::scope(py);
        let bound = scope.bind(front.signature.function.target, &named);
        let (_, bound) = bound.map_err(raise)?;
        let op = Catalog::get().op(bound.query.op());
        let step = match self.legal {
            true => scope.legal_step(kernel, &bound.query),
            false => engine().unbiased_step(kernel, &bound.query),
        };
        let step = step.map_err(raise)?;
        let layout = bound.layout.map(|v| v.layout);
        let mut route = Route::new(py, front, (op, bound.query, layout), (vec![step], MemoryRange::ANY), None);
        if matches!(route.steps[0].runner, Runner::Nothing) {
            let hint = "its library is described, but no adapter runs it here";
            return Err(error::execution(py, op.id(), Vec::new(), hint));
        }
        // Before anything is timed.
        route.steps[0].import(py)?;
        route.shorten(py, &scope, front, slots, arguments);
        Ok(route)
    }
}

/// What a call needs, for making inputs: its function, and of every tensor its name, dtype, shape, strides, and what its
/// numbers mean (with the size that bounds them).
#[pyfunction]
pub fn call_inputs<'py>(py: Python<'py>, call: &str, device: u16) -> PyResult<Bound<'py, PyDict>> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let spec = parse(call)?;
    let named = spec.named(DeviceIx(device), Context::default());
    let bound = context::scope(py).bind(&spec.op, &named);
    let (_, bound) = bound.map_err(|e| error::engine(py, &e))?;
    let op = Catalog::get().op(bound.query.op());
    let schema = op.schema();
    let signature = Signature::find(op.id()).or_else(|| Signature::find(&spec.op));
    let signature =
        signature.ok_or_else(|| PyValueError::new_err(format!("no function makes calls of {}", op.id())))?;
    let tensors = PyDict::new(py);
    for (name, tensor) in &spec.tensors {
        let Some(input) = op.input_index(name).map(|i| &schema.inputs[i]) else { continue };
        let meaning = Meaning::of(op, input, &bound.query);
        let known = |n: &str| n == input.name || input.also.contains(&n);
        let argument = signature.arguments.iter().find(|a| known(a.name)).map_or(input.name, |a| a.name);
        let updated = input.access == layerzero::model::schema::Access::ReadWrite;
        let sizes = (meaning.limit(), meaning.least());
        let described = (tensor.dtype.name(), &tensor.shape, &tensor.strides, meaning.name(), sizes, updated);
        tensors.set_item(argument, described)?;
    }
    let params = PyDict::new(py);
    let mut window: (Option<i64>, Option<i64>) = (None, None);
    for (name, value) in &spec.params {
        match (name.as_str(), value) {
            ("window_left", layerzero::model::ParamSpec::Int(n)) => window.0 = Some(*n),
            ("window_right", layerzero::model::ParamSpec::Int(n)) => window.1 = Some(*n),
            (name, layerzero::model::ParamSpec::Bool(b)) => params.set_item(name, b)?,
            (name, layerzero::model::ParamSpec::Int(i)) => params.set_item(name, i)?,
            (name, layerzero::model::ParamSpec::Float(x)) => params.set_item(name, x)?,
            (name, layerzero::model::ParamSpec::Str(s)) => params.set_item(name, s)?,
        }
    }
    if window != (None, None) {
        params.set_item("window", (window.0.unwrap_or(-1), window.1.unwrap_or(-1)))?;
    }
    let layout = spec.layout.or_else(|| schema.layout.setting().and(bound.layout).map(|verdict| verdict.layout));
    if let Some(layout) = layout.filter(|_| signature.arguments.iter().any(|a| a.name == "layout")) {
        params.set_item("layout", layout.name())?;
    }
    let query = &bound.query;
    let flops = engine()
        .with_snapshot(|s| s.device(query.device()).map_or(0.0, |device| op.flops(&Facts { op, query, device })));
    let reference = engine()
        .with_snapshot(|s| s.kernels_for(op.ix()).map(|ix| s.kernel(ix)).find(|k| k.reference).map(|k| k.id.clone()));
    let answer = PyDict::new(py);
    answer.set_item("op", op.id())?;
    answer.set_item("kind", schema.kind.name())?;
    answer.set_item("function", signature.function.name)?;
    answer.set_item("tensors", tensors)?;
    answer.set_item("params", params)?;
    answer.set_item("flops", flops)?;
    answer.set_item("reference", reference)?;
    answer.set_item("tolerance", op.tolerance(&bound.query).rtol)?;
    Ok(answer)
}

fn parse(call: &str) -> PyResult<CallSpec> {
    call.parse().map_err(|e| PyValueError::new_err(format!("{call:?} is no call: {e}")))
}

/// A bench whose methods are Python's.
pub struct PyBench {
    bench: Py<PyAny>,
    /// What is no failure of a kernel: an interrupt. It ends the measuring.
    raised: Option<PyErr>,
    /// Asked before each sample whether to stop.
    stop: Option<Py<PyAny>>,
}

impl PyBench {
    /// The bench of the package.
    pub fn new(py: Python<'_>) -> PyResult<PyBench> {
        let bench = py.import("layerzero.tuning.bench")?.getattr("Bench")?.call0()?;
        // What is measured is of the threads there are now.
        registry::threads(py)?;
        Ok(PyBench { bench: bench.unbind(), raised: None, stop: None })
    }

    fn ask<R>(&mut self, ask: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<R>) -> Result<R, String> {
        Python::attach(|py| {
            ask(py, self.bench.bind(py)).map_err(|raised| {
                let line = error::one_line(py, &raised);
                if !raised.is_instance_of::<PyException>(py) {
                    self.raised = Some(raised);
                }
                line
            })
        })
    }
}

fn mode_name(mode: Mode) -> &'static str {
    if mode == Mode::Graph { "graph" } else { "eager" }
}

impl Bench for PyBench {
    fn prepare(&mut self, call: &CallSpec, device: DeviceIx, mode: Mode) -> Result<(), String> {
        self.ask(|_, bench| bench.call_method1("prepare", (call.to_string(), device.0, mode_name(mode))).map(drop))
    }

    fn check(&mut self, kernel: &str) -> Checked {
        let asked = self.ask(|_, bench| {
            bench.call_method1("check", (kernel,))?.extract::<(String, Option<String>, Option<f64>, Option<f64>)>()
        });
        match asked {
            Ok((outcome, _, max_error, warmup_ms)) if outcome == "right" => {
                Checked::Right { max_error: max_error.filter(|e| e.is_finite()), warmup_ms }
            }
            Ok((outcome, why, ..)) if outcome == "wrong" => Checked::Wrong(why.unwrap_or_default()),
            Ok((_, why, ..)) => Checked::Failed(why.unwrap_or_default()),
            Err(error) => Checked::Failed(error),
        }
    }

    fn time(&mut self, kernel: &str, calls: u32) -> Result<f64, String> {
        self.ask(|_, bench| bench.call_method1("time", (kernel, calls))?.extract())
    }

    fn parts(&mut self, kernel: &str) -> Option<Vec<Parts>> {
        let asked = self.ask(|_, bench| bench.call_method1("parts", (kernel,))?.extract::<Option<Vec<(f64, f64)>>>());
        let seen = asked.ok().flatten()?;
        Some(seen.into_iter().map(|(host_us, device_us)| Parts { host_us, device_us }).collect())
    }

    fn is_interrupted(&mut self) -> bool {
        let stopped = Python::attach(|py| {
            py.check_signals()?;
            self.stop.as_ref().map_or(Ok(false), |stop| stop.call0(py)?.is_truthy(py))
        });
        let stopped = stopped.unwrap_or_else(|raised| {
            self.raised.get_or_insert(raised);
            true
        });
        stopped || self.raised.is_some() || process::is_ending()
    }
}

#[allow(clippy::result_large_err)]
fn wanted(py: Python<'_>, request: &str) -> PyResult<Vec<Wanted>> {
    registry::ensure_loaded(py)?;
    let bad = |what: String, hint: &str| error::configuration(py, "BAD_REQUEST", &what, hint);
    let request: Request =
        serde_json::from_str(request).map_err(|e| bad(format!("no request: {e}"), "see help(lz.tune)"))?;
    request.wanted(engine(), &context::scope(py)).map_err(|e| match e {
        RequestError::Call(e) => error::call(py, &e),
        other => bad(other.to_string(), &other.hint()),
    })
}

/// Everything about the choice of a kernel for a call that is written down: as JSON, and as a table.
#[pyfunction]
pub fn explain_call(py: Python<'_>, call: &str, device: u16) -> PyResult<(String, String)> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let spec = parse(call)?;
    let named = spec.named(DeviceIx(device), Context { threads: registry::threads(py)?, ..Context::default() });
    let report = context::scope(py).report(&spec.op, &named).map_err(|e| error::engine(py, &e))?;
    Ok((json(&report), report.to_string()))
}

/// Measures the calls a request (as JSON) asks for, and gives the report as JSON. `tell`
/// hears how far it is, as JSON, and says whether to go on; `stop` is asked before each sample. `regret`: nothing is kept, the choices are judged instead.
#[pyfunction]
#[pyo3(signature = (request, budget_s, samples, force, seed, regret, tell=None, stop=None))]
#[allow(clippy::too_many_arguments)]
pub fn measure(
    py: Python<'_>,
    request: &str,
    budget_s: f64,
    samples: u32,
    force: bool,
    seed: u64,
    regret: bool,
    tell: Option<Py<PyAny>>,
    stop: Option<Py<PyAny>>,
) -> PyResult<String> {
    let wanted = wanted(py, request)?;
    let budget = Duration::try_from_secs_f64(budget_s).map_err(|_| {
        PyValueError::new_err(format!("the budget is {budget_s} s, expected a number of seconds above zero"))
    })?;
    let options = TuneOptions { budget, samples: samples.max(1), force, seed, ..TuneOptions::default() };
    let mut bench = PyBench { stop, ..PyBench::new(py)? };
    let mut told: Option<PyErr> = None;
    let answer = {
        let mut hear = |progress: &Progress| {
            let Some(tell) = &tell else { return true };
            Python::attach(|py| {
                let go_on = tell.call1(py, (json(progress),)).and_then(|answer| answer.is_truthy(py));
                go_on.unwrap_or_else(|raised| {
                    told = Some(raised);
                    false
                })
            })
        };
        let engine: &Engine = engine();
        match regret {
            true => engine.regret(&wanted, &options, &mut bench, &mut hear).map(|report| json(&report)),
            false => engine.tune(&wanted, &options, &mut bench, &mut hear).map(|report| json(&report)),
        }
    };
    if let Some(raised) = bench.raised.or(told) {
        return Err(raised);
    }
    answer.map_err(|e| error::engine(py, &e))
}

/// Puts what the performance database knows in force, if there is one; gives how many measurements that are.
#[pyfunction]
pub fn learn(py: Python<'_>) -> usize {
    detached(py, || engine().learn_if_there())
}
