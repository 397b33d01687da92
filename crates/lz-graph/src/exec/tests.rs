//! Compiled graphs against interpreted ones.

use lz_abi::program::External;
use lz_abi::{DType, Tensor, TensorViewMut};

use super::compiled::{Compiled, ExecError, Options};
use super::interpreted;
use super::session::Session;
use crate::ir::{Constant, Graph};

mod cached;
mod composed;
mod foreign;

fn options() -> Options {
    Options { threads: 2, ..Options::default() }
}

/// Numbers between -1 and 1 that are the same at every run.
fn drawn(dtype: DType, shape: &[i64], seed: u64) -> Tensor {
    let count = shape.iter().product::<i64>();
    let number = |i: i64| {
        let mut z = (seed << 32).wrapping_add(i as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    Tensor::from_f64(dtype, shape, &(0..count).map(number).collect::<Vec<_>>())
}

/// Runs a compiled graph: its outputs, and its inputs as they are afterwards.
fn run(compiled: &Compiled, inputs: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Tensor>), ExecError> {
    let mut inputs = inputs.to_vec();
    let slots = &compiled.slots()[compiled.inputs()..];
    let mut outputs: Vec<Tensor> = slots.iter().map(|slot| Tensor::zeros(slot.dtype, &slot.shape)).collect();
    {
        let mut views: Vec<TensorViewMut<'_>> = inputs.iter_mut().chain(&mut outputs).map(Tensor::view_mut).collect();
        let mut externals: Vec<External<'_>> = views.iter_mut().map(|view| External::Write(view.as_mut())).collect();
        compiled.run(&mut externals)?;
    }
    Ok((outputs, inputs))
}

fn compiled(graph: &Graph, inputs: &[Tensor], options: &Options) -> Compiled {
    let shapes: Vec<_> = inputs.iter().map(|one| (one.dtype(), one.shape())).collect();
    let symbols = interpreted::bind(graph, &shapes).unwrap();
    Compiled::new(graph, &symbols, options).unwrap()
}

/// Compares with the references: `tolerance` of the largest number of each result.
fn agrees(graph: &Graph, inputs: &[Tensor], tolerance: f64) -> Compiled {
    let compiled = compiled(graph, inputs, &options());
    let views: Vec<_> = inputs.iter().map(Tensor::view).collect();
    let (expected, updates) = interpreted::run(graph, &views).unwrap();
    for _ in 0..2 {
        let (given, after) = run(&compiled, inputs).unwrap();
        let changed = graph.updates.iter().map(|(old, _)| {
            let at = graph.inputs.iter().position(|input| input == old).unwrap();
            after[at].clone()
        });
        for (a, b) in given.iter().cloned().chain(changed).zip(expected.iter().chain(&updates)) {
            close(&a, b, tolerance);
        }
    }
    compiled
}

fn close(a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!((a.dtype(), a.shape()), (b.dtype(), b.shape()));
    let most = b.to_f64().iter().filter(|x| x.is_finite()).fold(1.0f64, |most, x| most.max(x.abs()));
    for (at, (x, y)) in a.to_f64().into_iter().zip(b.to_f64()).enumerate() {
        let same = x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= tolerance * most;
        assert!(same, "element {at}: {x}, expected {y}");
    }
}

const MLP: &str = r#"{"name": "mlp", "symbols": [{"name": "s0", "min": 1, "max": 64}],
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["s0", 48]}],
    "constants": ["w", "b", "v"],
    "nodes": [
      {"op": "matmul", "attrs": {"transpose_b": true}, "inputs": ["x", "w"], "output": "p"},
      {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["p", "b"], "output": "q"},
      {"op": "unary", "attrs": {"kind": "gelu"}, "inputs": ["q"], "output": "y"},
      {"op": "matmul", "attrs": {}, "inputs": ["y", "v"], "output": "r"},
      {"op": "softmax", "attrs": {"axis": -1}, "inputs": ["r"], "output": "z"}],
    "outputs": ["y", "z"]}"#;

fn mlp() -> Graph {
    let constants = [("w", vec![40, 48], 1), ("b", vec![40], 2), ("v", vec![40, 33], 3)];
    let constants = constants.map(|(name, shape, seed)| Constant::owned(name, drawn(DType::F32, &shape, seed)));
    Graph::from_document(MLP, constants.to_vec()).unwrap()
}

