//! Making tables, and following them.

use layerzero::{Buckets, DispatchTable, SolveRequest, Solved};
use proptest::prelude::*;

use super::replayed::{by_bucket, engine_of, spec_of};
use super::world::{RandomCall, call, variant, world};
use super::*;

fn solve(engine: &Engine, buckets: &[(&str, &[i64])], calls: Vec<CallSpec>) -> Solved {
    let buckets = Buckets::new(buckets.iter().map(|(axis, ends)| (*axis, ends.to_vec()))).unwrap();
    engine.solve(&SolveRequest { model_id: "m".into(), device: DeviceIx(0), buckets, calls }).unwrap()
}

#[test]
fn each_bucket_gets_the_kernel_of_its_call() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    timed(&engine, &[("a.rms", 100, 9.0), ("b.rms", 100, 5.0), ("a.rms", 512, 9.0), ("b.rms", 512, 20.0)]);
    let solved = solve(&engine, &[("rows", &[128, 512, 2048])], vec![rms(512), rms(100)]);
    assert_eq!((solved.outside.len(), solved.impossible.len(), solved.disagreements.len()), (0, 0, 0));
    let table = solved.table;
    assert_eq!((table.hardware_signature.as_str(), table.model_id.as_str()), ("cpu__baseline", "m"));
    let told: Vec<(i64, &str, Option<f64>)> =
        table.plans.iter().map(|p| (p.bucket["rows"], p.ops[0].kernel_id.as_str(), p.ops[0].time_us)).collect();
    assert_eq!(told, [(128, "b.rms", Some(5.0)), (512, "a.rms", Some(9.0))]);
    assert_eq!(table.plans[0].ops[0].version.as_deref(), Some("1.0"));
    assert_eq!(DispatchTable::parse(&table.to_json()).unwrap(), table);
    timed(&engine, &[]);
    assert_eq!(engine.load_table(&table, "t").unwrap(), []);
    assert_eq!((serves(&engine, &rms(3)), serves(&engine, &rms(200))), ("b.rms".into(), "a.rms".into()));
    // To solve anew is to decide anew.
    assert_eq!(solve(&engine, &[("rows", &[128])], vec![rms(100)]).table.plans[0].ops[0].kernel_id, "a.rms");
}

#[test]
fn the_largest_call_of_a_bucket_decides_and_the_others_are_told() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    timed(&engine, &[("a.rms", 100, 9.0), ("b.rms", 100, 5.0), ("a.rms", 120, 9.0), ("b.rms", 120, 20.0)]);
    for calls in [vec![rms(100), rms(120)], vec![rms(120), rms(100), rms(100)]] {
        let solved = solve(&engine, &[("rows", &[128])], calls);
        let [plan] = &solved.table.plans[..] else { panic!() };
        assert_eq!((plan.ops.len(), plan.ops[0].kernel_id.as_str()), (1, "a.rms"));
        let [odd] = &solved.disagreements[..] else { panic!() };
        assert_eq!(
            (odd.op.as_str(), odd.taken.as_str(), &odd.others[..]),
            ("norm.rms", "a.rms", &["b.rms".to_owned()][..])
        );
        assert_eq!(odd.bucket, BTreeMap::from([("rows".to_owned(), 128)]));
    }
}

#[test]
fn calls_that_do_not_fit_are_told_by_their_number() {
    let engine = engine_with(&["a.rms"]);
    let integers = CallSpec::new("rms_norm").tensor("input", DType::I32, &[8, 64]);
    let solved = solve(&engine, &[("rows", &[128])], vec![rms(1), rms(129), integers]);
    assert_eq!(solved.outside, [(1, Reason::PlanBucketMiss { dim: "rows".into(), found: 129 })]);
    assert_eq!((solved.impossible.len(), solved.impossible[0].0), (1, 2));
    assert_eq!(solved.table.plans.len(), 1);
    let nowhere = SolveRequest { device: DeviceIx(3), ..SolveRequest::default() };
    assert_eq!(engine.solve(&nowhere).unwrap_err().code(), "UNKNOWN_DEVICE");
}

#[test]
fn operations_and_kinds_of_calls_share_the_plan_of_their_bucket() {
    let engine = engine_on(vec![host()]);
    let half = attention(4, 500, 500);
    let full = attention(4, 500, 500).param("causal", false);
    let decode = attention(4, 1, 500);
    let axes: [(&str, &[i64]); 2] = [("seq_len", &[128, 512]), ("batch", &[1, 4])];
    let solved = solve(&engine, &axes, vec![full, half, decode]);
    let told: Vec<(Vec<i64>, Vec<&str>)> = solved
        .table
        .plans
        .iter()
        .map(|p| (p.bucket.values().copied().collect(), p.ops.iter().map(|o| o.op.as_str()).collect()))
        .collect();
    // The one query of a decode lies in the first bucket of sequences, whatever the keys.
    let (decodes, prefill) = ("attention.standard.decode", "attention.standard.prefill");
    assert_eq!(told, [(vec![4, 128], vec![decodes]), (vec![4, 512], vec![prefill, prefill])]);
    engine.load_table(&solved.table, "t").unwrap();
    let pinned = |call: &CallSpec| {
        let named = call.named(DeviceIx(0), Context::default());
        engine.explain(&call.op, &named).unwrap().pinned_by.is_some()
    };
    assert!(pinned(&attention(2, 1, 129)) && pinned(&attention(3, 200, 200).param("causal", false)));
    assert!(!pinned(&attention(2, 1, 100)) && !pinned(&attention(1, 200, 200)));
}

