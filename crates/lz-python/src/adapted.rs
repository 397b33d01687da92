//! Kernels that want their arguments in another form: transposed, contiguous, or of a wider dtype.

use layerzero::adapt::{counterpart, transposition, wanted_dtype};
use layerzero::model::{BindRules, Call, Layout, OutputSpec};
use layerzero::selection::Transforms;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error;
use crate::job::Job;
use crate::route::{RouteStep, Runner};
use crate::slow::given;
use crate::tensors::{Meta, Purpose, storage};

/// Runs a step's kernel on transformed arguments and gives its result in the form the caller expects.
pub fn run<'py>(job: &Job<'_, 'py>, step: &RouteStep) -> PyResult<Bound<'py, PyAny>> {
    let (py, op, query) = (job.py, job.route.op, &job.route.query);
    let Runner::Python(call) = &step.runner else {
        return Err(PyRuntimeError::new_err("only Python kernels are given adapted arguments"));
    };
    let unexpected = |what: &str| PyRuntimeError::new_err(format!("arguments could not be adapted: {what}"));
    let torch = py.import("torch")?;
    let layout = job.route.layout.filter(|l| l.is_named());
    let to: Option<Layout> = match (step.transforms.has(Transforms::LAYOUT), layout) {
        (true, Some(from)) => {
            Some(counterpart(&step.kernel, from).ok_or_else(|| unexpected("no layout to transpose to"))?)
        }
        _ => None,
    };
    let turn = |object: Bound<'py, PyAny>, rank: usize| match (to, transposition(rank)) {
        (Some(_), Some(order)) => object.call_method1("permute", (order.to_vec(),)),
        _ => Ok(object),
    };
    let mut slots = job.slots_for(step)?;
    let mut kept = Vec::new();
    let mut metas = vec![None; op.schema().inputs.len()];
    for (at, meta) in &job.arguments.metas {
        let Some(index) = op.input_index(job.front.signature.arguments[*at].name) else { continue };
        let Some(mut object) = given(py, &job.slots, *at) else { continue };
        if query.tensor(index).layout().is_named() {
            object = turn(object, meta.shape.len())?;
        }
        let dtype = wanted_dtype(op, &step.kernel, index, meta.dtype);
        if step.transforms.has(Transforms::CAST) && dtype != meta.dtype {
            object = object.call_method1("to", (torch.getattr(storage(dtype).0)?,))?;
        }
        let read = |object: &_| Meta::read(object, job.front.name(), op.schema().inputs[index].name, Purpose::Run);
        let mut meta = None;
        if step.transforms.has(Transforms::CONTIGUOUS) {
            object = object.call_method0("contiguous")?;
            // What is contiguous may begin at any element; a copy begins where memory is aligned.
            let seen = read(&object)?;
            meta = if seen.aligned { Some(seen) } else { None };
            if meta.is_none() {
                object = object.call_method0("clone")?;
            }
        }
        metas[index] = Some(meta.map_or_else(|| read(&object), Ok)?);
        slots[*at] = object.as_ptr();
        kept.push(object);
    }
    let params = job.params_drawn()?;
    let given: Vec<_> = metas.iter().map(|m| m.as_ref().map(Meta::as_meta)).collect();
    let again = Call {
        inputs: &given,
        params: &params,
        layout: to.or(layout),
        device: query.device(),
        context: query.context(),
    };
    let bound = op.bind(&again, &BindRules::default()).map_err(|e| error::call(py, &e))?;
    // What was adapted must now be legal as it stands; nothing forbidden is ever handed over.
    if !job.scope.serves(&step.kernel, &bound.query) {
        return Err(unexpected("the kernel does not take them after all"));
    }
    let prepared = call.prepare_as(py, &slots, to);
    // SAFETY: `kept` and the caller hold the arguments; the result is a new reference or an exception.
    let result = unsafe { Bound::from_owned_ptr_or_err(py, prepared.call())? };
    let back = |object: Bound<'py, PyAny>, spec: &OutputSpec| {
        turn(object, spec.shape.len())?.call_method1("to", (torch.getattr(storage(spec.dtype).0)?,))
    };
    match &job.expected[..] {
        [] => Ok(result),
        [one] => back(result, one),
        several => {
            let parts: Vec<_> =
                several.iter().enumerate().map(|(i, spec)| back(result.get_item(i)?, spec)).collect::<PyResult<_>>()?;
            Ok(PyTuple::new(py, parts)?.into_any())
        }
    }
}
