//! All that one call of a kernel is made with, and how a kernel fails.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::{TensorMut, TensorRef, Threads, Workspace};

/// A slice with a fixed layout: address, then length.
#[repr(C)]
pub struct Span<'a, T> {
    start: *const T,
    len: usize,
    memory: PhantomData<&'a [T]>,
}

/// A slice that is written, with a fixed layout: address, then length.
#[repr(C)]
pub struct SpanMut<'a, T> {
    start: *mut T,
    len: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&[T]`.
unsafe impl<T: Sync> Send for Span<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Span<'_, T> {}
// SAFETY: it is a `&mut [T]`.
unsafe impl<T: Send> Send for SpanMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for SpanMut<'_, T> {}

impl<T> Clone for Span<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Span<'_, T> {}

impl<'a, T> From<&'a [T]> for Span<'a, T> {
    fn from(slice: &'a [T]) -> Span<'a, T> {
        Span { start: slice.as_ptr(), len: slice.len(), memory: PhantomData }
    }
}

impl<'a, T> From<&'a mut [T]> for SpanMut<'a, T> {
    fn from(slice: &'a mut [T]) -> SpanMut<'a, T> {
        SpanMut { start: slice.as_mut_ptr(), len: slice.len(), memory: PhantomData }
    }
}

impl<'a, T> Span<'a, T> {
    /// The slice.
    pub fn as_slice(self) -> &'a [T] {
        // SAFETY: it was made from a slice that is borrowed for `'a`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T> Deref for Span<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.as_slice()
    }
}

impl<T> Deref for SpanMut<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: it was made from a slice that is borrowed for longer than this.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T> DerefMut for SpanMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// The value of a scalar parameter.
#[repr(C, u32)]
#[derive(Clone, Copy)]
pub enum Param {
    /// Not given, and the operation has its own rule for that.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A name, in UTF-8.
    Text(Span<'static, u8>),
}

impl Param {
    /// A name.
    pub fn text(text: &'static str) -> Param {
        Param::Text(text.as_bytes().into())
    }

    /// The truth value, if it is one.
    pub fn as_bool(self) -> Option<bool> {
        if let Param::Bool(b) = self { Some(b) } else { None }
    }

    /// The integer, if it is one.
    pub fn as_int(self) -> Option<i64> {
        if let Param::Int(i) = self { Some(i) } else { None }
    }

    /// The number, if it is one; integers widen.
    pub fn as_float(self) -> Option<f64> {
        match self {
            Param::Float(x) => Some(x),
            Param::Int(i) => Some(i as f64),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn as_str(self) -> Option<&'static str> {
        if let Param::Text(text) = self { std::str::from_utf8(text.as_slice()).ok() } else { None }
    }
}

impl std::fmt::Debug for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Param::None => f.write_str("None"),
            Param::Bool(b) => write!(f, "{b}"),
            Param::Int(i) => write!(f, "{i}"),
            Param::Float(x) => write!(f, "{x}"),
            Param::Text(_) => write!(f, "{:?}", self.as_str()),
        }
    }
}

/// The stream of a device that work is put on; null for host kernels.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(*mut c_void);

// SAFETY: a handle, which streams of every driver allow to be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// None: the kernel runs on the host.
    pub const HOST: Stream = Stream(std::ptr::null_mut());

    /// A stream by its handle.
    pub fn new(handle: *mut c_void) -> Stream {
        Stream(handle)
    }

    /// The handle.
    pub fn handle(self) -> *mut c_void {
        self.0
    }
}

/// The arguments of one kernel call, bound and checked, in the order of the operation's schema.
#[repr(C)]
pub struct Args<'a, 't> {
    inputs: Span<'a, TensorRef<'t>>,
    /// The tensors that are written. An updated input stands here with its old contents.
    pub outputs: SpanMut<'a, TensorMut<'t>>,
    params: Span<'a, Param>,
    dims: Span<'a, i64>,
    workspace: &'a mut Workspace<'a>,
    threads: Threads<'a>,
    stream: Stream,
}

impl<'a, 't> Args<'a, 't> {
    /// On the host, by the caller's thread alone. `inputs`: [`TensorRef::ABSENT`] for those not given and for those that are
    /// updated, which stand among `outputs` with their old contents. `params`: every parameter, defaults filled in.
    /// `dims`: the size of every dimension.
    pub fn new(
        inputs: &'a [TensorRef<'t>],
        outputs: &'a mut [TensorMut<'t>],
        params: &'a [Param],
        dims: &'a [i64],
        workspace: &'a mut Workspace<'a>,
    ) -> Args<'a, 't> {
        Args {
            inputs: inputs.into(),
            outputs: outputs.into(),
            params: params.into(),
            dims: dims.into(),
            workspace,
            threads: Threads::ONE,
            stream: Stream::HOST,
        }
    }

    /// The same with threads.
    pub fn with_threads(self, threads: Threads<'a>) -> Args<'a, 't> {
        Args { threads, ..self }
    }

    /// The same on a stream.
    pub fn on(self, stream: Stream) -> Args<'a, 't> {
        Args { stream, ..self }
    }

    /// An input by its place; `None` when it was not given, or is updated.
    #[inline]
    pub fn input(&self, at: usize) -> Option<TensorRef<'t>> {
        self.inputs.as_slice().get(at).copied().filter(TensorRef::is_present)
    }

    /// Every input, [`TensorRef::ABSENT`] for those that were not given or are updated.
    #[inline]
    pub fn inputs(&self) -> &'a [TensorRef<'t>] {
        self.inputs.as_slice()
    }

    /// Every parameter.
    #[inline]
    pub fn params(&self) -> &'a [Param] {
        self.params.as_slice()
    }

    /// A parameter by its place.
    #[inline]
    pub fn param(&self, at: usize) -> Param {
        self.params[at]
    }

    /// The size of a dimension by its place.
    #[inline]
    pub fn dim(&self, at: usize) -> i64 {
        self.dims[at]
    }

    /// The size of every dimension.
    #[inline]
    pub fn dims(&self) -> &'a [i64] {
        self.dims.as_slice()
    }

    /// Scratch memory, as much as the kernel's workspace formula says.
    pub fn workspace(&mut self) -> &mut Workspace<'a> {
        self.workspace
    }

    /// The threads it may use.
    pub fn threads(&self) -> Threads<'a> {
        self.threads
    }

    /// The stream it is to use.
    pub fn stream(&self) -> Stream {
        self.stream
    }
}

