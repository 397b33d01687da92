//! Running a graph node by node with the references of its operations: slow, and right. What is faster is compared with it.

use lz_abi::{KernelError, Tensor, TensorView};

use crate::ir::{DimError, Graph, GraphError, Inputs, Meta, Misfit, Source, Symbols, ValueId};
use crate::ops::Op;
use crate::ops::host::Host;

/// Why a graph did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The graph is wrong.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Another number of inputs than the graph has.
    #[error("{given} inputs are given, the graph has {wanted}")]
    Count {
        /// How many are given.
        given: usize,
        /// How many it has.
        wanted: usize,
    },
    /// An input is not what the graph takes.
    #[error("input '{name}' is {given}, the graph takes {wanted}")]
    Input {
        /// Which.
        name: String,
        /// What it is.
        given: String,
        /// What the graph takes.
        wanted: String,
    },
    /// A symbol outside its bounds.
    #[error("{symbol} is {size}, the graph was exported for {min} to {max}")]
    Bounds {
        /// Which.
        symbol: String,
        /// Its number.
        size: i64,
        /// The least it may be.
        min: i64,
        /// The greatest it may be.
        max: String,
    },
    /// A size that has no number.
    #[error(transparent)]
    Dim(#[from] DimError),
    /// A node failed.
    #[error("{op} ('{output}'): {why}")]
    Kernel {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        output: String,
        /// Why.
        why: KernelError,
    },
}

/// The numbers of all symbols, from the sizes of the inputs. Checks element types, sizes and bounds.
pub fn bind(graph: &Graph, inputs: &[(lz_abi::DType, &[i64])]) -> Result<Symbols, RunError> {
    if inputs.len() != graph.inputs.len() {
        return Err(RunError::Count { given: inputs.len(), wanted: graph.inputs.len() });
    }
    let mut symbols = Symbols::new();
    let wrong = |id: ValueId, (dtype, shape): (lz_abi::DType, &[i64])| RunError::Input {
        name: graph.value(id).name.to_string(),
        given: format!("{dtype}{shape:?}"),
        wanted: graph.meta(id).to_string(),
    };
    // Plain symbols first: what else stands in the sizes follows from them.
    for (&id, &given) in graph.inputs.iter().zip(inputs) {
        let meta = graph.meta(id);
        if meta.dtype != given.0 || meta.rank() != given.1.len() {
            return Err(wrong(id, given));
        }
        for (size, &n) in meta.shape.iter().zip(given.1) {
            if let [only] = size.symbols().as_slice()
                && *size == crate::ir::Dim::symbol(only)
                && symbols.get(only).is_none()
            {
                symbols.set(only, n);
            }
        }
    }
    for (&id, &given) in graph.inputs.iter().zip(inputs) {
        for (size, &n) in graph.meta(id).shape.iter().zip(given.1) {
            if size.at(&symbols)? != n {
                return Err(wrong(id, given));
            }
        }
    }
    for symbol in &graph.symbols {
        if let Some(size) = symbols.get(&symbol.name)
            && (size < symbol.min || symbol.max.is_some_and(|max| size > max))
        {
            let max = symbol.max.map_or("any size".to_owned(), |max| max.to_string());
            return Err(RunError::Bounds { symbol: symbol.name.clone(), size, min: symbol.min, max });
        }
    }
    Ok(symbols)
}

/// Makes the calls of host nodes.
pub type Caller<'a> = dyn Fn(&Host, &[Option<TensorView<'_>>]) -> Result<Tensor, KernelError> + 'a;

