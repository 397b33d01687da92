//! What a contest asks for, and what it refuses.

use lz_measure::{Contest, ContestError, Next, Rules, Sample, Stats, Timing, loss_of, order};
use proptest::prelude::*;

fn contest(names: &[&str], rules: Rules) -> Contest {
    let mut contest = Contest::new(rules).unwrap();
    for name in names {
        contest.add(name, *name == "baseline").unwrap();
    }
    contest
}

/// Runs a contest on an even machine; gives who was timed, with how many calls.
fn asked(contest: &mut Contest, us: &[f64]) -> Vec<(usize, u32)> {
    let mut asked = Vec::new();
    while let Next::Time { candidate, calls } = contest.next() {
        assert_eq!(contest.next(), Next::Time { candidate, calls }, "asking changes nothing");
        asked.push((candidate, calls));
        contest.record(candidate, Sample { per_call_us: us[candidate], calls }).unwrap();
    }
    asked
}

#[test]
fn every_round_times_everybody_once_and_nobody_always_first() {
    let us = [100.0, 101.0, 102.0, 103.0];
    let rules = Rules { least_spread: 0.5, tie: 0.01, max_rounds: 40, ..Rules::default() };
    let mut contest = contest(&["a", "b", "c", "d"], rules);
    let asked = asked(&mut contest, &us);
    assert_eq!(contest.next(), Next::Exhausted);
    let (warmup, rounds) = asked.split_at(4);
    assert_eq!(warmup, [(0, 1), (1, 1), (2, 1), (3, 1)]);
    let mut first = [0; 4];
    let mut orders = std::collections::HashSet::new();
    for round in rounds.chunks(4) {
        let order: Vec<usize> = round.iter().map(|a| a.0).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3]);
        first[order[0]] += 1;
        orders.insert(order);
    }
    assert_eq!(first, [10; 4], "each is first equally often");
    assert!(orders.len() > 8, "orders differ: {orders:?}");
}

#[test]
fn the_same_answers_give_the_same_questions_and_another_seed_another_order() {
    let us = [100.0, 100.5, 130.0];
    let run = |seed| asked(&mut contest(&["a", "b", "c"], Rules { seed, ..Rules::default() }), &us);
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}

#[test]
fn short_calls_are_repeated_until_a_sample_is_long_enough() {
    let rules = Rules { sample_us: 200.0, max_calls: 50, ..Rules::default() };
    let mut contest = contest(&["short", "long", "tiny"], rules);
    let asked = asked(&mut contest, &[10.0, 5000.0, 0.5]);
    let of = |candidate: usize| -> Vec<u32> { asked.iter().filter(|a| a.0 == candidate).map(|a| a.1).collect() };
    assert_eq!(of(0)[..3], [1, 20, 20]);
    assert!(of(1).iter().all(|&calls| calls == 1));
    assert_eq!(of(2)[..3], [1, 50, 50]);
}

#[test]
fn what_is_compiled_at_the_first_call_is_warmup() {
    let mut contest = contest(&["jit", "other"], Rules::default());
    let mut jit_calls = 0;
    while let Next::Time { candidate, calls } = contest.next() {
        let compiling = candidate == 0 && jit_calls == 0;
        jit_calls += u32::from(candidate == 0);
        let per_call_us = if compiling { 500_000.0 } else { [10.0, 12.0][candidate] };
        contest.record(candidate, Sample { per_call_us, calls }).unwrap();
    }
    assert_eq!(contest.next(), Next::Settled);
    let results = contest.results();
    assert_eq!(results[0].warmup_us, Some(500_000.0));
    let stats = results[0].stats.as_ref().unwrap();
    assert_eq!((stats.median_us, stats.p95_us, stats.variance_us), (10.0, 10.0, 0.0));
    assert_eq!(order(&results, |_| 0), [0, 1]);
}

#[test]
fn the_hopeless_get_one_timed_call_and_the_baseline_its_rounds() {
    let us = [50.0, 60_000.0, 600.0, 2500.0];
    let mut contest = contest(&["fast", "reference", "slow", "baseline"], Rules::default());
    let asked = asked(&mut contest, &us);
    let results = contest.results();
    let samples = |i: usize| results[i].stats.as_ref().unwrap().samples;
    assert_eq!(asked.iter().filter(|a| a.0 == 1).count(), 2, "one call to warm up, one timed");
    assert_eq!([samples(1), samples(2)], [1, 2]);
    assert!(samples(3) >= 5, "{}", samples(3));
    assert!(results[1].retired && results[2].retired && !results[0].retired);
    assert_eq!(results[1].stats.as_ref().unwrap().median_us, 60_000.0);
}

