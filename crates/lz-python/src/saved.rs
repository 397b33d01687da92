//! The rows a call overwrites, kept so that another kernel can be tried after one has failed half way.

use layerzero::model::schema::Update;
use pyo3::prelude::*;

use crate::job::Job;
use crate::slow::given;

/// Copies of the rows that a call is about to overwrite. Never of a whole cache.
pub struct SavedRows {
    /// The rows, as indices that are all inside the tensors.
    rows: Py<PyAny>,
    /// Each tensor that is updated, and its rows as they were.
    copies: Vec<(Py<PyAny>, Py<PyAny>)>,
}

impl SavedRows {
    /// Copies them; `None` for a call that overwrites nothing it reads.
    pub fn of(job: &Job<'_, '_>) -> PyResult<Option<SavedRows>> {
        let Some(Update::Rows { index, column }) = job.route.op.schema().update else { return Ok(None) };
        let py = job.py;
        let place = |name: &str| job.front.signature.arguments.iter().position(|a| a.name == name);
        let Some(index) = place(index).and_then(|at| given(py, &job.slots, at)) else { return Ok(None) };
        let arrays = py.import("layerzero.arrays")?;
        let mut kept: Option<Py<PyAny>> = None;
        let mut copies = Vec::new();
        for &at in &job.front.updated {
            let Some(tensor) = given(py, &job.slots, at) else { continue };
            let (rows, copy): (Py<PyAny>, Py<PyAny>) =
                arrays.call_method1("rows_of", (&tensor, &index, column))?.extract()?;
            kept = Some(rows);
            copies.push((tensor.unbind(), copy));
        }
        Ok(kept.map(|rows| SavedRows { rows, copies }))
    }

    /// Puts them back.
    pub fn put_back(&self, py: Python<'_>) -> PyResult<()> {
        let arrays = py.import("layerzero.arrays")?;
        for (tensor, copy) in &self.copies {
            arrays.call_method1("put_rows", (tensor, &self.rows, copy))?;
        }
        Ok(())
    }
}
