//! Kernels that are Python functions: where their arguments come from, and calls whose arguments are settled.

use std::ptr;
use std::sync::{Arc, OnceLock};

use layerzero::model::{ArgumentKind, Layout, Op, Special};
use pyo3::exceptions::PyValueError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::engine::engine;
use crate::error;
use crate::front::{Front, MAX_ARGUMENTS, Slots};
use crate::importing::Library;
use crate::torch::Torch;

/// A Python function that runs a kernel, and the names of the arguments it takes: at most [`MAX_ARGUMENTS`].
pub struct PyKernel {
    /// The function.
    pub callable: Py<PyAny>,
    /// Its parameters, by position.
    pub parameters: Vec<String>,
    /// What says which one call the function comes down to, for arguments like those given; see `layerzero.direct`.
    pub direct: Option<Py<PyAny>>,
    /// Whether it draws from torch's generator where it is given no seed; see `layerzero.kernels.draws`.
    pub draws_itself: bool,
    /// What has to be imported before it runs.
    pub library: Option<Arc<Library>>,
}

/// Where an argument of a kernel's function comes from.
#[derive(Clone, Copy)]
enum Source {
    /// What the caller gave at that place, else the default.
    Slot(usize, *mut PyObject),
    /// Always this object, which is never freed.
    Fixed(*mut PyObject),
    /// A side of the window at that place.
    Window(usize, Side),
    /// The seed at that place, which may have to be drawn.
    Seed(usize),
}

#[derive(Clone, Copy)]
enum Side {
    Left,
    Right,
}

// SAFETY: the pointers are to objects that are never freed (defaults, layout names); they are only used while holding
// the interpreter.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

/// Objects every route may point to.
struct Constants {
    layouts: Vec<Py<PyString>>,
    none: Py<PyAny>,
    no_window: Py<PyAny>,
}

static CONSTANTS: OnceLock<Constants> = OnceLock::new();

fn constants(py: Python<'_>) -> &'static Constants {
    CONSTANTS.get_or_init(|| Constants {
        layouts: Layout::ALL.iter().map(|l| PyString::intern(py, l.name()).unbind()).collect(),
        none: py.None(),
        no_window: (-1i64).into_pyobject(py).map_or_else(|_| py.None(), |n| n.into_any().unbind()),
    })
}

/// A Python kernel with its arguments mapped.
pub struct PyCall {
    callable: Py<PyAny>,
    sources: Vec<Source>,
    /// The call with all but its tensors settled, for just these sizes and scalars.
    direct: Option<Direct>,
    /// What says which one call of its library the kernel comes down to.
    planner: Option<Py<PyAny>>,
    /// Where the kernel is told the layout, if it wants to know.
    layout_at: Option<usize>,
    /// Whether it must be given a seed.
    wants_seed: bool,
    /// What has to be imported before it runs.
    library: Option<Arc<Library>>,
}

/// A call whose arguments are settled but for its tensors: those come from their places. In one piece, since a kernel
/// has taken the caches when the next call comes, and then every line counts.
struct Direct {
    callable: *mut PyObject,
    /// Names of the last arguments, or null where none goes by name.
    names: *mut PyObject,
    /// How many go by position.
    positional: u32,
    /// How many there are.
    count: u32,
    /// Each a place (four times its number, plus one), a place whose tensor is turned (plus three), or the address of an
    /// object, which is even.
    sources: [usize; MAX_ARGUMENTS],
    /// How tensors are turned; none where no argument is.
    turn: Option<Turn>,
    /// Where a seed comes from.
    seed: Option<Seed>,
    /// The objects pointed to.
    _held: Vec<Py<PyAny>>,
}

/// How tensors are turned, which is to exchange their second and third dimension.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// By a view that autograd does not see.
    Unseen,
    /// By torch's `transpose`.
    Recorded,
}

/// A seed among the arguments of a settled call.
#[derive(Clone, Copy)]
struct Seed {
    /// Which argument it is.
    to: usize,
    /// The slot it comes from.
    at: usize,
    /// Whether a call without one has to go elsewhere, where one is drawn.
    is_needed: bool,
}

// SAFETY: what it points to is held by it, and used only while holding the interpreter.
unsafe impl Send for Direct {}
// SAFETY: as above.
unsafe impl Sync for Direct {}