#[test]
fn whoever_fails_is_out_and_the_others_go_on() {
    let mut contest = contest(&["a", "b", "c"], Rules::default());
    let us = [100.0, 50.0, 70.0];
    let mut calls_of_b = 0;
    while let Next::Time { candidate, calls } = contest.next() {
        calls_of_b += u32::from(candidate == 1);
        if candidate == 1 && calls_of_b == 4 {
            contest.fail(candidate, "illegal memory access").unwrap();
        } else {
            contest.record(candidate, Sample { per_call_us: us[candidate], calls }).unwrap();
        }
    }
    assert_eq!(contest.next(), Next::Settled);
    let results = contest.results();
    assert_eq!(results[1].error.as_deref(), Some("illegal memory access"));
    assert_eq!((results[1].stats.as_ref(), results[1].warmup_us), (None, Some(50.0)));
    assert_eq!(order(&results, |_| 0), [2, 0]);
    assert_eq!(contest.loss(), 0.0);
}

#[test]
fn a_contest_that_is_doubted_times_everybody_again_who_did_not_fail() {
    let mut contest = contest(&["fast", "slow", "out", "broken"], Rules::default());
    while let Next::Time { candidate, calls } = contest.next() {
        let told = match candidate {
            3 => contest.fail(3, "does not run"),
            i => contest.record(i, Sample { per_call_us: [100.0, 150.0, 350.0][i], calls }),
        };
        told.unwrap();
    }
    let rounds = contest.rounds();
    assert_eq!(contest.next(), Next::Settled);
    assert!(contest.results()[2].retired);
    contest.reopen(4 * rounds);
    // It was a bad moment, for the last one most of all.
    let again = asked(&mut contest, &[100.0, 90.0, 50.0]);
    assert!(contest.rounds() >= 5 * rounds && contest.next() == Next::Settled);
    for candidate in 0..4 {
        assert_eq!(again.iter().any(|a| a.0 == candidate), candidate < 3, "{candidate}");
    }
    assert_eq!(order(&contest.results(), |_| 0)[0], 2, "{:?}", contest.results());
}

#[test]
fn contests_without_anybody_left_end() {
    let mut none = contest(&[], Rules::default());
    assert_eq!((none.next(), none.rounds()), (Next::Settled, 0));
    assert!(matches!(none.fail(0, "x"), Err(ContestError::NoCandidate { candidate: 0, candidates: 0 })));
    let mut one = contest(&["only"], Rules::default());
    one.fail(0, "no").unwrap();
    assert_eq!(one.next(), Next::Settled);
    assert!(order(&one.results(), |_| 0).is_empty());
    let mut alone = contest(&["alone"], Rules::default());
    assert_eq!(alone.loss(), 1.0);
    assert_eq!(asked(&mut alone, &[300.0]).len(), 1 + 5);
    assert_eq!((alone.next(), alone.loss()), (Next::Settled, 0.0));
}

#[test]
fn every_refusal_says_what_is_wrong() {
    for (rules, message) in [
        (Rules { sample_us: f64::NAN, ..Rules::default() }, "rule 'sample_us' is NaN; it must be above 0"),
        (Rules { max_rounds: 4, ..Rules::default() }, "rule 'max_rounds' is 4; it must be at least min_rounds"),
        (Rules { hopeless: 1.0, ..Rules::default() }, "rule 'hopeless' is 1; it must be above 1"),
        (Rules { tie: -0.1, ..Rules::default() }, "rule 'tie' is -0.1; it must be from 0 to below 1"),
    ] {
        assert_eq!(Contest::new(rules).unwrap_err().to_string(), message);
    }
    let mut contest = contest(&["a", "b"], Rules::default());
    let sample = |per_call_us, calls| Sample { per_call_us, calls };
    assert!(matches!(contest.add("a", false), Err(ContestError::AddedTwice { .. })));
    for bad in [f64::NAN, f64::INFINITY, -1.0, 0.0, -0.0, 1e300] {
        let error = contest.record(0, sample(bad, 1)).unwrap_err();
        assert!(matches!(&error, ContestError::BadTime { name, .. } if name == "a"), "{error}");
    }
    assert!(matches!(contest.record(0, sample(5.0, 0)), Err(ContestError::NoCalls { .. })));
    assert!(matches!(contest.record(1, sample(5.0, 1)), Err(ContestError::OutOfTurn { .. })));
    assert!(matches!(contest.record(2, sample(5.0, 1)), Err(ContestError::NoCandidate { .. })));
    assert!(matches!(contest.fail(1, "x"), Err(ContestError::OutOfTurn { .. })));
    contest.record(0, sample(5.0, 1)).unwrap();
    assert!(matches!(contest.add("c", false), Err(ContestError::Started { .. })));
    // What was refused left no trace.
    assert_eq!(contest.results()[0].warmup_us, Some(5.0));
}

