//! A graph with numbers for its symbols.

use smallvec::SmallVec;

use crate::ir::{Dim, DimError, Graph, GraphError, Inputs, Meta, Node, NodeId, ShapeError, Symbols, ValueId};
use crate::ops::Op;

/// Why a graph has no instance for some sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InstanceError {
    /// The graph is wrong.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A size of a value or an attribute has no number.
    #[error("'{value}': {why}")]
    Dim {
        /// The value.
        value: String,
        /// Why not.
        why: DimError,
    },
    /// An operation cannot take its inputs with these sizes.
    #[error("{op} ('{value}'): {why}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
        /// Why not.
        why: ShapeError,
    },
    /// A value is said to have other sizes than its operation gives for these numbers.
    #[error("'{value}' is said to be {said}, and {op} gives {found} for these sizes")]
    OtherMeta {
        /// The value.
        value: String,
        /// The operation.
        op: &'static str,
        /// What the graph says.
        said: String,
        /// What the operation gives.
        found: String,
    },
    /// A size below zero, or a value larger than the memory of any machine.
    #[error("'{value}' is {meta}, which no memory can hold")]
    Size {
        /// The value.
        value: String,
        /// Its element type and sizes.
        meta: String,
    },
    /// An input is updated with a value of another element type or other sizes.
    #[error("'{input}' is {old}, its new contents '{value}' are {new}")]
    Update {
        /// The input.
        input: String,
        /// The value.
        value: String,
        /// What the input is.
        old: String,
        /// What the value is.
        new: String,
    },
    /// An input that is updated twice.
    #[error("'{0}' is updated twice")]
    UpdatedTwice(String),
    /// A pair of [`Graph::updates`] whose first value is no input of the graph.
    #[error("'{0}' is updated, and is no input")]
    NoInput(String),
}

/// The most bytes one value may have: 2^47, the address space of a process.
const MOST_BYTES: i128 = 1 << 47;

/// A graph for exact sizes: every size of a value and every attribute is a number.
#[derive(Clone, Debug)]
pub struct Instance<'g> {
    graph: &'g Graph,
    symbols: Symbols,
    order: Vec<NodeId>,
    metas: Vec<Option<Meta>>,
    bytes: Vec<usize>,
    /// By [`NodeId::index`]; `None` for nodes that were removed.
    ops: Vec<Option<Op>>,
}

