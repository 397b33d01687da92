//! Which kernels could run a node, and with which arguments.
//!
//! A node has a list of candidates, the preferred first. Each is one or more kernel calls, bound completely: which tensors, in
//! which layout, with which parameters and how much scratch memory. The reference of the operation is the last of every list.
//!
//! Nodes are bound twice: before memory is planned, with tensors that lie row-major, to know what the plan must provide
//! ([`Needs`]); and after it, with the places and strides of the plan.
//!
//! | | |
//! |---|---|
//! | [`catalog`] | kernels of the catalog's operations, checked and ranked by selection |
//! | [`linear`] | products with constant weights |
//! | [`packs`] | weights as products read them: in blocks, as narrower numbers |
//! | [`attention`] | attention |
//! | [`doubles`] | rows and attention of float64 |
//! | [`rope`] | rotary embeddings |
//! | [`norms`] | norms of groups and of several axes |
//! | [`sums`] | norms of sums |
//! | [`sequence`] | candidates of several calls |
//! | [`windows`] | convolutions and pools |
//! | [`foreign`] | kernels of other libraries |
//! | [`preference`] | where those go first |
//! | [`primitives`] | kernels that are no operation of the catalog |
//! | [`needs`] | what candidates ask of the memory plan |

use std::sync::Arc;

use lz_abi::program::Place;
use lz_abi::{DType, Extents, Param, Storage, row_major};
use lz_cpu::primitives::{InstructionSet, Primitive, matmul};
use lz_model::{CpuIsa, NamedCall, TensorMeta};
use lz_select::Standing;

use crate::exec::foreign::Foreign;
use crate::exec::kernel::Kernel;
use crate::ir::{Constant, Meta};
use crate::ops::Op;

mod attention;
pub mod catalog;
mod doubles;
mod foreign;
mod host;
mod linear;
pub mod needs;
mod norms;
pub mod packs;
mod preference;
mod primitives;
mod reductions;
mod rope;
mod rounded;
mod sequence;
mod sums;
mod windows;

pub use needs::Needs;
pub use packs::{Packs, Weights};

/// Where a tensor lies.
#[derive(Clone)]
pub enum At {
    /// Not planned yet.
    Unplanned,
    /// In the arena, or in memory of the caller.
    Memory(Place),
    /// In a constant, so many bytes from its first element.
    Constant(Arc<dyn Storage>, usize),
    /// In the node's scratch memory, so many bytes from its start: what one call hands to the next.
    Scratch(usize),
}

/// A tensor of a call.
#[derive(Clone)]
pub struct Arg {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Extents,
    /// Strides, in elements.
    pub strides: Extents,
    /// Where it lies.
    pub at: At,
}

impl Arg {
    /// A row-major tensor of a value's element type and sizes, which are all known.
    pub fn of(meta: &Meta, at: At) -> Arg {
        let shape: Extents = meta.sizes().expect("an instance has a number for every size").as_slice().into();
        Arg { dtype: meta.dtype, strides: row_major(&shape), shape, at }
    }

    /// A constant as it lies.
    pub fn constant(storage: Arc<dyn Storage>) -> Arg {
        let (dtype, shape, strides) = {
            let view = storage.view();
            (view.dtype(), view.shape().into(), view.strides().into())
        };
        Arg { dtype, shape, strides, at: At::Constant(storage, 0) }
    }

    /// A constant as a node reads it: weights of products as they lie, since they are packed; others row-major.
    pub fn constant_of(op: &Op, input: usize, constant: &Constant, packs: &Packs) -> Arg {
        let is_weight = input == 1 && matches!(op, Op::Linear(_) | Op::MatMul(_));
        Arg::constant(if is_weight { packs.aligned(constant.storage()) } else { packs.laid(constant.storage()) })
    }

    /// The same with axes in another order.
    pub fn permuted(&self, axes: &[usize]) -> Arg {
        let order = |extents: &Extents| axes.iter().map(|&axis| extents[axis]).collect();
        Arg { shape: order(&self.shape), strides: order(&self.strides), ..self.clone() }
    }

    /// Every so manieth element along an axis.
    pub fn part(&self, axis: usize, start: i64, len: i64, step: i64) -> Arg {
        let mut part = self.clone();
        let bytes = (start * self.strides[axis]) as usize * (self.dtype.bits() as usize / 8);
        part.shape[axis] = len;
        part.strides[axis] *= step;
        match &mut part.at {
            At::Unplanned => {}
            At::Memory(place) => place.offset += bytes,
            At::Constant(_, offset) | At::Scratch(offset) => *offset += bytes,
        }
        part
    }

