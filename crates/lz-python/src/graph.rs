//! Graphs of exported models: made from a document and the model's own tensors, and run by the references of their operations.

use std::cell::RefCell;
use std::sync::Arc;

use layerzero::model::{KernelError, Tensor, TensorView};
use lz_graph::exec::interpreted::{self, RunError};
use lz_graph::ir::{Constant, Dim, DocumentError, Graph, Storage, ValueId};
use lz_graph::ops::host::Host;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error;
use crate::host::{kernel_error, torch_is_there};
use crate::host_calls::{Pending, Several};
use crate::tensors::{Meta, Purpose, storage};

/// The memory of a tensor that Python holds.
struct Held {
    meta: Meta,
    _tensor: Py<PyAny>,
}

// SAFETY: the memory is read only, and lives as long as the tensor, which is held.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

// SAFETY: the tensor is held, so its memory stays, and `meta` never changes. Whoever writes a weight while a graph reads it races
// with the graph, as with any kernel.
unsafe impl Storage for Held {
    fn view(&self) -> TensorView<'_> {
        // SAFETY: the tensor is held. Whoever writes a weight while a graph reads it races with the graph, as with any kernel.
        unsafe { self.meta.view() }
    }
}

/// Dtype, sizes and address of a tensor in host memory.
pub(crate) fn read(object: &Bound<'_, PyAny>, function: &str, name: &str) -> PyResult<Meta> {
    let meta = Meta::read(object, function, name, Purpose::Run)?;
    if meta.data.is_null() && !meta.shape.contains(&0) {
        let text = format!("{function}: the memory of '{name}' cannot be read from the host");
        return Err(error::unsupported(object.py(), &text, "pass a tensor on the CPU"));
    }
    Ok(meta)
}

/// A tensor as Python has them: torch's where torch is installed, else numpy's.
pub(crate) fn to_python<'py>(py: Python<'py>, tensor: &TensorView<'_>) -> PyResult<Bound<'py, PyAny>> {
    let (dtype, _) = storage(tensor.dtype());
    let torch = torch_is_there(py)?;
    let module = py.import(if torch { "torch" } else { "numpy" })?;
    let kwargs = PyDict::new(py);
    kwargs.set_item("dtype", module.getattr(dtype)?)?;
    if torch {
        kwargs.set_item("device", "cpu")?;
    }
    let object = module.call_method("empty", (tensor.shape().to_vec(),), Some(&kwargs))?;
    let meta = read(&object, "Graph", "result")?;
    // SAFETY: new memory, which nobody else knows.
    unsafe { meta.view_mut() }.copy_from(tensor);
    Ok(object)
}

fn bad_document(py: Python<'_>, why: &DocumentError) -> PyErr {
    error::invalid(py, "BAD_GRAPH", &why.to_string(), "export the model again with this version of LayerZero")
}

pub(crate) fn did_not_run(py: Python<'_>, why: &RunError) -> PyErr {
    match why {
        RunError::Kernel { why: failure, .. } if failure.is_callers_fault() => {
            error::invalid(py, "BAD_DATA", &why.to_string(), "correct the data; no kernel can serve it")
        }
        RunError::Kernel { op, why: failure, .. } => kernel_error(py, op, failure),
        RunError::Graph(_) | RunError::Dim(_) => {
            error::invalid(py, "BAD_GRAPH", &why.to_string(), "export the model again, with sizes that are checked")
        }
        _ => error::invalid(py, "WRONG_INPUT", &why.to_string(), "pass what the model was exported for"),
    }
}

/// What a graph takes, or gives: name, dtype, sizes.
type Row = (String, String, Vec<Py<PyAny>>);

/// A model as a graph of operations.
#[pyclass(name = "Graph", module = "layerzero._native", frozen)]
pub struct PyGraph {
    graph: Graph,
}

impl PyGraph {
    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    fn rows(&self, py: Python<'_>, values: &[ValueId]) -> PyResult<Vec<Row>> {
        let size = |size: &Dim| match size.known() {
            Some(n) => Ok(n.into_pyobject(py)?.into_any().unbind()),
            None => Ok(size.to_string().into_pyobject(py)?.into_any().unbind()),
        };
        values
            .iter()
            .map(|&id| {
                let value = self.graph.value(id);
                let shape = value.meta.shape.iter().map(size).collect::<PyResult<_>>()?;
                Ok((value.name.to_string(), value.meta.dtype.to_string(), shape))
            })
            .collect()
    }
}

