//! The path of calls that are not straight: first calls, special tensors and surroundings, results that need care,
//! kernels that fail.

use layerzero::model::{
    ArgumentKind, Call, Catalog, Context, DeviceIx, Layout, NamedCall, OutputSpec, ParamValue, Special,
};
use std::collections::VecDeque;
use std::time::Instant;

use layerzero::resilience::Admission;
use layerzero::resilience::rollout::Outcome;
use layerzero::{Error, Fault, Warning};
use pyo3::exceptions::{PyException, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::engine::engine;
use crate::front::{self, Front, Slots, Words};
use crate::route::{Route, RouteStep, Runner};
use crate::tensors::{Meta, Purpose, storage};
use crate::torch::Torch;
use crate::watched::{Before, Watching};
use crate::{adapted, error, events, host, registry};

/// The arguments of a call, read.
pub struct Arguments {
    /// Tensors by the function's places.
    pub metas: Vec<(usize, Meta)>,
    /// Scalars by name.
    pub params: Vec<(&'static str, ParamValue)>,
    /// The layout, when the caller says.
    pub layout: Option<Layout>,
}

/// A call that did not go straight.
pub struct Request<'a, 'py> {
    /// The function.
    pub front: &'static Front,
    /// Its arguments.
    pub slots: &'a Slots,
    /// Whether what surrounds the call counts.
    pub outside: bool,
    /// What describes it, and the version that was read before, when it can be described.
    pub words: Option<(u64, &'a Words)>,
    /// What was decided for it before.
    pub known: Option<Route>,
    /// The step that was tried already, and what it gave, which is not what was expected.
    pub tried: Option<(usize, PyResult<Bound<'py, PyAny>>)>,
}

impl<'py> Request<'_, 'py> {
    /// Serves it.
    pub fn serve(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        registry::ensure_loaded(py)?;
        let front = self.front;
        let slots = &mut self.slots.to_owned();
        if self.outside
            && self.words.is_none()
            && let Some(result) = elsewhere(py, front, slots)?
        {
            return Ok(result);
        }
        let _kept = packed(py, front, slots)?;
        let arguments = read(py, front, slots, Purpose::Run)?;
        let route = match self.known {
            Some(route) => route,
            None => {
                let mut route = decide(py, front, &arguments)?;
                route.shorten(py, slots);
                if let Some((version, words)) = self.words {
                    front::remember(py, front, version, words, &route);
                }
                route
            }
        };
        carry_out(py, front, slots, &arguments, &route, self.tried)
    }
}

/// Has the engine decide.
fn decide(py: Python<'_>, front: &'static Front, arguments: &Arguments) -> PyResult<Route> {
    let raise = |e: Error| error::engine(py, &e);
    let named = arguments.named(front, registry::context(py)?);
    let (_, bound) = engine().bind(front.signature.function.target, &named).map_err(raise)?;
    let op = Catalog::get().op(bound.query.op());
    let steps = engine().steps(&bound.query).map_err(raise)?;
    let trial = engine().comparison(&bound.query, &steps);
    let settings = &engine().config().settings;
    if let Some(first) = steps.first().filter(|_| settings.log_selections || settings.verbose) {
        events::selected(py, op.id(), &first.kernel.id, &bound.query)?;
    }
    let route = Route::new(py, front, (op, bound.query, bound.layout.map(|v| v.layout)), steps, trial);
    if route.steps.first().is_some_and(|step| step.kernel.reference) {
        engine().warn_of_reference(&bound.query);
    }
    Ok(route)
}

/// Packed values are read byte by byte, so that they must lie row by row; what does not is copied.
fn packed<'py>(py: Python<'py>, front: &Front, slots: &mut Slots) -> PyResult<Option<Bound<'py, PyAny>>> {
    if front.special(Special::Format).is_none_or(|at| given(py, slots, at).is_none()) {
        return Ok(None);
    }
    let at = front.tensors[0];
    let values = given(py, slots, at).filter(|v| v.hasattr("contiguous").unwrap_or(false));
    let values = values.map(|v| v.call_method0("contiguous")).transpose()?;
    if let Some(values) = &values {
        slots[at] = values.as_ptr();
    }
    Ok(values)
}

/// What the caller gave at a place; `None` counts as nothing.
pub fn given<'py>(py: Python<'py>, slots: &Slots, at: usize) -> Option<Bound<'py, PyAny>> {
    // SAFETY: slots hold live objects or null.
    unsafe { Bound::from_borrowed_ptr_or_opt(py, slots[at]) }.filter(|value| !value.is_none())
}

