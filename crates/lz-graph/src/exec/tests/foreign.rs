//! Kernels of other libraries as candidates: stand-ins that compute in float64 what each task says.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lz_abi::{Args, DType, KernelError, Tensor, TensorRef};
use lz_select::Standing;

use super::composed::single;
use super::{close, compiled, drawn, kernels, options, run};
use crate::exec::binding::{AsDeclared, Candidate, Ranking, Site};
use crate::exec::choosing::{Chooser, Timed};
use crate::exec::compiled::{Compiled, Options};
use crate::exec::foreign::{Foreign, Task};
use crate::exec::interpreted;
use crate::ir::{Constant, Graph};
use crate::ops::Op;

const FLOATS: &[DType] = &[DType::F32, DType::F64];

/// A product of the last two axes, of each batch if there are any.
fn multiply(args: &mut Args<'_, '_>, alpha: f64) {
    let (a, b) = (args.input(0).unwrap(), args.input(1).unwrap());
    let added = args.input(2);
    let shape = args.outputs[0].shape().to_vec();
    let leading = shape.len() - 2;
    let (m, n, k) = (shape[leading], shape[leading + 1], a.shape()[leading + 1]);
    let at = |tensor: &TensorRef<'_>, batch: i64, i: i64, j: i64| match leading {
        0 => tensor.get(&[i, j]),
        _ => tensor.get(&[batch, i, j]),
    };
    for batch in 0..if leading == 0 { 1 } else { shape[0] } {
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let sum: f64 = (0..k).map(|l| at(&a, batch, i, l) * at(&b, batch, l, j)).sum();
            let plus = added.map_or(0.0, |c| if c.shape().len() == 1 { c.get(&[j]) } else { c.get(&[i, j]) });
            let index: &[i64] = if leading == 0 { &[i, j] } else { &[batch, i, j] };
            args.outputs[0].set(index, alpha * sum + plus);
        }
    }
}

fn product(mut args: Args<'_, '_>) -> Result<(), KernelError> {
    multiply(&mut args, 1.0);
    Ok(())
}

fn scaled(mut args: Args<'_, '_>) -> Result<(), KernelError> {
    let alpha = args.param(0).as_float().unwrap();
    multiply(&mut args, alpha);
    Ok(())
}

fn refuses(_: Args<'_, '_>) -> Result<(), KernelError> {
    Err(KernelError::Failed("refused".into()))
}

fn attends(mut args: Args<'_, '_>) -> Result<(), KernelError> {
    let [q, k, v] = [0, 1, 2].map(|at| args.input(at).unwrap());
    let mask = args.input(3);
    let (causal, scale) = (args.param(0).as_bool().unwrap(), args.param(1).as_float().unwrap());
    let (shape, keys) = (q.shape().to_vec(), k.shape()[2]);
    for (b, h, i) in (0..shape[0]).flat_map(|b| {
        let (heads, queries) = (shape[1], shape[2]);
        (0..heads).flat_map(move |h| (0..queries).map(move |i| (b, h, i)))
    }) {
        let score = |j: i64| {
            let dot: f64 = (0..shape[3]).map(|d| q.get(&[b, h, i, d]) * k.get(&[b, h, j, d])).sum();
            let added = mask.map_or(0.0, |mask| mask.get(&[b, h, i, j]));
            if causal && j > i { 0.0 } else { (scale * dot + added).exp() }
        };
        let weights: Vec<f64> = (0..keys).map(score).collect();
        let all: f64 = weights.iter().sum();
        for d in 0..shape[3] {
            let sum: f64 = (0..keys).map(|j| weights[j as usize] * v.get(&[b, h, j, d])).sum();
            args.outputs[0].set(&[b, h, i, d], sum / all);
        }
    }
    Ok(())
}

