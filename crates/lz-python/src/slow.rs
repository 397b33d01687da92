//! The path of calls that are not straight: first calls, special tensors and surroundings, results that need care,
//! kernels that fail.

use layerzero::model::{
    ArgumentKind, CallError, CallSpec, Catalog, Context, Layout, NamedCall, Op, OutputSpec, ParamValue, Query, Special,
};
use layerzero::selection::MemoryRange;
use layerzero::{Ending, Error, OverlayId, Pieces, Scope};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::engine::engine;
use crate::front::{Front, Slots};
use crate::job::{Job, Making};
use crate::pycaller::PyCaller;
use crate::route::{Route, Runner};
use crate::tensors::{Meta, Purpose};
use crate::torch::Torch;
use crate::words::Words;
use crate::{context, error, events, host, interrupted, job, memory, pieces, process, registry, written};

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
    /// The context it is made in.
    pub overlay: OverlayId,
    /// What describes it, and the version that was read before, when it can be described and is not known to be the last
    /// call again.
    pub words: Option<(u64, &'a Words)>,
    /// What was decided for it before.
    pub known: Option<Route>,
    /// The step that was tried already, and what it gave, which is not what was expected.
    pub tried: Option<(usize, PyResult<Bound<'py, PyAny>>)>,
}

impl<'py> Request<'_, 'py> {
    /// Serves it.
    pub fn serve(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some((_, Err(error))) = &self.tried
            && let Some(interruption) = interrupted::by_the_caller(py, error, self.slots)
        {
            return Err(interruption);
        }
        process::stop_here_if_over(py);
        registry::ensure_loaded(py)?;
        let front = self.front;
        let slots = &mut self.slots.to_owned();
        if self.outside
            && self.words.is_none()
            && self.known.is_none()
            && let Some(result) = elsewhere(py, front, slots)?
        {
            return Ok(result);
        }
        let _kept = packed(py, front, slots)?;
        let arguments = read(py, front, slots, Purpose::Run)?;
        // Before a route is remembered: calls that are described alike are wrong alike.
        if self.tried.is_none() {
            written::check(py, front, slots)?;
        }
        let scope = engine().scope(self.overlay);
        let route = match self.known {
            Some(route) => route,
            None => {
                let mut route = match decide(py, &scope, front, slots, &arguments)? {
                    Choice::Route(route) => route,
                    Choice::Pieces(op, made) => return pieces::make(py, front, op, slots, &made),
                };
                job::check_given_out(py, front, slots, &arguments, &route)?;
                route.shorten(py, &scope, front, slots, &arguments);
                // While the program ends every call of another thread has to come by here.
                if let Some((version, words)) = self.words.filter(|_| !process::is_ending()) {
                    memory::remember(py, front.index, version, words, &route);
                }
                route
            }
        };
        carry_out(py, &scope, front, slots, &arguments, &route, self.tried)
    }
}

