//! CUDA graphs: which kernel is to be proven for a call, what came of it, and decisions held for a capture.

use std::collections::BTreeMap;
use std::sync::Arc;

use lz_model::{CallSpec, DeviceIx, GraphDoubt, Query};
use lz_select::Pin;

use super::Engine;
use crate::core::{Scope, find_kernels};
use crate::documents::{Buckets, DispatchTable, Fallback, Plan, SCHEMA_VERSION};
use crate::error::Error;

/// Who holds decisions for captures, as `explain` says it.
const HOLDER: &str = "lz.capture";

impl Engine {
    /// The kernel to capture and replay for a call: the one that would serve it inside a capture if it were proven, and is
    /// not. `None` when the first choice is proven, and when nobody could serve it.
    pub fn wanted_in_graphs(&self, scope: &Scope<'_>, query: &Query) -> Option<String> {
        let (snapshot, query) = (scope.snapshot(), query.captured());
        let first = snapshot.select_as_proven(&query).chosen()?.kernel;
        let doubt = snapshot.graph_doubt(snapshot.kernel(first), &query, true);
        doubt.map(|_| snapshot.name(first))
    }

    /// Why a kernel is not proven inside a capture of a call; `None` when it is.
    pub fn graph_doubt(&self, scope: &Scope<'_>, kernel_id: &str, query: &Query) -> Result<Option<GraphDoubt>, Error> {
        let ix = find_kernels(scope.snapshot(), kernel_id)?[0];
        let kernel = scope.snapshot().kernel(ix);
        let undeclared = (!kernel.graph_safe).then_some(GraphDoubt::Undeclared);
        Ok(undeclared.or_else(|| scope.snapshot().graph_doubt(kernel, &query.captured(), true)))
    }

    /// A kernel was captured and replayed for a call.
    pub fn captured(&self, kernel_id: &str, query: &Query, outcome: Result<(), GraphDoubt>) -> Result<(), Error> {
        let kernel = self.with_snapshot(|s| find_kernels(s, kernel_id).map(|found| s.kernel(found[0]).clone()))?;
        self.prove(|proofs| proofs.captured(&kernel, query, outcome));
        Ok(())
    }

    /// Holds what is decided for a call inside a capture, whatever is measured from now on: a graph that is captured later
    /// records the kernel that was made ready. Gives the kernel.
    pub fn hold_for_capture(&self, scope: &Scope<'_>, query: &Query) -> Result<String, Error> {
        let query = query.captured();
        let kernel = scope.steps(&query)?[0].kernel.clone();
        let pin = Pin::exact(&query, &kernel.id, Some(&kernel.version), HOLDER.into());
        self.change_warmed(|draft| draft.pinned.hold(pin.clone()), |_| Ok(()), &[])?;
        Ok(kernel.id.clone())
    }

    /// Lets go of decisions that are held for captures.
    pub fn release_captures(&self) -> Result<(), Error> {
        self.change_warmed(|draft| draft.pinned.release(), |_| Ok(()), &[])
    }

    /// A plan that decides nothing and takes note of the calls made inside of it.
    pub fn recording(&self) -> Arc<Plan> {
        let table = DispatchTable {
            schema_version: SCHEMA_VERSION.to_owned(),
            model_id: HOLDER.to_owned(),
            hardware_signature: String::new(),
            layerzero_version: None,
            capabilities: BTreeMap::new(),
            shape_buckets: Buckets::default(),
            plans: Vec::new(),
            fallback: Fallback::default(),
        };
        Plan::new(table, HOLDER, true)
    }

    /// The calls that a plan took note of since this was asked last.
    pub fn noted(&self, plan: &Plan) -> Vec<(CallSpec, DeviceIx)> {
        plan.take_noted()
    }
}
