//! Libraries that are imported when a kernel of theirs is about to run, and not before: an import may take seconds, print,
//! and fail.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use layerzero::model::Reason;
use pyo3::prelude::*;

use crate::engine::engine;
use crate::{error, interrupted};

/// A library that was found, and what imports it.
pub struct Library {
    backend: String,
    /// Takes no arguments. Raises an exception where the library cannot be used, the same one each time.
    import: Py<PyAny>,
    imported: AtomicBool,
}

/// Libraries by the backend they are of.
static KNOWN: Mutex<BTreeMap<String, Arc<Library>>> = Mutex::new(BTreeMap::new());

impl Library {
    /// The library of a backend whose kernels are registered now. `None`: nothing is to be imported for them.
    pub fn of(backend: &str, import: Option<Py<PyAny>>) -> Option<Arc<Library>> {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(backend);
        let library =
            Arc::new(Library { backend: backend.to_owned(), import: import?, imported: AtomicBool::new(false) });
        known.insert(backend.to_owned(), library.clone());
        Some(library)
    }

    /// Whether it was imported.
    pub fn is_imported(&self) -> bool {
        self.imported.load(Ordering::Acquire)
    }

    /// Imports it, once; whether that was now. One that cannot be imported makes its backend unavailable, and the exception
    /// says why.
    pub fn import(&self, py: Python<'_>) -> PyResult<bool> {
        if self.is_imported() {
            return Ok(false);
        }
        let reason = match self.import.call0(py) {
            Ok(_) => None,
            // An interrupt says nothing of the library.
            Err(raised) if interrupted::by_the_caller(py, &raised, &[]).is_some() => return Err(raised),
            Err(raised) => Some((error::one_line(py, &raised), raised)),
        };
        match reason {
            None => Ok(!self.imported.swap(true, Ordering::AcqRel)),
            Some((line, raised)) => {
                let line = line.trim_start_matches("ImportError: ").to_owned();
                let why = Reason::BackendImportFailed { library: self.backend.clone(), error: line };
                let is_new = engine().with_snapshot(|s| {
                    s.spec().backends.get(&self.backend).is_some_and(|state| state.unavailable.as_ref() != Some(&why))
                });
                if is_new {
                    let changed = engine().update(|spec| {
                        if let Some(state) = spec.backends.get_mut(&self.backend) {
                            state.unavailable = Some(why);
                        }
                    });
                    changed.map_err(|e| error::engine(py, &e))?;
                }
                Err(raised)
            }
        }
    }
}

/// The backends whose libraries were found and are not imported yet.
pub fn not_imported() -> Vec<String> {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.values().filter(|library| !library.is_imported()).map(|library| library.backend.clone()).collect()
}
