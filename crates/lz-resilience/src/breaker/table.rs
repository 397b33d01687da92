//! One breaker for each kernel and operation. A backend is disabled as a whole.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use super::{Breaker, BreakerConfig, BreakerState, BreakerView, Earlier, Transition};
use crate::message::clip;

/// The breakers by backend, kernel and operation, made on first use.
///
/// A kernel that keeps failing leaves its siblings alone; a lost context takes all kernels of its backend out.
///
/// Looking one up takes a lock: whoever calls often keeps the [`Arc`].
#[derive(Debug)]
pub struct Breakers {
    config: BreakerConfig,
    seed: u64,
    table: RwLock<Table>,
}

/// The breakers of one backend, by kernel and operation.
type OfBackend = BTreeMap<String, BTreeMap<String, Arc<Breaker>>>;

#[derive(Debug, Default)]
struct Table {
    breakers: BTreeMap<String, OfBackend>,
    /// Backends that are out for good, and why.
    disabled: BTreeMap<String, String>,
}

/// A breaker, for reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BreakerReport {
    /// The backend.
    pub backend: String,
    /// The kernel.
    pub kernel: String,
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

    /// The breaker of a backend's kernel and an operation.
    pub fn get(&self, backend: &str, kernel: &str, op: &str) -> Arc<Breaker> {
        self.get_or(backend, kernel, op, || None)
    }

    /// As [`Breakers::get`]; one that is new begins as an earlier process left it, at this time.
    pub fn get_or(
        &self,
        backend: &str,
        kernel: &str,
        op: &str,
        earlier: impl FnOnce() -> Option<(u64, Earlier)>,
    ) -> Arc<Breaker> {
        let found = |table: &Table| table.breakers.get(backend)?.get(kernel)?.get(op).cloned();
        if let Some(breaker) = found(&self.table.read()) {
            return breaker;
        }
        let mut table = self.table.write();
        let Table { breakers, disabled } = &mut *table;
        let ops = breakers.entry(backend.to_owned()).or_default().entry(kernel.to_owned()).or_default();
        let made = ops.entry(op.to_owned()).or_insert_with(|| {
            let seed = fnv(fnv(fnv(self.seed, backend), kernel), op);
            let breaker = match earlier() {
                Some((now_ms, earlier)) => Breaker::reopened(&self.config, seed, now_ms, &earlier),
                None => Breaker::new(&self.config, seed),
            };
            if let Some(reason) = disabled.get(backend) {
                breaker.trip_forever(reason);
            }
            Arc::new(breaker)
        });
        made.clone()
    }

    /// Disables a backend for the life of the process: every kernel and operation it has, and every one it will be asked
    /// for. Gives the kernels and operations that went out by this.
    pub fn disable_backend(&self, backend: &str, reason: &str) -> Vec<(String, String)> {
        let mut table = self.table.write();
        table.disabled.entry(backend.to_owned()).or_insert_with(|| clip(reason));
        let Some(kernels) = table.breakers.get(backend) else { return Vec::new() };
        let went = |breaker: &Breaker| breaker.trip_forever(reason) == Some(Transition::Disabled);
        let all = kernels.iter().flat_map(|(kernel, ops)| ops.iter().map(move |(op, breaker)| (kernel, op, breaker)));
        all.filter(|(.., breaker)| went(breaker)).map(|(kernel, op, _)| (kernel.clone(), op.clone())).collect()
    }

    /// Why a backend is disabled for the life of the process.
    pub fn disabled_because(&self, backend: &str) -> Option<String> {
        self.table.read().disabled.get(backend).cloned()
    }

    /// A table with another configuration. What is out for the life of the process stays out; all else begins anew.
    pub fn reconfigured(&self, config: BreakerConfig) -> Breakers {
        let table = self.table.read();
        let mut next = Table { disabled: table.disabled.clone(), ..Table::default() };
        for (backend, kernel, op, breaker) in table.all() {
            if breaker.view().state == BreakerState::Disabled {
                let kernels = next.breakers.entry(backend.clone()).or_default();
                kernels.entry(kernel.clone()).or_default().insert(op.clone(), breaker.clone());
            }
        }
        Breakers { config, seed: self.seed, table: RwLock::new(next) }
    }

    /// Its thresholds.
    pub fn config(&self) -> &BreakerConfig {
        &self.config
    }

    /// Forgets the breakers of kernels, those that are out for good excepted: a kernel that comes under such a name is not
    /// the one it was.
    pub fn forget(&self, gone: impl Fn(&str) -> bool) {
        let mut table = self.table.write();
        for kernels in table.breakers.values_mut() {
            for (_, ops) in kernels.iter_mut().filter(|(kernel, _)| gone(kernel)) {
                ops.retain(|_, breaker| breaker.view().state == BreakerState::Disabled);
            }
        }
    }

    /// Every breaker, by backend, kernel and operation.
    pub fn report(&self) -> Vec<BreakerReport> {
        let table = self.table.read();
        let report = |(backend, kernel, op, breaker): (&String, &String, &String, &Arc<Breaker>)| BreakerReport {
            backend: backend.clone(),
            kernel: kernel.clone(),
            op: op.clone(),
            view: breaker.view(),
        };
        table.all().map(report).collect()
    }

    /// The earliest time at which an open breaker lets a probe in.
    pub fn next_retry_at_ms(&self) -> Option<u64> {
        self.table.read().all().filter_map(|(.., breaker)| breaker.view().retry_at_ms).min()
    }
}

impl Table {
    /// Every breaker with its backend, kernel and operation.
    fn all(&self) -> impl Iterator<Item = (&String, &String, &String, &Arc<Breaker>)> {
        let kernels = self.breakers.iter().flat_map(|(backend, kernels)| kernels.iter().map(move |k| (backend, k)));
        kernels.flat_map(|(backend, (kernel, ops))| ops.iter().map(move |(op, breaker)| (backend, kernel, op, breaker)))
    }
}

/// FNV-1a over a name, going on from `hash`: the same in every process.
fn fnv(hash: u64, name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    // 0xff is in no name, so (ab, c) and (a, bc) differ.
    name.bytes().chain([0xff]).fold(hash ^ 0xcbf2_9ce4_8422_2325, step)
}
