//! Questions: which kernel, why, what is there.

use layerzero::model::{Catalog, Context, Symbol};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::engine::engine;
use crate::front::{Front, Slots};
use crate::process::{Call, detached};
use crate::tensors::Purpose;
use crate::{context, error, graphs, registry, slow};

/// Arguments of a call somebody asks about.
pub fn slots(
    py: Python<'_>,
    front: &'static Front,
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
) -> PyResult<Slots> {
    let args: Vec<_> = args.iter().collect();
    let kwargs: Vec<_> = kwargs.into_iter().flat_map(|k| k.iter()).collect();
    front.parse_bound(&args, &kwargs, py)
}

/// The kernel that serves a call: `op`, `kernel_id`, `version`, `score`.
#[pyfunction]
#[pyo3(signature = (op, *args, **kwargs))]
pub fn which<'py>(
    py: Python<'py>,
    op: &str,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let front = Front::find(py, op)?;
    let arguments = slow::read(py, front, &slots(py, front, args, kwargs)?, Purpose::Ask)?;
    let named = arguments.named(front, registry::context(py)?);
    let chosen = context::scope(py).which(name_of(op), &named).map_err(|e| error::engine(py, &e))?;
    selection(py, chosen)
}

/// A selection as a dict.
pub fn selection(py: Python<'_>, chosen: layerzero::Selection) -> PyResult<Bound<'_, PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("op", chosen.op)?;
    answer.set_item("kernel_id", chosen.kernel_id)?;
    answer.set_item("version", chosen.version)?;
    answer.set_item("score", chosen.score)?;
    Ok(answer)
}

/// Everything about the choice of a kernel for a call: as JSON, and as a table.
#[pyfunction]
#[pyo3(signature = (op, *args, **kwargs))]
pub fn explain(
    py: Python<'_>,
    op: &str,
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
) -> PyResult<(String, String)> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let front = Front::find(py, op)?;
    let arguments = slow::read(py, front, &slots(py, front, args, kwargs)?, Purpose::Ask)?;
    let named = arguments.named(front, registry::context(py)?);
    let report = context::scope(py).report(name_of(op), &named).map_err(|e| error::engine(py, &e))?;
    Ok((json(&report), report.to_string()))
}

/// As [`explain`], JSON alone, for a program that is being compiled: what is compiled on first use counts as compiled.
/// `captured`: as it is decided in a CUDA graph, with the times the device needs.
#[pyfunction]
#[pyo3(signature = (op, captured, *args, **kwargs))]
pub fn explain_to_compile(
    py: Python<'_>,
    op: &str,
    captured: bool,
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let front = Front::find(py, op)?;
    let arguments = slow::read(py, front, &slots(py, front, args, kwargs)?, Purpose::Ask)?;
    let context = registry::context(py)?;
    let named = arguments.named(front, Context { capturing: captured, ..context });
    let report = engine().as_compiled(&context::scope(py)).and_then(|scope| scope.report(name_of(op), &named));
    Ok(json(&report.map_err(|e| error::engine(py, &e))?))
}

/// Raises where the configuration switches explanations off.
#[pyfunction]
pub fn may_explain(py: Python<'_>) -> PyResult<()> {
    registry::ensure_loaded(py)?;
    context::scope(py).may_explain().map_err(|e| error::engine(py, &e))
}

/// Why a kernel cannot serve a call; empty when it can.
#[pyfunction]
#[pyo3(signature = (kernel_id, *args, **kwargs))]
pub fn validate<'py>(
    py: Python<'py>,
    kernel_id: &str,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyList>> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let front = front_of_kernel(py, kernel_id)?;
    let arguments = slow::read(py, front, &slots(py, front, args, kwargs)?, Purpose::Ask)?;
    let named = arguments.named(front, registry::context(py)?);
    let bound = context::scope(py).bind(front.signature.function.target, &named);
    let (_, bound) = bound.map_err(|e| error::engine(py, &e))?;
    let step = context::scope(py).step_of(kernel_id, &bound.query);
    let kernel = step.as_ref().ok().map(|step| format!("{}@{}", step.kernel.id, step.kernel.version));
    let list = reasons(py, step)?;
    if let Some(kernel) = kernel
        && let Some(doubt) = graphs::doubt(py, &kernel, &named, &bound)?
    {
        list.append(error::reason(py, &doubt)?)?;
    }
    Ok(list)
}

