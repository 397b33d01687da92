//! What a policy does to a selection: against an independent model on random worlds, and case by case.

#[allow(dead_code)] // shared with soundness.rs, which uses all of it
mod world;

use std::sync::Arc;

use lz_model::*;
use lz_select::*;
use proptest::prelude::*;
use world::{RandomCall, World, call, world};

// --- random worlds ------------------------------------------------------------------------------

/// What the rules of a world come to for a call, in plain code over the rules as they were drawn.
struct Model<'a> {
    world: &'a World,
    call: &'a RandomCall,
}

impl Model<'_> {
    /// The targets of the rules of a kind that apply, in order.
    fn targets(&self, kind: u8) -> Vec<usize> {
        let holds = |rule: &&(world::Cond, u8, usize)| rule.1 == kind && rule.0.holds(&self.call.sizes);
        self.world.rules.iter().filter(holds).map(|rule| rule.2).collect()
    }

    fn named(&self, kind: u8, id: &str) -> bool {
        self.targets(kind).iter().any(|target| id == format!("k{target:02}"))
    }

    fn forbidden(&self, kernel: &KernelDescriptor) -> bool {
        self.named(3, &kernel.id) || self.targets(8).iter().any(|&target| kernel.priority < 5 * target as i32)
    }

    fn lock(&self) -> Option<String> {
        self.targets(4).first().map(|target| format!("k{target:02}"))
    }
}

/// The ids of the accepted kernels, best first.
fn ranked(snapshot: &Snapshot, decision: &Decision) -> Vec<String> {
    decision.ranked().map(|c| snapshot.kernel(c.kernel).id.clone()).collect()
}

/// The same world with kernels that take nearly every call, so that there is much to be put in order.
fn with_generous_kernels(mut world: World) -> World {
    for kernel in &mut world.kernels {
        let generous = &mut kernel.descriptor;
        (generous.platforms, generous.min_sm) = (vec![Platform::Cuda], None);
        (generous.dtypes, generous.layouts) = (DTypeSet::FLOATS, vec![Layout::Strided]);
        generous.operation = "attention".into();
        generous.dims.values_mut().for_each(|rule| *rule = DimRule::default());
        generous.conditions.clear();
        (generous.workspace, generous.grid) = (None, None);
        (generous.deterministic, generous.graph_safe, generous.shares_kv_heads) = (true, true, true);
        generous.params.insert("causal".into(), ParamRule::default());
    }
    world
}

