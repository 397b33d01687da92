//! A counter that many threads count up without a locked instruction.
//!
//! A locked addition takes 5 to 12 ns even when nobody else wants the line. So a thread holds a *lane* for as long as
//! it lives; in its lane it is the only one that writes, and a load and a store will do. Threads that find no lane
//! free share one, with locked additions. Explored by loom.

use crate::sync::{AtomicU64, Ordering};

/// Threads that can have a lane of their own at a time.
#[cfg(not(loom))]
pub const LANES: usize = 16;
#[cfg(loom)]
pub const LANES: usize = 2;

/// Which lanes are held.
#[derive(Debug)]
pub struct Held(AtomicU64);

/// The right to count: in a lane of one's own, or in the shared one.
#[derive(Debug, PartialEq, Eq)]
pub struct Lane(usize);

impl Lane {
    /// The lane of those that have none.
    pub const SHARED: Lane = Lane(LANES);
}

impl Held {
    /// None is held.
    #[cfg(not(loom))]
    pub const fn new() -> Held {
        Held(AtomicU64::new(0))
    }

    #[cfg(loom)]
    pub fn new() -> Held {
        Held(AtomicU64::new(0))
    }

    /// Takes a lane. What its last holder counted is seen from here on: giving it back released that.
    pub fn take(&self) -> Lane {
        let mut held = self.0.load(Ordering::Relaxed);
        loop {
            let free = held.trailing_ones() as usize;
            if free >= LANES {
                return Lane::SHARED;
            }
            match self.0.compare_exchange_weak(held, held | 1 << free, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Lane(free),
                Err(now) => held = now,
            }
        }
    }

    /// Gives a lane back.
    pub fn give_back(&self, lane: Lane) {
        if lane != Lane::SHARED {
            self.0.fetch_and(!(1 << lane.0), Ordering::Release);
        }
    }
}

/// A counter.
#[derive(Debug)]
pub struct Count {
    lanes: [Line; LANES],
    shared: Line,
}

/// A cache line of its own: another thread's lane next to it would make both slow.
#[derive(Debug)]
#[repr(align(64))]
struct Line(AtomicU64);

impl Count {
    /// At 0.
    pub fn new() -> Count {
        Count { lanes: std::array::from_fn(|_| Line(AtomicU64::new(0))), shared: Line(AtomicU64::new(0)) }
    }

    /// Counts one, and gives the lane's count. Whoever has the lane must be the only one that does.
    #[inline]
    pub fn add(&self, lane: &Lane) -> u64 {
        match self.lanes.get(lane.0) {
            Some(Line(own)) => {
                let count = own.load(Ordering::Relaxed) + 1;
                own.store(count, Ordering::Relaxed);
                count
            }
            None => self.shared.0.fetch_add(1, Ordering::Relaxed) + 1,
        }
    }

    /// What was counted in all lanes.
    pub fn sum(&self) -> u64 {
        self.lanes.iter().chain([&self.shared]).map(|line| line.0.load(Ordering::Relaxed)).sum()
    }
}
