//! Attention over a cache in the caller's memory, of which a part is written.

use super::*;

/// New tokens of some sequences: a cache of keys is written and attended to, values are given.
fn step(op: &str, [batch, heads, shared, queries, capacity, width]: [i64; 6]) -> Graph {
    graph(&format!(
        r#"{{"name": "step", "inputs": [
          {{"name": "q", "dtype": "float32", "shape": [{batch}, {queries}, {heads}, {width}]}},
          {{"name": "cache", "dtype": "float32", "shape": [{batch}, {shared}, {capacity}, {width}]}},
          {{"name": "values", "dtype": "float32", "shape": [{batch}, {shared}, {capacity}, {width}]}},
          {{"name": "new", "dtype": "float32", "shape": [{batch}, {shared}, {queries}, {width}]}},
          {{"name": "places", "dtype": "int64", "shape": [{queries}]}},
          {{"name": "position", "dtype": "int64", "shape": [1]}},
          {{"name": "firsts", "dtype": "int64", "shape": [{batch}]}}],
        "nodes": [
          {{"op": "permute", "attrs": {{"axes": [0, 2, 1, 3]}}, "inputs": ["q"], "output": "heads"}},
          {{"op": "index_copy", "attrs": {{"axis": 2}}, "inputs": ["cache", "places", "new"], "output": "keys"}},
          {{"op": "cached_attention", "attrs": {op},
            "inputs": ["heads", "keys", "values", "position", "firsts"], "output": "attended"}},
          {{"op": "permute", "attrs": {{"axes": [0, 2, 1, 3]}}, "inputs": ["attended"], "output": "y"}}],
        "outputs": ["y"], "updates": [["cache", "keys"]]}}"#
    ))
}

/// The tensors of a call at a position. What is not written is NaN, which nobody may read.
fn tensors([batch, heads, shared, queries, capacity, width]: [i64; 6], position: i64, firsts: &[i64]) -> Vec<Tensor> {
    let end = position + queries;
    let cache = |seed: u64, written: i64| {
        let whole = drawn(DType::F32, &[batch, shared, capacity, width], seed);
        let numbers = whole.to_f64().into_iter().enumerate();
        let place = |at: usize| at as i64 / width % capacity;
        let numbers: Vec<f64> = numbers.map(|(at, x)| if place(at) < written { x } else { f64::NAN }).collect();
        Tensor::from_f64(DType::F32, whole.shape(), &numbers)
    };
    let places: Vec<i64> = (position..end).collect();
    vec![
        drawn(DType::F32, &[batch, queries, heads, width], 1),
        cache(2, position),
        cache(3, end),
        drawn(DType::F32, &[batch, shared, queries, width], 4),
        Tensor::from_ints(DType::I64, &[queries], &places),
        Tensor::from_ints(DType::I64, &[1], &[position]),
        Tensor::from_ints(DType::I64, &[batch], firsts),
    ]
}

#[test]
fn only_what_is_written_is_read() {
    for (heads, shared) in [(4, 4), (4, 2)] {
        for queries in [1, 2, 9] {
            for op in [r#"{}"#, r#"{"window": 3}"#, r#"{"scale": 0.3, "softcap": 2.0}"#] {
                let sizes = [2, heads, shared, queries, 40, 16];
                for (position, firsts) in [(0, [0, 0]), (7, [0, 0]), (7, [5, 0]), (40 - queries, [0, 3])] {
                    let compiled = agrees(&step(op, sizes), &tensors(sizes, position, &firsts), 2e-5);
                    let kernels: Vec<_> = compiled.steps().map(|step| (step.op, step.kernel)).collect();
                    let attends = kernels.iter().find(|(op, _)| *op == "cached_attention").unwrap();
                    assert!(!attends.1.starts_with("reference"), "{kernels:?}");
                    // The cache is written where it lies, and queries are read where they do.
                    let ops: Vec<_> = kernels.iter().map(|(op, _)| *op).collect();
                    assert_eq!(ops[..2], ["index_copy", "cached_attention"], "{kernels:?}");
                    assert_eq!(compiled.failed(), 0, "{:?}", compiled.failures());
                }
            }
        }
    }
}

/// Left padding: queries before the first key of their sequence give 0.
#[test]
fn padding_attends_to_nothing() {
    let sizes = [2, 2, 2, 6, 8, 16];
    let compiled = agrees(&step("{}", sizes), &tensors(sizes, 0, &[0, 4]), 2e-5);
    let (given, _) = run(&compiled, &tensors(sizes, 0, &[0, 4])).unwrap();
    let padding = given[0].view().part(0, 1, 1).part(1, 0, 4).to_f64();
    assert!(padding.iter().all(|&x| x == 0.0), "{padding:?}");
}

#[test]
fn positions_outside_the_cache_are_the_callers_mistake() {
    let sizes = [1, 2, 2, 1, 8, 16];
    let compiled = compiled(&step("{}", sizes), &tensors(sizes, 0, &[0]), &options());
    let mut far = tensors(sizes, 0, &[0]);
    far[5] = Tensor::from_ints(DType::I64, &[1], &[8]);
    let Err(ExecError::Kernel { op: "cached_attention", why, .. }) = run(&compiled, &far) else { panic!("it ran") };
    assert!(why.is_callers_fault() && why.to_string().contains("the cache has room for 8 tokens"), "{why}");
}