/// The same world with only some of its rules. The others stay and name nobody: their conditions cut the cells, and so
/// say at which shape speed is judged.
fn with_rules(world: &World, keep: impl Fn(u8) -> bool) -> World {
    let mut world = world.clone();
    for (_, kind, target) in world.rules.iter_mut().filter(|rule| !keep(rule.1)) {
        (*kind, *target) = (0, 99);
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// Whoever is legal, not forbidden and not locked out is accepted, and nobody else; whatever
    /// preferences, boosts, priorities and overrides say. So a deny always wins, a lock on a valid
    /// kernel always wins, and a lock on an invalid one leaves nothing.
    #[test]
    fn denials_and_locks_decide_who_may_run(world in world(), c in call()) {
        let free = with_rules(&world, |_| false).spec().build(1).unwrap();
        let legal = ranked(&free, &free.select(&c.query()));
        let snapshot = world.spec().build(1).unwrap();
        let decision = snapshot.select(&c.query());
        let model = Model { world: &world, call: &c };
        let lock = model.lock();
        for candidate in &decision.candidates {
            let kernel = snapshot.kernel(candidate.kernel);
            let locked_out = lock.as_ref().is_some_and(|lock| *lock != kernel.id);
            let expected = legal.contains(&kernel.id) && !model.forbidden(kernel) && !locked_out;
            prop_assert_eq!(candidate.accepted(), expected, "{} {:?}", kernel.id, candidate.reasons);
            let denied = candidate.reasons.iter().any(|r| matches!(r, Reason::PolicyDenied { .. }));
            prop_assert_eq!(denied, model.forbidden(kernel));
            let says_locked = candidate.reasons.iter().any(|r| matches!(r, Reason::PolicyLocked { .. }));
            prop_assert_eq!(says_locked, locked_out);
        }
        if let Some(lock) = lock {
            prop_assert!(decision.chosen().is_none_or(|chosen| snapshot.kernel(chosen.kernel).id == lock));
            prop_assert_eq!(decision.basis, Basis::Locked);
        }
    }

    /// An override puts its kernels first and a fallback puts its best one second; otherwise the
    /// order is what it is without them.
    #[test]
    fn overrides_and_fallbacks_only_change_the_order(world in world(), c in call(), generous in any::<bool>()) {
        let world = if generous { with_generous_kernels(world) } else { world };
        let plain = with_rules(&world, |kind| kind != 5 && kind != 7).spec().build(1).unwrap();
        let mut expected = ranked(&plain, &plain.select(&c.query()));
        let model = Model { world: &world, call: &c };
        let in_force = |kind: u8, ranking: &[String]| {
            let ids = model.targets(kind).into_iter().map(|target| format!("k{target:02}"));
            ids.into_iter().find(|id| ranking.contains(id))
        };
        let overridden = in_force(5, &expected);
        if let Some(first) = &overridden {
            let (mut front, back): (Vec<_>, Vec<_>) = expected.into_iter().partition(|id| id == first);
            front.extend(back);
            expected = front;
        }
        if let Some(next) = in_force(7, &expected)
            && let Some(at) = expected.iter().position(|id| *id == next).filter(|&at| at > 1)
        {
            let id = expected.remove(at);
            expected.insert(1, id);
        }
        let snapshot = world.spec().build(1).unwrap();
        let decision = snapshot.select(&c.query());
        prop_assert_eq!(ranked(&snapshot, &decision), expected);
        prop_assert_eq!(decision.overridden_by.is_some(), overridden.is_some());
    }

    /// Points and priorities are what the rules that apply come to.
    #[test]
    fn points_and_priorities_add_up(world in world(), c in call()) {
        let snapshot = world.spec().build(1).unwrap();
        let decision = snapshot.select(&c.query());
        let model = Model { world: &world, call: &c };
        for candidate in decision.candidates.iter().filter(|x| x.accepted()) {
            let kernel = snapshot.kernel(candidate.kernel);
            let times = |kind: u8| model.targets(kind).iter().filter(|t| kernel.id == format!("k{t:02}")).count() as f64;
            prop_assert_eq!(candidate.terms.policy, 20.0 * times(0) - 50.0 * times(1) + 15.0 * times(2));
            let names = |(cond, kind, target): &&(world::Cond, u8, usize)| {
                *kind == 6 && cond.holds(&c.sizes) && kernel.id == format!("k{target:02}")
            };
            let priority = world.rules.iter().find(names).map_or(kernel.priority, |(cond, _, _)| cond.priority());
            prop_assert_eq!(candidate.terms.priority, f64::from(priority));
        }
    }

    /// The trace says of every rule whether it applied, and what it did agrees with the decision.
    #[test]
    fn the_trace_agrees_with_the_decision(world in world(), c in call()) {
        let snapshot = world.spec().build(1).unwrap();
        let decision = snapshot.select(&c.query());
        let trace = snapshot.trace(&decision);
        prop_assert_eq!(trace.len(), world.rules.len());
        for (rule, (cond, _, _)) in trace.iter().zip(&world.rules) {
            prop_assert_eq!(rule.applied, cond.holds(&c.sizes));
            prop_assert!(rule.applied || rule.effects.is_empty());
        }
        let applied: Vec<&str> = trace.iter().filter(|r| r.applied).map(|r| r.name.as_str()).collect();
        prop_assert_eq!(applied, decision.rules.iter().map(String::as_str).collect::<Vec<_>>());
        for candidate in &decision.candidates {
            let effects = || trace.iter().flat_map(|r| &r.effects).filter(|(k, _)| *k == candidate.kernel).map(|(_, e)| e);
            let out = effects().any(|e| matches!(e, Effect::Denied | Effect::LockedOut));
            let says = candidate.reasons.iter().any(|r| matches!(r.code(), "POLICY_DENIED" | "POLICY_LOCKED"));
            prop_assert_eq!(out, says);
            if candidate.accepted() {
                let points: i32 = effects().map(|e| if let Effect::Points { points } = e { *points } else { 0 }).sum();
                prop_assert_eq!(f64::from(points), candidate.terms.policy);
            }
        }
        let first = trace.iter().flat_map(|r| &r.effects).find(|(_, e)| *e == Effect::PutFirst);
        prop_assert_eq!(first.map(|(k, _)| *k), first.and(decision.chosen()).map(|x| x.kernel));
    }

    /// What the analysis calls impossible never applies, and what it calls shadowed can be left out.
    #[test]
    fn what_the_analysis_finds_is_true(world in world(), calls in prop::collection::vec(call(), 1..20)) {
        let spec = world.spec();
        let snapshot = spec.build(1).unwrap();
        let findings = analyse(&spec.policy, &snapshot);
        for finding in &findings {
            match &finding.kind {
                FindingKind::NeverMatches { .. } => {
                    let (cond, _, _) = &world.rules[finding.index];
                    prop_assert!(calls.iter().all(|c| !cond.holds(&c.sizes)), "{finding}");
                }
                FindingKind::Shadowed { .. } => {
                    let mut without = spec.clone();
                    without.policy.rules[finding.index].action = Action::Prefer(Pattern::Kernel("nobody".into()));
                    let without = without.build(1).unwrap();
                    for c in &calls {
                        let (a, b) = (snapshot.select(&c.query()), without.select(&c.query()));
                        prop_assert_eq!(ranked(&snapshot, &a), ranked(&without, &b), "{}", finding);
                    }
                }
                _ => {}
            }
        }
    }
}

// --- random names ---------------------------------------------------------------------------------

/// Kernels with ids, aliases, backends and libraries out of few words, so that names meet.
#[derive(Clone, Debug)]
struct Called {
    id: String,
    aliases: Vec<String>,
    backend: String,
    library: Option<String>,
}

fn called() -> impl Strategy<Value = Called> {
    let word = || prop::sample::select(vec!["a", "ab", "a_2", "b", "b_x"]);
    let dotted = move || (word(), word()).prop_map(|(first, second)| format!("{first}.{second}"));
    (dotted(), prop::collection::vec(dotted(), 0..3), word(), prop::option::of(word())).prop_map(
        |(id, aliases, backend, library)| Called {
            id,
            aliases,
            backend: backend.into(),
            library: library.map(str::to_owned),
        },
    )
}

/// A name a rule may use: one of those words, an id, or the beginning of either with a star.
fn target() -> impl Strategy<Value = String> {
    let word = || prop::sample::select(vec!["a", "ab", "a_2", "b", "b_x", "c"]);
    prop_oneof![
        word().prop_map(str::to_owned),
        (word(), word()).prop_map(|(first, second)| format!("{first}.{second}")),
        word().prop_map(|word| format!("{word}*")),
        word().prop_map(|word| format!("{word}.*")),
    ]
}

/// Whether a name means a kernel, in plain code.
fn means(name: &str, source: bool, kernel: &Called) -> bool {
    let is = |called: &str| match name.strip_suffix('*') {
        Some(beginning) => called.starts_with(beginning),
        None => called == name,
    };
    let library = kernel.library.as_deref().unwrap_or(&kernel.backend);
    let from = is(&kernel.backend) || is(library);
    from || (!source && (is(&kernel.id) || kernel.aliases.iter().any(|alias| is(alias))))
}

fn world_of(kernels: &[Called], policy: PolicySpec) -> Snapshot {
    let device = DeviceSpec::new(Platform::Cuda, "made-up").completed(&GenerationTable::builtin());
    let mut spec = SnapshotSpec { devices: vec![device], policy, ..SnapshotSpec::default() };
    for (i, called) in kernels.iter().enumerate() {
        let mut kernel = kernel(&called.id, "attention");
        (kernel.version, kernel.backend) = (i.to_string(), called.backend.clone());
        (kernel.aliases, kernel.library) = (called.aliases.clone(), called.library.clone());
        spec.backend(BackendDescriptor::native(kernel.backend.clone(), "1", vec![Platform::Cuda]));
        spec.kernels.push(Arc::new(kernel));
    }
    spec.build(1).unwrap_or_else(|problems| panic!("{problems:?}"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// Random policies against random sets of kernels: who is denied, locked out and preferred is who is meant, a name
    /// is refused exactly if it means nobody, and a lock exactly if denials leave nothing of it.
    #[test]
    fn names_mean_what_plain_code_says(
        kernels in prop::collection::vec(called(), 1..6),
        rules in prop::collection::vec((0u8..5, target(), any::<bool>(), any::<bool>()), 1..5),
    ) {
        let mut policy = PolicySpec::default();
        for (i, (kind, name, source, optional)) in rules.iter().enumerate() {
            let pattern = if *source { Pattern::Source(name.clone()) } else { Pattern::Kernel(name.clone()) };
            let action = match kind {
                0 => Action::Prefer(pattern),
                1 => Action::Avoid(pattern),
                2 => Action::Deny(pattern),
                3 => Action::Override(pattern),
                _ => Action::Lock(pattern),
            };
            policy = policy.rule(&format!("r{i}"), Some("attention"), Condition::Always, action);
            policy.rules[i].optional = *optional;
        }
        let snapshot = world_of(&kernels, policy.clone());
        let meant = |rule: &(u8, String, bool, bool), kernel: &Called| means(&rule.1, rule.2, kernel);
        let anybody = |rule: &(u8, String, bool, bool)| kernels.iter().any(|kernel| meant(rule, kernel));
        let denied = |kernel: &Called| rules.iter().any(|rule| rule.0 == 2 && meant(rule, kernel));
        // An optional lock on nobody does nothing; of the others the first is in force.
        let lock = rules.iter().position(|rule| rule.0 == 4 && (anybody(rule) || !rule.3));
        let decision = snapshot.select(&attention(true, 8));
        prop_assert_eq!(decision.candidates.len(), kernels.len());
        for candidate in &decision.candidates {
            let version: usize = snapshot.kernel(candidate.kernel).version.parse().unwrap();
            let kernel = &kernels[version];
            let says = |code: &str| candidate.reasons.iter().any(|reason| reason.code() == code);
            prop_assert_eq!(says("POLICY_DENIED"), denied(kernel), "{:?}", kernel);
            prop_assert_eq!(says("POLICY_LOCKED"), lock.is_some_and(|at| !meant(&rules[at], kernel)), "{:?}", kernel);
            if candidate.accepted() {
                let times = |kind: u8| rules.iter().filter(|rule| rule.0 == kind && meant(rule, kernel)).count() as f64;
                prop_assert_eq!(candidate.terms.policy, 20.0 * times(0) - 50.0 * times(1));
            }
        }
        let refused: Vec<usize> = refusals(&policy, &snapshot).iter().map(|finding| finding.index).collect();
        for (i, rule) in rules.iter().enumerate() {
            let pattern = policy.rules[i].action.pattern().unwrap();
            prop_assert_eq!(snapshot.knows(pattern), anybody(rule), "{:?}", rule);
            let nothing_left = rule.0 == 4 && lock == Some(i) && kernels.iter().all(|k| !meant(rule, k) || denied(k));
            let nearly = snapshot.nearest_name(pattern).is_some();
            let unknown = !anybody(rule) && (rule.0 != 1 || nearly);
            let expected = !rule.3 && (unknown || nothing_left);
            prop_assert_eq!(refused.contains(&i), expected, "{:?} in {:?}", rule, &refused);
        }
        let findings = analyse(&policy, &snapshot);
        let wrong: Vec<usize> =
            findings.iter().filter(|f| f.severity == Severity::Error).map(|f| f.index).collect();
        prop_assert_eq!(wrong, refused, "one verdict");
    }
}

/// `LZ_TEST_SCALE=full` runs a hundred times as many cases.
fn cases() -> u32 {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => 25_600,
        _ => 256,
    }
}

// --- case by case -------------------------------------------------------------------------------

fn kernel(id: &str, operation: &str) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, operation, id.split('.').next().unwrap_or(id));
    kernel.platforms = vec![Platform::Cuda];
    kernel.dtypes = DTypeSet::FLOATS;
    kernel.layouts = vec![Layout::Bshd, Layout::Bhsd, Layout::Contiguous, Layout::Strided];
    for param in ["causal", "eps"] {
        if Catalog::get()
            .find(operation)
            .unwrap()
            .ops
            .iter()
            .all(|&op| Catalog::get().op(op).param_index(param).is_some())
        {
            kernel.params.insert(param.into(), ParamRule::default());
        }
    }
    if operation == "attention" {
        kernel.dims.insert("head_dim".into(), DimRule::default());
    }
    kernel.shares_kv_heads = true;
    kernel
}