fn kernels(compiled: &Compiled) -> Vec<String> {
    compiled.steps().map(|step| step.kernel).collect()
}

#[test]
fn a_perceptron_agrees_with_its_references() {
    for rows in [1, 5, 64] {
        let compiled = agrees(&mlp(), &[drawn(DType::F32, &[rows, 48], 7)], 1e-6);
        let used = kernels(&compiled);
        assert_eq!(used.iter().filter(|name| name.starts_with("lz_cpu.linear_packed")).count(), 2, "{used:?}");
        assert!(used.iter().any(|name| name.starts_with("lz_cpu.softmax")), "{used:?}");
    }
}

#[test]
fn plans_of_a_session_share_weights_and_arenas() {
    let session = Session::keeping(mlp(), options(), 2);
    let of = |rows: i64| session.compiled(&[(DType::F32, &[rows, 48])]).unwrap();
    let first = of(5);
    let bytes = session.packed_bytes();
    assert_eq!(bytes, (2 * 48 * 32 + 2 * 40 * 32) * 4);
    assert!(std::sync::Arc::ptr_eq(&first, &of(5)));
    of(64);
    of(5);
    of(6);
    assert_eq!((session.plans(), session.packed_bytes()), (2, bytes));
    // The one used longest ago was dropped.
    assert!(std::sync::Arc::ptr_eq(&first, &of(5)));
    let large = of(64);
    for compiled in [&first, &large, &first] {
        let rows = compiled.slots()[0].shape[0];
        run(compiled, &[drawn(DType::F32, &[rows, 48], 7)]).unwrap();
    }
    assert_eq!(session.arenas().bytes(), large.arena().max(first.arena()));
    assert!(matches!(session.compiled(&[(DType::F32, &[65, 48])]), Err(ExecError::Inputs(_))));
    assert!(matches!(session.compiled(&[(DType::F64, &[5, 48])]), Err(ExecError::Inputs(_))));
    assert!(matches!(session.compiled(&[]), Err(ExecError::Inputs(_))));
}

#[test]
fn callers_at_once_get_their_own_results() {
    let session = Session::new(mlp(), Options { threads: 1, ..Options::default() });
    std::thread::scope(|scope| {
        for caller in 0..6u64 {
            let session = &session;
            scope.spawn(move || {
                let inputs = [drawn(DType::F32, &[1 + caller as i64 % 3, 48], caller)];
                let views: Vec<_> = inputs.iter().map(Tensor::view).collect();
                let (expected, _) = interpreted::run(session.graph(), &views).unwrap();
                for _ in 0..20 {
                    let compiled = session.compiled(&[(DType::F32, inputs[0].shape())]).unwrap();
                    let (given, _) = run(&compiled, &inputs).unwrap();
                    given.iter().zip(&expected).for_each(|(a, b)| close(a, b, 1e-6));
                }
            });
        }
    });
}

