//! Contests between simulated kernels whose true times are known.

mod simulation;

use lz_measure::{Next, Rules, Timing, order};
use simulation::{Machine, Noise, hold, hold_with};

/// From a quiet machine to a loud one. The level walks by a factor of 2 within some hundred samples.
const NOISES: [Noise; 4] = [
    Noise { own: 0.005, spikes: 0.01, walk: 0.005 },
    Noise { own: 0.02, spikes: 0.02, walk: 0.02 },
    Noise { own: 0.05, spikes: 0.02, walk: 0.02 },
    Noise { own: 0.10, spikes: 0.05, walk: 0.02 },
];

/// `LZ_TEST_SCALE=full` holds twenty times as many contests.
fn contests(quick: u64) -> u64 {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full") => 20 * quick,
        _ => quick,
    }
}

fn rules(seed: u64) -> Rules {
    Rules { seed, ..Rules::default() }
}

fn median(timing: &Timing) -> f64 {
    timing.stats.as_ref().map_or(f64::INFINITY, |s| s.median_us)
}

fn fastest(results: &[Timing]) -> usize {
    (0..results.len()).min_by(|&a, &b| median(&results[a]).total_cmp(&median(&results[b]))).unwrap()
}

/// The first in a ranking whose ties go to the candidate added first.
fn winner(results: &[Timing]) -> usize {
    order(results, |_| 0)[0]
}

/// Kernels up to two thirds slower than the best, and one hopeless one.
fn some_kernels(machine: &mut Machine, count: usize) -> Vec<f64> {
    let mut us: Vec<f64> = (0..count - 1).map(|_| 100.0 * machine.random.between(0.0, 0.5).exp()).collect();
    us.push(20_000.0);
    us
}

fn best(us: &[f64]) -> f64 {
    us.iter().copied().fold(f64::INFINITY, f64::min)
}

#[test]
fn whoever_leads_when_settled_is_within_a_tie_of_the_best() {
    let (mut settled, mut wrong_leader, mut wrong_winner) = (0, 0, 0);
    for seed in 0..contests(150) {
        for (n, noise) in NOISES.into_iter().enumerate() {
            let mut machine = Machine::new(seed * 10 + n as u64, noise);
            let us = some_kernels(&mut machine, 3 + seed as usize % 4);
            let (contest, end) = hold(&mut machine, &us, rules(seed));
            if end == Next::Settled {
                let results = contest.results();
                settled += 1;
                wrong_leader += u32::from(us[fastest(&results)] > 1.02 * best(&us));
                wrong_winner += u32::from(us[winner(&results)] > 1.02 * best(&us));
            }
        }
    }
    assert!(settled > contests(150) as u32 * 2, "only {settled} contests were settled");
    assert!(100 * wrong_leader <= settled, "{wrong_leader} of {settled} leaders");
    assert!(100 * wrong_winner <= settled, "{wrong_winner} of {settled} winners");
}

/// Calls around are predicted by the difference to the baseline: what is just above the noise says nothing about them.
#[test]
fn a_contest_is_settled_against_the_baseline_only_when_that_is_clearly_behind() {
    let (mut against, mut unclear) = (0, 0);
    for seed in 0..contests(60) {
        for (n, noise) in NOISES.into_iter().enumerate() {
            let mut machine = Machine::new(seed * 10 + n as u64, noise);
            let us = [100.0, 100.0 * machine.random.between(-0.3, -0.02).exp()];
            let (contest, end) = hold_with(&mut machine, &us, Some(0), rules(seed));
            let results = contest.results();
            let [baseline, other] = [0, 1].map(|i| results[i].stats.clone().unwrap());
            let (gap, noise) = (baseline.median_us - other.median_us, baseline.spread_us.max(other.spread_us));
            let precise = [&baseline, &other].iter().all(|s| s.spread_us <= 0.02 * s.median_us);
            if end == Next::Settled && gap > noise && !precise {
                against += 1;
                unclear += u32::from(gap <= 2.0 * noise);
            }
        }
    }
    assert!(against > contests(60) as u32 && unclear == 0, "{unclear} of {against}");
}

/// Holds pairs of contests; gives in how many pairs the winners were the same, and of how many.
fn agreement(quick: u64, pick: impl Fn(&[Timing]) -> usize, kernels: impl Fn(u64) -> Option<Vec<f64>>) -> (u32, u32) {
    let (mut same, mut all) = (0, 0);
    for seed in 0..contests(quick) {
        for (n, noise) in NOISES.into_iter().enumerate() {
            let Some(us) = kernels(seed) else { continue };
            let one = |salt: u64| {
                let mut machine = Machine::new(1_000_000 * salt + seed * 10 + n as u64, noise);
                pick(&hold(&mut machine, &us, rules(seed + salt)).0.results())
            };
            same += u32::from(one(1) == one(2));
            all += 1;
        }
    }
    (same, all)
}

#[test]
fn two_contests_agree_on_equally_fast_kernels_by_the_fixed_order() {
    // The first in the fixed order is 0.2% slower than the others, so that only the tie gives it the win.
    let kernels = |seed: u64| {
        let mut us = vec![100.0; [2, 3, 6][seed as usize % 3]];
        us[0] = 100.2;
        Some(us)
    };
    let (same, all) = agreement(60, winner, kernels);
    assert!(100 * same >= 99 * all, "{same} of {all} pairs agree");
    // Without ties, chance decides: the test above can fail.
    let (same, all) = agreement(20, fastest, kernels);
    assert!(100 * same < 80 * all, "{same} of {all} pairs agree without ties");
}