fn snapshot(kernels: &[(&str, &str)], policy: PolicySpec) -> Snapshot {
    let mut device = DeviceSpec::new(Platform::Cuda, "made-up");
    device.sm = Some(80);
    let mut spec =
        SnapshotSpec { devices: vec![device.completed(&GenerationTable::builtin())], ..SnapshotSpec::default() };
    for (id, operation) in kernels {
        let kernel = kernel(id, operation);
        spec.backend(BackendDescriptor::native(kernel.backend.clone(), "1", vec![Platform::Cuda]));
        spec.kernels.push(Arc::new(kernel));
    }
    spec.policy = policy;
    spec.build(1).unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn attention(causal: bool, seq: i64) -> Query {
    let shape = [2, seq, 4, 64];
    let tensor = || TensorMeta::new(DType::F16, &shape);
    let call = NamedCall::new()
        .input("query", tensor())
        .input("key", tensor())
        .input("value", tensor())
        .param("causal", ParamValue::Bool(causal))
        .layout(Layout::Bshd);
    Catalog::get().resolve("attention", &call, &BindRules::default(), |_| None).unwrap().1.query
}

fn norm() -> Query {
    let shape = [4, 64];
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F16, &shape));
    Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query
}

const KERNELS: &[(&str, &str)] = &[
    ("flash_attn.v2.causal", "attention"),
    ("torch.sdpa.math", "attention"),
    ("xformers.memory_efficient", "attention"),
    ("torch.rms_norm", "norm.rms"),
];

