//! Configuration and health, as Python sets and asks them.

use std::path::PathBuf;
use std::sync::Arc;

use layerzero::config::{self, CodeLayer, MAX_DEPTH, Sources, Value};
use layerzero::model::LaunchLimits;
use layerzero::selection::SnapshotSpec;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::engine::engine;
use crate::inspect::json;
use crate::pinned::Plan;
use crate::process::detached;
use crate::{context, error};

fn raise(py: Python<'_>) -> impl Fn(layerzero::Error) -> PyErr {
    move |e| error::engine(py, &e)
}

/// Most values in the lists and dicts of one setting, counted wherever they appear.
const MOST_VALUES: usize = 100_000;

/// A setting's value, out of Python's own types. Lists and dicts may contain each other or themselves, so how deep they nest
/// and how many values they hold is limited.
fn value(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    nested(object, MAX_DEPTH, &mut 0)
}

/// A value in which lists and dicts may nest `levels` deep; `count` is how many values were read so far.
fn nested(object: &Bound<'_, PyAny>, levels: usize, count: &mut usize) -> PyResult<Value> {
    *count += 1;
    if *count > MOST_VALUES {
        return Err(PyTypeError::new_err(format!("more than {MOST_VALUES} values")));
    }
    let inner = || {
        let deep = || PyTypeError::new_err(format!("lists and dicts are nested more than {MAX_DEPTH} deep"));
        levels.checked_sub(1).ok_or_else(deep)
    };
    if object.is_none() {
        return Ok(Value::Null);
    }
    if object.is_instance_of::<PyBool>() {
        return Ok(Value::Bool(object.extract()?));
    }
    if object.is_instance_of::<PyInt>() {
        let fits = object.extract::<i64>().map_err(|_| PyTypeError::new_err("expected an integer of 64 bits"));
        return Ok(Value::Int(fits?));
    }
    if object.is_instance_of::<PyFloat>() {
        return Ok(Value::Float(object.extract()?));
    }
    if object.is_instance_of::<PyString>() {
        return Ok(Value::Str(object.extract()?));
    }
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        let inner = inner()?;
        let items = object.try_iter()?.map(|item| nested(&item?, inner, count));
        return Ok(Value::List(items.collect::<PyResult<_>>()?));
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        let named = |key: Bound<'_, PyAny>| {
            key.extract::<String>().map_err(|_| PyTypeError::new_err("the keys of a dict are strings"))
        };
        let inner = inner()?;
        let entry = |(key, item): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((named(key)?, nested(&item, inner, count)?));
        return Ok(Value::Map(dict.iter().map(entry).collect::<PyResult<_>>()?));
    }
    if object.hasattr("__fspath__")?
        && let Ok(path) = object.extract::<PathBuf>()
    {
        return Ok(Value::Str(path.display().to_string()));
    }
    let kind = object.get_type().name()?;
    Err(PyTypeError::new_err(format!("a setting is a bool, a number, a string, a list or a dict, not a {kind}")))
}

fn entries(settings: &Bound<'_, PyDict>) -> PyResult<Vec<(String, Value)>> {
    let py = settings.py();
    let entry = |(key, item): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let key: String = key.extract()?;
        let value = value(&item).map_err(|error| {
            let shown = error::shown(&item);
            let text = format!("code: {key}: {} (found {shown})", error.value(py));
            let hint = "nothing was changed; 'layerzero config reference' lists every setting";
            error::configuration(py, "INVALID_CONFIGURATION", &text, hint)
        })?;
        Ok((key, value))
    };
    settings.iter().map(entry).collect()
}

/// Loads the user's file, the project's and the environment, as they are found from here.
#[pyfunction]
pub fn load_sources(py: Python<'_>) -> PyResult<()> {
    let here = std::env::current_dir().unwrap_or_default();
    let sources = Sources::discover(config::environment(), &here);
    detached(py, || engine().load_sources(&sources).and_then(|()| engine().watch())).map_err(raise(py))
}

/// Takes this file for the project's.
#[pyfunction]
pub fn load_config(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    // It is read again, when the process may be in another directory.
    let path = std::path::absolute(&path).unwrap_or(path);
    detached(py, || engine().load_config(&path).and_then(|()| engine().watch())).map_err(raise(py))
}

/// Sets settings, all or none.
#[pyfunction]
pub fn configure(py: Python<'_>, settings: &Bound<'_, PyDict>) -> PyResult<()> {
    let entries = entries(settings)?;
    detached(py, || engine().configure(entries).and_then(|()| engine().watch())).map_err(raise(py))
}

/// Forgets what `configure`, `lock` and `unlock` said.
#[pyfunction]
pub fn reset(py: Python<'_>) -> PyResult<()> {
    detached(py, || engine().reset_code().and_then(|()| engine().watch())).map_err(raise(py))
}

/// Every kernel is registered that the configuration may name: what it names is checked.
#[pyfunction]
pub fn settle_names(py: Python<'_>) -> PyResult<()> {
    detached(py, || engine().settle_names()).map_err(raise(py))
}

