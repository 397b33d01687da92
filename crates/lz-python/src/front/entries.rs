//! The entry points that the interpreter calls, one per function, and how they are added to the module.

use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::redirecting::{with_lse, with_packed};
use super::running::run;
use super::{FRONTS, Front, MAX_ARGUMENTS, MAX_FUNCTIONS, Slots};
use crate::process::Call;
use crate::{docs, error, packed};

/// One function's entry point: a C function per place in the list.
unsafe extern "C" fn entry<const INDEX: usize>(
    _module: *mut PyObject,
    args: *const *mut PyObject,
    count: ffi::Py_ssize_t,
    names: *mut PyObject,
) -> *mut PyObject {
    let run = || {
        let _call = Call::begin();
        // SAFETY: the interpreter calls with itself held, and with arguments as the protocol says.
        unsafe { call(&FRONTS.get().expect("made with the functions")[INDEX], args, count as usize, names) }
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Python::attach(|py| error::internal(py, &*panic).restore(py));
        ptr::null_mut()
    })
}

/// # Safety
/// As [`Front::parse`], holding the interpreter.
#[inline]
unsafe fn call(front: &'static Front, args: *const *mut PyObject, count: usize, names: *mut PyObject) -> *mut PyObject {
    let mut slots: Slots = [ptr::null_mut(); MAX_ARGUMENTS];
    // SAFETY: passed on.
    if let Err(misfit) = unsafe { front.parse(args, count, names, &mut slots) } {
        return front.refuse(&misfit);
    }
    if let Some((at, other)) = front.with_lse
        && !slots[at].is_null()
    {
        let asked = std::mem::replace(&mut slots[at], ptr::null_mut());
        // SAFETY: both are static objects.
        if asked != unsafe { ffi::Py_False() } && asked != unsafe { ffi::Py_None() } {
            // SAFETY: the caller holds the arguments.
            return unsafe { with_lse(front, &FRONTS.get().expect("made with the functions")[other], asked, &slots) };
        }
    }
    if let Some(redirection) = front.packed
        && let weight = slots[redirection.at]
        // SAFETY: the caller holds the arguments.
        && !weight.is_null() && unsafe { packed::is_packed(weight) }
    {
        let fronts = FRONTS.get().expect("made with the functions");
        // SAFETY: as above.
        return unsafe { with_packed(front, fronts, redirection, &slots) };
    }
    // SAFETY: the caller holds the arguments.
    unsafe { run(front, &slots, true) }
}

macro_rules! entries {
    ($($index:literal)+) => { [$(entry::<$index> as ffi::PyCFunctionFastWithKeywords),+] };
}

/// Entry points for as many functions as there may be.
static ENTRIES: [ffi::PyCFunctionFastWithKeywords; MAX_FUNCTIONS] = entries!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);

/// Adds every function to the module.
pub fn add_functions(py: Python<'_>, module: &Bound<'_, PyModule>) -> PyResult<()> {
    let package = PyString::intern(py, "layerzero");
    for (front, entry) in Front::all(py).iter().zip(ENTRIES) {
        let name = leak(front.name());
        let method = Box::leak(Box::new(ffi::PyMethodDef {
            ml_name: name.as_ptr(),
            ml_meth: ffi::PyMethodDefPointer { PyCFunctionFastWithKeywords: entry },
            ml_flags: ffi::METH_FASTCALL | ffi::METH_KEYWORDS,
            ml_doc: leak(&docs::docstring(front.signature)).as_ptr(),
        }));
        // SAFETY: the definition and its strings live for ever; the result is a new reference or an exception.
        let function = unsafe {
            Bound::from_owned_ptr_or_err(py, ffi::PyCFunction_NewEx(method, ptr::null_mut(), package.as_ptr()))?
        };
        module.add(front.name(), function)?;
    }
    Ok(())
}

fn leak(text: &str) -> &'static CStr {
    Box::leak(CString::new(text).expect("no name or docstring holds a zero byte").into_boxed_c_str())
}
