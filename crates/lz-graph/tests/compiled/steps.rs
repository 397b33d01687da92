//! Random graphs, one step at a time: a step that does not fit is left out, so that steps may be drawn carelessly.

use lz_abi::{DType, Tensor};
use lz_graph::ir::{Constant, Dim, Graph, Meta, Symbol, ValueId};
use lz_graph::ops::Op;
use serde_json::{Value, json};

/// Numbers that choose an operation, what it reads, and its attributes.
pub type Step = (u8, u16, u16, u16, u32);

/// Numbers between -1 and 1 that are the same at every run.
pub fn drawn(dtype: DType, shape: &[i64], seed: u64, nudge: f64) -> Tensor {
    let number = |i: i64| {
        let mut z = (seed << 32).wrapping_add(i as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let number = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
        match dtype {
            DType::Bool => f64::from(number > -0.2),
            DType::I64 | DType::I32 => ((number + 1.0) * 2.0).floor(),
            _ => number * (1.0 + nudge * if z & 1 == 0 { 1.0 } else { -1.0 }),
        }
    };
    Tensor::from_f64(dtype, shape, &(0..shape.iter().product::<i64>()).map(number).collect::<Vec<_>>())
}

/// A graph that is made of steps.
struct Made {
    graph: Graph,
    values: Vec<ValueId>,
    float: DType,
    nudge: f64,
    weights: u64,
}

impl Made {
    fn weight(&mut self, shape: &[i64]) -> ValueId {
        self.weights += 1;
        let tensor = drawn(self.float, shape, self.weights, self.nudge);
        self.graph.add_constant(Constant::owned("w", tensor))
    }

    fn number(&mut self, dtype: DType, number: f64) -> ValueId {
        self.graph.add_constant(Constant::number("n", dtype, number))
    }

    fn rank(&self, value: ValueId) -> usize {
        self.graph.meta(value).rank()
    }

    fn last(&self, value: ValueId) -> i64 {
        self.graph.meta(value).shape.last().and_then(Dim::known).unwrap_or(0)
    }

    /// Adds a node, if it fits.
    fn push(&mut self, name: &str, attrs: Value, inputs: &[ValueId]) -> Option<ValueId> {
        let op = Op::named(name, attrs).ok()?;
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        let made = self.graph.push(op, &inputs, "v", "").ok()?;
        self.values.push(made);
        Some(made)
    }

    /// A value like another one, or any.
    fn like(&self, one: ValueId, at: u16) -> ValueId {
        let same: Vec<ValueId> =
            self.values.iter().copied().filter(|&v| self.graph.meta(v) == self.graph.meta(one)).collect();
        if at.is_multiple_of(5) {
            return self.values[usize::from(at) % self.values.len()];
        }
        same[usize::from(at) % same.len()]
    }

    fn step(&mut self, &(kind, first, second, third, how): &Step) -> Option<ValueId> {
        let count = self.values.len();
        // Mostly what was made last.
        let near = usize::from(first) % 4;
        let x = if near < 3 {
            self.values[count - 1 - near.min(count - 1)]
        } else {
            self.values[usize::from(first) % count]
        };
        let (y, z) = (self.like(x, second), self.like(x, third));
        let rank = self.rank(x) as i64;
        let pick = |n: usize| (how >> 8) as usize % n;
        let axis = if rank > 0 { i64::from(how % 8) % (2 * rank) - rank } else { -1 };
        let flag = how & 0x80 != 0;
        let dtype = self.graph.meta(x).dtype;
        match kind % 40 {
            0 | 1 => {
                let kinds = "neg abs sign exp sin cos tanh sigmoid relu silu gelu gelu_tanh erf floor ceil round not"
                    .split(' ');
                let kinds: Vec<&str> = kinds.collect();
                self.push("unary", json!({"kind": kinds[pick(kinds.len())]}), &[x])
            }
            2 => {
                let square = self.push("binary", json!({"kind": "mul"}), &[x, x])?;
                let one = self.number(dtype, 0.5);
                let above = self.push("binary", json!({"kind": "add"}), &[square, one])?;
                let kind = ["log", "sqrt", "rsqrt", "reciprocal"][pick(4)];
                self.push("unary", json!({"kind": kind}), &[above])
            }
            3..=6 => {
                let kinds = "add add sub mul mul max min eq ne lt le gt ge and or xor".split(' ');
                let kinds: Vec<&str> = kinds.collect();
                let pair = if flag { [x, y] } else { [y, x] };
                self.push("binary", json!({"kind": kinds[pick(kinds.len())]}), &pair)
            }
            7 => {
                let kind = ["add", "mul", "sub", "div", "max", "pow", "remainder", "floor_div"][pick(8)];
                let by = [2.0, 0.5, 1.0, 3.0][(how >> 16) as usize % 4];
                let number = self.number(dtype, by);
                let swapped = flag && matches!(kind, "add" | "mul" | "sub" | "max");
                let pair = if swapped { [number, x] } else { [x, number] };
                self.push("binary", json!({"kind": kind}), &pair)
            }
            8 => {
                let size = self.last(x).max(1);
                let weight = self.weight(&[size]);
                self.push("binary", json!({"kind": if flag { "add" } else { "mul" }}), &[x, weight])
            }
            9..=11 => {
                let mut axes: Vec<usize> = (0..rank as usize).collect();
                let mut seed = how as usize;
                for i in (1..axes.len()).rev() {
                    axes.swap(i, seed % (i + 1));
                    seed /= i + 1;
                }
                self.push("permute", json!({"axes": axes}), &[x])
            }
            12..=14 => {
                let shapes: [&[&str]; 12] = [
                    &["a", "b", "8"],
                    &["a*b", "8"],
                    &["8*a*b"],
                    &["a", "b", "2", "4"],
                    &["a", "8*b"],
                    &["a", "b", "1", "8"],
                    &["a", "b", "4", "2"],
                    &["a", "2", "b", "4"],
                    &["b", "4"],
                    &["4", "b"],
                    &["a", "b", "4"],
                    &["a*b", "2", "4"],
                ];
                self.push("reshape", json!({"shape": shapes[pick(12)]}), &[x])
            }
            15 | 16 => {
                let (start, end, step) =
                    ([0, 0, 1, 2][pick(4)], [1, 2, 4, 8, 100][(how >> 16) as usize % 5], 1 + (how >> 20) as i64 % 3);
                self.push("slice", json!({"axis": axis, "start": start, "end": end, "step": step}), &[x])
            }
            17 | 18 => self.push("concat", json!({"axis": axis}), &[x, y, z][..if flag { 2 } else { 3 }]),
            19 => {
                let shape: Vec<String> = self.graph.meta(x).shape.iter().map(Dim::to_string).collect();
                let wide: Vec<String> = shape.iter().map(|n| if n == "1" { "3".into() } else { n.clone() }).collect();
                let wide = if flag { [vec!["2".to_owned()], wide].concat() } else { wide };
                self.push("expand", json!({"shape": wide}), &[x])
            }
            20 => {
                let pads: Vec<Value> =
                    (0..rank).map(|i| if i == rank - 1 { json!([1, 2]) } else { json!([0, how % 2]) }).collect();
                self.push("pad", json!({"pads": pads, "value": 0.5}), &[x])
            }
            21 | 22 => {
                let kind = ["sum", "mean", "max", "min", "prod", "any", "all"][pick(7)];
                let axes: Vec<i64> =
                    if flag { vec![axis] } else { (0..rank).filter(|i| how >> (16 + i) & 1 == 1).collect() };
                self.push("reduce", json!({"kind": kind, "axes": axes, "keepdim": how & 0x40 != 0}), &[x])
            }
            23 => {
                let kind = if flag { "argmax" } else { "argmin" };
                let axis = if how & 0x1_0000 == 0 { json!(axis) } else { Value::Null };
                self.push("argreduce", json!({"kind": kind, "axis": axis, "keepdim": how & 0x40 != 0}), &[x])
            }
            24 => self.push("cumsum", json!({"axis": axis}), &[x]),
            25 | 26 => self.push("softmax", json!({"axis": axis}), &[x]),
            27 | 28 => {
                let (n, m) = (self.last(x), [8, 4, 12, 1][pick(4)]);
                let weight = self.weight(&if flag { [m, n] } else { [n, m] });
                let alpha = if how & 0x40 != 0 { 0.5 } else { 1.0 };
                let found = self.push("matmul", json!({"transpose_b": flag, "alpha": alpha}), &[x, weight])?;
                let bias = self.weight(&[m]);
                if how & 0x20 == 0 {
                    return Some(found);
                }
                let found = self.push("binary", json!({"kind": "add"}), &[found, bias])?;
                let kinds = ["gelu", "relu", "silu", "gelu_tanh", "tanh"];
                if how & 0x10 == 0 {
                    Some(found)
                } else {
                    self.push("unary", json!({"kind": kinds[pick(5)]}), &[found])
                }
            }
            29 | 30 => {
                let attrs = json!({"transpose_a": how & 1 != 0, "transpose_b": how & 2 != 0, "alpha": if flag { 0.25 } else { 1.0 }});
                self.push("matmul", attrs, &[x, y])
            }
            31 => {
                let n = self.last(x);
                let (weight, bias) = (self.weight(&[n]), self.weight(&[n]));
                match pick(4) {
                    0 => self.push("layer_norm", json!({"eps": 0.01, "axes": 1}), &[x, weight, bias]),
                    1 => self.push("rms_norm", json!({"eps": 0.01}), &[x, weight]),
                    2 => {
                        let sum = self.push("binary", json!({"kind": "add"}), &[x, y])?;
                        self.push("layer_norm", json!({"eps": 0.01, "axes": 1}), &[sum, weight, bias])
                    }
                    _ => {
                        let sum = self.push("binary", json!({"kind": "add"}), &[x, y])?;
                        self.push("rms_norm", json!({"eps": 0.01}), &[sum, weight])
                    }
                }
            }
            32 => {
                let mask = self.values.iter().copied().filter(|&v| self.graph.meta(v).dtype == DType::Bool);
                let mask: Vec<ValueId> = mask.collect();
                let mask = *mask.get(usize::from(second) % mask.len().max(1))?;
                self.push("where", json!({}), &[mask, x, z])
            }
            33 => {
                let dtypes = ["float32", "float64", "int64", "bool", "int32", "bfloat16"];
                self.push("cast", json!({"dtype": dtypes[pick(6)]}), &[x])
            }
            34 => {
                let (start, len) = (["0", "1", "b"][pick(3)], ["b", "a", "4", "a + b"][(how >> 16) as usize % 4]);
                let dtype = ["int64", "float32", "int32"][(how >> 4) as usize % 3];
                self.push("iota", json!({"start": start, "step": 1 + i64::from(flag), "len": len, "dtype": dtype}), &[])
            }
            35 => self.push("triangle", json!({"upper": flag, "diagonal": i64::from(how % 5) - 2}), &[x]),
            36 => {
                let ids = self.values.iter().copied().find(|&v| self.graph.meta(v).dtype == DType::I64)?;
                let four = self.number(DType::I64, 4.0);
                let ids = self.push("binary", json!({"kind": "remainder"}), &[ids, four])?;
                if flag {
                    let table = self.weight(&[4, 8]);
                    return self.push("embedding", json!({}), &[table, ids]);
                }
                let flat = self.push("reshape", json!({"shape": ["a*b"]}), &[ids])?;
                self.push("index_select", json!({"axis": axis}), &[x, flat])
            }
            37 => {
                let causal = flag;
                let attrs = json!({"causal": causal, "top_left": causal && how & 0x40 != 0, "scale": 0.5});
                self.push("attention", attrs, &[x, y, z])
            }
            38 => {
                let split: [(&str, Value); 2] =
                    [("reshape", json!({"shape": ["a", "b", "2", "4"]})), ("permute", json!({"axes": [0, 2, 1, 3]}))];
                let heads = |made: &mut Made, v: ValueId| {
                    split.iter().try_fold(v, |v, (name, attrs)| made.push(name, attrs.clone(), &[v]))
                };
                let (q, k, v) = (heads(self, x)?, heads(self, y)?, heads(self, z)?);
                let turned = self.push("permute", json!({"axes": [0, 1, 3, 2]}), &[k])?;
                let scores = self.push("matmul", json!({}), &[q, turned])?;
                let half = self.number(dtype, 0.5);
                let scores = self.push("binary", json!({"kind": "mul"}), &[scores, half])?;
                let weights =
                    self.push("softmax", json!({"axis": if how & 0x30 == 0 { -2 } else { -1 }}), &[scores])?;
                let mixed = self.push("matmul", json!({}), &[weights, v])?;
                let mixed = self.push("permute", json!({"axes": [0, 2, 1, 3]}), &[mixed])?;
                self.push("reshape", json!({"shape": ["a", "b", "8"]}), &[mixed])
            }
            _ => {
                let (rows, channels) = (rank == 3, self.graph.meta(x).shape.get(1).and_then(Dim::known).unwrap_or(0));
                let groups = if flag { channels.max(1) } else { 1 };
                let weight = self.weight(&[2 * channels, channels / groups, 2]);
                if !rows {
                    return None;
                }
                let attrs = json!({"stride": [1 + how % 2], "padding": [1], "dilation": [1], "groups": groups});
                self.push("conv", attrs, &[x, weight])
            }
        }
    }
}

/// The graph of some steps. `nudge` is how far its weights are from what they are, relatively; `least` is the least a size may be.
pub fn graph(steps: &[Step], results: &[u16], wide: bool, nudge: f64, least: i64) -> Graph {
    let mut graph = Graph::new("random");
    for name in ["a", "b"] {
        graph.symbols.push(Symbol { name: name.to_owned(), min: least, max: Some(64) });
    }
    let float = if wide { DType::F64 } else { DType::F32 };
    let size = |text: &str| Dim::parse(text).expect("a size");
    let mut input =
        |name: &str, dtype, shape: &[&str]| graph.input(name, Meta::new(dtype, shape.iter().map(|text| size(text))));
    let values = vec![
        input("ids", DType::I64, &["a", "b"]),
        input("mask", DType::Bool, &["a", "b", "1"]),
        input("y", float, &["a", "b", "8"]),
        input("x", float, &["a", "b", "8"]),
    ];
    let mut made = Made { graph, values, float, nudge, weights: 0 };
    for step in steps {
        let from = made.values.len();
        let found = made.step(step);
        // Parts of a step that did not fit are results too.
        debug_assert!(found.is_none() || made.values.len() > from);
    }
    let mut graph = made.graph;
    let values = made.values;
    graph.outputs.push(values[values.len() - 1]);
    graph.outputs.extend(results[1..].iter().map(|&at| values[usize::from(at) % values.len()]));
    graph.sweep();
    graph
}