/// The arguments as keywords, for Python functions.
fn keywords<'py>(py: Python<'py>, front: &Front, slots: &Slots) -> PyResult<Bound<'py, PyDict>> {
    let kwargs = PyDict::new(py);
    for (at, argument) in front.signature.arguments.iter().enumerate() {
        // SAFETY: slots hold live objects or null.
        if let Some(value) = unsafe { Bound::from_borrowed_ptr_or_opt(py, slots[at]) } {
            kwargs.set_item(argument.name, value)?;
        }
    }
    Ok(kwargs)
}

/// Calls whose arguments have to be brought into another form first, and are then made anew: arrays of other libraries,
/// norms over several dimensions. `kernel` when just that one is to run.
fn foreign<'py>(
    py: Python<'py>,
    front: &'static Front,
    slots: &Slots,
    kernel: Option<&str>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let hand_to = |function: &str| {
        let arguments = (front.name(), PyTuple::empty(py), keywords(py, front, slots)?, kernel);
        py.import("layerzero.arrays")?.call_method1(function, arguments).map(Some)
    };
    let torch = Torch::find(py)?;
    for (at, object) in front.tensors.iter().filter_map(|&at| Some((at, given(py, slots, at)?))) {
        if torch.is_some_and(|torch| torch.is_tensor(&object)) {
            continue;
        }
        if !(object.hasattr("__dlpack__")? || object.hasattr("__array_interface__")?) {
            let name = front.signature.arguments[at].name;
            let kind = object.get_type().name()?;
            let text = format!("{}: '{name}' is a {kind}, expected a tensor", front.name());
            let hint = "pass a torch.Tensor, a numpy array or another DLPack producer";
            return Err(error::argument(py, "NOT_A_TENSOR", &text, hint));
        }
        if host::torch_is_there(py)? {
            return hand_to("call_arrays");
        }
    }
    if let Some(at) = front.special(Special::NormalizedShape)
        && let Some(shape) = given(py, slots, at)
        && shape.len().unwrap_or(1) != 1
    {
        return hand_to("call_flattened");
    }
    Ok(None)
}