    /// Whether it is row-major without gaps.
    pub fn is_row_major(&self) -> bool {
        self.meta().strides.is_none_or(|strides| {
            let mut expected = 1;
            self.shape.contains(&0)
                || self.shape.iter().zip(strides).rev().all(|(&n, &stride)| {
                    let fits = n == 1 || stride == expected;
                    expected *= n;
                    fits
                })
        })
    }

    /// As selection sees it. Nothing is promised of addresses the caller gives.
    pub fn meta(&self) -> TensorMeta<'_> {
        TensorMeta::new(self.dtype, &self.shape).strided(&self.strides)
    }
}

/// A node that is to be bound.
pub struct Site<'a> {
    /// What it does, with numbers in its attributes.
    pub op: &'a Op,
    /// What it reads.
    pub inputs: &'a [Option<Arg>],
    /// What it makes.
    pub output: &'a Arg,
    /// The inputs its result is written over: one value, which may be given several times.
    pub over: &'a [usize],
    /// What holds for every node.
    pub terms: Terms<'a>,
}

/// What holds for every node of a graph.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    /// The threads a kernel may use.
    pub threads: usize,
    /// How exactly products are computed.
    pub precision: Precision,
    /// The best instructions kernels may use.
    pub level: CpuIsa,
    /// Weights that were packed before.
    pub packs: &'a Packs,
    /// Which of the catalog's kernels may run, and in which order.
    pub ranking: &'a dyn Ranking,
    /// Kernels of other libraries.
    pub foreign: &'a [Foreign],
    /// Whether candidates are measured.
    pub measured: bool,
}

impl Terms<'_> {
    /// The instructions primitives run with.
    pub fn instructions(&self) -> InstructionSet {
        InstructionSet::within(self.level)
    }
}

/// How exactly products of float32 are computed. Sums are float32 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// In float32.
    Float32,
    /// As exactly as in float32: numbers may be three bfloat16 parts.
    #[default]
    Highest,
    /// With 16 bits of each number: two bfloat16 parts.
    High,
}

impl Precision {
    /// All of them, by name.
    pub const NAMES: [(&str, Precision); 3] =
        [("float32", Precision::Float32), ("highest", Precision::Highest), ("high", Precision::High)];

    /// The bfloat16 parts a number may be split into.
    pub(crate) fn parts(self) -> Option<i64> {
        match self {
            Precision::Float32 => None,
            Precision::Highest => Some(3),
            Precision::High => Some(2),
        }
    }
}

/// Who ranks kernels of the catalog's operations: an engine, by its policy and its measurements.
pub trait Ranking: Send + Sync {
    /// The ids of the kernels that may serve a call, the best first; those of other libraries are passed over. `None`: as the kernels
    /// were declared.
    fn ranked(&self, op: &str, call: &NamedCall<'_>) -> Option<Vec<String>>;

    /// What the operator says of a kernel of another library that could run a node.
    fn standing(&self, _op: &Op, _kernel: &str) -> Standing {
        Standing::Open
    }

    /// The best instructions kernels may use, those of the catalog and primitives alike.
    fn level(&self) -> CpuIsa {
        CpuIsa::Native
    }
}

/// Nobody: kernels are ranked as they were declared.
#[derive(Clone, Copy, Debug, Default)]
pub struct AsDeclared;

impl Ranking for AsDeclared {
    fn ranked(&self, _: &str, _: &NamedCall<'_>) -> Option<Vec<String>> {
        None
    }
}

impl Site<'_> {
    /// An input that the shape rule has seen to be there.
    fn need(&self, at: usize) -> &Arg {
        self.inputs[at].as_ref().expect("checked by the shape rule")
    }

    /// Whether an input is what the result is written over.
    fn is_over(&self, at: usize) -> bool {
        self.over.contains(&at)
    }

    /// The inputs as kernels get them: without those the result is written over, which stand among the outputs.
    fn read(&self) -> Vec<Option<Arg>> {
        (0..self.inputs.len()).map(|at| self.inputs[at].clone().filter(|_| !self.is_over(at))).collect()
    }

    /// An input that may be there.
    fn get(&self, at: usize) -> Option<&Arg> {
        self.inputs.get(at)?.as_ref()
    }
}

