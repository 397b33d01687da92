//! One call under way: its arguments made ready, a kernel run, the result looked at and handed back.

use std::cell::OnceCell;

use layerzero::Scope;
use layerzero::model::{DeviceIx, OutputSpec, ParamValue, Special};
use layerzero::selection::Evidence;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::engine::engine;
use crate::finish::Ending;
use crate::front::{Front, Slots};
use crate::route::{Route, RouteStep, Runner};
use crate::slow::{Arguments, given};
use crate::tensors::{Meta, Purpose, storage};
use crate::torch::Torch;
use crate::watched::Before;
use crate::{adapted, error, host, interrupted, written};

/// What a call is, but for its arguments: in which scope, of which function, and what was decided for it.
#[derive(Clone, Copy)]
pub struct Making<'a, 'py> {
    pub py: Python<'py>,
    pub scope: &'a Scope<'a>,
    pub front: &'static Front,
    pub route: &'a Route,
}

/// One call under way.
pub struct Job<'a, 'py> {
    making: Making<'a, 'py>,
    pub slots: Slots,
    pub arguments: &'a Arguments,
    pub params: Vec<ParamValue>,
    pub expected: Vec<OutputSpec>,
    out: Option<Bound<'py, PyAny>>,
    /// A seed for kernels that do not draw from torch's generator themselves, once one of them is run.
    seed: OnceCell<Bound<'py, PyAny>>,
    /// Objects the slots point to that are not the caller's.
    _kept: Vec<Bound<'py, PyAny>>,
}

impl<'a, 'py> std::ops::Deref for Job<'a, 'py> {
    type Target = Making<'a, 'py>;
    fn deref(&self) -> &Making<'a, 'py> {
        &self.making
    }
}

