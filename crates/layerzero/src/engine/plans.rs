//! Plans: decisions that are in force for the calls of a context, made and extended.

use std::sync::Arc;

use lz_model::{CallSpec, DeviceIx};
use lz_select::Pins;

use super::Engine;
use super::solve::SolveRequest;
use crate::core::Scope;
use crate::documents::{DispatchTable, PinStatus, Plan, status};
use crate::error::Error;

impl Engine {
    /// A plan of a table's decisions, called `name`. A table for other hardware, or of other capabilities, is refused as
    /// a whole. [`Engine::overlay_with`] puts it in force.
    pub fn make_plan(&self, table: DispatchTable, name: &str, learns: bool) -> Result<Arc<Plan>, Error> {
        let plan = Plan::new(table, name, learns);
        self.look_for_more(|devices| plan.source().is_for_others(devices))?;
        match self.with_snapshot(|snapshot| plan.source().refusal(snapshot.spec())) {
            Some(kind) => Err(Error::TableRefused { table: format!("of plan {name}"), why: Box::new(kind) }),
            None => Ok(plan),
        }
    }

    /// What of a plan is in force inside of it, in a scope.
    pub fn plan_status(&self, scope: &Scope<'_>, plan: &Plan) -> Result<PinStatus, Error> {
        let mut draft = self.draft_in(scope.overlay());
        draft.pinned.put_plans(vec![plan.source().clone()]);
        draft.repin();
        Ok(status(&draft.build()?.snapshot, plan.source()))
    }

    /// `onto`, and the calls that were made inside of `plan` and that `onto` does not cover; `None` when there were none.
    /// They are the same plan, but while a call was made inside of it others may have extended it. What was decided
    /// before stays.
    pub fn learned(&self, scope: &Scope<'_>, plan: &Plan, onto: &Plan) -> Result<Option<Arc<Plan>>, Error> {
        let noted = plan.take_noted();
        let Some((_, first)) = noted.first() else { return Ok(None) };
        let fresh = self.fresh(scope, true)?;
        let (snapshot, spec) = (fresh.snapshot(), fresh.snapshot().spec());
        let mut table = onto.table().clone();
        let signature = |ix: DeviceIx| snapshot.device(ix).map(lz_model::DeviceSpec::signature);
        // One that has decided nothing is for no hardware yet.
        let device = if table.plans.is_empty() { signature(*first) } else { Some(table.hardware_signature.clone()) };
        let pins: Pins = onto.source().pins(spec).into_iter().collect();
        let is_new = |(call, ix): &&(CallSpec, DeviceIx)| {
            let named = call.named(*ix, lz_model::Context::default());
            let bound = fresh.bind(&call.op, &named);
            signature(*ix) == device && bound.is_ok_and(|(_, bound)| pins.find(&bound.query).is_none())
        };
        let calls: Vec<(CallSpec, DeviceIx)> = noted.iter().filter(is_new).cloned().collect();
        let Some(&(_, device)) = calls.first() else { return Ok(None) };
        let request = SolveRequest {
            model_id: table.model_id.clone(),
            device,
            buckets: table.shape_buckets.clone(),
            calls: calls.into_iter().map(|(call, _)| call).collect(),
        };
        let solved = self.solve_in(scope, &request)?.table;
        if solved.plans.is_empty() {
            return Ok(None);
        }
        table.hardware_signature.clone_from(&solved.hardware_signature);
        table.take(solved);
        Ok(Some(Plan::new(table, &onto.name, onto.learns)))
    }
}
