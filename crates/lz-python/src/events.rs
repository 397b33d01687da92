//! Events and selections, handed to Python's logging.

use layerzero::model::{Catalog, Query};
use layerzero::resilience::{Severity, Stamped};
use pyo3::prelude::*;

use crate::engine::existing;
use crate::inspect::json;
use crate::process;

/// Python's numbers for levels of its logging.
fn number(severity: Severity) -> u32 {
    match severity {
        Severity::Info => 20,
        Severity::Warn => 30,
        Severity::Error => 40,
    }
}

/// Logs an event.
pub fn emitted(stamped: &Stamped) {
    let (name, text, fields) = (stamped.event.name(), stamped.event.to_string(), json(stamped));
    let level = number(stamped.event.level());
    log(name, level, text, fields);
}

/// Logs which kernel was selected for calls of a kind.
pub fn selected(py: Python<'_>, op: &'static str, kernel: &str, query: &Query) -> PyResult<()> {
    let schema = Catalog::get().op(query.op()).schema();
    let dims: Vec<String> =
        schema.dims.iter().zip(query.dims()).map(|(d, size)| format!("{}={size}", d.name)).collect();
    let dims = dims.join(" ");
    let fields = json(&serde_json::json!({ "event": "selected", "op": op, "kernel_id": kernel, "dims": dims }));
    let text = format!("{op}: {kernel} serves {dims}");
    let logged = (String::from("selected"), 20, text, fields, is_verbose());
    py.import("layerzero.events")?.call_method1("log", logged).map(drop)
}

/// Whether events are printed. Those that the engine emits while it is made are not: no configuration was read by then.
fn is_verbose() -> bool {
    existing().is_some_and(|engine| engine.with_config(|c| c.settings.verbose))
}

fn log(name: &'static str, level: u32, text: String, fields: String) {
    if process::is_over_for_this_thread() {
        return;
    }
    Python::attach(|py| {
        let given = (name, level, text, fields, is_verbose());
        let logged = py.import("layerzero.events").and_then(|m| m.call_method1("log", given));
        if let Err(error) = logged {
            error.write_unraisable(py, None);
        }
    });
}
