//! Where times decide: measured or predicted, within the noise and beyond it.

use std::collections::BTreeMap;
use std::sync::Arc;

use lz_select::*;

use super::{Times, kernel, measured, query, ranking, spec, terms};

#[test]
fn a_measured_fact_overrules_a_declared_priority() {
    let mut spec = spec(vec![kernel("a.slow", 100), kernel("b.fast", 1)]);
    spec.perf = Arc::new(Times(BTreeMap::from([("a.slow", measured(20.0, 1.0)), ("b.fast", measured(10.0, 1.0))])));
    assert_eq!(ranking(&spec, &query()), (vec!["b.fast".into(), "a.slow".into()], Basis::Measured));
}

#[test]
fn differences_inside_the_noise_are_ties_that_priority_breaks() {
    let mut spec = spec(vec![kernel("a.x", 10), kernel("b.x", 80), kernel("c.x", 99)]);
    let times = [("a.x", measured(10.0, 0.5)), ("b.x", measured(10.4, 0.2)), ("c.x", measured(12.0, 0.5))];
    spec.perf = Arc::new(Times(BTreeMap::from(times)));
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "a.x", "c.x"]);
}

#[test]
fn one_unmeasured_candidate_leaves_the_decision_to_the_score() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 50), kernel("c.unknown", 45)]);
    spec.perf = Arc::new(Times(BTreeMap::from([("a.x", measured(30.0, 1.0)), ("b.x", measured(10.0, 1.0))])));
    // Three times as slow costs 20 points: the unknown one stands between them.
    assert_eq!(ranking(&spec, &query()), (vec!["b.x".into(), "c.unknown".into(), "a.x".into()], Basis::Declared));
    assert_eq!(terms(&spec, "a.x", &query()).perf, -20.0);
    assert_eq!(terms(&spec, "b.x", &query()).perf, 0.0);
}

#[test]
fn a_newcomer_does_not_undo_what_was_measured_beside_the_default() {
    let plain = |id: &str, priority| {
        let mut kernel = kernel(id, priority);
        kernel.baseline = true;
        kernel
    };
    let times = || Arc::new(Times(BTreeMap::from([("a.x", measured(30.0, 1.0)), ("b.x", measured(10.0, 1.0))])));
    let mut known = spec(vec![plain("a.x", 50), kernel("b.x", 20), kernel("c.new", 90)]);
    known.perf = times();
    assert_eq!(ranking(&known, &query()), (vec!["b.x".into(), "a.x".into(), "c.new".into()], Basis::Measured));
    // Where the default itself was not measured, nothing says that what was is any good; another one that plain torch
    // would run only where the first cannot is not the default.
    for a in [kernel("a.x", 50), plain("a.x", 50)] {
        let mut unknown = spec(vec![a, kernel("b.x", 20), plain("c.new", 90)]);
        unknown.perf = times();
        assert_eq!(ranking(&unknown, &query()).1, Basis::Declared);
    }
}

#[test]
fn speed_takes_at_most_thirty_points_and_half_of_that_when_not_trusted() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 50), kernel("c.x", 50), kernel("d.none", 50)]);
    let doubtful = (20.0, 1.0, Some(EstimateKind::Measured), false);
    let times = [("a.x", measured(10.0, 1.0)), ("b.x", measured(1000.0, 1.0)), ("c.x", doubtful)];
    spec.perf = Arc::new(Times(BTreeMap::from(times)));
    assert_eq!(terms(&spec, "b.x", &query()).perf, -30.0);
    assert_eq!(terms(&spec, "c.x", &query()).perf, -5.0);
}

#[test]
fn predictions_decide_like_measurements_and_say_that_they_are_predictions() {
    let mut spec = spec(vec![kernel("a.x", 50), kernel("b.x", 1)]);
    let predicted = (9.0, 0.5, Some(EstimateKind::Predicted), true);
    spec.perf = Arc::new(Times(BTreeMap::from([("a.x", measured(10.0, 0.1)), ("b.x", predicted)])));
    assert_eq!(ranking(&spec, &query()), (vec!["b.x".into(), "a.x".into()], Basis::Predicted));
}

#[test]
fn ties_go_to_what_plain_torch_runs_and_predictions_err_each_for_itself() {
    let mut default = kernel("a.default", 40);
    default.baseline = true;
    let mut spec = spec(vec![default, kernel("b.x", 60), kernel("c.x", 50)]);
    let times = |kind, default: f64, b: f64| {
        let one = |time| (time, 2.0, Some(kind), true);
        Arc::new(Times(BTreeMap::from([("a.default", one(default)), ("b.x", one(b)), ("c.x", one(b))])))
    };
    spec.perf = times(EstimateKind::Measured, 101.5, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["a.default", "b.x", "c.x"]);
    spec.perf = times(EstimateKind::Measured, 103.0, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "c.x", "a.default"]);
    // Twice a noise of 2 is one of 2.83, and a prediction must promise 3% beyond it.
    spec.perf = times(EstimateKind::Predicted, 105.8, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["a.default", "b.x", "c.x"]);
    spec.perf = times(EstimateKind::Predicted, 105.9, 100.0);
    assert_eq!(ranking(&spec, &query()).0, ["b.x", "c.x", "a.default"]);
}

