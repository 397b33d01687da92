//! What a decision says about itself is true: every claim is checked against the candidates, on random worlds.

#[allow(dead_code)]
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;

use lz_model::*;
use lz_select::*;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

type Checked = Result<(), TestCaseError>;

/// A world in which some kernels are cold, are what plain torch runs or the reference, and one may be
/// pinned or in a rollout.
fn spec_of(
    world: &world::World,
    traits: &[u8],
    pinned: Option<usize>,
    rollout: Option<usize>,
    query: &Query,
) -> SnapshotSpec {
    let mut spec = world.spec();
    for (kernel, bits) in spec.kernels.iter_mut().zip(traits) {
        let kernel = Arc::make_mut(kernel);
        kernel.baseline = bits & 3 == 0;
        kernel.reference = bits & 12 == 0;
        kernel.jit = bits & 16 != 0;
        spec.health.insert(kernel.id.clone(), Health { cold: bits & 16 != 0, ..Health::default() });
    }
    if let Some(at) = pinned {
        spec.pins = Arc::new([Pin::exact(query, &format!("k{at:02}"), None, "table t".into())].into_iter().collect());
    }
    if let Some(at) = rollout {
        let candidate = Pattern::Kernel(format!("k{at:02}"));
        spec.rollouts = vec![RolloutRule::new("try", "attention", candidate, Arc::new(|_| true))];
    }
    spec.restriction.declared_only = traits.first().is_some_and(|bits| bits % 11 == 0);
    spec
}

/// The decision, with names for its candidates.
struct Told<'a> {
    decision: &'a Decision,
    snapshot: &'a Snapshot,
}

