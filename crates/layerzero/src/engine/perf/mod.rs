//! Tuning, regret and cross-validation: what is measured, and what selection makes of it.

pub mod bench;
pub mod cross_validation;
pub mod prior;
pub mod regret;
pub mod request;
pub mod tune;
mod tuning;

use std::sync::Arc;

use lz_model::{CallSpec, DeviceIx, DeviceSpec, Query};
use lz_perfdb::{Filter, Mode, PerfDb, Record, StoreError};

use super::Engine;
use crate::core::{OverlayId, Scope, Step};
use crate::error::Error;
use crate::services::perf::context_of;

pub use crate::services::perf::{PerfHealth, device_id};

/// A call with the mode it is timed in, as selection sees it.
pub(crate) fn bind_spec(engine: &Engine, call: &CallSpec, device: DeviceIx, mode: Mode) -> Result<Query, Error> {
    engine.bind(&call.op, &call.named(device, context_of(mode))).map(|(_, bound)| bound.query)
}

impl Engine {
    /// One kernel for a query, whatever was seen of it: for measuring and compiling.
    pub fn unbiased_step(&self, kernel_id: &str, query: &Query) -> Result<Step, Error> {
        Scope::of(self, self.perf.unbiased(self)?, OverlayId::NONE).step_of(kernel_id, query)
    }

    /// Opens the database the configuration names; none when it is off. Later calls give the one that is open, unless the
    /// configuration names another one now.
    pub fn perfdb(&self) -> Option<Arc<PerfDb>> {
        self.perf.open(&self.config())
    }

    /// What is to be said about the database that is open: at its path is a file that is not one of ours.
    pub fn perfdb_warnings(&self) -> Vec<String> {
        self.perf.warnings()
    }

    /// Puts what the database knows in force. Rows that another version of a library, a driver or torch left behind are
    /// marked as out of date first. Gives how many measurements selection goes by now: what it went by before, where the
    /// database cannot be read.
    pub fn learn(&self) -> usize {
        self.perf.learn(self, || self.config())
    }

    /// As [`Engine::learn`], if there is a database: one that was never written is not made by looking.
    pub fn learn_if_there(&self) -> usize {
        self.perf.learn_if_there(self, || self.config())
    }

    /// Puts what these records say in force, instead of what was there.
    pub fn learn_from(&self, records: &[Record]) -> usize {
        self.perf.learn_from(self, records)
    }

    /// Keeps records. That they cannot be kept fails nobody; gives why.
    pub fn keep(&self, records: Vec<Record>) -> Result<(), StoreError> {
        self.perf.keep(&self.config(), records)
    }

    /// Every call that was measured on a device of this engine, each once.
    pub fn known_calls(&self) -> Vec<(CallSpec, DeviceIx)> {
        let Some(db) = self.perfdb() else { return Vec::new() };
        let records = db.records(&Filter::all().valid()).unwrap_or_default();
        let ids = |devices: &[DeviceSpec]| devices.iter().map(device_id).collect::<Vec<String>>();
        // GPUs that were not looked for are devices of this engine as well.
        let looked = self.look_for_more(|devices| {
            let here = ids(devices);
            records.iter().any(|record| !here.contains(&record.key.device_id))
        });
        if let Err(error) = looked {
            tracing::warn!(target: "layerzero", "what was measured on GPUs is left out: {error}");
        }
        let ids = ids(&self.devices());
        let mut calls: Vec<(String, u16)> = records
            .into_iter()
            .filter_map(|r| Some((r.key.call, u16::try_from(ids.iter().position(|id| *id == r.key.device_id)?).ok()?)))
            .collect();
        calls.sort();
        calls.dedup();
        calls.into_iter().filter_map(|(call, device)| Some((call.parse().ok()?, DeviceIx(device)))).collect()
    }

    /// How the performance database is doing.
    pub fn perf_health(&self) -> PerfHealth {
        self.perf.health()
    }
}