impl<'a, 'py> Job<'a, 'py> {
    pub fn new(making: Making<'a, 'py>, slots: &Slots, arguments: &'a Arguments) -> PyResult<Job<'a, 'py>> {
        let Making { py, front, route, .. } = making;
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
                // A generator of the caller's gives a seed, whichever kernel draws.
                (None, Some(generator)) => {
                    kept.push(host::draw_seed(py, Some(generator))?);
                    slots[at] = kept[kept.len() - 1].as_ptr();
                }
                (_, None) => {}
            }
        }
        let settled = arguments.settled(front, route.op, &route.query);
        let (mut params, expected) = settled.map_err(|e| error::call(py, &e))?;
        if let (Some(at), Some(index)) = (seed, route.op.param_index("seed"))
            && let Some(seed) = given(py, &slots, at).and_then(|s| crate::params::value(&s))
        {
            params[index] = seed;
        }
        let out = front.special(Special::Out).and_then(|at| given(py, &slots, at));
        if let (Some(out), Some(expected)) = (&out, expected.first()) {
            check_out(py, front, out, expected)?;
        }
        Ok(Job { making, slots, arguments, params, expected, out, seed: OnceCell::new(), _kept: kept })
    }

    /// Whether the call updates tensors in place.
    pub fn updates(&self) -> bool {
        !self.front.signature.updates().is_empty()
    }

    /// The arguments as a step takes them: with a seed, unless its kernel draws from torch's generator.
    pub fn slots_for(&self, step: &RouteStep) -> PyResult<Slots> {
        let mut slots = self.slots;
        if let Some(at) = self.seed_to_draw().filter(|_| !step.draws_itself()) {
            slots[at] = self.drawn_seed()?.as_ptr();
        }
        Ok(slots)
    }

    /// The parameters as a native kernel takes them.
    pub fn params_drawn(&self) -> PyResult<Vec<ParamValue>> {
        let mut params = self.params.clone();
        if self.seed_to_draw().is_some()
            && let Some(index) = self.route.op.param_index("seed")
            && let Some(seed) = crate::params::value(self.drawn_seed()?)
        {
            params[index] = seed;
        }
        Ok(params)
    }

    /// The place of a seed that the caller left to us.
    fn seed_to_draw(&self) -> Option<usize> {
        let at = self.front.signature.arguments.iter().position(|a| a.name == "seed")?;
        (self.route.draws && given(self.py, &self.slots, at).is_none()).then_some(at)
    }

    /// Drawn once for a call, whoever runs it.
    fn drawn_seed(&self) -> PyResult<&Bound<'py, PyAny>> {
        if self.seed.get().is_none() {
            let _ = self.seed.set(host::draw_seed(self.py, None)?);
        }
        self.seed.get().ok_or_else(|| PyTypeError::new_err("no seed was drawn"))
    }

    /// Runs one step.
    pub fn run(&self, step: &RouteStep) -> PyResult<Bound<'py, PyAny>> {
        step.import(self.py)?;
        match &step.runner {
            Runner::Python(call) if step.transforms.is_empty() => {
                let slots = self.slots_for(step)?;
                // SAFETY: the slots are alive; the result is a new reference or an exception.
                unsafe { Bound::from_owned_ptr_or_err(self.py, call.prepare(&slots).call()) }
            }
            Runner::Python(_) => adapted::run(self, step),
            Runner::Host(_) => host::run(self, step),
            Runner::Nothing => Err(error::execution(self.py, self.route.op.id(), Vec::new(), "see lz.list_kernels()")),
        }
    }

    /// A result that is what the operation gives; anything else is a failure of the kernel. Looked at on the first call
    /// of a kind, on every call once a kernel has failed, and when it does not look like those before it.
    pub fn checked(
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
            self.no_new_nan_in_place(step, before)?;
        }
        if self.expected.is_empty() {
            // It updates tensors, and whatever its function returned is nobody's business.
            self.route.expect_nothing();
            return Ok(self.py.None().into_bound(self.py));
        }
        let results = self.results(&result)?;
        for (object, spec) in results.iter().zip(&self.expected) {
            check_result(object, spec, self.route.query.device(), self.is_plain())?;
        }
        if let Some(torch) = Torch::known() {
            self.route.expect(torch, &results);
        }
        if engine().config().settings.checked {
            self.no_new_nan(step, &result)?;
        }
        Ok(result)
    }

    /// Whether all tensors of the call are plain ones, no subclasses.
    fn is_plain(&self) -> bool {
        let mut tensors = self.front.tensors.iter().filter_map(|&at| given(self.py, &self.slots, at));
        Torch::known().is_some_and(|torch| tensors.all(|tensor| torch.is_plain(tensor.as_ptr())))
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
    pub fn before(&self, step: &RouteStep) -> PyResult<Option<Before>> {
        let wanted = engine().config().settings.checked && self.updates() && matches!(step.runner, Runner::Python(_));
        wanted.then(|| Before::new(self.py, self.front, &self.slots, false)).transpose()
    }

    /// As [`Job::no_new_nan`], for tensors that were updated in place.
    fn no_new_nan_in_place(&self, step: &RouteStep, before: &Before) -> PyResult<()> {
        let checks = self.py.import("layerzero.checks")?;
        let (after, copies): (Vec<_>, Vec<_>) = before.updated(self.py).into_iter().unzip();
        let after = PyTuple::new(self.py, after)?;
        let reference = self.route.steps.iter().find(|step| step.kernel.reference);
        if let Some(reference) = reference.filter(|_| !copies.is_empty())
            && checks.call_method1("has_nan", (&after,))?.is_truthy()?
        {
            before.run(self.making, reference)?;
            if checks.call_method1("has_more_nan", (&after, PyTuple::new(self.py, copies)?))?.is_truthy()? {
                return Err(self.found_nan(step, reference));
            }
        }
        Ok(())
    }

    /// A NaN the reference does not have is a failure, and a wrong result. Only in checked mode: the reference is slow.
    fn no_new_nan(&self, step: &RouteStep, result: &Bound<'py, PyAny>) -> PyResult<()> {
        let checks = self.py.import("layerzero.checks")?;
        let reference = self.route.steps.iter().find(|step| step.kernel.reference);
        let Some(reference) = reference.filter(|_| !self.updates()) else { return Ok(()) };
        if checks.call_method1("has_nan", (result,))?.is_truthy()? {
            let right = self.run(reference)?;
            if checks.call_method1("has_more_nan", (result, right))?.is_truthy()? {
                return Err(self.found_nan(step, reference));
            }
        }
        Ok(())
    }

    /// The kernel no longer serves the operation.
    fn found_nan(&self, step: &RouteStep, reference: &RouteStep) -> PyErr {
        let evidence = Evidence {
            error: format!("gives NaN where {} has none", reference.kernel.id),
            call: format!("{:?}", self.route.query),
            max_error: None,
            tolerance: None,
        };
        engine().found_wrong(&step.kernel, &self.route.query, evidence);
        gave("NaN where the reference has none".into())
    }

    /// The result as the function gives it.
    pub fn finish(&self, result: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(out) = &self.out {
            let copied = match out.hasattr("copy_")? {
                true => out.call_method1("copy_", (result,)),
                false => self.py.import("numpy")?.call_method1("copyto", (out, result)),
            };
            return copied.map(|_| out.clone()).map_err(|raised| self.unwritten(raised));
        }
        match self.route.ending {
            Ending::AsItIs => Ok(result),
            Ending::First => result.get_item(0),
            Ending::Quantized => {
                self.py.import("layerzero.arrays")?.getattr("Quantized")?.call1(result.cast::<PyTuple>()?)
            }
        }
    }
}

