//! Which calls a candidate gets, and when it is taken out.

use lz_resilience::rollout::{Compared, Limits, Mode, RollbackCause, RolloutCall};
use lz_resilience::{Rollout, RolloutSpec, RolloutStatus, Verdict};
use proptest::prelude::*;

fn spec(mode: Mode, fraction: f64, seed: u64) -> RolloutSpec {
    RolloutSpec {
        name: "next".into(),
        operation: "norm.rms".into(),
        candidate: "triton.rms".into(),
        mode,
        fraction,
        seed,
        limits: Limits::default(),
    }
}

fn canary(fraction: f64, seed: u64) -> Rollout {
    Rollout::new(spec(Mode::Canary, fraction, seed))
}

fn shadow(fraction: f64) -> Rollout {
    Rollout::new(spec(Mode::Shadow, fraction, 0))
}

/// Numbers that are random enough, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From 0 to 1.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Around 0, spread 1: the sum of twelve, less six.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.share()).sum::<f64>() - 6.0
    }
}

fn timed(ratio: f64) -> RolloutCall {
    RolloutCall { serving_us: Some(100.0), candidate_us: Some(100.0 * ratio), ..RolloutCall::OK }
}

fn compared(compared: Compared) -> RolloutCall {
    RolloutCall { compared, ..RolloutCall::OK }
}

fn rolled_back(verdict: &Verdict) -> Option<&RollbackCause> {
    match verdict {
        Verdict::RolledBack { why } => Some(why),
        _ => None,
    }
}

/// Part of what a configuration means: these values never change. (Worked out apart, in Python.)
#[test]
fn the_calls_of_a_canary_are_the_same_in_every_version() {
    let taken = |fraction, seed| -> Vec<u64> {
        let rollout = canary(fraction, seed);
        (0..64).filter(|&key| rollout.takes(key)).collect()
    };
    assert_eq!(taken(0.1, 0), [1, 18, 25, 27, 43, 47, 58]);
    assert_eq!(taken(0.1, 1), [28, 31, 51]);
    assert_eq!(taken(0.1, 0xdead_beef), [2, 6, 7, 8, 10, 24, 38, 39, 43, 58]);
}

#[test]
fn none_and_all_are_exact() {
    for seed in 0..20 {
        for key in [0, 1, 7, u64::MAX, u64::MAX / 2] {
            for nothing in [0.0, -1.0, f64::NAN, f64::NEG_INFINITY] {
                assert!(!canary(nothing, seed).takes(key) && !shadow(nothing).samples(key));
            }
            for all in [1.0, 2.0, f64::INFINITY] {
                assert!(canary(all, seed).takes(key) && shadow(all).samples(key));
            }
        }
    }
}

proptest! {
    #[test]
    fn who_is_taken_at_little_is_taken_at_more(key: u64, seed: u64, a in 0.0..=1.0f64, b in 0.0..=1.0f64) {
        let (little, more) = (canary(a.min(b), seed), canary(a.max(b), seed));
        prop_assert!(!little.takes(key) || more.takes(key));
    }

    #[test]
    fn a_fraction_takes_its_share(fraction in 0.0..=1.0f64, seed: u64, keys: u64) {
        const N: f64 = 20_000.0;
        let (rollout, mut numbers) = (canary(fraction, seed), Numbers(keys | 1));
        // Keys in a row as well as random ones: the hash must part them all.
        for random in [true, false] {
            let taken = (0..N as u64).filter(|&n| rollout.takes(if random { numbers.next() } else { n })).count();
            // Six standard deviations: once in 500 million.
            let bound = 6.0 * (N * fraction * (1.0 - fraction)).sqrt() + 1.0;
            prop_assert!((taken as f64 - N * fraction).abs() <= bound, "{taken} of {N} at {fraction}");
        }
    }

    #[test]
    fn a_shadow_is_even(fraction in 0.0..1.0f64, n in 0..100_000u64) {
        // Among any n calls in a row from the first on: the whole part of n · fraction.
        let rollout = shadow(fraction);
        let n = n % 3000;
        let taken = (0..n).filter(|&call| rollout.samples(call)).count() as f64;
        prop_assert!((taken - (n as f64 * fraction).floor()).abs() <= 1.0, "{taken} of {n} at {fraction}");
    }

    #[test]
    fn no_outcome_does_harm(
        times in prop::collection::vec((any::<f64>(), any::<f64>(), any::<f64>(), any::<bool>()), 0..400),
        limits: [f64; 3], min_samples: u64,
    ) {
        let [max_error_rate, max_mismatch_rate, max_slowdown] = limits;
        let mut spec = spec(Mode::Shadow, 0.5, 0);
        spec.limits = Limits { max_error_rate, max_mismatch_rate, max_slowdown, min_samples: min_samples % 100 };
        let rollout = Rollout::new(spec);
        for (serving, candidate, max_error, ok) in times {
            let compared = if ok { Compared::Agrees { max_error } } else { Compared::Differs { max_error } };
            rollout.record(RolloutCall { ok, compared, serving_us: Some(serving), candidate_us: Some(candidate) });
        }
        rollout.status();
    }
}

