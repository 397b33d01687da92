//! The one map from errors to Python exceptions. The classes are Python's, in `layerzero.errors`.

use std::any::Any;

use layerzero::model::{CallError, Reason};
use layerzero::{Error, Rejection};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

/// An exception of `layerzero.errors`, or, should that module be broken, a plain one with the same text.
fn make(py: Python<'_>, class: &str, text: &str, code: &str, hint: &str, fields: &[(&str, Py<PyAny>)]) -> PyErr {
    let build = || -> PyResult<PyErr> {
        let kwargs = PyDict::new(py);
        kwargs.set_item("code", code)?;
        kwargs.set_item("hint", hint)?;
        for (name, value) in fields {
            kwargs.set_item(name, value)?;
        }
        let class = py.import("layerzero.errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call((text,), Some(&kwargs))?))
    };
    build().unwrap_or_else(|_| PyRuntimeError::new_err(format!("{text} ({hint})")))
}

/// An argument that is not what the function takes.
pub fn argument(py: Python<'_>, code: &str, text: &str, hint: &str) -> PyErr {
    make(py, "ArgumentTypeError", text, code, hint, &[])
}

/// A call that is well typed and still wrong.
pub fn invalid(py: Python<'_>, code: &str, text: &str, hint: &str) -> PyErr {
    make(py, "InvalidCallError", text, code, hint, &[])
}

/// An argument, as a message shows it: at most so many characters, and of containers at most a few items and levels. They
/// may contain each other so often that all of it would not fit into memory.
pub fn shown(object: &Bound<'_, PyAny>) -> String {
    const MOST: usize = 80;
    let holds = object.hasattr("__iter__").unwrap_or(true) && !object.is_instance_of::<PyString>();
    let text = match holds {
        true => object.py().import("reprlib").and_then(|reprlib| reprlib.call_method1("repr", (object,))?.str()),
        false => object.repr(),
    };
    let text = text.map_or_else(|_| "?".into(), |text| text.to_string_lossy().into_owned());
    if text.chars().count() <= MOST { text } else { text.chars().take(MOST).chain(['…']).collect() }
}

/// Something registered that does not fit.
pub fn configuration(py: Python<'_>, code: &str, text: &str, hint: &str) -> PyErr {
    make(py, "ConfigurationError", text, code, hint, &[])
}

/// A tensor of a kind LayerZero does not work on.
pub fn unsupported(py: Python<'_>, text: &str, hint: &str) -> PyErr {
    make(py, "UnsupportedTensorError", text, "UNSUPPORTED_TENSOR", hint, &[])
}

/// A call that contradicts the operation's schema.
pub fn call(py: Python<'_>, error: &CallError) -> PyErr {
    let class = match error {
        CallError::UnknownOp { .. } => "UnknownOperationError",
        CallError::BadParam { .. }
        | CallError::MissingInput { .. }
        | CallError::MissingParam { .. }
        | CallError::UnknownInput { .. }
        | CallError::UnknownParam { .. }
        | CallError::TooMany { .. }
        | CallError::GivenTwice { .. } => "ArgumentTypeError",
        _ => "InvalidCallError",
    };
    make(py, class, &error.to_string(), error.code(), &error.hint(), &[])
}

/// A reason as Python data: code, sentence and fields.
pub fn reason<'py>(py: Python<'py>, reason: &Reason) -> PyResult<Bound<'py, PyAny>> {
    let fields = serde_json::to_string(reason).unwrap_or_default();
    py.import("layerzero.inspection")?.call_method1("reason", (fields, reason.to_string()))
}

fn rejections(py: Python<'_>, list: &[Rejection]) -> PyResult<Py<PyAny>> {
    let failures = PyDict::new(py);
    for rejection in list {
        let reasons = PyList::empty(py);
        for r in &rejection.reasons {
            reasons.append(reason(py, r)?)?;
        }
        failures.set_item(&rejection.kernel_id, reasons)?;
    }
    Ok(failures.into_any().unbind())
}

