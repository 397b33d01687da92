//! What becomes of a kernel's result on the straight path: it is handed back as it is, written to the caller's tensor, or
//! named as the function names it.

use std::ptr;
use std::sync::OnceLock;

use layerzero::model::{Op, Query};
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyString;

/// What the function gives of what its kernel gives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The same.
    AsItIs,
    /// The first of several.
    First,
    /// The three of `quantize`, by name.
    Quantized,
}

impl Ending {
    /// Of a call: `quantize` gives the values alone where the caller gave the scales.
    pub fn of(op: &Op, query: &Query) -> Ending {
        let scale_is_given = op.input_index("scale").is_some_and(|index| query.tensor(index).is_present());
        match (op.id() == "quantize", scale_is_given) {
            (false, _) => Ending::AsItIs,
            (true, true) => Ending::First,
            (true, false) => Ending::Quantized,
        }
    }
}

static QUANTIZED: OnceLock<Py<PyAny>> = OnceLock::new();
static COPY: OnceLock<Py<PyString>> = OnceLock::new();

/// Looks up what results are finished with, before the first is. `false` where something is missing.
pub fn prepare(py: Python<'_>) -> bool {
    if QUANTIZED.get().is_none()
        && let Ok(class) = py.import("layerzero.arrays").and_then(|m| m.getattr("Quantized"))
    {
        let _ = QUANTIZED.set(class.unbind());
    }
    // Made before it is set: whoever makes something inside of a lock may give up the interpreter there, to a thread that
    // waits for the lock.
    if COPY.get().is_none() {
        let _ = COPY.set(PyString::intern(py, "copy_").unbind());
    }
    QUANTIZED.get().is_some()
}

/// Finishes a result. `out`: a tensor to write it to. Gives a new reference; what could not be finished goes to the slow path,
/// which says why.
///
/// # Safety
/// `result` is a reference that is handed over, all objects are alive, and this thread holds the interpreter.
#[inline]
pub unsafe fn finish(
    ending: Ending,
    result: *mut PyObject,
    out: Option<*mut PyObject>,
) -> Result<*mut PyObject, Option<(usize, *mut PyObject)>> {
    // SAFETY: none is a static object.
    match (ending, out.filter(|&out| out != unsafe { ffi::Py_None() })) {
        (Ending::AsItIs, None) => Ok(result),
        // SAFETY: passed on.
        (Ending::AsItIs, Some(out)) => unsafe { written(result, out) },
        // SAFETY: passed on.
        _ => unsafe { named(ending, result) },
    }
}

/// # Safety
/// As [`finish`].
#[inline(never)]
unsafe fn written(result: *mut PyObject, out: *mut PyObject) -> Result<*mut PyObject, Option<(usize, *mut PyObject)>> {
    // SAFETY: `copy_` gives a new reference to `out`, or null with an exception set. The result is no longer needed.
    unsafe {
        let name = COPY.get().map_or(ptr::null_mut(), Py::as_ptr);
        let copied = ffi::PyObject_CallMethodObjArgs(out, name, result, ptr::null_mut::<PyObject>());
        ffi::Py_DECREF(result);
        if copied.is_null() {
            // Made again on the slow path, which says why it cannot be written to.
            ffi::PyErr_Clear();
            return Err(None);
        }
        Ok(copied)
    }
}

/// # Safety
/// As [`finish`].
#[inline(never)]
unsafe fn named(ending: Ending, result: *mut PyObject) -> Result<*mut PyObject, Option<(usize, *mut PyObject)>> {
    // SAFETY: a tuple of three tensors, as was looked at; its items are borrowed from it.
    unsafe {
        let finished = match ending {
            Ending::First => {
                let first = ffi::PyTuple_GetItem(result, 0);
                ffi::Py_XINCREF(first);
                first
            }
            _ => QUANTIZED.get().map_or(ptr::null_mut(), |class| ffi::PyObject_CallObject(class.as_ptr(), result)),
        };
        ffi::Py_DECREF(result);
        if finished.is_null() {
            ffi::PyErr_Clear();
            return Err(None);
        }
        Ok(finished)
    }
}
