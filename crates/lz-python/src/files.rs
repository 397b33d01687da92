//! Files that Python's side writes: by the one function of the engine.

use std::io;
use std::path::{Path, PathBuf};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

/// Writes a text to a file, whole or not at all. Links are followed, pipes and devices are written to, and nothing is put
/// in their place.
#[pyfunction]
pub fn write_file(py: Python<'_>, path: PathBuf, text: &str) -> PyResult<()> {
    // Not `detached`: a pipe may be waited for as long as it takes, and no lock of the engine is held meanwhile.
    let written = py.detach(|| layerzero::write_file(&path, |to| to.write_all(text.as_bytes())));
    written.map_err(|error: io::Error| os_error(&path, &error))
}

/// The exception that Python's own functions raise for the same error.
fn os_error(path: &Path, error: &io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(number) => {
            let text = error.to_string();
            let text = text.split(" (os error").next().unwrap_or_default().to_owned();
            PyOSError::new_err((number, text, path.to_owned()))
        }
        None => PyOSError::new_err(format!("'{}': {error}", path.display())),
    }
}
