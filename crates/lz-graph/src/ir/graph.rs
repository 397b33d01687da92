//! The graph itself, and how passes change it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Constant, Inputs, Meta, ShapeError};
use crate::ops::Op;

/// A value of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(u32);

/// A node of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl ValueId {
    /// Its place among the values.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    /// Its place among the nodes.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a value comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// The caller gives it.
    Input,
    /// It is known before.
    Constant(Constant),
    /// A node makes it.
    Node(NodeId),
}

/// A tensor of a graph.
#[derive(Clone, Debug)]
pub struct Value {
    /// A name, unique in its graph.
    pub name: Arc<str>,
    /// Element type and sizes.
    pub meta: Meta,
    /// Where it comes from.
    pub source: Source,
}

/// An operation on values.
#[derive(Clone, Debug)]
pub struct Node {
    /// What it does, with its attributes.
    pub op: Op,
    /// What it reads; `None` for an optional input that is not given.
    pub inputs: SmallVec<[Option<ValueId>; 4]>,
    /// What it makes.
    pub output: ValueId,
    /// Where it stands in the model, for people: a module's name, or a line of code.
    pub origin: Arc<str>,
}

/// A symbol of sizes, and which numbers it may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Its name.
    pub name: String,
    /// The least number.
    pub min: i64,
    /// The greatest number, if there is one.
    pub max: Option<i64>,
}

/// A model as nodes over values.
///
/// Nodes have no order of their own: [`Graph::order`] gives one in which every node follows those it reads from.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// What it is called.
    pub name: String,
    /// The symbols of its sizes.
    pub symbols: Vec<Symbol>,
    values: Vec<Value>,
    nodes: Vec<Option<Node>>,
    names: BTreeMap<Arc<str>, ValueId>,
    /// What the caller gives, in order.
    pub inputs: Vec<ValueId>,
    /// What the caller gets, in order.
    pub outputs: Vec<ValueId>,
    /// Inputs that are written: the input, and its contents after a call. A cache, for example.
    pub updates: Vec<(ValueId, ValueId)>,
}

/// An operation that cannot take its inputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} ('{output}'{}): {why}", if origin.is_empty() { String::new() } else { format!(", of {origin}") })]
pub struct Misfit {
    /// The operation.
    pub op: &'static str,
    /// The value it would make.
    pub output: String,
    /// Where it stands in the model.
    pub origin: String,
    /// Why not.
    pub why: ShapeError,
}

impl Misfit {
    fn of(op: &Op, output: &str, origin: &str, why: ShapeError) -> GraphError {
        GraphError::Shape(Box::new(Misfit { op: op.name(), output: output.into(), origin: origin.into(), why }))
    }
}

/// What is wrong with a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// An operation cannot take its inputs.
    #[error(transparent)]
    Shape(Box<Misfit>),
    /// A value is said to be other than what its operation gives.
    #[error("'{value}' is said to be {said}, and {op} gives {found}")]
    OtherMeta {
        /// The value.
        value: String,
        /// The operation.
        op: &'static str,
        /// What is said.
        said: String,
        /// What the operation gives.
        found: String,
    },
    /// Nodes read from each other in a circle.
    #[error("the node that makes '{0}' needs its own result")]
    Cycle(String),
    /// Two values have one name.
    #[error("two values are called '{0}'")]
    SameName(String),
    /// A node reads, or the graph gives, a value that no node makes.
    #[error("nothing makes '{0}'")]
    NoSource(String),
}

impl Graph {
    /// A graph without nodes.
    pub fn new(name: &str) -> Graph {
        Graph { name: name.to_owned(), ..Graph::default() }
    }

    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// What is known of a value.
    pub fn meta(&self, id: ValueId) -> &Meta {
        &self.value(id).meta
    }

    /// Every value that was ever made.
    pub fn value_ids(&self) -> impl Iterator<Item = ValueId> {
        (0..self.values.len()).map(|i| ValueId(i as u32))
    }

