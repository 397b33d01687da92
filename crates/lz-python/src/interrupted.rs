//! Exceptions that end a kernel's run and are not its failure: the caller's own code raised them, or an interrupt did.

use pyo3::exceptions::PyException;
use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// The exception to pass on as it is, if the run of a kernel was ended by the caller and not by the kernel: an interrupt,
/// or something raised by a hook, a mode, an override or a signal handler of the caller's. `slots`: the call's arguments.
pub fn by_the_caller(py: Python<'_>, error: &PyErr, slots: &[*mut PyObject]) -> Option<PyErr> {
    if !error.is_instance_of::<PyException>(py) {
        return Some(error.clone_ref(py));
    }
    // SAFETY: slots hold live objects or null.
    let given = |&slot: &*mut PyObject| unsafe { Bound::from_borrowed_ptr_or_opt(py, slot) };
    let ask = || -> PyResult<Option<PyErr>> {
        let arguments = PyList::new(py, slots.iter().filter_map(given).collect::<Vec<_>>())?;
        let module = py.import("layerzero.interruptions")?;
        // Taken out of a copy: before Python 3.12 only that puts the traceback into the exception.
        let found = module.call_method1("interruption", (error.clone_ref(py).into_value(py), arguments))?;
        Ok((!found.is_none()).then(|| PyErr::from_value(found)))
    };
    match ask() {
        Ok(found) => found,
        // A question that fails leaves the kernel's failure what it is; an interrupt meanwhile goes first.
        Err(other) => (!other.is_instance_of::<PyException>(py)).then_some(other),
    }
}
