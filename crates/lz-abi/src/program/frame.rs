//! One run of a program.

use std::marker::PhantomData;

use super::{MOST_OUTPUTS, Program, arenas};
use crate::{
    Arena, Args, Bytes, DType, Device, OutOfScratch, RawTensor, TensorMut, TensorRef, Threads, Workspace, overlap,
};

/// A tensor the caller gives.
#[derive(Debug)]
pub enum External<'a> {
    /// One that is read.
    Read(TensorRef<'a>),
    /// One that is written.
    Write(TensorMut<'a>),
}

impl External<'_> {
    fn raw(&self) -> &RawTensor {
        match self {
            External::Read(tensor) => tensor.raw(),
            External::Write(tensor) => tensor.raw(),
        }
    }

    fn bytes(&self) -> Bytes {
        match self {
            External::Read(tensor) => tensor.bytes(),
            External::Write(tensor) => tensor.bytes(),
        }
    }

    fn is_written(&self) -> bool {
        matches!(self, External::Write(_))
    }

    fn is_present(&self) -> bool {
        self.raw().rank >= 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            External::Read(tensor) => tensor.dtype(),
            External::Write(tensor) => tensor.dtype(),
        }
    }

    /// Sizes.
    pub fn shape(&self) -> &[i64] {
        match self {
            External::Read(tensor) => tensor.shape(),
            External::Write(tensor) => tensor.shape(),
        }
    }

    fn is_row_major(&self) -> bool {
        match self {
            External::Read(tensor) => tensor.is_contiguous(),
            External::Write(tensor) => tensor.is_contiguous(),
        }
    }

    fn describe(&self) -> String {
        match self {
            External::Read(tensor) => format!("{tensor:?}"),
            External::Write(tensor) => format!("{tensor:?}"),
        }
    }
}

/// Why a run cannot begin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExternalError {
    /// Another number of tensors.
    #[error("{given} tensors are given, the program takes {wanted}")]
    Count {
        /// How many are given.
        given: usize,
        /// How many it takes.
        wanted: usize,
    },
    /// A tensor of another kind.
    #[error("'{name}' is {given}, the program takes {wanted}")]
    Other {
        /// Which.
        name: String,
        /// What is given.
        given: String,
        /// What it takes.
        wanted: String,
    },
    /// A tensor the program writes may only be read.
    #[error("'{name}' is written, and may only be read")]
    ReadOnly {
        /// Which.
        name: String,
    },
    /// A tensor whose first element is not where one may be.
    #[error("the address of '{name}' is {address:#x}, {wanted}")]
    Address {
        /// Which.
        name: String,
        /// Where it is.
        address: usize,
        /// What it should be.
        wanted: String,
    },
    /// A tensor that is written shares memory with another one.
    #[error("'{name}' is written, and shares memory with '{other}'")]
    Shared {
        /// One of them.
        name: String,
        /// The other.
        other: String,
    },
    /// There is no memory for the arena.
    #[error("out of memory: an arena of {0} bytes")]
    NoArena(usize),
}

impl From<OutOfScratch> for ExternalError {
    fn from(why: OutOfScratch) -> ExternalError {
        ExternalError::NoArena(why.wanted)
    }
}

/// The tensors of one caller at a time, and where they point.
pub(super) struct Frame {
    tensors: Box<[RawTensor]>,
    /// The start of the arena they were last made for.
    base: *mut u8,
    /// The caller's tensors they were last made for.
    starts: Box<[*mut u8]>,
}

// SAFETY: addresses, which nobody follows before `enter` has set them.
unsafe impl Send for Frame {}

/// A run: a frame and an arena, until it is dropped.
pub struct Running<'a> {
    program: &'a Program,
    frame: Option<Frame>,
    arena: Arena,
    /// The outputs of the call that runs.
    outputs: [RawTensor; MOST_OUTPUTS],
    /// The scratch memory of the call that runs.
    workspace: Workspace<'a>,
    externals: PhantomData<&'a mut [u8]>,
}

pub(super) fn enter<'a>(program: &'a Program, externals: &'a mut [External<'_>]) -> Result<Running<'a>, ExternalError> {
    check(program, externals)?;
    let mut arena = program.arenas.take(program.arena)?;
    let kept = program.frames.lock().unwrap_or_else(|e| e.into_inner()).pop();
    let mut frame = kept.unwrap_or_else(|| Frame {
        tensors: program.template.clone(),
        base: std::ptr::null_mut(),
        starts: vec![std::ptr::null_mut(); program.slots.len()].into(),
    });
    let base = arena.bytes_mut().as_mut_ptr();
    if base != frame.base {
        for pointer in &program.in_arena {
            frame.tensors[pointer.tensor as usize].data = base.wrapping_add(pointer.offset).cast();
        }
        frame.base = base;
    }
    for ((external, pointers), last) in externals.iter().zip(&program.in_externals).zip(&mut frame.starts) {
        let start = external.raw().start();
        if start == std::mem::replace(last, start) {
            continue;
        }
        for pointer in pointers {
            frame.tensors[pointer.tensor as usize].data = start.wrapping_add(pointer.offset).cast();
        }
    }
    let (outputs, workspace) = ([RawTensor::ABSENT; MOST_OUTPUTS], Workspace::none());
    Ok(Running { program, frame: Some(frame), arena, outputs, workspace, externals: PhantomData })
}

