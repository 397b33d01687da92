//! Backends, kernels and plugins, as Python brings them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use layerzero::Executable;
use layerzero::model::schema::OpKind;
use layerzero::model::{Catalog, Context, KernelDescriptor, Op, Param, PluginOrigin, Reason, Trust, capabilities};
use pyo3::intern;
use pyo3::prelude::*;

use crate::engine::engine;
use crate::error;
use crate::front::MAX_ARGUMENTS;
use crate::importing::Library;
use crate::process::{self, Call, detached};
use crate::pycall::PyKernel;
use crate::torch::Torch;

static LOADED: AtomicBool = AtomicBool::new(false);

/// Loads the backends and plugins, once, before the first call or question. One that was interrupted goes on.
pub fn ensure_loaded(py: Python<'_>) -> PyResult<()> {
    if !LOADED.load(Ordering::Acquire) {
        let _call = Call::begin();
        // A plugin may call us while it is being loaded: then the rest is still to come.
        // Loading makes calls of its own. Were one of them to sleep because the program ends, the end would wait for it.
        let loaded = process::to_the_end(|| py.import("layerzero.loading")?.call_method0("load"))?;
        let complete = loaded.is_truthy()?;
        LOADED.store(complete, Ordering::Release);
    }
    Ok(())
}

/// What is registered and configured at a moment.
#[pyclass(frozen, module = "layerzero._native")]
pub struct Checkpoint(layerzero::Checkpoint);

/// What is registered and configured now.
#[pyfunction]
pub fn checkpoint(py: Python<'_>) -> Checkpoint {
    Checkpoint(detached(py, || engine().checkpoint()))
}

/// Takes back everything that was registered and configured since.
#[pyfunction]
pub fn restore(py: Python<'_>, checkpoint: &Checkpoint) -> PyResult<()> {
    let checkpoint = &checkpoint.0;
    detached(py, || engine().restore(checkpoint).and_then(|()| engine().watch())).map_err(|e| error::engine(py, &e))
}

/// Whether the backends and plugins are loaded.
pub fn is_loaded() -> bool {
    LOADED.load(Ordering::Acquire)
}

/// What the call demands because of where it is made.
pub fn context(py: Python<'_>) -> PyResult<Context> {
    let threads = threads(py)?;
    let Some(torch) = Torch::known() else { return Ok(Context { threads, ..Context::default() }) };
    let (deterministic, sdpa) = (torch.surroundings().deterministic, torch.sdpa(py)?);
    Ok(Context { deterministic, threads, sdpa, ..Context::default() })
}

/// How many threads torch's kernels on the CPU use now; 0 without torch. Calls and questions that do not say theirs take
/// this number from here on.
pub fn threads(py: Python<'_>) -> PyResult<u16> {
    let threads = Torch::find(py)?.map_or(0, Torch::threads);
    if threads > 0 {
        engine().set_threads(threads);
    }
    Ok(threads)
}

/// Whether an exception says that the call itself is wrong.
pub fn is_callers_fault(py: Python<'_>, raised: &PyErr) -> PyResult<bool> {
    let class = py.import("layerzero.errors")?.getattr("InvalidCallError")?;
    raised.value(py).is_instance(&class)
}

/// A kernel's id, the function that runs it, and the names of that function's parameters.
type Adapter = (String, Py<PyAny>, Vec<String>);