fn timing(median_us: f64, spread_us: f64) -> Timing {
    let stats = Stats { median_us, p95_us: median_us, variance_us: 0.0, spread_us, samples: 20 };
    let candidate = format!("{median_us}");
    Timing { candidate, baseline: false, stats: Some(stats), warmup_us: None, retired: false, error: None }
}

#[test]
fn ties_form_groups_in_the_callers_order() {
    let timings = [timing(103.0, 1.0), timing(100.0, 2.0), timing(101.0, 0.1), timing(110.0, 12.0), timing(130.0, 1.0)];
    // Of 1 (fastest), 2 is within 1's noise, 3 within its own; 0 is outside both, though within 3's.
    assert_eq!(order(&timings, |_| 0), [1, 2, 3, 0, 4]);
    let latest_first = |t: &Timing| std::cmp::Reverse(t.candidate.clone());
    assert_eq!(order(&timings, latest_first), [3, 2, 1, 0, 4]);
}

fn default(median_us: f64, spread_us: f64) -> Timing {
    Timing { baseline: true, ..timing(median_us, spread_us) }
}

/// Means over random draws of what `loss_of` integrates, for one that is chosen.
fn drawn_loss(timings: &[Timing], leader: usize, draws: u32) -> f64 {
    let mut random = simulation::Random::new(5);
    let stats: Vec<(f64, f64)> =
        timings.iter().map(|t| t.stats.as_ref().unwrap()).map(|s| (s.median_us, s.spread_us)).collect();
    let mut lost = 0.0;
    for _ in 0..draws {
        // The spread is 3.2 standard errors of a difference.
        let times: Vec<f64> = stats.iter().map(|s| s.0 + s.1 / (3.2 * 2.0_f64.sqrt()) * random.normal()).collect();
        let others = (0..times.len()).filter(|&i| i != leader).map(|i| times[i]).fold(f64::INFINITY, f64::min);
        lost += (times[leader] - others).max(0.0);
    }
    lost / f64::from(draws) / stats[leader].0
}

mod simulation;

