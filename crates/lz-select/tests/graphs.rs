//! Which kernels may run inside CUDA graphs: the declared ones, and in strict mode those proven in the call's cell.

use std::sync::Arc;

use lz_model::*;
use lz_select::*;

/// Knows which kernels were replayed in a graph, at how many rows. That size has a cell of its own, as measured ones have.
struct Proven(&'static [&'static str], i64);

impl PerfSource for Proven {
    fn estimate(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        None
    }

    fn proven_in_graphs(&self, kernel: &KernelDescriptor, facts: &Facts<'_>, covers: Covers<'_>) -> bool {
        let mut dims = *facts.query.dims();
        dims[rows()] = self.1;
        self.0.contains(&kernel.id.as_str()) && covers(&dims)
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        vec![(rows(), self.1), (rows(), self.1 + 1)]
    }
}

fn rows() -> usize {
    let catalog = Catalog::get();
    catalog.op(catalog.find("norm.rms").unwrap().ops[0]).dim_index("rows").unwrap()
}

fn kernel(id: &str, graph_safe: bool) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", id.split('.').next().unwrap());
    kernel.platforms = vec![Platform::Cuda];
    kernel.dtypes = DTypeSet::of(&[DType::F32]);
    kernel.layouts = vec![Layout::Strided];
    kernel.graph_safe = graph_safe;
    kernel
}

fn spec(kernels: &[KernelDescriptor], strict: bool) -> SnapshotSpec {
    let mut device = DeviceSpec::new(Platform::Cuda, "GPU");
    device.sm = Some(90);
    let devices = vec![device.completed(&GenerationTable::builtin())];
    let mut spec = SnapshotSpec { devices, ..SnapshotSpec::default() };
    for kernel in kernels {
        spec.backend(BackendDescriptor::native(kernel.backend.clone(), "1", vec![Platform::Cuda]));
        spec.kernels.push(Arc::new(kernel.clone()));
    }
    spec.settings.graph_strict = strict;
    spec
}

fn query(rows: i64, capturing: bool) -> Query {
    let shape = [rows, 64];
    let context = Context { capturing, ..Context::default() };
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape)).context(context);
    Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query
}

/// The kernels that may serve a call, and why the others may not.
fn judged(spec: &SnapshotSpec, query: &Query) -> (Vec<String>, Vec<Vec<Reason>>) {
    let snapshot = spec.build(1).unwrap();
    let decision = snapshot.select(query);
    let ranked = decision.ranked().map(|c| snapshot.kernel(c.kernel).id.clone()).collect();
    (ranked, decision.candidates.iter().map(|c| c.reasons.clone()).collect())
}

fn doubt(why: GraphDoubt) -> Vec<Reason> {
    vec![Reason::CudaGraphUnsafe { why }]
}

#[test]
fn unknown_is_unsafe() {
    assert!(!KernelDescriptor::new("a.x", "norm.rms", "a").graph_safe);
    let spec = spec(&[KernelDescriptor { graph_safe: false, ..kernel("a.x", true) }], false);
    assert_eq!(judged(&spec, &query(128, true)), (vec![], vec![doubt(GraphDoubt::Undeclared)]));
    assert_eq!(judged(&spec, &query(128, false)).0, ["a.x"]);
}

#[test]
fn in_strict_mode_only_what_was_replayed_runs_under_capture() {
    let kernels = [("a.x", true), ("b.x", true), ("c.x", false)].map(|(id, safe)| kernel(id, safe));
    let mut spec = spec(&kernels, false);
    spec.perf = Arc::new(Proven(&["b.x", "c.x"], 128));
    assert_eq!(judged(&spec, &query(128, true)).0, ["a.x", "b.x"]);
    spec.settings.graph_strict = true;
    // Whoever is out is out for one reason.
    let expected = vec![doubt(GraphDoubt::Unproven), vec![], doubt(GraphDoubt::Undeclared)];
    assert_eq!(judged(&spec, &query(128, true)), (vec!["b.x".to_owned()], expected));
    assert_eq!(judged(&spec, &query(128, false)).0, ["a.x", "b.x", "c.x"]);
}