/// Loads a backend's capabilities document with the versions found; its kernels run by the given functions. A backend
/// that cannot be used is loaded with why (`("NOT_INSTALLED", library)`, `("UNPROVEN", backend)` or
/// `("BACKEND_IMPORT_FAILED", one line)`), so that its kernels can be listed and explained. `trust`: `"built_in"`, `"vouched"` or `"unproven"`. `lacks` are
/// instruction sets the library does not use in this process. `importer` is called once, before one of the kernels runs; when
/// it raises, the backend cannot be used after all.
#[pyfunction]
#[pyo3(signature = (name, document, versions, adapters, unavailable=None, trust="unproven", lacks=Vec::new(), importer=None))]
#[allow(clippy::too_many_arguments)]
pub fn load_backend(
    py: Python<'_>,
    name: &str,
    document: &str,
    versions: BTreeMap<String, String>,
    adapters: Vec<Adapter>,
    unavailable: Option<(String, String)>,
    trust: &str,
    lacks: Vec<String>,
    importer: Option<Py<PyAny>>,
) -> PyResult<()> {
    let engine = engine();
    let raise = |e: layerzero::Error| error::engine(py, &e);
    // A function that does not fit is found before anything is loaded.
    let read = capabilities::read(document).ok();
    let kernels = read.as_ref().map_or(&[][..], |d| &d.kernels[..]);
    let library = Library::of(read.as_ref().map_or(name, |d| &d.backend.name), importer);
    let mut attached = Vec::new();
    for (id, callable, parameters) in adapters.into_iter().filter(|_| read.is_some()) {
        let Some(kernel) = kernels.iter().find(|k| k.id == id) else {
            let nearest = layerzero::model::nearest(&id, kernels.iter().map(|k| k.id.as_str())).map(str::to_owned);
            return Err(raise(layerzero::Error::UnknownKernel { id, nearest }));
        };
        let function = adapter(py, &id, &kernel.operation, callable, parameters, library.clone())?;
        let versions = kernels.iter().filter(|k| k.id == id).map(|k| k.version.clone());
        attached.extend(versions.map(|v| (id.clone(), v, Executable::Foreign(function.clone()))));
    }
    let backend = read.map_or_else(|| name.to_owned(), |d| d.backend.name);
    let reason = unavailable.map(|(code, detail)| self::unavailable(&code, detail, &backend));
    let trust = trusted(trust);
    let adjust = |spec: &mut layerzero::selection::SnapshotSpec| {
        for kernel in spec.kernels.iter_mut().filter(|k| k.backend == backend && !k.standalone) {
            Arc::make_mut(kernel).trust = trust;
        }
        spec.versions.extend(versions);
        if let Some(state) = spec.backends.get_mut(&backend) {
            // A document that was refused says why.
            state.unavailable = reason.or_else(|| state.unavailable.take());
            state.lacks = lacks;
        }
    };
    engine.load_backend(name, document, adjust, attached).map_err(raise)
}

/// Has changes wait until they are settled: loading makes dozens of them.
#[pyfunction]
pub fn hold_changes() {
    engine().hold_changes();
}

/// Puts into force what was changed since `hold_changes`.
#[pyfunction]
pub fn settle_changes(py: Python<'_>) -> PyResult<()> {
    detached(py, || engine().settle_changes()).map_err(|e| error::engine(py, &e))
}

/// Why a backend cannot be used, by its code and what there is to say.
pub fn unavailable(code: &str, detail: String, backend: &str) -> Reason {
    match code {
        "NOT_INSTALLED" => Reason::NotInstalled { library: detail },
        "UNPROVEN" => Reason::Unproven { name: detail },
        _ => Reason::BackendImportFailed { library: backend.to_owned(), error: detail },
    }
}

/// On whose word a kernel counts as right; nobody's, unless it is said.
fn trusted(word: &str) -> Trust {
    match word {
        "built_in" => Trust::BuiltIn,
        "vouched" => Trust::Vouched,
        _ => Trust::Unproven,
    }
}

/// A function as a kernel, if its parameters are the operation's: it must name what every call gives, and nothing the
/// operation does not have.
fn adapter(
    py: Python<'_>,
    id: &str,
    operation: &str,
    callable: Py<PyAny>,
    parameters: Vec<String>,
    library: Option<Arc<Library>>,
) -> PyResult<Arc<PyKernel>> {
    let bad = |text: String, hint: String| Err(error::configuration(py, "BAD_ADAPTER", &text, &hint));
    if parameters.len() > MAX_ARGUMENTS {
        let text = format!("'{id}' takes {} arguments, at most {MAX_ARGUMENTS} are passed", parameters.len());
        return bad(text, "name only what the kernel uses".into());
    }
    let target = Catalog::get().find(operation).map_err(|e| error::call(py, &e))?;
    let ops: Vec<&Op> = target.ops.iter().map(|&ix| Catalog::get().op(ix)).collect();
    if ops.iter().all(|op| op.schema().kind == OpKind::Tokenization) {
        if let Some(name) = parameters.iter().find(|name| !crate::texts::ARGUMENTS.contains(&name.as_str())) {
            let known = crate::texts::ARGUMENTS.join(", ");
            return bad(
                format!("'{id}' takes '{name}', which kernels on texts are not given"),
                format!("take {known}"),
            );
        }
        return Ok(Arc::new(PyKernel { callable, parameters, direct: None, draws_itself: false, library }));
    }
    for name in parameters.iter().filter(|name| *name != "layout") {
        if !ops.iter().any(|op| op.input_index(name).is_some() || op.param_index(name).is_some()) {
            let all = ops.iter().map(|op| op.schema());
            let all = all.flat_map(|s| s.inputs.iter().map(|i| i.name).chain(s.params.iter().map(|p| p.name)));
            let known: BTreeSet<&str> = all.collect();
            let near = layerzero::model::did_you_mean(&layerzero::model::nearest(name, known.iter().copied()));
            let text = format!("'{id}' takes '{name}', which {operation} does not have{near}");
            let known = known.into_iter().collect::<Vec<_>>().join(", ");
            return bad(text, format!("name its parameters after the operation's: {known}"));
        }
    }
    // Behind an alias an operation may have inputs the others do not; each kernel knows which it serves.
    if let [op] = ops[..]
        && let Some(name) = forgotten(op, &parameters)
    {
        let text = format!("'{id}' does not take '{name}', which every call of {operation} may set");
        return bad(text, format!("add the parameter '{name}' and honour it"));
    }
    let direct = callable.getattr(py, intern!(py, "direct")).ok();
    let draws_itself = callable.getattr(py, intern!(py, "draws_itself")).and_then(|yes| yes.is_truthy(py));
    Ok(Arc::new(PyKernel { callable, parameters, direct, draws_itself: draws_itself.unwrap_or(false), library }))
}