impl Job<'_, '_> {
    /// Why `out` could not be written to.
    fn unwritten(&self, raised: PyErr) -> PyErr {
        if let Some(interruption) = interrupted::by_the_caller(self.py, &raised, &self.slots) {
            return interruption;
        }
        let said = error::one_line(self.py, &raised);
        let text = format!("{}: 'out' cannot be written to: {said}", self.front.name());
        let error = error::invalid(self.py, "WRONG_OUT", &text, "pass another tensor, or none");
        error.set_cause(self.py, Some(raised));
        error
    }
}

fn gave(what: String) -> PyErr {
    PyTypeError::new_err(format!("the kernel gave {what}"))
}

fn kind(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "?".into(), |n| n.to_string())
}

/// Whether one tensor of a result is what it should be: dense, dtype, sizes, device. `plain`: all the call's tensors are,
/// so that a subclass is nothing anybody asked for.
fn check_result(object: &Bound<'_, PyAny>, spec: &OutputSpec, on: DeviceIx, plain: bool) -> PyResult<()> {
    let Some(torch) = Torch::known().filter(|torch| torch.is_tensor(object)) else {
        return Err(gave(format!("a {}, expected a tensor", kind(object))));
    };
    if plain && !torch.is_plain(object.as_ptr()) {
        return Err(gave(format!("a {}, expected a plain tensor", kind(object))));
    }
    let layout = object.getattr("layout")?.str()?.to_string();
    if layout != "torch.strided" || object.getattr("is_nested")?.is_truthy()? {
        let layout = layout.trim_start_matches("torch.");
        return Err(gave(format!("a {layout} tensor, expected one that is dense and strided")));
    }
    let (dtype, per_byte) = storage(spec.dtype);
    let mut shape = spec.shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last /= per_byte;
    }
    let found = crate::params::integers(&object.getattr("shape")?)?;
    let given = object.getattr("dtype")?.str()?.to_string();
    let given = given.trim_start_matches("torch.");
    if found != shape || given != dtype {
        return Err(gave(format!("{given} {found:?}, expected {dtype} {shape:?}")));
    }
    // Only of plain tensors it is known that they are where they say.
    if torch.is_plain(object.as_ptr()) {
        let found = object.getattr("device")?.str()?.to_string();
        let expected = crate::devices::name(on);
        if found != expected {
            return Err(gave(format!("a tensor on {found}, expected {expected}")));
        }
    }
    Ok(())
}

/// Refuses a call whose `out` cannot hold what it gives, before anything is remembered about it.
pub fn check_given_out(
    py: Python<'_>,
    front: &Front,
    slots: &Slots,
    arguments: &Arguments,
    route: &Route,
) -> PyResult<()> {
    let Some(out) = front.special(Special::Out).and_then(|at| given(py, slots, at)) else { return Ok(()) };
    let (_, expected) = arguments.settled(front, route.op, &route.query).map_err(|e| error::call(py, &e))?;
    expected.first().map_or(Ok(()), |expected| check_out(py, front, &out, expected))
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
    written::check_out(py, front, out)
}
