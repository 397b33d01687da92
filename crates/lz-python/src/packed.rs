//! Calls with a packed weight: `linear(x, packed)` is `linear_packed` on the blocks, or `linear_quantized` where they have scales.

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

/// Where a function takes a weight that may be packed, and the places of the functions that serve such calls in the list: those of
/// the same name with `_packed` and, where the weight has scales, `_quantized` behind it.
#[derive(Clone, Copy)]
pub struct Redirection {
    pub at: usize,
    packed: usize,
    quantized: usize,
}

/// The redirection of a function.
pub fn redirection(signature: &Signature) -> Option<Redirection> {
    let name = signature.function.name;
    let own = name.strip_suffix("_packed").or_else(|| name.strip_suffix("_quantized")).unwrap_or(name);
    let called = |suffix: &str| {
        let name = format!("{own}{suffix}");
        Signature::all().iter().position(|s| s.function.name == name)
    };
    let at = signature.arguments.iter().position(|a| a.name == "weight")?;
    Some(Redirection { at, packed: called("_packed")?, quantized: called("_quantized")? })
}

/// The function for a packed weight, its arguments, and what they borrow from.
pub struct Unwrapped<'py> {
    pub front: &'static Front,
    pub slots: Slots,
    _held: Vec<Bound<'py, PyAny>>,
}

/// Puts the parts of a packed weight into the arguments of the function that takes them. Sizes the caller named stay, and
/// are checked like those of any call.
pub fn unwrapped<'py>(
    py: Python<'py>,
    front: &Front,
    fronts: &'static [Front],
    redirection: Redirection,
    slots: &Slots,
) -> PyResult<Unwrapped<'py>> {
    // SAFETY: a live object, which the caller holds.
    let weight = unsafe { Bound::from_borrowed_ptr(py, slots[redirection.at]) };
    let shape = weight.getattr(intern!(py, "shape"))?;
    let scales = weight.getattr(intern!(py, "scales"))?;
    let mut parts = vec![
        ("weight", weight.getattr(intern!(py, "blocks"))?),
        ("out_features", shape.get_item(0)?),
        ("interleave", weight.getattr(intern!(py, "interleave"))?),
    ];
    let other = if scales.is_none() {
        &fronts[redirection.packed]
    } else {
        parts.extend([("scales", scales), ("group_size", weight.getattr(intern!(py, "group"))?)]);
        &fronts[redirection.quantized]
    };
    let mut theirs: Slots = [ptr::null_mut(); crate::front::MAX_ARGUMENTS];
    let place = |name: &str| other.signature.arguments.iter().position(|a| a.name == name);
    for (i, argument) in front.signature.arguments.iter().enumerate().filter(|&(i, _)| !slots[i].is_null()) {
        let Some(place) = place(argument.name) else {
            let text = format!("{}(): this packed weight goes without '{}'", front.name(), argument.name);
            return Err(error::argument(
                py,
                "BAD_ARGUMENTS",
                &text,
                "leave it out: the weight was packed without scales",
            ));
        };
        theirs[place] = slots[i];
    }
    if let Some(input) =
        front.signature.arguments.iter().position(|a| a.name == "input").filter(|&i| !slots[i].is_null())
    {
        // SAFETY: as above.
        let input = unsafe { Bound::from_borrowed_ptr(py, slots[input]) };
        same_features(py, front.name(), &input, shape.get_item(1)?.extract()?)?;
    }
    for (name, value) in &parts {
        if let Some(place) = place(name)
            && (*name == "weight" || theirs[place].is_null())
        {
            theirs[place] = value.as_ptr();
        }
    }
    Ok(Unwrapped { front: other, slots: theirs, _held: parts.into_iter().map(|(_, value)| value).collect() })
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
