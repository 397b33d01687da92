//! One breaker for each backend and operation.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use super::{Breaker, BreakerConfig, BreakerState, BreakerView, Transition};
use crate::message::clip;

/// The breakers by backend and operation, made on first use.
///
/// Looking one up takes a lock: whoever calls often keeps the [`Arc`].
#[derive(Debug)]
pub struct Breakers {
    config: BreakerConfig,
    seed: u64,
    table: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    breakers: BTreeMap<String, BTreeMap<String, Arc<Breaker>>>,
    /// Backends that are out for good, and why.
    disabled: BTreeMap<String, String>,
}

/// A breaker, for reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BreakerReport {
    /// The backend.
    pub backend: String,
    /// The operation.
    pub op: String,
    /// What it looks like.
    #[serde(flatten)]
    pub view: BreakerView,
}

impl Breakers {
    /// An empty table. The seed decides every breaker's jitter, together with its key.
    pub fn new(config: BreakerConfig, seed: u64) -> Breakers {
        Breakers { config, seed, table: RwLock::default() }
    }

    /// The breaker of a backend and an operation.
    pub fn get(&self, backend: &str, op: &str) -> Arc<Breaker> {
        if let Some(breaker) = self.table.read().breakers.get(backend).and_then(|ops| ops.get(op)) {
            return breaker.clone();
        }
        let mut table = self.table.write();
        let Table { breakers, disabled } = &mut *table;
        let ops = breakers.entry(backend.to_owned()).or_default();
        let made = ops.entry(op.to_owned()).or_insert_with(|| {
            let breaker = Breaker::new(&self.config, fnv(fnv(self.seed, backend), op));
            if let Some(reason) = disabled.get(backend) {
                breaker.trip_forever(reason);
            }
            Arc::new(breaker)
        });
        made.clone()
    }

    /// Disables a backend for the life of the process: every operation it has, and every one it will be asked for.
    /// Gives the operations that went out by this.
    pub fn disable_backend(&self, backend: &str, reason: &str) -> Vec<String> {
        let mut table = self.table.write();
        table.disabled.entry(backend.to_owned()).or_insert_with(|| clip(reason));
        let Some(ops) = table.breakers.get(backend) else { return Vec::new() };
        let went = |breaker: &Breaker| breaker.trip_forever(reason) == Some(Transition::Disabled);
        ops.iter().filter(|(_, breaker)| went(breaker)).map(|(op, _)| op.clone()).collect()
    }

    /// Why a backend is disabled for the life of the process.
    pub fn disabled_because(&self, backend: &str) -> Option<String> {
        self.table.read().disabled.get(backend).cloned()
    }

    /// A table with another configuration. What is out for the life of the process stays out; all else begins anew.
    pub fn reconfigured(&self, config: BreakerConfig) -> Breakers {
        let table = self.table.read();
        let mut next = Table { disabled: table.disabled.clone(), ..Table::default() };
        for (backend, ops) in &table.breakers {
            for (op, breaker) in ops.iter().filter(|(_, breaker)| breaker.view().state == BreakerState::Disabled) {
                next.breakers.entry(backend.clone()).or_default().insert(op.clone(), breaker.clone());
            }
        }
        Breakers { config, seed: self.seed, table: RwLock::new(next) }
    }

    /// Its thresholds.
    pub fn config(&self) -> &BreakerConfig {
        &self.config
    }

    /// Forgets a backend's breakers, the sticky ones and what disabled it for good excepted: it is not the one it was.
    pub fn forget(&self, backend: &str) {
        let mut table = self.table.write();
        if let Some(ops) = table.breakers.get_mut(backend) {
            ops.retain(|_, breaker| breaker.view().state == BreakerState::Disabled);
        }
    }

    /// Every breaker, by backend and operation.
    pub fn report(&self) -> Vec<BreakerReport> {
        let table = self.table.read();
        let all = table.breakers.iter().flat_map(|(backend, ops)| ops.iter().map(move |(op, b)| (backend, op, b)));
        all.map(|(backend, op, breaker)| BreakerReport {
            backend: backend.clone(),
            op: op.clone(),
            view: breaker.view(),
        })
        .collect()
    }

    /// The earliest time at which an open breaker lets a probe in.
    pub fn next_retry_at_ms(&self) -> Option<u64> {
        self.table.read().breakers.values().flat_map(BTreeMap::values).filter_map(|b| b.view().retry_at_ms).min()
    }
}

/// FNV-1a over a name, going on from `hash`: the same in every process.
fn fnv(hash: u64, name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    // 0xff is in no name, so (ab, c) and (a, bc) differ.
    name.bytes().chain([0xff]).fold(hash ^ 0xcbf2_9ce4_8422_2325, step)
}