/// Why a kernel could not do its work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum KernelError {
    /// The data itself is invalid (an index outside its table, …). No other kernel would fare better.
    #[error("{input}{} is {value}, {expected}", place(at))]
    BadData {
        /// Which input.
        input: &'static str,
        /// Where in it.
        at: Vec<i64>,
        /// What stands there.
        value: i64,
        /// What should.
        expected: String,
    },
    /// The data itself is invalid: a number outside the range it must be in. No other kernel would fare better.
    #[error("{input}{at:?} is {value}, {expected}")]
    BadNumber {
        /// Which input.
        input: &'static str,
        /// Where in it.
        at: Vec<i64>,
        /// What stands there.
        value: f64,
        /// What should.
        expected: String,
    },
    /// The kernel failed; another may not.
    #[error("{0}")]
    Failed(String),
    /// Memory ran out.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
}

impl KernelError {
    /// Whether the call itself is at fault, so that trying another kernel is pointless.
    pub fn is_callers_fault(&self) -> bool {
        matches!(self, KernelError::BadData { .. } | KernelError::BadNumber { .. })
    }
}

/// Where in an input; nothing for a number that is no element of one.
fn place(at: &[i64]) -> String {
    if at.is_empty() { String::new() } else { format!("{at:?}") }
}

impl From<crate::NotASlice> for KernelError {
    fn from(why: crate::NotASlice) -> KernelError {
        KernelError::Failed(why.to_string())
    }
}

impl From<crate::OutOfScratch> for KernelError {
    fn from(why: crate::OutOfScratch) -> KernelError {
        KernelError::Failed(why.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, DType, Tensor};
    use std::mem::offset_of;

    #[test]
    fn the_layout_is_fixed() {
        type A = Args<'static, 'static>;
        let offsets = [
            offset_of!(A, inputs),
            offset_of!(A, outputs),
            offset_of!(A, params),
            offset_of!(A, dims),
            offset_of!(A, workspace),
            offset_of!(A, threads),
            offset_of!(A, stream),
        ];
        assert_eq!(offsets, [0, 16, 32, 48, 64, 72, 96]);
        assert_eq!((size_of::<A>(), align_of::<A>()), (104, 8));
        assert_eq!((size_of::<Param>(), align_of::<Param>()), (24, 8));
        assert_eq!(size_of::<Workspace<'_>>(), 16);
        let tag = |param: Param| {
            // SAFETY: `repr(C, u32)` puts the tag first.
            unsafe { std::ptr::from_ref(&param).cast::<u32>().read() }
        };
        let all = [Param::None, Param::Bool(true), Param::Int(1), Param::Float(1.0), Param::text("x")];
        assert_eq!(all.map(tag), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn arguments_are_found_by_place() {
        let x = Tensor::from_f64(DType::F32, &[2], &[1., 2.]);
        let mut y = Tensor::zeros(DType::F32, &[2]);
        let (x, mut y_view) = (x.view(), y.view_mut());
        let inputs = [x.as_ref(), TensorRef::ABSENT];
        let mut outputs = [y_view.as_mut()];
        let mut arena = Arena::try_new(64).unwrap();
        let mut workspace = arena.lend();
        let params = [Param::Float(2.0), Param::text("tanh"), Param::Int(3)];
        let mut args = Args::new(&inputs, &mut outputs, &params, &[2], &mut workspace);
        assert!(args.input(1).is_none() && args.input(7).is_none());
        assert_eq!((args.inputs().len(), args.params().len()), (2, 3));
        assert_eq!((args.param(1).as_str(), args.param(2).as_float(), args.dim(0)), (Some("tanh"), Some(3.0), 2));
        let (scale, input) = (args.param(0).as_float().unwrap() as f32, args.input(0).unwrap());
        let scratch = args.workspace().take::<f32>(2).unwrap();
        scratch.copy_from_slice(input.as_slice().unwrap());
        for (y, x) in args.outputs[0].as_slice::<f32>().unwrap().iter_mut().zip(scratch) {
            *y = scale * *x;
        }
        assert_eq!(args.threads().count(), 1);
        assert_eq!(y.to_f64(), [2., 4.]);
    }
}