#[test]
fn two_contests_agree_when_the_difference_exceeds_the_noise() {
    let kernels = |seed: u64| {
        let mut random = simulation::Random::new(seed + 99);
        // The best comes last in the fixed order, by more than the spread that contests reach on the loudest machine.
        let mut us: Vec<f64> = (0..1 + seed % 4).map(|_| 100.0 * random.between(1.18, 1.6)).collect();
        us.push(100.0);
        Some(us)
    };
    let (same, all) = agreement(100, winner, kernels);
    assert!(100 * same >= 98 * all, "{same} of {all} pairs agree");
}

#[test]
fn timing_one_kernel_after_the_other_is_fooled_by_the_same_noise() {
    let noise = Noise { own: 0.02, spikes: 0.02, walk: 0.02 };
    let us = [106.0, 100.0, 112.0];
    let (mut naive_right, mut contest_right) = (0, 0);
    let count = contests(200);
    for seed in 0..count {
        let mut machine = Machine::new(seed, noise);
        let median_of_60 = |machine: &mut Machine, us: f64| {
            let mut times: Vec<f64> = (0..60).map(|_| machine.time(us)).collect();
            times.sort_by(f64::total_cmp);
            times[30]
        };
        let naive: Vec<f64> = us.iter().map(|&us| median_of_60(&mut machine, us)).collect();
        naive_right += u64::from(naive[1] <= naive[0] && naive[1] <= naive[2]);
        let (contest, _) = hold(&mut machine, &us, rules(seed));
        contest_right += u64::from(winner(&contest.results()) == 1);
    }
    assert!(100 * contest_right >= 99 * count, "contests: {contest_right} of {count}");
    assert!(100 * naive_right < 80 * count, "one after the other: {naive_right} of {count}");
}

#[test]
fn the_best_is_never_retired_and_the_hopeless_always() {
    let (mut retired_best, mut all) = (0, 0);
    for seed in 0..contests(300) {
        for (n, noise) in NOISES.into_iter().enumerate() {
            let mut machine = Machine::new(seed * 10 + 5 + n as u64, noise);
            let mut us = some_kernels(&mut machine, 3 + seed as usize % 4);
            us.push(900.0);
            let (contest, _) = hold(&mut machine, &us, rules(seed));
            let results = contest.results();
            let at = us.iter().position(|&t| t == best(&us)).unwrap();
            // One that rests within the tie of the leader lost nothing.
            let lead = us[fastest(&results)];
            retired_best += u32::from(results[at].retired && lead > 1.02 * us[at]);
            all += 1;
            for (result, &us) in results.iter().zip(&us).filter(|(_, us)| **us > 500.0) {
                assert!(result.retired, "{us}: {result:?}");
                let samples = result.stats.as_ref().unwrap().samples;
                // Ten times as long as ever, the leader's one sample can hide a hopeless one, but not for long.
                assert!(samples <= 8, "{samples} samples of a kernel that takes {us} us");
            }
        }
    }
    assert!(1000 * retired_best <= all, "{retired_best} of {all}");
}

#[test]
fn loss_falls_as_rounds_go_by() {
    let noise = Noise { own: 0.05, spikes: 0.02, walk: 0.02 };
    let losses = |max_rounds: u32| -> f64 {
        let count = contests(60);
        let one = |seed: u64| {
            let mut machine = Machine::new(seed, noise);
            let us = [100.0, 100.0 * machine.random.between(1.0, 1.05), 104.0];
            hold(&mut machine, &us, Rules { max_rounds, ..rules(seed) }).0.loss()
        };
        (0..count).map(one).sum::<f64>() / count as f64
    };
    let by_rounds: Vec<f64> = [5, 10, 20, 40, 80].into_iter().map(losses).collect();
    assert!(by_rounds.windows(2).all(|w| w[1] < w[0]), "{by_rounds:?}");
    assert!(by_rounds[4] < 0.01, "{by_rounds:?}");
}

#[test]
fn spread_is_the_noise_of_differences() {
    // Over many contests of as many rounds, the differences of two medians vary as much as their spreads say.
    for noise in &NOISES[1..3] {
        let (mut inside, mut spreads, mut gaps) = (0, 0.0, 0.0);
        let count = contests(100);
        for seed in 0..count {
            let mut machine = Machine::new(seed, *noise);
            let rules = Rules { min_rounds: 30, max_rounds: 30, least_spread: 0.0, ..rules(seed) };
            let results = hold(&mut machine, &[100.0, 100.0, 100.0, 100.0], rules).0.results();
            let stats = |i: usize| results[i].stats.clone().unwrap();
            let gap = (stats(0).median_us - stats(1).median_us).abs();
            let spread = stats(0).spread_us.max(stats(1).spread_us);
            inside += u64::from(gap <= spread);
            spreads += spread / count as f64;
            gaps += gap / count as f64;
        }
        assert!(100 * inside >= 99 * count, "{inside} of {count} within the spread");
        // The mean size of a normal variable is 0.8 of its deviation; the spread is 3.2 and some doubt.
        let ratio = spreads / gaps;
        assert!((2.8..7.0).contains(&ratio), "spread by gap: {ratio}");
    }
}
