//! Native kernels on the straight path: torch's memory is read in place, the result comes from torch's allocator, and no
//! Python object is made but the result.

use std::cell::Cell;

use layerzero::abi::{Arena, Args, Param, TensorMut, TensorRef, Threads};
use layerzero::model::schema::Output;
use layerzero::model::{DType, Extents, KernelArgs, KernelError, OutputSpec, Query, row_major};
use layerzero::{Executable, Step, native_threads};
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use smallvec::SmallVec;

use crate::allocator;
use crate::front::{Front, Slots};
use crate::host::kernel_error;
use crate::torch::Torch;
use crate::written;

/// Bytes that are read and written from which on a call gives up the interpreter and may use several threads. Giving it up
/// and taking it back costs 0.1 µs when nobody else wants it; when somebody does, taking it back can take 5 ms (Python's
/// switch interval). 256 KiB take a core about 20 µs.
const LARGE: f64 = 262_144.0;

thread_local! {
    /// Scratch memory of this thread's calls. It stays as large as the largest of them needed.
    static SCRATCH: Cell<Arena> = Cell::default();
}

/// A call of a native kernel with everything settled but its tensors' addresses.
pub struct NativeCall {
    executable: Executable,
    query: Query,
    params: Vec<Param>,
    /// Where the seed of a call that draws random numbers comes from.
    seed: Option<Seed>,
    /// For every input of the schema the place of its argument, and its dtype; `None` where it is not given, or is updated.
    inputs: Vec<Option<(usize, DType)>>,
    outputs: Vec<Target>,
    /// The places of the arguments that are updated.
    updated: &'static [usize],
    scratch: usize,
    large: bool,
    /// The most threads it may use.
    most_threads: usize,
    function: &'static str,
}

/// A seed of each call's own: the caller's, or one that torch's default generator draws.
#[derive(Clone, Copy)]
struct Seed {
    /// The place of the argument.
    at: usize,
    /// The place of the parameter.
    to: usize,
}

/// What a kernel writes to.
enum Target {
    /// A tensor to be made.
    Fresh(Fresh),
    /// An argument, by its place and dtype.
    Updated(usize, DType),
}

/// A tensor to be made.
struct Fresh {
    dtype: DType,
    number: i32,
    shape: Extents,
    strides: Extents,
}

impl Fresh {
    fn new(spec: &OutputSpec) -> Option<Fresh> {
        let (number, strides) = (allocator::number(spec.dtype)?, row_major(&spec.shape));
        Some(Fresh { dtype: spec.dtype, number, shape: spec.shape.clone(), strides })
    }
}

impl NativeCall {
    /// Settles a call; `None` where it cannot go straight. `draws`: whether it draws random numbers; `scratch`: bytes of scratch memory the kernel takes; `moved`: bytes it
    /// reads and writes.
    pub fn new(
        front: &'static Front,
        step: &Step,
        (query, draws): (&Query, bool),
        (params, expected): (&[layerzero::model::ParamValue], &[OutputSpec]),
        (scratch, moved, most_threads): (i64, f64, usize),
    ) -> Option<NativeCall> {
        let op = layerzero::model::Catalog::get().op(query.op());
        let argument = |index: usize| {
            let dtype = query.tensor(index).dtype()?;
            let is_it = |&at: &usize| op.input_index(front.signature.arguments[at].name) == Some(index);
            front.tensors.iter().copied().find(is_it).map(|at| (at, dtype))
        };
        let is_updated = |at: usize| front.updated.contains(&at);
        let inputs: Vec<Option<(usize, DType)>> =
            (0..op.schema().inputs.len()).map(|index| argument(index).filter(|(at, _)| !is_updated(*at))).collect();
        if inputs.iter().flatten().any(|(_, dtype)| dtype.is_sub_byte()) {
            return None;
        }
        // Uniform numbers that are given are all the random numbers there are.
        let given = |name: &str| op.input_index(name).is_some_and(|index| inputs[index].is_some());
        let seed = op.param_index("seed").filter(|_| draws && !given("uniform")).and_then(|to| {
            let at = front.signature.arguments.iter().position(|a| a.name == "seed")?;
            Some(Seed { at, to })
        });
        if draws && seed.is_none() && !given("uniform") {
            return None;
        }
        let mut fresh = expected.iter();
        let target = |output: &Output| match output {
            Output::Fresh { .. } => Some(Target::Fresh(Fresh::new(fresh.next()?)?)),
            Output::Updates(name) => {
                let (at, dtype) = op.input_index(name).and_then(argument)?;
                (is_updated(at) && !dtype.is_sub_byte()).then_some(Target::Updated(at, dtype))
            }
        };
        let outputs = op.schema().outputs.iter().map(target).collect::<Option<Vec<_>>>()?;
        Some(NativeCall {
            executable: step.executable.clone(),
            query: *query,
            params: params.iter().map(|&value| value.into()).collect(),
            seed,
            inputs,
            large: moved >= LARGE,
            most_threads,
            outputs,
            updated: &front.updated,
            scratch: usize::try_from(scratch).unwrap_or(0),
            function: front.name(),
        })
    }

