//! Sizes, numbers and addresses at the edges: nothing, the largest, infinite, none.

use std::sync::Arc;

use lz_abi::{DType, Storage, Tensor, TensorView};
use lz_graph::exec::interpreted;
use lz_graph::exec::session::Session;
use lz_graph::ir::{Constant, Graph};
use lz_graph::passes::{self, Options};

use crate::compare::{How, agree, run};
use crate::steps::drawn;

fn graph(inputs: &[(&str, &str, &[i64])], constants: Vec<Constant>, nodes: &str, outputs: &str) -> Graph {
    let inputs: Vec<String> = inputs
        .iter()
        .map(|(name, dtype, shape)| format!(r#"{{"name": "{name}", "dtype": "{dtype}", "shape": {shape:?}}}"#))
        .collect();
    let names: Vec<String> = constants.iter().map(|one| format!("{:?}", one.name())).collect();
    let text = format!(
        r#"{{"name": "edge", "inputs": [{}], "constants": [{}], "nodes": [{nodes}], "outputs": [{outputs}]}}"#,
        inputs.join(", "),
        names.join(", ")
    );
    Graph::from_document(&text, constants).expect("a graph")
}

fn numbers(shape: &[i64]) -> Tensor {
    drawn(DType::F32, shape, 70, 0.0)
}

/// An empty value takes no memory, so its offset in the arena is that of another value.
#[test]
fn an_empty_input_is_not_what_the_result_is_written_over() {
    let relu = |from: &str, to: &str| {
        format!(r#"{{"op": "unary", "attrs": {{"kind": "relu"}}, "inputs": ["{from}"], "output": "{to}"}}"#)
    };
    let nodes = format!(
        r#"{}, {{"op": "concat", "attrs": {{"axis": 0}}, "inputs": ["r", "b"], "output": "c"}},
        {{"op": "cumsum", "attrs": {{"axis": 0}}, "inputs": ["c"], "output": "y"}}"#,
        relu("a", "r")
    );
    let joined = graph(&[("a", "float32", &[0, 4]), ("b", "float32", &[3, 4])], Vec::new(), &nodes, r#""y""#);
    agree(&joined, &[numbers(&[0, 4]), numbers(&[3, 4])]);

    let nodes = format!(
        r#"{}, {}, {{"op": "matmul", "attrs": {{}}, "inputs": ["p", "q"], "output": "c"}},
        {{"op": "cumsum", "attrs": {{"axis": 0}}, "inputs": ["c"], "output": "y"}}"#,
        relu("a", "p"),
        relu("b", "q")
    );
    let product = graph(&[("a", "float32", &[3, 0]), ("b", "float32", &[0, 4])], Vec::new(), &nodes, r#""y""#);
    agree(&product, &[numbers(&[3, 0]), numbers(&[0, 4])]);

    let nodes = format!(
        r#"{}, {{"op": "index_put", "attrs": {{"accumulate": true}}, "inputs": ["a", "r", "i"], "output": "c"}},
        {{"op": "cumsum", "attrs": {{"axis": 0}}, "inputs": ["c"], "output": "y"}}"#,
        relu("b", "r")
    );
    let inputs: [(&str, &str, &[i64]); 3] =
        [("a", "float32", &[3, 4]), ("b", "float32", &[0, 4]), ("i", "int64", &[0])];
    let put = graph(&inputs, Vec::new(), &nodes, r#""y""#);
    agree(&put, &[numbers(&[3, 4]), numbers(&[0, 4]), Tensor::zeros(DType::I64, &[0])]);
}

/// What a graph gives as integers: by its references, by kernels, and computed once.
fn integers(graph: &Graph, given: &[Tensor]) -> [Vec<i64>; 2] {
    let ints = |tensor: &Tensor| {
        lz_abi::indices(tensor.shape()).map(|index| tensor.view().get_int(&index)).collect::<Vec<_>>()
    };
    let views: Vec<TensorView<'_>> = given.iter().map(Tensor::view).collect();
    let references = interpreted::run(graph, &views).expect("references").0;
    let mut optimised = graph.clone();
    passes::optimize(&mut optimised, &Options::default()).expect("passes");
    let found = run(&Session::new(optimised, How::default()), given).expect("kernels");
    [ints(&references[0]), ints(&found[0])]
}

#[test]
fn integers_are_exact_and_wrap() {
    let large = (1i64 << 53) + 1;
    let cases: [(&str, DType, i64, i64, i64); 8] = [
        ("add", DType::U8, 255, 1, 0),
        ("sub", DType::U8, 0, 1, 255),
        ("mul", DType::I8, 100, 3, 44),
        ("add", DType::I64, large, 2, large + 2),
        ("mul", DType::I64, large, large, large.wrapping_mul(large)),
        ("mul", DType::I32, 1 << 20, 1 << 12, 0),
        ("max", DType::I64, large, large - 1, large),
        ("pow", DType::I64, 3, 41, 3i64.wrapping_pow(41)),
    ];
    for (kind, dtype, a, b, wanted) in cases {
        let node = format!(r#"{{"op": "binary", "attrs": {{"kind": "{kind}"}}, "inputs": ["a", "b"], "output": "y"}}"#);
        let (a, b) = (Tensor::from_ints(dtype, &[2], &[a; 2]), Tensor::from_ints(dtype, &[2], &[b; 2]));
        let name = dtype.name();
        let given = graph(&[("a", name, &[2]), ("b", name, &[2])], Vec::new(), &node, r#""y""#);
        assert_eq!(integers(&given, &[a.clone(), b.clone()]), [[wanted; 2], [wanted; 2]], "{kind} of {dtype}");
        // Of constants: the result is computed once, and read by something that is not.
        let last =
            format!(r#"{node}, {{"op": "binary", "attrs": {{"kind": "max"}}, "inputs": ["y", "x"], "output": "z"}}"#);
        let constants = vec![Constant::owned("a", a), Constant::owned("b", b)];
        let folded = graph(&[("x", name, &[2])], constants, &last, r#""z""#);
        let least = Tensor::from_ints(dtype, &[2], &[lz_abi::numeric::lowest(dtype) as i64; 2]);
        assert_eq!(integers(&folded, &[least]), [[wanted; 2], [wanted; 2]], "{kind} of constants of {dtype}");
    }
}

#[test]
fn one_number_everywhere_is_exact() {
    for (dtype, text, wanted) in [
        ("int64", "9223372036854775807", i64::MAX),
        ("int64", "9007199254740993", (1 << 53) + 1),
        ("uint8", "256", 0),
        ("bool", "0.5", 1),
    ] {
        let node = format!(
            r#"{{"op": "full", "attrs": {{"shape": [3], "value": {text}, "dtype": "{dtype}"}}, "inputs": [], "output": "y"}},
            {{"op": "concat", "attrs": {{"axis": 0}}, "inputs": ["y", "x"], "output": "z"}}"#
        );
        let dtype: DType = dtype.parse().expect("an element type");
        let filled = graph(&[("x", dtype.name(), &[1])], Vec::new(), &node, r#""z""#);
        let x = Tensor::from_ints(dtype, &[1], &[1]);
        assert_eq!(integers(&filled, std::slice::from_ref(&x)), [[wanted, wanted, wanted, 1]; 2], "{text}");
        let node = format!(
            r#"{{"op": "pad", "attrs": {{"pads": [[3, 0]], "value": {text}}}, "inputs": ["x"], "output": "z"}}"#
        );
        let padded = graph(&[("x", dtype.name(), &[1])], Vec::new(), &node, r#""z""#);
        assert_eq!(integers(&padded, &[x]), [[wanted, wanted, wanted, 1]; 2], "{text}");
    }
}

const SPECIAL: [f64; 12] =
    [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e4, -1e-3];

#[test]
fn functions_of_infinities_and_of_what_is_no_number() {
    let count = SPECIAL.len() as i64;
    for dtype in [DType::F32, DType::F64, DType::Bf16] {
        let x = Tensor::from_f64(dtype, &[count, 1], &SPECIAL);
        let y = Tensor::from_f64(dtype, &[1, count], &SPECIAL);
        let kinds = "neg abs sign exp log sqrt rsqrt reciprocal sin cos tanh sigmoid relu silu erf gelu gelu_tanh floor \
                     ceil round not";
        for kind in kinds.split_whitespace() {
            let node = format!(r#"{{"op": "unary", "attrs": {{"kind": "{kind}"}}, "inputs": ["x"], "output": "y"}}"#);
            let one = graph(&[("x", dtype.name(), &[count, 1])], Vec::new(), &node, r#""y""#);
            agree(&one, std::slice::from_ref(&x));
        }
        for kind in "add sub mul div max min remainder floor_div eq ne lt le gt ge".split(' ') {
            let node =
                format!(r#"{{"op": "binary", "attrs": {{"kind": "{kind}"}}, "inputs": ["x", "y"], "output": "z"}}"#);
            let inputs: [(&str, &str, &[i64]); 2] =
                [("x", dtype.name(), &[count, 1]), ("y", dtype.name(), &[1, count])];
            agree(&graph(&inputs, Vec::new(), &node, r#""z""#), &[x.clone(), y.clone()]);
        }
        for node in [
            r#"{"op": "cast", "attrs": {"dtype": "bool"}, "inputs": ["x"], "output": "y"}"#,
            r#"{"op": "cast", "attrs": {"dtype": "int32"}, "inputs": ["x"], "output": "y"}"#,
            r#"{"op": "reduce", "attrs": {"kind": "max", "axes": [1], "keepdim": false}, "inputs": ["x"], "output": "y"}"#,
            r#"{"op": "softmax", "attrs": {"axis": -1}, "inputs": ["x"], "output": "y"}"#,
        ] {
            agree(&graph(&[("x", dtype.name(), &[count, 1])], Vec::new(), node, r#""y""#), std::slice::from_ref(&x));
        }
    }
}

/// A tensor behind its first byte.
struct Shifted {
    bytes: Tensor,
    shape: Vec<i64>,
}

// SAFETY: the bytes are on the heap, and nobody writes them.
#[allow(unsafe_code)] // who implements it promises that
unsafe impl Storage for Shifted {
    fn view(&self) -> TensorView<'_> {
        TensorView::contiguous(DType::F32, &self.shape, &self.bytes.bytes()[1..]).expect("bytes for every element")
    }
}

/// Without channels there is nothing to multiply: the result is the bias.
#[test]
fn a_convolution_of_no_channels_is_its_bias() {
    let empty = Constant::owned("w", Tensor::zeros(DType::F32, &[5, 0, 3]));
    let bias = Constant::owned("b", drawn(DType::F32, &[5], 3, 0.0));
    for padding in [0, 1] {
        let node = format!(
            r#"{{"op": "conv", "attrs": {{"stride": [1], "padding": [{padding}], "dilation": [1], "groups": 1}},
            "inputs": ["x", "w", "b"], "output": "y"}}"#
        );
        let conv = graph(&[("x", "float32", &[2, 0, 7])], vec![empty.clone(), bias.clone()], &node, r#""y""#);
        agree(&conv, &[numbers(&[2, 0, 7])]);
    }
}

#[test]
fn a_constant_may_lie_at_any_address() {
    let shifted = |name: &str, shape: &[i64], seed: u64| {
        let tensor = drawn(DType::F32, shape, seed, 0.0);
        let bytes: Vec<i64> = std::iter::once(&0).chain(tensor.bytes()).map(|&byte| i64::from(byte)).collect();
        let bytes = Tensor::from_ints(DType::U8, &[bytes.len() as i64], &bytes);
        Constant::new(name, Arc::new(Shifted { bytes, shape: shape.to_vec() }))
    };
    let nodes = r#"{"op": "linear", "attrs": {}, "inputs": ["x", "w", "b"], "output": "h"},
        {"op": "matmul", "attrs": {"transpose_b": true}, "inputs": ["h", "v"], "output": "m"},
        {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["m", "c"], "output": "y"}"#;
    let constants =
        vec![shifted("w", &[5, 4], 1), shifted("b", &[5], 2), shifted("v", &[4, 5], 3), shifted("c", &[3, 4], 4)];
    agree(&graph(&[("x", "float32", &[3, 4])], constants, nodes, r#""y""#), &[numbers(&[3, 4])]);
}
