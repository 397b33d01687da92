//! What is known of torch once it is imported: its tensor types, and what surrounds a call.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use layerzero::abi::RawTensor;
use layerzero::model::{SdpaBackend, SdpaChoice};
use layerzero::{OpenMp, use_openmp};
use libloading::os::unix::{Library, RTLD_LAZY};
use pyo3::exceptions::PyAttributeError;
use pyo3::ffi::{self, PyObject, PyTypeObject};
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{PyResult, intern};

use crate::allocator::Allocator;
use crate::capture::Capture;
use crate::exchange::{Borrow, functions_of, kind};
use crate::inside::Fields;

/// `c10::DeviceType` of the device types autocast is looked at for.
const AUTOCAST_CPU: i8 = 0;
const AUTOCAST_CUDA: i8 = 1;

/// What torch keeps per thread that changes what a call means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// Gradients are recorded.
    pub grad: bool,
    /// Only deterministic algorithms are allowed.
    pub deterministic: bool,
    /// A dispatch mode is active, or autocast is enabled: the call cannot take the straight path.
    pub special: bool,
}

/// Functions of torch's C++ libraries that read this state in a few nanoseconds. They are found by name, and used only
/// after an experiment has shown that they answer what torch's Python functions answer.
#[derive(Clone, Copy)]
struct Symbols {
    grad_enabled: unsafe extern "C" fn() -> bool,
    any_modes: unsafe extern "C" fn(bool) -> bool,
    autocast: unsafe extern "C" fn(i8) -> bool,
    deterministic: Question,
    threads: unsafe extern "C" fn() -> c_int,
    /// `None` for a torch whose context has other methods: its Python functions are asked.
    sdpa: Option<Sdpa>,
}

/// A function of a Python extension module that takes no arguments, called without the interpreter's machinery. What it
/// answers needs no experiment: it is the very function that Python code calls.
#[derive(Clone, Copy)]
struct Question {
    function: ffi::PyCFunction,
    module: *mut PyObject,
}

impl Question {
    /// Of a built-in function object, which is kept alive for good.
    fn of(object: &Bound<'_, PyAny>) -> Option<Question> {
        object.cast::<pyo3::types::PyCFunction>().ok()?;
        std::mem::forget(object.clone());
        // SAFETY: a live built-in function, just checked; its own pointers are valid as long as it lives.
        unsafe {
            let flags = ffi::PyCFunction_GetFlags(object.as_ptr());
            let function = ffi::PyCFunction_GetFunction(object.as_ptr()).filter(|_| flags == ffi::METH_NOARGS)?;
            Some(Question { function, module: ffi::PyCFunction_GetSelf(object.as_ptr()) })
        }
    }

    /// Of a module's function.
    fn named(module: &Bound<'_, PyAny>, name: &str) -> PyResult<Question> {
        let unusable =
            || PyAttributeError::new_err(format!("torch._C.{name} is no built-in function without arguments"));
        Question::of(&module.getattr(name)?).ok_or_else(unusable)
    }

    /// # Safety
    /// This thread holds the interpreter.
    #[inline]
    unsafe fn ask(self) -> bool {
        // SAFETY: the function takes its module and no arguments, and gives a new reference, or an exception and null.
        unsafe {
            let answer = (self.function)(self.module, std::ptr::null_mut());
            if answer.is_null() {
                ffi::PyErr_Clear();
                return true;
            }
            let yes = answer != ffi::Py_False();
            ffi::Py_DECREF(answer);
            yes
        }
    }
}

/// Reads which of torch's implementations of attention are allowed, from torch's context of the process.
#[derive(Clone, Copy)]
struct Sdpa {
    /// `at::globalContext()`: one object, for good.
    context: *const c_void,
    /// Whether an implementation is allowed, by the numbers of [`SdpaBackend`].
    enabled: [unsafe extern "C" fn(*const c_void) -> bool; 5],
}

