//! Decisions that are in force for the calls made inside a plan, and for no others.
//!
//! A plan is a dispatch table that an overlay carries: it stands above the tables and lockfiles of the process, and like
//! them it only ever chooses among kernels that are legal. One that *learns* takes note of the calls made inside of it
//! that it does not cover; [`crate::Engine::learned`] decides them, once, and gives the plan that covers them too.

use std::sync::Arc;

use lz_model::{CallSpec, DeviceIx, Query};
use lz_select::Snapshot;
use parking_lot::Mutex;

use super::source::Source;
use super::table::DispatchTable;

/// The most kinds of calls a plan learns. Beyond, kernels are selected as always.
const MOST_LEARNED: usize = 1024;

/// The decisions of a plan.
pub struct Plan {
    pub(crate) name: String,
    source: Arc<Source>,
    pub(crate) learns: bool,
    /// Calls it was not made for.
    noted: Mutex<Vec<(CallSpec, DeviceIx)>>,
}

impl Plan {
    pub(crate) fn new(table: DispatchTable, name: &str, learns: bool) -> Arc<Plan> {
        let source = Source::plan(table, name);
        Arc::new(Plan { name: name.to_owned(), source, learns, noted: Mutex::default() })
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

    /// The calls that were noted since this was asked last.
    pub(crate) fn take_noted(&self) -> Vec<(CallSpec, DeviceIx)> {
        std::mem::take(&mut *self.noted.lock())
    }
}