fn chosen(policy: PolicySpec, query: &Query) -> Option<String> {
    let snapshot = snapshot(KERNELS, policy);
    let decision = snapshot.select(query);
    decision.chosen().map(|c| snapshot.kernel(c.kernel).id.clone())
}

fn name(text: &str) -> Pattern {
    Pattern::Name(text.into())
}

#[test]
fn an_alias_that_fixes_a_parameter_is_about_calls_with_it() {
    let policy = || PolicySpec::default().lock("attention.causal", "xformers.*");
    assert_eq!(chosen(policy(), &attention(true, 8)).as_deref(), Some("xformers.memory_efficient"));
    assert_eq!(chosen(policy(), &attention(false, 8)).as_deref(), Some("flash_attn.v2.causal"));
}

#[test]
fn operations_go_by_id_alias_function_and_glob() {
    let denied = |operation: &str, query: &Query| {
        let deny = Action::Deny(Pattern::Kernel("*".into()));
        chosen(PolicySpec::default().rule("r", Some(operation), Condition::Always, deny), query).is_none()
    };
    for operation in ["attention", "attention.standard.prefill", "attention.*", "attention.c*", "*"] {
        assert!(denied(operation, &attention(true, 8)), "{operation}");
    }
    for operation in ["attention.full", "attention.mla", "norm.*", "rms_norm", "attention.f*"] {
        assert!(!denied(operation, &attention(true, 8)), "{operation}");
    }
    assert!(denied("rms_norm", &norm()) && denied("n*", &norm()));
    let filter = Action::Filter("true".into());
    let bad = RuleSpec::new("r".into(), Some("atention.*".into()), Condition::Always, filter);
    assert!(matches!(bad.check(), Err(PolicyError::UnknownOperation { .. })));
}

