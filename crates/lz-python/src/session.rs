//! Compiled graphs: a model as one native call.

use std::sync::{Arc, Mutex, PoisonError};

use layerzero::abi::program::External;
use layerzero::abi::{KernelError, TensorMut, TensorRef};
use layerzero::model::{CpuIsa, KernelDescriptor, NamedCall, Reason, TensorView, TensorViewMut, row_major};
use layerzero::selection::Standing;
use lz_graph::exec::binding::{Packs, Precision, Ranking, Weights};
use lz_graph::exec::choosing::{Chooser, Declared, Timed};
use lz_graph::exec::compiled::{Compiled, ExecError, Options, StepInfo};
use lz_graph::exec::kernel::Host;
use lz_graph::exec::profile::profile;
use lz_graph::exec::session::Session;
use lz_graph::ops::Op;
use lz_graph::passes;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use smallvec::SmallVec;

use crate::device_graph;
use crate::engine::engine;
use crate::error;
use crate::graph::{PyGraph, did_not_run, read, to_python};
use crate::host::kernel_error;
use crate::host_calls::{Pending, Several};
use crate::process::detached;
use crate::tensors::Meta;
use crate::torch::{Torch, shims};
use crate::written;

/// A graph that was optimised, and is compiled for each size of its inputs at the first use.
#[pyclass(name = "Session", module = "layerzero._native", frozen)]
pub struct PySession {
    session: Session,
    report: passes::Report,
    several: Several,
}

/// Kernels in the order of the process's engine: its policy, its measurements, the times that ship.
struct ByEngine;

impl Ranking for ByEngine {
    fn ranked(&self, op: &str, call: &NamedCall<'_>) -> Option<Vec<String>> {
        let engine = engine();
        let (_, bound) = engine.bind(op, call).ok()?;
        Some(engine.with_snapshot(|snapshot| {
            let decision = snapshot.select(&bound.query);
            let mut all: Vec<_> = decision.ranked().collect();
            // Kernels that conditions keep out where torch's are faster go before the references: a graph runs no kernel of torch's,
            // and checks for itself what is legal.
            let conditional = |reason: &Reason| matches!(reason, Reason::ConstraintFailed { .. });
            let behind_torch = decision.candidates.iter().filter(|candidate| {
                candidate.built_in && !candidate.accepted() && candidate.reasons.iter().all(conditional)
            });
            let willed =
                decision.locked_by.is_some() || decision.overridden_by.is_some() || decision.pinned_by.is_some();
            let references = all.iter().position(|candidate| candidate.reference && !willed).unwrap_or(all.len());
            all.splice(references..references, behind_torch);
            all.into_iter().map(|candidate| snapshot.kernel(candidate.kernel).id.clone()).collect()
        }))
    }

    fn standing(&self, op: &Op, kernel: &str) -> Standing {
        let operation = op.operation();
        let described = KernelDescriptor::new(kernel, operation.unwrap_or_default(), "torch");
        engine().with_snapshot(|snapshot| snapshot.standing(&described, operation))
    }

    fn level(&self) -> CpuIsa {
        engine().with_snapshot(|snapshot| snapshot.spec().settings.max_cpu_isa)
    }
}

/// What makes the calls that have no kernel here: a Python function.
struct Called<'a> {
    host: Option<&'a Py<PyAny>>,
    several: &'a Several,
    pending: Pending,
    /// What it raised first.
    raised: Mutex<Option<PyErr>>,
}

