//! Calls with a packed weight: `linear(x, packed)` is `linear_packed` on the blocks.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use layerzero::model::Signature;
use pyo3::ffi::{self, PyObject, PyTypeObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::error;
use crate::front::{Front, Slots};

/// The class of packed weights, once `layerzero.packing` has named it. It is never freed.
static CLASS: AtomicPtr<PyTypeObject> = AtomicPtr::new(ptr::null_mut());

/// Names the class of packed weights.
#[pyfunction]
pub fn packed_weights(cls: Bound<'_, PyType>) {
    CLASS.store(cls.into_ptr().cast(), Ordering::Release);
}

/// Whether an object is a packed weight.
///
/// # Safety
/// A live object.
#[inline]
pub unsafe fn is_packed(object: *mut PyObject) -> bool {
    // SAFETY: the caller's.
    ptr::eq(unsafe { ffi::Py_TYPE(object) }, CLASS.load(Ordering::Acquire))
}

/// Where a function takes a weight that may be packed, and the place of the function that serves such calls in the list:
/// the one of the same name with `_packed` behind it.
pub fn redirection(signature: &Signature) -> Option<(usize, usize)> {
    let name = signature.function.name;
    let other = format!("{}_packed", name.strip_suffix("_packed").unwrap_or(name));
    let other = Signature::all().iter().position(|s| s.function.name == other)?;
    Some((signature.arguments.iter().position(|a| a.name == "weight")?, other))
}

/// The arguments of the function for packed weights, and what they borrow from.
pub struct Unwrapped<'py> {
    pub slots: Slots,
    _held: [Bound<'py, PyAny>; 3],
}

/// Puts the parts of a packed weight into the arguments of the function that takes them. Sizes the caller named stay, and
/// are checked like those of any call.
pub fn unwrapped<'py>(
    py: Python<'py>,
    front: &Front,
    other: &Front,
    at: usize,
    slots: &Slots,
) -> PyResult<Unwrapped<'py>> {
    let mut theirs: Slots = [ptr::null_mut(); crate::front::MAX_ARGUMENTS];
    let place = |name: &str| other.signature.arguments.iter().position(|a| a.name == name);
    for (i, argument) in front.signature.arguments.iter().enumerate() {
        if let Some(place) = place(argument.name) {
            theirs[place] = slots[i];
        }
    }
    // SAFETY: a live object, which the caller holds.
    let weight = unsafe { Bound::from_borrowed_ptr(py, slots[at]) };
    let (blocks, interleave) = (weight.getattr(intern!(py, "blocks"))?, weight.getattr(intern!(py, "interleave"))?);
    let shape = weight.getattr(intern!(py, "shape"))?;
    let outs = shape.get_item(0)?;
    if let Some(input) =
        front.signature.arguments.iter().position(|a| a.name == "input").filter(|&i| !slots[i].is_null())
    {
        // SAFETY: as above.
        let input = unsafe { Bound::from_borrowed_ptr(py, slots[input]) };
        same_features(py, front.name(), &input, shape.get_item(1)?.extract()?)?;
    }
    for (name, value) in [("weight", &blocks), ("out_features", &outs), ("interleave", &interleave)] {
        if let Some(place) = place(name)
            && (name == "weight" || theirs[place].is_null())
        {
            theirs[place] = value.as_ptr();
        }
    }
    Ok(Unwrapped { slots: theirs, _held: [blocks, outs, interleave] })
}

/// Refuses an input that has not the features of the weight. The blocks do not tell: what pads them looks like features.
/// What is no tensor, or has no dimension, is refused where the call is read.
fn same_features(py: Python<'_>, function: &str, input: &Bound<'_, PyAny>, expected: i64) -> PyResult<()> {
    let Ok(shape) = input.getattr(intern!(py, "shape")) else { return Ok(()) };
    let Ok(given) = shape.get_item(-1).and_then(|size| size.extract::<i64>()) else { return Ok(()) };
    if given == expected {
        return Ok(());
    }
    let text = format!("lz.{function}: the input has {given} features, the packed weight takes {expected}");
    let hint =
        format!("pass an input whose last dimension is {expected}, or the packed weight of the layer for this input");
    Err(error::invalid(py, "WRONG_SHAPE", &text, &hint))
}
