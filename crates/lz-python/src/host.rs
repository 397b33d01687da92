//! Kernels on host memory: Rust functions on the memory of torch tensors and numpy arrays.

use layerzero::abi::Bytes;
use layerzero::model::schema::Output;
use layerzero::model::{HostCall, KernelError, OutputSpec, Tensor, TensorView, TensorViewMut};
use layerzero::selection::Transforms;
use layerzero::{Step, native_threads};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error;
use crate::job::Job;
use crate::tensors::{Meta, Purpose, storage};
use crate::torch::Torch;
use crate::written;

/// Whether a tensor has elements and no memory: one that torch.func.functionalize wraps, for example.
fn has_no_memory(meta: &Meta) -> bool {
    meta.data.is_null() && !meta.shape.contains(&0)
}

/// The first argument whose memory cannot be read.
pub fn unreadable(job: &Job<'_, '_>) -> Option<&'static str> {
    let found = job.arguments.metas.iter().find(|(_, meta)| has_no_memory(meta));
    found.map(|(at, _)| job.front.signature.arguments[*at].name)
}

/// Of a call that only native kernels could serve.
pub fn cannot_be_read(job: &Job<'_, '_>, name: &str) -> PyErr {
    let text = format!("{}: the memory of '{name}' cannot be read from the host", job.front.name());
    error::unsupported(job.py, &text, "pass a tensor on the CPU")
}

