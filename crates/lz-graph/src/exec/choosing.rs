//! Which candidate runs a node.

use std::time::Duration;

use super::binding::{Candidate, Site};

/// Decides between the candidates of a node.
pub trait Chooser: Send + Sync {
    /// The candidates by their places, the best first; those left out are not used. An empty list is taken for all in the given
    /// order. `time` runs one of them once, on memory of its own; `None` if it failed.
    fn choose(
        &self,
        site: &Site<'_>,
        candidates: &[Candidate],
        time: &mut dyn FnMut(usize) -> Option<Duration>,
    ) -> Vec<usize>;

    /// Whether it uses `time`: memory for it is made only then.
    fn measures(&self) -> bool {
        false
    }
}

/// The candidates in the order of the list: as their kernels were declared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Declared;

impl Chooser for Declared {
    fn choose(&self, _: &Site<'_>, _: &[Candidate], _: &mut dyn FnMut(usize) -> Option<Duration>) -> Vec<usize> {
        Vec::new()
    }
}

/// The candidate that is fastest here: all in turns, so that what disturbs the machine disturbs all of them.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    /// How often each runs.
    pub rounds: usize,
    /// How much faster a candidate must be than one before it, as a share of its time.
    pub noise: f64,
}

impl Default for Timed {
    fn default() -> Timed {
        Timed { rounds: 7, noise: 0.05 }
    }
}

impl Chooser for Timed {
    fn measures(&self) -> bool {
        true
    }

    fn choose(
        &self,
        _: &Site<'_>,
        candidates: &[Candidate],
        time: &mut dyn FnMut(usize) -> Option<Duration>,
    ) -> Vec<usize> {
        // References take as long as they take, and are the last resort whatever that is.
        let timed: Vec<usize> = (0..candidates.len()).filter(|&at| !candidates[at].is_reference()).collect();
        if timed.len() < 2 {
            return Vec::new();
        }
        // What disturbs a run makes it slower: the least of the times was disturbed least.
        let mut least: Vec<(usize, Duration)> = timed.into_iter().map(|at| (at, Duration::MAX)).collect();
        for _ in 0..self.rounds.max(1) {
            for (at, least) in &mut least {
                *least = time(*at).map_or(*least, |time| time.min(*least));
            }
        }
        rank(&least, self.noise, candidates.len())
    }
}

/// The places by their times; a later one goes before an earlier one only if it is faster by more than noise. What was not timed
/// comes last, in its order.
fn rank(times: &[(usize, Duration)], noise: f64, count: usize) -> Vec<usize> {
    let mut order: Vec<(usize, Duration)> = Vec::new();
    for &(at, time) in times {
        let slower = |&(_, other): &(usize, Duration)| time.as_secs_f64() < other.as_secs_f64() * (1.0 - noise);
        let place = order.iter().position(slower).unwrap_or(order.len());
        order.insert(place, (at, time));
    }
    let mut places: Vec<usize> = order.into_iter().map(|(at, _)| at).collect();
    places.extend((0..count).filter(|at| !times.iter().any(|(timed, _)| timed == at)));
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tie_keeps_the_order() {
        let us = Duration::from_micros;
        assert_eq!(rank(&[(0, us(100)), (1, us(97)), (2, us(50))], 0.05, 4), [2, 0, 1, 3]);
        assert_eq!(rank(&[(0, Duration::MAX), (1, us(97))], 0.05, 2), [1, 0]);
        assert_eq!(rank(&[], 0.05, 2), [0, 1]);
    }
}