/// Only this kernel may serve the operation; if optional, only where it is known and can run.
#[pyfunction]
#[pyo3(signature = (operation, kernel, optional=false))]
pub fn lock(py: Python<'_>, operation: &str, kernel: &str, optional: bool) -> PyResult<()> {
    let lock = || match optional {
        true => engine().lock_if_there(operation, kernel),
        false => engine().lock(operation, kernel),
    };
    detached(py, lock).map_err(raise(py))
}

/// Takes a lock back.
#[pyfunction]
pub fn unlock(py: Python<'_>, operation: &str) -> PyResult<()> {
    detached(py, || engine().unlock(operation)).map_err(raise(py))
}

/// Reads the files again.
#[pyfunction]
pub fn reload(py: Python<'_>) -> PyResult<()> {
    detached(py, || engine().reload().and_then(|()| engine().watch())).map_err(raise(py))
}

/// What the calls of a `with` block, or of a plan, are made in. It lasts as long as somebody holds it.
#[pyclass(frozen, module = "layerzero._native")]
pub struct Overlay(Arc<layerzero::Overlay>);

#[pymethods]
impl Overlay {
    /// Its number: what the context variable holds.
    #[getter]
    fn number(&self) -> u32 {
        self.0.id().0
    }
}

/// The overlay that says this, inside of these plans, the innermost first.
#[pyfunction]
pub fn overlay(py: Python<'_>, settings: &Bound<'_, PyDict>, plans: Vec<PyRef<'_, Plan>>) -> PyResult<Overlay> {
    let mut layer = CodeLayer::context();
    layer.set_all(entries(settings)?).map_err(|e| error::engine(py, &e.into()))?;
    let plans: Vec<_> = plans.iter().map(|plan| plan.0.clone()).collect();
    detached(py, || engine().overlay_with(layer, &plans)).map(Overlay).map_err(raise(py))
}

/// Every setting, its value and where it came from, as JSON; with the files that were read and what is to be warned of.
#[pyfunction]
pub fn settings() -> String {
    let config = engine().config();
    let warnings = engine().config_warnings();
    json(&serde_json::json!({ "entries": config.entries(), "files": config.files(), "warnings": warnings }))
}

/// How many calls were served so far, by all kernels together.
#[pyfunction]
pub fn calls_made() -> u64 {
    engine().calls_made()
}

/// The layouts of calls that do not say theirs: of attention and rope, and of paged caches. `here`: inside of the
/// blocks this is asked in; otherwise those of the process.
#[pyfunction]
pub fn default_layouts(py: Python<'_>, here: bool) -> (&'static str, &'static str) {
    let layouts = match here {
        true => context::scope(py).snapshot().spec().settings.default_layouts,
        false => engine().config().selection().default_layouts,
    };
    (layouts.dense.name(), layouts.cache.name())
}

/// How the process is doing: as JSON, and as text.
#[pyfunction]
pub fn health() -> (String, String, bool) {
    let health = engine().health();
    (json(&health), health.to_string(), health.is_well())
}

/// Whether the process is ready for production: as JSON, as text, and in a word.
#[pyfunction]
pub fn readiness(py: Python<'_>) -> PyResult<(String, String, bool)> {
    crate::registry::ensure_loaded(py)?;
    let readiness = detached(py, || engine().readiness());
    Ok((json(&readiness), readiness.to_string(), readiness.ready))
}

/// Gives a rollout its calls again; `False` when there is none of this name.
#[pyfunction]
pub fn rearm(py: Python<'_>, name: &str) -> bool {
    detached(py, || engine().rearm(name))
}

/// Forgets what failed.
#[pyfunction]
pub fn forget_failures(py: Python<'_>) {
    detached(py, || engine().forget_failures());
}

/// Looks at the memory of every device again.
#[pyfunction]
pub fn refresh_memory(py: Python<'_>) {
    detached(py, || engine().refresh_memory());
}

/// Says what a device can launch, in the place of what its driver says: blocks along x, y and z, and threads of a block.
/// `None` for a device without limits, as the host is. For trying limits out where no GPU is.
#[pyfunction]
#[pyo3(signature = (device, max_grid, max_threads_per_block))]
pub fn set_launch_limits(
    py: Python<'_>,
    device: usize,
    max_grid: Option<[u32; 3]>,
    max_threads_per_block: Option<u32>,
) -> PyResult<()> {
    let limits = max_grid.map(|max_grid| {
        let usual = LaunchLimits::default();
        let max_threads_per_block = max_threads_per_block.unwrap_or(usual.max_threads_per_block);
        LaunchLimits { max_grid, max_threads_per_block, ..usual }
    });
    let change = |spec: &mut SnapshotSpec| {
        if let Some(device) = spec.devices.get_mut(device) {
            device.launch = limits;
        }
    };
    detached(py, || engine().update(change)).map_err(raise(py))
}
