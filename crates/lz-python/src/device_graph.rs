//! Graphs for devices: optimised here, and run by Python, which calls the kernels of the device and captures them.

use lz_graph::exec::interpreted::bind;
use lz_graph::ir::{GraphError, ValueId};
use lz_graph::passes::{self, Report};
use lz_graph::plan::Instance;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use smallvec::SmallVec;

use crate::error;
use crate::graph::{PyGraph, did_not_run, to_python};
use crate::process::detached;

/// An optimised graph, and what optimising did.
pub(crate) fn optimised(py: Python<'_>, graph: &PyGraph, off: &[String]) -> PyResult<(lz_graph::ir::Graph, Report)> {
    let mut how = passes::Options::default();
    for name in off {
        how = how.without(name).map_err(|why| {
            let known: Vec<&str> = passes::PASSES.iter().map(|(name, _)| *name).collect();
            let hint = format!("the passes are {}", known.join(", "));
            error::invalid(py, "UNKNOWN_PASS", &why.to_string(), &hint)
        })?;
    }
    let mut graph = graph.graph().clone();
    let report = detached(py, || passes::optimize(&mut graph, &how)).map_err(|why| {
        error::invalid(py, "BAD_GRAPH", &why.to_string(), "switch off the pass that did it, and report it")
    })?;
    Ok((graph, report))
}

/// What optimising did, as data.
pub(crate) fn report<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("before", report.before)?;
    row.set_item("after", report.after)?;
    row.set_item("rewrites", &report.rewrites)?;
    Ok(row)
}

/// A text that an optimised graph always has.
pub(crate) fn shown(py: Python<'_>, text: Result<String, GraphError>) -> PyResult<String> {
    text.map_err(|why| error::invalid(py, "BAD_GRAPH", &why.to_string(), "report it: an optimised graph has an order"))
}

/// A graph that was optimised, and whose nodes Python runs on a device.
#[pyclass(name = "DeviceGraph", module = "layerzero._native", frozen)]
pub struct PyDeviceGraph {
    graph: lz_graph::ir::Graph,
    report: Report,
}

impl PyDeviceGraph {
    fn name(&self, value: ValueId) -> &str {
        &self.graph.value(value).name
    }
}

#[pymethods]
impl PyDeviceGraph {
    /// Optimises a graph. `off` are passes that are left out.
    #[new]
    #[pyo3(signature = (graph, *, off = Vec::new()))]
    fn new(py: Python<'_>, graph: &PyGraph, off: Vec<String>) -> PyResult<PyDeviceGraph> {
        let (graph, report) = optimised(py, graph, &off)?;
        Ok(PyDeviceGraph { graph, report })
    }

    /// The nodes for inputs of these element types and sizes, in an order in which they can run.
    ///
    /// Each has its `op`, its `attributes` as JSON with numbers for all symbols, the names of its `inputs` (`None` for those that
    /// are left out) and of its `output`, the `dtype` and `shape` of that, its `origin` in the model, `flops` and `bytes`.
    fn nodes<'py>(&self, py: Python<'py>, inputs: Vec<(String, Vec<i64>)>) -> PyResult<Bound<'py, PyList>> {
        let given = inputs.iter().map(|(dtype, shape)| {
            let dtype = dtype.parse().map_err(|why: layerzero::abi::UnknownDType| {
                error::invalid(py, "WRONG_INPUT", &why.to_string(), "pass what the model was exported for")
            })?;
            Ok((dtype, shape.as_slice()))
        });
        let given = given.collect::<PyResult<SmallVec<[_; 8]>>>()?;
        let symbols = bind(&self.graph, &given).map_err(|why| did_not_run(py, &why))?;
        let instance = Instance::of(&self.graph, &symbols).map_err(|why| {
            error::invalid(py, "WRONG_INPUT", &why.to_string(), "pass what the model was exported for")
        })?;
        let rows = instance.order().iter().map(|&id| {
            let (node, op) = (instance.node(id), instance.op(id));
            let (meta, row) = (instance.meta(node.output), PyDict::new(py));
            let cost = op.cost(lz_graph::ir::Inputs(&instance.inputs(id)), meta);
            row.set_item("op", op.name())?;
            row.set_item("attributes", op.attributes().to_string())?;
            let reads: Vec<Option<&str>> =
                node.inputs.iter().map(|input| input.map(|value| self.name(value))).collect();
            row.set_item("inputs", reads)?;
            row.set_item("output", self.name(node.output))?;
            row.set_item("dtype", meta.dtype.to_string())?;
            row.set_item("shape", instance.sizes(node.output).map(|sizes| sizes.to_vec()))?;
            row.set_item("origin", &*node.origin)?;
            row.set_item("flops", cost.flops)?;
            row.set_item("bytes", cost.bytes)?;
            Ok(row)
        });
        PyList::new(py, rows.collect::<PyResult<Vec<_>>>()?)
    }

    /// The names of its inputs.
    #[getter]
    fn inputs(&self) -> Vec<&str> {
        self.graph.inputs.iter().map(|&value| self.name(value)).collect()
    }

    /// The names of its results.
    #[getter]
    fn outputs(&self) -> Vec<&str> {
        self.graph.outputs.iter().map(|&value| self.name(value)).collect()
    }

    /// Inputs that are updated, each with the value that is its new contents.
    #[getter]
    fn updates(&self) -> Vec<(&str, &str)> {
        self.graph.updates.iter().map(|&(old, new)| (self.name(old), self.name(new))).collect()
    }

    /// A copy of a value that is known before a call, if it is one.
    fn constant<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let found = self.graph.named(name).and_then(|value| self.graph.constant(value));
        found.map(|constant| to_python(py, &constant.view())).transpose()
    }

    /// Nodes before and after optimisation, and how often each pass changed something.
    #[getter]
    fn optimised<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        report(py, &self.report)
    }

    /// The optimised graph as text, a node a line.
    fn text(&self, py: Python<'_>) -> PyResult<String> {
        shown(py, self.graph.text())
    }

    /// The optimised graph in Graphviz' language.
    fn dot(&self, py: Python<'_>) -> PyResult<String> {
        shown(py, self.graph.dot())
    }
}