/// Anything the engine says no with.
pub fn engine(py: Python<'_>, error: &Error) -> PyErr {
    let (text, code, hint) = (error.to_string(), error.code(), error.hint());
    let no_kernel = |class: &str, op: &str, list: &[Rejection]| match rejections(py, list) {
        Ok(failures) => {
            let op = pyo3::types::PyString::new(py, op).into_any().unbind();
            make(py, class, &text, code, &hint, &[("operation", op), ("failures", failures)])
        }
        Err(error) => error,
    };
    match error {
        Error::Call(error) => call(py, error),
        Error::NoKernel { op, rejections } => no_kernel("NoKernelFoundError", op, rejections),
        Error::CudaGraphUnsafe { op, rejections } => no_kernel("CudaGraphUnsafeError", op, rejections),
        Error::UnknownKernel { .. } => make(py, "UnknownKernelError", &text, code, &hint, &[]),
        Error::UnknownDevice(_) => make(py, "InvalidCallError", &text, code, &hint, &[]),
        Error::Snapshot(_)
        | Error::Config(_)
        | Error::Watch(_)
        | Error::ExplainDisabled
        | Error::TableRefused { .. } => make(py, "ConfigurationError", &text, code, &hint, &[]),
        Error::Capabilities { .. } => make(py, "CapabilitiesError", &text, code, &hint, &[]),
        Error::Execution { op, .. } => {
            let op = pyo3::types::PyString::new(py, op).into_any().unbind();
            let none = PyDict::new(py).into_any().unbind();
            make(py, "KernelExecutionError", &text, code, &hint, &[("operation", op), ("failures", none)])
        }
    }
}

/// Every kernel that was tried failed; what each said, in order.
pub fn execution(py: Python<'_>, op: &str, chain: Vec<(String, PyErr)>, hint: &str) -> PyErr {
    let said: Vec<String> = chain.iter().map(|(kernel, error)| format!("{kernel}: {}", one_line(py, error))).collect();
    let text = match said.is_empty() {
        true => format!("'{op}' was selected a kernel that cannot run here"),
        false => format!("'{op}' failed: {}", said.join("; ")),
    };
    let failures = PyDict::new(py);
    let mut cause = None;
    for (kernel, error) in chain {
        let value = error.into_value(py);
        if failures.set_item(kernel, &value).is_ok() {
            cause.get_or_insert(value);
        }
    }
    let fields = [
        ("operation", pyo3::types::PyString::new(py, op).into_any().unbind()),
        ("failures", failures.into_any().unbind()),
    ];
    let error = make(py, "KernelExecutionError", &text, "KERNEL_EXECUTION_FAILED", hint, &fields);
    error.set_cause(py, cause.map(|value| PyErr::from_value(value.into_bound(py).into_any())));
    error
}

/// A kernel failed after it had changed tensors it may only read: nobody else can serve the call.
pub fn input_modified(py: Python<'_>, op: &str, kernel: &str, changed: &[&str], raised: PyErr) -> PyErr {
    let names = changed.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(" and ");
    let text = format!(
        "'{op}': {kernel} changed {names}, which it may only read, and then failed ({}); no other kernel can serve the \
         call, because its data is not what was passed",
        one_line(py, &raised)
    );
    let hint = "have the kernel work on a copy; pass the tensor again as it was";
    let failures = PyDict::new(py);
    let value = raised.into_value(py);
    let _ = failures.set_item(kernel, &value);
    let fields = [
        ("operation", pyo3::types::PyString::new(py, op).into_any().unbind()),
        ("failures", failures.into_any().unbind()),
    ];
    let error = make(py, "InputModifiedError", &text, "INPUT_MODIFIED", hint, &fields);
    error.set_cause(py, Some(PyErr::from_value(value.into_bound(py).into_any())));
    error
}

/// Whether an exception is [`input_modified`].
pub fn is_input_modified(py: Python<'_>, raised: &PyErr) -> PyResult<bool> {
    let class = py.import("layerzero.errors")?.getattr("InputModifiedError")?;
    raised.value(py).is_instance(&class)
}

/// The first line of what an exception says, with its type.
pub fn one_line(py: Python<'_>, error: &PyErr) -> String {
    let value = error.value(py);
    let kind = value.get_type().name().map_or_else(|_| "Exception".into(), |n| n.to_string());
    let text = value.str().map_or_else(|_| String::new(), |s| s.to_string());
    match text.lines().next() {
        Some(line) if !line.is_empty() => format!("{kind}: {line}"),
        _ => kind,
    }
}

/// An exception as a command prints it: what it says and, where it is one of LayerZero's, its hint.
pub fn refusal(py: Python<'_>, error: &PyErr) -> lz_cli::program::Refusal {
    let text = |name: &str| error.value(py).getattr(name).and_then(|value| value.extract::<String>()).ok();
    let what = text("message").unwrap_or_else(|| one_line(py, error));
    lz_cli::program::Refusal { what, hint: text("hint").unwrap_or_else(|| "see docs/measure.md".into()) }
}

/// A panic: a defect of LayerZero's, told as an exception and never as an abort.
pub fn internal(py: Python<'_>, panic: &(dyn Any + Send)) -> PyErr {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    let hint = "this is a defect of LayerZero; please report it with the call that caused it";
    make(py, "LayerZeroInternalError", &format!("internal error: {text}"), "INTERNAL", hint, &[])
}
