//! Proof before trust: kernels that are not built in are compared with the reference before they serve.
//!
//! Whoever runs kernels does the comparing, since they have the tensors. [`Core::begin_proof`] gives one thread the task,
//! [`Scope::proof_call`] says on which small call, and [`Core::proved`] or [`Core::found_wrong`] how it came out. A
//! kernel that was found wrong once, by whomever, serves no call of the operation until it is right for that class of call.

use std::sync::Arc;

use lz_model::{CallSpec, Catalog, Context, DeviceIx, Facts, KernelDescriptor, Query};
use lz_resilience::Event;
use lz_select::{Evidence, KernelVersion, Proofs, Verify};
use serde::Serialize;

use super::Core;
use super::ask::find_kernels;
use super::proving::Proof;
use super::scope::Scope;
use super::step::Step;
use crate::error::Error;
use crate::rejections::Rejection;
use crate::warn::Warning;

/// Work up to which a sampled call is compared with the reference, which goes through every element one by one.
const SAMPLED_FLOPS: f64 = 3e7;

/// A wrong result, as health shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WrongResult {
    /// The kernel's id.
    pub kernel: String,
    /// Its version.
    pub version: String,
    /// The operation it no longer serves.
    pub op: &'static str,
    /// The call it was compared for.
    pub call: String,
    /// What was wrong.
    pub error: String,
    /// The largest difference, where it is a number.
    pub max_error: Option<f64>,
    /// What is allowed, relative to the size of the value.
    pub tolerance: Option<f64>,
}

impl Core {
    /// Takes the task of comparing a kernel for calls like this one; `None` while another thread has it.
    pub fn begin_proof(&self, kernel: &KernelDescriptor, query: &Query) -> Option<Proof<'_>> {
        self.proving.begin(kernel, query)
    }

    /// Waits until no thread compares a kernel for calls like this one, or for ten seconds.
    pub fn await_proof(&self, kernel: &KernelDescriptor, query: &Query) {
        self.proving.wait(kernel, query);
    }

    /// A kernel gave what the reference gives, for a call like this one.
    pub fn proved(&self, kernel: &KernelDescriptor, query: &Query) {
        self.prove(|proofs| proofs.passed(kernel, query));
    }

    /// A kernel gave a wrong result. It serves no call of the operation until it is right for a call like this one.
    pub fn found_wrong(&self, kernel: &KernelDescriptor, query: &Query, evidence: Evidence) {
        let op = Catalog::get().op(query.op()).id();
        let error = evidence.reason().to_string();
        self.take_out(kernel, query, evidence);
        let (backend, id) = (kernel.backend.clone(), kernel.id.clone());
        self.guard.emit(Event::KernelFailed { op: op.to_owned(), backend, kernel: id.clone(), error: error.clone() });
        self.warn(&Warning::WrongResult { op, kernel: id, error });
    }

    /// As [`Core::found_wrong`], of a kernel that served nobody, by someone who tells of it: a rollout.
    pub fn take_out(&self, kernel: &KernelDescriptor, query: &Query, evidence: Evidence) {
        self.prove(|proofs| proofs.mismatched(kernel, query, evidence));
    }

    /// Forgets wrong results of this process: those kernels are compared again.
    pub(crate) fn forget_wrong(&self) {
        if !self.with_snapshot(|s| s.spec().proofs.mismatches().is_empty()) {
            self.prove(Proofs::forget_wrong);
        }
    }

    /// Changes what is known. What was built before is valid with other proofs as well.
    pub(crate) fn prove(&self, change: impl FnOnce(&mut Proofs)) {
        let _ = self.update(|spec| change(Arc::make_mut(&mut spec.proofs)));
    }

    /// Every wrong result that keeps a kernel out: found in this process, and kept in the performance database.
    pub fn wrong_results(&self) -> Vec<WrongResult> {
        let state = self.state.load();
        let spec = state.snapshot.spec();
        let report = |((kernel, version), op, evidence): (KernelVersion, _, Evidence)| WrongResult {
            kernel,
            version,
            op: Catalog::get().op(op).id(),
            call: evidence.call,
            error: evidence.error,
            max_error: evidence.max_error,
            tolerance: evidence.tolerance,
        };
        let here = spec.proofs.mismatches().into_iter().map(|(name, op, e)| (name.clone(), op, e.clone()));
        let mut known: Vec<WrongResult> = here.map(report).collect();
        for wrong in spec.perf.mismatches().into_iter().map(report) {
            let is_it = |w: &WrongResult| (&w.kernel, &w.version, w.op) == (&wrong.kernel, &wrong.version, wrong.op);
            let registered = state.snapshot.kernels().any(|(_, k)| k.id == wrong.kernel && k.version == wrong.version);
            if registered && !known.iter().any(is_it) {
                known.push(wrong);
            }
        }
        known
    }

    /// A call that is written down, as selection sees it where gradients are wanted or not.
    pub fn bind_for(&self, call: &CallSpec, device: DeviceIx, requires_grad: bool) -> Result<Query, Error> {
        let context = Context { requires_grad, ..Context::default() };
        self.bind(&call.op, &call.named(device, context)).map(|(_, bound)| bound.query)
    }
}

