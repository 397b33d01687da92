//! Routes: what was decided for a call, prepared so that it can be carried out at once.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use layerzero::model::schema::OpKind;
use layerzero::model::{ArgumentKind, KernelDescriptor, Layout, Op, ParamValue, Query, Special};
use layerzero::selection::Transforms;
use layerzero::{Executable, Step};
use pyo3::exceptions::PyValueError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::front::{Front, MAX_ARGUMENTS, Slots};
use crate::torch::Torch;

/// A Python function that runs a kernel, and the names of the arguments it takes: at most [`MAX_ARGUMENTS`].
pub struct PyKernel {
    /// The function.
    pub callable: Py<PyAny>,
    /// Its parameters, by position.
    pub parameters: Vec<String>,
    /// What says which one call the function comes down to, for arguments like those given; see `layerzero.direct`.
    pub direct: Option<Py<PyAny>>,
}

/// Where an argument of a kernel's function comes from.
#[derive(Clone, Copy)]
enum Source {
    /// What the caller gave at that place, else the default.
    Slot(usize, *mut PyObject),
    /// Always this object, which is never freed, or held by the call.
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

// SAFETY: the pointers are to objects that are never freed (defaults, layout names) or that the call they belong to holds;
// they are only used while holding the interpreter.
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
    /// The one call it comes down to, for just these sizes and scalars.
    direct: Option<Direct>,
    /// What says so.
    planner: Option<Py<PyAny>>,
    /// Where the kernel is told the layout, if it wants to know.
    layout_at: Option<usize>,
    wants_seed: bool,
}

/// A call that needs no adapter: tensors from their places, everything else as it was planned.
struct Direct {
    callable: Py<PyAny>,
    sources: Vec<Source>,
    /// Names of the last arguments, where some go by name.
    names: Option<Py<PyTuple>>,
    /// The objects the sources point to.
    _held: Vec<Py<PyAny>>,
}

/// How a step is carried out.
pub enum Runner {
    /// By a Python function.
    Python(PyCall),
    /// On host memory.
    Host(Executable),
    /// Not at all: it is only described.
    Nothing,
}

/// A kernel to try.
pub struct RouteStep {
    /// The kernel.
    pub kernel: Arc<KernelDescriptor>,
    /// What must be done to the arguments first.
    pub transforms: Transforms,
    /// How it is carried out.
    pub runner: Runner,
}

/// What was decided for a call.
pub struct Decided {
    /// The operation it is.
    pub op: &'static Op,
    /// What selection looked at.
    pub query: Query,
    /// The layout the call was recognised as.
    pub layout: Option<Layout>,
    /// The kernels to try, in order.
    pub steps: Vec<RouteStep>,
    /// Whether random numbers are drawn.
    pub draws: bool,
    /// Cleared when its first kernel failed: the next calls look at what it gives.
    straight: AtomicBool,
}

/// A shared [`Decided`].
pub struct Route(Arc<Decided>);

impl std::ops::Deref for Route {
    type Target = Decided;
    fn deref(&self) -> &Decided {
        &self.0
    }
}

impl Route {
    /// The same route.
    pub fn share(&self) -> Route {
        Route(self.0.clone())
    }

    /// Prepares what the engine decided.
    pub fn new(
        py: Python<'_>,
        front: &'static Front,
        op: &'static Op,
        query: Query,
        layout: Option<Layout>,
        steps: Vec<Step>,
    ) -> Route {
        let draws = draws(op, &query);
        let prepare = |step: Step| {
            let runner = match &step.executable {
                Executable::Foreign(any) => match any.downcast_ref::<PyKernel>() {
                    Some(kernel) => Runner::Python(PyCall::new(py, front, op, layout, kernel)),
                    None => Runner::Nothing,
                },
                Executable::Described => Runner::Nothing,
                host => Runner::Host(host.clone()),
            };
            RouteStep { kernel: step.kernel, transforms: step.transforms, runner }
        };
        let steps: Vec<RouteStep> = steps.into_iter().map(prepare).collect();
        // Results that need more than to be handed back, and arguments that need more than to be handed over.
        let plain = op.id() != "quantize";
        let straight = plain
            && steps.first().is_some_and(|step| {
                step.transforms.is_empty()
                    && matches!(&step.runner, Runner::Python(call) if !(draws && call.wants_seed))
            });
        Route(Arc::new(Decided { op, query, layout, steps, draws, straight: AtomicBool::new(straight) }))
    }

