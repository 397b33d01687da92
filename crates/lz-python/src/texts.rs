//! Calls on texts: kernels are Python functions that take lists, and what is chosen goes by the engine's cache.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use layerzero::model::{Catalog, Query};
use layerzero::selection::Evidence;
use layerzero::{Blame, Caller, Ending, Executable, Proven, Scope, Step};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::engine::engine;
use crate::process::Call;
use crate::pycall::PyKernel;
use crate::{context, error, events, inspect, interrupted, params, registry};

/// What a kernel on texts may take: the texts (or lists of ids), the tokenizer as Python resolved it or its id, and
/// whether offsets are wanted.
pub const ARGUMENTS: &[&str] = &["texts", "tokens", "tokenizer", "tokenizer_id", "return_offsets"];

/// A call on texts, but for the texts.
#[pyclass(frozen, module = "layerzero._native")]
pub struct TextCall {
    call: layerzero::TextCall,
    tokenizer: Py<PyAny>,
    tokenizer_id: Py<PyAny>,
    return_offsets: bool,
    /// The kernel that was logged last, and under which version.
    logged: Mutex<(u64, String)>,
}

#[pymethods]
impl TextCall {
    /// A call of `op` with what identifies its tokenizer; `own` is the library that is right by definition, `refused`
    /// says why others are not.
    #[new]
    fn new(
        py: Python<'_>,
        op: &str,
        identity: &Bound<'_, PyDict>,
        tokenizer: Py<PyAny>,
        own: String,
        refused: Vec<(String, String)>,
    ) -> PyResult<TextCall> {
        registry::ensure_loaded(py)?;
        let names: Vec<String> = identity.keys().extract()?;
        let values = identity.values();
        let values = values.iter().map(|v| params::value(&v).ok_or_else(|| PyTypeError::new_err("a scalar")));
        let given = names.iter().map(String::as_str).zip(values).map(|(name, value)| Ok((name, value?)));
        let given: Vec<_> = given.collect::<PyResult<_>>()?;
        let return_offsets = identity.get_item("return_offsets")?.is_some_and(|v| v.is_truthy().unwrap_or(false));
        let tokenizer_id = identity.get_item("tokenizer_id")?.map_or_else(|| py.None(), Bound::unbind);
        let call = context::scope(py).text_call(op, given, own, refused).map_err(|e| error::engine(py, &e))?;
        Ok(TextCall { call, tokenizer, tokenizer_id, return_offsets, logged: Mutex::default() })
    }

    /// Runs the call on `texts`, the longest of that length: the chosen kernel, or the next where one fails. `only` runs
    /// just that kernel.
    #[pyo3(signature = (texts, length, only=None))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyList>,
        length: i64,
        only: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _call = Call::enter(py);
        let query = self.call.query(size(texts), length);
        let raise = |e: layerzero::Error| error::engine(py, &e);
        let scope = context::scope(py);
        if let Some(kernel) = only {
            let step = scope.text_step_of(&self.call, &query, kernel).map_err(raise)?;
            return self.experiment(py, &step, texts);
        }
        let steps = scope.text_steps(&self.call, &query).map_err(raise)?;
        self.log(py, &steps, &query)?;
        let id = |at: usize| steps[at].kernel.id.clone();
        let mut caller = TextCaller { py, scope: &scope, call: self, query: &query, steps: &steps, texts };
        match scope.serve(&query, &steps, None, &mut caller) {
            Ending::Served { output, .. } => Ok(output),
            Ending::Ended { error, .. } => Err(error),
            Ending::Unserved { refused, failed, .. } => {
                let refused = refused.into_iter().map(|(at, why)| (id(at), PyRuntimeError::new_err(why)));
                let chain = refused.chain(failed.into_iter().map(|(at, error)| (id(at), error))).collect();
                Err(error::execution(py, steps[0].op, chain, "see each kernel's error"))
            }
        }
    }

    /// The kernel that serves the call for so many texts.
    fn which<'py>(&self, py: Python<'py>, texts: i64, length: i64) -> PyResult<Bound<'py, PyDict>> {
        let query = self.call.query(texts, length);
        let chosen = context::scope(py).text_which(&self.call, &query);
        inspect::selection(py, chosen.map_err(|e| error::engine(py, &e))?)
    }

    /// Everything about that choice: as JSON, and as a table.
    fn explain(&self, py: Python<'_>, texts: i64, length: i64) -> (String, String) {
        let query = self.call.query(texts, length);
        let report = context::scope(py).text_explain(&self.call, &query);
        (inspect::json(&report), report.to_string())
    }

    /// Why a kernel cannot serve the call; empty when it can.
    fn validate<'py>(&self, py: Python<'py>, kernel: &str, texts: i64, length: i64) -> PyResult<Bound<'py, PyList>> {
        let query = self.call.query(texts, length);
        inspect::reasons(py, context::scope(py).text_step_of(&self.call, &query, kernel))
    }
}