impl Scope<'_> {
    /// Whether a kernel must be compared before it serves a call.
    pub fn needs_proof(&self, kernel: &KernelDescriptor, query: &Query) -> bool {
        let state = &self.state;
        let is_it = |k: &KernelDescriptor| k.id == kernel.id && k.version == kernel.version;
        let found = state.snapshot.kernels().find(|(_, k)| is_it(k));
        found.is_some_and(|(ix, _)| state.snapshot.needs_proof(ix, query))
    }

    /// The smallest call of the same class that a kernel can take.
    pub fn proof_call(&self, kernel: &KernelDescriptor, call: &CallSpec, query: &Query) -> CallSpec {
        let state = &self.state;
        let class = query.proof_class();
        let is_it = |k: &KernelDescriptor| k.id == kernel.id && k.version == kernel.version;
        let Some((ix, _)) = state.snapshot.kernels().find(|(_, k)| is_it(k)) else { return call.clone() };
        // As the call itself is made: whether gradients are wanted decides which kernels are legal.
        let context = Context { capturing: false, ..query.context() };
        call.small(query, |small| {
            let bound = self.bind(&small.op, &small.named(query.device(), context));
            bound.is_ok_and(|(_, b)| b.query.proof_class() == class && state.snapshot.legality(ix, &b.query).is_ok())
        })
    }

    /// One kernel for a query, whatever the operator wants and whatever was seen of it: for comparing it.
    pub fn legal_step(&self, kernel_id: &str, query: &Query) -> Result<Step, Error> {
        let state = &self.state;
        let ix = find_kernels(&state.snapshot, kernel_id)?[0];
        let op = Catalog::get().op(query.op()).id();
        match state.snapshot.legality(ix, query) {
            Ok(transforms) => Ok(state.step(&self.core.guard, op, ix, transforms)),
            Err(reasons) => {
                Err(Error::NoKernel { op, rejections: vec![Rejection { kernel_id: kernel_id.to_owned(), reasons }] })
            }
        }
    }

    /// What a share of the calls of a query is compared with, where `verify` is `sample`: the reference, or what plain torch
    /// runs where the reference cannot run or takes too long. None where that is the kernel that serves.
    pub fn sample_with(&self, query: &Query, steps: &[Step]) -> Option<Step> {
        let state = &self.state;
        let serving = &steps.first()?.kernel;
        if state.snapshot.spec().settings.verify != Verify::Sample || serving.reference {
            return None;
        }
        let (op, query) = (Catalog::get().op(query.op()), &query.without_gradients());
        let flops = state.snapshot.device(query.device()).map_or(0.0, |device| op.flops(&Facts { op, query, device }));
        let kernels = || state.snapshot.kernels_for(op.ix()).map(|ix| (ix, state.snapshot.kernel(ix)));
        let reference = kernels().find(|(_, k)| k.reference && flops <= SAMPLED_FLOPS);
        let plain = kernels().filter(|(_, k)| k.baseline && k.id != serving.id);
        reference.into_iter().chain(plain).find_map(|(ix, _)| {
            let transforms = state.snapshot.legality(ix, query).ok()?;
            Some(state.step(&self.core.guard, op.id(), ix, transforms))
        })
    }
}
