//! Scalars as they come from Python.

use layerzero::model::{DType, ParamType, ParamValue};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString};

/// A parameter's value. Anything with `__index__` is an integer, anything with `__float__` a number.
pub fn value(object: &Bound<'_, PyAny>) -> Option<ParamValue> {
    if let Ok(b) = object.cast::<PyBool>() {
        return Some(ParamValue::Bool(b.is_true()));
    }
    if let Ok(s) = object.cast::<PyString>() {
        return Some(ParamValue::str(&s.to_string()));
    }
    if object.cast::<PyInt>().is_ok() || object.hasattr("__index__").ok()? && object.cast::<PyFloat>().is_err() {
        return match object.extract::<i64>() {
            Ok(i) => Some(ParamValue::Int(i)),
            // Seeds of 64 bits without a sign, as other libraries draw them.
            Err(_) => object.extract::<u64>().ok().map(|i| ParamValue::Int(i as i64)),
        };
    }
    if let Ok(x) = object.extract::<f64>() {
        return Some(ParamValue::Float(x));
    }
    // A dtype of torch's, by the name it has here.
    let text = object.str().ok()?.to_string();
    text.strip_prefix("torch.").filter(|name| name.parse::<DType>().is_ok()).map(ParamValue::str)
}

/// The text that was given for a parameter of a type that does not take it, clipped.
pub fn refused_text(object: &Bound<'_, PyAny>, ty: ParamType) -> Option<String> {
    const SHOWN: usize = 80;
    let text = object.cast::<PyString>().ok()?.to_string();
    (!ty.takes_text(&text)).then(|| text.chars().take(SHOWN).collect())
}

/// A list of integers. Unlike PyO3's own conversion it does not believe `__len__`, which may ask for all memory.
pub fn integers(object: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if object.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("expected integers, not a string"));
    }
    let mut found = Vec::new();
    for item in object.try_iter()? {
        if found.len() == MOST_INTEGERS {
            return Err(PyValueError::new_err(format!("more than {MOST_INTEGERS} integers")));
        }
        found.push(item?.extract()?);
    }
    Ok(found)
}

/// Most sizes, strides or bucket ends in one list.
const MOST_INTEGERS: usize = 4096;

/// A window: earlier keys, and later ones when they are given.
pub fn window(object: &Bound<'_, PyAny>) -> Option<(i64, Option<i64>)> {
    if let Ok(left) = object.extract::<i64>() {
        return Some((left, None));
    }
    match integers(object).ok()?[..] {
        [left, right] => Some((left, Some(right))),
        _ => None,
    }
}

/// Sizes: an integer, or a sequence of them.
pub fn sizes(object: &Bound<'_, PyAny>) -> Option<Vec<i64>> {
    object.extract::<i64>().map(|n| vec![n]).or_else(|_| integers(object)).ok()
}