/// A block of GPT-2: normalization, attention over slices of one product, and a perceptron, each added to what came in.
fn block(hidden: i64, heads: i64) -> Graph {
    let width = hidden / heads;
    let document = format!(
        r#"{{"name": "block", "symbols": [{{"name": "s", "min": 1, "max": 1024}}],
        "inputs": [{{"name": "x", "dtype": "float32", "shape": [1, "s", {hidden}]}}],
        "constants": ["g1", "b1", "wqkv", "bqkv", "wo", "bo", "g2", "b2", "wup", "bup", "wdown", "bdown"],
        "nodes": [
          {{"op": "layer_norm", "attrs": {{"eps": 1e-5, "axes": 1}}, "inputs": ["x", "g1", "b1"], "output": "n1"}},
          {{"op": "linear", "attrs": {{}}, "inputs": ["n1", "wqkv", "bqkv"], "output": "qkv"}},
          {{"op": "slice", "attrs": {{"axis": 2, "start": 0, "end": {hidden}, "step": 1}}, "inputs": ["qkv"], "output": "q0"}},
          {{"op": "slice", "attrs": {{"axis": 2, "start": {hidden}, "end": {two}, "step": 1}}, "inputs": ["qkv"], "output": "k0"}},
          {{"op": "slice", "attrs": {{"axis": 2, "start": {two}, "end": {three}, "step": 1}}, "inputs": ["qkv"], "output": "v0"}},
          {{"op": "reshape", "attrs": {{"shape": [1, "s", {heads}, {width}]}}, "inputs": ["q0"], "output": "q1"}},
          {{"op": "reshape", "attrs": {{"shape": [1, "s", {heads}, {width}]}}, "inputs": ["k0"], "output": "k1"}},
          {{"op": "reshape", "attrs": {{"shape": [1, "s", {heads}, {width}]}}, "inputs": ["v0"], "output": "v1"}},
          {{"op": "permute", "attrs": {{"axes": [0, 2, 1, 3]}}, "inputs": ["q1"], "output": "q"}},
          {{"op": "permute", "attrs": {{"axes": [0, 2, 1, 3]}}, "inputs": ["k1"], "output": "k"}},
          {{"op": "permute", "attrs": {{"axes": [0, 2, 1, 3]}}, "inputs": ["v1"], "output": "v"}},
          {{"op": "attention", "attrs": {{"causal": true}}, "inputs": ["q", "k", "v"], "output": "a0"}},
          {{"op": "permute", "attrs": {{"axes": [0, 2, 1, 3]}}, "inputs": ["a0"], "output": "a1"}},
          {{"op": "reshape", "attrs": {{"shape": [1, "s", {hidden}]}}, "inputs": ["a1"], "output": "a"}},
          {{"op": "linear", "attrs": {{}}, "inputs": ["a", "wo", "bo", "x"], "output": "r"}},
          {{"op": "layer_norm", "attrs": {{"eps": 1e-5, "axes": 1}}, "inputs": ["r", "g2", "b2"], "output": "n2"}},
          {{"op": "linear", "attrs": {{"activation": "gelu_tanh"}}, "inputs": ["n2", "wup", "bup"], "output": "u"}},
          {{"op": "linear", "attrs": {{}}, "inputs": ["u", "wdown", "bdown", "r"], "output": "y"}}],
        "outputs": ["y"]}}"#,
        two = 2 * hidden,
        three = 3 * hidden
    );
    let shapes = [
        ("g1", vec![hidden]),
        ("b1", vec![hidden]),
        ("wqkv", vec![3 * hidden, hidden]),
        ("bqkv", vec![3 * hidden]),
        ("wo", vec![hidden, hidden]),
        ("bo", vec![hidden]),
        ("g2", vec![hidden]),
        ("b2", vec![hidden]),
        ("wup", vec![4 * hidden, hidden]),
        ("bup", vec![4 * hidden]),
        ("wdown", vec![hidden, 4 * hidden]),
        ("bdown", vec![hidden]),
    ];
    let constants = shapes
        .iter()
        .enumerate()
        .map(|(seed, (name, shape))| Constant::owned(name, drawn(DType::F32, shape, seed as u64)));
    Graph::from_document(&document, constants.collect()).unwrap()
}

#[test]
fn slices_and_transpositions_of_a_block_cost_nothing() {
    for tokens in [1, 7] {
        let compiled = agrees(&block(64, 4), &[drawn(DType::F32, &[1, tokens, 64], 5)], 2e-5);
        let steps: Vec<_> = compiled.steps().map(|step| (step.op, step.kernel)).collect();
        let ops: Vec<&str> = steps.iter().map(|step| step.0).collect();
        let expected = ["layer_norm", "linear", "attention", "linear", "layer_norm", "linear", "linear"];
        assert_eq!(ops, expected, "{steps:?}");
        assert!(steps.iter().all(|(_, kernel)| !kernel.starts_with("reference")), "{steps:?}");
    }
}

fn graph(document: &str) -> Graph {
    Graph::from_document(document, Vec::new()).unwrap()
}

