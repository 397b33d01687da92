//! Degradation against a simple model, and its promises.

use lz_resilience::degradation::{Served, ServedCall, Why};
use lz_resilience::{Change, Degradation, DegradationConfig, Level};
use proptest::prelude::*;

const WINDOW: u64 = 10_000;

fn served(ok: bool) -> ServedCall {
    ServedCall::of(if ok { Served::AsPlanned } else { Served::Nobody })
}

fn outcome() -> impl Strategy<Value = ServedCall> {
    let who = prop_oneof![Just(Served::AsPlanned), Just(Served::Fallback), Just(Served::Nobody)];
    let ratio = prop_oneof![
        Just(None),
        Just(Some(f64::NAN)),
        Just(Some(f64::INFINITY)),
        Just(Some(-1.0)),
        prop::sample::select(vec![0.5, 1.0, 1.5, 2.0, 2.75, 4.0, 100.0]).prop_map(Some),
    ];
    (who, ratio).prop_map(|(served, latency_ratio)| ServedCall { served, latency_ratio })
}

/// What a call loses, by the formula.
fn lost(outcome: ServedCall) -> f64 {
    let base = match outcome.served {
        Served::AsPlanned => 0.0,
        Served::Fallback => 0.5,
        Served::Nobody => 1.0,
    };
    let slow = match outcome.latency_ratio {
        Some(ratio) if ratio.is_finite() && ratio >= 4.0 => 1.0,
        Some(ratio) if ratio.is_finite() && ratio > 1.5 => (ratio - 1.5) / 2.5,
        _ => 0.0,
    };
    f64::min(1.0, base + 0.5 * slow)
}

/// The controller, remembering everything.
struct Model {
    calls: Vec<(u64, f64)>,
    level: usize,
    /// The last time something spoke against going up: a change, or a score below the bar.
    spoke: u64,
}

impl Model {
    fn update(&mut self, now: u64) -> Option<usize> {
        let recent: Vec<f64> =
            self.calls.iter().filter(|(at, _)| now / 1000 - at / 1000 < 10).map(|(_, lost)| *lost).collect();
        let score =
            if recent.is_empty() { 100.0 } else { 100.0 * (1.0 - recent.iter().sum::<f64>() / recent.len() as f64) };
        // Sums of parts of a thousandth: equal to what is exact within this.
        let below = |bar: f64| score < bar - 1e-9;
        let called_for = [80.0, 60.0, 40.0, 20.0].iter().filter(|&&threshold| below(threshold)).count();
        let up = self.level > 0 && !below([0.0, 85.0, 65.0, 45.0, 25.0][self.level]);
        if recent.len() >= 20 && called_for > self.level {
            self.level = called_for;
        } else if up && now - self.spoke >= WINDOW {
            self.level -= 1;
        } else {
            if self.level > 0 && !up {
                self.spoke = now;
            }
            return None;
        }
        (self.calls, self.spoke) = (vec![], now);
        Some(self.level)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Calls(ServedCall, u64),
    Wait(u64),
    Update,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (outcome(), 1..30u64).prop_map(|(outcome, calls)| Step::Calls(outcome, calls)),
        2 => (0..60u64).prop_map(|hundreds| Step::Wait(hundreds * 100)),
        4 => Just(Step::Update),
    ]
}

