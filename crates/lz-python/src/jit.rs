//! Compiling in the background, the manifest, and calls that are written down.
//!
//! Everything here that locks does so while holding the interpreter, so that no lock is held when the process forks.

use std::path::PathBuf;

use layerzero::model::{CallSpec, Context, DeviceIx};
use layerzero::perf::request::{Request, RequestError};
use layerzero::{ManifestError, ManifestFile};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::inspect::json;
use crate::process::{Call, detached};
use crate::{context, error, registry};

fn raise(py: Python<'_>) -> impl Fn(layerzero::Error) -> PyErr {
    move |e| error::engine(py, &e)
}

fn refused(py: Python<'_>) -> impl Fn(ManifestError) -> PyErr {
    move |e| error::configuration(py, "BAD_MANIFEST", &e.to_string(), e.hint())
}

pub fn parse(py: Python<'_>, call: &str) -> PyResult<CallSpec> {
    call.parse().map_err(|e| {
        let hint = "write it as lz.calls_of and lz.manifest do: {\"op\": …, \"tensors\": {…}}";
        error::invalid(py, "BAD_CALL", &format!("{call} is no call: {e}"), hint)
    })
}

/// The next kernel to compile: number, kernel, call, device.
#[pyfunction]
pub fn jit_next() -> Option<(u64, String, String, u16)> {
    engine().next_compile().map(|job| (job.id, job.kernel, job.call.to_string(), job.device.0))
}

/// The kernel that would serve a call if it were compiled for it; in a capture, where that is asked about.
#[pyfunction]
#[pyo3(signature = (call, device, capturing=false))]
pub fn jit_wanted(py: Python<'_>, call: &str, device: u16, capturing: bool) -> PyResult<Option<String>> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let spec = parse(py, call)?;
    let context = registry::context(py)?;
    let context = Context { capturing: capturing || context.capturing, ..context };
    let named = spec.named(DeviceIx(device), context);
    let scope = context::scope(py);
    let (_, bound) = scope.bind(&spec.op, &named).map_err(raise(py))?;
    Ok(engine().wanted(&scope, &bound.query))
}

/// Somebody compiles a kernel for a call now; gives its number.
#[pyfunction]
pub fn jit_begin(py: Python<'_>, kernel: &str, call: &str, device: u16) -> PyResult<u64> {
    let spec = parse(py, call)?;
    engine().begin_compile(kernel, &spec, DeviceIx(device)).map(|job| job.id).map_err(raise(py))
}

/// A kernel was compiled. `caches`: where its library keeps what it compiled.
#[pyfunction]
pub fn jit_done(py: Python<'_>, id: u64, compile_ms: f64, caches: Vec<PathBuf>) -> PyResult<()> {
    if let Some(job) = engine().compiled(id).map_err(raise(py))? {
        detached(py, || engine().keep_warm(&job.kernel, &job.call, job.device, compile_ms, caches));
    }
    Ok(())
}

/// A kernel could not be compiled.
#[pyfunction]
pub fn jit_failed(id: u64, error: &str) {
    engine().compile_failed(id, error);
}

/// What the parent's thread was compiling waits again; gives how much waits.
#[pyfunction]
pub fn jit_forked() -> usize {
    engine().compiles_forked();
    engine().jit_status().queued
}

/// Puts in force what earlier processes compiled; gives how much that is.
#[pyfunction]
pub fn load_warm(py: Python<'_>) -> PyResult<usize> {
    engine().load_warm().map_err(raise(py))
}

/// Decides a call and remembers it: the kernel that serves it.
#[pyfunction]
pub fn plan_call(py: Python<'_>, call: &str, device: u16) -> PyResult<String> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let spec = parse(py, call)?;
    let named = spec.named(DeviceIx(device), registry::context(py)?);
    let (_, bound) = context::scope(py).bind(&spec.op, &named).map_err(raise(py))?;
    let steps = engine().steps(&bound.query).map_err(raise(py))?;
    Ok(steps[0].kernel.id.clone())
}

/// The calls a request (as JSON) asks for, each as JSON.
#[pyfunction]
#[allow(clippy::result_large_err)]
pub fn requested_calls(py: Python<'_>, request: &str) -> PyResult<Vec<String>> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let bad = |what: String, hint: &str| error::configuration(py, "BAD_REQUEST", &what, hint);
    let request: Request = serde_json::from_str(request).map_err(|e| bad(format!("no request: {e}"), ""))?;
    let wanted = request.wanted(engine(), &context::scope(py)).map_err(|e| match e {
        RequestError::Call(e) => error::call(py, &e),
        other => bad(other.to_string(), &other.hint()),
    })?;
    Ok(wanted.into_iter().map(|wanted| wanted.call.to_string()).collect())
}

/// The calls of this process, as JSON.
#[pyfunction]
pub fn manifest() -> String {
    json(&engine().manifest().entries())
}

/// Adds the calls of this process to a file, under the hash of a model; gives where that is.
#[pyfunction]
#[pyo3(signature = (path=None, model_hash=None))]
pub fn save_manifest(py: Python<'_>, path: Option<PathBuf>, model_hash: Option<&str>) -> PyResult<PathBuf> {
    let path = engine().manifest_path(path.as_deref()).map_err(refused(py))?;
    engine().manifest().save(&path, model_hash).map_err(refused(py))?;
    Ok(path)
}

/// The calls of a model that a file has, as JSON, unless they are too old; and how many models it has.
#[pyfunction]
#[pyo3(signature = (path=None, model_hash=None))]
pub fn read_manifest(py: Python<'_>, path: Option<PathBuf>, model_hash: Option<&str>) -> PyResult<(String, usize)> {
    let path = engine().manifest_path(path.as_deref()).map_err(refused(py))?;
    let file = ManifestFile::read(&path).map_err(refused(py))?;
    let days = engine().config().settings.jit.manifest_stale_days;
    Ok((json(&file.calls(model_hash, days)), file.models().count()))
}