/// A cache that is updated in place in the caller's memory, and read by the rest of the graph.
#[test]
fn updates_happen_in_the_callers_memory() {
    let graph = graph(
        r#"{"name": "cache",
        "inputs": [{"name": "cache", "dtype": "float32", "shape": [2, 8, 3]}, {"name": "at", "dtype": "int64", "shape": [2]},
                   {"name": "new", "dtype": "float32", "shape": [2, 2, 3]}],
        "nodes": [
          {"op": "index_copy", "attrs": {"axis": 1}, "inputs": ["cache", "at", "new"], "output": "after"},
          {"op": "unary", "attrs": {"kind": "neg"}, "inputs": ["after"], "output": "y"}],
        "outputs": ["y"], "updates": [["cache", "after"]]}"#,
    );
    let inputs = [
        drawn(DType::F32, &[2, 8, 3], 1),
        Tensor::from_ints(DType::I64, &[2], &[3, 6]),
        drawn(DType::F32, &[2, 2, 3], 2),
    ];
    let compiled = agrees(&graph, &inputs, 0.0);
    assert_eq!(compiled.steps().map(|step| step.op).collect::<Vec<_>>(), ["index_copy", "unary"]);
    let mut far = inputs.clone();
    far[1] = Tensor::from_ints(DType::I64, &[2], &[3, 8]);
    assert!(matches!(run(&compiled, &far), Err(ExecError::Kernel { op: "index_copy", .. })));
}

/// The same value on both sides, over which the result is written.
#[test]
fn a_value_may_be_added_to_itself_in_place() {
    let graph = graph(
        r#"{"name": "twice", "inputs": [{"name": "x", "dtype": "float32", "shape": [40]}],
        "nodes": [
          {"op": "unary", "attrs": {"kind": "neg"}, "inputs": ["x"], "output": "a"},
          {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["a", "a"], "output": "b"},
          {"op": "unary", "attrs": {"kind": "exp"}, "inputs": ["b"], "output": "c"},
          {"op": "binary", "attrs": {"kind": "sub"}, "inputs": ["c", "x"], "output": "y"}],
        "outputs": ["y"]}"#,
    );
    let compiled = agrees(&graph, &[drawn(DType::F32, &[40], 4)], 1e-6);
    assert_eq!(compiled.arena(), 0, "one value lives at a time, in the memory of the result");
}

/// No primitive makes 8-bit floats: the reference does, from the first run on.
#[test]
fn a_kernel_that_fails_is_followed_by_the_next() {
    let graph = graph(
        r#"{"name": "narrow", "inputs": [{"name": "x", "dtype": "float32", "shape": [5]}],
        "nodes": [{"op": "cast", "attrs": {"dtype": "float8_e4m3fn"}, "inputs": ["x"], "output": "y"}], "outputs": ["y"]}"#,
    );
    let compiled = agrees(&graph, &[drawn(DType::F32, &[5], 4)], 0.0);
    let failures = compiled.failures();
    assert_eq!((failures.len(), compiled.failed(), &*failures[0].kernel), (1, 1, "primitive.cast"));
    assert_eq!(kernels(&compiled), ["reference.cast"]);
}

#[test]
fn inputs_of_another_kind_are_errors() {
    let x = drawn(DType::F32, &[3, 48], 1);
    let compiled = compiled(&mlp(), std::slice::from_ref(&x), &options());
    for wrong in [drawn(DType::F32, &[4, 48], 1), drawn(DType::F64, &[3, 48], 1)] {
        let error = run(&compiled, &[wrong]).unwrap_err();
        assert!(matches!(&error, ExecError::External(_)), "{error}");
        assert!(error.to_string().starts_with("'x' is float"), "{error}");
    }
    assert!(matches!(run(&compiled, &[]), Err(ExecError::External(_))));
    assert!(run(&compiled, &[x]).is_ok());
}

struct Doubler;