impl<'g> Instance<'g> {
    /// A graph with numbers for its symbols. Checks every shape rule with these numbers: what was symbolic could not be
    /// checked.
    pub fn of(graph: &'g Graph, symbols: &Symbols) -> Result<Instance<'g>, InstanceError> {
        let order = graph.order()?;
        let nodes = graph.nodes().last().map_or(0, |(id, _)| id.index() + 1);
        let mut instance = Instance {
            graph,
            symbols: symbols.clone(),
            order,
            metas: vec![None; graph.value_count()],
            bytes: vec![0; graph.value_count()],
            ops: vec![None; nodes],
        };
        for &input in &graph.inputs {
            instance.set(input)?;
        }
        for at in 0..instance.order.len() {
            instance.check(instance.order[at])?;
        }
        for &value in graph.outputs.iter().chain(graph.updates.iter().flat_map(|(old, new)| [old, new])) {
            if instance.metas[value.index()].is_none() {
                if graph.constant(value).is_none() {
                    return Err(GraphError::NoSource(instance.name(value)).into());
                }
                instance.set(value)?;
            }
        }
        for (at, &(old, new)) in graph.updates.iter().enumerate() {
            if graph.updates[..at].iter().any(|&(other, _)| other == old) {
                return Err(InstanceError::UpdatedTwice(instance.name(old)));
            }
            if !graph.inputs.contains(&old) {
                return Err(InstanceError::NoInput(instance.name(old)));
            }
            if instance.meta(old) != instance.meta(new) {
                return Err(InstanceError::Update {
                    input: instance.name(old),
                    value: instance.name(new),
                    old: instance.meta(old).to_string(),
                    new: instance.meta(new).to_string(),
                });
            }
        }
        Ok(instance)
    }

    fn name(&self, value: ValueId) -> String {
        self.graph.value(value).name.to_string()
    }

    /// Gives a value its sizes.
    fn set(&mut self, value: ValueId) -> Result<(), InstanceError> {
        let meta = self.graph.meta(value);
        let known = meta.shape.iter().all(|size| size.known().is_some());
        let meta = match known {
            true => meta.clone(),
            false => meta.at(&self.symbols).map_err(|why| InstanceError::Dim { value: self.name(value), why })?,
        };
        let too_large = || InstanceError::Size { value: self.name(value), meta: meta.to_string() };
        let mut bits = i128::from(meta.dtype.bits());
        for size in &meta.shape {
            let size = size.known().filter(|&size| size >= 0).ok_or_else(too_large)?;
            bits = bits.saturating_mul(i128::from(size));
        }
        if bits > MOST_BYTES * 8 {
            return Err(too_large());
        }
        self.bytes[value.index()] = (bits as usize).div_ceil(8);
        self.metas[value.index()] = Some(meta);
        Ok(())
    }

    /// Gives a node its attributes and its result its sizes, and checks them.
    fn check(&mut self, id: NodeId) -> Result<(), InstanceError> {
        let graph = self.graph;
        let node = graph.node(id);
        for &input in node.inputs.iter().flatten() {
            if self.metas[input.index()].is_none() {
                // Inputs have theirs, and results of nodes come in order.
                if graph.constant(input).is_none() {
                    return Err(GraphError::NoSource(self.name(input)).into());
                }
                self.set(input)?;
            }
        }
        self.set(node.output)?;
        let op = node.op.at(&self.symbols).map_err(|why| InstanceError::Dim { value: self.name(node.output), why })?;
        self.ops[id.index()] = Some(op);
        let (op, said) = (self.op(id), self.meta(node.output));
        let found = op.infer(Inputs(&self.inputs(id))).map_err(|why| InstanceError::Shape {
            op: op.name(),
            value: self.name(node.output),
            why,
        })?;
        if found != *said {
            return Err(InstanceError::OtherMeta {
                value: self.name(node.output),
                op: op.name(),
                said: said.to_string(),
                found: found.to_string(),
            });
        }
        Ok(())
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// The numbers of its symbols.
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// The nodes, each after those it reads from, as [`Graph::order`] gives them.
    pub fn order(&self) -> &[NodeId] {
        &self.order
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &'g Node {
        self.graph.node(id)
    }

    /// What a node does, with numbers in its attributes.
    pub fn op(&self, id: NodeId) -> &Op {
        self.ops[id.index()].as_ref().expect("a node of the order")
    }

    /// Nodes have ids below this.
    pub fn node_count(&self) -> usize {
        self.ops.len()
    }

    /// Element type and sizes of a value that is read, made or given.
    pub fn meta(&self, value: ValueId) -> &Meta {
        self.metas[value.index()].as_ref().expect("a value that is read, made or given")
    }

    /// The sizes of a value, if anything reads, makes or gives it.
    pub fn sizes(&self, value: ValueId) -> Option<SmallVec<[i64; 4]>> {
        self.metas[value.index()].as_ref()?.shape.iter().map(Dim::known).collect()
    }

    /// Whether anything reads, makes or gives a value.
    pub fn has(&self, value: ValueId) -> bool {
        self.metas.get(value.index()).is_some_and(Option::is_some)
    }

    /// Bytes of a value, row-major.
    pub fn bytes(&self, value: ValueId) -> usize {
        self.bytes[value.index()]
    }

    /// What a node reads.
    pub fn inputs(&self, id: NodeId) -> SmallVec<[Option<&Meta>; 4]> {
        self.graph.node(id).inputs.iter().map(|input| input.map(|value| self.meta(value))).collect()
    }
}