/// A convolution over one axis.
fn convolves(mut args: Args<'_, '_>) -> Result<(), KernelError> {
    let (x, w, bias) = (args.input(0).unwrap(), args.input(1).unwrap(), args.input(2));
    let number = |at: usize| args.param(at).as_int().unwrap();
    let (groups, stride, padding, dilation) = (number(0), number(1), number(2), number(3));
    let (shape, outs) = (args.outputs[0].shape().to_vec(), w.shape()[0] / groups);
    for (n, o, i) in (0..shape[0]).flat_map(|n| {
        let (channels, places) = (shape[1], shape[2]);
        (0..channels).flat_map(move |o| (0..places).map(move |i| (n, o, i)))
    }) {
        let mut sum = bias.map_or(0.0, |bias| bias.get(&[o]));
        for (c, t) in (0..w.shape()[1]).flat_map(|c| (0..w.shape()[2]).map(move |t| (c, t))) {
            let at = i * stride + t * dilation - padding;
            if (0..x.shape()[2]).contains(&at) {
                sum += w.get(&[o, c, t]) * x.get(&[n, o / outs * w.shape()[1] + c, at]);
            }
        }
        args.outputs[0].set(&[n, o, i], sum);
    }
    Ok(())
}

fn table(run: Option<fn(Args<'_, '_>) -> Result<(), KernelError>>) -> Arc<[Foreign]> {
    let one = |name, task, own: fn(Args<'_, '_>) -> Result<(), KernelError>| Foreign {
        name,
        task,
        dtypes: FLOATS,
        run: run.unwrap_or(own),
    };
    Arc::new([
        one("other.mm", Task::Product, product),
        one("other.addmm", Task::AddedProduct, scaled),
        one("other.bmm", Task::Products, product),
        one("other.baddbmm", Task::ScaledProducts, scaled),
        one("other.attention", Task::Attention, attends),
        one("other.conv", Task::Convolution, convolves),
    ])
}

/// Kernels of another library before all others.
struct OthersFirst;

impl Chooser for OthersFirst {
    fn choose(
        &self,
        _: &Site<'_>,
        candidates: &[Candidate],
        _: &mut dyn FnMut(usize) -> Option<Duration>,
    ) -> Vec<usize> {
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by_key(|&at| candidates[at].foreign().is_none());
        order
    }
}

fn others() -> Options {
    Options { foreign: table(None), chooser: Arc::new(OthersFirst), ..options() }
}

fn first(graph: &Graph, inputs: &[Tensor], options: &Options) -> Compiled {
    let made = compiled(graph, inputs, options);
    let views: Vec<_> = inputs.iter().map(Tensor::view).collect();
    let (expected, _) = interpreted::run(graph, &views).unwrap();
    for (a, b) in run(&made, inputs).unwrap().0.iter().zip(&expected) {
        close(a, b, if a.dtype() == DType::F64 { 1e-12 } else { 1e-5 });
    }
    made
}

/// Runs one operation by the other library's kernel, and compares with the reference; gives the kernel's name.
fn served(op: &str, attrs: &str, dtype: DType, shapes: &[&[i64]]) -> String {
    let (graph, inputs) = single(op, attrs, dtype, shapes);
    last(&first(&graph, &inputs, &others()))
}

/// The kernel of the last step.
fn last(made: &Compiled) -> String {
    kernels(made).pop().unwrap()
}

