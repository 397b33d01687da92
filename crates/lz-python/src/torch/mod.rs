//! What is known of torch once it is imported: its tensor types, and what surrounds a call.

use std::sync::atomic::{AtomicPtr, Ordering};

use layerzero::abi::RawTensor;
use layerzero::model::{SdpaBackend, SdpaChoice};
use pyo3::ffi::{self, PyObject, PyTypeObject};
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{PyResult, intern};

use crate::allocator::Allocator;
use crate::capture::Capture;
use crate::exchange::{Borrow, functions_of, kind};
use crate::inside::Fields;

pub mod shims;
mod state;

use state::{AUTOCAST_CUDA, Questions, Recording, Symbols};
pub use state::{EVERY_SDPA, NO_LOAD, Surroundings};

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
            questions: Questions::find(&torch, &c)?,
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