    /// Makes the call: a new reference, or null with an exception set. `None` when it has to be made the other way.
    ///
    /// # Safety
    /// The slots hold what the route was found by, and this thread holds the interpreter. A tensor that is updated shares no
    /// memory with another ([`crate::written::apart`]).
    pub unsafe fn call(&self, slots: &Slots) -> Option<*mut PyObject> {
        let torch = Torch::known()?;
        let (fields, allocator) = (torch.fields.as_ref()?, torch.allocator?);
        if torch.is_recording() {
            return None;
        }
        let mut params: SmallVec<[Param; 8]> = SmallVec::from_slice(&self.params);
        if let Some(Seed { at, to }) = self.seed {
            // SAFETY: the slot holds a live object or null, and this thread holds the interpreter.
            params[to] = match unsafe { seed_of(slots[at]) }? {
                Ok(seed) => Param::Int(seed),
                Err(raised) => {
                    Python::attach(|py| raised.restore(py));
                    return Some(std::ptr::null_mut());
                }
            };
        }
        let mut inputs: SmallVec<[TensorRef<'_>; 8]> = SmallVec::new();
        for input in &self.inputs {
            inputs.push(match *input {
                None => TensorRef::ABSENT,
                Some((at, dtype)) => {
                    // SAFETY: a live, plain tensor, as when the route was found. It is held by the caller for the whole call,
                    // and nobody resizes it meanwhile, or they would race with any kernel of torch's.
                    let seen = unsafe { fields.read(slots[at])? };
                    // SAFETY: torch says that these elements are there.
                    unsafe { TensorRef::new(dtype, seen.sizes, seen.strides, seen.start as *const u8) }
                }
            });
        }
        let mut made: SmallVec<[Owned; 4]> = SmallVec::new();
        let mut outputs: SmallVec<[TensorMut<'_>; 4]> = SmallVec::new();
        for target in &self.outputs {
            outputs.push(match target {
                Target::Fresh(fresh) => {
                    // SAFETY: sizes of a result the engine has checked, and their strides.
                    let (object, address) = unsafe { allocator.empty(fresh.number, &fresh.shape, &fresh.strides)? };
                    made.push(Owned(object));
                    // SAFETY: new memory, which nobody else knows of.
                    unsafe { TensorMut::new(fresh.dtype, &fresh.shape, &fresh.strides, address) }
                }
                Target::Updated(at, dtype) => {
                    // SAFETY: a live, plain tensor, held by the caller, whose memory no other tensor of the call shares.
                    unsafe {
                        let seen = fields.read(slots[*at])?;
                        TensorMut::new(*dtype, seen.sizes, seen.strides, seen.start as *mut u8)
                    }
                }
            });
        }
        let large = self.large;
        let mut arena = if self.scratch == 0 { Arena::default() } else { SCRATCH.take() };
        let result = match arena.reserve(self.scratch) {
            Err(short) => Err(KernelError::OutOfMemory(format!("{} bytes of scratch memory", short.wanted))),
            Ok(()) => {
                let mut workspace = arena.lend();
                let threads = match large {
                    true => native_threads(self.most_threads.min(torch.threads().into())),
                    false => Threads::ONE,
                };
                let args = Args::new(&inputs, &mut outputs, &params, self.query.dims(), &mut workspace);
                let mut args = KernelArgs { query: &self.query, args: args.with_threads(threads) };
                match large {
                    false => self.executable.call(&mut args),
                    // SAFETY: this thread holds the interpreter, and takes it back before anything of Python's is touched.
                    true => unsafe {
                        let state = ffi::PyEval_SaveThread();
                        let result = self.executable.call(&mut args);
                        ffi::PyEval_RestoreThread(state);
                        result
                    },
                }
            }
        };
        if self.scratch != 0 {
            SCRATCH.set(arena);
        }
        Some(match result {
            Ok(()) if made.is_empty() => Python::attach(|py| {
                let object = |&at: &usize| {
                    // SAFETY: the slot holds a live object.
                    unsafe { Bound::from_borrowed_ptr(py, slots[at]) }
                };
                match written::count(py, self.updated.iter().map(object)) {
                    Ok(()) => py.None().into_ptr(),
                    Err(raised) => {
                        raised.restore(py);
                        std::ptr::null_mut()
                    }
                }
            }),
            Ok(()) => handed_over(made),
            Err(error) => Python::attach(|py| {
                drop(made);
                kernel_error(py, self.function, &error).restore(py);
                std::ptr::null_mut()
            }),
        })
    }
}

/// The seed of a call: the caller's, or the next of torch's default generator. `None` for what is no integer of 64 bits, which is
/// refused, or converted, elsewhere.
///
/// # Safety
/// A live object or null, and this thread holds the interpreter.
unsafe fn seed_of(given: *mut PyObject) -> Option<PyResult<i64>> {
    // SAFETY: each reading follows its check; an integer that does not fit sets an exception, cleared here.
    unsafe {
        if given.is_null() || given == ffi::Py_None() {
            return Some(Python::attach(|py| crate::host::draw_seed(py, None)?.extract()));
        }
        if ffi::PyLong_CheckExact(given) == 0 {
            return None;
        }
        let seed = ffi::PyLong_AsLongLong(given);
        if seed == -1 && !ffi::PyErr_Occurred().is_null() {
            ffi::PyErr_Clear();
            return None;
        }
        Some(Ok(seed))
    }
}

/// A reference this thread owns.
struct Owned(*mut PyObject);

impl Owned {
    fn into_ptr(self) -> *mut PyObject {
        let object = self.0;
        std::mem::forget(self);
        object
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: owned, and this thread holds the interpreter.
        unsafe { ffi::Py_DECREF(self.0) };
    }
}

/// The one result, or a tuple of them: a new reference, or null with an exception set.
fn handed_over(mut made: SmallVec<[Owned; 4]>) -> *mut PyObject {
    if made.len() == 1 {
        return made.pop().map_or(std::ptr::null_mut(), Owned::into_ptr);
    }
    // SAFETY: a new tuple takes over a reference to each.
    unsafe {
        let tuple = ffi::PyTuple_New(made.len() as ffi::Py_ssize_t);
        if !tuple.is_null() {
            for (i, object) in made.into_iter().enumerate() {
                ffi::PyTuple_SetItem(tuple, i as ffi::Py_ssize_t, object.into_ptr());
            }
        }
        tuple
    }
}