/// Buckets of rows are powers of two, so that 100 lies in (64, 128].
#[test]
fn a_proof_covers_its_cell_and_no_other() {
    let mut spec = spec(&[kernel("a.x", true)], true);
    let serves = |spec: &SnapshotSpec, rows: i64| !judged(spec, &query(rows, true)).0.is_empty();
    spec.perf = Arc::new(Proven(&["a.x"], 100));
    assert_eq!(
        [64, 65, 99, 100, 101, 128, 129, 4096].map(|rows| serves(&spec, rows)),
        [false, true, true, true, true, true, false, false]
    );
    // A threshold that any kernel has divides the cell for all: from there on anything may be another kernel's code.
    let mut other = kernel("b.x", false);
    other.dims.insert("rows".into(), DimRule { max: Some(110), ..DimRule::default() });
    spec.backend(BackendDescriptor::native("b", "1", vec![Platform::Cuda]));
    spec.kernels.push(Arc::new(other));
    assert_eq!([100, 110, 111, 128].map(|rows| serves(&spec, rows)), [true, true, false, false]);
}

#[test]
fn a_capture_of_this_process_proves_its_cell_or_rules_it_out() {
    let (a, b) = (kernel("a.x", true), kernel("b.x", true));
    let mut spec = spec(&[a.clone(), b.clone()], true);
    let note = |spec: &mut SnapshotSpec, kernel: &KernelDescriptor, rows: i64, outcome: Result<(), GraphDoubt>| {
        // Proven outside of a capture, as warm-ups do.
        Arc::make_mut(&mut spec.proofs).captured(kernel, &query(rows, false), outcome);
    };
    let keeps = GraphDoubt::Allocates { bytes: 1 << 22, limit: 1 << 20 };
    note(&mut spec, &a, 100, Ok(()));
    note(&mut spec, &b, 100, Err(keeps.clone()));
    assert_eq!(judged(&spec, &query(120, true)), (vec!["a.x".to_owned()], vec![vec![], doubt(keeps.clone())]));
    assert_eq!(judged(&spec, &query(200, true)).1, [doubt(GraphDoubt::Unproven), doubt(GraphDoubt::Unproven)]);
    // What failed is out where proofs are not asked for, too, and nothing is said of calls outside.
    spec.settings.graph_strict = false;
    assert_eq!(judged(&spec, &query(120, true)).0, ["a.x"]);
    assert_eq!(judged(&spec, &query(200, true)).0, ["a.x", "b.x"]);
    assert_eq!(judged(&spec, &query(120, false)).0, ["a.x", "b.x"]);
    // A failure elsewhere in the cell counts, and the last outcome at a size replaces the one before.
    spec.settings.graph_strict = true;
    note(&mut spec, &a, 90, Err(keeps));
    assert!(judged(&spec, &query(100, true)).0.is_empty());
    note(&mut spec, &a, 90, Ok(()));
    assert_eq!(judged(&spec, &query(100, true)).0, ["a.x"]);
    assert_eq!(spec.build(1).unwrap().proven_in_graphs(), 1);
    // Failures that are forgotten are unknown again.
    Arc::make_mut(&mut spec.proofs).forget_wrong();
    assert_eq!(judged(&spec, &query(100, true)).1[1], doubt(GraphDoubt::Unproven));
}

#[test]
fn what_would_serve_with_a_proof_can_be_asked() {
    let mut spec = spec(&[kernel("a.x", true), kernel("b.x", false)], true);
    let snapshot = spec.build(1).unwrap();
    assert!(snapshot.select(&query(128, true)).chosen().is_none());
    let chosen = snapshot.select_as_proven(&query(128, true)).chosen().map(|c| snapshot.kernel(c.kernel).id.clone());
    assert_eq!(chosen.as_deref(), Some("a.x"));
    let failed = GraphDoubt::Failed { error: "no".into() };
    Arc::make_mut(&mut spec.proofs).captured(&kernel("a.x", true), &query(128, true), Err(failed));
    assert!(spec.build(2).unwrap().select_as_proven(&query(128, true)).chosen().is_none());
}
