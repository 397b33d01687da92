//! Something that may happen at most once in so many milliseconds, whoever asks.

use std::sync::atomic::{AtomicU64, Ordering};

/// Allows one of those who ask, at most once per interval.
#[derive(Debug)]
pub struct Pace {
    every_ms: u64,
    /// When it was last allowed, in milliseconds, plus one; 0 when it never was.
    last: AtomicU64,
}

impl Pace {
    /// At most once in `every_ms` milliseconds.
    pub const fn new(every_ms: u64) -> Pace {
        Pace { every_ms, last: AtomicU64::new(0) }
    }

    /// Whether it may happen now. Of several threads that ask at the same time, one hears yes.
    pub fn allows(&self, now_ms: u64) -> bool {
        let (last, now) = (self.last.load(Ordering::Relaxed), now_ms.saturating_add(1));
        let due = last == 0 || now.saturating_sub(last) >= self.every_ms;
        due && self.last.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_once_per_interval() {
        let pace = Pace::new(20);
        let allowed: Vec<u64> = (0..100).filter(|&now| pace.allows(now)).collect();
        assert_eq!(allowed, [0, 20, 40, 60, 80]);
        // A clock that goes back allows nothing until it has caught up.
        assert!(!pace.allows(3));
        assert!(pace.allows(1_000));
    }

    #[test]
    fn one_of_many_threads() {
        let pace = Pace::new(20);
        let yes: usize = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..8).map(|_| scope.spawn(|| usize::from(pace.allows(7)))).collect();
            asked.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(yes, 1);
    }
}
