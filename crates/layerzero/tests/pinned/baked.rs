//! Plans: decisions for the calls made inside of them, and for no others.

use layerzero::config::{CodeLayer, Value};
use layerzero::{OverlayId, Plan};

use super::tables::table;
use super::*;

/// A plan that gives norms of up to 512 rows to a kernel.
fn plan(engine: &Engine, kernel: &str) -> Arc<Plan> {
    let table = table(&[("rows", &[512])], &[(kernel, rms(512), &[("rows", 512)])]);
    engine.make_plan(table, "m", false).unwrap()
}

fn inside(engine: &Engine, plans: &[&Arc<Plan>]) -> OverlayId {
    let plans: Vec<Arc<Plan>> = plans.iter().map(|plan| Arc::clone(plan)).collect();
    engine.overlay_with(CodeLayer::context(), &plans).unwrap().id()
}

fn told(engine: &Scope<'_>, rows: i64) -> layerzero::Report {
    engine.explain("rms_norm", &rms(rows).named(DeviceIx(0), Context::default())).unwrap()
}

#[test]
fn calls_inside_follow_it_and_calls_outside_do_not() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let (b, c) = (plan(&engine, "b.rms"), plan(&engine, "c.rms"));
    let (in_b, in_both) = (inside(&engine, &[&b]), inside(&engine, &[&c, &b]));
    for _ in 0..2 {
        let (inner, outer) = (engine.scope(in_b), engine.process());
        assert_eq!((serves_in(&inner, &rms(300)), serves_in(&inner, &rms(513))), ("b.rms".into(), "a.rms".into()));
        assert_eq!(told(&inner, 300).pinned_by.as_deref(), Some("plan m"));
        let miss = told(&inner, 513).outside_table.unwrap();
        assert_eq!(miss.reason, Reason::PlanBucketMiss { dim: "rows".into(), found: 513 });
        assert_eq!(serves_in(&engine.scope(in_both), &rms(300)), "c.rms");
        assert_eq!(serves_in(&outer, &rms(300)), "a.rms");
        assert_eq!((told(&outer, 300).pinned_by, told(&outer, 513).outside_table), (None, None));
    }
    assert_eq!((inside(&engine, &[&b]), in_b != in_both), (in_b, true), "what says the same is the same");
}

#[test]
fn it_stands_above_the_tables_of_the_process_and_below_its_locks_and_denials() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let of_process = table(&[("rows", &[512])], &[("c.rms", rms(512), &[("rows", 512)])]);
    engine.load_table(&of_process, "t").unwrap();
    let b = plan(&engine, "b.rms");
    let in_b = inside(&engine, &[&b]);
    assert_eq!(serves_in(&engine.scope(in_b), &rms(300)), "b.rms");
    engine.lock("norm.rms", "a.rms").unwrap();
    assert_eq!(serves_in(&engine.scope(in_b), &rms(300)), "a.rms");
    engine.unlock("norm.rms").unwrap();
    let deny = Value::List(vec![Value::Map([("deny".to_owned(), Value::from("b.rms"))].into_iter().collect())]);
    engine.configure([("rules".to_owned(), deny)]).unwrap();
    // Its own kernel may not serve: the table below is no second choice, since the first pin counts alone.
    let scope = engine.scope(in_b);
    let report = told(&scope, 300);
    assert_eq!((report.chosen.as_deref(), report.pinned_by), (Some("a.rms"), None));
    let denied = report.candidates.iter().find(|c| c.kernel_id == "b.rms").unwrap();
    assert_eq!(denied.reasons[0].reason.code(), "POLICY_DENIED");
    assert_eq!(engine.plan_status(&scope, &b).unwrap().mismatches[0].code(), "NOT_VALID");
    assert_eq!(serves(&engine, &rms(300)), "c.rms");
}

#[test]
fn what_is_measured_later_changes_nothing_inside() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let b = plan(&engine, "b.rms");
    let within = inside(&engine, &[&b]);
    timed(&engine, &[("a.rms", 512, 1.0), ("b.rms", 512, 9.0)]);
    assert_eq!(serves_in(&engine.scope(within), &rms(512)), "b.rms");
    assert_eq!(serves(&engine, &rms(512)), "a.rms");
    engine.unregister("b.rms", "1.0").unwrap();
    assert_eq!(serves_in(&engine.scope(within), &rms(512)), "a.rms");
    assert_eq!(engine.plan_status(&engine.process(), &b).unwrap().mismatches[0].code(), "KERNEL_GONE");
}

