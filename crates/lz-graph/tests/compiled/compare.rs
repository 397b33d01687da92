//! A random graph in several ways, beside its references.

use std::sync::Arc;

use lz_abi::program::External;
use lz_abi::{DType, Tensor, TensorViewMut};
pub use lz_graph::exec::compiled::Options as How;
use lz_graph::exec::interpreted;
use lz_graph::exec::kernel::NoHost;
use lz_graph::exec::session::Session;
use lz_graph::ir::Graph;
use lz_graph::ops::Op;
use lz_graph::passes::{self, Options, PASSES};

use crate::steps::{self, Step, drawn};

/// What is drawn.
pub struct Check<'a> {
    pub steps: &'a [Step],
    pub results: &'a [u16],
    /// The pass that is left out.
    pub left_out: u16,
    /// The numbers of the two symbols.
    pub sizes: [i64; 2],
    /// Whether floats are float64.
    pub wide: bool,
    /// Whether inputs hold infinities, and what is no number.
    pub special: bool,
}

fn inputs(graph: &Graph, sizes: [i64; 2], nudge: f64, special: bool) -> Vec<Tensor> {
    let symbols = lz_graph::ir::Symbols::from_iter([("a", sizes[0]), ("b", sizes[1])]);
    let tensor = |(at, &id): (usize, &lz_graph::ir::ValueId)| {
        let meta = graph.meta(id).at(&symbols).expect("sizes of an input");
        let tensor = drawn(meta.dtype, &meta.sizes().expect("numbers"), 100 + at as u64, nudge);
        if special && meta.dtype.is_float() { with_specials(&tensor) } else { tensor }
    };
    graph.inputs.iter().enumerate().map(tensor).collect()
}

/// A tensor with infinities and NaN at some places.
fn with_specials(tensor: &Tensor) -> Tensor {
    let mut numbers = tensor.to_f64();
    for (at, number) in [(3, f64::INFINITY), (11, f64::NAN), (20, f64::NEG_INFINITY)] {
        numbers.get_mut(at).into_iter().for_each(|place| *place = number);
    }
    Tensor::from_f64(tensor.dtype(), tensor.shape(), &numbers)
}

fn references(graph: &Graph, sizes: [i64; 2], nudge: f64, special: bool) -> Result<Vec<Tensor>, String> {
    let given = inputs(graph, sizes, nudge, special);
    let views: Vec<_> = given.iter().map(Tensor::view).collect();
    interpreted::run(graph, &views).map(|(results, _)| results).map_err(|why| why.to_string())
}

pub fn run(session: &Session, given: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let shapes: Vec<_> = given.iter().map(|one| (one.dtype(), one.shape())).collect();
    let compiled = session.compiled(&shapes).map_err(|why| why.to_string())?;
    let slots = &compiled.slots()[compiled.inputs()..];
    let mut outputs: Vec<Tensor> = slots.iter().map(|slot| Tensor::zeros(slot.dtype, &slot.shape)).collect();
    {
        let mut views: Vec<TensorViewMut<'_>> = outputs.iter_mut().map(Tensor::view_mut).collect();
        let reads: Vec<_> = given.iter().map(Tensor::view).collect();
        let mut externals: Vec<External<'_>> = reads.iter().map(|view| External::Read(view.as_ref())).collect();
        externals.extend(views.iter_mut().map(|view| External::Write(view.as_mut())));
        session.run(&mut externals, &NoHost).map_err(|why| why.to_string())?;
    }
    let failures = compiled.failures();
    if !failures.is_empty() {
        return Err(format!("a kernel failed: {failures:?}"));
    }
    Ok(outputs)
}

/// What rounding makes, relative to the greatest number of a result.
fn rounding(graph: &Graph) -> f64 {
    let halves = graph.nodes().any(|(_, node)| matches!(graph.meta(node.output).dtype, DType::Bf16 | DType::F16));
    let singles = graph.nodes().any(|(_, node)| graph.meta(node.output).dtype == DType::F32);
    match (halves, singles) {
        (true, _) => 6e-2,
        (false, true) => 3e-5,
        (false, false) => 1e-9,
    }
}

/// How far each number may be off: what rounding makes of it, and what a little other inputs and weights would.
struct Truth {
    results: Vec<Tensor>,
    others: Vec<Vec<Tensor>>,
    rounding: f64,
}