/// So many calls a second for so long, `bad` in a thousand of them failing; every change of level.
fn drive(health: &Degradation, now: &mut u64, for_ms: u64, bad: u64) -> Vec<Change> {
    let (end, mut n, mut changes) = (*now + for_ms, 0u64, vec![]);
    while *now < end {
        for _ in 0..100 {
            // Spread evenly, so that every slice has the same share.
            n += 1;
            health.record(*now, served((n * bad) % 1000 >= bad));
        }
        changes.extend(health.update(*now));
        *now += 500;
    }
    changes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn it_is_its_model(steps in prop::collection::vec(step(), 1..120)) {
        let health = Degradation::new(DegradationConfig::default());
        let mut model = Model { calls: vec![], level: 0, spoke: 0 };
        let mut now = 1_000_000;
        for step in steps {
            match step {
                Step::Calls(outcome, calls) => {
                    health.record_many(now, outcome, calls);
                    model.calls.extend((0..calls).map(|_| (now, lost(outcome))));
                }
                Step::Wait(ms) => now += ms,
                Step::Update => {
                    let before = health.level();
                    let change = health.update(now);
                    prop_assert_eq!(change.map(|change| change.to as usize), model.update(now));
                    if let Some(change) = change {
                        prop_assert_eq!(change.from, before);
                        prop_assert!(change.to > before || change.to as usize + 1 == before as usize, "{:?}", change);
                        let up = matches!(change.why, Why::Recovered | Why::Quiet);
                        prop_assert_eq!(up, change.to < before);
                    }
                }
            }
            prop_assert_eq!(health.level() as usize, model.level);
        }
    }

    #[test]
    fn a_worse_call_never_helps(outcomes in prop::collection::vec(outcome(), 1..60), which: prop::sample::Index) {
        let score = |outcomes: &[ServedCall]| {
            let health = Degradation::new(DegradationConfig::default());
            outcomes.iter().for_each(|outcome| health.record(0, *outcome));
            health.view(0).score
        };
        let before = score(&outcomes);
        let mut worse = outcomes.clone();
        let call = which.get(&outcomes);
        worse[which.index(outcomes.len())].served = match call.served {
            Served::AsPlanned => Served::Fallback,
            _ => Served::Nobody,
        };
        prop_assert!(score(&worse) <= before);
        prop_assert!((0.0..=100.0).contains(&before));
    }

    #[test]
    fn within_the_hysteresis_it_stays_where_it_is(level in 0..4usize, points in 5..45u64) {
        // A score that the better of two levels bears, and that is not enough to go up from the worse.
        let threshold = [80, 60, 40, 20][level];
        let bad = 1000 - (threshold * 10 + points);
        let (health, mut now) = (Degradation::new(DegradationConfig::default()), 0);
        // From above it may have to come down to the level, and there it stays.
        drive(&health, &mut now, 6 * WINDOW, bad);
        let settled = health.level();
        prop_assert_eq!(settled as usize, level);
        prop_assert_eq!(drive(&health, &mut now, 20 * WINDOW, bad), vec![]);
        // From below it does not go up.
        let sunk = 1000 - (threshold * 10 - 100);
        drive(&health, &mut now, 2 * WINDOW, sunk);
        prop_assert_eq!(health.level() as usize, level + 1);
        drive(&health, &mut now, WINDOW, bad);
        prop_assert_eq!(drive(&health, &mut now, 20 * WINDOW, bad), vec![]);
        prop_assert_eq!(health.level() as usize, level + 1);
    }

    #[test]
    fn it_always_recovers(history in prop::collection::vec((0..=1000u64, 1..20u64), 0..8), quiet: bool) {
        let (health, mut now) = (Degradation::new(DegradationConfig::default()), 5);
        for (bad, seconds) in history {
            drive(&health, &mut now, seconds * 1000, bad);
        }
        // A window to forget, one for each level, and one for the edges of slices.
        if quiet {
            for _ in 0..6 * 20 {
                now += 500;
                health.update(now);
            }
        } else {
            drive(&health, &mut now, 6 * WINDOW, 0);
        }
        prop_assert_eq!(health.level(), Level::Full);
    }

    #[test]
    fn no_thresholds_and_no_times_do_harm(limits: [u32; 5], min_calls: u64, window_ms: u64, times: [u64; 12]) {
        let [reduced, cached, rule_based, minimal, hysteresis] = limits;
        let config = DegradationConfig { reduced, cached, rule_based, minimal, hysteresis, min_calls, window_ms };
        let health = Degradation::new(config);
        for now in times {
            health.record_many(now, served(now % 2 == 0), now);
            health.update(now);
            health.view(now);
        }
    }
}