impl Host for Called<'_> {
    fn call(
        &self,
        call: u32,
        result: u32,
        inputs: &[TensorRef<'_>],
        output: &mut TensorMut<'_>,
    ) -> Result<(), KernelError> {
        let Some(host) = self.host else {
            return Err(KernelError::Failed(format!("call {call} of the model needs the model")));
        };
        Python::attach(|py| {
            let mut made = || {
                let found = self.pending.result(py, self.several, call, result, || {
                    let given = inputs.iter().map(|input| input.is_present().then(|| to_python(py, &input.view())));
                    let given = given.map(Option::transpose).collect::<PyResult<Vec<_>>>()?;
                    host.bind(py).call1((call, given))
                })?;
                let meta = read(&found, "Session.run", "result of torch")?;
                if meta.dtype != output.dtype() || *meta.shape != *output.shape() {
                    let text = format!(
                        "torch gave {} {:?} where the graph has {} {:?}",
                        meta.dtype,
                        &meta.shape[..],
                        output.dtype(),
                        output.shape()
                    );
                    return Err(error::invalid(py, "BAD_GRAPH", &text, "export the model again for these sizes"));
                }
                // SAFETY: the result is held, and nothing writes it during the copy.
                output.view_mut().copy_from(&unsafe { meta.view() });
                Ok(())
            };
            made().map_err(|why: PyErr| {
                let text = error::one_line(py, &why);
                self.raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
                // No other kernel could make this call.
                KernelError::BadData { input: "torch", at: Vec::new(), value: i64::from(call), expected: text }
            })
        })
    }
}

fn failed(py: Python<'_>, why: &ExecError) -> PyErr {
    match why {
        ExecError::Inputs(why) => did_not_run(py, why),
        ExecError::Kernel { why: failure, .. } if failure.is_callers_fault() => {
            error::invalid(py, "BAD_DATA", &why.to_string(), "correct the data; no kernel can serve it")
        }
        ExecError::Kernel { op, why: failure, .. } => kernel_error(py, op, failure),
        ExecError::External(_) => {
            error::invalid(py, "WRONG_INPUT", &why.to_string(), "pass what the model was compiled for")
        }
        _ => error::invalid(py, "BAD_GRAPH", &why.to_string(), "export the model again, with sizes that are checked"),
    }
}

/// A tensor of the caller, and the object that keeps it.
struct Given<'py> {
    meta: Meta,
    object: Bound<'py, PyAny>,
}

/// A new tensor of torch's, and where it lies.
struct Fresh<'py> {
    object: Bound<'py, PyAny>,
    meta: Meta,
}