/// Runs a native kernel on the tensors of a call, without holding the interpreter.
pub fn run<'py>(job: &Job<'_, 'py>, step: &Step) -> PyResult<Bound<'py, PyAny>> {
    let (py, op) = (job.py, job.route.op);
    let schema = op.schema();
    let resolved = resolved(job)?;
    let mut metas: Vec<Option<&Meta>> = vec![None; schema.inputs.len()];
    for (at, meta) in job.arguments.metas.iter().chain(resolved.iter().map(|(_, meta)| meta)) {
        if let Some(index) = op.input_index(job.front.signature.arguments[*at].name) {
            metas[index] = Some(meta);
        }
    }
    if let Some((_, input)) = metas.iter().zip(schema.inputs).find(|(meta, _)| meta.is_some_and(has_no_memory)) {
        return Err(cannot_be_read(job, input.name));
    }
    writable(job)?;
    unrecorded(job)?;
    let fresh: Vec<(Bound<'py, PyAny>, Meta)> =
        job.expected.iter().map(|spec| allocate(job, spec)).collect::<PyResult<_>>()?;
    let updated = |index: usize| {
        schema.outputs.iter().any(|o| matches!(o, Output::Updates(n) if op.input_index(n) == Some(index)))
    };
    let updates: Vec<&Meta> = (0..metas.len()).filter(|&i| updated(i)).filter_map(|i| metas[i]).collect();
    distinct(job, &updates)?;
    let written: Vec<Bytes> = fresh.iter().map(|(_, meta)| meta).chain(updates).map(Meta::bytes).collect();
    // What is read must not be what is written; a tensor that overlaps is copied first.
    // So is one that does not lie as the kernel wants it.
    let scattered = |meta: &Meta| step.transforms.has(Transforms::CONTIGUOUS) && !meta.is_row_major();
    let overlaps = |meta: &Meta| scattered(meta) || written.iter().any(|bytes| bytes.overlaps(meta.bytes()));
    let mut copies: Vec<Tensor> = Vec::new();
    for (i, meta) in metas.iter().enumerate() {
        if let Some(meta) = meta.filter(|meta| !updated(i) && overlaps(meta)) {
            // SAFETY: the caller holds the tensor, and nothing writes it during the copy.
            copies.push(unsafe { meta.view() }.to_tensor());
        }
    }
    let mut copied = copies.iter();
    let mut inputs: Vec<Option<TensorView<'_>>> = Vec::new();
    for (i, meta) in metas.iter().enumerate() {
        inputs.push(match meta {
            None => None,
            Some(_) if updated(i) => None,
            Some(meta) if overlaps(meta) => copied.next().map(Tensor::view),
            // SAFETY: the caller holds the tensor for the whole call and it overlaps nothing this call writes. Another
            // thread that writes it meanwhile races with the caller's own read, as with any torch kernel.
            Some(meta) => Some(unsafe { meta.view() }),
        });
    }
    let mut next = fresh.iter();
    let mut outputs: Vec<TensorViewMut<'_>> = Vec::new();
    for output in schema.outputs {
        let meta = match output {
            Output::Fresh { .. } => next.next().map(|(_, meta)| meta),
            Output::Updates(name) => op.input_index(name).and_then(|i| metas[i]),
        };
        let meta = meta.ok_or_else(|| PyRuntimeError::new_err(format!("no memory for '{}'", output.name())))?;
        // SAFETY: new memory of this call's, or a tensor the caller gave to be updated. No two of them overlap, and no
        // tensor that is read overlaps one of them.
        outputs.push(unsafe { meta.view_mut() });
    }
    let (query, params) = (&job.route.query, &job.params_drawn()?[..]);
    let scratch = job.scope.workspace_of(step, query);
    let call = HostCall { query, inputs: &inputs, params, outputs: &mut outputs };
    let torch = Torch::known().map_or(usize::MAX, |torch| torch.threads().into());
    let threads = native_threads(torch.min(job.scope.most_threads()));
    let result = py.detach(|| step.executable.run(call, scratch, threads));
    result.map_err(|e| kernel_error(py, job.front.name(), &e))?;
    let objects = job.front.updated.iter().filter_map(|&at| crate::slow::given(py, &job.slots, at));
    let tensors: Vec<_> =
        objects.filter(|object| Torch::known().is_some_and(|torch| torch.is_tensor(object))).collect();
    if !tensors.is_empty() {
        written::count(py, tensors.into_iter())?;
    }
    Ok(match fresh.len() {
        0 => py.None().into_bound(py),
        1 => fresh.into_iter().next().map_or_else(|| py.None().into_bound(py), |(object, _)| object),
        _ => PyTuple::new(py, fresh.into_iter().map(|(object, _)| object))?.into_any(),
    })
}

/// Tensors whose memory holds the negative of what they are, copied: the later of two metas counts.
#[allow(clippy::type_complexity)]
fn resolved<'py>(job: &Job<'_, 'py>) -> PyResult<Vec<(Bound<'py, PyAny>, (usize, Meta))>> {
    let mut copies = Vec::new();
    for (at, _) in &job.arguments.metas {
        let Some(object) = crate::slow::given(job.py, &job.slots, *at) else { continue };
        if object.hasattr("is_neg")? && object.call_method0("is_neg")?.is_truthy()? {
            let copy = object.call_method0("resolve_neg")?;
            let name = job.front.signature.arguments[*at].name;
            let meta = Meta::read(&copy, job.front.name(), name, Purpose::Run)?;
            copies.push((copy, (*at, meta)));
        }
    }
    Ok(copies)
}

/// Who records torch's operations and would miss what a native kernel does, if anybody does.
pub fn recorder(py: Python<'_>) -> PyResult<Option<String>> {
    if Torch::known().is_none_or(|torch| !torch.is_recording()) {
        return Ok(None);
    }
    py.import("layerzero.torch_state")?.call_method0("recorder")?.extract()
}

/// Nobody may be recording torch's operations: this one would be missing from the record.
fn unrecorded(job: &Job<'_, '_>) -> PyResult<()> {
    recorder(job.py)?.map_or(Ok(()), |recorder| Err(cannot_be_recorded(job, &recorder)))
}

/// Only native kernels can serve a call that somebody records.
pub fn cannot_be_recorded(job: &Job<'_, '_>, recorder: &str) -> PyErr {
    let text = format!("{}: a native kernel serves this call, and {recorder} cannot see into it", job.front.name());
    error::unsupported(job.py, &text, "use torch.compile or torch.export, or make a call a torch kernel can serve")
}