impl Told<'_> {
    fn accepted(&self) -> impl Iterator<Item = &Candidate> {
        self.decision.candidates.iter().filter(|c| c.reasons.is_empty())
    }

    fn called(&self, name: &str) -> Result<&Candidate, TestCaseError> {
        let found = self.accepted().find(|c| self.snapshot.name(c.kernel) == name);
        found.ok_or_else(|| TestCaseError::fail(format!("{name} is named and not a candidate")))
    }

    /// A rule of this name and kind applied, and it names the kernel.
    fn is_by_rule(&self, rule: &str, action: &str, kernel: KernelIx) -> Checked {
        let traces = self.snapshot.trace(self.decision);
        let it = traces.iter().find(|trace| trace.name == rule).expect("a rule that is named exists");
        prop_assert!(it.applied && it.action == action, "{it:?}");
        prop_assert_eq!(&it.target, &self.snapshot.kernel(kernel).id);
        Ok(())
    }

    fn is_behind(&self, first: &Candidate, passed: &PassedOver) -> Checked {
        let other = self.called(&passed.kernel_id)?;
        match passed.because {
            Behind::Untrusted => prop_assert!(other.estimate.is_some_and(|e| !e.trusted)),
            Behind::NotCompiled => prop_assert!(other.cold && !first.cold),
            Behind::Policy => prop_assert!(other.terms.policy < first.terms.policy),
            Behind::Reference => prop_assert!(other.reference && !first.reference),
        }
        Ok(())
    }

    fn is_ranked(&self, first: &Candidate, ranked: &Ranked) -> Checked {
        let text = ranked.to_string();
        match ranked {
            Ranked::Only => prop_assert_eq!(self.accepted().count(), 1),
            Ranked::ByTime { times, time_us, tie, passed_over } => {
                let mine = first.estimate.expect("it has a time");
                prop_assert!(mine.trusted && mine.median_us == *time_us);
                let trusted: Vec<Estimate> = self.accepted().filter_map(|c| c.estimate).filter(|e| e.trusted).collect();
                let measured = trusted.iter().filter(|e| e.kind == EstimateKind::Measured).count();
                let (all, none) = (measured == trusted.len(), measured == 0);
                prop_assert_eq!(all, *times == Times::Measured);
                prop_assert_eq!(none, *times == Times::Predicted);
                prop_assert_eq!(all, text.contains("fastest measured"));
                let mut least = *time_us;
                if let Some(tie) = tie {
                    let fastest = self.called(&tie.fastest)?;
                    let theirs = fastest.estimate.expect("the fastest has a time");
                    least = theirs.median_us;
                    prop_assert!(least == tie.fastest_us && least <= *time_us);
                    let gap = time_us - least;
                    prop_assert!(gap <= mine.noise_to(&theirs) + tie.promise_us);
                    prop_assert_eq!(text.contains("are noise"), gap <= mine.noise_to(&theirs));
                    if tie.promise_us > 0.0 {
                        prop_assert!(first.baseline);
                        prop_assert!(tie.promise_us <= 0.0301 * least);
                    }
                    match tie.by {
                        TieBreak::PlainTorch => prop_assert!(first.baseline),
                        TieBreak::AheadOfTorch => {
                            let torch = self.decision.baseline().and_then(|c| c.estimate).expect("torch has a time");
                            prop_assert!(torch.median_us - time_us > mine.noise_to(&torch));
                        }
                        TieBreak::Declared => {
                            let torch = self.decision.baseline().expect("what it is declared faster than");
                            prop_assert!(first.terms.priority > torch.terms.priority);
                            prop_assert!(mine.kind != EstimateKind::Measured);
                            prop_assert!(torch.estimate.is_some_and(|e| *time_us < e.median_us));
                        }
                        TieBreak::Priority => prop_assert!(first.terms.priority > fastest.terms.priority),
                        TieBreak::BuiltIn => prop_assert!(first.built_in && !fastest.built_in),
                        TieBreak::Order => prop_assert!(first.kernel < fastest.kernel),
                    }
                }
                // Nobody at all is faster, but those that are counted.
                let faster = self.accepted().filter(|c| c.estimate.is_some_and(|e| e.median_us < least));
                let faster: Vec<f64> = faster.filter_map(|c| Some(c.estimate?.median_us)).collect();
                prop_assert_eq!(faster.len(), passed_over.as_ref().map_or(0, |p| 1 + p.more), "{}", text);
                if let Some(passed) = passed_over {
                    prop_assert!(passed.value == faster.iter().copied().fold(f64::INFINITY, f64::min));
                    self.is_behind(first, passed)?;
                }
                prop_assert_eq!(passed_over.is_some(), text.contains("except") || text.contains("not counting"));
            }
            Ranked::Untimed { passed_over } => {
                prop_assert!(first.estimate.is_none_or(|e| !e.trusted));
                let times = self.accepted().filter_map(|c| c.estimate).filter(|e| e.trusted).map(|e| e.median_us);
                prop_assert!(passed_over.value == times.fold(f64::INFINITY, f64::min));
                prop_assert!(passed_over.because != Behind::Untrusted);
                self.is_behind(first, passed_over)?;
            }
            Ranked::ByScore { score, known, equal, passed_over } => {
                prop_assert!(*score == first.terms.total());
                let timed = self.accepted().any(|c| c.estimate.is_some());
                let trusted = self.accepted().all(|c| c.estimate.is_some_and(|e| e.trusted));
                match known {
                    Known::Nothing => prop_assert!(!timed && !self.snapshot.spec().restriction.declared_only),
                    Known::NotAll => prop_assert!(timed && !trusted),
                    Known::NotAsked => prop_assert!(self.snapshot.spec().restriction.declared_only),
                }
                let higher = self.accepted().filter(|c| c.terms.total() > *score).count();
                prop_assert_eq!(higher, passed_over.as_ref().map_or(0, |p| 1 + p.more), "{}", text);
                if let Some(passed) = passed_over {
                    self.is_behind(first, passed)?;
                }
                let alike =
                    |c: &&Candidate| c.terms.total() == *score && c.cold == first.cold && c.kernel != first.kernel;
                prop_assert_eq!(equal.is_some(), self.accepted().any(|c| alike(&c)));
                if let Some(equal) = equal {
                    let other = self.called(&equal.kernel_id)?;
                    prop_assert!(alike(&other));
                    let same_priority = first.terms.priority == other.terms.priority;
                    match equal.by {
                        TieBreak::Priority => prop_assert!(first.terms.priority > other.terms.priority),
                        TieBreak::PlainTorch => prop_assert!(same_priority && first.baseline && !other.baseline),
                        TieBreak::Order => prop_assert!(same_priority && first.kernel < other.kernel),
                        TieBreak::BuiltIn => prop_assert!(first.built_in && !other.built_in),
                        TieBreak::AheadOfTorch | TieBreak::Declared => {
                            prop_assert!(false, "no time decided: {}", text);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// What overrules speed.
fn standing(c: &Candidate) -> f64 {
    c.terms.policy + c.terms.jit
}

/// What is shown of two neighbours in a table explains their order.
fn is_order_explained(decision: &Decision, a: usize, b: usize) -> bool {
    let (above, below) = (&decision.candidates[a], &decision.candidates[b]);
    if above.cold != below.cold {
        return below.cold;
    }
    if !decision.is_ranked_by_time() {
        return above.terms.total() >= below.terms.total();
    }
    let time = |c: &Candidate| c.estimate.filter(|e| e.trusted).map_or(f64::INFINITY, |e| e.median_us);
    // A kernel without a time goes before the reference, even one that has a time.
    let is_untimed = |c: &Candidate| c.reasons.is_empty() && !c.reference && time(c).is_infinite();
    if above.reference != below.reference && decision.candidates.iter().any(is_untimed) {
        return below.reference || standing(above) > standing(below);
    }
    let group = |i: usize| decision.candidates[i].tied_with.unwrap_or(i);
    standing(above) > standing(below) || group(a) == group(b) || time(above) <= time(below) || {
        let fastest = &decision.candidates[group(a)];
        time(fastest) <= time(below)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn every_claim_about_a_choice_is_true(
        world in world::world(),
        call in world::call(),
        traits in prop::collection::vec(any::<u8>(), 10),
        pinned in prop::option::weighted(0.2, 0usize..10),
        rollout in prop::option::weighted(0.2, 0usize..10),
    ) {
        let query = call.query();
        let spec = spec_of(&world, &traits, pinned, rollout, &query);
        let Ok(snapshot) = spec.build(1) else { return Ok(()) };
        let decision = snapshot.select(&query);
        let told = Told { decision: &decision, snapshot: &snapshot };
        let why = decision.why();
        prop_assert_eq!(why.is_some(), told.accepted().next().is_some());
        let (Some(why), Some(chosen)) = (why, decision.chosen()) else { return Ok(()) };
        let id = &snapshot.kernel(chosen.kernel).id;
        match &why {
            Why::Ranking(ranked) => told.is_ranked(chosen, ranked)?,
            Why::Lock { rule, among } => {
                told.is_by_rule(rule, "lock", chosen.kernel)?;
                told.is_ranked(chosen, among)?;
            }
            Why::Override { rule } => told.is_by_rule(rule, "override", chosen.kernel)?,
            Why::Pin { origin } => {
                prop_assert_eq!(origin, "table t");
                prop_assert_eq!(Some(id.clone()), pinned.map(|at| format!("k{at:02}")));
                prop_assert!(!chosen.cold);
            }
            Why::Rollout { rollout: name } => {
                prop_assert_eq!(name, "try");
                prop_assert_eq!(Some(id.clone()), rollout.map(|at| format!("k{at:02}")));
            }
            Why::NextInLine { .. } => prop_assert!(false, "no circuit is open here"),
            Why::SdpaKernel { .. } => prop_assert!(false, "these calls are outside of sdpa_kernel"),
        }
        // What was moved is named by the sentence and the rules; the rest of the order is explained by what is shown.
        let moved = snapshot.trace(&decision).into_iter().any(|t| ["override", "fallback"].contains(&t.action) && t.applied);
        if matches!(why, Why::Ranking(_) | Why::Lock { .. }) && !moved {
            for pair in decision.ranking.windows(2) {
                prop_assert!(is_order_explained(&decision, pair[0], pair[1]), "{why}");
            }
        }
    }
}

/// Times by kernel id: median, spread.
struct Measured(BTreeMap<&'static str, (f64, f64)>);

impl PerfSource for Measured {
    fn estimate(&self, kernel: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        let &(median_us, spread_us) = self.0.get(kernel.id.as_str())?;
        let (apart_us, sides, samples, trusted) = (None, None, 20, true);
        Some(Estimate { median_us, spread_us, apart_us, sides, samples, kind: EstimateKind::Measured, trusted })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

/// The sentence about a choice between two kernels of libraries `a` and `b`, measured to take these times.
fn sentence(a: (f64, f64), b: (f64, f64), change: impl FnOnce(&mut SnapshotSpec)) -> String {
    let mut spec = SnapshotSpec { devices: vec![DeviceSpec::new(Platform::Cpu, "here")], ..SnapshotSpec::default() };
    for (id, backend, priority) in [("a.rms", "a", 60), ("b.rms", "b", 50)] {
        let mut kernel = KernelDescriptor::new(id, "norm.rms", backend);
        kernel.platforms = vec![Platform::Cpu];
        kernel.dtypes = DTypeSet::of(&[DType::F32]);
        kernel.layouts = vec![Layout::Strided];
        kernel.priority = priority;
        spec.backend(BackendDescriptor::native(backend, "1", vec![Platform::Cpu]));
        spec.kernels.push(Arc::new(kernel));
    }
    spec.perf = Arc::new(Measured(BTreeMap::from([("a.rms", a), ("b.rms", b)])));
    change(&mut spec);
    let shape = [128, 64];
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape));
    let query = Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query;
    spec.build(1).unwrap().select(&query).why().unwrap().to_string()
}

#[test]
fn a_tie_is_called_a_tie() {
    let text = sentence((267.0, 60.0), (215.0, 10.0), |_| ());
    let expected = "tied with b.rms, fastest measured: 267.0 µs and 215.0 µs, differences up to 60.0 µs are noise; \
                    it has the higher declared priority";
    assert_eq!(text, expected);
    assert_eq!(sentence((267.0, 6.0), (215.0, 10.0), |_| ()), "fastest measured");
}

#[test]
fn what_the_policy_put_behind_is_not_forgotten() {
    let text = sentence((267.0, 6.0), (215.0, 6.0), |spec| spec.policy = PolicySpec::default().avoid_source("b"));
    assert_eq!(text, "fastest measured except b.rms (215.0 µs), which the policy ranks lower");
    let text = sentence((267.0, 6.0), (215.0, 6.0), |spec| spec.policy = PolicySpec::default().deny("b.*"));
    assert_eq!(text, "the only kernel that can serve this call");
}