/// Calls that belong to somebody else first: other arrays, tracing, autocast.
fn elsewhere<'py>(py: Python<'py>, front: &'static Front, slots: &Slots) -> PyResult<Option<Bound<'py, PyAny>>> {
    let hand_to = |module: &str, function: &str| {
        let none = PyTuple::empty(py);
        py.import(module)?.call_method1(function, (front.name(), none, keywords(py, front, slots)?)).map(Some)
    };
    let stands_in = |object: &Bound<'_, PyAny>| object.get_type().hasattr("__torch_function__").unwrap_or(false);
    let tensor_like = |object: &Bound<'_, PyAny>| Torch::known().is_some_and(|torch| torch.is_tensor(object));
    let mut given_tensors = front.tensors.iter().filter_map(|&at| given(py, slots, at));
    if given_tensors.any(|object| stands_in(&object) && !tensor_like(&object)) {
        return hand_to("layerzero.integrations.torch_ops", "call_traced");
    }
    if let Some(result) = foreign(py, front, slots, None)? {
        return Ok(Some(result));
    }
    let Some(torch) = Torch::find(py)? else { return Ok(None) };
    let tensors: Vec<(usize, Bound<'py, PyAny>)> =
        front.tensors.iter().filter_map(|&at| Some((at, given(py, slots, at)?))).collect();
    one_device(py, front, torch, &tensors)?;
    if torch.surroundings().special {
        return match torch.autocast(py)? {
            true => hand_to("layerzero.integrations.autocast", "call_autocast"),
            false => hand_to("layerzero.integrations.torch_ops", "call_traced"),
        };
    }
    let unreadable = |object: &Bound<'_, PyAny>| torch.is_tensor(object) && !torch.is_readable(object);
    if tensors.iter().any(|(_, object)| unreadable(object)) {
        return hand_to("layerzero.integrations.torch_ops", "call_traced");
    }
    Ok(None)
}

/// Tensors of one call are on one device; among those without memory nobody else would notice. A subclass sees the
/// operator and nothing before it, so that it is not asked.
fn one_device(py: Python<'_>, front: &Front, torch: &Torch, tensors: &[(usize, Bound<'_, PyAny>)]) -> PyResult<()> {
    let mut first: Option<(&str, String)> = None;
    for (at, object) in tensors.iter().filter(|(_, object)| torch.is_plain(object.as_ptr())) {
        let name = front.signature.arguments[*at].name;
        let device = object.getattr("device")?.str()?.to_string();
        match &first {
            None => first = Some((name, device)),
            Some((other, expected)) if *expected != device => {
                let text = format!("{}: '{name}' is on {device} but '{other}' is on {expected}", front.name());
                let hint = format!("move '{name}' to the device of '{other}'");
                return Err(error::invalid(py, "MIXED_DEVICES", &text, &hint));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Reads the arguments of a call, or of one that is only asked about, whose tensors may be fake.
pub fn read(py: Python<'_>, front: &'static Front, slots: &Slots, purpose: Purpose) -> PyResult<Arguments> {
    let mut arguments = Arguments { metas: Vec::new(), params: Vec::new(), layout: None };
    let name = front.name();
    for (at, argument) in front.signature.arguments.iter().enumerate() {
        let Some(value) = given(py, slots, at) else { continue };
        let wrong = |expected: &str| {
            let shown = value.repr().map_or_else(|_| "?".into(), |r| r.to_string());
            let text = format!("{name}: '{}' is {shown}, expected {expected}", argument.name);
            error::argument(py, "BAD_PARAM", &text, &format!("see help(lz.{name})"))
        };
        match argument.kind {
            ArgumentKind::Input(_) => arguments.metas.push((at, Meta::read(&value, name, argument.name, purpose)?)),
            ArgumentKind::Param(param) => {
                let value = crate::params::value(&value).ok_or_else(|| wrong("a bool, a number or a string"))?;
                // A default that is spelt out is no argument for those operations behind the function that lack it.
                let everywhere = || front.signature.ops().all(|op| op.param_index(param.name).is_some());
                if param.default.value() != Some(value) || everywhere() {
                    arguments.params.push((param.name, value));
                }
            }
            ArgumentKind::Special(Special::Window) => {
                let pair = crate::params::window(&value).ok_or_else(|| wrong("an integer or a pair of integers"))?;
                arguments.params.push(("window_left", ParamValue::Int(pair.0)));
                if let Some(right) = pair.1 {
                    arguments.params.push(("window_right", ParamValue::Int(right)));
                }
            }
            ArgumentKind::Special(Special::Layout) => {
                let text: String = value.extract().map_err(|_| wrong("a layout such as 'BSHD'"))?;
                arguments.layout = Some(text.parse().map_err(|_| wrong("one of BSHD, BHSD, NHD, HND"))?);
            }
            ArgumentKind::Special(_) => {}
        }
    }
    if let Some(format) = front.special(Special::Format).and_then(|at| given(py, slots, at)) {
        let format: String = format.str()?.to_string();
        let first = arguments.metas.first_mut().map(|(_, meta)| meta);
        if let Some(meta) = first {
            *meta = meta.clone().unpacked(py, &format, name, "values", purpose)?;
        }
    }
    if let Some(shape) = front.special(Special::NormalizedShape).and_then(|at| given(py, slots, at)) {
        let sizes = crate::params::sizes(&shape).unwrap_or_default();
        let input = arguments.metas.first().map(|(_, meta)| meta.shape.clone()).unwrap_or_default();
        if sizes.is_empty() || !input.ends_with(&sizes) {
            let shown = shape.repr()?.to_string();
            let text = format!("{name}: normalized_shape is {shown}, the input has shape {:?}", &input[..]);
            return Err(error::invalid(py, "WRONG_SHAPE", &text, "pass the sizes of the input's trailing dimensions"));
        }
        // Asked about over several dimensions: the same over one, of their product.
        for (_, meta) in arguments.metas.iter_mut().filter(|_| sizes.len() > 1) {
            if meta.shape.ends_with(&sizes) {
                meta.shape.truncate(meta.shape.len() - sizes.len());
                meta.shape.push(sizes.iter().product());
                meta.strides = None;
            }
        }
    }
    Ok(arguments)
}

impl Arguments {
    /// As the engine takes them.
    pub fn named(&self, front: &Front, context: Context) -> NamedCall<'_> {
        let name = |at: usize| front.signature.arguments[at].name;
        NamedCall {
            inputs: self.metas.iter().map(|(at, meta)| (name(*at), meta.as_meta())).collect(),
            params: self.params.clone(),
            layout: self.layout,
            device: self.metas.first().map_or(layerzero::model::DeviceIx(0), |(_, meta)| meta.device),
            context,
        }
    }
}

/// Runs the kernels of a route until one serves the call. `tried`: a step that was run already, and what it gave.
pub fn carry_out<'py>(
    py: Python<'py>,
    front: &'static Front,
    slots: &Slots,
    arguments: &Arguments,
    route: &Route,
    mut tried: Option<(usize, PyResult<Bound<'py, PyAny>>)>,
) -> PyResult<Bound<'py, PyAny>> {
    let job = Job::new(py, front, slots, arguments, route)?;
    let mut chain: Vec<(String, PyErr)> = Vec::new();
    // Those whose circuit is open: not tried, so that nothing fell back.
    let mut refused: Vec<(String, PyErr)> = Vec::new();
    let fallback = engine().with_snapshot(|s| s.spec().settings.fallback_enabled);
    // Those before the one that was tried were refused.
    let first = tried.as_ref().map_or(0, |(at, _)| *at);
    let mut left: VecDeque<&RouteStep> =
        route.steps.iter().skip(first).filter(|step| !matches!(step.runner, Runner::Nothing)).collect();
    while let Some(step) = left.pop_front() {
        let was_tried = tried.take();
        let admission = match engine().admit(step) {
            Ok(admission) => admission,
            // It ran before its circuit opened.
            Err(_) if was_tried.is_some() => Admission::Closed,
            Err(why) => {
                refused.push((step.kernel.id.clone(), PyRuntimeError::new_err(why)));
                continue;
            }
        };
        let at = route.steps.iter().position(|s| std::ptr::eq(s, step)).unwrap_or(0);
        let watching = if was_tried.is_none() { Watching::begin(py, front, &job.slots, route, at) } else { None };
        let before = job.before(step)?;
        let begun = Instant::now();
        let result = match was_tried {
            Some((_, result)) => result,
            None => {
                step.health.record_call();
                job.run(step)
            }
        };
        let took = begun.elapsed();
        let error = match result.and_then(|result| job.checked(step, result, before.as_ref())) {
            Ok(result) => {
                if let Some(watching) = watching {
                    watching.finish(py, front, route, &result, took)?;
                }
                engine().succeeded(step, admission, !chain.is_empty());
                job.tell_rollout(step, Outcome::OK);
                job.tell(step, &chain);
                return job.finish(result);
            }
            Err(error) => error,
        };
        // What is no `Exception` (an interrupt) is not the kernel's failure; a call that is wrong stays wrong.
        if !error.is_instance_of::<PyException>(py) || registry::is_callers_fault(py, &error)? {
            return Err(error);
        }
        step.doubt();
        job.tell_rollout(step, Outcome::FAILED);
        let (line, detail) = (error::one_line(py, &error), error.to_string());
        if engine().failed(step, admission, &line, &detail) == Fault::OutOfMemory {
            // The reference is the last resort even then.
            let needs = |step: &&RouteStep| (step.kernel.reference, engine().workspace_of(step, &route.query));
            left.make_contiguous().sort_by_key(needs);
        }
        chain.push((step.kernel.id.clone(), error));
        if !fallback || job.updates() {
            break;
        }
    }
    engine().nobody_served();
    refused.append(&mut chain);
    let chain = refused;
    let hint = match (job.updates(), fallback) {
        (true, _) => "a kernel that updates in place is not followed by another: its tensors may be half written",
        (false, false) => "fallback is disabled; enable it to end at the reference",
        (false, true) => "see each kernel's error",
    };
    Err(error::execution(py, route.op.id(), chain, hint))
}

/// One call under way.
pub struct Job<'a, 'py> {
    pub py: Python<'py>,
    pub front: &'static Front,
    pub slots: Slots,
    pub arguments: &'a Arguments,
    pub route: &'a Route,
    pub params: Vec<ParamValue>,
    pub expected: Vec<OutputSpec>,
    out: Option<Bound<'py, PyAny>>,
    /// Objects the slots point to that are not the caller's.
    _kept: Vec<Bound<'py, PyAny>>,
}

impl<'a, 'py> Job<'a, 'py> {
    pub fn new(
        py: Python<'py>,
        front: &'static Front,
        slots: &Slots,
        arguments: &'a Arguments,
        route: &'a Route,
    ) -> PyResult<Job<'a, 'py>> {
        let mut slots = *slots;
        let mut kept: Vec<Bound<'py, PyAny>> = Vec::new();
        // Kernels are given a pair as a tuple.
        if let Some(at) = front.special(Special::Window)
            && let Some(window) = given(py, &slots, at)
            && let Ok(list) = window.cast::<PyList>()
        {
            kept.push(list.to_tuple().into_any());
            slots[at] = kept[kept.len() - 1].as_ptr();
        }
        let seed = front.signature.arguments.iter().position(|a| a.name == "seed");
        let generator = front.special(Special::Generator).and_then(|at| given(py, &slots, at));
        if let Some(at) = seed.filter(|_| route.draws) {
            match (given(py, &slots, at), &generator) {
                (Some(_), Some(_)) => {
                    let text = format!("{}: both seed and generator were given", front.name());
                    return Err(error::invalid(py, "GIVEN_TWICE", &text, "give one of them"));
                }
                (Some(_), None) => {}
                (None, generator) => {
                    kept.push(host::draw_seed(py, generator.as_ref())?);
                    slots[at] = kept[kept.len() - 1].as_ptr();
                }
            }
        }
        let named = arguments.named(front, route.query.context());
        let ordered = route.op.in_order(&named).map_err(|e| error::call(py, &e))?;
        let mut params = route.op.params(&ordered.params).map_err(|e| error::call(py, &e))?.to_vec();
        let call = Call {
            inputs: &ordered.inputs,
            params: &params,
            layout: named.layout,
            device: named.device,
            context: named.context,
        };
        let expected = route.op.outputs(&call, &route.query);
        if let (Some(at), Some(index)) = (seed, route.op.param_index("seed"))
            && let Some(seed) = given(py, &slots, at).and_then(|s| crate::params::value(&s))
        {
            params[index] = seed;
        }
        let out = front.special(Special::Out).and_then(|at| given(py, &slots, at));
        if let (Some(out), Some(expected)) = (&out, expected.first()) {
            check_out(py, front, out, expected)?;
        }
        Ok(Job { py, front, slots, arguments, route, params, expected, out, _kept: kept })
    }

    /// Whether the call updates tensors in place.
    fn updates(&self) -> bool {
        !self.front.signature.updates().is_empty()
    }

    /// Runs one step.
    pub fn run(&self, step: &RouteStep) -> PyResult<Bound<'py, PyAny>> {
        match &step.runner {
            Runner::Python(call) if step.transforms.is_empty() => {
                // SAFETY: the slots are alive; the result is a new reference or an exception.
                unsafe { Bound::from_owned_ptr_or_err(self.py, call.prepare(&self.slots).call()) }
            }
            Runner::Python(_) => adapted::run(self, step),
            Runner::Host(executable) => host::run(self, executable),
            Runner::Nothing => Err(error::execution(self.py, self.route.op.id(), Vec::new(), "see lz.list_kernels()")),
        }
    }

    /// A result that is what the operation gives; anything else is a failure of the kernel. Looked at on the first call
    /// of a kind, on every call once a kernel has failed, and when it does not look like those before it.
    fn checked(
        &self,
        step: &RouteStep,
        result: Bound<'py, PyAny>,
        before: Option<&Before>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if !matches!(step.runner, Runner::Python(_)) {
            return Ok(result);
        }
        if engine().config().settings.debug {
            self.py.import("layerzero.checks")?.call_method0("synchronize")?;
        }
        if let Some(before) = before {
            self.no_new_nan_in_place(before)?;
        }
        if self.expected.is_empty() {
            // It updates tensors, and whatever its function returned is nobody's business.
            self.route.expect_nothing();
            return Ok(self.py.None().into_bound(self.py));
        }
        let results = self.results(&result)?;
        for (object, spec) in results.iter().zip(&self.expected) {
            check_result(object, spec, self.route.query.device())?;
        }
        if let Some(torch) = Torch::known() {
            self.route.expect(torch, &results);
        }
        if engine().config().settings.checked {
            self.no_new_nan(&result)?;
        }
        Ok(result)
    }

    /// The tensors of a result.
    pub fn results(&self, result: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        match self.expected.len() {
            0 => Ok(Vec::new()),
            1 => Ok(vec![result.clone()]),
            several => match result.cast::<PyTuple>() {
                Ok(tuple) if tuple.len() == several => Ok(tuple.iter().collect()),
                _ => Err(gave(format!("a {}, expected {several} tensors", kind(result)))),
            },
        }
    }

    /// Copies of what a kernel is about to update, where that will be checked.
    fn before(&self, step: &RouteStep) -> PyResult<Option<Before>> {
        let wanted = engine().config().settings.checked && self.updates() && matches!(step.runner, Runner::Python(_));
        wanted.then(|| Before::new(self.py, self.front, &self.slots, false)).transpose()
    }

    /// As [`Job::no_new_nan`], for tensors that were updated in place.
    fn no_new_nan_in_place(&self, before: &Before) -> PyResult<()> {
        let checks = self.py.import("layerzero.checks")?;
        let (after, copies): (Vec<_>, Vec<_>) = before.updated(self.py).into_iter().unzip();
        let after = PyTuple::new(self.py, after)?;
        let reference = self.route.steps.iter().find(|step| step.kernel.reference);
        if let Some(reference) = reference.filter(|_| !copies.is_empty())
            && checks.call_method1("has_nan", (&after,))?.is_truthy()?
        {
            before.run(self.py, self.front, self.route, reference)?;
            if checks.call_method1("has_more_nan", (&after, PyTuple::new(self.py, copies)?))?.is_truthy()? {
                return Err(gave("NaN where the reference has none".into()));
            }
        }
        Ok(())
    }

    /// A NaN the reference does not have is a failure. Only in checked mode: the reference is slow.
    fn no_new_nan(&self, result: &Bound<'py, PyAny>) -> PyResult<()> {
        let checks = self.py.import("layerzero.checks")?;
        let reference = self.route.steps.iter().find(|step| step.kernel.reference);
        let Some(reference) = reference.filter(|_| !self.updates()) else { return Ok(()) };
        if checks.call_method1("has_nan", (result,))?.is_truthy()? {
            let right = self.run(reference)?;
            if checks.call_method1("has_more_nan", (result, right))?.is_truthy()? {
                return Err(gave("NaN where the reference has none".into()));
            }
        }
        Ok(())
    }

    /// Warns when another kernel than the chosen one served the call.
    fn tell(&self, served: &RouteStep, chain: &[(String, PyErr)]) {
        if let Some((failed, error)) = chain.first() {
            let (failed, served) = (failed.clone(), served.kernel.id.clone());
            let factor = engine().cost_of(&self.route.query, &failed, &served);
            let error = error::one_line(self.py, error);
            engine().warn(&Warning::FellBack { op: self.route.op.id(), failed, error, served, factor });
        }
    }

    /// Puts how a candidate did to its rollout, when that is who served.
    fn tell_rollout(&self, step: &RouteStep, outcome: Outcome) {
        let serving = self.route.comparison.as_ref().filter(|c| c.serves);
        if let Some(comparison) = serving.filter(|_| std::ptr::eq(step, &self.route.steps[0])) {
            engine().tried(&comparison.rollout, outcome);
        }
    }

    /// The result as the function gives it.
    fn finish(&self, result: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(out) = &self.out {
            match out.hasattr("copy_")? {
                true => out.call_method1("copy_", (result,))?,
                false => self.py.import("numpy")?.call_method1("copyto", (out, result))?,
            };
            return Ok(out.clone());
        }
        if self.route.op.id() == "quantize" {
            let scale = self.front.signature.arguments.iter().position(|a| a.name == "scale");
            return match scale.and_then(|at| given(self.py, &self.slots, at)) {
                Some(_) => result.get_item(0),
                None => self.py.import("layerzero.arrays")?.getattr("Quantized")?.call1(result.cast::<PyTuple>()?),
            };
        }
        Ok(result)
    }
}

fn gave(what: String) -> PyErr {
    PyTypeError::new_err(format!("the kernel gave {what}"))
}

fn kind(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "?".into(), |n| n.to_string())
}