#[test]
fn a_lock_without_an_operation_is_about_what_its_kernels_serve() {
    let lock = |pattern| PolicySpec::default().rule("lock", None, Condition::Always, Action::Lock(pattern));
    assert_eq!(chosen(lock(name("torch_sdpa")), &attention(true, 8)).as_deref(), Some("torch.sdpa.math"));
    assert_eq!(chosen(lock(name("torch_sdpa")), &norm()).as_deref(), Some("torch.rms_norm"));
    // A document may name a kernel of a library that is not here; an id in a lock is a demand.
    let missing = |pattern| {
        let policy = PolicySpec::default().rule("lock", Some("attention"), Condition::Always, Action::Lock(pattern));
        chosen(policy, &attention(true, 8))
    };
    assert_eq!(missing(name("flash_attention_v9")).as_deref(), Some("flash_attn.v2.causal"));
    assert_eq!(missing(Pattern::Kernel("flash_attn.v9".into())), None);
}

#[test]
fn a_list_of_patterns_matches_any_of_them() {
    let any = FieldPattern::Any(vec!["float16".into(), "bfloat16".into()]);
    let condition = Condition::All(vec![
        Condition::Match(vec![("dtype".into(), any), ("sm".into(), ">=80".into())]),
        Condition::When("seq_len > 100".into()),
    ]);
    let policy = PolicySpec::default().rule("long", None, condition, Action::Override(name("torch_sdpa")));
    assert_eq!(chosen(policy.clone(), &attention(true, 200)).as_deref(), Some("torch.sdpa.math"));
    assert_eq!(chosen(policy, &attention(true, 8)).as_deref(), Some("flash_attn.v2.causal"));
}