impl Sdpa {
    /// # Safety
    /// `cpu` is `libtorch_cpu.so`, which is never unloaded.
    unsafe fn find(cpu: &Library) -> Option<Sdpa> {
        // SAFETY: the signatures are those of the C++ functions of these mangled names: methods without arguments that read a
        // flag, and a function that gives a reference, which is an address, to an object that lives as long as the process.
        unsafe {
            let global: unsafe extern "C" fn() -> *const c_void = *cpu.get(b"_ZN2at13globalContextEv").ok()?;
            let enabled = [
                *cpu.get(b"_ZNK2at7Context18userEnabledMathSDPEv").ok()?,
                *cpu.get(b"_ZNK2at7Context19userEnabledFlashSDPEv").ok()?,
                *cpu.get(b"_ZNK2at7Context26userEnabledMemEfficientSDPEv").ok()?,
                *cpu.get(b"_ZNK2at7Context19userEnabledCuDNNSDPEv").ok()?,
                *cpu.get(b"_ZNK2at7Context26userEnabledOverrideableSDPEv").ok()?,
            ];
            Some(Sdpa { context: global(), enabled })
        }
    }

    /// Which implementations are allowed, a bit each.
    #[inline]
    fn allowed(&self) -> u8 {
        let bit = |at: usize| {
            // SAFETY: see `find`; the object is the one these methods are for.
            u8::from(unsafe { (self.enabled[at])(self.context) }) << at
        };
        bit(0) | bit(1) | bit(2) | bit(3) | bit(4)
    }
}

/// [`Sdpa::allowed`] when everything is.
pub const EVERY_SDPA: u8 = 0b1_1111;

// SAFETY: the module is a Python object that is never freed, used only by threads that hold the interpreter.
unsafe impl Send for Question {}
// SAFETY: as above.
unsafe impl Sync for Question {}
// SAFETY: questions may be sent; torch's context
// is an object of the process, whose flags are read as torch's own functions read them.
unsafe impl Send for Symbols {}
// SAFETY: as above.
unsafe impl Sync for Symbols {}

/// Lets native kernels run on the OpenMP threads of torch's kernels. A torch with threads of another kind keeps them for itself.
///
/// # Safety
/// `cpu` is `libtorch_cpu.so`, which is never unloaded.
unsafe fn share_threads(cpu: &Library) {
    // SAFETY: the signatures are those of OpenMP's standard, and of the interface to libgomp, which other OpenMP libraries have as well.
    let found = |library: &Library| unsafe {
        Some(OpenMp {
            parallel: *library.get(b"GOMP_parallel").ok()?,
            max_threads: *library.get(b"omp_get_max_threads").ok()?,
            in_parallel: *library.get(b"omp_in_parallel").ok()?,
        })
    };
    // As torch's own calls are bound: to what the whole process sees (an OpenMP library in LD_PRELOAD), else to what torch was linked with.
    if let Some(library) = found(&Library::this()).or_else(|| found(cpu)) {
        // SAFETY: a library that torch uses stays loaded as long as torch does.
        unsafe { use_openmp(library) };
    }
}

impl Symbols {
    /// `deterministic` is torch's own function that tells whether only deterministic algorithms are allowed.
    fn find(deterministic: &Bound<'_, PyAny>) -> Option<Symbols> {
        let deterministic = Question::of(deterministic)?;
        // SAFETY: with RTLD_NOLOAD nothing is loaded and no initialiser runs; the libraries stay loaded as long as torch
        // does, which is never unloaded. The signatures are those of the C++ functions of these mangled names, which
        // take and return plain integers.
        unsafe {
            let open = |name: &str| Library::open(Some(name), RTLD_LAZY | NO_LOAD).ok();
            let (c10, cpu) = (open("libc10.so")?, open("libtorch_cpu.so")?);
            let symbols = Symbols {
                grad_enabled: *c10.get(b"_ZN3c108GradMode10is_enabledEv").ok()?,
                any_modes: *c10.get(b"_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb").ok()?,
                autocast: *cpu.get(b"_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE").ok()?,
                deterministic,
                threads: *cpu.get(b"_ZN2at15get_num_threadsEv").ok()?,
                sdpa: Sdpa::find(&cpu),
            };
            share_threads(&cpu);
            std::mem::forget((c10, cpu));
            Some(symbols)
        }
    }

    /// For calls on the host: autocast for CUDA is not looked at.
    ///
    /// # Safety
    /// This thread holds the interpreter.
    #[inline]
    unsafe fn read_on_host(&self) -> Surroundings {
        // SAFETY: functions without other preconditions, see `find`.
        unsafe {
            let special = (self.any_modes)(false) || (self.autocast)(AUTOCAST_CPU);
            let deterministic = self.deterministic.ask();
            Surroundings { grad: (self.grad_enabled)(), deterministic, special }
        }
    }

