//! Bugs that spec 002 tells of, and the tests that would find each here. Tests named without a file are in this one.
//!
//! | what was wrong there | test |
//! |---|---|
//! | any transpose was absorbed into a product, also one that splits heads | `passes/tests/linear.rs`: `permutes_of_other_axes_are_not_absorbed` |
//! | a transposition was of two axes only | [`axes_are_swapped_in_any_rank`] |
//! | a weight of two axes was read beyond its end by the second matrix of a batch | [`a_weight_serves_every_matrix_of_a_batch`] |
//! | every sum was taken for a bias | [`a_sum_is_of_elements_of_rows_or_of_columns`], `passes/tests/linear.rs`: `only_a_vector_of_the_last_axis_is_a_bias` |
//! | a reshape copied four bytes of each element | [`ids_are_reshaped_whole`] |
//! | a reshape of an input had no memory when the plan was made | [`ids_are_reshaped_whole`], which has one of the same sizes too |
//! | an alias that was rejected was taken for dead at once | `tests/plan/regressions.rs`: `reshaped_ids_live_until_they_are_read` |
//! | a chain was not written in one place | `tests/plan/regressions.rs`: `a_chain_of_results_is_written_in_one_place` |
//! | a value was written over while a view of it was needed | `tests/plan/regressions.rs`: `nothing_is_written_over_a_value_that_a_view_of_it_still_needs` |
//! | scores of an order were stale, and `x + x` was counted once | `tests/plan/regressions.rs`: `a_sum_of_a_value_with_itself_…`; plans of random graphs in `properties.rs` |
//! | a fused node was added before those it replaces were removed, and lost its producer | `passes/tests/linear.rs`: `a_chain_of_fusions_leaves_no_node_without_a_producer` |
//! | transposed weights were folded into copies before they were absorbed | `passes/tests/order.rs`: `transposes_are_absorbed_before_they_are_folded` |
//! | a weight was transposed where it lies, under its other readers | [`a_weight_with_two_readers_is_the_same_for_both`] |
//! | slices of inner axes ended the single call | [`slices_of_inner_axes_are_read_where_they_lie`] |
//! | parts of a split shared state while they were exported | `tests/torch/test_export_handlers.py`: `splits`, `split_one` |
//! | masks were known in one of two formats | `passes/tests/attention.rs`: `constant_masks_are_recognised` |
//! | attention that is written out was not found | `passes/tests/attention.rs`: `softmax_that_is_written_out_is_attention_too` |
//! | GELU was not found, because its input has two readers | `passes/tests/elementwise.rs`: `gelu_is_found_in_both_forms` |
//! | operations that were to be folded reached the run | `tests/plan/bad_graphs.rs`: `nodes_without_kernels_do_not_run` |
//! | scratch memory was shared by threads, or lived too long | `tests/plan/regressions.rs`: `scratch_lives_for_one_step`; [`many_heads_by_several_threads`] |
//! | a constant of the model was too large to be computed ahead | `passes/tests/elementwise.rs`: `constants_are_computed_once_and_not_blown_up` |

use lz_abi::{DType, Tensor};
use lz_graph::ir::{Constant, Graph};

use crate::compare::agree;
use crate::steps::drawn;

fn graph(inputs: &str, constants: &[(&str, &[i64])], nodes: &str, outputs: &str) -> Graph {
    let names: Vec<String> = constants.iter().map(|(name, _)| format!("{name:?}")).collect();
    let text = format!(
        r#"{{"name": "told", "inputs": [{inputs}], "constants": [{}], "nodes": [{nodes}], "outputs": [{outputs}]}}"#,
        names.join(", ")
    );
    let weight = |(seed, (name, shape)): (usize, &(&str, &[i64]))| {
        Constant::owned(name, drawn(DType::F32, shape, seed as u64, 0.0))
    };
    Graph::from_document(&text, constants.iter().enumerate().map(weight).collect()).expect("a graph")
}

fn numbers(shape: &[i64]) -> Tensor {
    drawn(DType::F32, shape, 70, 0.0)
}