impl PySession {
    fn given<'py>(&self, inputs: &[Bound<'py, PyAny>]) -> PyResult<SmallVec<[Given<'py>; 8]>> {
        let graph = self.session.graph();
        let rows = inputs.iter().enumerate().map(|(at, object)| {
            let name = graph.inputs.get(at).map_or("input", |&id| &graph.value(id).name);
            let meta = read(object, "Session.run", name)?;
            // Views of bytes may lie anywhere.
            let aligned = (meta.data as usize).is_multiple_of((meta.dtype.bits() as usize / 8).max(1));
            if meta.is_row_major() && aligned {
                return Ok(Given { meta, object: object.clone() });
            }
            let updated = graph.inputs.get(at).is_some_and(|id| graph.updates.iter().any(|(old, _)| old == id));
            if updated {
                let lies = if aligned { "does not lie row-major" } else { "begins between two elements" };
                let text = format!("Session.run: '{name}' is written, and {lies}");
                let hint = "pass .contiguous() memory that stays the same between calls";
                return Err(error::invalid(object.py(), "WRONG_INPUT", &text, hint));
            }
            let object = object.call_method0(if meta.is_row_major() { "clone" } else { "contiguous" })?;
            Ok(Given { meta: read(&object, "Session.run", name)?, object })
        });
        rows.collect()
    }

    fn compiled(&self, py: Python<'_>, given: &[Given<'_>]) -> PyResult<Arc<Compiled>> {
        let shapes: SmallVec<[_; 8]> = given.iter().map(|one| (one.meta.dtype, &one.meta.shape[..])).collect();
        // Making a plan takes a while; finding one does not.
        let shapes = &shapes[..];
        detached(py, || self.session.compiled(shapes)).map_err(|why| failed(py, &why))
    }

    fn fresh<'py>(&self, py: Python<'py>, compiled: &Compiled) -> PyResult<SmallVec<[Fresh<'py>; 4]>> {
        let torch = Torch::find(py)?;
        let rows = compiled.slots()[compiled.inputs()..].iter().map(|slot| {
            let allocator = torch.and_then(|torch| torch.allocator).zip(crate::allocator::number(slot.dtype));
            if let Some((allocator, number)) = allocator {
                let strides = row_major(&slot.shape);
                // SAFETY: as many strides as sizes, which come from an instance, and the interpreter is held.
                if let Some((object, data)) = unsafe { allocator.empty(number, &slot.shape, &strides) } {
                    // SAFETY: a new reference.
                    let object = unsafe { Bound::from_owned_ptr(py, object) };
                    let meta = Meta::new_on_host(slot.dtype, slot.shape.clone(), strides, data);
                    return Ok(Fresh { object, meta });
                }
            }
            let zeros = layerzero::model::Tensor::try_zeros(slot.dtype, &slot.shape);
            let zeros = zeros.ok_or_else(|| {
                let why =
                    KernelError::OutOfMemory(format!("the result '{}' of shape {:?}", slot.name, &slot.shape[..]));
                kernel_error(py, "Session.run", &why)
            })?;
            let object = to_python(py, &zeros.view())?;
            Ok(Fresh { meta: read(&object, "Session.run", &slot.name)?, object })
        });
        rows.collect()
    }

    /// Does something with the tensors of a run, without the interpreter.
    fn with<'py, R: Send>(
        &self,
        py: Python<'py>,
        inputs: &[Bound<'py, PyAny>],
        host: Option<&Py<PyAny>>,
        run: impl FnOnce(&Compiled, &mut [External<'_>], &dyn Host) -> Result<R, ExecError> + Send,
    ) -> PyResult<(R, SmallVec<[Fresh<'py>; 4]>)> {
        let given = self.given(inputs)?;
        let compiled = self.compiled(py, &given)?;
        self.ran(py, given, &compiled, host, run)
    }

    /// The same with tensors and a plan that were found.
    fn ran<'py, R: Send>(
        &self,
        py: Python<'py>,
        given: SmallVec<[Given<'py>; 8]>,
        compiled: &Compiled,
        host: Option<&Py<PyAny>>,
        run: impl FnOnce(&Compiled, &mut [External<'_>], &dyn Host) -> Result<R, ExecError> + Send,
    ) -> PyResult<(R, SmallVec<[Fresh<'py>; 4]>)> {
        let fresh = self.fresh(py, compiled)?;
        let called = Called { host, several: &self.several, pending: Pending::default(), raised: Mutex::new(None) };
        // SAFETY: the objects are held until the run is over. Who writes an input meanwhile races with the run, as with any
        // kernel of torch's.
        let reads: SmallVec<[TensorView<'_>; 8]> = given.iter().map(|one| unsafe { one.meta.view() }).collect();
        let mut writes: SmallVec<[TensorViewMut<'_>; 8]> = SmallVec::new();
        let is_written = |at: usize| compiled.slots()[at].written;
        for one in given.iter().enumerate().filter(|(at, _)| is_written(*at)).map(|(_, one)| one) {
            // SAFETY: as above; the run checks that it overlaps no other tensor of it.
            writes.push(unsafe { one.meta.view_mut() });
        }
        for one in &fresh {
            // SAFETY: new memory, which nobody else knows.
            writes.push(unsafe { one.meta.view_mut() });
        }
        let mut free = writes.iter_mut();
        let mut externals: SmallVec<[External<'_>; 12]> = SmallVec::new();
        for at in 0..compiled.slots().len() {
            externals.push(match is_written(at) {
                true => External::Write(free.next().expect("one for each written slot").as_mut()),
                false => External::Read(reads[at].as_ref()),
            });
        }
        let externals = &mut externals[..];
        let ran = detached(py, || run(compiled, externals, &called));
        if let Some(raised) = called.raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(raised);
        }
        let found = ran.map_err(|why| failed(py, &why))?;
        let changed = given.into_iter().enumerate().filter(|(at, _)| is_written(*at)).map(|(_, one)| one.object);
        let changed: Vec<_> =
            changed.filter(|object| Torch::known().is_some_and(|torch| torch.is_tensor(object))).collect();
        if !changed.is_empty() {
            written::count(py, changed.into_iter())?;
        }
        Ok((found, fresh))
    }
}

fn step<'py>(py: Python<'py>, step: &StepInfo) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("op", step.op)?;
    row.set_item("output", &step.output)?;
    row.set_item("origin", &step.origin)?;
    row.set_item("kernel", &step.kernel)?;
    row.set_item("candidates", &step.candidates)?;
    row.set_item("flops", step.cost.flops)?;
    row.set_item("bytes", step.cost.bytes)?;
    Ok(row)
}

#[pymethods]
impl PySession {
    /// Optimises a graph. `off` are passes that are left out; `tune` times the kernels of each node in their places. `weights`
    /// are the numbers that weights of linear layers are made of, `precision` says how exactly products are computed. Packed weights
    /// and arenas are shared with another session.
    #[new]
    #[allow(clippy::too_many_arguments)] // by name, in Python
    #[pyo3(signature = (graph, *, threads, off = Vec::new(), tune = false, weights = "float32", precision = "highest", share = None))]
    fn new(
        py: Python<'_>,
        graph: &PyGraph,
        threads: usize,
        off: Vec<String>,
        tune: bool,
        weights: &str,
        precision: &str,
        share: Option<&PySession>,
    ) -> PyResult<PySession> {
        let weights = named(&Weights::NAMES, weights).map_err(|why| {
            error::invalid(py, "BAD_PARAM", &format!("weights is {why}"), "leave it out to keep the model's numbers")
        })?;
        let precision = named(&Precision::NAMES, precision).map_err(|why| {
            let hint = "leave it out for results as exact as float32";
            error::invalid(py, "BAD_PARAM", &format!("precision is {why}"), hint)
        })?;
        let shared = share.map(|other| &other.session).filter(|other| other.packs().weights() == weights);
        let (graph, report) = device_graph::optimised(py, graph, &off)?;
        let chooser: Arc<dyn Chooser> = if tune { Arc::new(Timed::default()) } else { Arc::new(Declared) };
        let packs = shared.map_or_else(|| Arc::new(Packs::of(weights)), |other| other.packs().clone());
        let arenas = shared.map(|other| other.arenas().clone()).unwrap_or_default();
        let foreign = shims::kernels(py).into();
        let options = Options {
            threads: threads.max(1),
            precision,
            chooser,
            ranking: Arc::new(ByEngine),
            packs,
            arenas,
            foreign,
        };
        let several = Several::of(&graph);
        Ok(PySession { session: Session::new(graph, options), report, several })
    }

    /// The passes that optimise graphs, in the order in which they run.
    #[staticmethod]
    fn passes() -> Vec<&'static str> {
        passes::PASSES.iter().map(|(name, _)| *name).collect()
    }

    /// Runs the model. Inputs it updates are written; results are new tensors. `host` makes the calls of torch that have no kernel
    /// here: it gets the call's number and tensors, and gives a list of all results.
    #[pyo3(signature = (inputs, host = None))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        host: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let ((), fresh) =
            self.with(py, &inputs, host.as_ref(), |compiled, externals, host| compiled.run_with(externals, host))?;
        PyList::new(py, fresh.into_iter().map(|one| one.object))
    }

    /// [`PySession::run`] for a call that needs nothing but that: plain tensors that want no gradients, of sizes there is a plan
    /// for, and one result, which is given as it is. Otherwise `None`, and nothing was done.
    fn quick<'py>(&self, py: Python<'py>, inputs: &Bound<'py, PyTuple>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let inputs: SmallVec<[Bound<'py, PyAny>; 8]> = inputs.iter().collect();
        let Some(torch) = Torch::find(py)? else { return Ok(None) };
        let graph = self.session.graph();
        let fits = inputs.len() == graph.inputs.len() && graph.outputs.len() == 1 && graph.updates.is_empty();
        if !fits || !inputs.iter().all(|input| torch.is_plain(input.as_ptr())) {
            return Ok(None);
        }
        // Autocast, dispatch modes, traces and forward-mode derivatives are the model's own business.
        if torch.surroundings_on_host().special || torch.is_recording() {
            return Ok(None);
        }
        // Complex, sparse and meta tensors, those of a GPU, and wrappers of torch.func cannot be read: the caller asks again.
        let Ok(given) = self.given(&inputs) else { return Ok(None) };
        let shapes: SmallVec<[_; 8]> = given.iter().map(|one| (one.meta.dtype, &one.meta.shape[..])).collect();
        let Some(compiled) = self.session.planned(&shapes).filter(|_| given.iter().all(|one| !one.meta.requires_grad))
        else {
            return Ok(None);
        };
        drop(shapes);
        let run =
            |compiled: &Compiled, externals: &mut [External<'_>], host: &dyn Host| compiled.run_with(externals, host);
        let ((), fresh) = self.ran(py, given, &compiled, None, run)?;
        Ok(fresh.into_iter().next().map(|one| one.object))
    }

    /// The steps for inputs of these sizes, in the order they run. Nothing is run.
    fn steps<'py>(&self, py: Python<'py>, inputs: Vec<Bound<'py, PyAny>>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let compiled = self.compiled(py, &self.given(&inputs)?)?;
        compiled.steps().map(|one| step(py, &one)).collect()
    }

    /// The steps with their median times in microseconds, over some runs.
    #[pyo3(signature = (inputs, rounds, host = None))]
    fn profile<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        rounds: usize,
        host: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let (rows, _) = self
            .with(py, &inputs, host.as_ref(), |compiled, externals, host| profile(compiled, externals, host, rounds))?;
        rows.iter()
            .map(|timed| {
                let row = step(py, &timed.step)?;
                row.set_item("us", timed.median.as_secs_f64() * 1e6)?;
                Ok(row)
            })
            .collect()
    }

    /// Bytes of the arena of a run with inputs of these sizes.
    fn arena(&self, py: Python<'_>, inputs: Vec<Bound<'_, PyAny>>) -> PyResult<usize> {
        Ok(self.compiled(py, &self.given(&inputs)?)?.arena())
    }

    /// Kernels that failed and were replaced, for inputs of these sizes: the value, the kernel, and why.
    fn failures(&self, py: Python<'_>, inputs: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<(String, String, String)>> {
        let compiled = self.compiled(py, &self.given(&inputs)?)?;
        Ok(compiled.failures().into_iter().map(|one| (one.output, one.kernel, one.why.to_string())).collect())
    }

    /// Bytes of packed weights.
    #[getter]
    fn packed_bytes(&self) -> usize {
        self.session.packed_bytes()
    }

    /// Bytes of the weights that were packed, as they are in the model.
    #[getter]
    fn source_bytes(&self) -> usize {
        self.session.packs().source_bytes()
    }

    /// For how many sizes of inputs there is a plan.
    #[getter]
    fn plans(&self) -> usize {
        self.session.plans()
    }

    /// Nodes before and after optimisation, and how often each pass changed something.
    #[getter]
    fn optimised<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        device_graph::report(py, &self.report)
    }

    /// The optimised graph as text, a node a line.
    fn text(&self, py: Python<'_>) -> PyResult<String> {
        device_graph::shown(py, self.session.graph().text())
    }

    /// The optimised graph in Graphviz' language.
    fn dot(&self, py: Python<'_>) -> PyResult<String> {
        device_graph::shown(py, self.session.graph().dot())
    }
}

/// What a name stands for in a list, or what is wrong with the name.
fn named<T: Copy>(names: &[(&str, T)], name: &str) -> Result<T, String> {
    let known: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
    let found = names.iter().find(|(known, _)| *known == name).map(|(_, found)| *found);
    found.ok_or_else(|| format!("'{name}', expected one of {known:?}"))
}