/// Why a kernel did not become a step; none when it did.
pub fn reasons(py: Python<'_>, step: Result<layerzero::Step, layerzero::Error>) -> PyResult<Bound<'_, PyList>> {
    let reasons: Vec<_> = match step {
        Ok(_) => Vec::new(),
        Err(layerzero::Error::NoKernel { rejections, .. }) => rejections.into_iter().flat_map(|r| r.reasons).collect(),
        Err(other) => return Err(error::engine(py, &other)),
    };
    let list = PyList::empty(py);
    for reason in &reasons {
        list.append(error::reason(py, reason)?)?;
    }
    Ok(list)
}

/// Runs one kernel, whatever the ranking.
#[pyfunction]
#[pyo3(signature = (kernel_id, *args, **kwargs))]
pub fn run_kernel<'py>(
    py: Python<'py>,
    kernel_id: &str,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let front = front_of_kernel(py, kernel_id)?;
    let slots = slots(py, front, args, kwargs)?;
    slow::run_one(py, front, kernel_id, &slots)
}

/// Runs a function on real tensors without looking at what surrounds the call: for the torch operators.
#[pyfunction]
#[pyo3(signature = (name, *args, **kwargs))]
pub fn inner<'py>(
    py: Python<'py>,
    name: &str,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let _call = Call::begin();
    registry::ensure_loaded(py)?;
    let front = Front::find(py, name)?;
    let slots = slots(py, front, args, kwargs)?;
    // SAFETY: the containers hold the arguments for the whole call; the result is a new reference or an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, crate::front::run(front, &slots, false)) }
}

/// The catalog's name for what a function, an alias or an operation is called.
fn name_of(op: &str) -> &str {
    match layerzero::model::Signature::find(op) {
        Some(s) if s.function.name == op => s.function.target,
        _ => op,
    }
}

/// The function through which a kernel's operation is called.
fn front_of_kernel(py: Python<'_>, kernel_id: &str) -> PyResult<&'static Front> {
    let id = kernel_id.rsplit_once('@').map_or(kernel_id, |(id, _)| id);
    let op = engine().with_snapshot(|s| {
        let of_id = s.kernels().find(|(_, k)| k.id == id);
        let of_alias = || s.kernels().find(|(_, k)| k.aliases.iter().any(|alias| alias == id));
        of_id.or_else(of_alias).map(|(_, k)| k.operation.clone())
    });
    match op {
        Some(op) => Front::find(py, &op),
        // The engine's own error names the nearest kernel.
        None => match engine().validate(kernel_id, &layerzero::model::NamedCall::new()) {
            Err(e) => Err(error::engine(py, &e)),
            Ok(_) => Front::find(py, kernel_id),
        },
    }
}

pub fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|e| format!("{{\"error\": \"{e}\"}}"))
}

/// The registered kernels as JSON, of one operation or alias, or of all.
#[pyfunction]
#[pyo3(signature = (op=None))]
pub fn list_kernels(py: Python<'_>, op: Option<&str>) -> PyResult<String> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    engine().list_kernels(op.map(name_of)).map(|list| json(&list)).map_err(|e| error::engine(py, &e))
}

/// The backends as JSON: name, version, origin, why one cannot be used, and whether its library was imported.
#[pyfunction]
pub fn backends(py: Python<'_>) -> PyResult<String> {
    registry::ensure_loaded(py)?;
    let not_imported = crate::importing::not_imported();
    let list: Vec<serde_json::Value> = engine()
        .backends()
        .iter()
        .map(|b| {
            serde_json::json!({
                "name": b.descriptor.name,
                "version": b.descriptor.version,
                "origin": b.descriptor.origin,
                "platforms": b.descriptor.platforms.iter().map(|p| p.name()).collect::<Vec<_>>(),
                "unavailable": b.unavailable.as_ref().map(|r| serde_json::json!({"code": r.code(), "message": r.to_string()})),
                "imported": b.unavailable.is_none() && !not_imported.contains(&b.descriptor.name),
            })
        })
        .collect();
    Ok(json(&list))
}