#[test]
fn a_filter_names_itself_in_the_reason() {
    let filter = Action::Filter("deterministic == true".into());
    let snapshot = snapshot(KERNELS, PolicySpec::default().rule("a.yaml:3", None, Condition::Always, filter));
    let decision = snapshot.select(&norm());
    let rule = Denial::Rule("a.yaml:3: only kernels with deterministic == true".to_owned());
    assert_eq!(decision.candidates[0].reasons, [Reason::PolicyDenied { rule }]);
}

// --- analysis -----------------------------------------------------------------------------------

fn findings(policy: &PolicySpec) -> Vec<String> {
    let snapshot = snapshot(KERNELS, PolicySpec::default());
    analyse(policy, &snapshot).iter().map(|f| format!("{:?} {f}", f.severity)).collect()
}

fn when(text: &str) -> Condition {
    Condition::When(text.into())
}

#[test]
fn unknown_names_are_found_with_the_nearest() {
    let policy = PolicySpec::default()
        .rule("a", None, Condition::Always, Action::Prefer(Pattern::Kernel("flash_atn.v2.*".into())))
        .rule("b", None, Condition::Always, Action::Avoid(Pattern::Source("xformer".into())))
        .rule("c", None, Condition::Always, Action::Override(name("flash_attention_v2")))
        .rule("d", None, Condition::Always, Action::Filter("determinstic".into()))
        .rule("e", Some("atention"), Condition::Always, Action::Deny(name("torch_sdpa")));
    let found = findings(&policy);
    assert_eq!(found.len(), 4, "{found:#?}");
    assert_eq!(found[0], "Error a: no kernel is called 'flash_atn.v2.*'; did you mean 'flash_attn.v2.causal'?");
    assert_eq!(found[1], "Error b: no library is called 'xformer'; did you mean 'xformers'?");
    assert!(found[2].starts_with("Error d: ") && found[2].contains("did you mean `deterministic`?"), "{}", found[2]);
    assert!(found[3].ends_with("unknown operation 'atention'; did you mean 'attention'?"), "{}", found[3]);
}

