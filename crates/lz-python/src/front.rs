//! The functions people call, and their straight path: arguments → words → memo → kernel, one native call, nothing
//! allocated.
//!
//! Whatever is not straight (a first call, a tensor subclass, autocast, tracing, numpy arrays, `out=`, a kernel
//! that fails) goes to [`crate::slow`], which may take its time.

use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;

use layerzero::OverlayId;
use layerzero::model::{ArgumentKind, Catalog, Signature, Special};
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::engine::engine;
use crate::process::Call;
use crate::route::Route;
use crate::torch::{EVERY_SDPA, Torch};
use crate::words::{Expected, Take, Words};
use crate::{context, docs, error, finish, memory, packed, slow, watched, words};

/// Most arguments a function has.
pub const MAX_ARGUMENTS: usize = 24;
const _: () = assert!(MAX_ARGUMENTS <= 32, "which arguments are given is 32 bits");
/// Functions there may be: as many entry points are compiled.
const MAX_FUNCTIONS: usize = 64;

/// The arguments of a call in the function's order, borrowed from the caller; null where not given.
pub type Slots = [*mut PyObject; MAX_ARGUMENTS];

/// A function, ready to be called.
pub struct Front {
    /// Its place in the list.
    pub index: usize,
    /// Its signature.
    pub signature: &'static Signature,
    /// The names of its arguments, interned.
    names: Vec<Py<PyString>>,
    /// Other names of arguments, and their places.
    others: Vec<(Py<PyString>, usize)>,
    /// How many arguments may be given by position.
    positional: usize,
    /// What a kernel is given for an argument the caller left out.
    pub defaults: Vec<Py<PyAny>>,
    /// The places of its tensors.
    pub tensors: Vec<usize>,
    /// The same, a bit each.
    tensor_bits: u32,
    /// The places of the tensors that are updated in place.
    pub updated: Vec<usize>,
    /// The places of what else decides, a bit each.
    scalar_bits: u32,
    /// The place of the sizes a norm is over, a bit.
    sizes_bits: u32,
    /// The place of the tensor that the result is written to, a bit.
    out_bits: u32,
    /// A call with one of these takes the slow path; a bit each.
    careful_bits: u32,
    /// Whether it is what torch's attention function computes, so that `torch.nn.attention.sdpa_kernel` counts.
    is_torch_attention: bool,
    /// The place of `return_lse`, and the function such a call is one of.
    with_lse: Option<(usize, usize)>,
    /// The place of a weight that may be packed, and the function such a call is one of.
    packed: Option<(usize, usize)>,
}

/// The places of bits that are set, in order.
fn places(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (at < 32).then_some(at as usize)
    })
}

static FRONTS: OnceLock<Vec<Front>> = OnceLock::new();

impl Front {
    fn new(py: Python<'_>, index: usize, signature: &'static Signature) -> Front {
        let arguments = &signature.arguments;
        assert!(arguments.len() <= MAX_ARGUMENTS, "{} has too many arguments", signature.function.name);
        let bits = |wanted: &dyn Fn(&layerzero::model::Argument) -> bool| -> u32 {
            (0..arguments.len()).filter(|&i| wanted(&arguments[i])).map(|i| 1 << i).sum()
        };
        let special = |wanted: Special| bits(&|a| matches!(a.kind, ArgumentKind::Special(s) if s == wanted));
        let (sizes_bits, out_bits) = (special(Special::NormalizedShape), special(Special::Out));
        let careful_bits = special(Special::Generator);
        let tensor_bits = bits(&|a| matches!(a.kind, ArgumentKind::Input(_)));
        Front {
            index,
            signature,
            names: arguments.iter().map(|a| PyString::intern(py, a.name).unbind()).collect(),
            others: {
                let others =
                    arguments.iter().enumerate().flat_map(|(at, a)| a.also().into_iter().map(move |name| (name, at)));
                others.map(|(name, at)| (PyString::intern(py, name).unbind(), at)).collect()
            },
            defaults: arguments.iter().map(|a| docs::default_object(py, a)).collect(),
            positional: arguments.iter().filter(|a| !a.keyword_only).count(),
            tensors: places(tensor_bits).collect(),
            updated: {
                let updates = signature.updates();
                places(bits(&|a| updates.contains(&a.name)) & tensor_bits).collect()
            },
            tensor_bits,
            scalar_bits: bits(&|a| a.decides()) & !tensor_bits & !careful_bits & !sizes_bits & !out_bits,
            sizes_bits,
            out_bits,
            careful_bits,
            is_torch_attention: signature.ops().any(|op| op.is_torch_attention()),
            with_lse: {
                let at = arguments.iter().position(|a| matches!(a.kind, ArgumentKind::Special(Special::ReturnLse)));
                let name = format!("{}_lse", signature.function.name);
                let other = Signature::all().iter().position(|s| s.function.name == name);
                at.map(|at| (at, other.expect("a function with return_lse has one of the same name with _lse")))
            },
            packed: packed::redirection(signature),
        }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.signature.function.name
    }