    /// No longer takes the straight path: its first kernel failed.
    pub fn doubt(&self) {
        self.straight.store(false, Ordering::Relaxed);
    }

    /// The first step as a call that can be made at once, if nothing else is to be done. The caller holds the route
    /// until the call is over.
    #[inline]
    pub fn straight(&self, slots: &Slots) -> Option<Prepared> {
        match self.steps.first() {
            Some(RouteStep { runner: Runner::Python(call), .. }) if self.straight.load(Ordering::Relaxed) => {
                Some(call.prepare_straight(slots))
            }
            _ => None,
        }
    }

    /// Finds out which one call each step comes down to for arguments like these.
    pub fn shorten(&mut self, py: Python<'_>, slots: &Slots) {
        let Some(decided) = Arc::get_mut(&mut self.0) else { return };
        for step in decided.steps.iter_mut().filter(|step| step.transforms.is_empty()) {
            if let Runner::Python(call) = &mut step.runner {
                call.shorten(py, slots);
            }
        }
    }
}

/// Whether a call draws random numbers: sampling does, attention when it drops weights.
fn draws(op: &Op, query: &Query) -> bool {
    let dropout = op.param_index("dropout_p").map(|i| query.param(i, &op.schema().params[i]));
    op.schema().kind == OpKind::Sampling || dropout.and_then(ParamValue::as_float).is_some_and(|p| p != 0.0)
}

/// A call to be made: function and arguments, all borrowed from the route and the caller.
pub struct Prepared {
    callable: *mut PyObject,
    /// The first is left free for the callee, as vectorcall allows.
    arguments: [*mut PyObject; MAX_ARGUMENTS + 1],
    /// How many go by position.
    count: usize,
    /// The names of those that follow, or null.
    names: *mut PyObject,
}

