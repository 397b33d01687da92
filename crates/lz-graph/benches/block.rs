//! A block of GPT-2 with random weights: `cargo bench -p lz-graph --bench block -- [profile]`.

use std::sync::Arc;
use std::time::Instant;

use lz_abi::program::External;
use lz_abi::{DType, Tensor};
use lz_graph::exec::choosing::Timed;
use lz_graph::exec::compiled::Options;
use lz_graph::exec::kernel::NoHost;
use lz_graph::exec::profile::profile;
use lz_graph::exec::session::Session;
use lz_graph::ir::{Constant, Graph};

const HIDDEN: i64 = 768;
const HEADS: i64 = 12;

/// One node of a document.
fn node(op: &str, attrs: &str, inputs: &[&str], output: &str) -> String {
    let inputs: Vec<String> = inputs.iter().map(|name| format!("\"{name}\"")).collect();
    let inputs = inputs.join(", ");
    format!(r#"{{"op": "{op}", "attrs": {{{attrs}}}, "inputs": [{inputs}], "output": "{output}"}}"#)
}

fn block() -> Graph {
    let norm = r#""eps": 1e-5, "axes": 1"#;
    let mut nodes =
        vec![node("layer_norm", norm, &["x", "g1", "b1"], "n1"), node("linear", "", &["n1", "wqkv", "bqkv"], "qkv")];
    for (part, name) in ["q", "k", "v"].into_iter().enumerate() {
        let (start, end) = (part as i64 * HIDDEN, (part as i64 + 1) * HIDDEN);
        let cut = format!(r#""axis": 2, "start": {start}, "end": {end}, "step": 1"#);
        let heads = format!(r#""shape": [1, "s", {HEADS}, {}]"#, HIDDEN / HEADS);
        let names = [format!("{name}0"), format!("{name}1")];
        nodes.push(node("slice", &cut, &["qkv"], &names[0]));
        nodes.push(node("reshape", &heads, &[&names[0]], &names[1]));
        nodes.push(node("permute", r#""axes": [0, 2, 1, 3]"#, &[&names[1]], name));
    }
    nodes.extend([
        node("attention", r#""causal": true"#, &["q", "k", "v"], "a0"),
        node("permute", r#""axes": [0, 2, 1, 3]"#, &["a0"], "a1"),
        node("reshape", &format!(r#""shape": [1, "s", {HIDDEN}]"#), &["a1"], "a"),
        node("linear", "", &["a", "wo", "bo", "x"], "r"),
        node("layer_norm", norm, &["r", "g2", "b2"], "n2"),
        node("linear", r#""activation": "gelu_tanh""#, &["n2", "wup", "bup"], "u"),
        node("linear", "", &["u", "wdown", "bdown", "r"], "y"),
    ]);
    let shapes: [(&str, Vec<i64>); 12] = [
        ("g1", vec![HIDDEN]),
        ("b1", vec![HIDDEN]),
        ("wqkv", vec![3 * HIDDEN, HIDDEN]),
        ("bqkv", vec![3 * HIDDEN]),
        ("wo", vec![HIDDEN, HIDDEN]),
        ("bo", vec![HIDDEN]),
        ("g2", vec![HIDDEN]),
        ("b2", vec![HIDDEN]),
        ("wup", vec![4 * HIDDEN, HIDDEN]),
        ("bup", vec![4 * HIDDEN]),
        ("wdown", vec![HIDDEN, 4 * HIDDEN]),
        ("bdown", vec![HIDDEN]),
    ];
    let names: Vec<String> = shapes.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    let document = format!(
        r#"{{"name": "block", "symbols": [{{"name": "s", "min": 1, "max": 1024}}],
        "inputs": [{{"name": "x", "dtype": "float32", "shape": [1, "s", {HIDDEN}]}}],
        "constants": [{}], "nodes": [{}], "outputs": ["y"]}}"#,
        names.join(", "),
        nodes.join(", ")
    );
    let constants = shapes.iter().map(|(name, shape)| Constant::owned(name, drawn(shape)));
    Graph::from_document(&document, constants.collect()).expect("the document is right")
}

/// Small numbers of both signs.
fn drawn(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let numbers: Vec<f64> = (0..count).map(|i| ((i * 7919 % 1009) as f64 / 1009.0 - 0.5) * 0.1).collect();
    Tensor::from_f64(DType::F32, shape, &numbers)
}

fn main() {
    let profiled = std::env::args().any(|arg| arg == "profile");
    for threads in [1, 2] {
        for timed in [false, true] {
            let mut options = Options { threads, ..Options::default() };
            if timed {
                options.chooser = Arc::new(Timed::default());
            }
            let session = Session::new(block(), options);
            for tokens in [1, 16, 128, 512] {
                let x = drawn(&[1, tokens, HIDDEN]);
                let mut y = Tensor::zeros(DType::F32, &[1, tokens, HIDDEN]);
                let (x, mut y) = (x.view(), y.view_mut());
                let mut externals = [External::Read(x.as_ref()), External::Write(y.as_mut())];
                let mut times: Vec<f64> = (0..(4096 / tokens).clamp(15, 200))
                    .map(|_| {
                        let start = Instant::now();
                        session.run(&mut externals, &NoHost).expect("the block runs");
                        start.elapsed().as_secs_f64() * 1e3
                    })
                    .collect();
                times.sort_by(f64::total_cmp);
                let compiled = session.compiled(&[(DType::F32, &[1, tokens, HIDDEN])]).expect("it was compiled");
                let (median, least, arena) = (times[times.len() / 2], times[0], compiled.arena() >> 10);
                println!(
                    "{threads} threads, {tokens} tokens, timed {timed}: median {median:.3} ms, least {least:.3} ms, arena {arena} KiB"
                );
                if profiled {
                    for row in profile(&compiled, &mut externals, &NoHost, 15).expect("the block runs") {
                        let (step, rate) = (&row.step, row.flops_per_second() / 1e9);
                        println!("  {:10} {:36} {:?} {rate:.1} GFLOP/s", step.op, step.kernel, row.median);
                    }
                }
            }
        }
    }
}
