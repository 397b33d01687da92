//! Decisions that stay: lockfiles and dispatch tables.

use std::collections::BTreeMap;
use std::sync::Arc;

use layerzero::model::{CallSpec, DeviceIx};
use layerzero::{Buckets, DispatchTable, Lockfile, SolveRequest};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::inspect::json;
use crate::process::{Call, detached};
use crate::{context, error, registry};

fn specs(py: Python<'_>, calls: &[String]) -> PyResult<Vec<CallSpec>> {
    let bad = |call: &str, e: serde_json::Error| {
        let hint = "write it as lz.calls_of and lz.manifest do: {\"op\": …, \"tensors\": {…}}";
        error::invalid(py, "BAD_CALL", &format!("{call} is no call: {e}"), hint)
    };
    calls.iter().map(|call| call.parse().map_err(|e| bad(call, e))).collect()
}

/// A dispatch table of these calls (as JSON) by buckets of sizes, as JSON; and what did not fit into it, as JSON.
#[pyfunction]
pub fn solve(
    py: Python<'_>,
    model_id: String,
    calls: Vec<String>,
    device: u16,
    buckets: BTreeMap<String, Vec<i64>>,
) -> PyResult<(String, String)> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let bad = |e: String| {
        error::configuration(py, "BAD_BUCKETS", &e, "give the upper ends of sizes, e.g. seq_len=[128, 512]")
    };
    let buckets = Buckets::new(buckets).map_err(|e| bad(e.to_string()))?;
    let request = SolveRequest { model_id, device: DeviceIx(device), buckets, calls: specs(py, &calls)? };
    let solved = engine().solve_in(&context::scope(py), &request).map_err(|e| error::engine(py, &e))?;
    let outside =
        solved.outside.iter().map(|(i, reason)| serde_json::json!({"call": calls[*i], "why": reason.to_string()}));
    let impossible =
        solved.impossible.iter().map(|(i, e)| serde_json::json!({"call": calls[*i], "why": e.to_string()}));
    let left_out: Vec<serde_json::Value> = outside.chain(impossible).collect();
    Ok((solved.table.to_json(), json(&left_out)))
}

fn parse(py: Python<'_>, text: &str, origin: &str) -> PyResult<DispatchTable> {
    let hint = "make it anew with lz.solve or 'layerzero solve'";
    DispatchTable::parse(text).map_err(|e| error::configuration(py, "BAD_TABLE", &format!("{origin}: {e}"), hint))
}

/// The decisions of a plan: those of a dispatch table, in force for the calls made inside. One that learns also comes to
/// decide calls it was not made for.
#[pyclass(frozen, module = "layerzero._native")]
pub struct Plan(pub Arc<layerzero::Plan>);

#[pymethods]
impl Plan {
    /// Of a table as JSON.
    #[new]
    fn new(py: Python<'_>, text: &str, name: &str, learns: bool) -> PyResult<Plan> {
        registry::ensure_loaded(py)?;
        let table = parse(py, text, name)?;
        engine().make_plan(table, name, learns).map(Plan).map_err(|e| error::engine(py, &e))
    }

    /// Its table, as JSON.
    fn table(&self) -> String {
        self.0.table().to_json()
    }

    /// The calls it took note of since this was asked last: as JSON, with the numbers of their devices.
    fn noted(&self) -> Vec<(String, u16)> {
        engine().noted(&self.0).into_iter().map(|(call, device)| (call.to_string(), device.0)).collect()
    }

    /// The entries that cannot be kept here, as JSON.
    fn mismatches(&self, py: Python<'_>) -> PyResult<String> {
        let status = engine().plan_status(&context::scope(py), &self.0).map_err(|e| error::engine(py, &e))?;
        Ok(json(&status.mismatches))
    }

    /// `onto`, and what it says of the calls that were made inside of this one and are new; `None` when there were none.
    fn learned(&self, py: Python<'_>, onto: &Plan) -> PyResult<Option<Plan>> {
        let learned = engine().learned(&context::scope(py), &self.0, &onto.0).map_err(|e| error::engine(py, &e))?;
        Ok(learned.map(Plan))
    }
}

/// Puts a dispatch table in force; gives the entries that cannot be kept, as JSON.
#[pyfunction]
pub fn load_table(py: Python<'_>, text: &str, origin: &str) -> PyResult<String> {
    registry::ensure_loaded(py)?;
    let table = parse(py, text, origin)?;
    let mismatches = engine().load_table(&table, origin).map_err(|e| error::engine(py, &e))?;
    Ok(json(&mismatches))
}

/// The decisions for these calls (as JSON) as a lockfile.
#[pyfunction]
pub fn lockfile(py: Python<'_>, calls: Vec<String>, device: u16) -> PyResult<String> {
    let _call = Call::enter(py);
    registry::ensure_loaded(py)?;
    let calls: Vec<(CallSpec, DeviceIx)> =
        specs(py, &calls)?.into_iter().map(|call| (call, DeviceIx(device))).collect();
    let known = if calls.is_empty() { engine().known_calls() } else { calls };
    let lockfile = engine().lockfile(&known).map_err(|e| error::engine(py, &e))?;
    Ok(lockfile.to_string())
}

/// Puts the decisions of a lockfile in force; gives those that cannot be kept, as JSON.
#[pyfunction]
pub fn replay(py: Python<'_>, text: &str, origin: &str) -> PyResult<String> {
    registry::ensure_loaded(py)?;
    let hint = "write it anew with lz.write_lockfile or 'layerzero lock'";
    let lockfile =
        Lockfile::parse(text).map_err(|e| error::configuration(py, "BAD_LOCKFILE", &format!("{origin}: {e}"), hint))?;
    let mismatches = engine().replay(&lockfile, origin).map_err(|e| error::engine(py, &e))?;
    Ok(json(&mismatches))
}

/// Takes lockfiles and tables back that code has put in force.
#[pyfunction]
pub fn unpin(py: Python<'_>) -> PyResult<()> {
    engine().unpin().map_err(|e| error::engine(py, &e))
}

/// What is to be said about the performance database: a sentence if its path leads to somebody else's file.
#[pyfunction]
pub fn perfdb_warnings(py: Python<'_>) -> Vec<String> {
    detached(py, || engine().perfdb_warnings())
}

/// What is to be said about lockfiles and tables of the configuration: a sentence for each that cannot be kept whole.
#[pyfunction]
pub fn pin_warnings() -> Vec<String> {
    engine().pin_warnings()
}