/// What was decided for a call.
enum Choice {
    /// The kernels to try.
    Route(Route),
    /// None can launch it as a whole: how the operation's batch is split.
    Pieces(&'static str, Pieces),
}

/// Has the engine decide.
fn decide(
    py: Python<'_>,
    scope: &Scope<'_>,
    front: &'static Front,
    slots: &Slots,
    arguments: &Arguments,
) -> PyResult<Choice> {
    let raise = |e: Error| error::engine(py, &e);
    let named = arguments.named(front, registry::context(py)?);
    let (_, bound) = scope.bind(front.signature.function.target, &named).map_err(raise)?;
    let op = Catalog::get().op(bound.query.op());
    let (steps, memory) = match scope.steps_within(&bound.query) {
        Ok(found) => found,
        Err(Error::NoKernel { op, rejections }) => {
            let found = scope.pieces(front.signature.function.target, &named, &bound, &rejections);
            let refused = match found.map(|found| (found, pieces::refusal(py, front, slots))) {
                Some((Ok(pieces), None)) => return Ok(Choice::Pieces(op, pieces)),
                Some((Ok(_), Some(why))) => Some(why.to_owned()),
                Some((Err(why), _)) => Some(why.to_string()),
                None => None,
            };
            let raised = raise(Error::NoKernel { op, rejections });
            if let Some(why) = refused {
                raised.value(py).call_method1("add_note", (format!("The batch cannot be split: {why}."),))?;
            }
            return Err(raised);
        }
        Err(error) => return Err(raise(error)),
    };
    if engine().decided(scope, &named, &bound).map_err(raise)? {
        py.import("layerzero.warm_up")?.call_method0("wake")?;
    }
    if engine().with_config(|c| c.settings.perfdb.auto_tune && c.settings.perfdb.enabled) {
        py.import("layerzero.auto_tuning")?.call_method0("wake")?;
    }
    let compared =
        scope.comparison(&bound.query, &steps).map(|(rollout, other, serves)| (Some(rollout), other, serves));
    let compared = compared.or_else(|| scope.sample_with(&bound.query, &steps).map(|other| (None, other, true)));
    let settings = &engine().config().settings;
    if let Some(first) = steps.first().filter(|_| settings.log_selections || settings.verbose) {
        events::selected(py, op.id(), &first.kernel.id, &bound.query)?;
    }
    let mut route = Route::new(py, front, (op, bound.query, bound.layout.map(|v| v.layout)), (steps, memory), compared);
    route.of_call(CallSpec::canonical(&named, &bound));
    if route.steps.first().is_some_and(|step| step.kernel.reference) {
        scope.warn_of_reference(&bound.query);
    }
    Ok(Choice::Route(route))
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
    // Looked for first: to the first call of a process torch is not known yet, and its tensors are no stand-ins.
    let torch = Torch::find(py)?;
    let stands_in = |object: &Bound<'_, PyAny>| object.get_type().hasattr("__torch_function__").unwrap_or(false);
    let tensor_like = |object: &Bound<'_, PyAny>| torch.is_some_and(|torch| torch.is_tensor(object));
    let mut given_tensors = front.tensors.iter().filter_map(|&at| given(py, slots, at));
    if given_tensors.any(|object| stands_in(&object) && !tensor_like(&object)) {
        return hand_to("layerzero.integrations.torch_operators.torch_ops", "call_traced");
    }
    if let Some(result) = foreign(py, front, slots, None)? {
        return Ok(Some(result));
    }
    let Some(torch) = torch else { return Ok(None) };
    let tensors: Vec<(usize, Bound<'py, PyAny>)> =
        front.tensors.iter().filter_map(|&at| Some((at, given(py, slots, at)?))).collect();
    one_device(py, front, torch, &tensors)?;
    if torch.surroundings().special {
        return match torch.autocast(py)? {
            true => hand_to("layerzero.integrations.torch_operators.autocast", "call_autocast"),
            false => hand_to("layerzero.integrations.torch_operators.torch_ops", "call_traced"),
        };
    }
    let unreadable = |object: &Bound<'_, PyAny>| torch.is_tensor(object) && !torch.is_readable(object);
    if tensors.iter().any(|(_, object)| unreadable(object)) {
        return hand_to("layerzero.integrations.torch_operators.torch_ops", "call_traced");
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
            let text = format!("{name}: '{}' is {}, expected {expected}", argument.name, error::shown(&value));
            error::argument(py, "BAD_PARAM", &text, &format!("see help(lz.{name})"))
        };
        match argument.kind {
            ArgumentKind::Input(_) => arguments.metas.push((at, Meta::read(&value, name, argument.name, purpose)?)),
            ArgumentKind::Param(param) => {
                // A text that is no value of it is refused before it is interned, which is for good.
                if let Some(text) = crate::params::refused_text(&value, param.ty) {
                    let op = front.signature.ops().next().map_or(name, |op| op.id());
                    let (param, got, expected) = (param.name, text, param.ty.expected());
                    return Err(error::call(py, &CallError::BadParam { op, param, got, expected }));
                }
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
            let shown = error::shown(&shape);
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
        let device = self.metas.first().map_or(layerzero::model::DeviceIx(0), |(_, meta)| meta.device);
        let cuda = if device.0 > 0 { crate::devices::cuda_index(device) } else { None };
        let capturing = cuda.zip(Torch::known()).is_some_and(|(index, torch)| torch.is_capturing(index));
        let context = Context { capturing: capturing || context.capturing, ..context };
        NamedCall {
            inputs: self.metas.iter().map(|(at, meta)| (name(*at), meta.as_meta())).collect(),
            params: self.params.clone(),
            layout: self.layout,
            device,
            context,
        }
    }
}

impl Arguments {
    /// Every parameter of a call, defaults filled in, and the tensors it will give.
    pub fn settled(
        &self,
        front: &Front,
        op: &Op,
        query: &Query,
    ) -> Result<(Vec<ParamValue>, Vec<OutputSpec>), CallError> {
        let named = self.named(front, query.context());
        let ordered = op.in_order(&named)?;
        op.settled(&named, &ordered, query)
    }
}

/// Runs the kernels of a route until one serves the call. `tried`: a step that was run already, and what it gave.
pub fn carry_out<'py>(
    py: Python<'py>,
    scope: &Scope<'_>,
    front: &'static Front,
    slots: &Slots,
    arguments: &Arguments,
    route: &Route,
    tried: Option<(usize, PyResult<Bound<'py, PyAny>>)>,
) -> PyResult<Bound<'py, PyAny>> {
    let begun = tried.as_ref().map(|(at, _)| *at);
    let job = Job::new(Making { py, scope, front, route }, slots, arguments)?;
    let mut caller = PyCaller { job: &job, tried: tried.map(|(_, result)| result), versions: None, saved: None };
    match scope.serve(&route.query, &route.steps, begun, &mut caller) {
        Ending::Served { output, .. } => job.finish(output),
        Ending::Ended { error, .. } => Err(error.into_raised()),
        Ending::Unserved { decide_again: true, failed, .. } => {
            // Who was wrong is out: the next decision names who serves instead, or says that nobody can.
            let scope = engine().scope(scope.overlay());
            let next = match decide(py, &scope, front, slots, arguments)? {
                Choice::Route(route) => route,
                Choice::Pieces(op, made) => return pieces::make(py, front, op, slots, &made),
            };
            if let (Some((at, raised)), Some(serves)) = (failed.into_iter().next(), next.steps.first()) {
                let error = error::one_line(py, &raised.into_raised());
                scope.tell_fallback(&next.query, &route.steps[at], serves, error);
            }
            carry_out(py, &scope, front, slots, arguments, &next, None)
        }
        Ending::Unserved { refused, failed, .. } => {
            let id = |at: usize| route.steps[at].kernel.id.clone();
            let refused = refused.into_iter().map(|(at, why)| (id(at), PyRuntimeError::new_err(why)));
            let failed = failed.into_iter().map(|(at, error)| (id(at), error.into_raised()));
            let chain: Vec<(String, PyErr)> = refused.chain(failed).collect();
            let fallback = scope.snapshot().spec().settings.fallback_enabled;
            let hint = match (caller.is_half_written(), fallback) {
                (true, _) => "the tensors it updates may be half written, so no other kernel was tried",
                (false, false) => "fallback is disabled; enable it to end at the reference",
                (false, true) => "see each kernel's error",
            };
            Err(error::execution(py, route.op.id(), chain, hint))
        }
    }
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
    written::check(py, front, slots)?;
    let scope = context::scope(py);
    let (_, bound) = scope.bind(front.signature.function.target, &named).map_err(raise)?;
    let step = scope.step_of(kernel_id, &bound.query).map_err(raise)?;
    let op = Catalog::get().op(bound.query.op());
    let route =
        Route::new(py, front, (op, bound.query, bound.layout.map(|v| v.layout)), (vec![step], MemoryRange::ANY), None);
    if matches!(route.steps[0].runner, Runner::Nothing) {
        let hint = "its library is described, but no adapter runs it here";
        return Err(error::execution(py, op.id(), Vec::new(), hint));
    }
    experiment(py, &scope, front, slots, &arguments, &route)
}

/// Runs the one kernel of a route because somebody named it. That is an experiment: whatever becomes of it, no circuit and
/// no level moves.
fn experiment<'py>(
    py: Python<'py>,
    scope: &Scope<'_>,
    front: &'static Front,
    slots: &Slots,
    arguments: &Arguments,
    route: &Route,
) -> PyResult<Bound<'py, PyAny>> {
    let (step, op) = (&route.steps[0], route.op.id());
    let job = Job::new(Making { py, scope, front, route }, slots, arguments)?;
    let id = step.kernel.id.clone();
    if let Err(why) = engine().admit_anyway(step) {
        let chain = vec![(id, PyRuntimeError::new_err(why))];
        return Err(error::execution(py, op, chain, "start a new process"));
    }
    let before = job.before(step)?;
    step.health.record_call();
    let error = match job.run(step).and_then(|result| job.checked(step, result, before.as_ref())) {
        Ok(result) => return job.finish(result),
        Err(error) => error,
    };
    if let Some(interruption) = interrupted::by_the_caller(py, &error, &job.slots) {
        return Err(interruption);
    }
    if registry::is_callers_fault(py, &error)? {
        return Err(error);
    }
    engine().experiment_failed(step, &error::one_line(py, &error), &error.to_string());
    let hint = if job.updates() { "its tensors may be half written" } else { "see the kernel's error" };
    Err(error::execution(py, op, vec![(id, error)], hint))
}