/// A call to be made: function and arguments, all borrowed from the route and the caller.
pub struct Prepared {
    callable: *mut PyObject,
    /// The first is left free for the callee, as vectorcall allows.
    arguments: [*mut PyObject; MAX_ARGUMENTS + 1],
    /// How many go by position.
    count: usize,
    /// The names of those that follow, or null.
    names: *mut PyObject,
    /// Arguments that were made for this call, a bit each; the result is turned too where there are any.
    made: u32,
    turn: Option<Turn>,
}

impl Prepared {
    /// The arguments by position.
    fn given(&self) -> &[*mut PyObject] {
        &self.arguments[1..=self.count]
    }

    /// Makes the call; null with an exception set when it failed.
    ///
    /// # Safety
    /// The route is held and the arguments are alive until this returns, and this thread holds the interpreter.
    #[inline]
    pub unsafe fn call(mut self) -> *mut PyObject {
        // SAFETY: `count` arguments, and one for each name, follow the free place.
        unsafe {
            let flags = self.count | MAY_USE_FREE_PLACE;
            let first = self.arguments.as_mut_ptr().add(1);
            let result = vectorcall(self.callable, first, flags, self.names);
            match self.turn {
                None => result,
                Some(how) => Prepared::turned_back(result, how),
            }
        }
    }

    /// The result of a call on turned tensors, turned back.
    ///
    /// # Safety
    /// As [`Prepared::call`]; the result is a new reference or null.
    unsafe fn turned_back(result: *mut PyObject, how: Turn) -> *mut PyObject {
        // SAFETY: the result, which its turned view replaces.
        unsafe {
            if result.is_null() {
                return result;
            }
            let turned = turned(result, how);
            ffi::Py_DECREF(result);
            turned
        }
    }
}

impl Drop for Prepared {
    #[inline]
    fn drop(&mut self) {
        if self.made == 0 {
            return;
        }
        for at in (0..MAX_ARGUMENTS).filter(|at| self.made >> at & 1 == 1) {
            // SAFETY: references that were made for this call, which is over; this thread holds the interpreter.
            unsafe { ffi::Py_DECREF(self.arguments[at + 1]) };
        }
    }
}

/// A tensor with its second and third dimension exchanged: a new reference, or null with an exception set.
///
/// # Safety
/// A live tensor of four dimensions, and this thread holds the interpreter.
#[inline]
unsafe fn turned(tensor: *mut PyObject, how: Turn) -> *mut PyObject {
    // SAFETY: the contract above.
    unsafe {
        if how == Turn::Unseen
            && let Some(torch) = Torch::known()
            && let Some(allocator) = &torch.allocator
            && let Some(seen) = torch.fields.as_ref().and_then(|fields| fields.read(tensor))
            && let (Ok(sizes), Ok(strides)) = (seen.sizes.try_into(), seen.strides.try_into())
            && let Some(view) = allocator.turned(tensor, sizes, strides)
        {
            return view;
        }
        transposed(tensor)
    }
}

/// The same by torch's own function.
///
/// # Safety
/// As [`turned`].
#[cold]
unsafe fn transposed(tensor: *mut PyObject) -> *mut PyObject {
    Python::attach(|py| {
        // SAFETY: a live object.
        let tensor = unsafe { Bound::from_borrowed_ptr(py, tensor) };
        match tensor.call_method1(pyo3::intern!(py, "transpose"), (1, 2)) {
            Ok(turned) => turned.into_ptr(),
            Err(error) => {
                error.restore(py);
                ptr::null_mut()
            }
        }
    })
}

/// `PY_VECTORCALL_ARGUMENTS_OFFSET`.
const MAY_USE_FREE_PLACE: usize = 1 << (usize::BITS - 1);

unsafe extern "C" {
    /// Part of the stable ABI since 3.12, and exported by 3.11 all the same.
    #[link_name = "PyObject_Vectorcall"]
    fn vectorcall(
        callable: *mut PyObject,
        args: *const *mut PyObject,
        flags: usize,
        names: *mut PyObject,
    ) -> *mut PyObject;
}

