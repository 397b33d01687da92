//! A generation: what was computed before an invalidation must not be used after it.

use crate::sync::{AtomicU64, Ordering};

/// A counter that invalidation advances.
///
/// A computation takes a [`Ticket`] before it reads anything, and its result counts only while
/// the ticket is current. `advance` happens before `invalidate` returns, so whoever looks after
/// that sees the ticket as stale.
#[derive(Debug)]
pub struct Generation(AtomicU64);

/// The generation a computation belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub(crate) u64);

impl Default for Generation {
    fn default() -> Self {
        Generation(AtomicU64::new(0))
    }
}

impl Generation {
    /// The current generation.
    pub fn ticket(&self) -> Ticket {
        Ticket(self.0.load(Ordering::Acquire))
    }

    /// Whether nothing was invalidated since the ticket was taken.
    pub fn is_current(&self, ticket: Ticket) -> bool {
        self.ticket() == ticket
    }

    /// Makes every earlier ticket stale.
    pub fn advance(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}