#[test]
fn one_of_another_machine_is_refused() {
    let engine = engine_with(&["a.rms"]);
    let mut other = table(&[("rows", &[512])], &[("a.rms", rms(512), &[("rows", 512)])]);
    other.hardware_signature = "cuda_sm90_cu130".into();
    let error = engine.make_plan(other, "m", false).err().unwrap();
    assert_eq!(error.code(), "DISPATCH_TABLE_REFUSED");
    assert!(error.to_string().starts_with("dispatch table of plan m is refused: "), "{error}");
}

/// Makes a call as far as it is decided.
fn call(engine: &Engine, scope: &Scope<'_>, call: &CallSpec) {
    let named = call.named(DeviceIx(0), Context::default());
    let (_, bound) = scope.bind(&call.op, &named).unwrap();
    engine.decided(scope, &named, &bound).unwrap();
}

#[test]
fn one_that_learns_decides_a_call_once() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let empty = engine.make_plan(table(&[], &[]), "m", true).unwrap();
    call(&engine, &engine.scope(inside(&engine, &[&empty])), &rms(512));
    call(&engine, &engine.process(), &rms(4));
    let first = engine.learned(&engine.process(), &empty, &empty).unwrap().unwrap();
    assert!(engine.learned(&engine.process(), &empty, &empty).unwrap().is_none(), "it was taken note of once");
    let decided = |plan: &Plan| -> Vec<String> {
        plan.table().plans.iter().flat_map(|plan| &plan.ops).map(|op| op.kernel_id.clone()).collect()
    };
    assert_eq!(decided(&first), ["a.rms"], "the call outside is none of its own");
    timed(&engine, &[("a.rms", 512, 9.0), ("b.rms", 512, 1.0), ("a.rms", 1, 9.0), ("b.rms", 1, 1.0)]);
    let in_first = engine.scope(inside(&engine, &[&first]));
    assert_eq!(serves_in(&in_first, &rms(512)), "a.rms");
    call(&engine, &in_first, &rms(512));
    call(&engine, &in_first, &rms(1));
    // Somebody who is still inside of the one before has seen the same call, and another one.
    let in_empty = engine.scope(inside(&engine, &[&empty]));
    call(&engine, &in_empty, &rms(512));
    call(&engine, &in_empty, &rms(1));
    let second = engine.learned(&engine.process(), &first, &first).unwrap().unwrap();
    assert_eq!(decided(&second), ["a.rms", "b.rms"]);
    assert!(engine.learned(&engine.process(), &empty, &second).unwrap().is_none());
    let in_second = engine.scope(inside(&engine, &[&second]));
    assert_eq!((serves_in(&in_second, &rms(512)), serves_in(&in_second, &rms(1))), ("a.rms".into(), "b.rms".into()));
    assert_eq!(engine.plan_status(&engine.process(), &second).unwrap().mismatches, []);
}

#[test]
fn one_that_does_not_learn_takes_no_notes() {
    let engine = engine_with(&["a.rms"]);
    let still = plan(&engine, "a.rms");
    call(&engine, &engine.scope(inside(&engine, &[&still])), &rms(9999));
    assert!(engine.learned(&engine.process(), &still, &still).unwrap().is_none());
}

#[test]
fn those_that_are_gone_do_not_count_and_their_numbers_are_not_given_again() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let kept = plan(&engine, "b.rms");
    let held = engine.overlay_with(CodeLayer::context(), std::slice::from_ref(&kept)).unwrap();
    let (first, mut last) = (held.id(), OverlayId::NONE);
    for _ in 0..1500 {
        let passing = plan(&engine, "b.rms");
        let next = inside(&engine, &[&passing]);
        assert!(next > last && next != first);
        last = next;
    }
    assert_eq!(serves_in(&engine.scope(last), &rms(300)), "a.rms");
    assert_eq!(serves_in(&engine.scope(first), &rms(300)), "b.rms");
}