/// The devices as JSON; looks for GPUs.
#[pyfunction]
pub fn devices(py: Python<'_>) -> PyResult<String> {
    detached(py, || engine().detect_accelerators()).map_err(|e| error::engine(py, &e))?;
    Ok(json(&engine().devices()))
}

/// What the native side knows of itself: how torch's state is read, how many calls are remembered.
#[pyfunction]
pub fn status(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let _call = Call::enter(py);
    let answer = PyDict::new(py);
    let torch = crate::torch::Torch::find(py)?;
    answer.set_item("torch_state_by", torch.map(|t| t.reads_by()))?;
    answer.set_item("tensors_by", torch.map(|t| t.tensors_by()))?;
    let kernels = PyDict::new(py);
    for (kernel, why) in crate::torch::shims::tried(py) {
        kernels.set_item(kernel.name, why.map(|why| why.to_string()))?;
    }
    answer.set_item("graph_kernels", torch.map(|_| kernels))?;
    answer.set_item("graph_kernels_take_float32", crate::torch::shims::tells_precision())?;
    answer.set_item("exchange_api", torch.is_some_and(|t| t.borrow.is_some()))?;
    answer.set_item("calls_remembered", crate::memory::remembered(py))?;
    answer.set_item("version", engine().version())?;
    answer.set_item("names_interned", Symbol::count())?;
    let stats = engine().cache_stats();
    answer.set_item("cache_entries", stats.entries)?;
    answer.set_item("cache_misses", stats.misses)?;
    Ok(answer)
}

/// What a kernel of an operation or alias may have to say: layouts, dimensions to constrain, inputs (by name, whether
/// optional) and parameters (whether they need a rule), and the other names of both.
#[pyfunction]
pub fn schema<'py>(py: Python<'py>, operation: &str) -> PyResult<Bound<'py, PyDict>> {
    let _call = Call::enter(py);
    let catalog = Catalog::get();
    let target = catalog.find(operation).map_err(|e| error::call(py, &e))?;
    let (inputs, params, aliases) = (PyDict::new(py), PyDict::new(py), PyDict::new(py));
    let mut layouts: Vec<&str> = Vec::new();
    let mut dims: Vec<&str> = Vec::new();
    let edges = PyDict::new(py);
    for op in target.ops.iter().map(|&ix| catalog.op(ix)) {
        let schema = op.schema();
        for input in schema.inputs {
            inputs.set_item(input.name, input.optional)?;
            input.also.iter().try_for_each(|also| aliases.set_item(also, input.name))?;
            let named = input.shape.split('|').filter_map(|s| s.split_once(':')).map(|(layout, _)| layout.trim());
            layouts.extend(named.filter(|l| layouts_has(&layouts, l)).collect::<Vec<_>>());
        }
        for edge in schema.edges {
            edges.set_item(edge.name, (edge.when, edge.gives, edge.except))?;
        }
        for param in schema.params {
            params.set_item(param.name, !param.universal)?;
            param.also.iter().try_for_each(|also| aliases.set_item(also, param.name))?;
        }
        dims.extend(
            schema
                .dims
                .iter()
                .filter(|d| d.must_constrain && !dims.contains(&d.name))
                .map(|d| d.name)
                .collect::<Vec<_>>(),
        );
    }
    layouts.dedup();
    let answer = PyDict::new(py);
    answer.set_item("layouts", layouts)?;
    answer.set_item("must_constrain", dims)?;
    answer.set_item("inputs", inputs)?;
    answer.set_item("params", params)?;
    answer.set_item("aliases", aliases)?;
    answer.set_item("edges", edges)?;
    Ok(answer)
}

fn layouts_has(known: &[&str], layout: &&str) -> bool {
    !known.contains(layout)
}

/// A capabilities document (JSON or YAML) as JSON, with the version that was found in place of its own.
#[pyfunction]
#[pyo3(signature = (text, version=None))]
pub fn document(py: Python<'_>, text: &str, version: Option<&str>) -> PyResult<String> {
    let _call = Call::enter(py);
    let parsed = layerzero::model::capabilities::parse(text);
    let mut value = parsed.map_err(|e| {
        error::engine(py, &layerzero::Error::Capabilities { backend: "register_backend".into(), error: e })
    })?;
    if let (Some(version), Some(object)) = (version, value.as_object_mut()) {
        object.insert("backend_version".into(), version.into());
    }
    Ok(value.to_string())
}
