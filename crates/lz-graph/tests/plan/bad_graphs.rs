//! Graphs that have no instance or no sense, and what is said of them.

use lz_abi::DType;
use lz_graph::ir::{Dim, NodeId};
use lz_graph::plan::{Instance, InstanceError, OfOps, plan};
use lz_graph::validate::{self, Kernels, Level, Phase, Planned, Problem, Severity, VALIDATORS};

use crate::graphs::{Builder, known, symbols};

#[test]
fn what_was_symbolic_is_checked_with_numbers() {
    let mut b = Builder::new("symbols");
    let (s, t) = (b.symbol("s"), b.symbol("t"));
    let x = b.input("x", DType::F32, &[s.clone(), Dim::from(4)]);
    let y = b.reshape(x, &[t.clone(), Dim::from(2)]);
    b.graph.outputs.push(y);
    assert!(Instance::of(&b.graph, &symbols(&[("s", 3), ("t", 6)])).is_ok());
    let error = Instance::of(&b.graph, &symbols(&[("s", 3), ("t", 5)])).unwrap_err();
    assert!(matches!(error, InstanceError::Shape { op: "reshape", .. }), "{error}");
    let error = Instance::of(&b.graph, &symbols(&[("s", 3)])).unwrap_err();
    assert!(matches!(error, InstanceError::Dim { .. }), "{error}");
    let error = Instance::of(&b.graph, &symbols(&[("s", 1 << 50), ("t", 1 << 51)])).unwrap_err();
    assert!(matches!(error, InstanceError::Size { .. }), "{error}");
    let error = Instance::of(&b.graph, &symbols(&[("s", -1), ("t", -2)])).unwrap_err();
    assert!(matches!(error, InstanceError::Size { .. }), "{error}");
}

#[test]
fn updates_that_do_not_fit_are_errors() {
    let mut b = Builder::new("updates");
    let x = b.input("x", DType::F32, &known(&[4]));
    let cache = b.input("cache", DType::F32, &known(&[8]));
    let y = b.relu(x);
    b.graph.updates = vec![(cache, y)];
    let error = Instance::of(&b.graph, &symbols(&[])).unwrap_err();
    let name = &b.graph.value(y).name;
    assert_eq!(error.to_string(), format!("'cache' is float32[8], its new contents '{name}' are float32[4]"));
    b.graph.updates = vec![(y, x)];
    assert!(matches!(Instance::of(&b.graph, &symbols(&[])), Err(InstanceError::NoInput(_))));
    b.graph.updates = vec![(x, y), (x, x)];
    assert!(matches!(Instance::of(&b.graph, &symbols(&[])), Err(InstanceError::UpdatedTwice(_))));
    let found = validate::graph(Phase::AfterExport, &b.graph, Level::Normal).unwrap_err();
    assert!(found.0.iter().any(|one| matches!(one.problem, Problem::Update { why: "is updated before", .. })));
}

#[test]
fn severities_decide_what_fails() {
    let mut b = Builder::new("leftovers");
    let x = b.input("x", DType::F32, &known(&[4]));
    let w = b.weight("w", &[4]);
    let folded = b.relu(w);
    let dead = b.relu(x);
    let out = b.add(x, folded);
    b.graph.outputs.push(out);
    let severities = |phase| {
        let found = validate::graph(phase, &b.graph, Level::Normal).unwrap();
        found.into_iter().map(|one| (one.severity, one.problem)).collect::<Vec<_>>()
    };
    let name = |value| b.graph.value(value).name.to_string();
    let dead = Problem::Dead { op: "unary", value: name(dead) };
    let folded = Problem::NotFolded { op: "unary", value: name(folded) };
    assert_eq!(severities(Phase::AfterExport), [(Severity::Info, dead.clone())]);
    assert_eq!(severities(Phase::AfterOptimisation), [(Severity::Warning, folded), (Severity::Warning, dead)]);
    assert!(validate::graph(Phase::AfterExport, &b.graph, Level::Strict).is_ok());
    let invalid = validate::graph(Phase::AfterOptimisation, &b.graph, Level::Strict).unwrap_err();
    assert!(invalid.to_string().starts_with("warning (folding): unary"), "{invalid}");
    b.graph.outputs = vec![];
    assert!(validate::graph(Phase::AfterOptimisation, &b.graph, Level::Off).unwrap().is_empty());
    assert_eq!("strict".parse(), Ok(Level::Strict));
    assert_eq!("none".parse(), Ok(Level::Off));
    assert!("nothing".parse::<Level>().unwrap_err().to_string().contains("'nothing'"));
}

#[test]
fn symbols_that_are_not_declared_and_graphs_without_results_are_found() {
    let mut b = Builder::new("undeclared");
    b.input("x", DType::F32, &[Dim::symbol("s")]);
    let found = validate::graph(Phase::AfterExport, &b.graph, Level::Normal).unwrap_err();
    let problems: Vec<Problem> = found.0.into_iter().map(|one| one.problem).collect();
    assert_eq!(problems, [Problem::NoResults, Problem::Symbol { value: "x".into(), symbol: "s".into() }]);
}

struct Bound(Option<NodeId>);

impl Kernels for Bound {
    fn has(&self, node: NodeId) -> bool {
        self.0 != Some(node)
    }
}

#[test]
fn nodes_without_kernels_do_not_run() {
    let mut b = Builder::new("kernels");
    let x = b.input("x", DType::F32, &known(&[4]));
    let y = b.relu(x);
    let z = b.reshape(y, &known(&[2, 2]));
    b.graph.outputs.push(z);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    let made = plan(&instance, &demands);
    let planned = Planned { instance: &instance, plan: &made, demands: &demands };
    let run = |kernels: &Bound| validate::execution(planned, kernels, Level::Normal);
    assert_eq!(run(&Bound(None)).unwrap(), []);
    // A view needs none.
    assert_eq!(run(&Bound(b.graph.producer(z))).unwrap(), []);
    let invalid = run(&Bound(b.graph.producer(y))).unwrap_err();
    assert!(matches!(invalid.0[0].problem, Problem::NoKernel { op: "unary", .. }));
}

#[test]
fn validators_have_names_of_their_own() {
    let mut names: Vec<&str> = VALIDATORS.iter().map(|validator| validator.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), VALIDATORS.len());
    assert!(VALIDATORS.iter().all(|validator| !validator.phases.is_empty()));
}
