//! Schedules: what is visited, in which order, and for how long.

mod simulation;

use lz_measure::{Budget, Item, Schedule, ScheduleError, Slice, Visit};
use proptest::prelude::*;
use simulation::Random;

fn item(id: usize, group: &str, features: &[f64], cost_hint_us: f64) -> Item {
    Item { id, group: group.into(), weight: 1.0, features: features.to_vec(), cost_hint_us }
}

/// A grid of sizes, in the order loops over it would give.
fn grid(random: &mut Random) -> Vec<Item> {
    let side = |random: &mut Random| 2 + random.below(6);
    let sides = [side(random), side(random), 1 + random.below(3)];
    let mut items = Vec::new();
    for a in 0..sides[0] {
        for b in 0..sides[1] {
            for c in 0..sides[2] {
                let features = [a as f64, b as f64, 2.0 * c as f64];
                items.push(item(items.len(), "attention", &features, 2.0_f64.powf(features.iter().sum())));
            }
        }
    }
    items
}

fn distance(a: &Item, b: &Item) -> f64 {
    a.features.iter().zip(&b.features).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

/// How far the farthest item is from the nearest visited one.
fn uncovered(items: &[Item], visited: &[usize]) -> f64 {
    let nearest = |item: &Item| visited.iter().map(|&v| distance(item, &items[v])).fold(f64::INFINITY, f64::min);
    items.iter().map(nearest).fold(0.0, f64::max)
}

/// The ids in the order of their first visits, without a limit.
fn first_visits(items: &[Item]) -> Vec<usize> {
    let mut schedule = Schedule::new(Budget::of_us(1e12), items.to_vec()).unwrap();
    let mut visited = Vec::new();
    while let Some(Slice { id, .. }) = schedule.next(0.0) {
        visited.push(id);
        schedule.done(id, Visit { loss: 0.0, took_us: 1.0, once_us: 0.0, finished: true }).unwrap();
    }
    visited
}

#[test]
fn the_first_visits_cover_more_than_the_order_of_input() {
    let (mut better, mut all) = (0, 0);
    for seed in 0..60 {
        let items = grid(&mut Random::new(seed));
        let order = first_visits(&items);
        let input: Vec<usize> = (0..items.len()).collect();
        for k in 2..items.len() {
            let (ours, naive) = (uncovered(&items, &order[..k]), uncovered(&items, &input[..k]));
            assert!(ours <= naive + 1e-12, "after {k} of {}: {ours} against {naive}", items.len());
            // Towards the end a single gap of one step is as good as any.
            if 2 * k <= items.len() {
                better += u32::from(ours < naive - 1e-12);
                all += 1;
            }
        }
    }
    assert!(100 * better > 95 * all, "better in {better} of {all}");
}

#[test]
fn the_first_visits_cover_at_worst_twice_the_best_possible() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let items: Vec<Item> = (0..9)
            .map(|id| item(id, "g", &[random.between(0.0, 8.0), random.between(0.0, 8.0)], random.uniform()))
            .collect();
        let order = first_visits(&items);
        for k in 1..=5 {
            let subsets = (0_u32..1 << items.len()).filter(|set| set.count_ones() as usize == k);
            let members = |set: u32| -> Vec<usize> { (0..items.len()).filter(|i| set >> i & 1 == 1).collect() };
            let best = subsets.map(|set| uncovered(&items, &members(set))).fold(f64::INFINITY, f64::min);
            let ours = uncovered(&items, &order[..k]);
            assert!(ours <= 2.0 * best + 1e-12, "{k} visits: {ours}, possible {best}");
        }
    }
}

#[test]
fn groups_take_turns_and_of_equals_the_cheapest_comes_first() {
    let items = vec![
        item(0, "a", &[1.0], 50.0),
        item(1, "a", &[1.0], 10.0),
        item(2, "a", &[1.0], 20.0),
        item(3, "b", &[0.0], 5.0),
        item(4, "b", &[9.0], 7.0),
    ];
    assert_eq!(first_visits(&items), [1, 3, 2, 4, 0]);
    assert_eq!(first_visits(&[]), [] as [usize; 0]);
}