    /// # Safety
    /// This thread holds the interpreter.
    unsafe fn read(&self) -> Surroundings {
        // SAFETY: passed on.
        let host = unsafe { self.read_on_host() };
        // SAFETY: as above.
        Surroundings { special: host.special || unsafe { (self.autocast)(AUTOCAST_CUDA) }, ..host }
    }
}

/// How it is found out whether somebody records torch's operations: `torch.jit.trace`, or forward-mode derivatives.
#[derive(Clone, Copy)]
struct Recording {
    /// torch's `getTracingState`: where the thread keeps a shared pointer to the trace that is being made.
    tracing: unsafe extern "C" fn() -> *const *const c_void,
    /// The names of `torch.autograd.forward_ad`, one of which tells how many levels of derivatives are being made.
    module: *mut PyObject,
    level: *mut PyObject,
    /// The level outside of any. Small integers are one object each.
    outside: *mut PyObject,
}

// SAFETY: objects that are never freed, used only by threads that hold the interpreter.
unsafe impl Send for Recording {}
// SAFETY: as above.
unsafe impl Sync for Recording {}

impl Recording {
    fn find(py: Python<'_>) -> PyResult<Option<Recording>> {
        // SAFETY: as in `Symbols::find`; a reference is returned as an address.
        let tracing = unsafe {
            let Ok(library) = Library::open(Some("libtorch_cpu.so"), RTLD_LAZY | NO_LOAD) else { return Ok(None) };
            let Ok(found) = library.get(b"_ZN5torch3jit6tracer15getTracingStateEv").map(|symbol| *symbol) else {
                return Ok(None);
            };
            std::mem::forget(library);
            found
        };
        let module = py.import("torch.autograd.forward_ad")?.dict();
        let (level, outside) = (intern!(py, "_current_level").clone(), (-1i64).into_pyobject(py)?);
        let found = module.get_item(&level)?.is_some_and(|value| value.is(&outside));
        let recording =
            Recording { tracing, module: module.as_ptr(), level: level.as_ptr(), outside: outside.as_ptr() };
        std::mem::forget((module, level, outside));
        // Found in the middle of derivatives, it would never be asked again.
        Ok(found.then_some(recording))
    }

    /// # Safety
    /// This thread holds the interpreter.
    #[inline]
    unsafe fn is_under_way(self) -> bool {
        // SAFETY: the function gives the address of a shared pointer, whose first word is null when there is no trace. The
        // dictionary and the name are live; the value is borrowed, or null, and only its address is looked at.
        unsafe {
            let state = (self.tracing)();
            !(*state).is_null() || ffi::PyDict_GetItem(self.module, self.level) != self.outside
        }
    }
}

/// `RTLD_NOLOAD` of glibc: only what is loaded already.
pub const NO_LOAD: c_int = 4;

/// Python functions that answer the same, for a torch whose symbols are not to be had.
struct Questions {
    grad_enabled: Py<PyAny>,
    modes: Py<PyAny>,
    autocast: Py<PyAny>,
    deterministic: Py<PyAny>,
    capturing: Py<PyAny>,
    threads: Py<PyAny>,
    /// Whether an implementation of attention is allowed, by the numbers of [`SdpaBackend`].
    sdpa: [Question; 5],
    /// In which order they are tried.
    sdpa_order: Py<PyAny>,
}

impl Questions {
    fn read(&self) -> Surroundings {
        Python::attach(|py| {
            let yes = |question: &Py<PyAny>| question.call0(py).and_then(|answer| answer.is_truthy(py)).unwrap_or(true);
            Surroundings {
                grad: yes(&self.grad_enabled),
                deterministic: yes(&self.deterministic),
                special: yes(&self.modes) || yes(&self.autocast),
            }
        })
    }
}

/// What a tensor looks like: dtype, device, sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    kind: u64,
    sizes: Box<[i64]>,
}

