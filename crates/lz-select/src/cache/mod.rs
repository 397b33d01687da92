//! The selection cache: a thread-local front, then a shared table of 256 shards.
//!
//! - Keys are whole queries; equality of all fields decides, a hash only finds the place.
//! - Reads never lock. A shard is an immutable table behind an atomic pointer; writers copy it.
//! - A miss is computed once, however many threads miss it at the same time.
//! - After [`SelectionCache::invalidate`] returns, nothing computed before it is served.
//! - The number of entries is bounded (least recently used go first), and entries expire.

mod clock;
mod flight;
mod front;
mod generation;
mod shard;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use lz_model::{OpIx, Query};

pub use clock::Clock;
pub use flight::{Boarding, Flights, Leader};
pub use generation::{Generation, Ticket};
pub use shard::ENTRY_OVERHEAD;

use crate::decision::{Chain, KernelIx};
use crate::snapshot::Snapshot;
use front::Origin;
use shard::{Entry, Shard, Stored, mentions};

/// How the cache is sized.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Shards, at most; a power of two.
    pub shards: usize,
    /// Entries, at most; 0 turns the cache off.
    pub max_entries: usize,
    /// Milliseconds an entry lives at most; `u64::MAX` for as long as it is right. None outlives what it depends on.
    pub ttl_ms: u64,
    /// The clock entries live by.
    pub clock: Clock,
}

impl Default for CacheConfig {
    fn default() -> Self {
        CacheConfig { shards: 256, max_entries: 10_000, ttl_ms: u64::MAX, clock: Clock::System }
    }
}

/// What to forget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidate {
    /// Everything.
    All,
    /// One operation.
    Op(OpIx),
    /// Every chain that names one of these kernels (one kernel, or all of a backend).
    Kernels(Vec<KernelIx>),
}

/// Counts since the cache was made. Hits in a thread's front are not counted: counting would cost
/// more than they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Entries now.
    pub entries: usize,
    /// Lookups the shared table answered.
    pub shared_hits: u64,
    /// Lookups that had to be computed.
    pub misses: u64,
}

/// The cache.
pub struct SelectionCache {
    id: u64,
    shards: Box<[Shard]>,
    /// Entries a shard may hold.
    capacity: AtomicUsize,
    ttl_ms: AtomicU64,
    clock: Clock,
    misses: AtomicU64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl SelectionCache {
    /// An empty cache.
    pub fn new(config: CacheConfig) -> SelectionCache {
        // Fewer shards when there are fewer entries than shards, so that the bound holds.
        let mut shards = config.shards.max(1).next_power_of_two();
        while shards > 1 && shards > config.max_entries {
            shards /= 2;
        }
        SelectionCache {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            shards: (0..shards).map(|_| Shard::default()).collect(),
            capacity: AtomicUsize::new(config.max_entries / shards),
            ttl_ms: AtomicU64::new(config.ttl_ms),
            clock: config.clock,
            misses: AtomicU64::new(0),
        }
    }

    /// An empty cache of another size that goes by the same clock and lifetime.
    pub fn sibling(&self, shards: usize, max_entries: usize) -> SelectionCache {
        let (ttl_ms, clock) = (self.ttl_ms.load(Ordering::Relaxed), self.clock.clone());
        SelectionCache::new(CacheConfig { shards, max_entries, ttl_ms, clock })
    }

    /// The chain for a query under a snapshot: remembered, or computed by `compute`.
    ///
    /// `compute` gives the chain and whether it holds for the query's whole cell; `None` means no
    /// kernel can serve the call, which is not remembered.
    #[inline]
    pub fn chain<F>(&self, snapshot: &Snapshot, query: &Query, compute: F) -> Option<Chain>
    where
        F: Fn() -> (Option<Chain>, bool),
    {
        let now_ms = self.clock.now_ms();
        let but_sizes = query.fingerprint_but_sizes();
        let hash = query.fingerprint_with(but_sizes);
        let current = |shard: u32| self.shards[shard as usize].generation.ticket();
        let known = front::find(hash, query, self.id, snapshot.epoch(), now_ms, current);
        if let Some(chain) = known.filter(|chain| snapshot.still_holds(chain, query.device())) {
            return Some(chain);
        }
        self.shared(snapshot, query, (but_sizes, hash), now_ms, compute)
    }

    /// The shared table's answer, computing on a miss.
    #[inline(never)]
    fn shared<F>(
        &self,
        snapshot: &Snapshot,
        query: &Query,
        (but_sizes, hash): (u64, u64),
        now_ms: u64,
        compute: F,
    ) -> Option<Chain>
    where
        F: Fn() -> (Option<Chain>, bool),
    {
        let cell = snapshot.cell_key(query);
        // A cell differs from its queries in sizes alone.
        let cell_hash = cell.fingerprint_with(but_sizes);
        let (mut key, mut key_hash) = (cell, cell_hash);
        // A chain decided with another amount of free memory is as good as none.
        let find = |place: &Place<'_>, key: &Query| {
            let holds = |stored: &Stored| match stored {
                Stored::Chain(chain) => snapshot.still_holds(chain, query.device()),
                Stored::Mixed => true,
            };
            place.shard.find(place.tag, key, snapshot.epoch(), now_ms).filter(|(stored, _)| holds(stored))
        };
        // A follower looks again after its leader landed. An answer can be invalidated before it
        // is read, and a mixed cell needs a second look, so this may repeat, but not for ever.
        for _ in 0..4 {
            let place = self.place_of(key_hash);
            let ticket = place.shard.generation.ticket();
            match find(&place, &key) {
                Some((Stored::Mixed, _)) if key == cell => {
                    key = query.marked_exact();
                    key_hash = key.fingerprint();
                    continue;
                }
                Some((Stored::Chain(chain), expires_ms)) => {
                    place.shard.hits.fetch_add(1, Ordering::Relaxed);
                    let (cache, epoch, shard) = (self.id, snapshot.epoch(), place.index);
                    front::remember(hash, query, chain, Origin { cache, epoch, shard, ticket, expires_ms });
                    return Some(chain);
                }
                _ => {}
            }
            let flight = place.shard.flights.board(&key);
            if let Boarding::Follower = flight {
                continue;
            }
            // Somebody may have landed between the look and the boarding.
            if let Boarding::Leader(_) = flight
                && find(&place, &key).is_some()
            {
                continue;
            }
            return self.compute(snapshot, &cell, &query.marked_exact(), now_ms, &compute);
        }
        self.compute(snapshot, &cell, &query.marked_exact(), now_ms, &compute)
    }