#[test]
fn loss_is_the_mean_of_what_is_lost() {
    for (chosen, timings) in [
        (0, vec![timing(100.0, 10.0), timing(100.0, 10.0)]),
        (0, vec![timing(100.0, 10.0), timing(103.0, 20.0), timing(101.0, 5.0)]),
        (0, vec![timing(100.0, 2.0), timing(130.0, 90.0), timing(105.0, 1.0)]),
        (0, vec![timing(100.0, 30.0), timing(101.0, 0.01), timing(102.0, 30.0), timing(103.0, 30.0)]),
        // Of those that are not told apart the default is chosen, and may lose much.
        (1, vec![timing(100.0, 30.0), default(125.0, 40.0)]),
        (2, vec![timing(100.0, 3.0), timing(101.0, 3.0), default(102.0, 3.0)]),
        // One that is behind for certain is not.
        (0, vec![timing(100.0, 3.0), default(110.0, 3.0)]),
    ] {
        let (loss, drawn) = (loss_of(&timings), drawn_loss(&timings, chosen, 200_000));
        assert!((loss - drawn).abs() < 0.02 * drawn + 1e-5, "{loss} but drawn {drawn}");
    }
    // What is just ahead of the default loses nothing here, and something at calls around it; what is clearly so, nothing.
    let ahead = |noise: f64| loss_of(&[timing(80.0, noise), default(100.0, noise)]);
    assert!((ahead(16.0) - 0.2 * (16.0_f64 / 40.0).powi(2)).abs() < 1e-9, "{}", ahead(16.0));
    assert!(ahead(11.0) < ahead(16.0) && ahead(11.0) > 0.01, "{}", ahead(11.0));
    assert!(ahead(9.9) < 1e-6, "{}", ahead(9.9));
    assert_eq!(loss_of(&[]), 1.0);
    assert_eq!(loss_of(&[timing(100.0, 5.0)]), 0.0);
    assert!(loss_of(&[timing(100.0, 1.0), timing(200.0, 1.0)]) < 1e-9);
    assert!(loss_of(&[timing(100.0, 30.0), default(125.0, 40.0)]) > 0.15);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever it is told, a contest refuses it or goes on, ends, and has sensible results.
    #[test]
    fn nothing_breaks_a_contest(
        count in 0_usize..6,
        seed: u64,
        max_rounds in 1_u32..20,
        answers in prop::collection::vec((any::<f64>(), 1e-6..1e15_f64, 0_u32..3, 0_u8..20), 1..400),
    ) {
        let rules = Rules { seed, min_rounds: max_rounds.min(5), max_rounds, ..Rules::default() };
        let names: Vec<String> = (0..count).map(|i| i.to_string()).collect();
        let mut contest = contest(&names.iter().map(String::as_str).collect::<Vec<_>>(), rules);
        for (wild, tame, calls, kind) in answers {
            let Next::Time { candidate, .. } = contest.next() else { break };
            match kind {
                0 => drop(contest.record(candidate, Sample { per_call_us: wild, calls })),
                1 => contest.fail(candidate, "failed").unwrap(),
                2 => drop(contest.record(candidate + 1, Sample { per_call_us: tame, calls: 1 })),
                _ => contest.record(candidate, Sample { per_call_us: tame, calls: calls.max(1) }).unwrap(),
            }
            let loss = contest.loss();
            prop_assert!((0.0..=1.0).contains(&loss), "loss {}", loss);
        }
        let mut asked = 0;
        while let Next::Time { candidate, calls } = contest.next() {
            contest.record(candidate, Sample { per_call_us: 100.0 + candidate as f64, calls }).unwrap();
            asked += 1;
            prop_assert!(asked <= count as u32 * (max_rounds + 7), "it does not end");
        }
        let results = contest.results();
        for stats in results.iter().filter_map(|r| r.stats.as_ref()) {
            prop_assert!(stats.median_us > 0.0 && stats.median_us.is_finite());
            prop_assert!(stats.p95_us >= stats.median_us && stats.p95_us.is_finite());
            prop_assert!(stats.spread_us > 0.0 && stats.spread_us.is_finite());
            prop_assert!(stats.variance_us >= 0.0 && stats.variance_us.is_finite());
            prop_assert!(stats.samples >= 1 && stats.samples <= max_rounds);
        }
        let ranked = order(&results, |t| t.candidate.clone());
        prop_assert_eq!(ranked.len(), results.iter().filter(|r| r.stats.is_some()).count());
    }

    /// A ranking holds everybody once, and its first is within the noise of the fastest.
    #[test]
    fn an_order_is_a_ranking(times in prop::collection::vec((1.0..200.0_f64, 0.0..30.0_f64), 1..8)) {
        let timings: Vec<Timing> = times.iter().map(|&(median, spread)| timing(median, spread)).collect();
        let ranked = order(&timings, |t| t.candidate.clone());
        let mut sorted = ranked.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..times.len()).collect::<Vec<_>>());
        let fastest = (0..times.len()).min_by(|&a, &b| times[a].0.total_cmp(&times[b].0)).unwrap();
        let first = ranked[0];
        prop_assert!(times[first].0 - times[fastest].0 <= times[first].1.max(times[fastest].1));
        // Whoever is outside the noise of the fastest comes after all who are inside.
        let inside = |i: usize| times[i].0 - times[fastest].0 <= times[i].1.max(times[fastest].1);
        let last_inside = ranked.iter().rposition(|&i| inside(i)).unwrap();
        prop_assert!(ranked[..=last_inside].iter().all(|&i| inside(i)));
    }
}