#[test]
fn what_may_lose_most_goes_on() {
    let mut items: Vec<Item> = (0..3).map(|id| item(id, "g", &[id as f64], 100.0)).collect();
    items[2].weight = 4.0;
    let mut schedule = Schedule::new(Budget::of_us(1e6), items).unwrap();
    for (id, loss) in [(0, 0.03), (2, 0.01), (1, 0.0015)] {
        let slice = schedule.next(0.0).unwrap();
        assert_eq!((slice.id, slice.rounds), (id, 5));
        schedule.done(id, Visit { loss, took_us: 100.0, once_us: 0.0, finished: false }).unwrap();
    }
    // 4 × 0.01 before 1 × 0.03; 0.0015 is little enough.
    let mut went_on = Vec::new();
    while let Some(slice) = schedule.next(0.0) {
        assert_eq!((slice.rounds, slice.estimate_us), (10, 200.0));
        went_on.push(slice.id);
        let loss = if slice.id == 2 && went_on.len() == 1 { 0.006 } else { 0.001 };
        schedule.done(slice.id, Visit { loss, took_us: 200.0, once_us: 0.0, finished: false }).unwrap();
    }
    assert_eq!(went_on, [2, 0, 2]);
    let progress = schedule.progress(1000.0);
    assert_eq!((progress.done_items, progress.items, progress.spent_us, progress.left_us), (3, 3, 1000.0, 0.0));
}

#[test]
fn what_gains_most_for_its_time_goes_on() {
    let items: Vec<Item> = (0..3).map(|id| item(id, "g", &[id as f64], 100.0)).collect();
    let mut schedule = Schedule::new(Budget::of_us(1e6), items).unwrap();
    // Rounds of 10, 1000 and 10 µs; the last was checked for 50 ms, which it will not be again.
    let (round_us, once_us) = ([10.0, 1000.0, 10.0], [0.0, 0.0, 50_000.0]);
    let mut rounds = [0; 3];
    for visit in 0..43 {
        let Slice { id, rounds: held, estimate_us } = schedule.next(0.0).unwrap();
        let took_us = round_us[id] * f64::from(held);
        let once_us = if visit < 3 { once_us[id] } else { 0.0 };
        assert!(visit < 3 || estimate_us == took_us, "{id}: {estimate_us}");
        rounds[id] += held;
        // More rounds find nothing, and what would is unknown.
        let visit = Visit { loss: 0.05, took_us: took_us + once_us, once_us, finished: false };
        schedule.done(id, visit).unwrap();
    }
    // A hundred times the time: about a tenth of the rounds.
    assert_eq!(rounds, [205, 15, 195]);
}

#[test]
fn what_is_finished_or_known_is_left_alone() {
    let items: Vec<Item> = (0..3).map(|id| item(id, "g", &[id as f64], 100.0)).collect();
    let mut schedule = Schedule::new(Budget::of_us(1e6), items).unwrap();
    schedule.known(0, 0.001, 8).unwrap();
    schedule.known(1, 0.2, 8).unwrap();
    assert_eq!(schedule.progress(0.0).done_items, 2);
    assert_eq!(schedule.next(0.0).unwrap().id, 2);
    schedule.done(2, Visit { loss: 0.9, took_us: 100.0, once_us: 0.0, finished: true }).unwrap();
    // Measured earlier, but not well enough: a contest of its own again, with the rounds of a first visit.
    let slice = schedule.next(0.0).unwrap();
    assert_eq!((slice.id, slice.rounds), (1, 5));
    schedule.done(1, Visit { loss: 0.1, took_us: 500.0, once_us: 0.0, finished: false }).unwrap();
    // 500 us were five rounds.
    assert_eq!(schedule.next(0.0), Some(Slice { id: 1, rounds: 10, estimate_us: 1000.0 }));
}