impl Prepared {
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
            vectorcall(self.callable, first, flags, self.names)
        }
    }
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
    fn new(
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
        let wants_seed = sources.iter().any(|s| matches!(s, Source::Seed(_)));
        let layout_at = kernel.parameters.iter().position(|name| name == "layout");
        let planner = kernel.direct.as_ref().map(|planner| planner.clone_ref(py));
        let callable = kernel.callable.clone_ref(py);
        PyCall { callable, sources, direct: None, planner, layout_at, wants_seed }
    }

    /// Arguments out of the slots. A seed that has to be drawn must be in its slot by now.
    pub fn prepare(&self, slots: &Slots) -> Prepared {
        prepare(&self.callable, &self.sources, None, slots)
    }

    /// The shortest way to the same.
    #[inline]
    fn prepare_straight(&self, slots: &Slots) -> Prepared {
        match &self.direct {
            Some(Direct { callable, sources, names, .. }) => prepare(callable, sources, names.as_ref(), slots),
            None => prepare(&self.callable, &self.sources, None, slots),
        }
    }

    /// Asks the kernel which one call it comes down to for arguments like these. A kernel that does not know, or knows it
    /// wrong, is called as it is.
    fn shorten(&mut self, py: Python<'_>, slots: &Slots) {
        let Some(planner) = &self.planner else { return };
        let place = |source: &Source| if let Source::Slot(at, _) = *source { Some(at) } else { None };
        // Tensors are told apart by identity: one that is given twice is planned with a stand-in.
        let mut tensors: Vec<(usize, Bound<'_, PyAny>)> = Vec::new();
        let mut planned = *slots;
        for at in self.sources.iter().filter_map(place) {
            // SAFETY: slots hold live objects or null.
            let given = unsafe { Bound::from_borrowed_ptr_or_opt(py, slots[at]) };
            let Some(object) = given.filter(|o| Torch::known().is_some_and(|torch| torch.is_tensor(o))) else {
                continue;
            };
            let twice = tensors.iter().any(|(_, other)| other.is(&object));
            let Ok(object) = (if twice { object.call_method0("detach") } else { Ok(object) }) else { return };
            planned[at] = object.as_ptr();
            tensors.push((at, object));
        }
        let arguments = prepare(planner, &self.sources, None, &planned);
        // SAFETY: the planner and the arguments are held here; the answer is a new reference or an exception.
        let answer = unsafe { Bound::from_owned_ptr_or_err(py, arguments.call()) };
        let direct =
            answer.and_then(|plan| if plan.is_none() { Ok(None) } else { Direct::new(&plan, &tensors).map(Some) });
        match direct {
            Ok(direct) => self.direct = direct,
            Err(error) => error.write_unraisable(py, Some(planner.bind(py))),
        }
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
    /// Out of `(function, arguments)` or `(function, arguments, keywords)`.
    fn new(plan: &Bound<'_, PyAny>, tensors: &[(usize, Bound<'_, PyAny>)]) -> PyResult<Direct> {
        let py = plan.py();
        let (callable, args, keywords): (Bound<'_, PyAny>, Bound<'_, PyTuple>, Option<Bound<'_, PyDict>>) =
            match plan.len()? {
                2 => {
                    let (callable, args) = plan.extract()?;
                    (callable, args, None)
                }
                _ => plan.extract()?,
            };
        let keywords = keywords.unwrap_or_else(|| PyDict::new(py));
        let names = (!keywords.is_empty()).then(|| PyTuple::new(py, keywords.keys())).transpose()?;
        let mut held = Vec::new();
        let source = |object: Bound<'_, PyAny>| match tensors.iter().find(|(_, tensor)| tensor.is(&object)) {
            // It was given, and is in every call of the same words.
            Some((at, _)) => Source::Slot(*at, ptr::null_mut()),
            None => {
                held.push(object.unbind());
                Source::Fixed(held[held.len() - 1].as_ptr())
            }
        };
        let sources: Vec<Source> = args.iter().chain(keywords.values()).map(source).collect();
        if sources.len() > MAX_ARGUMENTS {
            return Err(PyValueError::new_err(format!("{} arguments, at most {MAX_ARGUMENTS}", sources.len())));
        }
        Ok(Direct { callable: callable.unbind(), sources, names: names.map(Bound::unbind), _held: held })
    }
}

#[inline]
fn prepare(callable: &Py<PyAny>, sources: &[Source], names: Option<&Py<PyTuple>>, slots: &Slots) -> Prepared {
    // SAFETY: none is a static object.
    let none = unsafe { ffi::Py_None() };
    let or = |given: *mut PyObject, otherwise| if given.is_null() || given == none { otherwise } else { given };
    let mut arguments = [ptr::null_mut(); MAX_ARGUMENTS + 1];
    for (place, source) in arguments[1..].iter_mut().zip(sources) {
        *place = match *source {
            Source::Slot(at, otherwise) => or(slots[at], otherwise),
            Source::Fixed(object) => object,
            Source::Seed(at) => or(slots[at], none),
            Source::Window(at, side) => side.of(or(slots[at], ptr::null_mut())),
        };
    }
    // SAFETY: a live tuple.
    let named = names.map_or(0, |names| unsafe { ffi::PyTuple_Size(names.as_ptr()) } as usize);
    let names = names.map_or(ptr::null_mut(), |names| names.as_ptr());
    Prepared { callable: callable.as_ptr(), arguments, count: sources.len() - named, names }
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
