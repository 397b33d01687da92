//! Memory plans: where every value of a graph lies, for exact sizes.
//!
//! ```text
//! Graph + Symbols  → Instance     instance.rs    every size is a number, every shape rule is checked with numbers
//! Instance         → order        order.rs       four orders of the nodes
//! order            → groups       lifetimes.rs   values that share memory, and the steps each group lives
//! groups           → offsets      offsets.rs     places in one arena
//! ```
//!
//! [`plan`] tries the combinations and keeps the smallest arena. [`MemoryPlan::bound`] says how small it could be at
//! best. [`crate::validate::plan`] checks a plan without using any of this.

pub mod ablation;
pub mod bounds;
mod instance;
pub mod lifetimes;
pub mod offsets;
pub mod order;
mod search;
mod views;

use smallvec::SmallVec;

use crate::ir::{NodeId, ValueId};

pub use instance::{Instance, InstanceError};
pub use lifetimes::Sharing;
pub use offsets::Fit;
pub use order::Ordering;
pub use search::{Choice, Choices, OfOps, plan, plan_with};
pub use views::row_major;

/// Every place in the arena is a multiple of this many bytes: a cache line, and the width of the widest vector.
pub const ALIGNMENT: usize = 64;

/// Elements from one index to the next, for each axis.
pub type Strides = SmallVec<[i64; 4]>;

/// Which memory a value lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Root {
    /// Memory that all values of a run share.
    Arena,
    /// The memory of input `i` of [`crate::ir::Graph::inputs`]. Written only if [`crate::ir::Graph::updates`] names the
    /// input.
    Input(usize),
    /// The memory of a constant. Never written.
    Constant(ValueId),
    /// Memory of the caller for result `i` of [`crate::ir::Graph::outputs`].
    Output(usize),
}

/// Where a value lies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// In which memory.
    pub root: Root,
    /// Bytes from the start of that memory to the first element.
    pub offset_bytes: usize,
    /// `None` if it lies row-major. `Some` for a view whose readers all take strides ([`Demands::strided`]).
    pub strides: Option<Strides>,
}

impl Place {
    /// Row-major, at an offset in some memory.
    pub fn at(root: Root, offset_bytes: usize) -> Place {
        Place { root, offset_bytes, strides: None }
    }
}

/// Memory in the arena that a node's kernel uses while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Bytes from the start of the arena.
    pub offset_bytes: usize,
    /// How many bytes.
    pub bytes: usize,
}

/// Bytes that are copied after the last node, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The value these bytes are.
    pub value: ValueId,
    /// From where.
    pub from: Place,
    /// To where: an output, an input that is updated, or the arena.
    pub to: Place,
    /// How many bytes.
    pub bytes: usize,
}

/// What the kernels chosen for the nodes need.
pub trait Demands {
    /// Bytes the kernel of a node needs besides its inputs and its result.
    fn scratch(&self, node: NodeId) -> usize;

    /// The inputs over which the kernel of a node may write its result: some of those of
    /// [`crate::ops::OpDef::in_place`].
    fn in_place(&self, node: NodeId) -> &[usize];

    /// Strides of a node's result that its kernel does not store row-major, but without gaps. All that reads it takes them.
    fn stored(&self, _node: NodeId) -> Option<Strides> {
        None
    }

    /// Whether the kernel of a node reads this input with any strides.
    fn strided(&self, _node: NodeId, _input: usize) -> bool {
        false
    }
}

/// Where every value lies, and in which order the nodes run.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryPlan {
    /// The nodes in the order they run.
    pub order: Vec<NodeId>,
    /// Where each value lies, by [`ValueId::index`]. `None` for values that nothing makes any more.
    pub places: Vec<Option<Place>>,
    /// The scratch of each node, by [`NodeId::index`].
    pub scratch: Vec<Option<Scratch>>,
    /// By [`NodeId::index`]: the result is a view of an input. Such a node runs no kernel.
    pub views: Vec<bool>,
    /// By [`NodeId::index`]: the input over which the result is written. An empty input has no memory, and is none.
    pub over: Vec<Option<usize>>,
    /// What is copied after the last node, in this order: results that lie elsewhere, then new contents of inputs.
    pub transfers: Vec<Transfer>,
    /// Bytes of the arena.
    pub arena: usize,
    /// Bytes that no plan with any of the tried orders can go below: the most that live at one step.
    pub bound: usize,
    /// How it was made.
    pub choice: Choice,
}

impl MemoryPlan {
    /// Where a value lies.
    pub fn place(&self, value: ValueId) -> Option<&Place> {
        self.places.get(value.index())?.as_ref()
    }

    /// Whether a node runs no kernel, since its result is a view of an input.
    pub fn is_view(&self, node: NodeId) -> bool {
        self.views.get(node.index()).copied().unwrap_or(false)
    }

    /// The inputs of a node that are the value over which its result is written: the same value may be given twice.
    pub fn written_over(&self, node: NodeId, inputs: &[Option<ValueId>]) -> SmallVec<[usize; 2]> {
        let Some(over) = self.over.get(node.index()).copied().flatten() else { return SmallVec::new() };
        (0..inputs.len()).filter(|&at| inputs[at] == inputs[over]).collect()
    }
}