/// As it was measured on a GPU: one that took longer than the baseline, and whose times varied more, was chosen.
#[test]
fn nobody_that_is_behind_the_default_wins_a_tie_by_being_noisy() {
    let mut default = kernel("a.default", 60);
    default.baseline = true;
    let mut spec = spec(vec![default, kernel("b.fast", 48), kernel("c.noisy", 50)]);
    let times = |noisy: f64| {
        let times =
            [("a.default", measured(28.3, 1.0)), ("b.fast", measured(23.4, 2.0)), ("c.noisy", measured(noisy, 8.0))];
        Arc::new(Times(BTreeMap::from(times)))
    };
    spec.perf = times(30.0);
    assert_eq!(ranking(&spec, &query()).0, ["b.fast", "a.default", "c.noisy"]);
    spec.perf = times(27.0);
    assert_eq!(ranking(&spec, &query()).0, ["c.noisy", "b.fast", "a.default"]);
}

/// The default ties with the fastest because that is noisy, and is behind another that is not: the noise of a third is no
/// reason to stay with it, and none to take somebody that is behind it.
#[test]
fn the_noise_of_the_fastest_does_not_keep_the_default_from_being_beaten() {
    let mut default = kernel("a.default", 60);
    default.baseline = true;
    let all = ["a.default", "b.noisy", "c.sure", "d.behind"];
    let others = [("b.noisy", 40), ("c.sure", 50), ("d.behind", 70)].map(|(id, priority)| kernel(id, priority));
    let mut spec = spec([vec![default], others.to_vec()].concat());
    let first = |spec: &mut SnapshotSpec, kind, us: [f64; 4]| {
        let times = all.into_iter().zip(us.into_iter().zip([0.3, 4.0, 0.3, 4.0]));
        spec.perf = Arc::new(Times(times.map(|(id, (us, spread))| (id, (us, spread, Some(kind), true))).collect()));
        ranking(spec, &query()).0
    };
    for kind in [EstimateKind::Measured, EstimateKind::Predicted] {
        let ranked = first(&mut spec, kind, [30.0, 27.0, 27.5, 30.9]);
        assert_eq!(ranked[..2], ["c.sure", "a.default"], "{kind:?}");
        // Not without that other one.
        assert_eq!(first(&mut spec, kind, [30.0, 27.0, 29.9, 30.9])[0], "a.default", "{kind:?}");
    }
    // Nor does it make a third, declared above both, the choice, which is behind another for certain.
    let mut third = spec.clone();
    third.kernels.push(Arc::new(kernel("c.slower", 80)));
    let times = [("a.default", 30.0, 0.3), ("b.noisy", 27.0, 4.0), ("c.sure", 27.5, 0.3), ("c.slower", 29.5, 0.3)];
    let times = times.map(|(id, us, spread)| (id, measured(us, spread)));
    third.perf = Arc::new(Times(BTreeMap::from(times)));
    assert_eq!(ranking(&third, &query()).0[0], "c.sure");
    // Ahead by more than noise, and by less than what a prediction must promise.
    assert_eq!(first(&mut spec, EstimateKind::Measured, [30.0, 27.0, 29.2, 30.9])[0], "c.sure");
    assert_eq!(first(&mut spec, EstimateKind::Predicted, [30.0, 27.0, 29.2, 30.9])[0], "a.default");
}

#[test]
fn a_promise_is_asked_of_whoever_replaces_the_default_where_either_was_not_measured() {
    let mut default = kernel("a.default", 40);
    default.baseline = true;
    let mut spec = spec(vec![default, kernel("b.x", 60), kernel("c.x", 50)]);
    let kinds = [EstimateKind::Measured, EstimateKind::Predicted];
    for (of_default, of_b) in kinds.into_iter().flat_map(|a| kinds.map(|b| (a, b))) {
        let one = |time, kind| (time, 0.0, Some(kind), true);
        let c = one(101.0, EstimateKind::Predicted);
        let times = [("a.default", one(102.9, of_default)), ("b.x", one(100.0, of_b)), ("c.x", c)];
        spec.perf = Arc::new(Times(BTreeMap::from(times)));
        let both_measured = (of_default, of_b) == (EstimateKind::Measured, EstimateKind::Measured);
        // Nobody asks it of one that replaces another than the baseline.
        let wanted = if both_measured { ["b.x", "a.default", "c.x"] } else { ["a.default", "b.x", "c.x"] };
        assert_eq!(ranking(&spec, &query()).0, wanted, "{of_default:?} {of_b:?}");
    }
}

#[test]
fn of_predictions_that_tie_the_better_one_wins_and_of_measurements_the_declared_one() {
    let mut spec = spec(vec![kernel("b.x", 60), kernel("c.x", 50)]);
    for (kind, first) in [(EstimateKind::Measured, "b.x"), (EstimateKind::Predicted, "c.x")] {
        let one = |time| (time, 2.0, Some(kind), true);
        spec.perf = Arc::new(Times(BTreeMap::from([("b.x", one(101.0)), ("c.x", one(100.0))])));
        assert_eq!(ranking(&spec, &query()).0[0], first);
    }
}
