//! A model as a graph: values, the nodes that make them, and sizes that may be symbols.
//!
//! A node makes exactly one value. What has several results in torch is several nodes here: `split` is slices.
//! All values are immutable: a cache that is written is an input, and its new contents are an output
//! ([`Graph::updates`]); the memory plan lets both share their memory.

mod constant;
mod dim;
mod document;
mod graph;
mod meta;
mod text;

pub use constant::{Constant, Storage};
pub use dim::{Dim, DimError, Symbols};
pub use document::DocumentError;
pub use graph::{Graph, GraphError, Misfit, Node, NodeId, Source, Symbol, Value, ValueId};
pub use meta::{Inputs, Meta, Shape, ShapeError};
pub use text::{TextError, TextFault};
