//! Scalars as they come from Python.

use layerzero::model::{DType, ParamValue};
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

/// A window: earlier keys, and later ones when they are given.
pub fn window(object: &Bound<'_, PyAny>) -> Option<(i64, Option<i64>)> {
    if let Ok(left) = object.extract::<i64>() {
        return Some((left, None));
    }
    match object.extract::<Vec<i64>>().ok()?[..] {
        [left, right] => Some((left, Some(right))),
        _ => None,
    }
}

/// Sizes: an integer, or a sequence of them.
pub fn sizes(object: &Bound<'_, PyAny>) -> Option<Vec<i64>> {
    object.extract::<i64>().map(|n| vec![n]).or_else(|_| object.extract::<Vec<i64>>()).ok()
}