/// A kernel call, bound completely.
#[derive(Clone)]
pub struct Bound {
    /// The kernel.
    pub kernel: Kernel,
    /// What it reads, in the order of its arguments.
    pub inputs: Vec<Option<Arg>>,
    /// What it writes.
    pub outputs: Vec<Arg>,
    /// Its parameters.
    pub params: Vec<Param>,
    /// The sizes of its dimensions.
    pub dims: Vec<i64>,
    /// Bytes of scratch memory.
    pub scratch: usize,
    /// Bytes at the start of the node's scratch memory that hold tensors of this call.
    pub reserved: usize,
}

/// A way to run a node.
#[derive(Clone)]
pub struct Candidate {
    /// What it is called: `lz_cpu.softmax.avx512`, `reference.softmax`.
    pub name: String,
    /// Its calls, one after the other.
    pub calls: Vec<Bound>,
    /// The inputs over which it can write its result.
    pub in_place: &'static [usize],
}

impl Candidate {
    /// Bytes of scratch memory.
    pub fn scratch(&self) -> usize {
        self.calls.iter().map(|call| call.reserved + call.scratch).max().unwrap_or(0)
    }

    /// Whether it splits numbers of float32 for the matrix unit.
    fn splits(&self) -> bool {
        let is_split = |call: &Bound| {
            matches!(call.kernel, Kernel::Primitive(Primitive::Matmul, _)) && matmul::parts(&call.params).is_some()
        };
        self.calls.iter().any(is_split)
    }

    /// Whether it is the reference of the operation, which is a last resort.
    pub fn is_reference(&self) -> bool {
        self.calls.iter().any(|call| matches!(call.kernel, Kernel::Reference { .. }))
    }

    /// The kernel of another library that it calls.
    pub fn foreign(&self) -> Option<&'static str> {
        self.calls.iter().find_map(|call| match call.kernel {
            Kernel::Foreign(Foreign { name, .. }) => Some(name),
            _ => None,
        })
    }
}

/// All ways to run a node, the preferred first. Never empty.
pub fn candidates(site: &Site<'_>) -> Vec<Candidate> {
    let mut found = match site.op {
        Op::Attention(op) => attention::attention(site, op),
        Op::CachedAttention(op) => attention::cached(site, op),
        Op::Rope(op) => rope::candidates(site, op),
        Op::MatMul(op) => linear::matmul(site, op),
        Op::Linear(op) => linear::linear(site, op),
        Op::Softmax(op) => catalog::softmax(site, op),
        Op::LayerNorm(op) => norms::layer_norm(site, op),
        Op::GroupNorm(op) => norms::group_norm(site, op),
        Op::RmsNorm(op) => catalog::rms_norm(site, op),
        Op::AddLayerNorm(op) => sums::add_layer_norm(site, op),
        Op::AddRmsNorm(op) => sums::add_rms_norm(site, op),
        Op::Gated(op) => catalog::gated(site, op),
        Op::Embedding(_) => catalog::embedding(site),
        Op::Conv(op) => windows::conv(site, op),
        Op::Pool(op) => windows::pool(site, op),
        // Nothing here can stand in for the program the graph came from.
        Op::Host(op) => return vec![host::host(site, op)],
        _ => Vec::new(),
    };
    found.extend(primitives::candidates(site));
    // Splitting numbers is offered only where it is faster than all that computes in float32. Narrow weights are what the caller wants.
    if site.terms.packs.weights() == Weights::AsTheyAre {
        found.sort_by_key(|one| !one.splits());
    }
    foreign::add(site, &mut found);
    found.push(reference(site));
    // An input that is written over does not exist for kernels that read it.
    found.retain(|candidate| site.over.iter().all(|at| candidate.in_place.contains(at)));
    found
}

/// The reference of the operation.
fn reference(site: &Site<'_>) -> Candidate {
    let over = (0..site.inputs.len()).map(|at| site.is_over(at)).collect();
    Candidate {
        name: format!("reference.{}", site.op.name()),
        calls: vec![Bound {
            kernel: Kernel::Reference { op: Box::new(site.op.clone()), over },
            inputs: site.read(),
            outputs: vec![site.output.clone()],
            params: Vec::new(),
            dims: Vec::new(),
            scratch: 0,
            reserved: 0,
        }],
        in_place: &[0, 1, 2, 3, 4, 5, 6, 7],
    }
}

/// Ways to copy a tensor to another place.
pub fn copied(from: Arg, to: Arg, terms: Terms<'_>) -> Vec<Candidate> {
    let axes = (0..to.shape.len()).collect();
    let op = Op::from(crate::ops::permute::Permute { axes });
    candidates(&Site { op: &op, inputs: &[Some(from)], output: &to, over: &[], terms })
}
