//! A graph as JSON, as exporters write it. Weights are not in it: they go by reference, in the order of `constants`.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{Constant, Dim, Graph, GraphError, Meta, Symbol, ValueId};
use crate::ops::{Op, UnknownOp};
use lz_abi::DType;

/// Why a document is no graph.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// It is no JSON of the right form.
    #[error("the document cannot be read: {0}")]
    Syntax(#[from] serde_json::Error),
    /// An operation that does not exist, or attributes it does not have.
    #[error("node '{output}': {why}")]
    Op {
        /// The value the node makes.
        output: String,
        /// Why not.
        why: UnknownOp,
    },
    /// A name that nothing before it has.
    #[error("'{0}' is read before anything makes it")]
    NoSuchValue(String),
    /// Another number of constants than the document names.
    #[error("the document names {named} constants, {given} are given")]
    Constants {
        /// How many it names.
        named: usize,
        /// How many there are.
        given: usize,
    },
    /// A name of an element type that does not exist.
    #[error("'{name}': {why}")]
    DType {
        /// The value.
        name: String,
        /// Why not.
        why: lz_abi::UnknownDType,
    },
    /// The graph itself is wrong.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    name: String,
    #[serde(default)]
    symbols: Vec<SymbolRow>,
    inputs: Vec<ValueRow>,
    #[serde(default)]
    constants: Vec<String>,
    nodes: Vec<NodeRow>,
    outputs: Vec<String>,
    #[serde(default)]
    updates: Vec<(String, String)>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SymbolRow {
    name: String,
    min: i64,
    max: Option<i64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ValueRow {
    name: String,
    dtype: String,
    shape: Vec<Dim>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeRow {
    op: String,
    #[serde(default)]
    attrs: serde_json::Value,
    inputs: Vec<Option<String>>,
    output: String,
    #[serde(default)]
    origin: String,
    /// What the exporter's framework says the result is; checked.
    #[serde(default)]
    dtype: Option<String>,
    #[serde(default)]
    shape: Option<Vec<Dim>>,
}

fn dtype(name: &str, dtype: &str) -> Result<DType, DocumentError> {
    dtype.parse().map_err(|why| DocumentError::DType { name: name.to_owned(), why })
}

impl Graph {
    /// Reads a document. `constants`: the memory of each constant it names, in order.
    ///
    /// What the document says of a node's result is compared with what the operation gives: sizes with symbols by their form,
    /// since an exporter may write `s0 + 1 - 1` where there is `s0`.
    pub fn from_document(text: &str, constants: Vec<Constant>) -> Result<Graph, DocumentError> {
        let document: Document = serde_json::from_str(text)?;
        if document.constants.len() != constants.len() {
            return Err(DocumentError::Constants { named: document.constants.len(), given: constants.len() });
        }
        let mut graph = Graph::new(&document.name);
        graph.symbols =
            document.symbols.into_iter().map(|row| Symbol { name: row.name, min: row.min, max: row.max }).collect();
        let once = |graph: &Graph, name: &str| match graph.named(name) {
            Some(_) => Err(DocumentError::Graph(GraphError::SameName(name.to_owned()))),
            None => Ok(()),
        };
        for row in document.inputs {
            once(&graph, &row.name)?;
            let meta = Meta::new(dtype(&row.name, &row.dtype)?, row.shape);
            graph.input(&row.name, meta);
        }
        for (name, constant) in document.constants.iter().zip(constants) {
            once(&graph, name)?;
            graph.add_constant(constant.renamed(name));
        }
        let find =
            |graph: &Graph, name: &str| graph.named(name).ok_or_else(|| DocumentError::NoSuchValue(name.to_owned()));
        for row in document.nodes {
            once(&graph, &row.output)?;
            let inputs = row.inputs.iter().map(|name| name.as_deref().map(|name| find(&graph, name)).transpose());
            let inputs: SmallVec<[Option<ValueId>; 4]> = inputs.collect::<Result<_, _>>()?;
            let op =
                Op::named(&row.op, row.attrs).map_err(|why| DocumentError::Op { output: row.output.clone(), why })?;
            let kind = op.name();
            let output = graph.push(op, &inputs, &row.output, &row.origin)?;
            let found = graph.meta(output);
            let said = Meta {
                dtype: row.dtype.map_or(Ok(found.dtype), |name| dtype(&row.output, &name))?,
                shape: row.shape.map_or_else(|| found.shape.clone(), |shape| shape.into()),
            };
            let known = |a: &Dim, b: &Dim| a == b || a.known().is_none() || b.known().is_none();
            let same = said.rank() == found.rank() && said.shape.iter().zip(&found.shape).all(|(a, b)| known(a, b));
            if said.dtype != found.dtype || !same {
                return Err(DocumentError::Graph(GraphError::OtherMeta {
                    value: row.output,
                    op: kind,
                    said: said.to_string(),
                    found: found.to_string(),
                }));
            }
        }
        for name in &document.outputs {
            let value = find(&graph, name)?;
            graph.outputs.push(value);
        }
        for (old, new) in &document.updates {
            let pair = (find(&graph, old)?, find(&graph, new)?);
            graph.updates.push(pair);
        }
        graph.verify()?;
        Ok(graph)
    }
}