/// The results of a graph for some inputs, and the new contents of inputs that it updates. Host nodes are errors.
pub fn run(graph: &Graph, inputs: &[TensorView<'_>]) -> Result<(Vec<Tensor>, Vec<Tensor>), RunError> {
    run_with(graph, inputs, &|host, inputs| {
        let mut output = Tensor::zeros(host.dtype, &[0]);
        Op::Host(host.clone()).evaluate(inputs, &mut output).map(|()| output)
    })
}

/// As [`run`], with someone who makes the calls of host nodes.
pub fn run_with(
    graph: &Graph,
    inputs: &[TensorView<'_>],
    caller: &Caller<'_>,
) -> Result<(Vec<Tensor>, Vec<Tensor>), RunError> {
    let shapes: Vec<_> = inputs.iter().map(|view| (view.dtype(), view.shape())).collect();
    let symbols = bind(graph, &shapes)?;
    let mut made: Vec<Option<Tensor>> = vec![None; graph.value_count()];
    let view = |made: &[Option<Tensor>], id: ValueId| -> Tensor {
        match &graph.value(id).source {
            Source::Input => {
                let at = graph.inputs.iter().position(|&input| input == id).expect("an input is listed");
                inputs[at].to_tensor()
            }
            Source::Constant(constant) => constant.view().to_tensor(),
            Source::Node(_) => made[id.index()].clone().expect("nodes run in order"),
        }
    };
    for id in graph.order()? {
        let node = graph.node(id);
        let meta = graph.meta(node.output).at(&symbols)?;
        let given: Vec<Option<Tensor>> = node.inputs.iter().map(|input| input.map(|id| view(&made, id))).collect();
        let views: Vec<Option<TensorView<'_>>> = given.iter().map(|one| one.as_ref().map(Tensor::view)).collect();
        let failed =
            |why| RunError::Kernel { op: node.op.name(), output: graph.value(node.output).name.to_string(), why };
        let (op, sizes) = (node.op.at(&symbols)?, meta.sizes().expect("every symbol has a number"));
        fits(graph, &op, &views, node.output, &meta)?;
        let output = match &op {
            Op::Host(host) => caller(host, &views).map_err(failed)?,
            op => {
                let mut output = Tensor::try_zeros(meta.dtype, &sizes)
                    .ok_or_else(|| failed(KernelError::OutOfMemory(format!("a tensor {meta}"))))?;
                op.evaluate(&views, &mut output).map_err(failed)?;
                output
            }
        };
        if (output.dtype(), output.shape()) != (meta.dtype, &sizes[..]) {
            let found = Meta::known(output.dtype(), output.shape());
            return Err(other(graph, &op, node.output, &meta, &found));
        }
        made[node.output.index()] = Some(output);
    }
    let results = graph.outputs.iter().map(|&id| view(&made, id)).collect();
    let updates = graph.updates.iter().map(|&(_, new)| view(&made, new)).collect();
    Ok((results, updates))
}

fn other(graph: &Graph, op: &Op, output: ValueId, said: &Meta, found: &Meta) -> RunError {
    let value = graph.value(output).name.to_string();
    GraphError::OtherMeta { value, op: op.name(), said: said.to_string(), found: found.to_string() }.into()
}

/// Checks sizes that were symbols when the graph was made: they may fit together for some numbers only.
fn fits(
    graph: &Graph,
    op: &Op,
    inputs: &[Option<TensorView<'_>>],
    output: ValueId,
    meta: &Meta,
) -> Result<(), RunError> {
    let metas: Vec<Option<Meta>> =
        inputs.iter().map(|view| view.as_ref().map(|view| Meta::known(view.dtype(), view.shape()))).collect();
    let borrowed: Vec<Option<&Meta>> = metas.iter().map(Option::as_ref).collect();
    match op.infer(Inputs(&borrowed)) {
        Ok(found) if found == *meta => Ok(()),
        Ok(found) => Err(other(graph, op, output, meta, &found)),
        Err(why) => {
            let (output, origin) = (graph.value(output).name.to_string(), String::new());
            Err(GraphError::Shape(Box::new(Misfit { op: op.name(), output, origin, why })).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Constant;
    use lz_abi::DType;

    const MLP: &str = r#"{"name": "mlp", "symbols": [{"name": "s0", "min": 1, "max": 64}],
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["s0", 3]}],
        "constants": ["w", "b"],
        "nodes": [
          {"op": "matmul", "attrs": {"transpose_b": true}, "inputs": ["x", "w"], "output": "p", "dtype": "float32", "shape": ["s0", 2]},
          {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["p", "b"], "output": "q"},
          {"op": "unary", "attrs": {"kind": "relu"}, "inputs": ["q"], "output": "y"},
          {"op": "softmax", "attrs": {"axis": -1}, "inputs": ["y"], "output": "z"}],
        "outputs": ["y", "z"]}"#;

    fn mlp() -> Graph {
        let w = Tensor::from_f64(DType::F32, &[2, 3], &[1., 2., 3., -1., 0., 1.]);
        let b = Tensor::from_f64(DType::F32, &[2], &[0.5, -0.5]);
        Graph::from_document(MLP, vec![Constant::owned("w", w), Constant::owned("b", b)]).unwrap()
    }

    #[test]
    fn a_document_runs() {
        let x = Tensor::from_f64(DType::F32, &[2, 3], &[1., 1., 1., 0., -1., 2.]);
        let (results, updates) = run(&mlp(), &[x.view()]).unwrap();
        assert!(updates.is_empty());
        assert_eq!(results[0].to_f64(), [6.5, 0.0, 4.5, 1.5]);
        let share = 1.0 / (1.0 + f64::exp(-3.0));
        assert!((results[1].to_f64()[2] - share).abs() < 1e-7);
    }

    #[test]
    fn wrong_inputs_are_errors() {
        let graph = mlp();
        let message = |dtype, shape: &[i64]| bind(&graph, &[(dtype, shape)]).unwrap_err().to_string();
        assert_eq!(message(DType::F64, &[1, 3]), "input 'x' is float64[1, 3], the graph takes float32[s0, 3]");
        assert_eq!(message(DType::F32, &[1, 4]), "input 'x' is float32[1, 4], the graph takes float32[s0, 3]");
        assert_eq!(message(DType::F32, &[65, 3]), "s0 is 65, the graph was exported for 1 to 64");
        assert!(matches!(bind(&graph, &[]), Err(RunError::Count { .. })));
    }

    const TWO: &str = r#"{"name": "two", "symbols": [{"name": "a", "min": 1}, {"name": "b", "min": 1}],
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["a"]}, {"name": "y", "dtype": "float32", "shape": ["b"]}],
        "nodes": [
          {"op": "reshape", "attrs": {"shape": ["b"]}, "inputs": ["x"], "output": "z"},
          {"op": "host", "attrs": {"call": 0, "target": "twice", "dtype": "float32", "shape": ["b"]},
           "inputs": ["z"], "output": "t"},
          {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["t", "y"], "output": "s"}],
        "outputs": ["s"]}"#;

    #[test]
    fn sizes_are_checked_when_they_are_known() {
        let graph = Graph::from_document(TWO, vec![]).unwrap();
        let (x, y) = (Tensor::zeros(DType::F32, &[2]), Tensor::zeros(DType::F32, &[3]));
        let why = run(&graph, &[x.view(), y.view()]).unwrap_err().to_string();
        assert_eq!(why, "reshape ('z'): 'shape' is [3], 2 elements");
    }

    #[test]
    fn host_nodes_are_called() {
        let graph = Graph::from_document(TWO, vec![]).unwrap();
        let x = Tensor::from_f64(DType::F32, &[2], &[1., 2.]);
        let why = run(&graph, &[x.view(), x.view()]).unwrap_err().to_string();
        assert_eq!(why, "host ('t'): twice runs only where the model was exported");
        let twice = |host: &Host, inputs: &[Option<TensorView<'_>>]| {
            assert_eq!((host.call, host.shape[0].known()), (0, Some(2)));
            let numbers: Vec<f64> = inputs[0].as_ref().unwrap().to_f64().iter().map(|x| 2.0 * x).collect();
            Ok(Tensor::from_f64(DType::F32, &[2], &numbers))
        };
        let (results, _) = run_with(&graph, &[x.view(), x.view()], &twice).unwrap();
        assert_eq!(results[0].to_f64(), [3., 6.]);
        let wrong = |_: &Host, _: &[Option<TensorView<'_>>]| Ok(Tensor::zeros(DType::F32, &[1]));
        let why = run_with(&graph, &[x.view(), x.view()], &wrong).unwrap_err().to_string();
        assert_eq!(why, "'t' is said to be float32[2], and host gives float32[1]");
    }
}
