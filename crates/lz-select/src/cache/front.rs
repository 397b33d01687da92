//! The front of the cache: a small table of exact queries per thread, read without any sharing.

use std::cell::RefCell;

use lz_model::Query;

use super::generation::Ticket;
use crate::decision::Chain;

/// Slots per thread; a power of two.
const SLOTS: usize = 32;

#[derive(Clone, Copy)]
struct Slot {
    query: Query,
    chain: Chain,
    cache: u64,
    epoch: u64,
    ticket: Ticket,
    shard: u32,
    expires_ms: u64,
}

thread_local! {
    static FRONT: RefCell<[Option<Box<Slot>>; SLOTS]> = const { RefCell::new([const { None }; SLOTS]) };
}

/// What a slot remembers besides the query and its chain.
#[derive(Clone, Copy)]
pub struct Origin {
    /// Which cache it came from.
    pub cache: u64,
    /// Which snapshot.
    pub epoch: u64,
    /// Which shard answered, and its generation then.
    pub shard: u32,
    pub ticket: Ticket,
    pub expires_ms: u64,
}

/// The chain this thread last had for the very same query, if it still counts.
#[inline]
pub fn find(
    hash: u64,
    query: &Query,
    cache: u64,
    epoch: u64,
    now_ms: u64,
    current: impl FnOnce(u32) -> Ticket,
) -> Option<Chain> {
    FRONT.with_borrow(|slots| {
        let slot = slots[hash as usize % SLOTS].as_ref()?;
        let hit = slot.epoch == epoch
            && slot.cache == cache
            && now_ms < slot.expires_ms
            && slot.query == *query
            && current(slot.shard) == slot.ticket;
        hit.then_some(slot.chain)
    })
}

/// Remembers a chain.
pub fn remember(hash: u64, query: &Query, chain: Chain, origin: Origin) {
    let Origin { cache, epoch, shard, ticket, expires_ms } = origin;
    let slot = Slot { query: *query, chain, cache, epoch, ticket, shard, expires_ms };
    FRONT.with_borrow_mut(|slots| match &mut slots[hash as usize % SLOTS] {
        Some(old) => **old = slot,
        empty => *empty = Some(Box::new(slot)),
    });
}