#[test]
fn what_was_measured_long_comes_after_what_was_measured_little() {
    let items: Vec<Item> = (0..3).map(|id| item(id, "g", &[id as f64], 100.0)).collect();
    let mut schedule = Schedule::new(Budget::of_us(1e6), items).unwrap();
    for (id, held) in [(0, 256), (1, 8), (2, 60)] {
        schedule.known(id, 0.01, held).unwrap();
    }
    let mut order = Vec::new();
    while let Some(Slice { id, .. }) = schedule.next(0.0) {
        order.push(id);
        schedule.done(id, Visit { loss: 0.0, took_us: 100.0, once_us: 0.0, finished: true }).unwrap();
    }
    assert_eq!(order, [1, 2, 0]);
}

#[test]
fn one_visit_that_takes_forever_does_not_stop_the_others() {
    let items: Vec<Item> = (0..5).map(|id| item(id, "g", &[id as f64], 1000.0)).collect();
    let mut schedule = Schedule::new(Budget::of_us(1e6), items).unwrap();
    let first = schedule.next(0.0).unwrap();
    // It had to compile: five hundred times as long as guessed.
    schedule.done(first.id, Visit { loss: 0.0, took_us: 5e5, once_us: 0.0, finished: true }).unwrap();
    let second = schedule.next(5e5).expect("there is half of the budget left");
    assert!(second.estimate_us < 5e5);
    // When all take longer, that is what is expected.
    for _ in 0..2 {
        let slice = schedule.next(5e5).unwrap();
        schedule.done(slice.id, Visit { loss: 0.0, took_us: 8000.0, once_us: 0.0, finished: true }).unwrap();
    }
    assert_eq!(schedule.next(5e5).unwrap().estimate_us, 8000.0);
}

#[test]
fn large_items_cost_what_others_of_their_group_did() {
    // The guess is a hundred times too high for large products, and right for small norms.
    let small = (0..6).map(|id| item(id, "norm", &[id as f64], 100.0));
    let large = (6..8).map(|id| item(id, "linear", &[id as f64], 1e6 * (id - 5) as f64));
    let mut schedule = Schedule::new(Budget::of_us(1.2e6), small.chain(large).collect()).unwrap();
    let mut visited = Vec::new();
    let mut elapsed = 0.0;
    while let Some(slice) = schedule.next(elapsed) {
        let took_us = if slice.id < 6 { 100.0 } else { 1e4 * (slice.id - 5) as f64 };
        elapsed += took_us;
        visited.push(slice.id);
        schedule.done(slice.id, Visit { loss: 0.0, took_us, once_us: 0.0, finished: true }).unwrap();
    }
    visited.sort();
    assert_eq!(visited, (0..8).collect::<Vec<_>>());
}

