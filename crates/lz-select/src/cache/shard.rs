//! One shard of the shared table: an immutable table behind an atomic pointer, replaced on write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use lz_model::Query;
use parking_lot::Mutex;

use super::flight::Flights;
use super::generation::{Generation, Ticket};
use crate::decision::{Chain, KernelIx};

/// What is stored under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The chain of every query with this key.
    Chain(Chain),
    /// Queries with this cell key do not share a chain: look under the exact key.
    Mixed,
}

/// One entry.
#[derive(Debug)]
pub struct Entry {
    pub key: Query,
    pub stored: Stored,
    pub epoch: u64,
    pub expires_ms: u64,
    /// When it was last used, in ticks of the shard.
    used: AtomicU64,
}

/// Bytes an entry takes beyond its key, its share of the table included.
pub const ENTRY_OVERHEAD: usize =
    size_of::<Entry>() - size_of::<Query>() + 2 * size_of::<usize>() + size_of::<(u32, Arc<Entry>)>();

#[derive(Default)]
struct Table {
    rows: Vec<(u32, Arc<Entry>)>,
}

/// A shard.
#[derive(Default)]
pub struct Shard {
    table: ArcSwap<Table>,
    writing: Mutex<()>,
    ticks: AtomicU64,
    /// Lookups it answered: counted here, so that threads that look up different things count in different places.
    pub hits: AtomicU64,
    pub generation: Generation,
    pub flights: Flights<Query>,
}

impl Shard {
    /// What is stored for `key`, if that still counts, and until when it does.
    pub fn find(&self, tag: u32, key: &Query, epoch: u64, now_ms: u64) -> Option<(Stored, u64)> {
        let table = self.table.load();
        let live = |entry: &Entry| entry.key == *key && entry.epoch == epoch && now_ms < entry.expires_ms;
        let (_, entry) = table.rows.iter().find(|(t, entry)| *t == tag && live(entry))?;
        // The most recently used entry needs no mark, so repeated hits on it write nothing.
        if entry.used.load(Ordering::Relaxed) != self.ticks.load(Ordering::Relaxed) {
            entry.used.store(self.ticks.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        Some((entry.stored, entry.expires_ms))
    }

    /// The chains of an epoch.
    pub fn chains(&self, epoch: u64) -> Vec<(Query, Chain)> {
        let chain = |entry: &Arc<Entry>| match entry.stored {
            Stored::Chain(chain) if entry.epoch == epoch => Some((entry.key, chain)),
            _ => None,
        };
        self.table.load().rows.iter().filter_map(|(_, entry)| chain(entry)).collect()
    }

    /// Adds an entry, unless something was invalidated since `ticket`. The least recently used
    /// make room.
    pub fn insert(&self, tag: u32, ticket: Ticket, capacity: usize, mut entry: Entry) -> bool {
        let _writing = self.writing.lock();
        let outdated = self.table.load().rows.iter().any(|(_, e)| e.epoch > entry.epoch);
        if !self.generation.is_current(ticket) || capacity == 0 || outdated {
            return false;
        }
        let tick = self.ticks.fetch_add(1, Ordering::Relaxed) + 1;
        entry.used = AtomicU64::new(tick);
        let mut rows: Vec<(u32, Arc<Entry>)> = self
            .table
            .load()
            .rows
            .iter()
            .filter(|(_, e)| e.key != entry.key && e.epoch >= entry.epoch)
            .cloned()
            .collect();
        while rows.len() >= capacity {
            let oldest = (0..rows.len()).min_by_key(|&i| rows[i].1.used.load(Ordering::Relaxed)).unwrap_or(0);
            rows.swap_remove(oldest);
        }
        rows.push((tag, Arc::new(entry)));
        self.table.store(Arc::new(Table { rows }));
        true
    }

    /// Drops the entries `stale` picks, and makes computations under way not count.
    pub fn invalidate(&self, stale: impl Fn(&Query, Option<&Chain>) -> bool) {
        let _writing = self.writing.lock();
        let chain = |entry: &Entry| {
            if let Stored::Chain(chain) = entry.stored { Some(chain) } else { None }
        };
        let rows = self.table.load().rows.iter().filter(|(_, e)| !stale(&e.key, chain(e).as_ref())).cloned().collect();
        self.table.store(Arc::new(Table { rows }));
        // After the table: whoever reads the new generation also reads the new table.
        self.generation.advance();
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.table.load().rows.len()
    }
}

impl Entry {
    pub fn new(key: Query, stored: Stored, epoch: u64, expires_ms: u64) -> Entry {
        Entry { key, stored, epoch, expires_ms, used: AtomicU64::new(0) }
    }
}

/// Whether a chain runs a kernel.
pub fn mentions(chain: Option<&Chain>, kernels: &[KernelIx]) -> bool {
    chain.is_some_and(|chain| kernels.iter().any(|&kernel| chain.mentions(kernel)))
}
