//! The native half of the Python package `layerzero`.
//!
//! It wraps the engine and decides nothing itself. A call goes `front` → `words` → `memory` → `route` →
//! `pycall`: that is the straight path. `slow` and `job` are every other one, `watched` looks at some of the
//! straight ones. `exchange`, `inside` and `torch` read tensors and torch's state without Python objects; `host`
//! runs Rust kernels on tensors' memory; `control` and `context` are the operator's; `error` is the one map to
//! exceptions.
//!
//! `unsafe` is used to talk to the interpreter on the straight path, where PyO3's own argument parsing would cost as
//! much as the whole call may, and to borrow tensors through DLPack.

mod adapted;
mod allocator;
mod capture;
mod context;
mod control;
#[cfg(any(debug_assertions, feature = "count-allocations"))]
mod counted;
mod device_graph;
mod devices;
mod docs;
mod engine;
mod error;
mod events;
mod exchange;
mod files;
mod finish;
mod front;
mod graph;
mod graphs;
mod host;
mod host_calls;
mod importing;
mod inside;
mod inspect;
mod interrupted;
mod jit;
mod job;
mod libraries;
mod memory;
mod native;
mod packed;
mod params;
mod pieces;
mod pinned;
mod process;
mod proof;
mod pycall;
mod pycaller;
mod registry;
mod route;
mod sampled;
mod saved;
mod session;
mod slow;
mod tensors;
mod texts;
mod torch;
mod tuning;
mod versions;
mod watched;
mod words;
mod written;

use std::io::IsTerminal;
use std::sync::Arc;

use ::layerzero::perf::bench::Bench;
use ::layerzero::{Engine, Reloads};
use lz_cli::program::{Libraries, ModelCalls, ModelSizes, Program, Refusal, Unproven};
use lz_cli::surroundings::Surroundings;
use pyo3::prelude::*;

/// Runs the command line and gives its exit code. The first argument is the program's name.
#[pyfunction]
fn cli(py: Python<'_>, args: Vec<std::ffi::OsString>) -> i32 {
    py.detach(|| {
        let (out, err) = (std::io::stdout(), std::io::stderr());
        let terminals = lz_cli::Terminals { out: out.is_terminal(), err: err.is_terminal() };
        let surroundings = Surroundings { program: Some(Arc::new(PythonProgram)), ..Surroundings::of_process() };
        lz_cli::run_in(args, &mut out.lock(), &mut err.lock(), terminals, surroundings)
    })
}

/// This process, as its commands know it.
#[derive(Debug)]
struct PythonProgram;

impl Program for PythonProgram {
    fn add_kernels(&self, engine: &Engine, wanted: Libraries<'_>) -> Result<Vec<String>, String> {
        libraries::add(engine, wanted)
    }

    fn bench(&self) -> Result<Box<dyn Bench>, String> {
        match Python::attach(tuning::PyBench::new) {
            Ok(bench) => Ok(Box::new(bench)),
            Err(raised) => Err(Python::attach(|py| error::one_line(py, &raised))),
        }
    }

    fn model_calls(&self, wanted: &ModelSizes) -> Result<ModelCalls, Refusal> {
        Python::attach(|py| {
            let traced = py.import("layerzero.workloads").and_then(|module| {
                let ModelSizes { model, dtype, batch, seq, context } = wanted.clone();
                module.call_method1("for_command", (model, dtype, batch, seq, context))?.extract::<String>()
            });
            let text = traced.map_err(|raised| error::refusal(py, &raised))?;
            let unreadable = |e: serde_json::Error| Refusal { what: e.to_string(), hint: "report it".into() };
            serde_json::from_str(&text).map_err(unreadable)
        })
    }

    fn device_in_use(&self, cuda: usize) -> Result<String, String> {
        Python::attach(|py| {
            let told =
                py.import("layerzero.devices").and_then(|module| module.call_method1("in_use_by_files", (cuda,)));
            told.and_then(|name| name.extract()).map_err(|raised| error::one_line(py, &raised))
        })
    }

    fn devices_of(&self, torch_type: &str) -> Result<Vec<::layerzero::model::DeviceSpec>, String> {
        Python::attach(|py| devices::of_kind(py, torch_type).map_err(|raised| error::one_line(py, &raised)))
    }

    fn unproven(&self) -> Vec<Unproven> {
        Python::attach(libraries::unproven).unwrap_or_default()
    }

    fn reloads(&self) -> Reloads {
        engine::engine().health().reloads
    }
}

/// Every function as data.
#[pyfunction]
fn functions(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    docs::functions(py).map(Bound::into_any)
}

/// How many heap allocations the native side has made in this thread; `None` in builds that do not count them.
#[pyfunction]
fn allocations() -> Option<u64> {
    #[cfg(any(debug_assertions, feature = "count-allocations"))]
    return Some(counted::so_far());
    #[cfg(not(any(debug_assertions, feature = "count-allocations")))]
    None
}

