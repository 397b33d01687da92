//! Proof before trust: a kernel that is not built in is compared with the reference before it serves.
//!
//! It happens on the slow path, on inputs made for it; `layerzero.proof` does the comparing. What is found out becomes
//! part of the engine's state, so that the next decision goes by it.

use layerzero::Proven;
use layerzero::model::{CallSpec, Query, Reason};
use layerzero::selection::{Evidence, KernelIx};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::error;
use crate::job::{Job, Making};
use crate::registry;
use crate::route::RouteStep;
use crate::torch::Torch;

/// Compares the kernel of a step with the reference, for calls like this one. `alone`: nobody else could serve the call, so
/// that a comparison in another thread is waited for. What the kernel raises is raised.
pub fn prove(job: &Job<'_, '_>, step: &RouteStep, alone: bool) -> PyResult<Proven> {
    let Making { py, scope, front, route } = **job;
    let arguments = job.arguments;
    let (kernel, query) = (&step.kernel, &route.query);
    let later = |busy: &str| Ok(Proven::Later(Reason::NotVerified { busy: busy.into() }.to_string()));
    if query.context().capturing {
        return later("a CUDA graph is captured");
    }
    if Torch::known().is_none_or(|torch| torch.surroundings().special) {
        return later("a dispatch mode or a transform is active; make such a call once outside of it");
    }
    let Some(_task) = engine().begin_proof(kernel, query) else {
        if alone {
            py.detach(|| engine().await_proof(kernel, query));
        }
        return match known(job, step) {
            Some(known) => Ok(known),
            None => later("another thread does that"),
        };
    };
    // Another thread may have finished just before.
    if let Some(known) = known(job, step) {
        return Ok(known);
    }
    let named = arguments.named(front, registry::context(py)?);
    let (_, bound) = scope.bind(front.signature.function.target, &named).map_err(|e| error::engine(py, &e))?;
    let call = CallSpec::canonical(&named, &bound);
    let small = scope.proof_call(kernel, &call, query);
    let name = |at: usize| front.signature.arguments[at].name;
    let wanted: Vec<&str> =
        arguments.metas.iter().filter(|(_, meta)| meta.requires_grad).map(|(at, _)| name(*at)).collect();
    let versioned = format!("{}@{}", kernel.id, kernel.version);
    let arguments =
        (versioned, small.to_string(), call.to_string(), query.device().0, query.context().requires_grad, wanted);
    let proof = py.import("layerzero.proof")?;
    let compared = proof.call_method1("compare", arguments);
    let (max_error, wrong, tolerance, compared) = match compared {
        Ok(answer) => answer.extract::<(f64, Option<String>, f64, String)>()?,
        Err(raised) if raised.is_instance(py, &proof.getattr("CannotCompare")?) => {
            let text = error::one_line(py, &raised);
            return Ok(Proven::Later(format!("was not compared with the reference: {text}")));
        }
        Err(raised) => return Err(raised),
    };
    match wrong {
        None => {
            engine().proved(kernel, query);
            Ok(Proven::Passed)
        }
        Some(error) => {
            let call = described(&compared, query);
            let evidence = Evidence {
                error,
                call,
                max_error: max_error.is_finite().then_some(max_error),
                tolerance: Some(tolerance),
            };
            let why = evidence.reason().to_string();
            engine().found_wrong(kernel, query, evidence);
            Ok(Proven::Wrong(why))
        }
    }
}

/// What is known by now of a kernel for calls like this one; `None` when it was not compared.
fn known(job: &Job<'_, '_>, step: &RouteStep) -> Option<Proven> {
    let (now, query) = (engine().scope(job.scope.overlay()), &job.route.query);
    let snapshot = now.snapshot();
    if let Some(evidence) = snapshot.spec().proofs.evidence(&step.kernel, query) {
        return Some(Proven::Wrong(evidence.reason().to_string()));
    }
    let is_it = |ix: &KernelIx| *snapshot.kernel(*ix) == step.kernel;
    let ix = snapshot.kernels().map(|(ix, _)| ix).find(is_it)?;
    (!snapshot.needs_proof(ix, query)).then_some(Proven::Passed)
}

/// A call in words: operation, sizes, dtypes.
fn described(call: &str, query: &Query) -> String {
    let spec = call.parse::<CallSpec>().ok();
    let bound = spec.and_then(|spec| engine().bind_for(&spec, query.device(), query.context().requires_grad).ok());
    let words = format!("{:?}", bound.as_ref().unwrap_or(query));
    if query.context().requires_grad { format!("{words} with gradients") } else { words }
}
