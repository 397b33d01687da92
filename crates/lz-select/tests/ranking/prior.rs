//! Times of other machines: before declared priorities, and behind what was measured here.

use std::collections::BTreeMap;
use std::sync::Arc;

use lz_select::*;

use super::{Times, kernel, measured, query, ranking, spec, terms};

/// Times of another machine: `a.plain` is what plain torch runs.
fn with_prior(here: Times, prior: Times) -> SnapshotSpec {
    let mut plain = kernel("a.plain", 50);
    plain.baseline = true;
    let mut spec = spec(vec![plain, kernel("b.other", 20), kernel("c.third", 90)]);
    (spec.perf, spec.prior) = (Arc::new(here), Arc::new(prior));
    spec
}

fn told(median: f64, off: f64) -> (f64, f64, Option<EstimateKind>, bool) {
    (median, off, Some(EstimateKind::Prior), true)
}

#[test]
fn what_was_measured_elsewhere_decides_before_declared_priorities() {
    let elsewhere = || Times(BTreeMap::from([("a.plain", told(30.0, 2.0)), ("b.other", told(10.0, 1.0))]));
    let ids = |ids: [&str; 3]| ids.map(String::from).to_vec();
    let spec = with_prior(Times::default(), elsewhere());
    // Nobody timed the third kernel anywhere: its high priority counts for nothing against times.
    assert_eq!(ranking(&spec, &query()), (ids(["b.other", "a.plain", "c.third"]), Basis::Prior));
    let decision = spec.build(1).unwrap().select(&query());
    assert_eq!(decision.why().unwrap().to_string(), "fastest by what was measured on another machine");

    // What was measured here decides before it, whatever it says.
    let here = Times(BTreeMap::from([("a.plain", measured(10.0, 0.5)), ("b.other", measured(20.0, 0.5))]));
    assert_eq!(
        ranking(&with_prior(here, elsewhere()), &query()),
        (ids(["a.plain", "b.other", "c.third"]), Basis::Measured)
    );
    // Too little was: without the time of what plain torch runs, nothing says that the one that was measured is any good.
    let here = Times(BTreeMap::from([("b.other", measured(99.0, 0.5))]));
    assert_eq!(ranking(&with_prior(here, elsewhere()), &query()).1, Basis::Prior);
}

#[test]
fn what_was_measured_elsewhere_is_left_alone_where_it_cannot_decide() {
    // It knows one kernel, but not what plain torch runs.
    let spec = with_prior(Times::default(), Times(BTreeMap::from([("b.other", told(10.0, 1.0))])));
    assert_eq!(ranking(&spec, &query()).1, Basis::Declared);
    assert_eq!(terms(&spec, "b.other", &query()).perf, 0.0, "and leaves nothing behind");
    let decision = spec.build(1).unwrap().select(&query());
    assert!(decision.candidates.iter().all(|c| c.estimate.is_none()));
    // On a level where times do not count, neither do these.
    let times = Times(BTreeMap::from([("a.plain", told(30.0, 2.0)), ("b.other", told(10.0, 1.0))]));
    let mut spec = with_prior(Times::default(), times);
    spec.restriction.declared_only = true;
    assert_eq!(ranking(&spec, &query()).1, Basis::Declared);
}

#[test]
fn within_what_another_machine_may_differ_by_plain_torch_is_chosen() {
    let times = |other| Times(BTreeMap::from([("a.plain", told(30.0, 3.0)), ("b.other", told(other, 3.0))]));
    let first = |other| ranking(&with_prior(Times::default(), times(other)), &query()).0[0].clone();
    assert_eq!(first(28.0), "a.plain");
    assert_eq!(first(15.0), "b.other");
}

#[test]
fn uncertain_times_do_not_undo_a_declared_advantage_that_they_confirm() {
    let times = |third, off| Times(BTreeMap::from([("a.plain", told(40.0, off)), ("c.third", told(third, off))]));
    let first = |third, off| ranking(&with_prior(Times::default(), times(third, off)), &query()).0[0].clone();
    // Its priority is above that of what plain torch runs. Without times it would be chosen, and these say the same.
    assert_eq!(first(5.0, 50.0), "c.third");
    assert_eq!(first(39.0, 50.0), "c.third");
    assert_eq!(first(41.0, 50.0), "a.plain", "they say otherwise");
    let here = Times(BTreeMap::from([("a.plain", measured(40.0, 50.0)), ("c.third", measured(39.0, 50.0))]));
    assert_eq!(ranking(&with_prior(here, Times::default()), &query()).0[0], "a.plain", "noise of measurements here");
}