#[test]
fn mistakes_are_told() {
    let items = || vec![item(0, "g", &[0.0], 1.0)];
    for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        assert!(matches!(Schedule::new(Budget::of_us(bad), items()), Err(ScheduleError::Budget(_))), "{bad}");
    }
    let twice = vec![item(7, "g", &[], 1.0), item(7, "h", &[], 1.0)];
    let error = Schedule::new(Budget::of_us(1.0), twice).unwrap_err();
    assert_eq!(error.to_string(), "item 7 is there twice; give every item an id of its own");
    let number = |item: Item| Schedule::new(Budget::of_us(1.0), vec![item]);
    assert!(matches!(number(item(0, "g", &[f64::NAN], 1.0)), Err(ScheduleError::Number { what: "a feature", .. })));
    assert!(matches!(number(item(0, "g", &[], f64::INFINITY)), Err(ScheduleError::Number { what: "the cost", .. })));
    let weighty = Item { weight: -1.0, ..item(0, "g", &[], 1.0) };
    assert!(matches!(number(weighty), Err(ScheduleError::Number { what: "the weight", .. })));
    let mut schedule = Schedule::new(Budget::of_us(1.0), items()).unwrap();
    assert!(matches!(schedule.known(1, 0.0, 8), Err(ScheduleError::Unknown(1))));
    assert!(matches!(schedule.known(0, f64::NAN, 8), Err(ScheduleError::Number { .. })));
    let visit = |loss, took_us| Visit { loss, took_us, once_us: 0.0, finished: false };
    assert!(matches!(schedule.done(0, visit(-0.1, 1.0)), Err(ScheduleError::Number { .. })));
    assert!(matches!(schedule.done(0, visit(0.1, f64::NAN)), Err(ScheduleError::Number { .. })));
    assert!(matches!(schedule.done(3, visit(0.1, 1.0)), Err(ScheduleError::Unknown(3))));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// However wrong the guesses are, no slice but the first is expected to go beyond the budget, every item that fits
    /// is visited before any goes on, and it ends.
    #[test]
    fn the_budget_holds(seed: u64, count in 1_usize..30, budget in 1e3..1e6_f64, known in 0_usize..5) {
        let mut random = Random::new(seed);
        let items: Vec<Item> = (0..count)
            .map(|id| item(id, ["a", "b"][id % 2], &[random.between(0.0, 9.0)], random.between(0.0, 10.0).exp2() * 100.0))
            .collect();
        let true_us: Vec<f64> = items.iter().map(|i| i.cost_hint_us * random.between(-1.0, 2.0).exp2()).collect();
        let mut schedule = Schedule::new(Budget::of_us(budget), items).unwrap();
        for id in 0..known.min(count) {
            schedule.known(id, random.uniform() * 0.02, 8).unwrap();
        }
        let mut visits = vec![0_u32; count];
        let (mut elapsed, mut slices) = (0.0, 0);
        while let Some(slice) = schedule.next(elapsed) {
            prop_assert_eq!(schedule.next(elapsed), Some(slice), "asking changes nothing");
            prop_assert!(slices == 0 || slice.estimate_us <= budget - elapsed);
            let took_us = true_us[slice.id] * f64::from(slice.rounds) / 5.0;
            elapsed += took_us;
            slices += 1;
            visits[slice.id] += 1;
            let loss = 0.1 / f64::from(visits[slice.id]).powi(2) * random.uniform();
            schedule.done(slice.id, Visit { loss, took_us, once_us: 0.0, finished: random.uniform() < 0.1 }).unwrap();
            prop_assert!(slices < 5000, "it does not end");
            // Costs are known exactly after the first visit.
            let progress = schedule.progress(elapsed);
            prop_assert!(progress.done_items <= progress.items && progress.left_us >= 0.0);
            prop_assert!(visits[slice.id] == 1 || elapsed <= budget * (1.0 + 1e-9), "{} of {}", elapsed, budget);
        }
    }
}

#[test]
fn what_is_doubted_goes_on_although_it_was_finished() {
    let items = vec![item(4, "g", &[1.0], 10.0), item(5, "g", &[2.0], 10.0), item(6, "g", &[3.0], 10.0)];
    let mut schedule = Schedule::new(Budget::of_us(1e6), items).unwrap();
    for _ in 0..3 {
        let Slice { id, .. } = schedule.next(0.0).unwrap();
        schedule.done(id, Visit { loss: 0.0, took_us: 10.0, once_us: 0.0, finished: true }).unwrap();
    }
    assert_eq!(schedule.next(0.0), None);
    schedule.doubt(5, 0.1, 200).unwrap();
    schedule.doubt(6, 0.3, 200).unwrap();
    // A first visit of 5 rounds took 10 µs.
    assert_eq!(schedule.next(0.0), Some(Slice { id: 6, rounds: 200, estimate_us: 400.0 }));
    assert_eq!(schedule.next(1e6 - 300.0), None, "more than there is time for");
    schedule.done(6, Visit { loss: 0.1, took_us: 600.0, once_us: 0.0, finished: false }).unwrap();
    // Two hundred rounds tell more than ten after so many.
    assert_eq!(schedule.next(0.0), Some(Slice { id: 5, rounds: 200, estimate_us: 400.0 }));
    schedule.done(5, Visit { loss: 0.0, took_us: 400.0, once_us: 0.0, finished: true }).unwrap();
    // The next slice is one of the usual size, and costs what rounds have cost.
    assert_eq!(schedule.next(0.0), Some(Slice { id: 6, rounds: 10, estimate_us: 30.0 }));
    assert_eq!(schedule.doubt(9, 0.1, 1), Err(ScheduleError::Unknown(9)));
    assert!(matches!(schedule.doubt(5, f64::NAN, 1), Err(ScheduleError::Number { id: 5, .. })));
}
