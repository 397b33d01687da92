//! Replaying lockfiles in random worlds.

use layerzero::Locked;
use proptest::prelude::*;

use super::world::{MadeUpTimes, RandomCall, World, call, variant, world};
use super::*;

/// Times that are the same for all sizes of a performance bucket: what cuts buckets finer changes no time.
struct ByBucket(MadeUpTimes);

impl PerfSource for ByBucket {
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate> {
        let dims = facts.query.dims().map(|size| (size.max(0) as u64).next_power_of_two() as i64);
        self.0.estimate(kernel, &Facts { query: &facts.query.with_dims(dims), ..*facts })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

pub fn by_bucket((seed, known_fraction): (u64, u64)) -> Arc<dyn PerfSource> {
    Arc::new(ByBucket(MadeUpTimes { seed, known_fraction }))
}

/// An engine that is a random world.
pub fn engine_of(world: &World, perf: Arc<dyn PerfSource>) -> Engine {
    let engine = engine_on(vec![world.device()]);
    engine.update(|spec| *spec = SnapshotSpec { perf, ..world.spec() }).unwrap();
    engine
}

/// A random call, written down.
pub fn spec_of(call: &RandomCall) -> CallSpec {
    let s = &call.sizes;
    let shape = |seq, heads| match call.layout {
        Layout::Bshd => vec![s.batch, seq, heads, s.head_dim],
        _ => vec![s.batch, heads, seq, s.head_dim],
    };
    let tensor = |shape: Vec<i64>| {
        let last = call.last_stride;
        let strides = vec![shape[1] * shape[2] * shape[3] * last, shape[2] * shape[3] * last, shape[3] * last, last];
        TensorSpec { dtype: call.dtype, strides: Some(strides), shape }
    };
    let mut spec =
        CallSpec::new("attention").param("causal", call.causal).param("softcap", call.softcap).layout(call.layout);
    spec.tensors.insert("query".into(), tensor(shape(s.seq_q, s.heads)));
    spec.tensors.insert("key".into(), tensor(shape(s.seq_k, s.kv_heads)));
    spec.tensors.insert("value".into(), tensor(shape(s.seq_k, s.kv_heads)));
    if let Some(dtype) = call.mask {
        spec = spec.tensor("attn_mask", dtype, &[s.seq_q, s.seq_k]);
    }
    spec
}

fn eager(call: RandomCall) -> RandomCall {
    RandomCall { deterministic: false, capturing: false, ..call }
}

/// The kernel that is chosen, with its version.
fn chosen(engine: &Engine, query: &Query) -> Option<(String, String)> {
    engine.with_snapshot(|snapshot| {
        let decision = snapshot.select(query);
        let kernel = snapshot.kernel(decision.chosen()?.kernel);
        Some((kernel.id.clone(), kernel.version.clone()))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(96)))]

    /// The calls of these worlds are the same whether made or written down.
    #[test]
    fn calls_are_written_as_they_are_made(world in world(), c in call()) {
        let (engine, call) = (engine_of(&world, by_bucket(world.perf)), eager(c));
        prop_assert_eq!(query(&engine, &spec_of(&call), false), call.query());
    }

    /// What was decided is decided again, whatever was measured in the meantime; also for captured calls. Only calls
    /// that a class does not tell apart, decided differently, are left to selection, and told.
    #[test]
    fn replay_reproduces_every_decision(
        world in world(), base in call(), others in prop::collection::vec(variant(), 1..20), other_seed in any::<u64>(),
    ) {
        let calls: Vec<RandomCall> = others.into_iter().map(|v| eager(v.of(&base))).collect();
        let then = engine_of(&world, by_bucket(world.perf));
        let asked: Vec<(CallSpec, DeviceIx)> = calls.iter().map(|c| (spec_of(c), DeviceIx(0))).collect();
        let (lockfile, left_out) = then.lockfile_of(&asked).unwrap();
        let lockfile = Lockfile::parse(&lockfile.to_string()).unwrap();
        let now = engine_of(&world, by_bucket((other_seed, world.perf.1)));
        let mismatches = now.replay(&lockfile, "x").unwrap();
        prop_assert!(mismatches.iter().all(|m| m.code() == "AMBIGUOUS"), "{:?}", mismatches);
        let told = |call: &CallSpec, graph: bool| {
            let at = lockfile.entries.iter().position(|e| e.call == *call && e.graph == graph);
            at.is_some_and(|at| mismatches.iter().any(|m| m.entry == format!("call {}", at + 1)))
        };
        for (i, c) in calls.iter().enumerate() {
            let left = left_out.iter().any(|(number, _)| *number == i);
            for capturing in [false, true] {
                let query = RandomCall { capturing, ..c.clone() }.query();
                let decided = chosen(&then, &query);
                let canonical = CallSpec::canonical(&asked[i].0.named(DeviceIx(0), Context::default()), &bound(&then, &asked[i].0));
                if left || told(&canonical, false) || told(&canonical, true) {
                    prop_assert!(!left || capturing || decided.is_none());
                    continue;
                }
                prop_assert_eq!(chosen(&now, &query), decided, "{:?} capturing: {}", c, capturing);
            }
        }
    }

    /// With any pins whatever: the pinned kernel is chosen exactly when it may serve and nobody stands above; who may
    /// serve is what it is without pins; calls that no pin covers are decided as without; the cache agrees.
    #[test]
    fn pins_decide_what_they_are_about_and_nothing_else(
        world in world(), base in call(), pinned in prop::collection::vec((variant(), 0usize..11), 1..12),
        others in prop::collection::vec(variant(), 1..25),
    ) {
        let plain = engine_of(&world, by_bucket(world.perf));
        let locked = engine_of(&world, by_bucket(world.perf));
        let device = world.device().signature();
        let mut entries: Vec<(Query, Locked)> = Vec::new();
        for (v, target) in pinned {
            let call = eager(v.of(&base));
            let query = call.query();
            // One entry for each class and size.
            if entries.iter().any(|(known, _)| known.pinned_class() == query.pinned_class() && known.dims() == query.dims()) {
                continue;
            }
            let (kernel, call) = (format!("k{target:02}"), spec_of(&call));
            let locked = Locked {
                device: device.clone(), call, graph: false, kernel, version: None, time_us: None, baseline: None,
                baseline_us: None, basis: None,
            };
            entries.push((query, locked));
        }
        let lockfile = Lockfile { entries: entries.iter().map(|(_, e)| e.clone()).collect(), ..Lockfile::default() };
        let mismatches = locked.replay(&lockfile, "x").unwrap();
        let asked = entries.iter().map(|(q, _)| *q).chain(others.into_iter().map(|v| v.of(&base).query()));
        for query in asked.collect::<Vec<_>>() {
            let without = plain.with_snapshot(|s| s.select(&query));
            let (with, planned) = locked.with_snapshot(|s| { let d = s.select(&query); let p = s.chain(&d); (d, p) });
            prop_assert_eq!(locked.chain(&query), planned, "cached");
            let reasons = |d: &Decision| d.candidates.iter().map(|c| c.reasons.clone()).collect::<Vec<_>>();
            prop_assert_eq!(reasons(&with), reasons(&without));
            let id = |d: &Decision, i: usize| plain.with_snapshot(|s| s.kernel(d.candidates[i].kernel).id.clone());
            // Calls under capture are covered too.
            let alike = |q: &Query| {
                let capturing = query.context().capturing;
                let theirs = if capturing { with_capture(&locked, &entries, q) } else { *q };
                theirs.pinned_class() == query.pinned_class() && theirs.dims() == query.dims()
            };
            let entry = entries.iter().position(|(q, _)| alike(q));
            let Some(entry) = entry else {
                prop_assert_eq!(&with.ranking, &without.ranking);
                prop_assert_eq!(&with.pinned_by, &None);
                continue;
            };
            let kernel = &entries[entry].1.kernel;
            let legal = without.ranking.iter().any(|&i| id(&without, i) == *kernel);
            let above = without.overridden_by.is_some() || without.basis == Basis::Locked;
            if legal && !above {
                prop_assert_eq!(&id(&with, with.ranking[0]), kernel);
                prop_assert_eq!(with.pinned_by.as_deref(), Some("lockfile x"));
                let rest = |d: &Decision| d.ranking.iter().copied().filter(|&i| id(d, i) != *kernel).collect::<Vec<_>>();
                // A fallback rule names the second, whoever is first.
                if world.rules.iter().all(|(_, kind, _)| *kind != 7) {
                    prop_assert_eq!(rest(&with), rest(&without), "the order of the others stays");
                }
            } else if !legal {
                prop_assert_eq!(&with.ranking, &without.ranking);
            }
            let kept = with.chosen().is_some_and(|c| plain.with_snapshot(|s| s.kernel(c.kernel).id == *kernel));
            if !query.context().capturing && entries[entry].0 == query {
                let told = mismatches.iter().any(|m| m.entry == format!("call {}", entry + 1));
                prop_assert_eq!(kept, !told, "an entry is in force, or told: {:?}", mismatches);
            }
        }
    }
}

fn bound(engine: &Engine, call: &CallSpec) -> Bound {
    engine.bind(&call.op, &call.named(DeviceIx(0), Context::default())).unwrap().1
}

/// The query of an entry's call under capture.
fn with_capture(engine: &Engine, entries: &[(Query, Locked)], eager: &Query) -> Query {
    let (_, entry) = entries.iter().find(|(query, _)| query == eager).unwrap();
    query(engine, &entry.call, true)
}