    /// The place of an argument of the front door's own.
    pub fn special(&self, wanted: Special) -> Option<usize> {
        let is_it = |kind: &ArgumentKind| matches!(kind, ArgumentKind::Special(s) if *s == wanted);
        self.signature.arguments.iter().position(|a| is_it(&a.kind))
    }

    /// The place of the tensor that the result is written to, if the function takes one.
    #[inline]
    fn out_at(&self) -> Option<usize> {
        (self.out_bits != 0).then(|| self.out_bits.trailing_zeros() as usize)
    }

    /// Every function.
    pub fn all(py: Python<'_>) -> &'static [Front] {
        FRONTS.get_or_init(|| {
            let all = Signature::all();
            assert!(all.len() <= MAX_FUNCTIONS, "{} functions, {MAX_FUNCTIONS} entry points: add some", all.len());
            all.iter().enumerate().map(|(i, s)| Front::new(py, i, s)).collect()
        })
    }

    /// The function behind any name: its own, or that of an operation or alias it serves.
    pub fn find(py: Python<'_>, name: &str) -> PyResult<&'static Front> {
        if let Some(signature) = Signature::find(name) {
            return Ok(&Front::all(py)[position(signature)]);
        }
        Err(match Catalog::get().find(name) {
            Err(unknown) => error::call(py, &unknown),
            Ok(_) => {
                let text = format!("'{name}' works on text, not on tensors");
                error::invalid(py, "NO_FUNCTION", &text, "list the functions with lz.ops()")
            }
        })
    }

    /// Puts arguments into the function's order, or says which does not fit.
    ///
    /// # Safety
    /// `args` points to `count` positional values followed by one per name in `names`, a tuple or null.
    #[inline]
    unsafe fn parse(
        &self,
        args: *const *mut PyObject,
        count: usize,
        names: *mut PyObject,
        slots: &mut Slots,
    ) -> Result<(), Misfit> {
        if count > self.positional {
            return Err(Misfit::TooMany(count));
        }
        // SAFETY: `count` values are there, and no more than there are slots.
        unsafe { ptr::copy_nonoverlapping(args, slots.as_mut_ptr(), count) };
        if names.is_null() {
            return Ok(());
        }
        // SAFETY: `names` is a tuple of strings, and a value follows for each.
        unsafe {
            for i in 0..ffi::PyTuple_Size(names) {
                let name = ffi::PyTuple_GetItem(names, i);
                let at = self.place(name).ok_or(Misfit::Unknown(name))?;
                if !slots[at].is_null() {
                    return Err(Misfit::Twice(at));
                }
                slots[at] = *args.add(count + i as usize);
            }
        }
        Ok(())
    }

    /// The place of an argument: names are interned almost always, so that comparing addresses finds them. Other names are
    /// looked at last.
    #[inline]
    fn place(&self, name: *mut PyObject) -> Option<usize> {
        let same = |own: &Py<PyString>| ptr::eq(own.as_ptr(), name);
        // SAFETY: both are live strings.
        let equal = |own: &Py<PyString>| unsafe { ffi::PyUnicode_Compare(own.as_ptr(), name) == 0 };
        let own = self.names.iter().position(same).or_else(|| self.names.iter().position(equal));
        own.or_else(|| self.others.iter().find(|(other, _)| equal(other)).map(|&(_, at)| at))
    }

    #[cold]
    #[inline(never)]
    fn refuse(&self, misfit: &Misfit) -> *mut PyObject {
        Python::attach(|py| self.misfit(py, misfit).restore(py));
        ptr::null_mut()
    }

    fn misfit(&self, py: Python<'_>, misfit: &Misfit) -> PyErr {
        let name = self.name();
        let text = match misfit {
            Misfit::TooMany(count) => {
                let most = self.positional;
                format!("{name}() takes at most {most} positional arguments, {count} were given; see help(lz.{name})")
            }
            Misfit::Twice(at) => format!("{name}() got '{}' twice", self.signature.arguments[*at].name),
            Misfit::Unknown(given) => {
                // SAFETY: the name is a live string the caller holds.
                let given = unsafe { Bound::from_borrowed_ptr(py, *given) }.to_string();
                let known = self.signature.arguments.iter().map(|a| a.name);
                let nearest = layerzero::model::nearest(&given, known);
                format!("{name}() has no argument '{given}'{}", layerzero::model::did_you_mean(&nearest))
            }
        };
        error::argument(py, "BAD_ARGUMENTS", &text, "see its signature with help()")
    }

    /// As [`Front::parse`], from Python's own containers. The slots borrow from them.
    pub fn parse_bound(
        &self,
        args: &[Bound<'_, PyAny>],
        kwargs: &[(Bound<'_, PyAny>, Bound<'_, PyAny>)],
        py: Python<'_>,
    ) -> PyResult<Slots> {
        let mut slots: Slots = [ptr::null_mut(); MAX_ARGUMENTS];
        if args.len() > self.positional {
            return Err(self.misfit(py, &Misfit::TooMany(args.len())));
        }
        for (slot, value) in slots.iter_mut().zip(args) {
            *slot = value.as_ptr();
        }
        for (name, value) in kwargs {
            let at = self.place(name.as_ptr()).ok_or_else(|| self.misfit(py, &Misfit::Unknown(name.as_ptr())))?;
            if !slots[at].is_null() {
                return Err(self.misfit(py, &Misfit::Twice(at)));
            }
            slots[at] = value.as_ptr();
        }
        if let Some((at, other)) = self.with_lse {
            let asked = std::mem::replace(&mut slots[at], ptr::null_mut());
            if !asked.is_null() && asked == true.into_pyobject(py)?.as_ptr() {
                let other = Signature::all()[other].function.name;
                let text = format!("{}: calls with return_lse=True are those of '{other}'", self.name());
                return Err(error::argument(py, "BAD_ARGUMENTS", &text, &format!("ask about '{other}'")));
            }
        }
        Ok(slots)
    }

    /// Describes a call by words, if all of it is plain, and gives the first of them. `None` sends it to the slow path, or
    /// says that the words are not those that were expected.
    ///
    /// # Safety
    /// The slots hold live objects, and this thread holds the interpreter.
    #[inline]
    unsafe fn describe(&self, slots: &Slots, overlay: OverlayId, words: &mut impl Take) -> Option<u64> {
        let torch = Torch::known()?;
        let borrow = torch.borrow?;
        let surroundings = torch.surroundings_on_host();
        if surroundings.special {
            return None;
        }
        // SAFETY: none is a static object.
        let none = unsafe { ffi::Py_None() };
        let mut present = 0u32;
        for (at, &slot) in slots.iter().enumerate().take(self.names.len()) {
            present |= u32::from(!slot.is_null() && slot != none) << at;
        }
        if present & self.careful_bits != 0 {
            return None;
        }
        // The CUDA device, if the call is made on one.
        let mut cuda = None;
        for at in places(present & (self.tensor_bits | self.out_bits)) {
            if !torch.is_plain(slots[at]) {
                return None;
            }
            // SAFETY: the object is a live, plain tensor.
            unsafe {
                let wants_grad = surroundings.grad && torch.wants_grad(slots[at]);
                match torch.fields.as_ref().and_then(|fields| fields.read(slots[at])) {
                    Some(tensor) => {
                        cuda = cuda.or(tensor.cuda());
                        if !words::seen(words, &tensor, wants_grad) {
                            return None;
                        }
                    }
                    None => cuda = cuda.or(words.ask(torch, borrow, slots[at], wants_grad)?),
                }
            };
        }
        let mut capturing = false;
        if let Some(device) = cuda {
            if torch.is_autocast_on_cuda() {
                return None;
            }
            capturing = words.capturing(torch, device)?;
        }
        for at in places(present & self.scalar_bits) {
            // SAFETY: slots hold live objects.
            if !unsafe { words::scalar(words, slots[at]) } {
                return None;
            }
        }
        for at in places(present & self.sizes_bits) {
            // SAFETY: slots hold live objects.
            if !unsafe { words::one_size(words, slots[at]) } {
                return None;
            }
        }
        // On the host a time depends on how many threads there are.
        let threads = if cuda.is_none() { torch.threads() } else { 0 };
        let decides = self.tensor_bits | self.scalar_bits | self.sizes_bits | self.out_bits;
        let present = u64::from(present & decides);
        if !words.word(present | u64::from(threads) << 32) {
            return None;
        }
        let mut state = u64::from(surroundings.deterministic) << 16 | u64::from(capturing) << 17;
        if self.is_torch_attention {
            let allowed = torch.sdpa_allowed();
            if allowed != EVERY_SDPA {
                let choice = words.sdpa(torch)?;
                if !words.word(choice) {
                    return None;
                }
            }
            state |= u64::from(allowed) << 18;
        }
        Some(self.index as u64 | state | u64::from(overlay.0) << 32)
    }

    /// What was decided for a call, if it is just as the last one of this function was: without describing it.
    ///
    /// # Safety
    /// As [`Front::describe`].
    #[inline]
    unsafe fn again(&self, slots: &Slots, overlay: OverlayId, version: u64) -> Option<Route> {
        // Where tensors are not read in place, Python functions tell what surrounds a call.
        Torch::known()?.fields.as_ref()?;
        // SAFETY: passed on. Describing runs no Python code: torch's symbols are there, or its fields would not have been
        // looked for, and what is not to be had without is not asked.
        unsafe {
            memory::last(self.index, version, |words| {
                let mut expected = Expected::new(words);
                let head = self.describe(slots, overlay, &mut expected);
                head.is_some_and(|head| expected.is_complete(head))
            })
        }
    }
}

fn position(signature: &Signature) -> usize {
    Signature::all().iter().position(|s| ptr::eq(s, signature)).unwrap_or(0)
}

/// Why arguments do not fit.
enum Misfit {
    TooMany(usize),
    Unknown(*mut PyObject),
    Twice(usize),
}

/// One function's entry point: a C function per place in the list.
unsafe extern "C" fn entry<const INDEX: usize>(
    _module: *mut PyObject,
    args: *const *mut PyObject,
    count: ffi::Py_ssize_t,
    names: *mut PyObject,
) -> *mut PyObject {
    let run = || {
        let _call = Call::begin();
        // SAFETY: the interpreter calls with itself held, and with arguments as the protocol says.
        unsafe { call(&FRONTS.get().expect("made with the functions")[INDEX], args, count as usize, names) }
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Python::attach(|py| error::internal(py, &*panic).restore(py));
        ptr::null_mut()
    })
}

/// # Safety
/// As [`Front::parse`], holding the interpreter.
#[inline]
unsafe fn call(front: &'static Front, args: *const *mut PyObject, count: usize, names: *mut PyObject) -> *mut PyObject {
    let mut slots: Slots = [ptr::null_mut(); MAX_ARGUMENTS];
    // SAFETY: passed on.
    if let Err(misfit) = unsafe { front.parse(args, count, names, &mut slots) } {
        return front.refuse(&misfit);
    }
    if let Some((at, other)) = front.with_lse
        && !slots[at].is_null()
    {
        let asked = std::mem::replace(&mut slots[at], ptr::null_mut());
        // SAFETY: both are static objects.
        if asked != unsafe { ffi::Py_False() } && asked != unsafe { ffi::Py_None() } {
            // SAFETY: the caller holds the arguments.
            return unsafe { with_lse(front, &FRONTS.get().expect("made with the functions")[other], asked, &slots) };
        }
    }
    if let Some((at, other)) = front.packed
        // SAFETY: the caller holds the arguments.
        && !slots[at].is_null() && unsafe { packed::is_packed(slots[at]) }
    {
        // SAFETY: as above.
        return unsafe { with_packed(front, &FRONTS.get().expect("made with the functions")[other], at, &slots) };
    }
    // SAFETY: the caller holds the arguments.
    unsafe { run(front, &slots, true) }
}

/// A call with a packed weight: the same arguments for the function that takes its blocks.
///
/// # Safety
/// As [`run`].
#[inline(never)]
unsafe fn with_packed(front: &Front, other: &'static Front, at: usize, slots: &Slots) -> *mut PyObject {
    Python::attach(|py| match packed::unwrapped(py, front, other, at, slots) {
        // SAFETY: passed on; what the slots borrow from lives until the call is over.
        Ok(call) => unsafe { run(other, &call.slots, true) },
        Err(error) => {
            error.restore(py);
            ptr::null_mut()
        }
    })
}

/// A call with `return_lse=True`: the same arguments for the function that gives the logarithms too. One that it does not
/// take must be at its default.
///
/// # Safety
/// As [`run`].
#[inline(never)]
unsafe fn with_lse(front: &Front, other: &'static Front, asked: *mut PyObject, slots: &Slots) -> *mut PyObject {
    let refuse = |text: &str, hint: &str| {
        Python::attach(|py| error::argument(py, "BAD_ARGUMENTS", text, hint).restore(py));
        ptr::null_mut()
    };
    // SAFETY: a static object.
    if asked != unsafe { ffi::Py_True() } {
        return refuse(&format!("{}(): 'return_lse' is neither True nor False", front.name()), "pass True or False");
    }
    let mut theirs: Slots = [ptr::null_mut(); MAX_ARGUMENTS];
    for (at, argument) in front.signature.arguments.iter().enumerate() {
        // SAFETY: a static object.
        if slots[at].is_null() || slots[at] == unsafe { ffi::Py_None() } {
            continue;
        }
        if let Some(place) = other.place(front.names[at].as_ptr()) {
            theirs[place] = slots[at];
            continue;
        }
        let scalar = front.scalar_bits & 1 << at != 0;
        // SAFETY: both are live objects, and numbers or texts compare without surprises; an error counts as different.
        let same =
            scalar && unsafe { ffi::PyObject_RichCompareBool(slots[at], front.defaults[at].as_ptr(), ffi::Py_EQ) } == 1;
        if !same {
            // SAFETY: this thread holds the interpreter.
            unsafe { ffi::PyErr_Clear() };
            let text = format!("{}() with return_lse=True has no argument '{}'", front.name(), argument.name);
            return refuse(&text, &format!("leave it out; see help(lz.{})", other.name()));
        }
    }
    // SAFETY: passed on.
    unsafe { run(other, &theirs, true) }
}

/// Runs a call whose arguments are in order. `outside`: what surrounds it counts; the torch operators, which are called
/// from inside, have seen to that.
///
/// # Safety
/// The slots hold live objects or null, and this thread holds the interpreter.
#[inline]
pub unsafe fn run(front: &'static Front, slots: &Slots, outside: bool) -> *mut PyObject {
    let (version, overlay) = (engine().version(), context::current());
    // SAFETY: the contract above.
    unsafe {
        let Some(route) = front.again(slots, overlay, version).filter(Route::still_holds) else {
            return otherwise(front, slots, outside, overlay, version);
        };
        match straight(front, slots, &route) {
            Ok(result) => result,
            Err(tried) => slowly(front, slots, outside, overlay, None, Some(route), tried),
        }
    }
}

/// A call that is not the last one of its function again: one before that, or a new one.
///
/// # Safety
/// As [`run`].
#[inline(never)]
unsafe fn otherwise(
    front: &'static Front,
    slots: &Slots,
    outside: bool,
    overlay: OverlayId,
    version: u64,
) -> *mut PyObject {
    let mut words = Words::new();
    // SAFETY: the contract above.
    unsafe {
        let described = front.describe(slots, overlay, &mut words).map(|head| (version, &*words.headed(head)));
        let known = described.and_then(|(version, words)| memory::find(front.index, version, words));
        let known = known.filter(Route::still_holds);
        let tried = match known.as_ref().map(|route| straight(front, slots, route)) {
            Some(Ok(result)) => return result,
            Some(Err(tried)) => tried,
            None => None,
        };
        slowly(front, slots, outside, overlay, described, known, tried)
    }
}

/// A call that was tried: which step of its route, and what came back, a new reference or null with an exception set.
type Tried = Option<(usize, *mut PyObject)>;

/// Makes the call a route comes down to, if it can be made at once and its result looks as it should.
///
/// # Safety
/// The slots hold what the route was found by, and this thread holds the interpreter.
#[inline]
unsafe fn straight(front: &'static Front, slots: &Slots, route: &Route) -> Result<*mut PyObject, Tried> {
    let (at, ready) = route.straight(slots).ok_or(None)?;
    let call = route.steps[at].health.record_call();
    // SAFETY: the slots are live, and the route is held.
    let result = unsafe {
        match call & route.sampled == 0 || route.steps[at].watched {
            false => ready.call(slots).ok_or(None)?,
            true => watched::call(front, slots, route, at, ready, call & route.sampled == 0).ok_or(None)?,
        }
    };
    // SAFETY: a new reference or null; torch is known, or nothing would have been described.
    if !result.is_null() && Torch::known().is_some_and(|torch| unsafe { route.looks_right(torch, result) }) {
        let out = front.out_at().map(|at| slots[at]).filter(|&out| !out.is_null());
        // SAFETY: passed on.
        return unsafe { finish::finish(route.ending, result, out) };
    }
    Err(Some((at, result)))
}

/// The rest of a call that does not go straight; apart, so that the straight path is short and in one piece.
///
/// # Safety
/// As [`run`]; `tried` holds a new reference, or null with an exception set.
#[cold]
#[inline(never)]
unsafe fn slowly(
    front: &'static Front,
    slots: &Slots,
    outside: bool,
    overlay: OverlayId,
    words: Option<(u64, &Words)>,
    known: Option<Route>,
    tried: Tried,
) -> *mut PyObject {
    Python::attach(|py| {
        let tried = tried.map(|(at, result)| {
            // SAFETY: a new reference, or null with an exception set.
            (at, unsafe { Bound::from_owned_ptr_or_err(py, result) })
        });
        let request = slow::Request { front, slots, outside, overlay, words, known, tried };
        match request.serve(py) {
            Ok(result) => result.into_ptr(),
            Err(error) => {
                error.restore(py);
                ptr::null_mut()
            }
        }
    })
}

macro_rules! entries {
    ($($index:literal)+) => { [$(entry::<$index> as ffi::PyCFunctionFastWithKeywords),+] };
}

/// Entry points for as many functions as there may be.
static ENTRIES: [ffi::PyCFunctionFastWithKeywords; MAX_FUNCTIONS] = entries!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);

/// Adds every function to the module.
pub fn add_functions(py: Python<'_>, module: &Bound<'_, PyModule>) -> PyResult<()> {
    let package = PyString::intern(py, "layerzero");
    for (front, entry) in Front::all(py).iter().zip(ENTRIES) {
        let name = leak(front.name());
        let method = Box::leak(Box::new(ffi::PyMethodDef {
            ml_name: name.as_ptr(),
            ml_meth: ffi::PyMethodDefPointer { PyCFunctionFastWithKeywords: entry },
            ml_flags: ffi::METH_FASTCALL | ffi::METH_KEYWORDS,
            ml_doc: leak(&docs::docstring(front.signature)).as_ptr(),
        }));
        // SAFETY: the definition and its strings live for ever; the result is a new reference or an exception.
        let function = unsafe {
            Bound::from_owned_ptr_or_err(py, ffi::PyCFunction_NewEx(method, ptr::null_mut(), package.as_ptr()))?
        };
        module.add(front.name(), function)?;
    }
    Ok(())
}

fn leak(text: &str) -> &'static CStr {
    Box::leak(CString::new(text).expect("no name or docstring holds a zero byte").into_boxed_c_str())
}