/// Whether one tensor of a result is what it should be: dtype, sizes, device.
fn check_result(object: &Bound<'_, PyAny>, spec: &OutputSpec, on: DeviceIx) -> PyResult<()> {
    let Some(torch) = Torch::known().filter(|torch| torch.is_tensor(object)) else {
        return Err(gave(format!("a {}, expected a tensor", kind(object))));
    };
    let (dtype, per_byte) = storage(spec.dtype);
    let mut shape = spec.shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last /= per_byte;
    }
    let found: Vec<i64> = object.getattr("shape")?.extract()?;
    let given = object.getattr("dtype")?.str()?.to_string();
    let given = given.trim_start_matches("torch.");
    if found != shape || given != dtype {
        return Err(gave(format!("{given} {found:?}, expected {dtype} {shape:?}")));
    }
    // Only of plain tensors it is known that they are where they say.
    if torch.is_plain(object.as_ptr()) {
        let found = object.getattr("device")?.str()?.to_string();
        let expected = match on.0 {
            0 => "cpu".to_owned(),
            number => format!("cuda:{}", number - 1),
        };
        if found != expected {
            return Err(gave(format!("a tensor on {found}, expected {expected}")));
        }
    }
    Ok(())
}

/// `out` must be what the call gives, and is left alone when it is not.
fn check_out(py: Python<'_>, front: &Front, out: &Bound<'_, PyAny>, expected: &OutputSpec) -> PyResult<()> {
    let found = Meta::read(out, front.name(), "out", Purpose::Run)?;
    if found.dtype != expected.dtype || found.shape != expected.shape {
        let text = format!(
            "{}: 'out' is {} {:?}, the result is {} {:?}",
            front.name(),
            found.dtype,
            &found.shape[..],
            expected.dtype,
            &expected.shape[..]
        );
        return Err(error::invalid(py, "WRONG_OUT", &text, "pass a tensor of just that dtype and shape, or none"));
    }
    Ok(())
}

/// The reasons of a failed selection, for those who run one kernel by name.
pub fn run_one<'py>(
    py: Python<'py>,
    front: &'static Front,
    kernel_id: &str,
    slots: &Slots,
) -> PyResult<Bound<'py, PyAny>> {
    if let Some(result) = foreign(py, front, slots, Some(kernel_id))? {
        return Ok(result);
    }
    let slots = &mut slots.to_owned();
    let _kept = packed(py, front, slots)?;
    let arguments = read(py, front, slots, Purpose::Run)?;
    let named = arguments.named(front, registry::context(py)?);
    let raise = |e: Error| error::engine(py, &e);
    let (_, bound) = engine().bind(front.signature.function.target, &named).map_err(raise)?;
    let step = engine().step_of(kernel_id, &bound.query).map_err(raise)?;
    let op = Catalog::get().op(bound.query.op());
    let route = Route::new(py, front, (op, bound.query, bound.layout.map(|v| v.layout)), vec![step], None);
    if matches!(route.steps[0].runner, Runner::Nothing) {
        let hint = "its library is described, but no adapter runs it here";
        return Err(error::execution(py, op.id(), Vec::new(), hint));
    }
    carry_out(py, front, slots, &arguments, &route, None)
}
