//! Backends, kernels and plugins, as Python brings them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use layerzero::Executable;
use layerzero::model::{Context, PluginOrigin, Reason, capabilities};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::error;
use crate::front::MAX_ARGUMENTS;
use crate::route::PyKernel;
use crate::torch::Torch;

static LOADED: AtomicBool = AtomicBool::new(false);

/// Loads the backends and plugins, once, before the first call or question.
pub fn ensure_loaded(py: Python<'_>) -> PyResult<()> {
    if !LOADED.load(Ordering::Acquire) {
        py.import("layerzero.loading")?.call_method0("load")?;
        LOADED.store(true, Ordering::Release);
    }
    Ok(())
}

/// What the call demands because of where it is made.
pub fn context(py: Python<'_>) -> PyResult<Context> {
    let deterministic = Torch::find(py)?.is_some_and(|torch| torch.surroundings().deterministic);
    Ok(Context { deterministic, ..Context::default() })
}

/// Whether an exception says that the call itself is wrong.
pub fn is_callers_fault(py: Python<'_>, raised: &PyErr) -> PyResult<bool> {
    let class = py.import("layerzero.errors")?.getattr("InvalidCallError")?;
    raised.value(py).is_instance(&class)
}

/// A kernel's id, the function that runs it, and the names of that function's parameters.
type Adapter = (String, Py<PyAny>, Vec<String>);

/// Loads a backend's capabilities document with the versions found; its kernels run by the given functions. A backend
/// that cannot be used is loaded with why (`("NOT_INSTALLED", library)` or `("BACKEND_IMPORT_FAILED", one line)`), so
/// that its kernels can be listed and explained.
#[pyfunction]
#[pyo3(signature = (name, document, versions, adapters, unavailable=None))]
pub fn load_backend(
    py: Python<'_>,
    name: &str,
    document: &str,
    versions: BTreeMap<String, String>,
    adapters: Vec<Adapter>,
    unavailable: Option<(String, String)>,
) -> PyResult<()> {
    let engine = engine();
    let raise = |e: layerzero::Error| error::engine(py, &e);
    engine.load_capabilities(name, document).map_err(raise)?;
    let backend = capabilities::read(document).map(|d| d.backend.name).unwrap_or_else(|_| name.to_owned());
    let reason = unavailable.map(|(code, detail)| match code.as_str() {
        "NOT_INSTALLED" => Reason::NotInstalled { library: detail },
        _ => Reason::BackendImportFailed { library: backend.clone(), error: detail },
    });
    engine
        .update(|spec| {
            spec.versions.extend(versions);
            if let Some(state) = spec.backends.get_mut(&backend) {
                state.unavailable = reason;
            }
        })
        .map_err(raise)?;
    let mut ids: HashMap<String, Vec<String>> = HashMap::new();
    engine.with_snapshot(|s| {
        for (_, kernel) in s.kernels().filter(|(_, k)| k.backend == backend) {
            ids.entry(kernel.id.clone()).or_default().push(kernel.version.clone());
        }
    });
    let mut attached = Vec::new();
    for (id, callable, parameters) in adapters {
        let versions = ids.get(&id).cloned().unwrap_or_default();
        if versions.is_empty() {
            let e = layerzero::Error::UnknownKernel { id, nearest: None };
            return Err(error::engine(py, &e));
        }
        let kernel = adapter(py, &id, callable, parameters)?;
        attached.extend(versions.into_iter().map(|v| (id.clone(), v, Executable::Foreign(kernel.clone()))));
    }
    engine.attach_all(attached).map_err(raise)
}

fn adapter(py: Python<'_>, id: &str, callable: Py<PyAny>, parameters: Vec<String>) -> PyResult<Arc<PyKernel>> {
    if parameters.len() > MAX_ARGUMENTS {
        let text = format!("'{id}' takes {} arguments, at most {MAX_ARGUMENTS} are passed", parameters.len());
        return Err(error::argument(py, "BAD_ADAPTER", &text, "name only what the kernel uses"));
    }
    Ok(Arc::new(PyKernel { callable, parameters }))
}

/// Registers one kernel, described by a document of its own, to be run by a function.
#[pyfunction]
pub fn register(py: Python<'_>, document: &str, kernel: Adapter) -> PyResult<()> {
    let read = capabilities::read(document).map_err(|e| {
        error::engine(py, &layerzero::Error::Capabilities { backend: "register_kernel".into(), error: e })
    })?;
    let (id, callable, parameters) = kernel;
    let kernel = adapter(py, &id, callable, parameters)?;
    for descriptor in read.kernels {
        engine().register_as(descriptor, Executable::Foreign(kernel.clone())).map_err(|e| error::engine(py, &e))?;
    }
    Ok(())
}

/// Removes a kernel; calls under way finish with it.
#[pyfunction]
pub fn unregister(py: Python<'_>, kernel_id: &str) -> PyResult<()> {
    let versions: Vec<String> = engine()
        .with_snapshot(|s| s.kernels().filter(|(_, k)| k.id == kernel_id).map(|(_, k)| k.version.clone()).collect());
    if versions.is_empty() {
        let e = layerzero::Error::UnknownKernel { id: kernel_id.to_owned(), nearest: None };
        return Err(error::engine(py, &e));
    }
    for version in versions {
        engine().unregister(kernel_id, &version).map_err(|e| error::engine(py, &e))?;
    }
    Ok(())
}

/// Makes a plugin that could not be loaded known, with why.
#[pyfunction]
pub fn disable(py: Python<'_>, name: &str, why: &str) -> PyResult<()> {
    let changed = engine().update(|spec| {
        let mut descriptor = layerzero::model::BackendDescriptor::native(name, "unknown", Vec::new());
        descriptor.origin = PluginOrigin::EntryPoint;
        let reason = Reason::BackendImportFailed { library: name.to_owned(), error: why.to_owned() };
        spec.kernels.retain(|kernel| kernel.backend != name);
        let state = layerzero::selection::BackendState { descriptor, unavailable: Some(reason) };
        spec.backends.insert(name.to_owned(), state);
    });
    changed.map_err(|e| error::engine(py, &e))
}