/// A tensor every call gives, or a parameter every kernel must honour, that a function does not name.
fn forgotten(op: &Op, parameters: &[String]) -> Option<&'static str> {
    let schema = op.schema();
    let mut inputs = schema.inputs.iter().enumerate();
    let input = inputs.find(|(i, input)| !input.optional && !parameters.iter().any(|p| op.input_index(p) == Some(*i)));
    // A seed only counts where something is always drawn.
    let counts =
        |param: &Param| param.universal && !param.promise && (param.name != "seed" || schema.kind == OpKind::Sampling);
    let mut params = schema.params.iter().enumerate();
    let param = params.find(|(i, param)| counts(param) && !parameters.iter().any(|p| op.param_index(p) == Some(*i)));
    input.map(|(_, i)| i.name).or(param.map(|(_, p)| p.name))
}

/// Registers one kernel, described by a document of its own, to be run by a function. `trust` as in `load_backend`.
#[pyfunction]
#[pyo3(signature = (document, kernel, trust="unproven"))]
pub fn register(py: Python<'_>, document: &str, kernel: Adapter, trust: &str) -> PyResult<()> {
    let _call = Call::enter(py);
    let read = capabilities::read(document).map_err(|e| {
        error::engine(py, &layerzero::Error::Capabilities { backend: "register_kernel".into(), error: e })
    })?;
    let (id, callable, parameters) = kernel;
    for descriptor in read.kernels {
        let descriptor = KernelDescriptor { standalone: true, trust: trusted(trust), ..descriptor };
        let function = adapter(py, &id, &descriptor.operation, callable.clone_ref(py), parameters.clone(), None)?;
        engine().register_as(descriptor, Executable::Foreign(function)).map_err(|e| error::engine(py, &e))?;
    }
    Ok(())
}

/// Removes a kernel, or with `id@version` one version of it; calls under way finish with it.
#[pyfunction]
pub fn unregister(py: Python<'_>, kernel_id: &str) -> PyResult<()> {
    let (id, wanted) = kernel_id.rsplit_once('@').map_or((kernel_id, None), |(id, v)| (id, Some(v)));
    let is_it = |k: &KernelDescriptor| k.id == id && wanted.is_none_or(|v| k.version == v);
    let versions: Vec<String> =
        engine().with_snapshot(|s| s.kernels().filter(|(_, k)| is_it(k)).map(|(_, k)| k.version.clone()).collect());
    if versions.is_empty() {
        let known = engine().list_kernels(None).unwrap_or_default();
        let nearest = layerzero::model::nearest(id, known.iter().map(|k| k.kernel_id.as_str())).map(str::to_owned);
        return Err(error::engine(py, &layerzero::Error::UnknownKernel { id: kernel_id.to_owned(), nearest }));
    }
    for version in versions {
        engine().unregister(id, &version).map_err(|e| error::engine(py, &e))?;
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
        let state = layerzero::selection::BackendState::unavailable(descriptor, reason);
        spec.backends.insert(name.to_owned(), state);
    });
    changed.map_err(|e| error::engine(py, &e))
}
