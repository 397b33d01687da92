//! Calls of torch inside a compiled graph. Each is made once in a run, whatever number of its results are read.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use lz_graph::ir::Graph;
use lz_graph::ops::Op;
use pyo3::prelude::*;

/// The calls of a graph of which more than one result is read, and how many.
#[derive(Default)]
pub struct Several(BTreeMap<u32, usize>);

impl Several {
    /// Of a graph.
    pub fn of(graph: &Graph) -> Several {
        let mut readers = BTreeMap::<u32, usize>::new();
        for (_, node) in graph.nodes() {
            if let Op::Host(host) = &node.op {
                *readers.entry(host.call).or_default() += 1;
            }
        }
        readers.retain(|_, count| *count > 1);
        Several(readers)
    }
}

/// The results of the calls of one run that are still to be read. A call is made again only after all of them were read, by the
/// next run.
#[derive(Default)]
pub struct Pending(Mutex<BTreeMap<u32, (Py<PyAny>, usize)>>);

impl Pending {
    /// One result of a call. `make` makes the call; it gives all results.
    pub fn result<'py>(
        &self,
        py: Python<'py>,
        several: &Several,
        call: u32,
        result: u32,
        make: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Some(&readers) = several.0.get(&call) else { return make()?.get_item(result) };
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&call);
        let (results, left) = match known {
            Some((results, left)) => (results.into_bound(py), left),
            None => (make()?, readers),
        };
        let found = results.get_item(result)?;
        if left > 1 {
            let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            pending.insert(call, (results.unbind(), left - 1));
        }
        Ok(found)
    }
}