impl PyCall {
    pub fn new(
        py: Python<'_>,
        front: &'static Front,
        op: &'static Op,
        layout: Option<Layout>,
        kernel: &PyKernel,
    ) -> PyCall {
        let constants = constants(py);
        let arguments = &front.signature.arguments;
        let source = |name: &String| {
            if name == "layout" {
                let known = layout.map(|l| constants.layouts[l as usize].as_ptr());
                return Source::Fixed(known.unwrap_or_else(|| constants.none.as_ptr()));
            }
            let window = |side| {
                let at = arguments.iter().position(|a| matches!(a.kind, ArgumentKind::Special(Special::Window)));
                at.map_or(Source::Fixed(constants.no_window.as_ptr()), |at| Source::Window(at, side))
            };
            match name.as_str() {
                "window_left" => return window(Side::Left),
                "window_right" => return window(Side::Right),
                _ => {}
            }
            // By any name of the schema's; the function may use another of them.
            let (input, param) = (op.input_index(name), op.param_index(name));
            let fits = |a: &&layerzero::model::Argument| match a.kind {
                ArgumentKind::Input(_) => input.is_some() && op.input_index(a.name) == input,
                ArgumentKind::Param(_) => param.is_some() && op.param_index(a.name) == param,
                ArgumentKind::Special(_) => false,
            };
            let at = arguments.iter().position(|a| fits(&a)).or_else(|| arguments.iter().position(|a| a.name == name));
            match at {
                Some(at) if name == "seed" => Source::Seed(at),
                Some(at) => Source::Slot(at, front.defaults[at].as_ptr()),
                None => Source::Fixed(constants.none.as_ptr()),
            }
        };
        let sources: Vec<Source> = kernel.parameters.iter().map(source).collect();
        let wants_seed = !kernel.draws_itself && sources.iter().any(|s| matches!(s, Source::Seed(_)));
        let layout_at = kernel.parameters.iter().position(|name| name == "layout");
        let planner = kernel.direct.as_ref().map(|planner| planner.clone_ref(py));
        let callable = kernel.callable.clone_ref(py);
        PyCall { callable, sources, direct: None, planner, layout_at, wants_seed, library: kernel.library.clone() }
    }

    /// Arguments out of the slots. A seed that has to be drawn must be in its slot by now.
    pub fn prepare(&self, slots: &Slots) -> Prepared {
        // SAFETY: none is a static object.
        let none = unsafe { ffi::Py_None() };
        let or = |given: *mut PyObject, otherwise| if given.is_null() || given == none { otherwise } else { given };
        let mut arguments = [ptr::null_mut(); MAX_ARGUMENTS + 1];
        for (place, source) in arguments[1..].iter_mut().zip(&self.sources) {
            *place = match *source {
                Source::Slot(at, otherwise) => or(slots[at], otherwise),
                Source::Fixed(object) => object,
                Source::Seed(at) => or(slots[at], none),
                Source::Window(at, side) => side.of(or(slots[at], ptr::null_mut())),
            };
        }
        let names = ptr::null_mut();
        let callable = self.callable.as_ptr();
        Prepared { callable, arguments, count: self.sources.len(), names, made: 0, turn: None }
    }

    /// Imports the kernel's library, which must be done before it runs.
    pub fn import(&self, py: Python<'_>) -> PyResult<()> {
        match &self.library {
            // Calls that are remembered do not go straight yet; they are decided anew.
            Some(library) if library.import(py)? => engine().update(|_| {}).map_err(|e| error::engine(py, &e)),
            _ => Ok(()),
        }
    }

