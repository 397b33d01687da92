//! What torch keeps that changes what a call means, and how it is read: by functions of its C++ libraries, or by its Python functions.

use std::ffi::{c_int, c_void};

use layerzero::{OpenMp, use_openmp};
use libloading::os::unix::{Library, RTLD_LAZY};
use pyo3::exceptions::PyAttributeError;
use pyo3::ffi::{self, PyObject};
use pyo3::intern;
use pyo3::prelude::*;

/// `c10::DeviceType` of the device types autocast is looked at for.
const AUTOCAST_CPU: i8 = 0;
pub(super) const AUTOCAST_CUDA: i8 = 1;

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
pub(super) struct Symbols {
    grad_enabled: unsafe extern "C" fn() -> bool,
    any_modes: unsafe extern "C" fn(bool) -> bool,
    pub(super) autocast: unsafe extern "C" fn(i8) -> bool,
    deterministic: Question,
    pub(super) threads: unsafe extern "C" fn() -> c_int,
    /// `None` for a torch whose context has other methods: its Python functions are asked.
    pub(super) sdpa: Option<Sdpa>,
}

/// A function of a Python extension module that takes no arguments, called without the interpreter's machinery. What it
/// answers needs no experiment: it is the very function that Python code calls.
#[derive(Clone, Copy)]
pub(super) struct Question {
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
    pub(super) unsafe fn ask(self) -> bool {
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
pub(super) struct Sdpa {
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
    pub(super) fn allowed(&self) -> u8 {
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
    pub(super) fn find(deterministic: &Bound<'_, PyAny>) -> Option<Symbols> {
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
    pub(super) unsafe fn read_on_host(&self) -> Surroundings {
        // SAFETY: functions without other preconditions, see `find`.
        unsafe {
            let special = (self.any_modes)(false) || (self.autocast)(AUTOCAST_CPU);
            let deterministic = self.deterministic.ask();
            Surroundings { grad: (self.grad_enabled)(), deterministic, special }
        }
    }

    /// # Safety
    /// This thread holds the interpreter.
    pub(super) unsafe fn read(&self) -> Surroundings {
        // SAFETY: passed on.
        let host = unsafe { self.read_on_host() };
        // SAFETY: as above.
        Surroundings { special: host.special || unsafe { (self.autocast)(AUTOCAST_CUDA) }, ..host }
    }
}

/// How it is found out whether somebody records torch's operations: `torch.jit.trace`, or forward-mode derivatives.
#[derive(Clone, Copy)]
pub(super) struct Recording {
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
    pub(super) fn find(py: Python<'_>) -> PyResult<Option<Recording>> {
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
    pub(super) unsafe fn is_under_way(self) -> bool {
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
pub(super) struct Questions {
    grad_enabled: Py<PyAny>,
    modes: Py<PyAny>,
    pub(super) autocast: Py<PyAny>,
    deterministic: Py<PyAny>,
    pub(super) capturing: Py<PyAny>,
    pub(super) threads: Py<PyAny>,
    /// Whether an implementation of attention is allowed, by the numbers of [`SdpaBackend`].
    pub(super) sdpa: [Question; 5],
    /// In which order they are tried.
    pub(super) sdpa_order: Py<PyAny>,
}

impl Questions {
    /// Those of a torch that is imported; `c` is its module `_C`.
    pub(super) fn find(torch: &Bound<'_, PyAny>, c: &Bound<'_, PyAny>) -> PyResult<Questions> {
        Ok(Questions {
            grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            modes: c.getattr("_len_torch_dispatch_stack")?.unbind(),
            autocast: c.getattr("_is_any_autocast_enabled")?.unbind(),
            deterministic: torch.getattr("are_deterministic_algorithms_enabled")?.unbind(),
            capturing: torch.getattr("cuda")?.getattr("is_current_stream_capturing")?.unbind(),
            threads: torch.getattr("get_num_threads")?.unbind(),
            sdpa: [
                Question::named(c, "_get_math_sdp_enabled")?,
                Question::named(c, "_get_flash_sdp_enabled")?,
                Question::named(c, "_get_mem_efficient_sdp_enabled")?,
                Question::named(c, "_get_cudnn_sdp_enabled")?,
                Question::named(c, "_get_overrideable_sdp_enabled")?,
            ],
            sdpa_order: c.getattr("_get_sdp_priority_order")?.unbind(),
        })
    }

    pub(super) fn read(&self) -> Surroundings {
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