/// What is to be updated must not be an array that is read only.
fn writable(job: &Job<'_, '_>) -> PyResult<()> {
    for name in job.front.signature.updates() {
        let at = job.front.signature.arguments.iter().position(|a| a.name == name);
        let Some(object) = at.and_then(|at| crate::slow::given(job.py, &job.slots, at)) else { continue };
        let flags = object.getattr("flags").and_then(|f| f.getattr("writeable"));
        if flags.is_ok_and(|w| !w.is_truthy().unwrap_or(true)) {
            let text = format!("{}: '{name}' is read only", job.front.name());
            return Err(error::invalid(job.py, "READ_ONLY", &text, "pass an array that can be updated"));
        }
    }
    Ok(())
}

/// Two tensors to be updated must not share memory; keys and values of one page may lie beside each other.
fn distinct(job: &Job<'_, '_>, updates: &[&Meta]) -> PyResult<()> {
    let shares = |(i, one): (usize, &&Meta)| updates[i + 1..].iter().any(|other| written::may_share(one, other));
    if !updates.iter().enumerate().any(shares) {
        return Ok(());
    }
    let text = format!("{}: two of the tensors to be updated share memory", job.front.name());
    Err(error::invalid(job.py, "SHARED_MEMORY", &text, "pass tensors of their own"))
}

/// What a native kernel's failure is in Python.
pub fn kernel_error(py: Python<'_>, function: &str, failure: &KernelError) -> PyErr {
    match failure {
        KernelError::BadData { .. } | KernelError::BadNumber { .. } => error::invalid(
            py,
            "BAD_DATA",
            &format!("{function}: {failure}"),
            "correct the data; no kernel can serve it",
        ),
        KernelError::OutOfMemory(_) => PyMemoryError::new_err(failure.to_string()),
        KernelError::Failed(_) => PyRuntimeError::new_err(failure.to_string()),
    }
}

/// A new tensor for a result: torch's where torch is in use, else numpy's.
fn allocate<'py>(job: &Job<'_, 'py>, spec: &OutputSpec) -> PyResult<(Bound<'py, PyAny>, Meta)> {
    let py = job.py;
    let (dtype, per_byte) = storage(spec.dtype);
    let mut shape = spec.shape.to_vec();
    if per_byte == 2 {
        match shape.last_mut() {
            Some(last) if *last % 2 == 0 => *last /= 2,
            _ => {
                let text = format!(
                    "{}: {} packs two values into a byte, the last size of {shape:?} is odd",
                    job.front.name(),
                    spec.dtype
                );
                return Err(error::invalid(py, "WRONG_SHAPE", &text, "pad the last dimension to an even size"));
            }
        }
    }
    let library = if Torch::known().is_some() { "torch" } else { "numpy" };
    let module = py.import(library)?;
    let kwargs = PyDict::new(py);
    let Ok(kind) = module.getattr(dtype) else {
        let text = format!("{}: the result is {}, which {library} does not have", job.front.name(), spec.dtype);
        return Err(error::unsupported(py, &text, "install torch, or ask for another dtype"));
    };
    kwargs.set_item("dtype", kind)?;
    if library == "torch" {
        // Not on torch's default device, whatever that is.
        kwargs.set_item("device", "cpu")?;
    }
    let object = module.call_method("empty", (shape,), Some(&kwargs))?;
    let meta = Meta::read(&object, job.front.name(), spec.name, Purpose::Run)?;
    let meta = if per_byte == 2 {
        meta.unpacked(py, spec.dtype.name(), job.front.name(), spec.name, Purpose::Run)?
    } else {
        meta
    };
    Ok((object, meta))
}

/// Whether torch is, or can be, imported.
pub fn torch_is_there(py: Python<'_>) -> PyResult<bool> {
    py.import("layerzero.loading")?.call_method0("torch_is_there")?.extract()
}

/// A seed from a generator, or from torch's default one.
pub fn draw_seed<'py>(py: Python<'py>, generator: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    py.import("layerzero.arrays")?.call_method1("draw_seed", (generator,))
}
