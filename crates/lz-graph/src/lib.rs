//! The graph runtime: a model as a graph of operations, optimised, planned into one arena, and run in one call.
//!
//! ```text
//! a document of the exporter     ir/document.rs   operations by name, shapes with symbols, constants by reference
//!   → Graph                      ir/              single-output nodes over values; shapes checked node by node
//!   → passes, to a fixpoint      passes/          an ordered list; the graph is verified after each
//!   → instance for exact sizes   plan/            symbols get numbers; lifetimes, aliases, offsets in one arena
//!   → program                    exec/            a flat array of steps: kernel, addresses, sizes
//!   → run                        exec/            no allocation, no Python
//! ```
//!
//! | | |
//! |---|---|
//! | [`ir`] | [`Graph`](ir::Graph), its values and nodes, sizes with symbols, the text form |
//! | [`ops`] | what each operation is: shape rule, reference, aliases, cost, kernels. One file each, listed in [`ops::Op`] |
//! | [`plan`] | where every value lies, for exact sizes |
//! | [`validate`] | checks of what each stage made, independent of the code that made it |
//! | [`passes`] | what makes a graph smaller and faster: an ordered list |
//! | [`exec`] | how a graph runs |
#![forbid(unsafe_code)]

pub mod exec;
pub mod ir;
pub mod ops;
pub mod passes;
pub mod plan;
pub mod validate;