#[test]
fn kernels_that_are_compiled_are_listed() {
    let engine = engine_with(&["a.rms"]);
    let mut compiled = descriptor("jit.rms", "3.1", 99);
    compiled.jit = true;
    engine.register(compiled, nothing()).unwrap();
    let table = solve(&engine, &[("rows", &[128])], vec![rms(100)]).table;
    assert_eq!(table.plans[0].jit_artifacts, ["jit.rms@3.1"]);
}

// --- random worlds -----------------------------------------------------------------------------

/// The end of the bucket a size falls into, as plainly as can be said.
fn end_of(ends: &[i64], size: i64) -> Option<i64> {
    ends.iter().copied().find(|&end| size <= end)
}

/// What decides whether two calls share an entry, without looking at ranges: everything but sizes, the sizes kernels
/// are compiled for, and the buckets.
fn place(call: &RandomCall, seq: &[i64], batch: &[i64]) -> Option<(Query, [i64; 3], [Option<i64>; 3])> {
    let s = &call.sizes;
    let ends = [end_of(batch, s.batch), end_of(seq, s.seq_q), end_of(seq, s.seq_k)];
    if ends.contains(&None) {
        return None;
    }
    Some((
        RandomCall { deterministic: false, ..call.clone() }.query().pinned_class(),
        [s.heads, s.kv_heads, s.head_dim],
        ends,
    ))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(96)))]

    /// A call within the buckets of a solved call gets its kernel whenever that is legal and nobody stands above; every
    /// other call gets what it would get without the table. What the cache says is what selection says.
    #[test]
    fn a_table_decides_within_its_buckets_and_nowhere_else(
        mut world in world(),
        base in call(),
        solved in prop::collection::vec(variant(), 1..6),
        others in prop::collection::vec(variant(), 1..25),
        seq in prop::collection::btree_set(1i64..420, 1..5),
        batch in prop::collection::btree_set(1i64..420, 1..4),
    ) {
        let (seq, batch): (Vec<i64>, Vec<i64>) = (seq.into_iter().collect(), batch.into_iter().collect());
        world.rules.retain(|(_, kind, _)| ![4, 5].contains(kind));
        let base = RandomCall { deterministic: false, capturing: false, ..base };
        let calls: Vec<RandomCall> = solved.into_iter().map(|v| v.of(&base)).map(|c| RandomCall { deterministic: false, capturing: false, ..c }).collect();
        let plain = engine_of(&world, by_bucket(world.perf));
        let request = SolveRequest {
            model_id: "m".into(),
            device: DeviceIx(0),
            buckets: Buckets::new([("seq_len", seq.clone()), ("batch", batch.clone())]).unwrap(),
            calls: calls.iter().map(spec_of).collect(),
        };
        let table = plain.solve(&request).unwrap().table;
        let table = DispatchTable::parse(&table.to_json()).unwrap();
        // Other measurements, the same kernels.
        let times = by_bucket((world.perf.0 ^ 1, world.perf.1));
        let (plain, tabled) = (engine_of(&world, times.clone()), engine_of(&world, times));
        let mismatches = tabled.load_table(&table, "t").unwrap();
        prop_assert!(mismatches.is_empty(), "{:?}", mismatches);
        // Which kernel a place was given; the largest call decides.
        let given = |place: &(Query, [i64; 3], [Option<i64>; 3])| {
            let entries = table.plans.iter().flat_map(|plan| &plan.ops);
            let alike = |c: &&RandomCall| self::place(c, &seq, &batch).as_ref() == Some(place);
            let known: Vec<CallSpec> = calls.iter().filter(alike).map(|c| canonical(&tabled, &spec_of(c))).collect();
            entries.filter(|e| !e.graph).find(|e| known.contains(e.call.as_ref().unwrap())).map(|e| e.kernel_id.clone())
        };
        for other in calls.iter().cloned().chain(others.into_iter().map(|v| v.of(&base))) {
            let other = RandomCall { capturing: false, ..other };
            let query = other.query();
            let without = plain.with_snapshot(|s| s.select(&query));
            let (with, planned) = tabled.with_snapshot(|s| { let d = s.select(&query); let p = s.chain(&d); (d, p) });
            prop_assert_eq!(tabled.chain(&query), planned, "cached");
            let name = |d: &Decision, i: usize| plain.with_snapshot(|s| s.kernel(d.candidates[i].kernel).id.clone());
            let pinned = place(&other, &seq, &batch).and_then(|p| given(&p));
            let legal: Vec<String> = without.ranking.iter().map(|&i| name(&without, i)).collect();
            let chosen = with.ranking.first().map(|&i| name(&with, i));
            match pinned.filter(|kernel| legal.contains(kernel)) {
                Some(kernel) => prop_assert_eq!(chosen, Some(kernel), "{:?}", other.sizes),
                None => prop_assert_eq!(&with.ranking, &without.ranking, "{:?}", other.sizes),
            }
            let accepted = |d: &Decision| d.candidates.iter().map(|c| c.accepted()).collect::<Vec<bool>>();
            prop_assert_eq!(accepted(&with), accepted(&without), "a table changes nothing about who may serve");
        }
    }
}

fn canonical(engine: &Engine, call: &CallSpec) -> CallSpec {
    engine.lockfile(&[(call.clone(), DeviceIx(0))]).map_or_else(|_| call.clone(), |mut l| l.entries.remove(0).call)
}
