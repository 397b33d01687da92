//! Calls in words, choices and regret, against the plainest way to find them.

use lz_model::{CallSpec, DType, Layout};
use lz_report::{Candidate, Contest, Outcome, Regret};
use proptest::prelude::*;

fn of(call: CallSpec) -> Contest {
    Contest::new(call, "d", "eager")
}

#[test]
fn calls_are_told_in_a_few_words() {
    let attention = |q: &[i64], k: &[i64]| {
        let call = CallSpec::new("attention").tensor("query", DType::Bf16, q).tensor("key", DType::Bf16, k);
        of(call.tensor("value", DType::Bf16, k).layout(Layout::Bshd))
    };
    let prefill = attention(&[2, 1024, 32, 128], &[2, 1024, 8, 128]);
    assert_eq!(prefill.op, "attention.gqa.prefill");
    assert_eq!(prefill.label, "batch 2 · seq 1024 · heads 32/8 · dim 128");
    assert_eq!((prefill.dtype.as_str(), prefill.variant.as_str()), ("bfloat16", "BSHD"));
    assert_eq!((prefill.dims["seq_k"], prefill.dims["kv_heads"]), (1024, 8));
    assert_eq!(attention(&[1, 1, 8, 64], &[1, 4096, 8, 64]).label, "batch 1 · seq 1/4096 · heads 8 · dim 64");

    let linear =
        CallSpec::new("linear").tensor("input", DType::F32, &[7, 3, 64]).tensor("weight", DType::F32, &[256, 64]);
    let linear = of(linear.tensor("bias", DType::F32, &[256]));
    assert_eq!((linear.label.as_str(), linear.variant.as_str()), ("rows 21 · 64→256", "+bias"));

    let strided = r#"{"op":"gelu","tensors":{"input":{"dtype":"float32","shape":[4,8],"strides":[16,1]}},"params":{"approximate":"tanh"}}"#;
    let strided = of(strided.parse().unwrap());
    assert_eq!(
        (strided.label.as_str(), strided.variant.as_str()),
        ("rows 4 · width 8", "approximate=tanh, input strided")
    );

    let unknown = of(CallSpec::new("no.such").tensor("a", DType::I64, &[3]).tensor("b", DType::F16, &[2, 5]));
    assert_eq!(
        (unknown.op.as_str(), unknown.label.as_str(), unknown.dtype.as_str()),
        ("no.such", "a 3 · b 2×5", "float16")
    );
}

#[test]
fn a_chosen_kernel_that_was_not_measured_has_no_figures() {
    let contest = of(CallSpec::new("x"))
        .candidate(Candidate::ok("torch", 2.0, 2.0, 0.0, 1).baseline(true))
        .settled(Some("elsewhere"));
    assert_eq!((contest.chosen.as_deref(), contest.runner_up.as_deref()), (Some("elsewhere"), Some("torch")));
    assert_eq!((contest.times_baseline, contest.chosen_us()), (None, None));
    assert_eq!(Regret::from_contests(&[contest]), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn settling_finds_the_best_the_second_and_the_ratio(
        candidates in prop::collection::vec((0..3u8, 1..40u32, any::<bool>()), 0..8),
        pick in prop::option::of(0..8usize),
    ) {
        let build = |(i, (outcome, us, baseline)): (usize, &(u8, u32, bool))| match outcome {
            0 => Candidate::wrong(format!("k{i}"), "w"),
            1 => Candidate::failed(format!("k{i}"), "f"),
            _ => Candidate::ok(format!("k{i}"), f64::from(*us), f64::from(*us), 0.0, 3),
        }
        .baseline(*baseline);
        let all: Vec<Candidate> = candidates.iter().enumerate().map(build).collect();
        let given = pick.and_then(|i| all.get(i)).map(|c| c.kernel.clone());
        let contest = all.iter().cloned().fold(of(CallSpec::new("x")), Contest::candidate).settled(given.as_deref());

        let time = |c: &&Candidate| if c.outcome == Outcome::Ok { c.median_us.unwrap() as u32 } else { u32::MAX };
        let timed: Vec<&Candidate> = all.iter().filter(|c| c.outcome == Outcome::Ok).collect();
        let best = timed.iter().copied().min_by_key(|c| (time(c), c.kernel.clone()));
        let chosen = given.clone().or_else(|| best.map(|c| c.kernel.clone()));
        prop_assert_eq!(&contest.chosen, &chosen);
        let second = timed.iter().copied().filter(|c| Some(&c.kernel) != chosen.as_ref()).min_by_key(|c| (time(c), c.kernel.clone()));
        prop_assert_eq!(contest.runner_up.clone(), second.map(|c| c.kernel.clone()));
        let default = timed.iter().filter(|c| c.baseline).map(time).min();
        let running = timed.iter().find(|c| Some(&c.kernel) == chosen.as_ref()).map(time);
        let expected = default.zip(running).map(|(d, r)| f64::from(d) / f64::from(r));
        prop_assert_eq!(contest.times_baseline, expected);
        prop_assert_eq!(contest.candidates.iter().filter(|c| c.chosen).count(), usize::from(chosen.is_some()));

        let regret = Regret::from_contests(std::slice::from_ref(&contest));
        let lost = running.zip(best.as_ref().map(time)).map(|(r, b)| f64::from(r) / f64::from(b));
        prop_assert_eq!(regret.map(|r| r.worst), lost);
    }
}
