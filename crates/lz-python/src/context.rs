//! `with lz.prefer(…):` seen from the native side: which overlay the calls of this context are made in.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use layerzero::{OverlayId, Scope};
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use crate::engine::engine;

/// The context variable that holds the overlay's number; null until the first context was entered. From then on it is
/// asked on every call: a task may have been started inside of one and outlive it.
static VARIABLE: AtomicPtr<PyObject> = AtomicPtr::new(ptr::null_mut());

unsafe extern "C" {
    /// Not part of the stable ABI, and the same in every version since 3.7.1.
    #[link_name = "PyContextVar_Get"]
    fn context_variable(variable: *mut PyObject, default: *mut PyObject, value: *mut *mut PyObject) -> std::ffi::c_int;
}

/// The overlay of the calls made here and now. This thread holds the interpreter.
#[inline]
pub fn current() -> OverlayId {
    let variable = VARIABLE.load(Ordering::Relaxed);
    if variable.is_null() { OverlayId::NONE } else { ask(variable) }
}

fn ask(variable: *mut PyObject) -> OverlayId {
    let mut value = ptr::null_mut();
    // SAFETY: a context variable that is never freed, and this thread holds the interpreter; the value is a new
    // reference, null when there is none. A failed call, or a value that is no integer, sets an exception.
    unsafe {
        if context_variable(variable, ptr::null_mut(), &mut value) != 0 || value.is_null() {
            ffi::PyErr_Clear();
            return OverlayId::NONE;
        }
        let number = ffi::PyLong_AsLongLong(value);
        ffi::Py_DECREF(value);
        if number < 0 {
            ffi::PyErr_Clear();
        }
        OverlayId(u32::try_from(number).unwrap_or(0))
    }
}

/// Asks this variable from now on.
#[pyfunction]
pub fn use_context_variable(variable: Bound<'_, PyAny>) {
    // Never freed: calls of any thread may be reading it.
    VARIABLE.store(variable.into_ptr(), Ordering::Relaxed);
}

/// The scope of what is asked here and now.
pub fn scope(_py: Python<'_>) -> Scope<'static> {
    engine().scope(current())
}
