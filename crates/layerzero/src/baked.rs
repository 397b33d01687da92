//! Decisions that are in force for the calls made inside a plan, and for no others.
//!
//! A plan is a dispatch table that an overlay carries: it stands above the tables and lockfiles of the process, and like
//! them it only ever chooses among kernels that are legal. One that *learns* takes note of the calls made inside of it
//! that it does not cover; [`Engine::learned`] decides them, once, and gives the plan that covers them too.

use std::sync::Arc;

use lz_model::{CallSpec, DeviceIx, Query};
use lz_select::{Pins, Snapshot};
use parking_lot::Mutex;

use crate::engine::Engine;
use crate::error::Error;
use crate::pinned::{PinStatus, Source, status};
use crate::scope::Scope;
use crate::table::DispatchTable;
use crate::table::solve::SolveRequest;

/// The most kinds of calls a plan learns. Beyond, kernels are selected as always.
const MOST_LEARNED: usize = 1024;

/// The decisions of a plan.
pub struct Baked {
    name: String,
    source: Arc<Source>,
    learns: bool,
    /// Calls it was not made for.
    noted: Mutex<Vec<(CallSpec, DeviceIx)>>,
}

impl Baked {
    fn new(table: DispatchTable, name: &str, learns: bool) -> Arc<Baked> {
        let source = Source::plan(table, name);
        Arc::new(Baked { name: name.to_owned(), source, learns, noted: Mutex::default() })
    }

    /// Its decisions.
    pub fn table(&self) -> &DispatchTable {
        self.source.as_table().expect("a plan is made of a table")
    }

    pub(crate) fn source(&self) -> &Arc<Source> {
        &self.source
    }

    /// Takes note of a call that was made inside, unless it is covered.
    pub(crate) fn note(&self, snapshot: &Snapshot, query: &Query, call: &CallSpec) {
        if !self.learns {
            return;
        }
        let pin = snapshot.spec().pins.find(query);
        if pin.is_some_and(|pin| Arc::ptr_eq(&pin.origin, &self.source.origin)) {
            return;
        }
        let noted = (call.clone(), query.device());
        let known = self.table().entries().count();
        let mut all = self.noted.lock();
        if known + all.len() < MOST_LEARNED && !all.contains(&noted) {
            all.push(noted);
        }
    }
}

impl Engine {
    /// A plan of a table's decisions, called `name`. A table for other hardware, or of other capabilities, is refused as
    /// a whole. [`Engine::overlay_with`] puts it in force.
    pub fn bake(&self, table: DispatchTable, name: &str, learns: bool) -> Result<Arc<Baked>, Error> {
        let baked = Baked::new(table, name, learns);
        self.look_for_more(|devices| baked.source.is_for_others(devices))?;
        match self.with_snapshot(|snapshot| baked.source.refusal(snapshot.spec())) {
            Some(kind) => Err(Error::TableRefused { table: format!("of plan {name}"), why: Box::new(kind) }),
            None => Ok(baked),
        }
    }
}

impl Scope<'_> {
    /// What of a plan is in force inside of it, in this scope.
    pub fn baked_status(&self, baked: &Baked) -> Result<PinStatus, Error> {
        let mut draft = self.engine.draft_in(self.overlay);
        draft.pinned.put_plans(vec![baked.source.clone()]);
        draft.repin();
        Ok(status(&draft.build()?.snapshot, &baked.source))
    }

    /// `onto`, and the calls that were made inside of `baked` and that `onto` does not cover; `None` when there were none.
    /// They are the same plan, but while a call was made inside of it others may have extended it. What was decided
    /// before stays.
    pub fn learned(&self, baked: &Baked, onto: &Baked) -> Result<Option<Arc<Baked>>, Error> {
        let noted = std::mem::take(&mut *baked.noted.lock());
        let Some((_, first)) = noted.first() else { return Ok(None) };
        let fresh = self.fresh(true)?;
        let (state, spec) = (&fresh.state, fresh.snapshot().spec());
        let mut table = onto.table().clone();
        let signature = |ix: DeviceIx| state.snapshot.device(ix).map(lz_model::DeviceSpec::signature);
        // One that has decided nothing is for no hardware yet.
        let device = if table.plans.is_empty() { signature(*first) } else { Some(table.hardware_signature.clone()) };
        let pins: Pins = onto.source.pins(spec).into_iter().collect();
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
        let solved = self.solve(&request)?.table;
        if solved.plans.is_empty() {
            return Ok(None);
        }
        table.hardware_signature.clone_from(&solved.hardware_signature);
        table.take(solved);
        Ok(Some(Baked::new(table, &onto.name, onto.learns)))
    }
}