    fn compute<F>(&self, snapshot: &Snapshot, cell: &Query, exact: &Query, now_ms: u64, compute: &F) -> Option<Chain>
    where
        F: Fn() -> (Option<Chain>, bool),
    {
        self.misses.fetch_add(1, Ordering::Relaxed);
        let (cell_place, exact_place) = (self.place(cell), self.place(exact));
        // Tickets first: what is computed from here on is void if anything is invalidated meanwhile.
        let (cell_ticket, exact_ticket) = (cell_place.shard.generation.ticket(), exact_place.shard.generation.ticket());
        let (chain, uniform) = compute();
        let chain = chain?;
        let insert = |place: &Place<'_>, ticket, key: &Query, stored| {
            let expires_ms = now_ms.saturating_add(self.ttl_ms.load(Ordering::Relaxed));
            let entry = Entry::new(*key, stored, snapshot.epoch(), expires_ms);
            place.shard.insert(place.tag, ticket, self.capacity.load(Ordering::Relaxed), entry);
        };
        if uniform {
            insert(&cell_place, cell_ticket, cell, Stored::Chain(chain));
        } else {
            insert(&exact_place, exact_ticket, exact, Stored::Chain(chain));
            insert(&cell_place, cell_ticket, cell, Stored::Mixed);
        }
        Some(chain)
    }

    fn place(&self, key: &Query) -> Place<'_> {
        self.place_of(key.fingerprint())
    }

    fn place_of(&self, hash: u64) -> Place<'_> {
        let index = (hash >> 32) as usize & (self.shards.len() - 1);
        Place { shard: &self.shards[index], index: index as u32, tag: hash as u32 }
    }

    /// Forgets. After this returns, nothing computed before is served.
    pub fn invalidate(&self, what: &Invalidate) {
        for shard in &self.shards {
            shard.invalidate(|key, chain| match what {
                Invalidate::All => true,
                Invalidate::Op(op) => key.op() == *op,
                Invalidate::Kernels(kernels) => mentions(chain, kernels),
            });
        }
    }

    /// Every chain remembered under a snapshot, with the key it is remembered under.
    pub fn chains(&self, snapshot: &Snapshot) -> Vec<(Query, Chain)> {
        self.shards.iter().flat_map(|shard| shard.chains(snapshot.epoch())).collect()
    }

    /// Holds at most so many entries from now on (0 turns the cache off), each for so long. What is held is forgotten.
    pub fn resize(&self, max_entries: usize, ttl_ms: u64) {
        // Shards are not remade: a cache of fewer entries than shards holds one for each.
        let capacity = (max_entries / self.shards.len()).max(max_entries.min(1));
        self.capacity.store(capacity, Ordering::Relaxed);
        self.ttl_ms.store(ttl_ms, Ordering::Relaxed);
        self.invalidate(&Invalidate::All);
    }

    /// Counts.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            entries: self.shards.iter().map(Shard::len).sum(),
            shared_hits: self.shards.iter().map(|shard| shard.hits.load(Ordering::Relaxed)).sum(),
            misses: self.misses.load(Ordering::Relaxed),
        }
    }

    /// The most entries it can hold.
    pub fn bound(&self) -> usize {
        self.capacity.load(Ordering::Relaxed) * self.shards.len()
    }
}

/// Where a key belongs.
struct Place<'a> {
    shard: &'a Shard,
    index: u32,
    tag: u32,
}