#[test]
fn rollouts_of_different_seeds_take_different_calls() {
    let (one, other) = (canary(0.5, 1), canary(0.5, 2));
    let both = (0..10_000).filter(|&key| one.takes(key) && other.takes(key)).count();
    assert!((2300..2700).contains(&both), "{both}");
}

#[test]
fn a_shadow_takes_every_kth_call() {
    let taken = |fraction: f64| (0..30).filter(|&n| shadow(fraction).samples(n)).collect::<Vec<_>>();
    assert_eq!(taken(0.25), [3, 7, 11, 15, 19, 23, 27]);
    assert_eq!(taken(0.1), [9, 19, 29]);
    assert_eq!(taken(0.5).len(), 15);
    assert_eq!(taken(0.75).len(), 22);
}

#[test]
fn nothing_is_judged_before_there_are_enough_samples() {
    let rollout = canary(0.1, 0);
    for _ in 0..49 {
        assert_eq!(rollout.record(RolloutCall::FAILED), None);
        assert_eq!(rollout.verdict(), Verdict::Running);
    }
    let verdict = rollout.record(RolloutCall::FAILED).unwrap();
    assert!(matches!(rolled_back(&verdict), Some(RollbackCause::ErrorRate { errors: 50, samples: 50, .. })));

    let rollout = canary(0.1, 0);
    let verdicts: Vec<_> = (0..60).filter_map(|_| rollout.record(RolloutCall::OK)).collect();
    assert_eq!(verdicts, [Verdict::Healthy]);
}

#[test]
fn a_rollback_is_final_until_it_is_rearmed() {
    let rollout = canary(1.0, 0);
    (0..50).for_each(|_| drop(rollout.record(RolloutCall::FAILED)));
    assert!(!rollout.takes(1) && !rollout.samples(1) && !rollout.is_armed());
    for _ in 0..10_000 {
        assert_eq!(rollout.record(RolloutCall::OK), None);
    }
    assert!(rolled_back(&rollout.verdict()).is_some());
    assert_eq!(rollout.status().samples, 50, "samples of calls that were still under way do not count");
    assert_eq!(rollout.roll_back("again"), None);
    rollout.rearm();
    assert!(rollout.takes(1) && rollout.is_armed());
    assert_eq!((rollout.verdict(), rollout.status().samples), (Verdict::Running, 0));
}

#[test]
fn an_operator_can_take_it_out_at_once() {
    let rollout = canary(1.0, 0);
    let verdict = rollout.roll_back("the context is lost").unwrap();
    assert_eq!(rolled_back(&verdict).unwrap().to_string(), "the context is lost");
    assert!(!rollout.takes(1));
    assert_eq!(rollout.verdict(), verdict);
}

#[test]
fn by_default_one_wrong_answer_is_enough() {
    let rollout = shadow(1.0);
    assert_eq!(rollout.record(compared(Compared::Differs { max_error: 0.5 })), None);
    let verdict = (0..49).find_map(|_| rollout.record(compared(Compared::Agrees { max_error: 1e-6 }))).unwrap();
    let why = rolled_back(&verdict).unwrap();
    assert!(matches!(why, RollbackCause::MismatchRate { mismatches: 1, compared: 50, worst_error: Some(0.5), .. }));
    assert_eq!(why.to_string(), "1 of 50 answers differ; 0% are allowed (by 5.000e-1 at most)");
    // And not one: none.
    let rollout = shadow(1.0);
    (0..10_000).for_each(|_| drop(rollout.record(compared(Compared::Agrees { max_error: 1e-6 }))));
    assert_eq!(rollout.verdict(), Verdict::Healthy);
}

#[test]
fn mismatches_are_counted_among_what_was_compared() {
    let mut spec = spec(Mode::Canary, 0.1, 0);
    spec.limits.max_mismatch_rate = 0.1;
    let rollout = Rollout::new(spec);
    // Every tenth is compared, and half of these differ.
    for n in 0..400 {
        rollout.record(match n % 20 {
            0 => compared(Compared::Differs { max_error: 1.0 }),
            10 => compared(Compared::Agrees { max_error: 0.0 }),
            _ => RolloutCall::OK,
        });
    }
    assert!(matches!(rolled_back(&rollout.verdict()), Some(RollbackCause::MismatchRate { .. })));
}

/// How many of 400 candidates are rolled back, and the most samples that took.
fn fates(samples: u64, mut outcome: impl FnMut(&mut Numbers) -> RolloutCall) -> (usize, u64) {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let mut fates = vec![];
    for _ in 0..400 {
        let rollout = canary(0.1, 0);
        fates.extend((1..=samples).find(|_| {
            let verdict = rollout.record(outcome(&mut numbers));
            verdict.is_some_and(|verdict| rolled_back(&verdict).is_some())
        }));
    }
    (fates.len(), fates.into_iter().max().unwrap_or(0))
}