#[test]
fn it_goes_down_as_far_as_the_score_says_and_up_one_at_a_time() {
    let (health, mut now) = (Degradation::new(DegradationConfig::default()), 0);
    let down = drive(&health, &mut now, 1000, 1000);
    assert_eq!(down, [Change { from: Level::Full, to: Level::Minimal, score: 0.0, why: Why::Failures }]);
    let up = drive(&health, &mut now, 6 * WINDOW, 0);
    let to: Vec<Level> = up.iter().map(|change| change.to).collect();
    assert_eq!(to, [Level::RuleBased, Level::Cached, Level::Reduced, Level::Full]);
    assert!(up.iter().all(|change| change.why == Why::Recovered));
}

#[test]
fn a_few_calls_do_not_move_it_down() {
    let health = Degradation::new(DegradationConfig::default());
    health.record_many(0, served(false), 19);
    assert_eq!(health.update(0), None);
    health.record(0, served(false));
    assert_eq!(health.update(0).map(|change| change.to), Some(Level::Minimal));
}

#[test]
fn without_calls_it_finds_its_way_up_and_bad_calls_hold_it() {
    let health = Degradation::new(DegradationConfig::default());
    health.record_many(0, served(false), 20);
    health.update(0);
    assert_eq!(health.update(WINDOW - 1), None);
    assert_eq!(health.update(WINDOW).map(|change| (change.to, change.why)), Some((Level::RuleBased, Why::Quiet)));
    // Too few to move it down, but not a reason to go up.
    health.record_many(2 * WINDOW - 1, served(false), 10);
    assert_eq!(health.update(2 * WINDOW), None);
    assert_eq!(health.level(), Level::RuleBased);
}

#[test]
fn it_says_what_is_wrong() {
    let why = |outcome: ServedCall| {
        let health = Degradation::new(DegradationConfig::default());
        health.record_many(0, outcome, 100);
        health.update(0).map(|change| (change.to, change.why))
    };
    assert_eq!(why(served(false)), Some((Level::Minimal, Why::Failures)));
    assert_eq!(why(ServedCall::of(Served::Fallback)), Some((Level::Cached, Why::Fallbacks)));
    let slow = |ratio| why(ServedCall { served: Served::AsPlanned, latency_ratio: Some(ratio) });
    assert_eq!(slow(1000.0), Some((Level::Cached, Why::Latency)));
    assert_eq!(slow(2.6), Some((Level::Reduced, Why::Latency)));
    assert_eq!(slow(2.5), None);
    assert_eq!(slow(f64::NAN), None);
}

#[test]
fn a_clock_that_is_set_back_does_not_freeze_it() {
    let (health, mut now) = (Degradation::new(DegradationConfig::default()), 0);
    health.record_many(u64::MAX, served(false), 20);
    health.update(u64::MAX);
    assert_eq!(health.level(), Level::Minimal);
    drive(&health, &mut now, 6 * WINDOW, 0);
    assert_eq!(health.level(), Level::Full);
    // What was noted after that is forgotten in its time.
    health.record(u64::MAX, served(true));
    health.record_many(0, served(false), 10);
    assert_eq!((health.view(0).calls, health.view(2 * WINDOW).calls), (10, 0));
}

#[test]
fn its_memory_is_bounded() {
    // All of it is inline: there is no container that could grow.
    assert!(size_of::<Degradation>() <= 1024);
}

#[test]
fn levels_have_the_order_and_the_names_of_the_specification() {
    assert!(Level::ALL.is_sorted());
    let names: Vec<String> = Level::ALL.iter().map(|level| serde_json::to_string(level).unwrap()).collect();
    assert_eq!(names.join(" "), r#""full" "reduced" "cached" "rule_based" "minimal""#);
    assert!(Level::ALL.iter().zip(names).all(|(level, name)| name == format!("\"{level}\"")));
    let config = DegradationConfig::default();
    let scores = [100.0, 80.0, 79.9, 60.0, 59.9, 40.0, 39.9, 20.0, 19.9, 0.0];
    let levels = scores.map(|score| config.level_for(score) as usize);
    assert_eq!(levels, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
}
