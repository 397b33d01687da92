//! The libraries' kernels for the engines of the command line: imported, found, or assumed.

use std::collections::BTreeMap;

use layerzero::Engine;
use lz_cli::program::{Libraries, Unproven};
use pyo3::prelude::*;

use crate::engine::engine as own;
use crate::{importing, registry};

/// A backend's name, its document, the versions its kernels may require, and why it cannot be used.
type Found = (String, String, BTreeMap<String, String>, Option<(String, String)>);

/// Adds the kernels of the libraries to an engine of the command line. Gives the backends whose libraries were not imported.
pub fn add(engine: &Engine, libraries: Libraries<'_>) -> Result<Vec<String>, String> {
    Python::attach(|py| match libraries {
        Libraries::Assumed(wanted) => assume(py, engine, wanted),
        Libraries::Found if !is_in_use() => match found(py) {
            Ok(Some(all)) => adopt(engine).and_then(|()| load(engine, all)),
            // A plugin tells its kernels when it is imported; and importing finds out what files do not tell.
            Ok(None) | Err(_) => Ok(imported(py, engine)),
        },
        Libraries::Found | Libraries::Imported => Ok(imported(py, engine)),
    })
}

/// Libraries that this process has imported stay as they are.
fn assume(py: Python<'_>, engine: &Engine, wanted: &[String]) -> Result<Vec<String>, String> {
    let mut all = assumed(py, wanted).map_err(|raised| raised.value(py).to_string())?;
    if is_in_use() {
        imported(py, engine);
        let usable: Vec<String> = engine
            .backends()
            .into_iter()
            .filter(|backend| backend.unavailable.is_none())
            .map(|backend| backend.descriptor.name)
            .collect();
        all.retain(|(name, ..)| !usable.contains(name));
    } else {
        adopt(engine)?;
    }
    load(engine, all)
}

/// What `layerzero.detection` found, or was told to assume.
fn found(py: Python<'_>) -> PyResult<Option<Vec<Found>>> {
    py.import("layerzero.detection")?.call_method0("found")?.extract()
}

fn assumed(py: Python<'_>, wanted: &[String]) -> PyResult<Vec<Found>> {
    py.import("layerzero.detection")?.call_method1("assumed", (wanted.to_vec(),))?.extract()
}

/// What was never run on the hardware it is for, as `layerzero.detection` tells it.
pub fn unproven(py: Python<'_>) -> PyResult<Vec<Unproven>> {
    type Told = (String, String, Vec<String>, Option<String>, String);
    let told: Vec<Told> = py.import("layerzero.detection")?.call_method0("unproven")?.extract()?;
    let one = |(backend, library, kernels, installed, why)| Unproven {
        backend,
        library,
        kernels,
        installed,
        why,
        named: false,
    };
    Ok(told.into_iter().map(one).collect())
}

/// Whether this process has kernels of libraries already.
fn is_in_use() -> bool {
    registry::is_loaded()
        || own().list_kernels(None).is_ok_and(|all| all.iter().any(|kernel| kernel.dispatch == "foreign"))
}

/// What fitted together in this process does so in another engine. Gives the backends whose libraries it has not imported.
fn imported(py: Python<'_>, engine: &Engine) -> Vec<String> {
    // A configuration that is refused is for the command to report.
    let _ = registry::ensure_loaded(py);
    let _ = py.detach(|| engine.adopt(own()));
    importing::not_imported()
}

/// LayerZero's own kernels.
fn adopt(engine: &Engine) -> Result<(), String> {
    engine.adopt(own()).map_err(|error| error.to_string())
}

fn load(engine: &Engine, all: Vec<Found>) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    let mut known = BTreeMap::new();
    let mut unusable = Vec::new();
    let mut documents = Vec::new();
    for (name, document, versions, why) in all {
        documents.push((name.clone(), document));
        known.extend(versions);
        match why {
            Some(why) => unusable.push((name, why)),
            None => names.push(name),
        }
    }
    // A document that is refused disables its backend, and says so.
    engine.load_all_capabilities(&documents);
    let changed = engine.update(|spec| {
        spec.versions.extend(known);
        for (name, (code, detail)) in unusable {
            if let Some(state) = spec.backends.get_mut(&name) {
                state.unavailable = Some(registry::unavailable(&code, detail, &name));
            }
        }
    });
    changed.map(|()| names).map_err(|error| error.to_string())
}