impl Truth {
    fn compare(&self, found: &[Tensor]) -> Result<(), String> {
        for (at, (one, wanted)) in found.iter().zip(&self.results).enumerate() {
            if (one.dtype(), one.shape()) != (wanted.dtype(), wanted.shape()) {
                let text = |t: &Tensor| format!("{}{:?}", t.dtype(), t.shape());
                return Err(format!("result {at} is {}, not {}", text(one), text(wanted)));
            }
            let (a, b) = (one.to_f64(), wanted.to_f64());
            let others: Vec<Vec<f64>> = self.others.iter().map(|other| other[at].to_f64()).collect();
            let most = b.iter().filter(|x| x.is_finite()).fold(1.0f64, |most, x| most.max(x.abs()));
            let exact = !matches!(wanted.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::Bf16);
            for (i, (&x, &y)) in a.iter().zip(&b).enumerate() {
                let gap = others.iter().map(|other| (other[i] - y).abs()).fold(0.0, f64::max);
                let unsure = others
                    .iter()
                    .any(|other| other[i].is_nan() != y.is_nan() || other[i].is_infinite() != y.is_infinite());
                let bound =
                    if exact { if gap > 0.0 { f64::INFINITY } else { 0.0 } } else { self.rounding * most + 16.0 * gap };
                if !(x == y || x.is_nan() && y.is_nan() || unsure || (x - y).abs() <= bound) {
                    return Err(format!("result {at}, element {i}: {x} in the place of {y}"));
                }
            }
        }
        Ok(())
    }
}

/// The graph that is drawn. Passes know that sizes are 1 or more where none is 0.
fn made(check: &Check<'_>, nudge: f64) -> Graph {
    let least = check.sizes[0].min(check.sizes[1]).min(1);
    steps::graph(check.steps, check.results, check.wide, nudge, least)
}

/// Runs a graph in several ways.
pub fn check(check: &Check<'_>) -> Result<(), String> {
    let graph = made(check, 0.0);
    // What a weight of 0 makes of a NaN is not the same in attention and in the products it is written out in.
    let special = check.special && !graph.nodes().any(|(_, node)| matches!(node.op, Op::MatMul(_) | Op::Attention(_)));
    let told = |what: &str, why: String| format!("{what}: {why}\n{}", graph.text().unwrap_or_default());
    let all = Options::default();
    let name = PASSES[usize::from(check.left_out) % PASSES.len()].0;
    let without =
        |names: &[&str]| names.iter().fold(all.clone(), |options, name| options.without(name).expect("a pass"));
    let none: Vec<&str> = PASSES.iter().map(|(name, _)| *name).collect();
    let ways = [("all passes", all.clone()), (name, without(&[name])), ("no pass", without(&none))];
    let arenas = Arc::default();
    for (way, options) in ways {
        let mut optimised = graph.clone();
        passes::optimize(&mut optimised, &options).map_err(|why| told(way, why.to_string()))?;
        let how = How { threads: 2, arenas: Arc::clone(&arenas), ..How::default() };
        let session = Session::new(optimised, how);
        for sizes in [check.sizes, [2, 5], check.sizes] {
            let Ok(results) = references(&graph, sizes, 0.0, special) else {
                // Sizes that do not fit together. Nothing may crash.
                let _ = run(&session, &inputs(&graph, sizes, 0.0, special));
                continue;
            };
            let rounding = rounding(&graph);
            let nudge = rounding.min(1e-3) / 8.0;
            let others = [nudge, -nudge].map(|nudge| references(&made(check, nudge), sizes, nudge, special));
            let others: Vec<Vec<Tensor>> = others.into_iter().flatten().collect();
            let truth = Truth { results, others, rounding };
            let found = run(&session, &inputs(&graph, sizes, 0.0, special)).map_err(|why| told(way, why))?;
            truth.compare(&found).map_err(|why| told(&format!("without {way}, sizes {sizes:?}"), why))?;
        }
    }
    Ok(())
}

/// Fails where kernels do not give what references give: with all passes, without any, and with each left out.
pub fn agree(graph: &Graph, given: &[Tensor]) {
    let views: Vec<_> = given.iter().map(Tensor::view).collect();
    let results = interpreted::run(graph, &views).expect("references").0;
    let truth = Truth { results, others: Vec::new(), rounding: rounding(graph) };
    let all = Options::default();
    let none = PASSES.iter().fold(all.clone(), |options, (name, _)| options.without(name).expect("a pass"));
    let each = PASSES.iter().map(|(name, _)| all.clone().without(name).expect("a pass"));
    for options in [all.clone(), none].into_iter().chain(each) {
        let mut optimised = graph.clone();
        passes::optimize(&mut optimised, &options).expect("passes");
        let text = optimised.text().expect("an order");
        let session = Session::new(optimised, How { threads: 3, ..How::default() });
        for _ in 0..2 {
            let compared = run(&session, given).and_then(|found| truth.compare(&found));
            assert_eq!(compared, Ok(()), "{options:?}\n{text}");
        }
    }
}