/// torch, as far as calls need it. Never dropped.
pub struct Torch {
    tensor: *const PyTypeObject,
    parameter: *const PyTypeObject,
    /// Reads a tensor's metadata; `None` for a torch without the exchange API.
    pub borrow: Option<Borrow>,
    /// Where its tensors keep their fields; `None` where that could not be found out.
    pub fields: Option<Fields>,
    symbols: Option<Symbols>,
    capture: Option<Capture>,
    recording: Option<Recording>,
    /// Makes tensors; `None` where torch's functions for that are not there.
    pub allocator: Option<Allocator>,
    questions: Questions,
    requires_grad: Py<PyAny>,
    /// Whether it is known how torch is read. Under autocast or a dispatch mode that cannot be found out, and is tried again.
    settled: bool,
}

static TORCH: AtomicPtr<Torch> = AtomicPtr::new(std::ptr::null_mut());

impl Torch {
    /// torch, if a call has met it already.
    #[inline]
    pub fn known() -> Option<&'static Torch> {
        // SAFETY: the pointer is null or to a leaked value that is never changed again.
        unsafe { TORCH.load(Ordering::Acquire).as_ref() }
    }

    /// torch, if the process has imported it.
    pub fn find(py: Python<'_>) -> PyResult<Option<&'static Torch>> {
        let before = TORCH.load(Ordering::Acquire);
        // SAFETY: as in `known`.
        if let Some(torch) = unsafe { before.as_ref() }
            && (torch.settled || torch.questions.read().special)
        {
            return Ok(Some(torch));
        }
        let modules = py.import("sys")?.getattr("modules")?;
        let Ok(torch) = modules.get_item("torch") else { return Ok(None) };
        // A torch that is still being imported has no `nn` yet.
        let Ok(parameter) = torch.getattr("nn").and_then(|nn| nn.getattr("Parameter")) else { return Ok(None) };
        let tensor = torch.getattr("Tensor")?;
        let c = torch.getattr("_C")?;
        let exchange = functions_of(&tensor);
        let mut found = Torch {
            tensor: tensor.cast::<PyType>()?.as_type_ptr(),
            parameter: parameter.cast::<PyType>()?.as_type_ptr(),
            borrow: exchange.borrow,
            fields: None,
            symbols: Symbols::find(&c.getattr("_get_deterministic_algorithms")?),
            capture: Capture::find(exchange.work_stream),
            recording: None,
            allocator: None,
            questions: Questions {
                grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
                modes: c.getattr("_len_torch_dispatch_stack")?.unbind(),
                autocast: c.getattr("_is_any_autocast_enabled")?.unbind(),
                deterministic: torch.getattr("are_deterministic_algorithms_enabled")?.unbind(),
                capturing: torch.getattr("cuda")?.getattr("is_current_stream_capturing")?.unbind(),
                threads: torch.getattr("get_num_threads")?.unbind(),
                sdpa: [
                    Question::named(&c, "_get_math_sdp_enabled")?,
                    Question::named(&c, "_get_flash_sdp_enabled")?,
                    Question::named(&c, "_get_mem_efficient_sdp_enabled")?,
                    Question::named(&c, "_get_cudnn_sdp_enabled")?,
                    Question::named(&c, "_get_overrideable_sdp_enabled")?,
                ],
                sdpa_order: c.getattr("_get_sdp_priority_order")?.unbind(),
            },
            requires_grad: intern!(py, "requires_grad").clone().into_any().unbind(),
            settled: true,
        };
        // The types must outlive the pointers; torch is never unloaded, but its names can be rebound.
        std::mem::forget((tensor, parameter));
        match found.symbols_tell_the_truth(py)? {
            Some(true) => {}
            Some(false) => found.symbols = None,
            None => (found.symbols, found.settled) = (None, false),
        }
        // In the middle of something special no plain tensor can be made.
        if found.symbols.is_some() {
            found.fields = Fields::find(py)?;
            found.recording = Recording::find(py)?;
            found.allocator = Allocator::find(py)?;
        }
        let found = Box::into_raw(Box::new(found));
        // Two threads may have looked at once; the loser's copy stays unused.
        let _ = TORCH.compare_exchange(before, found, Ordering::AcqRel, Ordering::Acquire);
        Ok(Torch::known())
    }

    /// Puts this thread into each state in turn and compares what the symbols say; `None` where that cannot be done now.
    fn symbols_tell_the_truth(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        let Some(symbols) = self.symbols else { return Ok(Some(false)) };
        let read = move || {
            // SAFETY: called by Python code, whose thread holds the interpreter.
            let seen = unsafe { { symbols }.read() };
            // SAFETY: as in `Torch::threads`.
            let threads = unsafe { (symbols.threads)() };
            (seen.grad, seen.deterministic, seen.special, threads, { symbols }.sdpa.map(|sdpa| sdpa.allowed()))
        };
        let look = pyo3::types::PyCFunction::new_closure(py, None, None, move |_, _| read())?;
        py.import("layerzero.torch_state")?.call_method1("symbols_agree", (look,))?.extract()
    }

    /// Whether symbols or Python functions are asked.
    pub fn reads_by(&self) -> &'static str {
        if self.symbols.is_some() { "symbols" } else { "functions" }
    }

    /// Whether tensors are read in place or through the exchange API.
    pub fn tensors_by(&self) -> &'static str {
        match (&self.fields, self.borrow) {
            (Some(_), _) => "fields",
            (None, Some(_)) => "exchange",
            (None, None) => "attributes",
        }
    }

    /// Whether an object is a plain tensor or parameter, no subclass.
    #[inline]
    pub fn is_plain(&self, object: *mut PyObject) -> bool {
        // SAFETY: callers hold a reference to a live object.
        let ty = unsafe { ffi::Py_TYPE(object) }.cast_const();
        ty == self.tensor || ty == self.parameter
    }

    /// Whether an object is a tensor of any kind.
    pub fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: the type lives as long as torch, which is as long as the process.
        unsafe { ffi::PyType_IsSubtype(ffi::Py_TYPE(object.as_ptr()), self.tensor.cast_mut()) != 0 }
    }

    /// Whether somebody records torch's operations, who would miss what a native kernel does.
    #[inline]
    pub fn is_recording(&self) -> bool {
        // SAFETY: whoever makes a call holds the interpreter.
        self.recording.is_none_or(|recording| unsafe { recording.is_under_way() })
    }

    /// What surrounds the call this thread is in. It holds the interpreter.
    pub fn surroundings(&self) -> Surroundings {
        match &self.symbols {
            // SAFETY: whoever asks about a call holds the interpreter.
            Some(symbols) => unsafe { symbols.read() },
            None => self.questions.read(),
        }
    }

    /// What surrounds a call on host tensors; one on others must ask [`Torch::is_autocast_on_cuda`] as well.
    #[inline]
    pub fn surroundings_on_host(&self) -> Surroundings {
        match &self.symbols {
            // SAFETY: as above.
            Some(symbols) => unsafe { symbols.read_on_host() },
            None => self.questions.read(),
        }
    }

    /// Whether autocast is enabled for CUDA.
    #[inline]
    pub fn is_autocast_on_cuda(&self) -> bool {
        match &self.symbols {
            // SAFETY: a function without preconditions, see `Symbols::find`.
            Some(symbols) => unsafe { (symbols.autocast)(AUTOCAST_CUDA) },
            None => self.questions.read().special,
        }
    }

    /// Which of torch's implementations of attention are allowed, a bit each by their numbers: [`EVERY_SDPA`] outside of
    /// `torch.nn.attention.sdpa_kernel`. This thread holds the interpreter.
    #[inline]
    pub fn sdpa_allowed(&self) -> u8 {
        match self.symbols.and_then(|symbols| symbols.sdpa) {
            Some(sdpa) => sdpa.allowed(),
            // SAFETY: whoever makes a call holds the interpreter.
            None => (0..5).fold(0, |bits, at| bits | u8::from(unsafe { self.questions.sdpa[at].ask() }) << at),
        }
    }

    /// The same with torch's order of preference, which counts where not all are allowed.
    pub fn sdpa(&self, py: Python<'_>) -> PyResult<SdpaChoice> {
        let allowed = self.sdpa_allowed();
        if allowed == EVERY_SDPA {
            return Ok(SdpaChoice::ANY);
        }
        let order: Vec<usize> = self.questions.sdpa_order.call0(py)?.extract(py)?;
        let order: Vec<SdpaBackend> = order.iter().filter_map(|&at| SdpaBackend::ALL.get(at).copied()).collect();
        Ok(SdpaChoice::new(allowed, &order))
    }

    /// The same as a word, which is another one for every choice; `None` when torch cannot be asked.
    #[cold]
    pub fn sdpa_word(&self) -> Option<u64> {
        Python::attach(|py| self.sdpa(py).ok().map(|choice| u64::from(choice.code())))
    }

    /// How many threads torch's kernels on the CPU use when this thread calls them; 0 where that is not to be had. This
    /// thread holds the interpreter.
    #[inline]
    pub fn threads(&self) -> u16 {
        match &self.symbols {
            // SAFETY: a function without preconditions, see `Symbols::find`.
            Some(symbols) => u16::try_from(unsafe { (symbols.threads)() }).unwrap_or(0),
            None => Python::attach(|py| self.questions.threads.call0(py).and_then(|n| n.extract(py)).unwrap_or(0)),
        }
    }

    /// Whether a graph is being captured on the stream that work of a CUDA device goes to.
    #[inline]
    pub fn is_capturing(&self, device: i32) -> bool {
        self.sees_capture(device).unwrap_or_else(|| self.ask_whether_capturing())
    }

    /// The same without running Python code; `None` where that does not tell.
    #[inline]
    pub fn sees_capture(&self, device: i32) -> Option<bool> {
        self.capture?.is_under_way(device)
    }

    #[cold]
    fn ask_whether_capturing(&self) -> bool {
        Python::attach(|py| {
            drop(PyErr::take(py));
            // Whoever cannot be asked is taken to be capturing: then only what is safe there runs.
            self.questions.capturing.call0(py).and_then(|answer| answer.is_truthy(py)).unwrap_or(true)
        })
    }

    /// Whether autocast is enabled for some device.
    pub fn autocast(&self, py: Python<'_>) -> PyResult<bool> {
        self.questions.autocast.call0(py)?.is_truthy(py)
    }

    /// Whether a tensor is a plain one whose metadata can be read.
    pub fn is_readable(&self, object: &Bound<'_, PyAny>) -> bool {
        let mut tensor = RawTensor::ABSENT;
        let Some(borrow) = self.borrow else { return self.is_plain(object.as_ptr()) };
        // SAFETY: a live tensor, and a struct to fill.
        let read = self.is_plain(object.as_ptr()) && unsafe { borrow(object.as_ptr(), &mut tensor) } == 0;
        drop(PyErr::take(object.py()));
        read
    }

    /// What a plain tensor looks like; `None` for anything else.
    ///
    /// # Safety
    /// A live object, and this thread holds the interpreter.
    pub unsafe fn outline(&self, object: *mut PyObject) -> Option<Outline> {
        // SAFETY: passed on; what is read lives as long as the tensor.
        unsafe {
            if !self.is_plain(object) {
                return None;
            }
            if let Some(seen) = self.fields.as_ref().and_then(|fields| fields.read(object)) {
                return Some(Outline { kind: seen.kind(), sizes: seen.sizes.into() });
            }
            let mut tensor = RawTensor::ABSENT;
            if self.borrow?(object, &mut tensor) != 0 {
                ffi::PyErr_Clear();
                return None;
            }
            if let Some(fields) = &self.fields {
                fields.learn(object, &tensor);
            }
            Some(Outline { kind: kind(&tensor), sizes: tensor.shape().into() })
        }
    }

    /// Whether a tensor looks like that.
    ///
    /// # Safety
    /// A live object, and this thread holds the interpreter.
    #[inline]
    pub unsafe fn fits(&self, object: *mut PyObject, outline: &Outline) -> bool {
        // SAFETY: passed on.
        unsafe {
            if self.is_plain(object)
                && let Some(seen) = self.fields.as_ref().and_then(|fields| fields.read(object))
                && seen.kind() == outline.kind
            {
                return *seen.sizes == *outline.sizes;
            }
            self.outline(object).is_some_and(|found| found == *outline)
        }
    }

    /// Whether a gradient is wanted for a tensor.
    ///
    /// # Safety
    /// `tensor` is a live tensor and this thread holds the interpreter.
    #[inline]
    pub unsafe fn wants_grad(&self, tensor: *mut PyObject) -> bool {
        // SAFETY: both are live objects; the answer is a new reference, true or false, given back at once.
        unsafe {
            if let Some(fields) = &self.fields {
                return fields.wants_grad(tensor);
            }
            let answer = ffi::PyObject_GetAttr(tensor, self.requires_grad.as_ptr());
            if answer.is_null() {
                ffi::PyErr_Clear();
                return true;
            }
            let wants = answer == ffi::Py_True();
            ffi::Py_DECREF(answer);
            wants
        }
    }
}
