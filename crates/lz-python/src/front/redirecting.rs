//! Calls that another function serves: those with a packed weight, and those with `return_lse=True`.

use std::ptr;

use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use super::running::run;
use super::{Front, MAX_ARGUMENTS, Slots};
use crate::error;
use crate::packed::{self, Redirection};

/// A call with a packed weight: the same arguments for the function that takes its blocks.
///
/// # Safety
/// As [`run`].
#[inline(never)]
pub(super) unsafe fn with_packed(
    front: &Front,
    fronts: &'static [Front],
    redirection: Redirection,
    slots: &Slots,
) -> *mut PyObject {
    Python::attach(|py| match packed::unwrapped(py, front, fronts, redirection, slots) {
        // SAFETY: passed on; what the slots borrow from lives until the call is over.
        Ok(call) => unsafe { run(call.front, &call.slots, true) },
        Err(error) => {
            error.restore(py);
            ptr::null_mut()
        }
    })
}

/// A call with `return_lse=True`: the same arguments for the function that gives the logarithms too. One that it does not
/// take must be at its default.
///
/// # Safety
/// As [`run`].
#[inline(never)]
pub(super) unsafe fn with_lse(
    front: &Front,
    other: &'static Front,
    asked: *mut PyObject,
    slots: &Slots,
) -> *mut PyObject {
    let refuse = |text: &str, hint: &str| {
        Python::attach(|py| error::argument(py, "BAD_ARGUMENTS", text, hint).restore(py));
        ptr::null_mut()
    };
    // SAFETY: a static object.
    if asked != unsafe { ffi::Py_True() } {
        return refuse(&format!("{}(): 'return_lse' is neither True nor False", front.name()), "pass True or False");
    }
    let mut theirs: Slots = [ptr::null_mut(); MAX_ARGUMENTS];
    for (at, argument) in front.signature.arguments.iter().enumerate() {
        // SAFETY: a static object.
        if slots[at].is_null() || slots[at] == unsafe { ffi::Py_None() } {
            continue;
        }
        if let Some(place) = other.place(front.names[at].as_ptr()) {
            theirs[place] = slots[at];
            continue;
        }
        let scalar = front.scalar_bits & 1 << at != 0;
        // SAFETY: both are live objects, and numbers or texts compare without surprises; an error counts as different.
        let same =
            scalar && unsafe { ffi::PyObject_RichCompareBool(slots[at], front.defaults[at].as_ptr(), ffi::Py_EQ) } == 1;
        if !same {
            // SAFETY: this thread holds the interpreter.
            unsafe { ffi::PyErr_Clear() };
            let text = format!("{}() with return_lse=True has no argument '{}'", front.name(), argument.name);
            return refuse(&text, &format!("leave it out; see help(lz.{})", other.name()));
        }
    }
    // SAFETY: passed on.
    unsafe { run(other, &theirs, true) }
}
