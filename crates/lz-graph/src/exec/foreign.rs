//! Kernels of another library, which whoever compiles a graph hands in ([`Options::foreign`](super::options::Options::foreign)).
//!
//! This crate knows what such a kernel computes, binds it to tensors and decides where it stands among the candidates of a node
//! (`binding/foreign.rs`); the library itself is known only to the function that calls it.

use lz_abi::{Args, DType, KernelError};

/// What a kernel computes, and the order of its arguments. Every tensor may have any strides. No input shares memory with the
/// output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// `a · b`: a (m, k), b (k, n).
    Product,
    /// `alpha · a · b + c`: a (m, k), b (k, n), c (n) or (m, n), or left out. Parameter: alpha.
    AddedProduct,
    /// `a · b` of each batch: a (batch, m, k), b (batch, k, n).
    Products,
    /// `alpha · a · b` of each batch: a (batch, m, k), b (batch, k, n). Parameter: alpha.
    ScaledProducts,
    /// `softmax(scale · q·kᵀ + mask)·v`: q (batch, heads, queries, width), k and v (batch, heads, keys, width), a mask of q's
    /// element type (batch, heads, queries, keys) or left out. Parameters: whether it is causal with the first query at the first
    /// key, scale.
    Attention,
    /// A convolution over one or two axes: x (batch, channels, sizes…), w (outputs, channels / groups, kernel…), bias (outputs) or
    /// left out. Parameters: groups, then stride, padding and dilation of each axis.
    Convolution,
}

/// A kernel of another library.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// What it is called: `torch.addmm`.
    pub name: &'static str,
    /// What it computes.
    pub task: Task,
    /// The element types it takes: all tensors of a call have the same one.
    pub dtypes: &'static [DType],
    /// Calls it. An error leaves the node to its next candidate.
    pub run: fn(Args<'_, '_>) -> Result<(), KernelError>,
}

impl Foreign {
    /// The first of a list that has a task for an element type.
    pub fn find(all: &[Foreign], task: Task, dtype: DType) -> Option<Foreign> {
        all.iter().find(|one| one.task == task && one.dtypes.contains(&dtype)).copied()
    }
}