#[test]
fn axes_are_swapped_in_any_rank() {
    let axes: [&[i64]; 6] = [&[1, 0], &[0, 2, 1], &[2, 1, 0], &[0, 2, 1, 3], &[3, 1, 2, 0], &[0, 3, 4, 1, 2]];
    for order in axes {
        let shape: Vec<i64> = (2..2 + order.len() as i64).collect();
        let input = format!(r#"{{"name": "x", "dtype": "float32", "shape": {shape:?}}}"#);
        let node = format!(
            r#"{{"op": "permute", "attrs": {{"axes": {order:?}}}, "inputs": ["x"], "output": "y"}},
            {{"op": "unary", "attrs": {{"kind": "tanh"}}, "inputs": ["y"], "output": "z"}}"#
        );
        agree(&graph(&input, &[], &node, r#""y", "z""#), &[numbers(&shape)]);
    }
}

#[test]
fn a_weight_serves_every_matrix_of_a_batch() {
    for shape in [&[5, 4][..], &[3, 5, 4], &[2, 3, 5, 4], &[2, 1, 3, 5, 4]] {
        let input = format!(r#"{{"name": "x", "dtype": "float32", "shape": {shape:?}}}"#);
        let node = r#"{"op": "matmul", "attrs": {}, "inputs": ["x", "w"], "output": "y"},
            {"op": "matmul", "attrs": {"transpose_b": true}, "inputs": ["x", "v"], "output": "z"}"#;
        agree(&graph(&input, &[("w", &[4, 6]), ("v", &[6, 4])], node, r#""y", "z""#), &[numbers(shape)]);
    }
}

#[test]
fn a_sum_is_of_elements_of_rows_or_of_columns() {
    for added in [&[3, 4, 4][..], &[4], &[4, 1], &[3, 1, 1], &[1], &[3, 1, 4]] {
        let input = r#"{"name": "x", "dtype": "float32", "shape": [3, 4, 4]}"#;
        let node = r#"{"op": "matmul", "attrs": {}, "inputs": ["x", "w"], "output": "p"},
            {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["p", "b"], "output": "y"},
            {"op": "unary", "attrs": {"kind": "relu"}, "inputs": ["y"], "output": "z"}"#;
        agree(&graph(input, &[("w", &[4, 4]), ("b", added)], node, r#""z""#), &[numbers(&[3, 4, 4])]);
    }
}

#[test]
fn ids_are_reshaped_whole() {
    for shape in ["[1, 16]", "[16]", "[2, 8]", "[2, 2, 4]"] {
        let node = format!(
            r#"{{"op": "reshape", "attrs": {{"shape": {shape}}}, "inputs": ["ids"], "output": "flat"}},
            {{"op": "embedding", "attrs": {{}}, "inputs": ["table", "flat"], "output": "y"}},
            {{"op": "unary", "attrs": {{"kind": "tanh"}}, "inputs": ["y"], "output": "z"}}"#
        );
        let input = r#"{"name": "ids", "dtype": "int64", "shape": [1, 16]}"#;
        let ids = drawn(DType::I64, &[1, 16], 5, 0.0);
        agree(&graph(input, &[("table", &[4, 48])], &node, r#""flat", "z""#), &[ids]);
    }
}

#[test]
fn a_weight_with_two_readers_is_the_same_for_both() {
    let inputs = r#"{"name": "ids", "dtype": "int64", "shape": [2, 3]}"#;
    let nodes = r#"{"op": "embedding", "attrs": {}, "inputs": ["table", "ids"], "output": "x"},
        {"op": "matmul", "attrs": {}, "inputs": ["x", "w"], "output": "h"},
        {"op": "permute", "attrs": {"axes": [1, 0]}, "inputs": ["w"], "output": "turned"},
        {"op": "matmul", "attrs": {}, "inputs": ["h", "turned"], "output": "back"},
        {"op": "matmul", "attrs": {"transpose_b": true}, "inputs": ["back", "table"], "output": "logits"}"#;
    let graph = graph(inputs, &[("table", &[4, 4]), ("w", &[4, 4])], nodes, r#""logits", "turned""#);
    agree(&graph, &[drawn(DType::I64, &[2, 3], 5, 0.0)]);
}

#[test]
fn slices_of_inner_axes_are_read_where_they_lie() {
    let part = |name: &str, start: i64| {
        format!(
            r#"{{"op": "slice", "attrs": {{"axis": 2, "start": {start}, "end": {}, "step": 1}}, "inputs": ["p"], "output": "{name}"}}"#,
            start + 4
        )
    };
    let nodes = [
        r#"{"op": "matmul", "attrs": {}, "inputs": ["x", "w"], "output": "p"}"#.to_owned(),
        part("q", 0),
        part("k", 4),
        part("v", 8),
        r#"{"op": "matmul", "attrs": {"transpose_b": true}, "inputs": ["q", "k"], "output": "s"}"#.to_owned(),
        r#"{"op": "softmax", "attrs": {"axis": -1}, "inputs": ["s"], "output": "t"}"#.to_owned(),
        r#"{"op": "matmul", "attrs": {}, "inputs": ["t", "v"], "output": "y"}"#.to_owned(),
    ];
    let input = r#"{"name": "x", "dtype": "float32", "shape": [2, 5, 4]}"#;
    agree(&graph(input, &[("w", &[4, 12])], &nodes.join(","), r#""y", "k""#), &[numbers(&[2, 5, 4])]);
}

#[test]
fn many_heads_by_several_threads() {
    let input = r#"{"name": "x", "dtype": "float32", "shape": [3, 8, 17, 8]}"#;
    for causal in [true, false] {
        let node = format!(
            r#"{{"op": "attention", "attrs": {{"causal": {causal}, "top_left": false}}, "inputs": ["x", "x", "x"], "output": "y"}}"#
        );
        agree(&graph(input, &[], &node, r#""y""#), &[numbers(&[3, 8, 17, 8])]);
    }
}
