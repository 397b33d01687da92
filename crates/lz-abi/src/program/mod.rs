//! The memory of a program: kernel calls whose tensors lie in one arena, in memory of the caller, or in constants.
//!
//! ```text
//! Layout          the calls, each with the places of its tensors; what the caller gives; constants
//!   → Program     every place checked: inside its root, aligned, no output over an input or another output
//!   → enter       the caller's tensors checked; an arena and the prepared arguments of a frame taken from a pool
//!   → call        the arguments of one call: borrowed arrays, nothing is allocated
//! ```
//!
//! A program is shared by any number of threads. Each run has a frame of its own: an arena, and the arrays of tensors that
//! point into it. Frames and arenas are kept for the next run. All that is checked when the program is built is not checked
//! again; a run checks the caller's tensors alone.
//!
//! In place: the input is absent, and the output holds its old contents, as [`crate::Args`] has it.

mod arenas;
mod check;
mod frame;

use std::ops::Range;
use std::sync::{Arc, Mutex};

pub use arenas::Arenas;
pub use check::LayoutError;
pub use frame::{External, ExternalError, Running};

use crate::{DType, Extents, Param, RawTensor, Storage};

/// Most outputs of a call.
pub const MOST_OUTPUTS: usize = 4;
/// What the arena and scratch memory are aligned to, in bytes.
pub const ALIGNMENT: usize = 64;

/// The memory a tensor lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Root {
    /// The arena of the run.
    Arena,
    /// A tensor of the caller, by its place.
    External(usize),
    /// A constant, by its place.
    Constant(usize),
}

/// Where a tensor begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The memory.
    pub root: Root,
    /// Bytes from the first element of the root (or the start of the arena) to the first element of the tensor.
    pub offset: usize,
}

/// A tensor of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Extents,
    /// Strides, in elements.
    pub strides: Extents,
    /// Where it begins.
    pub place: Place,
}

/// One kernel call.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// What it reads; `None` for what is not given, or is updated and stands among the outputs.
    pub inputs: Vec<Option<Operand>>,
    /// What it writes.
    pub outputs: Vec<Operand>,
    /// Parameters.
    pub params: Vec<Param>,
    /// Sizes of dimensions.
    pub dims: Vec<i64>,
    /// Scratch memory in the arena, in bytes.
    pub scratch: Range<usize>,
}

/// A tensor the caller gives at each run, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// What it is called in errors.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Extents,
    /// Whether it is written.
    pub written: bool,
}

/// All calls of a program and the memory they use.
#[derive(Default)]
pub struct Layout {
    /// Bytes of the arena.
    pub arena: usize,
    /// What the caller gives.
    pub slots: Vec<Slot>,
    /// What is known before.
    pub constants: Vec<Arc<dyn Storage>>,
    /// The calls.
    pub calls: Vec<Call>,
}

impl Layout {
    /// Checks the tensors of a call, by its place: a program with a call that fails cannot be made.
    pub fn check(&self, call: usize) -> Result<(), LayoutError> {
        check::call(self, call)
    }
}

/// Where the address of a tensor comes from.
#[derive(Clone, Copy)]
struct Pointer {
    /// Its place among the tensors of a frame.
    tensor: u32,
    offset: usize,
}

/// The arrays of one call in a frame.
struct Prepared {
    inputs: Range<usize>,
    outputs: Range<usize>,
    params: Box<[Param]>,
    dims: Box<[i64]>,
    scratch: Range<usize>,
}

/// Checked calls, and the frames of those who run them.
pub struct Program {
    /// Tensors of all calls, inputs before outputs. Addresses are null but for those of constants. They point to `extents`.
    template: Box<[RawTensor]>,
    calls: Box<[Prepared]>,
    /// Tensors in the arena.
    in_arena: Box<[Pointer]>,
    /// Tensors in each external.
    in_externals: Box<[Box<[Pointer]>]>,
    slots: Box<[Slot]>,
    arena: usize,
    arenas: Arc<Arenas>,
    frames: Mutex<Vec<frame::Frame>>,
    /// What `template` points to. Boxes that are never touched again.
    _extents: Box<[Extents]>,
    /// What keeps the constants where they are.
    _constants: Vec<Arc<dyn Storage>>,
}

// SAFETY: the addresses in `template` are of `_extents` and of constants, which live as long as this, are only read, and may be
// read from any thread (`Storage: Sync`).
unsafe impl Send for Program {}
// SAFETY: as above.
unsafe impl Sync for Program {}

impl Program {
    /// Checks the calls and prepares their arguments. Arenas are taken from `arenas`, which several programs may share.
    pub fn new(layout: Layout, arenas: Arc<Arenas>) -> Result<Program, LayoutError> {
        (0..layout.calls.len()).try_for_each(|at| layout.check(at))?;
        let Layout { arena, slots, constants, calls } = layout;
        let tensors = || {
            calls.iter().flat_map(|call| call.inputs.iter().map(Option::as_ref).chain(call.outputs.iter().map(Some)))
        };
        // The heap memory of the extents must not move: they are boxed before anything points to them.
        let extents: Box<[Extents]> = tensors()
            .flat_map(|operand| match operand {
                Some(operand) => [operand.shape.clone(), operand.strides.clone()],
                None => [Extents::new(), Extents::new()],
            })
            .collect();
        let mut in_arena = Vec::new();
        let mut in_externals: Vec<Vec<Pointer>> = vec![Vec::new(); slots.len()];
        let template = tensors()
            .enumerate()
            .map(|(at, operand)| {
                let Some(operand) = operand else { return RawTensor::ABSENT };
                let (shape, strides) = (&extents[2 * at], &extents[2 * at + 1]);
                let mut raw = crate::tensor::describe(operand.dtype, shape, strides, std::ptr::null_mut());
                let Place { root, offset } = operand.place;
                let pointer = Pointer { tensor: at as u32, offset };
                match root {
                    Root::Arena => in_arena.push(pointer),
                    Root::External(slot) => in_externals[slot].push(pointer),
                    Root::Constant(constant) => {
                        let start = constants[constant].view().as_ref().address() as *mut u8;
                        raw.data = start.wrapping_add(offset).cast();
                    }
                }
                raw
            })
            .collect();
        let mut next = 0;
        let prepared = calls.into_iter().map(|call| {
            let (inputs, outputs) = (next..next + call.inputs.len(), call.outputs.len());
            next = inputs.end + outputs;
            Prepared {
                outputs: inputs.end..next,
                inputs,
                params: call.params.into(),
                dims: call.dims.into(),
                scratch: call.scratch,
            }
        });
        Ok(Program {
            calls: prepared.collect(),
            template,
            in_arena: in_arena.into(),
            in_externals: in_externals.into_iter().map(Into::into).collect(),
            slots: slots.into(),
            arena,
            arenas,
            frames: Mutex::new(Vec::with_capacity(arenas::KEPT)),
            _extents: extents,
            _constants: constants,
        })
    }

    /// How many calls there are.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Bytes of the arena of a run.
    pub fn arena(&self) -> usize {
        self.arena
    }

    /// What the caller gives.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Begins a run: checks the caller's tensors, one for each of [`Program::slots`].
    pub fn enter<'a>(&'a self, externals: &'a mut [External<'_>]) -> Result<Running<'a>, ExternalError> {
        frame::enter(self, externals)
    }
}

#[cfg(test)]
mod tests;
