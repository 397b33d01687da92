//! What a node and a run cost beside the work: `cargo bench -p lz-graph --bench executor`.

use std::fmt::Write;
use std::time::Instant;

use lz_abi::program::External;
use lz_abi::{DType, Tensor};
use lz_graph::exec::compiled::{Compiled, Options};
use lz_graph::ir::{Graph, Symbols};

/// Nanoseconds of a run: the least of many rounds, which nothing has disturbed.
fn nanoseconds(nodes: usize, elements: usize, inputs: usize) -> f64 {
    let mut document = String::from(r#"{"name": "chain", "inputs": ["#);
    for input in 0..inputs {
        let comma = if input > 0 { "," } else { "" };
        write!(document, r#"{comma}{{"name": "x{input}", "dtype": "float32", "shape": [{elements}]}}"#).unwrap();
    }
    document += r#"], "nodes": ["#;
    for node in 0..nodes {
        let (comma, from) = if node > 0 { (",", format!("y{}", node - 1)) } else { ("", "x0".to_owned()) };
        let (output, other) = (format!("y{node}"), node % inputs);
        write!(
            document,
            r#"{comma}{{"op": "binary", "attrs": {{"kind": "add"}}, "inputs": ["{from}", "x{other}"], "output": "{output}"}}"#
        )
        .unwrap();
    }
    write!(document, r#"], "outputs": ["y{}"]}}"#, nodes - 1).unwrap();
    let graph = Graph::from_document(&document, Vec::new()).unwrap();
    let compiled = Compiled::new(&graph, &Symbols::new(), &Options { threads: 1, ..Options::default() }).unwrap();
    assert_eq!(compiled.steps().len(), nodes);
    let shape = [elements as i64];
    let given: Vec<Tensor> = (0..inputs).map(|_| Tensor::zeros(DType::F32, &shape)).collect();
    let mut output = Tensor::zeros(DType::F32, &shape);
    let views: Vec<_> = given.iter().map(Tensor::view).collect();
    let mut target = output.view_mut();
    let mut externals: Vec<External<'_>> = views.iter().map(|view| External::Read(view.as_ref())).collect();
    externals.push(External::Write(target.as_mut()));
    // Rounds are shorter than a time slice: the least of many was not interrupted.
    let runs = (1000 / nodes).max(1);
    let mut best = f64::INFINITY;
    for _ in 0..3000 {
        let start = Instant::now();
        for _ in 0..runs {
            compiled.run(&mut externals).unwrap();
        }
        best = best.min(start.elapsed().as_secs_f64() / runs as f64);
    }
    best * 1e9
}

fn main() {
    for inputs in [1, 4] {
        let (one, many) = (nanoseconds(inputs, 1, inputs), nanoseconds(1000, 1, inputs));
        let node = (many - one) / (1000 - inputs) as f64;
        println!(
            "{inputs} inputs: {node:.1} ns per node of 1 element, {:.0} ns per run without nodes",
            one - node * inputs as f64
        );
    }
}