/// A call on texts under way.
struct TextCaller<'a, 'py> {
    py: Python<'py>,
    scope: &'a Scope<'a>,
    call: &'a TextCall,
    query: &'a Query,
    steps: &'a [Step],
    texts: &'a Bound<'py, PyList>,
}

impl<'py> Caller for TextCaller<'_, 'py> {
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn prove(&mut self, at: usize, _alone: bool) -> PyResult<Proven> {
        self.call.prove(self.py, self.scope, &self.steps[at], self.texts, self.query)
    }

    fn save(&mut self) -> PyResult<()> {
        Ok(())
    }

    fn restore(&mut self) -> PyResult<()> {
        Ok(())
    }

    fn run(&mut self, at: usize) -> PyResult<Bound<'py, PyAny>> {
        self.call.run_step(self.py, &self.steps[at], self.texts)
    }

    fn blame(&mut self, _at: usize, error: PyErr) -> Blame<PyErr> {
        if let Some(interruption) = interrupted::by_the_caller(self.py, &error, &[]) {
            return Blame::Caller(interruption);
        }
        match registry::is_callers_fault(self.py, &error) {
            Ok(false) => Blame::Kernel(error),
            Ok(true) => Blame::Caller(error),
            Err(other) => Blame::Caller(other),
        }
    }

    fn told(&self, error: &PyErr) -> (String, String) {
        (error::one_line(self.py, error), error.to_string())
    }

    /// What the tokenizer's own library gives is right by definition.
    fn defines(&self, at: usize) -> bool {
        self.call.call.is_own(&self.steps[at].kernel.backend)
    }
}