/// The native module.
#[pymodule]
#[pyo3(gil_used = true)]
fn _native(py: Python<'_>, module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    front::add_functions(py, module)?;
    module.add_function(wrap_pyfunction!(cli, module)?)?;
    module.add_function(wrap_pyfunction!(functions, module)?)?;
    module.add_function(wrap_pyfunction!(allocations, module)?)?;
    module.add_function(wrap_pyfunction!(registry::load_backend, module)?)?;
    module.add_function(wrap_pyfunction!(registry::hold_changes, module)?)?;
    module.add_function(wrap_pyfunction!(registry::settle_changes, module)?)?;
    module.add_function(wrap_pyfunction!(registry::register, module)?)?;
    module.add_function(wrap_pyfunction!(registry::unregister, module)?)?;
    module.add_function(wrap_pyfunction!(registry::disable, module)?)?;
    module.add_class::<registry::Checkpoint>()?;
    module.add_function(wrap_pyfunction!(registry::checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(registry::restore, module)?)?;
    module.add_function(wrap_pyfunction!(packed::packed_weights, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::which, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::explain, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::explain_to_compile, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::may_explain, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::validate, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::run_kernel, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::inner, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::list_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::backends, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::devices, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::schema, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::document, module)?)?;
    module.add_function(wrap_pyfunction!(inspect::status, module)?)?;
    module.add_class::<tuning::Subject>()?;
    module.add_class::<texts::TextCall>()?;
    module.add_function(wrap_pyfunction!(texts::tokenizer_settings, module)?)?;
    module.add_function(wrap_pyfunction!(texts::text_operation, module)?)?;
    module.add_function(wrap_pyfunction!(tuning::call_inputs, module)?)?;
    module.add_function(wrap_pyfunction!(tuning::measure, module)?)?;
    module.add_function(wrap_pyfunction!(tuning::explain_call, module)?)?;
    module.add_function(wrap_pyfunction!(tuning::learn, module)?)?;
    module.add_function(wrap_pyfunction!(devices::device_number, module)?)?;
    module.add_function(wrap_pyfunction!(devices::named, module)?)?;
    module.add_function(wrap_pyfunction!(jit::jit_next, module)?)?;
    module.add_function(wrap_pyfunction!(jit::jit_wanted, module)?)?;
    module.add_function(wrap_pyfunction!(jit::jit_begin, module)?)?;
    module.add_function(wrap_pyfunction!(jit::jit_done, module)?)?;
    module.add_function(wrap_pyfunction!(jit::jit_failed, module)?)?;
    module.add_function(wrap_pyfunction!(jit::jit_forked, module)?)?;
    module.add_function(wrap_pyfunction!(jit::load_warm, module)?)?;
    module.add_function(wrap_pyfunction!(jit::plan_call, module)?)?;
    module.add_function(wrap_pyfunction!(jit::requested_calls, module)?)?;
    module.add_function(wrap_pyfunction!(jit::manifest, module)?)?;
    module.add_function(wrap_pyfunction!(jit::save_manifest, module)?)?;
    module.add_function(wrap_pyfunction!(jit::read_manifest, module)?)?;
    module.add_function(wrap_pyfunction!(graphs::graph_wanted, module)?)?;
    module.add_function(wrap_pyfunction!(graphs::graph_captured, module)?)?;
    module.add_function(wrap_pyfunction!(graphs::graph_hold, module)?)?;
    module.add_function(wrap_pyfunction!(graphs::graph_release, module)?)?;
    module.add_function(wrap_pyfunction!(graphs::recording, module)?)?;
    module.add_function(wrap_pyfunction!(sampled::time_host_by_events, module)?)?;
    module.add_function(wrap_pyfunction!(capture::exchange_capture_mode, module)?)?;
    module.add_class::<graph::PyGraph>()?;
    module.add_class::<session::PySession>()?;
    module.add_class::<device_graph::PyDeviceGraph>()?;
    module.add_class::<pinned::Plan>()?;
    module.add_function(wrap_pyfunction!(pinned::solve, module)?)?;
    module.add_function(wrap_pyfunction!(pinned::load_table, module)?)?;
    module.add_function(wrap_pyfunction!(pinned::lockfile, module)?)?;
    module.add_function(wrap_pyfunction!(pinned::replay, module)?)?;
    module.add_function(wrap_pyfunction!(pinned::unpin, module)?)?;
    module.add_function(wrap_pyfunction!(pinned::pin_warnings, module)?)?;
    module.add_function(wrap_pyfunction!(pinned::perfdb_warnings, module)?)?;
    module.add_function(wrap_pyfunction!(context::use_context_variable, module)?)?;
    module.add_function(wrap_pyfunction!(files::write_file, module)?)?;
    module.add_function(wrap_pyfunction!(control::load_sources, module)?)?;
    module.add_function(wrap_pyfunction!(control::load_config, module)?)?;
    module.add_function(wrap_pyfunction!(control::configure, module)?)?;
    module.add_function(wrap_pyfunction!(control::reset, module)?)?;
    module.add_function(wrap_pyfunction!(control::settle_names, module)?)?;
    module.add_function(wrap_pyfunction!(control::lock, module)?)?;
    module.add_function(wrap_pyfunction!(control::unlock, module)?)?;
    module.add_function(wrap_pyfunction!(control::reload, module)?)?;
    module.add_function(wrap_pyfunction!(control::overlay, module)?)?;
    module.add_class::<control::Overlay>()?;
    module.add_function(wrap_pyfunction!(control::default_layouts, module)?)?;
    module.add_function(wrap_pyfunction!(control::settings, module)?)?;
    module.add_function(wrap_pyfunction!(control::health, module)?)?;
    module.add_function(wrap_pyfunction!(control::readiness, module)?)?;
    module.add_function(wrap_pyfunction!(control::rearm, module)?)?;
    module.add_function(wrap_pyfunction!(control::forget_failures, module)?)?;
    module.add_function(wrap_pyfunction!(control::calls_made, module)?)?;
    module.add_function(wrap_pyfunction!(control::refresh_memory, module)?)?;
    module.add_function(wrap_pyfunction!(control::set_launch_limits, module)?)?;
    module.add_function(wrap_pyfunction!(process::busy, module)?)?;
    module.add_function(wrap_pyfunction!(process::end, module)?)?;
    module.add_function(wrap_pyfunction!(process::before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(process::after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(process::after_fork_in_child, module)?)?;
    Ok(())
}