    /// How many values were ever made. Ids are below that.
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// All values that were ever made, in that order.
    pub fn values(&self) -> impl Iterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.nodes.iter().flatten().count()
    }

    /// Whether there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A node. Panics on one that was removed.
    pub fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.index()].as_ref().expect("the node was removed")
    }

    /// A node, if it was not removed.
    pub fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.index())?.as_ref()
    }

    /// The nodes, in the order they were made.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().filter_map(|(i, node)| Some((NodeId(i as u32), node.as_ref()?)))
    }

    /// A value by its name.
    pub fn named(&self, name: &str) -> Option<ValueId> {
        self.names.get(name).copied()
    }

    /// The node that makes a value; `None` for inputs and constants.
    pub fn producer(&self, value: ValueId) -> Option<NodeId> {
        if let Source::Node(node) = self.value(value).source { Some(node) } else { None }
    }

    /// The node that makes a value, with its id.
    pub fn made_by(&self, value: ValueId) -> Option<(NodeId, &Node)> {
        self.producer(value).and_then(|id| Some((id, self.get(id)?)))
    }

    /// The constant a value is.
    pub fn constant(&self, value: ValueId) -> Option<&Constant> {
        if let Source::Constant(constant) = &self.value(value).source { Some(constant) } else { None }
    }

    /// How often each value is read: by nodes, as a result, as new contents of an input. By [`ValueId::index`].
    pub fn uses(&self) -> Vec<usize> {
        let mut uses = vec![0; self.values.len()];
        let read = self.nodes().flat_map(|(_, node)| node.inputs.iter().flatten().copied());
        let given = self.outputs.iter().copied().chain(self.updates.iter().map(|(_, new)| *new));
        read.chain(given).for_each(|value| uses[value.index()] += 1);
        uses
    }

    /// The nodes that read a value.
    pub fn consumers(&self, value: ValueId) -> Vec<NodeId> {
        self.nodes().filter(|(_, node)| node.inputs.contains(&Some(value))).map(|(id, _)| id).collect()
    }

    fn add(&mut self, name: &str, meta: Meta, source: Source) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        let name: Arc<str> = if self.names.contains_key(name) || name.is_empty() {
            let base = if name.is_empty() { "v" } else { name };
            (id.0..)
                .map(|n| format!("{base}_{n}"))
                .find(|name| !self.names.contains_key(&**name))
                .expect("a name")
                .into()
        } else {
            name.into()
        };
        self.names.insert(name.clone(), id);
        self.values.push(Value { name, meta, source });
        id
    }

    /// Adds an input. A name that is taken gets a number.
    pub fn input(&mut self, name: &str, meta: Meta) -> ValueId {
        let id = self.add(name, meta, Source::Input);
        self.inputs.push(id);
        id
    }

    /// Adds a constant.
    pub fn add_constant(&mut self, constant: Constant) -> ValueId {
        let (name, meta) = {
            let view = constant.view();
            (constant.name().to_owned(), Meta::known(view.dtype(), view.shape()))
        };
        self.add(&name, meta, Source::Constant(constant))
    }

    /// What an operation would give for some values.
    pub fn infer(&self, op: &Op, inputs: &[Option<ValueId>]) -> Result<Meta, ShapeError> {
        let metas: SmallVec<[Option<&Meta>; 4]> = inputs.iter().map(|input| input.map(|id| self.meta(id))).collect();
        op.infer(Inputs(&metas))
    }

    /// Adds a node, and the value it makes. A name that is taken gets a number.
    pub fn push(
        &mut self,
        op: Op,
        inputs: &[Option<ValueId>],
        name: &str,
        origin: &str,
    ) -> Result<ValueId, GraphError> {
        let meta = self.infer(&op, inputs).map_err(|why| Misfit::of(&op, name, origin, why))?;
        let node = NodeId(self.nodes.len() as u32);
        let output = self.add(name, meta, Source::Node(node));
        self.nodes.push(Some(Node { op, inputs: inputs.into(), output, origin: origin.into() }));
        Ok(output)
    }

    /// Gives a node another operation and other inputs. What it makes must stay what it is.
    pub fn change(&mut self, id: NodeId, op: Op, inputs: &[Option<ValueId>]) -> Result<(), GraphError> {
        let found = self.infer(&op, inputs);
        let node = self.nodes[id.index()].as_mut().expect("the node was removed");
        let value = &self.values[node.output.index()];
        let found = found.map_err(|why| Misfit::of(&op, &value.name, &node.origin, why))?;
        if found != value.meta {
            return Err(GraphError::OtherMeta {
                value: value.name.to_string(),
                op: op.name(),
                said: value.meta.to_string(),
                found: found.to_string(),
            });
        }
        (node.op, node.inputs) = (op, inputs.into());
        Ok(())
    }

    /// Makes everything that reads a value read another one. The node that made it stays until [`Graph::sweep`].
    pub fn replace(&mut self, value: ValueId, by: ValueId) {
        let swap = |one: &mut ValueId| {
            if *one == value {
                *one = by;
            }
        };
        self.nodes.iter_mut().flatten().flat_map(|node| &mut node.inputs).flatten().for_each(swap);
        self.outputs.iter_mut().chain(self.updates.iter_mut().map(|(_, new)| new)).for_each(swap);
    }

    /// Makes a value that a node made a constant. The node is removed.
    pub fn fold(&mut self, value: ValueId, constant: Constant) {
        if let Some(node) = self.producer(value) {
            self.nodes[node.index()] = None;
        }
        self.values[value.index()].source = Source::Constant(constant);
    }

    /// Removes nodes whose results nothing reads. Returns how many.
    pub fn sweep(&mut self) -> usize {
        let mut uses = self.uses();
        let mut unread: Vec<NodeId> =
            self.nodes().filter(|(_, node)| uses[node.output.index()] == 0).map(|(id, _)| id).collect();
        let mut removed = 0;
        while let Some(id) = unread.pop() {
            let Some(node) = self.nodes[id.index()].take() else { continue };
            removed += 1;
            for input in node.inputs.into_iter().flatten() {
                uses[input.index()] -= 1;
                if uses[input.index()] == 0 {
                    unread.extend(self.producer(input));
                }
            }
        }
        removed
    }

    /// The nodes in an order in which each follows those it reads from; the one made first goes first where there is a choice.
    pub fn order(&self) -> Result<Vec<NodeId>, GraphError> {
        let mut waits: Vec<usize> = vec![0; self.nodes.len()];
        let mut readers: Vec<Vec<NodeId>> = vec![Vec::new(); self.nodes.len()];
        let mut ready = BinaryHeap::new();
        for (id, node) in self.nodes() {
            for input in node.inputs.iter().flatten() {
                if let Some(before) = self.producer(*input) {
                    if self.get(before).is_none() {
                        return Err(GraphError::NoSource(self.value(*input).name.to_string()));
                    }
                    waits[id.index()] += 1;
                    readers[before.index()].push(id);
                }
            }
            if waits[id.index()] == 0 {
                ready.push(Reverse(id));
            }
        }
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(Reverse(id)) = ready.pop() {
            order.push(id);
            for &reader in &readers[id.index()] {
                waits[reader.index()] -= 1;
                if waits[reader.index()] == 0 {
                    ready.push(Reverse(reader));
                }
            }
        }
        match self.nodes().find(|(id, _)| waits[id.index()] > 0) {
            Some((_, node)) => Err(GraphError::Cycle(self.value(node.output).name.to_string())),
            None => Ok(order),
        }
    }

    /// Checks that every node can take its inputs and gives what is said of its result, and that all that is read is made.
    pub fn verify(&self) -> Result<(), GraphError> {
        for id in self.order()? {
            let node = self.node(id);
            let value = self.value(node.output);
            let found = self
                .infer(&node.op, &node.inputs)
                .map_err(|why| Misfit::of(&node.op, &value.name, &node.origin, why))?;
            if found != value.meta {
                return Err(GraphError::OtherMeta {
                    value: value.name.to_string(),
                    op: node.op.name(),
                    said: value.meta.to_string(),
                    found: found.to_string(),
                });
            }
        }
        for &value in self.outputs.iter().chain(self.updates.iter().map(|(_, new)| new)) {
            if self.producer(value).is_some_and(|node| self.get(node).is_none()) {
                return Err(GraphError::NoSource(self.value(value).name.to_string()));
            }
        }
        Ok(())
    }
}
