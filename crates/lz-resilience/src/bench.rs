//! What the checks on every call's path cost, measured here.

use std::hint::black_box;
use std::time::Instant;

use crate::{Admission, Breaker, BreakerConfig, KernelHealth};

const ROUNDS: usize = 15;
const CALLS: u32 = 200_000;

/// Nanoseconds that asking a closed breaker and telling it of a success take together: the median of 15 rounds.
pub fn closed_path() -> f64 {
    let breaker = Breaker::new(&BreakerConfig::default(), 0);
    median_ns(|| {
        if let Admission::Closed = black_box(&breaker).admit(|| 0) {
            black_box(&breaker).record_success();
        }
    })
}

/// Nanoseconds that counting a call takes: the median of 15 rounds.
pub fn record_call() -> f64 {
    let health = KernelHealth::default();
    median_ns(|| {
        black_box(black_box(&health).record_call());
    })
}

fn median_ns(call: impl Fn()) -> f64 {
    let mut rounds = [(); ROUNDS].map(|()| {
        let begun = Instant::now();
        (0..CALLS).for_each(|_| call());
        begun.elapsed().as_nanos() as f64 / f64::from(CALLS)
    });
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}
