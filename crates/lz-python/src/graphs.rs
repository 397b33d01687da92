//! CUDA graphs: which kernels are to be proven, what came of it, and what a recording has seen.

use layerzero::model::{Bound as BoundCall, CallSpec, Context, DeviceIx, GraphDoubt, NamedCall, Reason};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::process::Call;
use crate::{context, error, jit, pinned, registry};

fn raise(py: Python<'_>) -> impl Fn(layerzero::Error) -> PyErr {
    move |e| error::engine(py, &e)
}

/// A call that is written down, as it is inside of a capture.
fn bound(py: Python<'_>, call: &str, device: u16) -> PyResult<BoundCall> {
    registry::ensure_loaded(py)?;
    let spec: CallSpec = jit::parse(py, call)?;
    let context = Context { capturing: true, ..registry::context(py)? };
    let named = spec.named(DeviceIx(device), context);
    Ok(context::scope(py).bind(&spec.op, &named).map_err(raise(py))?.1)
}

/// The kernel to capture and replay for a call: the one that would serve it in a capture if it were proven, and is not.
#[pyfunction]
pub fn graph_wanted(py: Python<'_>, call: &str, device: u16) -> PyResult<Option<String>> {
    let _call = Call::enter(py);
    let bound = bound(py, call, device)?;
    Ok(engine().wanted_in_graphs(&context::scope(py), &bound.query))
}

/// A kernel was captured and replayed for a call. `doubt`: what is wrong with it, as JSON; nothing when it is proven.
#[pyfunction]
#[pyo3(signature = (kernel, call, device, doubt=None))]
pub fn graph_captured(py: Python<'_>, kernel: &str, call: &str, device: u16, doubt: Option<&str>) -> PyResult<()> {
    let _call = Call::enter(py);
    let bound = bound(py, call, device)?;
    let read = |text: &str| {
        serde_json::from_str::<GraphDoubt>(text)
            .map_err(|e| error::invalid(py, "BAD_DOUBT", &format!("{text} is no doubt: {e}"), "see GraphDoubt"))
    };
    let outcome = doubt.map(read).transpose()?.map_or(Ok(()), Err);
    engine().captured(kernel, &bound.query, outcome).map_err(raise(py))
}

/// Holds what is decided for a call in a capture; gives the kernel.
#[pyfunction]
pub fn graph_hold(py: Python<'_>, call: &str, device: u16) -> PyResult<String> {
    let _call = Call::enter(py);
    let bound = bound(py, call, device)?;
    engine().hold_for_capture(&context::scope(py), &bound.query).map_err(raise(py))
}

/// Lets go of all decisions that are held.
#[pyfunction]
pub fn graph_release(py: Python<'_>) -> PyResult<()> {
    engine().release_captures().map_err(raise(py))
}

/// A plan that decides nothing and takes note of the calls made inside of it.
#[pyfunction]
pub fn recording(py: Python<'_>) -> PyResult<pinned::Plan> {
    registry::ensure_loaded(py)?;
    Ok(pinned::Plan(engine().recording()))
}

/// Proves a kernel in a graph for a call that it can serve, where `graph_strict_mode` asks for that, and gives what is wrong
/// with it. Kernels that are not declared safe there are for calls outside.
pub fn doubt(py: Python<'_>, kernel: &str, named: &NamedCall<'_>, bound: &BoundCall) -> PyResult<Option<Reason>> {
    let query = &bound.query;
    let scope = context::scope(py);
    let strict = scope.snapshot().spec().settings.graph_strict;
    let captures = scope.snapshot().device(query.device()).is_some_and(|device| device.supports("graphs"));
    if !strict || !captures || query.context().capturing {
        return Ok(None);
    }
    let ask = |py: Python<'_>| engine().graph_doubt(&context::scope(py), kernel, query).map_err(raise(py));
    if ask(py)? == Some(GraphDoubt::Unproven) {
        let call = CallSpec::canonical(named, bound).to_string();
        py.import("layerzero.graphs")?.call_method1("prove", (kernel, call, query.device().0))?;
    }
    let doubt = ask(py)?.filter(|doubt| *doubt != GraphDoubt::Undeclared);
    Ok(doubt.map(|why| Reason::CudaGraphUnsafe { why }))
}