/// Checks what the caller gives.
fn check(program: &Program, externals: &[External<'_>]) -> Result<(), ExternalError> {
    let slots = &program.slots;
    if externals.len() != slots.len() {
        return Err(ExternalError::Count { given: externals.len(), wanted: slots.len() });
    }
    for (slot, external) in slots.iter().zip(externals) {
        let name = || slot.name.clone();
        let fits = external.is_present()
            && external.raw().element == slot.dtype.element()
            && external.shape() == &slot.shape[..]
            && external.is_row_major()
            && external.raw().device == Device::HOST;
        if !fits {
            let wanted = format!("row-major {} {:?} in host memory", slot.dtype, &slot.shape[..]);
            return Err(ExternalError::Other { name: name(), given: external.describe(), wanted });
        }
        if slot.written && !external.is_written() {
            return Err(ExternalError::ReadOnly { name: name() });
        }
        let (address, align) = (external.raw().start() as usize, slot.dtype.align());
        let is_empty = slot.shape.contains(&0);
        if !is_empty && (address == 0 || !address.is_multiple_of(align)) {
            let wanted = format!("which is no multiple of {align} of a tensor that is there");
            return Err(ExternalError::Address { name: name(), address, wanted });
        }
    }
    for (i, external) in externals.iter().enumerate().filter(|(_, external)| external.is_written()) {
        for (j, other) in externals.iter().enumerate() {
            // Of two that are written it is enough to look at them once.
            let again = other.is_written() && j <= i;
            if !again && i != j && overlap(&[external.bytes(), other.bytes()]).is_some() {
                return Err(ExternalError::Shared { name: slots[i].name.clone(), other: slots[j].name.clone() });
            }
        }
    }
    Ok(())
}

impl Running<'_> {
    /// The arguments of a call.
    #[inline]
    pub fn call<'s>(&'s mut self, at: usize, threads: Threads<'s>) -> Args<'s, 's> {
        let call = &self.program.calls[at];
        let Some(frame) = &self.frame else { unreachable!("a frame is there until the run ends") };
        let inputs = &frame.tensors[call.inputs.clone()];
        // SAFETY: `TensorRef` is laid out as `RawTensor`. When the program was built, each of these was seen to be inside its
        // root, aligned, and apart from the outputs and the scratch memory of this call. The roots live and hold initialised
        // bytes: the arena belongs to this run, the caller's tensors are borrowed as long as it and were compared with the slots
        // the places were checked against, and constants live as long as the program and are never written. Only outputs of
        // calls are written, and one call ends before the next begins (`&mut self`), so nobody writes these meanwhile: written
        // externals share no memory with other externals. Sizes and strides are in boxes of the program.
        let inputs = unsafe { std::slice::from_raw_parts(inputs.as_ptr().cast::<TensorRef<'s>>(), inputs.len()) };
        // A copy: a kernel may move what is in the slice, and the frame is used again.
        let count = call.outputs.len();
        self.outputs[..count].copy_from_slice(&frame.tensors[call.outputs.clone()]);
        // SAFETY: as above; outputs are in roots that may be written, apart from each other and from the inputs, and no two
        // indices of one are the same element. At most `MOST_OUTPUTS` were let in.
        let outputs =
            unsafe { std::slice::from_raw_parts_mut(self.outputs.as_mut_ptr().cast::<TensorMut<'s>>(), count) };
        let start = frame.base.wrapping_add(call.scratch.start);
        // SAFETY: a part of this run's arena, aligned as arenas are, and apart from all tensors of the call. It ends with this
        // borrow of the run: `workspace` is overwritten before it is lent again.
        self.workspace = unsafe { Workspace::at(start, call.scratch.len()) };
        // SAFETY: lifetimes leave no trace in the layout, and what a kernel puts there is not used after `'s`.
        let workspace = unsafe { &mut *std::ptr::from_mut(&mut self.workspace).cast::<Workspace<'s>>() };
        Args::new(inputs, outputs, &call.params, &call.dims, workspace).with_threads(threads)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.program.arenas.give(std::mem::take(&mut self.arena));
        if let Some(frame) = self.frame.take() {
            let mut frames = self.program.frames.lock().unwrap_or_else(|e| e.into_inner());
            if frames.len() < arenas::KEPT {
                frames.push(frame);
            }
        }
    }
}

impl super::Slot {
    /// One that is read.
    pub fn read(name: &str, dtype: DType, shape: &[i64]) -> super::Slot {
        super::Slot { name: name.into(), dtype, shape: shape.into(), written: false }
    }

    /// One that is written.
    pub fn written(name: &str, dtype: DType, shape: &[i64]) -> super::Slot {
        super::Slot { written: true, ..super::Slot::read(name, dtype, shape) }
    }
}