    /// Settles everything but the tensors, for arguments like these: the kernel's own call, or the one it says it comes
    /// down to. An answer that makes no sense is not used. A seed comes from its slot in each call, if it is the kernel's own
    /// call. Calls of a library that is not imported do not go straight.
    pub fn shorten(&mut self, py: Python<'_>, slots: &Slots, draws: bool, requires_grad: bool) {
        if self.library.as_ref().is_some_and(|library| !library.is_imported()) {
            return;
        }
        let place = |source: &Source| if let Source::Slot(at, _) = *source { Some(at) } else { None };
        // Tensors are told apart by identity: one that is given twice is planned with a stand-in.
        let mut tensors: Vec<(usize, Bound<'_, PyAny>)> = Vec::new();
        let mut planned = *slots;
        for at in self.sources.iter().filter_map(place) {
            // SAFETY: slots hold live objects or null.
            let given = unsafe { Bound::from_borrowed_ptr_or_opt(py, slots[at]) };
            let tensor = |o: &Bound<'_, PyAny>| Torch::known().is_some_and(|torch| torch.is_tensor(o));
            let Some(object) = given.filter(tensor) else { continue };
            let twice = tensors.iter().any(|(_, other)| other.is(&object));
            let Ok(object) = (if twice { object.call_method0("detach") } else { Ok(object) }) else { return };
            planned[at] = object.as_ptr();
            tensors.push((at, object));
        }
        let own = self.prepare(&planned);
        // SAFETY: all are alive.
        let own_arguments: Vec<Bound<'_, PyAny>> =
            own.given().iter().map(|&argument| unsafe { Bound::from_borrowed_ptr(py, argument) }).collect();
        let settled = Direct::new(self.callable.bind(py), own_arguments.clone(), None, &tensors);
        let is_needed = draws && self.wants_seed;
        let seed = |(to, source): (usize, &Source)| match *source {
            Source::Seed(at) => Some(Seed { to, at, is_needed }),
            _ => None,
        };
        let seed = self.sources.iter().enumerate().find_map(seed);
        self.direct = settled.ok().map(|direct| Direct { seed, ..direct });
        // A plan would settle the seed as well.
        if let Some(planner) = self.planner.as_ref().filter(|_| !draws || seed.is_none()) {
            let answer = PyTuple::new(py, own_arguments).and_then(|arguments| planner.bind(py).call1(arguments));
            match answer.and_then(|answer| Direct::read(&answer, &tensors)) {
                // What autograd is to see goes by its own functions.
                Ok(Some(direct)) => {
                    let turn = direct.turn.map(|_| if requires_grad { Turn::Recorded } else { Turn::Unseen });
                    self.direct = Some(Direct { turn, ..direct });
                }
                Ok(None) => {}
                Err(error) => error.write_unraisable(py, Some(planner.bind(py))),
            }
        }
    }

    /// The settled call, with the tensors at hand.
    #[inline]
    pub fn prepare_settled(&self, slots: &Slots) -> Option<Prepared> {
        self.direct.as_ref().and_then(|direct| direct.prepare(slots))
    }

    /// Whether it is to be told a seed.
    pub fn wants_seed(&self) -> bool {
        self.wants_seed
    }

    /// Arguments out of the slots, for tensors that were turned into another layout.
    pub fn prepare_as(&self, py: Python<'_>, slots: &Slots, layout: Option<Layout>) -> Prepared {
        let mut prepared = self.prepare(slots);
        if let (Some(at), Some(layout)) = (self.layout_at, layout) {
            prepared.arguments[at + 1] = constants(py).layouts[layout as usize].as_ptr();
        }
        prepared
    }
}

impl Direct {
    /// Out of what the kernel answered: `None`, `(function, arguments)` or `(function, arguments, keywords)`.
    fn read(answer: &Bound<'_, PyAny>, tensors: &[(usize, Bound<'_, PyAny>)]) -> PyResult<Option<Direct>> {
        if answer.is_none() {
            return Ok(None);
        }
        let (callable, args, keywords): (Bound<'_, PyAny>, Bound<'_, PyTuple>, Option<Bound<'_, PyDict>>) =
            match answer.len()? {
                2 => {
                    let (callable, args) = answer.extract()?;
                    (callable, args, None)
                }
                _ => answer.extract()?,
            };
        let keywords = keywords.filter(|keywords| !keywords.is_empty());
        Direct::new(&callable, args.iter().collect(), keywords, tensors).map(Some)
    }

    fn new<'py>(
        callable: &Bound<'py, PyAny>,
        mut arguments: Vec<Bound<'py, PyAny>>,
        keywords: Option<Bound<'py, PyDict>>,
        tensors: &[(usize, Bound<'py, PyAny>)],
    ) -> PyResult<Direct> {
        let positional = arguments.len() as u32;
        let mut held = vec![callable.clone().unbind()];
        let mut names = ptr::null_mut();
        if let Some(keywords) = keywords {
            let tuple = PyTuple::new(callable.py(), keywords.keys())?.into_any().unbind();
            names = tuple.as_ptr();
            held.push(tuple);
            arguments.extend(keywords.values());
        }
        if arguments.len() > MAX_ARGUMENTS {
            return Err(PyValueError::new_err(format!("{} arguments, at most {MAX_ARGUMENTS}", arguments.len())));
        }
        let turned = callable.py().import("layerzero.kernels")?.getattr("Turned")?;
        let (mut sources, mut turn) = ([0; MAX_ARGUMENTS], None);
        let count = arguments.len() as u32;
        for (source, object) in sources.iter_mut().zip(arguments) {
            let is_turned = object.is_instance(&turned)?;
            let object = if is_turned { object.getattr("tensor")? } else { object };
            *source = match tensors.iter().find(|(_, tensor)| tensor.is(&object)) {
                // It was given, and is in every call of the same words.
                Some((at, _)) if is_turned => {
                    turn = Some(Turn::Recorded);
                    at * 4 + 3
                }
                Some((at, _)) => at * 4 + 1,
                None if is_turned => {
                    return Err(PyValueError::new_err("only tensors that the kernel was given can be turned"));
                }
                None => {
                    held.push(object.unbind());
                    held[held.len() - 1].as_ptr() as usize
                }
            };
        }
        let (callable, seed) = (callable.as_ptr(), None);
        Ok(Direct { callable, names, positional, count, sources, turn, seed, _held: held })
    }

    /// The call, with the tensors at hand. `None` when it needs a seed and has none.
    #[inline]
    fn prepare(&self, slots: &Slots) -> Option<Prepared> {
        let mut arguments = [ptr::null_mut(); MAX_ARGUMENTS + 1];
        for (place, &source) in arguments[1..].iter_mut().zip(&self.sources[..self.count as usize]) {
            *place = if source & 1 == 1 { slots[source >> 2] } else { source as *mut PyObject };
        }
        if let Some(Seed { to, at, is_needed }) = self.seed {
            // SAFETY: none is a static object.
            let none = unsafe { ffi::Py_None() };
            let is_given = !slots[at].is_null() && slots[at] != none;
            // SAFETY: a live object. What is no integer is refused, or converted, elsewhere.
            if is_needed && !is_given || is_given && unsafe { ffi::PyLong_CheckExact(slots[at]) } == 0 {
                return None;
            }
            arguments[to + 1] = if is_given { slots[at] } else { none };
        }
        let (callable, count, names) = (self.callable, self.positional as usize, self.names);
        let prepared = Prepared { callable, arguments, count, names, made: 0, turn: None };
        match self.turn {
            None => Some(prepared),
            Some(how) => self.turn_all(prepared, how),
        }
    }

    /// Turns the tensors of a call that are to be turned. `None` where one cannot be.
    fn turn_all(&self, mut prepared: Prepared, how: Turn) -> Option<Prepared> {
        prepared.turn = Some(how);
        for at in (0..self.count as usize).filter(|&at| self.sources[at] & 3 == 3) {
            // SAFETY: a tensor that was given to the call, of as many dimensions as when it was planned; this thread holds the
            // interpreter.
            let made = unsafe { turned(prepared.arguments[at + 1], how) };
            if made.is_null() {
                // SAFETY: clears why it could not be turned; the kernel's own call will say so.
                unsafe { ffi::PyErr_Clear() };
                return None;
            }
            prepared.arguments[at + 1] = made;
            prepared.made |= 1 << at;
        }
        Some(prepared)
    }
}

impl Side {
    /// This side of a window given as an integer (earlier keys only) or a pair; null for no window.
    fn of(self, window: *mut PyObject) -> *mut PyObject {
        let none = CONSTANTS.get().map_or(ptr::null_mut(), |c| c.no_window.as_ptr());
        // SAFETY: a live object or null; items of a tuple are borrowed from it. The slow path has checked that a
        // tuple is a pair, and lists become tuples there.
        unsafe {
            if window.is_null() {
                return none;
            }
            match (ffi::PyTuple_Check(window) != 0, self) {
                (true, Side::Left) => ffi::PyTuple_GetItem(window, 0),
                (true, Side::Right) => ffi::PyTuple_GetItem(window, 1),
                (false, Side::Left) => window,
                (false, Side::Right) => none,
            }
        }
    }
}
