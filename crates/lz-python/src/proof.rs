//! Proof before trust: a kernel that is not built in is compared with the reference before it serves.
//!
//! It happens on the slow path, on inputs made for it; `layerzero.proving` does the comparing. What is found out becomes
//! part of the engine's state, so that the next decision goes by it.

use layerzero::model::{CallSpec, Query, Reason};
use layerzero::selection::{Evidence, KernelIx};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::error;
use crate::front::Front;
use crate::registry;
use crate::route::{Route, RouteStep};
use crate::slow::Arguments;
use crate::torch::Torch;

/// What came of an attempt to prove a kernel.
pub enum Standing {
    /// It may serve.
    Proven,
    /// It was wrong: it is out, and another decision is due.
    Wrong(String),
    /// It cannot be compared now, so that it may not serve this call.
    Later(String),
}

/// Compares the kernel of a step with the reference, for calls like this one. `alone`: nobody else could serve the call, so
/// that a comparison in another thread is waited for. What the kernel raises is raised.
pub fn prove(
    py: Python<'_>,
    front: &'static Front,
    arguments: &Arguments,
    route: &Route,
    step: &RouteStep,
    alone: bool,
) -> PyResult<Standing> {
    let (kernel, query) = (&step.kernel, &route.query);
    let later = |busy: &str| Ok(Standing::Later(Reason::NotVerified { busy: busy.into() }.to_string()));
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
        return match standing(step, query) {
            Some(known) => Ok(known),
            None => later("another thread does that"),
        };
    };
    // Another thread may have finished just before.
    if let Some(known) = standing(step, query) {
        return Ok(known);
    }
    let named = arguments.named(front, registry::context(py)?);
    let (_, bound) = engine().bind(front.signature.function.target, &named).map_err(|e| error::engine(py, &e))?;
    let call = CallSpec::canonical(&named, &bound);
    let small = engine().proof_call(kernel, &call, query);
    let name = |at: usize| front.signature.arguments[at].name;
    let wanted: Vec<&str> =
        arguments.metas.iter().filter(|(_, meta)| meta.requires_grad).map(|(at, _)| name(*at)).collect();
    let versioned = format!("{}@{}", kernel.id, kernel.version);
    let arguments =
        (versioned, small.to_string(), call.to_string(), query.device().0, query.context().requires_grad, wanted);
    let proving = py.import("layerzero.proving")?;
    let compared = proving.call_method1("compare", arguments);
    let (max_error, wrong, tolerance, compared) = match compared {
        Ok(answer) => answer.extract::<(f64, Option<String>, f64, String)>()?,
        Err(raised) if raised.is_instance(py, &proving.getattr("CannotCompare")?) => {
            let text = error::one_line(py, &raised);
            return Ok(Standing::Later(format!("was not compared with the reference: {text}")));
        }
        Err(raised) => return Err(raised),
    };
    match wrong {
        None => {
            engine().proved(kernel, query);
            Ok(Standing::Proven)
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
            Ok(Standing::Wrong(why))
        }
    }
}

/// What is known of a kernel for calls like this one; `None` when it was not compared.
fn standing(step: &RouteStep, query: &Query) -> Option<Standing> {
    engine().with_snapshot(|snapshot| {
        if let Some(evidence) = snapshot.spec().proofs.evidence(&step.kernel, query) {
            return Some(Standing::Wrong(evidence.reason().to_string()));
        }
        let is_it = |ix: &KernelIx| *snapshot.kernel(*ix) == step.kernel;
        let ix = snapshot.kernels().map(|(ix, _)| ix).find(is_it)?;
        (!snapshot.needs_proof(ix, query)).then_some(Standing::Proven)
    })
}

/// A call in words: operation, sizes, dtypes.
fn described(call: &str, query: &Query) -> String {
    let spec = call.parse::<CallSpec>().ok();
    let bound = spec.and_then(|spec| engine().bind_for(&spec, query.device(), query.context().requires_grad).ok());
    let words = format!("{:?}", bound.as_ref().unwrap_or(query));
    if query.context().requires_grad { format!("{words} with gradients") } else { words }
}