impl TextCall {
    /// Runs one kernel because somebody named it: whatever becomes of it, no circuit and no level moves.
    fn experiment<'py>(&self, py: Python<'py>, step: &Step, texts: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        let chain = |error: PyErr| vec![(step.kernel.id.clone(), error)];
        if let Err(why) = engine().admit_anyway(step) {
            return Err(error::execution(py, step.op, chain(PyRuntimeError::new_err(why)), "start a new process"));
        }
        step.health.record_call();
        let raised = match self.run_step(py, step, texts) {
            Ok(result) => return Ok(result),
            Err(raised) => raised,
        };
        if let Some(interruption) = interrupted::by_the_caller(py, &raised, &[]) {
            return Err(interruption);
        }
        if registry::is_callers_fault(py, &raised)? {
            return Err(raised);
        }
        engine().experiment_failed(step, &error::one_line(py, &raised), &raised.to_string());
        Err(error::execution(py, step.op, chain(raised), "see the kernel's error"))
    }

    /// Compares a kernel that is not built in with the tokenizer's own library, on these texts and on hard ones.
    fn prove(
        &self,
        py: Python<'_>,
        scope: &Scope<'_>,
        step: &Step,
        texts: &Bound<'_, PyList>,
        query: &Query,
    ) -> PyResult<Proven> {
        let proof = py.import("layerzero.proof")?;
        let Some(own) = scope.text_own_step(&self.call, query) else {
            let why = "the tokenizer's own library cannot run, so that nothing can be compared with it";
            return Ok(Proven::Later(why.into()));
        };
        let given = proof.call_method1("hard_texts", (step.op, texts))?.cast_into::<PyList>()?;
        let Ok(right) = self.run_step(py, &own, &given) else {
            let why = format!("{} failed, so that nothing could be compared with it", own.kernel.id);
            return Ok(Proven::Later(why));
        };
        // What it raises is left to the call itself.
        let Ok(found) = self.run_step(py, step, &given) else { return Ok(Proven::Passed) };
        let wrong: Option<String> = proof.call_method1("texts_differ", (given, found, right))?.extract()?;
        let Some(wrong) = wrong else {
            engine().proved(&step.kernel, query);
            return Ok(Proven::Passed);
        };
        let error = format!("{wrong} than {}", own.kernel.id);
        let evidence = Evidence { error, call: format!("{query:?}"), max_error: None, tolerance: None };
        let why = evidence.reason().to_string();
        engine().found_wrong(&step.kernel, query, evidence);
        Ok(Proven::Wrong(why))
    }

    fn run_step<'py>(&self, py: Python<'py>, step: &Step, texts: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        let Executable::Foreign(any) = &step.executable else {
            return Err(PyRuntimeError::new_err("no adapter runs it here"));
        };
        let Some(kernel) = any.downcast_ref::<PyKernel>() else {
            return Err(PyRuntimeError::new_err("its adapter is no Python function"));
        };
        if let Some(library) = &kernel.library {
            library.import(py)?;
        }
        let argument = |name: &String| match name.as_str() {
            "texts" | "tokens" => texts.clone().into_any(),
            "tokenizer" => self.tokenizer.bind(py).clone(),
            "tokenizer_id" => self.tokenizer_id.bind(py).clone(),
            _ => pyo3::types::PyBool::new(py, self.return_offsets).to_owned().into_any(),
        };
        let arguments = PyTuple::new(py, kernel.parameters.iter().map(argument))?;
        let begun = Instant::now();
        let result = kernel.callable.bind(py).call1(arguments)?;
        step.health.latency().record_ns(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let as_many = |list: &Bound<'py, PyAny>| list.cast::<PyList>().is_ok_and(|list| list.len() == texts.len());
        let fits = match self.return_offsets {
            false => as_many(&result),
            true => result.cast::<PyTuple>().is_ok_and(|pair| pair.len() == 2 && pair.iter().all(|l| as_many(&l))),
        };
        if fits { Ok(result) } else { Err(PyTypeError::new_err("the kernel gave no list of a result per text")) }
    }

    /// Logs which kernel serves, when that is wanted and another than the last time.
    fn log(&self, py: Python<'_>, steps: &[Step], query: &layerzero::model::Query) -> PyResult<()> {
        let wanted = engine().with_config(|c| c.settings.log_selections || c.settings.verbose);
        let Some(first) = steps.first().filter(|_| wanted) else { return Ok(()) };
        let now = (engine().version(), first.kernel.id.clone());
        let before = std::mem::replace(&mut *self.logged.lock().unwrap_or_else(PoisonError::into_inner), now.clone());
        if before != now {
            events::selected(py, first.op, &first.kernel.id, query)?;
        }
        Ok(())
    }
}

fn size(texts: &Bound<'_, PyList>) -> i64 {
    i64::try_from(texts.len()).unwrap_or(i64::MAX)
}

/// Whether tokenizers may be fetched, and how many bytes remembered ids may take.
#[pyfunction]
pub fn tokenizer_settings() -> (bool, u64) {
    engine().with_config(|c| (c.settings.tokenizer.allow_download, c.settings.tokenizer.cache_mb << 20))
}

/// The operation on texts a kernel serves, if it is one.
#[pyfunction]
pub fn text_operation(py: Python<'_>, kernel_id: &str) -> PyResult<Option<String>> {
    registry::ensure_loaded(py)?;
    let id = kernel_id.rsplit_once('@').map_or(kernel_id, |(id, _)| id);
    let op = engine().with_snapshot(|s| s.kernels().find(|(_, k)| k.id == id).map(|(_, k)| k.operation.clone()));
    let Some(target) = op.and_then(|op| Catalog::get().find(&op).ok()) else { return Ok(None) };
    let mut ops = target.ops.iter().map(|&ix| Catalog::get().op(ix));
    let found = ops.find(|op| op.schema().kind == layerzero::model::schema::OpKind::Tokenization);
    Ok(found.map(|op| op.id().to_owned()))
}