impl super::kernel::Host for Doubler {
    fn call(
        &self,
        call: u32,
        result: u32,
        inputs: &[lz_abi::TensorRef<'_>],
        output: &mut lz_abi::TensorMut<'_>,
    ) -> Result<(), lz_abi::KernelError> {
        assert_eq!((call, result), (3, 1));
        let numbers = inputs[0].to_f64();
        for (at, index) in lz_abi::indices(output.shape()).enumerate() {
            output.set(&index, 2.0 * numbers[at]);
        }
        Ok(())
    }
}

#[test]
fn calls_of_the_program_are_made_by_it() {
    let graph = graph(
        r#"{"name": "host", "inputs": [{"name": "x", "dtype": "float32", "shape": [5]}],
        "nodes": [
          {"op": "host", "attrs": {"call": 3, "result": 1, "target": "double", "dtype": "float32", "shape": [5]},
           "inputs": ["x"], "output": "a"},
          {"op": "unary", "attrs": {"kind": "neg"}, "inputs": ["a"], "output": "y"}], "outputs": ["y"]}"#,
    );
    let mut x = Tensor::from_f64(DType::F32, &[5], &[1., 2., 3., 4., 5.]);
    let compiled = compiled(&graph, std::slice::from_ref(&x), &options());
    let mut y = Tensor::zeros(DType::F32, &[5]);
    {
        let (mut x, mut y) = (x.view_mut(), y.view_mut());
        let mut externals = [External::Write(x.as_mut()), External::Write(y.as_mut())];
        let said = compiled.run(&mut externals).unwrap_err().to_string();
        assert!(said.contains("call 3 of the program"), "{said}");
        compiled.run_with(&mut externals, &Doubler).unwrap();
        let times = super::profile::profile(&compiled, &mut externals, &Doubler, 3).unwrap();
        assert_eq!(times.iter().map(|time| &*time.step.kernel).collect::<Vec<_>>(), ["host.double", "primitive.unary"]);
        assert!(times.iter().all(|time| time.bytes_per_second() > 0.0));
    }
    assert_eq!(y.to_f64(), [-2., -4., -6., -8., -10.]);
}

/// Measuring chooses among the same kernels, and changes no result.
#[test]
fn measured_choices_agree() {
    let chooser = std::sync::Arc::new(super::choosing::Timed { rounds: 2, noise: 0.0 });
    let x = drawn(DType::F32, &[9, 48], 7);
    let timed = compiled(&mlp(), std::slice::from_ref(&x), &Options { chooser, ..options() });
    let (expected, _) = interpreted::run(&mlp(), &[x.view()]).unwrap();
    for (a, b) in run(&timed, &[x]).unwrap().0.iter().zip(&expected) {
        close(a, b, 1e-6);
    }
    assert!(timed.steps().all(|step| step.candidates.len() == 1 || !step.kernel.starts_with("reference")));
}

/// A view of a constant is no constant of its own.
#[test]
fn a_constant_may_be_read_through_a_view() {
    let w = drawn(DType::F32, &[6, 4], 3);
    let graph = Graph::from_document(
        r#"{"name": "turned", "inputs": [{"name": "x", "dtype": "float32", "shape": [2, 4]}], "constants": ["w"],
        "nodes": [
          {"op": "permute", "attrs": {"axes": [1, 0]}, "inputs": ["w"], "output": "t"},
          {"op": "matmul", "attrs": {}, "inputs": ["x", "t"], "output": "y"}], "outputs": ["y"]}"#,
        vec![Constant::owned("w", w)],
    )
    .unwrap();
    agrees(&graph, &[drawn(DType::F32, &[2, 4], 4)], 1e-6);
}