#[test]
fn contradictions_are_found_and_other_machines_are_noted() {
    let deny = || Action::Deny(Pattern::Kernel("torch.*".into()));
    let never = [
        "seq_q > 10 and seq_q < 5",
        "dtype == float16 and dtype == bfloat16",
        "seq_q % 8 == 0 and seq_q % 8 == 3",
        "seq_k < 0",
    ];
    for text in never {
        let found = findings(&PolicySpec::default().rule("r", Some("attention"), when(text), deny()));
        assert_eq!(found, [format!("Error r: can never match: {text}")]);
    }
    let elsewhere = ["sm >= 90", "platform == rocm", "platform == cpu and batch > 4", "not has_tensor_cores"];
    for text in elsewhere {
        let found = findings(&PolicySpec::default().rule("r", None, when(text), deny()));
        assert_eq!(found, [format!("Note r: matches no device of this machine: {text}")]);
    }
    let possible =
        ["seq_q > 5 and seq_q < 10", "sm >= 80", "dtype in [float16, bfloat16] and causal", "seq_q * batch < 10"];
    for text in possible {
        assert_eq!(
            findings(&PolicySpec::default().rule("r", None, when(text), deny())),
            Vec::<String>::new(),
            "{text}"
        );
    }
}

#[test]
fn rules_that_do_nothing_are_found() {
    let lock = |id: &str| Action::Lock(Pattern::Kernel(id.into()));
    let deny = |id: &str| Action::Deny(Pattern::Kernel(id.into()));
    let prefer = |id: &str| Action::Prefer(Pattern::Kernel(id.into()));
    let two = |a: (Condition, Action), b: (Condition, Action)| {
        let policy =
            PolicySpec::default().rule("a", Some("attention"), a.0, a.1).rule("b", Some("attention"), b.0, b.1);
        findings(&policy)
    };
    let always = || Condition::Always;
    let shadowed = ["Warning b: has no effect: 'a' decides whenever it would"];
    assert_eq!(two((always(), lock("torch.*")), (when("sm >= 80"), lock("xformers.*"))), shadowed);
    assert_eq!(two((when("seq_q > 10"), deny("torch.*")), (when("seq_q > 20"), deny("torch.sdpa.*"))), shadowed);
    assert_eq!(two((when("sm >= 80"), deny("torch.*")), (when("sm >= 80"), deny("torch.*"))), shadowed);
    assert_eq!(two((always(), deny("torch.*")), (when("causal"), prefer("torch.sdpa.math"))), shadowed);
    assert_eq!(two((always(), lock("torch.*")), (always(), prefer("xformers.*"))), shadowed);
    let none: [&str; 0] = [];
    assert_eq!(two((when("seq_q > 20"), deny("torch.*")), (when("seq_q > 10"), deny("torch.*"))), none);
    assert_eq!(two((always(), deny("torch.sdpa.*")), (always(), deny("*"))), none);
    assert_eq!(two((when("causal"), lock("torch.*")), (always(), lock("xformers.*"))), none);
    assert_eq!(two((always(), prefer("torch.*")), (always(), prefer("torch.*"))), none, "preferences add up");
    assert_eq!(
        two((always(), lock("torch.*")), (always(), deny("torch.*"))),
        ["Error a: leaves no kernel for attention.standard.prefill: all it names are denied by 'b'"],
        "a deny wins over a lock"
    );
}