#[pymethods]
impl PyGraph {
    /// Reads a document. `constants` are the tensors it names, in order; the graph reads their memory, and holds them.
    #[staticmethod]
    fn from_document(py: Python<'_>, text: &str, constants: Vec<Bound<'_, PyAny>>) -> PyResult<PyGraph> {
        let held = constants.iter().enumerate().map(|(i, tensor)| {
            let name = format!("constants[{i}]");
            let meta = read(tensor, "Graph.from_document", &name)?;
            Ok(Constant::new(&name, Arc::new(Held { meta, _tensor: tensor.clone().unbind() })))
        });
        let constants = held.collect::<PyResult<Vec<_>>>()?;
        let graph = Graph::from_document(text, constants).map_err(|why| bad_document(py, &why))?;
        Ok(PyGraph { graph })
    }

    /// The results for some inputs, and the new contents of those it updates, computed in float64 node by node: slow, and right.
    /// `host` makes the calls of host nodes: it gets the call's number and the node's inputs, and gives a list of all results.
    #[pyo3(signature = (inputs, host = None))]
    fn interpret<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        host: Option<Py<PyAny>>,
    ) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
        let metas = inputs
            .iter()
            .enumerate()
            .map(|(i, tensor)| {
                let known = self.graph.inputs.get(i).map(|&id| self.graph.value(id).name.to_string());
                let meta = read(tensor, "Graph.interpret", &known.unwrap_or_else(|| format!("inputs[{i}]")))?;
                Ok(Held { meta, _tensor: tensor.clone().unbind() })
            })
            .collect::<PyResult<Vec<_>>>()?;
        let (ran, raised) = py.detach(|| {
            let raised: RefCell<Option<PyErr>> = RefCell::new(None);
            let (several, pending) = (Several::of(&self.graph), Pending::default());
            let views: Vec<TensorView<'_>> = metas.iter().map(Held::view).collect();
            let ran = match &host {
                None => interpreted::run(&self.graph, &views),
                Some(host) => interpreted::run_with(&self.graph, &views, &|node, inputs| {
                    Python::attach(|py| call(py, host, (&several, &pending), node, inputs)).map_err(|why| {
                        let text = Python::attach(|py| error::one_line(py, &why));
                        raised.borrow_mut().get_or_insert(why);
                        KernelError::Failed(text)
                    })
                }),
            };
            (ran, raised.into_inner())
        });
        if let Some(raised) = raised {
            return Err(raised);
        }
        let (results, updates) = ran.map_err(|why| did_not_run(py, &why))?;
        let list = |tensors: &[Tensor]| {
            let objects = tensors.iter().map(|tensor| to_python(py, &tensor.view())).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, objects)
        };
        Ok((list(&results)?, list(&updates)?))
    }

    /// How many nodes there are.
    fn __len__(&self) -> usize {
        self.graph.len()
    }

    /// What the caller gives: name, dtype, and sizes, which are numbers or texts such as `s0 + 1`.
    #[getter]
    fn inputs(&self, py: Python<'_>) -> PyResult<Vec<Row>> {
        self.rows(py, &self.graph.inputs)
    }

    /// What the caller gets.
    #[getter]
    fn outputs(&self, py: Python<'_>) -> PyResult<Vec<Row>> {
        self.rows(py, &self.graph.outputs)
    }

    /// The inputs that are updated, in the order of their new contents.
    #[getter]
    fn updates(&self) -> Vec<String> {
        self.graph.updates.iter().map(|&(old, _)| self.graph.value(old).name.to_string()).collect()
    }

    /// The symbols of sizes: name, least number, greatest number if there is one.
    #[getter]
    fn symbols(&self) -> Vec<(String, i64, Option<i64>)> {
        self.graph.symbols.iter().map(|symbol| (symbol.name.clone(), symbol.min, symbol.max)).collect()
    }

    /// The operation of each node, in the order they were made.
    #[getter]
    fn operations(&self) -> Vec<&'static str> {
        self.graph.nodes().map(|(_, node)| node.op.name()).collect()
    }
}

/// One result of the call of a host node.
fn call(
    py: Python<'_>,
    host: &Py<PyAny>,
    (several, pending): (&Several, &Pending),
    node: &Host,
    inputs: &[Option<TensorView<'_>>],
) -> PyResult<Tensor> {
    let result = pending.result(py, several, node.call, node.result, || {
        let given = inputs.iter().map(|view| view.as_ref().map(|view| to_python(py, view)).transpose());
        host.bind(py).call1((node.call, given.collect::<PyResult<Vec<_>>>()?))
    })?;
    let meta = read(&result, "Graph.interpret", &node.target)?;
    // SAFETY: the result is held, and nothing writes it during the copy.
    let view = unsafe { meta.view() };
    let copy = view.to_tensor();
    Ok(copy)
}
