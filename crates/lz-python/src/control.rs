//! Configuration and health, as Python sets and asks them.

use std::path::PathBuf;

use layerzero::OverlayId;
use layerzero::config::{self, CodeLayer, Sources, Value};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::engine::engine;
use crate::inspect::json;
use crate::pinned::Baked;
use crate::process::detached;
use crate::{context, error};

fn raise(py: Python<'_>) -> impl Fn(layerzero::Error) -> PyErr {
    move |e| error::engine(py, &e)
}

/// A setting's value, out of Python's own types.
fn value(object: &Bound<'_, PyAny>) -> PyResult<Value> {
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
        return Ok(Value::List(object.try_iter()?.map(|item| value(&item?)).collect::<PyResult<_>>()?));
    }
    if let Ok(dict) = object.cast::<PyDict>() {
        let named = |key: Bound<'_, PyAny>| {
            key.extract::<String>().map_err(|_| PyTypeError::new_err("the keys of a dict are strings"))
        };
        let entry = |(key, item): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((named(key)?, value(&item)?));
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
            let shown = item.repr().map_or_else(|_| "?".into(), |r| r.to_string());
            let shown: String = shown.chars().take(80).collect();
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
    // It is read again when the process may have gone elsewhere.
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

/// The number of the overlay that says this, inside of these plans, the innermost first.
#[pyfunction]
pub fn overlay(py: Python<'_>, settings: &Bound<'_, PyDict>, plans: Vec<PyRef<'_, Baked>>) -> PyResult<u32> {
    let mut layer = CodeLayer::context();
    layer.set_all(entries(settings)?).map_err(|e| error::engine(py, &e.into()))?;
    let plans: Vec<_> = plans.iter().map(|plan| plan.0.clone()).collect();
    detached(py, || engine().overlay_with(layer, &plans)).map(|id| id.0).map_err(raise(py))
}

/// Those of these overlays that are gone: a plan of theirs is.
#[pyfunction]
pub fn overlays_gone(numbers: Vec<u32>) -> Vec<u32> {
    let numbers: Vec<_> = numbers.into_iter().map(OverlayId).collect();
    engine().overlays_gone(&numbers).into_iter().map(|id| id.0).collect()
}

/// Every setting, its value and where it came from, as JSON; with the files that were read and what is to be warned of.
#[pyfunction]
pub fn settings() -> String {
    let config = engine().config();
    let warnings = engine().config_warnings();
    json(&serde_json::json!({ "entries": config.entries(), "files": config.files(), "warnings": warnings }))
}

/// The layouts of calls that do not say theirs: of attention and rope, and of paged caches. `here`: inside of the
/// blocks this is asked in; otherwise those of the process.
#[pyfunction]
pub fn default_layouts(py: Python<'_>, here: bool) -> (&'static str, &'static str) {
    let layouts = match here {
        true => context::within(py, || engine().with_snapshot(|s| s.spec().settings.default_layouts)),
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
pub fn refresh_memory(py: Python<'_>) -> PyResult<()> {
    detached(py, || engine().refresh_memory()).map_err(raise(py))
}
