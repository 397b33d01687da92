//! Single flight: of all who miss one key, one computes and the others wait for it.

use std::time::Duration;

use crate::sync::{Arc, Condvar, Mutex, lock};

/// How long a follower waits before it computes for itself. A selection takes microseconds: a
/// leader that takes this long is stuck, and its followers must not be.
const PATIENCE: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct Landed {
    done: Mutex<bool>,
    changed: Condvar,
}

/// The computations under way, by key.
#[derive(Debug)]
pub struct Flights<K> {
    under_way: Mutex<Vec<(K, Arc<Landed>)>>,
}

impl<K> Default for Flights<K> {
    fn default() -> Self {
        Flights { under_way: Mutex::new(Vec::new()) }
    }
}

/// Whose turn it is.
pub enum Boarding<'a, K: PartialEq + Copy> {
    /// Compute; the others wait until the guard is dropped, however that comes about.
    Leader(Leader<'a, K>),
    /// Somebody else computed, or gave up: look again.
    Follower,
    /// The leader is stuck: compute, without keeping others waiting.
    Impatient,
}

/// Held while computing. Dropping it, also by a panic, releases every follower.
pub struct Leader<'a, K: PartialEq + Copy> {
    flights: &'a Flights<K>,
    key: K,
    landed: Arc<Landed>,
}

impl<K: PartialEq + Copy> Flights<K> {
    /// Leads the computation of `key`, or waits for whoever does.
    pub fn board(&self, key: &K) -> Boarding<'_, K> {
        let landed = {
            let mut under_way = lock(&self.under_way);
            match under_way.iter().find(|(k, _)| k == key) {
                Some((_, landed)) => landed.clone(),
                None => {
                    let landed = Arc::new(Landed::default());
                    under_way.push((*key, landed.clone()));
                    return Boarding::Leader(Leader { flights: self, key: *key, landed });
                }
            }
        };
        if landed.wait() { Boarding::Follower } else { Boarding::Impatient }
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        lock(&self.under_way).is_empty()
    }
}

impl Landed {
    #[cfg(not(loom))]
    fn wait(&self) -> bool {
        let done = match self.done.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        };
        match self.changed.wait_timeout_while(done, PATIENCE, |done| !*done) {
            Ok((done, _)) => *done,
            Err(poisoned) => *poisoned.into_inner().0,
        }
    }

    /// loom has no clock: a follower waits for as long as it takes, and a leader that never
    /// lands is a deadlock the model reports.
    #[cfg(loom)]
    fn wait(&self) -> bool {
        let _ = PATIENCE;
        let mut done = self.done.lock().unwrap();
        while !*done {
            done = self.changed.wait(done).unwrap();
        }
        true
    }
}

impl<K: PartialEq + Copy> Drop for Leader<'_, K> {
    fn drop(&mut self) {
        lock(&self.flights.under_way).retain(|(k, _)| *k != self.key);
        *lock(&self.landed.done) = true;
        self.landed.changed.notify_all();
    }
}