#[test]
fn products_are_bound_as_they_are_defined() {
    for dtype in [DType::F32, DType::F64] {
        let product = |attrs: &str, shapes: &[&[i64]]| served("matmul", attrs, dtype, shapes);
        assert_eq!(product("{}", &[&[3, 4], &[4, 5]]), "other.mm");
        assert_eq!(product(r#"{"transpose_a": true, "transpose_b": true}"#, &[&[4, 3], &[5, 4]]), "other.mm");
        assert_eq!(product(r#"{"alpha": 0.5}"#, &[&[3, 4], &[4, 5]]), "other.addmm");
        assert_eq!(product("{}", &[&[2, 6, 3, 4], &[4, 5]]), "other.mm");
        assert_eq!(product("{}", &[&[2, 3, 4], &[1, 4, 5]]), "other.mm");
        // The rows of a transposed matrix of each batch do not follow each other: batches of one matrix.
        assert_eq!(product(r#"{"transpose_a": true}"#, &[&[2, 4, 3], &[4, 5]]), "other.bmm");
        assert_eq!(product("{}", &[&[2, 6, 3, 4], &[2, 6, 4, 5]]), "other.bmm");
        assert_eq!(product(r#"{"transpose_b": true, "alpha": -2.0}"#, &[&[2, 3, 4], &[2, 5, 4]]), "other.baddbmm");
        // A part of the batches is the same for all others: it is copied, and then a batch of its own.
        assert_eq!(product("{}", &[&[2, 1, 3, 4], &[6, 4, 5]]), "copy+other.bmm");
    }
}

#[test]
fn linear_layers_are_products_and_what_follows_them() {
    for (attrs, bias, residual, name) in [
        ("{}", false, false, "other.mm"),
        ("{}", true, false, "other.addmm"),
        (r#"{"activation": "relu"}"#, true, true, "other.addmm+relu+add"),
        (r#"{"activation": "gelu"}"#, false, true, "other.mm+gelu+add"),
    ] {
        let mut inputs = vec![r#"{"name": "x", "dtype": "float64", "shape": [2, 3, 4]}"#.to_owned()];
        let mut given = vec![drawn(DType::F64, &[2, 3, 4], 1)];
        if residual {
            inputs.push(r#"{"name": "r", "dtype": "float64", "shape": [2, 3, 5]}"#.into());
            given.push(drawn(DType::F64, &[2, 3, 5], 2));
        }
        let (b, r) = (if bias { "\"b\"" } else { "null" }, if residual { "\"r\"" } else { "null" });
        let text = format!(
            r#"{{"name": "layer", "inputs": [{}], "constants": ["w", "b"], "nodes": [
              {{"op": "linear", "attrs": {attrs}, "inputs": ["x", "w", {b}, {r}], "output": "y"}}], "outputs": ["y"]}}"#,
            inputs.join(", ")
        );
        let constants =
            vec![Constant::owned("w", drawn(DType::F64, &[5, 4], 3)), Constant::owned("b", drawn(DType::F64, &[5], 4))];
        let graph = Graph::from_document(&text, constants).unwrap();
        let made = first(&graph, &given, &others());
        assert_eq!(kernels(&made), [name]);
    }
}

#[test]
fn attention_is_bound_where_it_means_the_same() {
    let of = |attrs: &str, shapes: &[&[i64]]| served("attention", attrs, DType::F64, shapes);
    let same: [&[i64]; 3] = [&[2, 3, 5, 4], &[2, 3, 5, 4], &[2, 3, 5, 4]];
    assert_eq!(of("{}", &same), "other.attention");
    assert_eq!(of(r#"{"causal": true, "scale": 0.3}"#, &same), "other.attention");
    assert_eq!(of("{}", &[same[0], same[1], same[2], &[2, 1, 1, 5]]), "other.attention");
    // More keys than queries, which end at the last key.
    let longer: [&[i64]; 3] = [&[2, 3, 5, 4], &[2, 3, 7, 4], &[2, 3, 7, 4]];
    assert_eq!(of("{}", &longer), "other.attention");
    assert_eq!(of(r#"{"causal": true, "top_left": true}"#, &longer), "other.attention");
    assert_ne!(of(r#"{"causal": true}"#, &longer), "other.attention");
    // Heads that share keys, windows and caps are not what it computes.
    assert_ne!(of("{}", &[&[2, 6, 5, 4], &[2, 3, 5, 4], &[2, 3, 5, 4]]), "other.attention");
    assert_ne!(of(r#"{"window": 2}"#, &same), "other.attention");
    assert_ne!(of(r#"{"softcap": 2.0}"#, &same), "other.attention");
}

#[test]
fn convolutions_get_their_numbers_in_order() {
    let attrs = r#"{"stride": [2], "padding": [3], "dilation": [2], "groups": 2, "activation": "relu"}"#;
    assert_eq!(served("conv", attrs, DType::F64, &[&[2, 4, 9], &[6, 2, 3], &[6]]), "other.conv+relu");
    let attrs = r#"{"stride": [1], "padding": [0], "dilation": [1], "groups": 1}"#;
    assert_eq!(served("conv", attrs, DType::F32, &[&[1, 3, 9], &[6, 3, 2]]), "other.conv");
}

/// What a kernel does not take is bound without it.
#[test]
fn only_its_element_types_are_a_kernels() {
    let (graph, inputs) = single("matmul", "{}", DType::Bf16, &[&[3, 4], &[4, 5]]);
    let made = compiled(&graph, &inputs, &others());
    assert!(made.steps().all(|step| step.candidates.iter().all(|name| !name.starts_with("other."))));
}

#[test]
fn a_kernel_that_fails_leaves_its_node_to_the_next_one() {
    let (graph, inputs) = single("matmul", "{}", DType::F64, &[&[3, 4], &[4, 5]]);
    let options = Options { foreign: table(Some(refuses)), ..others() };
    let made = first(&graph, &inputs, &options);
    assert_eq!(last(&made), "primitive.matmul");
    assert_eq!((made.failed(), &*made.failures()[0].kernel), (1, "other.mm"));
}

#[test]
fn it_goes_first_where_only_a_reference_is_left() {
    let options = Options { foreign: table(None), ..options() };
    let (graph, inputs) = single("matmul", "{}", DType::F64, &[&[3, 4], &[4, 5]]);
    assert_eq!(last(&compiled(&graph, &inputs, &options)), "other.mm");
    let shapes: [&[i64]; 3] = [&[1, 2, 5, 4]; 3];
    let (graph, inputs) = single("attention", "{}", DType::F64, &shapes);
    assert_eq!(last(&compiled(&graph, &inputs, &options)), "other.attention");
}

/// An operator who denies a kernel.
struct Denies(&'static str);

impl Ranking for Denies {
    fn ranked(&self, op: &str, call: &lz_model::NamedCall<'_>) -> Option<Vec<String>> {
        AsDeclared.ranked(op, call)
    }

    fn standing(&self, _: &Op, kernel: &str) -> Standing {
        if kernel == self.0 { Standing::Denied } else { Standing::Open }
    }
}

#[test]
fn what_is_denied_is_no_candidate() {
    let (graph, inputs) = single("matmul", "{}", DType::F64, &[&[3, 4], &[4, 5]]);
    for (denied, expected) in [("other.mm", "primitive.matmul"), ("other.bmm", "other.mm")] {
        let options = Options { ranking: Arc::new(Denies(denied)), ..others() };
        assert_eq!(last(&compiled(&graph, &inputs, &options)), expected);
    }
}

static RUNS: AtomicUsize = AtomicUsize::new(0);

fn counted(mut args: Args<'_, '_>) -> Result<(), KernelError> {
    RUNS.fetch_add(1, Ordering::Relaxed);
    multiply(&mut args, 1.0);
    Ok(())
}

/// A residual that is written over leaves no room for a second try; so a measured layer is not planned in place.
#[test]
fn measuring_times_it_where_another_kernel_would_work_in_place() {
    let graph = Graph::from_document(
        r#"{"name": "block", "inputs": [{"name": "x", "dtype": "float32", "shape": [8, 16]}], "constants": ["w"], "nodes": [
          {"op": "unary", "attrs": {"kind": "neg"}, "inputs": ["x"], "output": "r"},
          {"op": "linear", "attrs": {}, "inputs": ["x", "w", null, "r"], "output": "y"},
          {"op": "unary", "attrs": {"kind": "neg"}, "inputs": ["y"], "output": "z"}], "outputs": ["z"]}"#,
        vec![Constant::owned("w", drawn(DType::F32, &[16, 16], 3))],
    )
    .unwrap();
    let x = [drawn(DType::F32, &[8, 16], 1)];
    let step = |made: &Compiled| made.steps().find(|step| step.op == "linear").unwrap();
    let in_place = compiled(&graph, &x, &Options { foreign: table(None), ..options() });
    assert_eq!(step(&in_place).candidates.len(), 1);
    let chooser = Arc::new(Timed { rounds: 3, noise: 0.0 });
    let timed = first(&graph, &x, &Options { foreign: table(Some(counted)), chooser, ..options() });
    assert!(step(&timed).candidates.iter().any(|name| name == "other.mm+add"), "{:?}", step(&timed).candidates);
    assert!(RUNS.load(Ordering::Relaxed) >= 3);
}