/// What is packed is the weight as the product reads it, not the constant it is a view of.
#[test]
fn a_packed_weight_may_be_a_view_of_a_constant() {
    let view = |op: &str, attrs: &str, shape: &[i64]| {
        let text = format!(
            r#"{{"name": "seen", "inputs": [{{"name": "x", "dtype": "float32", "shape": [3, 4]}}], "constants": ["w"],
            "nodes": [
              {{"op": "{op}", "attrs": {attrs}, "inputs": ["w"], "output": "t"}},
              {{"op": "matmul", "attrs": {{}}, "inputs": ["x", "t"], "output": "y"}},
              {{"op": "matmul", "attrs": {{"transpose_b": true}}, "inputs": ["x", "t"], "output": "z"}}],
            "outputs": ["y", "z"]}}"#
        );
        let weight = Constant::owned("w", drawn(DType::F32, shape, 3));
        let graph = Graph::from_document(&text, vec![weight]).unwrap();
        agrees(&graph, &[drawn(DType::F32, &[3, 4], 4)], 1e-6)
    };
    let turned = view("permute", r#"{"axes": [1, 0]}"#, &[4, 4]);
    assert!(kernels(&turned).iter().all(|name| name.starts_with("lz_cpu.linear_packed")), "{:?}", kernels(&turned));
    assert_eq!(turned.failed(), 0);
    view("slice", r#"{"axis": 0, "start": 0, "end": 4, "step": 1}"#, &[8, 4]);
    view("slice", r#"{"axis": 1, "start": 0, "end": 4, "step": 1}"#, &[4, 6]);
    view("reshape", r#"{"shape": [4, 4]}"#, &[2, 2, 4]);
}

#[test]
fn a_residual_of_float64_is_added_in_place() {
    let text = r#"{"name": "wide", "inputs": [{"name": "x", "dtype": "float64", "shape": [3, 4]}], "constants": ["w"],
        "nodes": [
          {"op": "unary", "attrs": {"kind": "tanh"}, "inputs": ["x"], "output": "t"},
          {"op": "linear", "attrs": {}, "inputs": ["x", "w", null, "t"], "output": "y"}],
        "outputs": ["y"]}"#;
    let weight = Constant::owned("w", drawn(DType::F64, &[4, 4], 3));
    let graph = Graph::from_document(text, vec![weight]).unwrap();
    let compiled = agrees(&graph, &[drawn(DType::F64, &[3, 4], 4)], 1e-12);
    assert_eq!((compiled.failed(), kernels(&compiled)[1].as_str()), (0, "primitive.matmul"));
}

/// A stem, a block with a way around it, planes by themselves, and pools.
const CONVOLUTIONS: &str = r#"{"name": "c", "symbols": [{"name": "s0", "min": 1, "max": 8}],
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["s0", 3, 21, 18]}],
    "constants": ["stem", "bias", "block", "around", "planes"],
    "nodes": [
      {"op": "conv", "attrs": {"stride": [2, 2], "padding": [3, 3], "dilation": [1, 1], "groups": 1},
       "inputs": ["x", "stem", "bias"], "output": "a"},
      {"op": "unary", "attrs": {"kind": "relu"}, "inputs": ["a"], "output": "b"},
      {"op": "pool", "attrs": {"kind": "max", "kernel": [3, 3], "stride": [2, 2], "padding": [1, 1]},
       "inputs": ["b"], "output": "p"},
      {"op": "conv", "attrs": {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 2},
       "inputs": ["p", "block"], "output": "c"},
      {"op": "conv", "attrs": {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1},
       "inputs": ["p", "around"], "output": "d"},
      {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["c", "d"], "output": "e"},
      {"op": "conv", "attrs": {"stride": [1, 1], "padding": [2, 2], "dilation": [2, 2], "groups": 12},
       "inputs": ["e", "planes"], "output": "f"},
      {"op": "pool", "attrs": {"kind": "avg", "kernel": [2, 2], "stride": [2, 2], "padding": [1, 1], "count_padding": false},
       "inputs": ["f"], "output": "y"}],
    "outputs": ["y"]}"#;

#[test]
fn convolutions_agree_with_their_references() {
    let constants: [(&str, &[i64]); 5] = [
        ("stem", &[8, 3, 7, 7]),
        ("bias", &[8]),
        ("block", &[12, 4, 3, 3]),
        ("around", &[12, 8, 1, 1]),
        ("planes", &[12, 1, 3, 3]),
    ];
    let of = |dtype| {
        let constants = constants.iter().enumerate();
        let weight =
            |(i, (name, shape)): (usize, &(&str, &[i64]))| Constant::owned(name, drawn(dtype, shape, 20 + i as u64));
        let text = CONVOLUTIONS.replace("float32", DType::name(dtype));
        Graph::from_document(&text, constants.map(weight).collect()).unwrap()
    };
    let compiled = agrees(&of(DType::F64), &[drawn(DType::F64, &[2, 3, 21, 18], 9)], 1e-12);
    assert!(kernels(&compiled).iter().all(|name| name.starts_with("primitive.")), "{:?}", kernels(&compiled));
    let mut graph = of(DType::F32);
    for images in [1, 3] {
        let compiled = agrees(&graph, &[drawn(DType::F32, &[images, 3, 21, 18], 9)], 2e-6);
        let used = kernels(&compiled);
        assert!(used.iter().all(|name| name.starts_with("primitive.")), "{used:?}");
    }
    crate::passes::optimize(&mut graph, &crate::passes::Options::default()).unwrap();
    let compiled = agrees(&graph, &[drawn(DType::F32, &[2, 3, 21, 18], 9)], 2e-6);
    assert_eq!(kernels(&compiled).iter().filter(|name| *name == "primitive.conv").count(), 4);
}