#[test]
fn noise_alone_rolls_nothing_back() {
    // Half of what is allowed, looked at 5000 times.
    let (errors, _) = fates(5000, |n| if n.share() < 0.005 { RolloutCall::FAILED } else { RolloutCall::OK });
    assert!(errors <= 20, "{errors} of 400 at half the error rate");
    // A tenth slower where a quarter is allowed, each time a third more or less, now and then twenty times.
    let noisy = |n: &mut Numbers| timed(if n.share() < 0.05 { 20.0 } else { 1.1 * (n.normal() / 3.0).exp() });
    let (slow, _) = fates(5000, noisy);
    assert!(slow <= 20, "{slow} of 400 at less than the slowdown");
}

#[test]
fn what_is_bad_is_rolled_back_soon() {
    let (errors, most) = fates(1000, |n| if n.share() < 0.1 { RolloutCall::FAILED } else { RolloutCall::OK });
    assert!(errors == 400 && most <= 200, "{errors} of 400, the last after {most}");
    let (slow, most) = fates(1000, |n| timed(1.6 * (n.normal() / 3.0).exp()));
    assert!(slow == 400 && most <= 300, "{slow} of 400, the last after {most}");
}

/// On a GPU an outcome is known at once and its times when the device is done: no more calls are counted for them.
#[test]
fn times_that_come_later_count_as_those_that_come_at_once() {
    let (at_once, later) = (canary(0.1, 0), canary(0.1, 0));
    let is_over = |rollout: &Rollout| matches!(rollout.verdict(), Verdict::RolledBack { .. });
    for _ in 0..200 {
        at_once.record(timed(3.0));
        later.record(RolloutCall::OK);
    }
    assert!(is_over(&at_once) && later.verdict() == Verdict::Healthy, "without times it is as good as any");
    let verdicts = (0..200).filter_map(|_| later.record_times(10.0, 30.0)).count();
    let status = later.status();
    assert!(verdicts == 1 && is_over(&later), "it is told once");
    assert_eq!((status.samples, status.slowdown), (200, Some(3.0)));
    assert_eq!(later.record_times(10.0, 30.0), None, "it is out already");
    let sound = canary(0.1, 0);
    for (serving, candidate) in [(0.0, 1.0), (f64::NAN, 1.0), (1.0, 0.0), (1.0, f64::INFINITY)] {
        sound.record_times(serving, candidate);
    }
    assert_eq!(sound.status().slowdown, None, "what is no ratio is no sample");
}

#[test]
fn a_candidate_that_goes_bad_late_is_not_excused_by_its_past() {
    let rollout = canary(0.1, 0);
    (0..100_000).for_each(|_| drop(rollout.record(timed(1.0))));
    assert_eq!(rollout.verdict(), Verdict::Healthy);
    let failing = (1..2000).find(|_| rollout.record(RolloutCall::FAILED).is_some());
    assert!(failing.is_some_and(|calls| calls <= 32), "{failing:?}");
    rollout.rearm();
    (0..100_000).for_each(|_| drop(rollout.record(timed(1.0))));
    let slow = (1..2000).find(|_| rollout.record(timed(2.0)).is_some());
    assert!(slow.is_some_and(|calls| calls <= 160), "{slow:?}");
}

#[test]
fn the_slowdown_is_the_median() {
    let rollout = canary(0.1, 0);
    for n in 0..101 {
        rollout.record(timed(f64::from(n) / 50.0));
    }
    // 0 is no time, so from 1/50 to 100/50.
    let median = rollout.status().slowdown.unwrap();
    assert!((median - 1.0).abs() < 1e-6, "{median}");
    // Times that are not known, and those of failed calls, do not count.
    let before = rollout.status().slowdown;
    rollout.record(RolloutCall { serving_us: Some(f64::NAN), ..timed(9.0) });
    rollout.record(RolloutCall { serving_us: Some(0.0), ..timed(9.0) });
    rollout.record(RolloutCall { serving_us: None, ..timed(9.0) });
    rollout.record(RolloutCall { ok: false, ..timed(9.0) });
    assert_eq!(rollout.status().slowdown, before);
}

#[test]
fn the_status_can_be_written_and_read() {
    let rollout = shadow(0.25);
    (0..60).for_each(|_| drop(rollout.record(timed(2.0))));
    let status = rollout.status();
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["verdict"]["state"], "rolled_back");
    assert_eq!(json["verdict"]["why"]["cause"], "slowdown");
    assert_eq!((&json["spec"]["mode"], &json["spec"]["fraction"]), (&"shadow".into(), &0.25.into()));
    assert_eq!(serde_json::from_value::<RolloutStatus>(json).unwrap(), status);
    let why = rolled_back(&status.verdict).unwrap().to_string();
    assert_eq!(why, "it takes 2.00 times as long; 1.25 is allowed");
    let short = r#"{"name":"n","operation":"o","candidate":"c","mode":"canary","fraction":0.01}"#;
    assert_eq!(serde_json::from_str::<RolloutSpec>(short).unwrap().limits, Limits::default());
    let wrong = r#"{"name":"n","operation":"o","candidate":"c","mode":"canary","fraction":0.01,"fractoin":1}"#;
    assert!(serde_json::from_str::<RolloutSpec>(wrong).is_err());
}
