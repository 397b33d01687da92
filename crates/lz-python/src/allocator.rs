//! New tensors by torch's own allocator, and views of tensors, without a Python function.
//!
//! torch exports C functions for code that its compiler generates: one gives a new C++ tensor, another wraps it into a
//! Python object. They are found by name, and used only after an experiment: what they gave was what was asked for.

use std::ffi::c_void;

use layerzero::model::DType;
use libloading::os::unix::{Library, RTLD_LAZY};
use pyo3::ffi::PyObject;
use pyo3::prelude::*;

use crate::inside::IMPL;
use crate::torch::NO_LOAD;

/// A C++ tensor on the heap.
type Handle = *mut c_void;

/// torch's functions.
#[derive(Clone, Copy)]
pub struct Allocator {
    empty_strided: unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> i32,
    delete: unsafe extern "C" fn(Handle) -> i32,
    address: unsafe extern "C" fn(Handle, *mut *mut c_void) -> i32,
    /// The memory of a tensor under other sizes and strides.
    reinterpret: unsafe extern "C" fn(Handle, i64, *const i64, *const i64, i64, *mut Handle) -> i32,
    /// `THPVariable_Wrap`: a new reference to a Python tensor, which takes the C++ tensor's place.
    wrap: unsafe extern "C" fn(Handle) -> *mut PyObject,
}

/// torch's number for the host.
const HOST: i32 = 0;

/// torch's number for a dtype (`c10::ScalarType`); none for those torch packs into bytes.
pub fn number(dtype: DType) -> Option<i32> {
    Some(match dtype {
        DType::U8 => 0,
        DType::I8 => 1,
        DType::I16 => 2,
        DType::I32 => 3,
        DType::I64 => 4,
        DType::F16 => 5,
        DType::F32 => 6,
        DType::F64 => 7,
        DType::Bool => 11,
        DType::Bf16 => 15,
        DType::F8E5M2 => 23,
        DType::F8E4M3 => 24,
        DType::Tf32 | DType::MxFp4 | DType::NvFp4 | DType::I4 => return None,
    })
}

impl Allocator {
    /// Finds the functions and tries them; `None` where they are not there or do not do what they should.
    pub fn find(py: Python<'_>) -> PyResult<Option<Allocator>> {
        let Some(found) = Allocator::look() else { return Ok(None) };
        let torch_state = py.import("layerzero.torch_state")?;
        for dtype in DType::all() {
            let Some(number) = number(dtype) else { continue };
            // SAFETY: sizes and strides are two each.
            let Some((object, address)) = (unsafe { found.empty(number, &[2, 3], &[3, 1]) }) else { return Ok(None) };
            // SAFETY: a new reference.
            let tensor = unsafe { Bound::from_owned_ptr(py, object) };
            let arguments = (tensor, dtype.name(), address as usize);
            if !torch_state.call_method1("is_new_tensor", arguments)?.extract::<bool>()? {
                return Ok(None);
            }
        }
        let specimen = torch_state.call_method0("to_turn")?;
        // SAFETY: a live tensor of four dimensions, whose sizes and strides these are.
        let turned = unsafe { found.turned(specimen.as_ptr(), &[2, 3, 4, 5], &[60, 20, 5, 1]) };
        let Some(turned) = turned else { return Ok(None) };
        // SAFETY: a new reference.
        let turned = unsafe { Bound::from_owned_ptr(py, turned) };
        let agrees: bool = torch_state.call_method1("is_turned", (specimen, turned))?.extract()?;
        Ok(agrees.then_some(found))
    }

    /// A view of a tensor with its second and third dimension exchanged: a new reference. Autograd does not see it as a view.
    ///
    /// # Safety
    /// A live tensor of four dimensions, whose sizes and strides are given, and this thread holds the interpreter.
    #[inline]
    pub unsafe fn turned(&self, tensor: *mut PyObject, sizes: &[i64; 4], strides: &[i64; 4]) -> Option<*mut PyObject> {
        let turn = |by: &[i64; 4]| [by[0], by[2], by[1], by[3]];
        let mut handle = std::ptr::null_mut();
        // SAFETY: a Python tensor holds the C++ one right behind its header. The handle that is given is deleted after the Python
        // object has taken over its tensor.
        unsafe {
            let own: Handle = tensor.cast::<u8>().add(IMPL).cast();
            if (self.reinterpret)(own, 4, turn(sizes).as_ptr(), turn(strides).as_ptr(), 0, &mut handle) != 0 {
                return None;
            }
            let object = (self.wrap)(handle);
            (self.delete)(handle);
            if object.is_null() {
                pyo3::ffi::PyErr_Clear();
                return None;
            }
            Some(object)
        }
    }

    fn look() -> Option<Allocator> {
        // SAFETY: with RTLD_NOLOAD nothing is loaded and no initialiser runs; torch's libraries are never unloaded. The
        // first three are C functions of these signatures. `THPVariable_Wrap` takes a reference to a C++ tensor, or a
        // tensor by value, which the C++ ABI passes as an address too.
        unsafe {
            let open = |name: &str| Library::open(Some(name), RTLD_LAZY | NO_LOAD).ok();
            let (cpu, python) = (open("libtorch_cpu.so")?, open("libtorch_python.so")?);
            let wrap = python
                .get(b"_Z16THPVariable_WrapON2at10TensorBaseE")
                .or_else(|_| python.get(b"_Z16THPVariable_WrapN2at10TensorBaseE"))
                .ok()
                .map(|symbol| *symbol)?;
            let found = Allocator {
                empty_strided: *cpu.get(b"aoti_torch_empty_strided").ok()?,
                delete: *cpu.get(b"aoti_torch_delete_tensor_object").ok()?,
                address: *cpu.get(b"aoti_torch_get_data_ptr").ok()?,
                reinterpret: *cpu.get(b"aoti_torch__reinterpret_tensor").ok()?,
                wrap,
            };
            std::mem::forget((cpu, python));
            Some(found)
        }
    }

    /// A new tensor on the host, and where its memory is; `None` when there is none for it. Its contents are anything.
    ///
    /// # Safety
    /// There are as many strides as sizes, no size is negative, and this thread holds the interpreter.
    #[inline]
    pub unsafe fn empty(&self, dtype: i32, sizes: &[i64], strides: &[i64]) -> Option<(*mut PyObject, *mut u8)> {
        let (mut handle, mut address) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the contract above. The handle is deleted after the Python object has taken over its tensor.
        unsafe {
            let rank = sizes.len() as i64;
            if (self.empty_strided)(rank, sizes.as_ptr(), strides.as_ptr(), dtype, HOST, 0, &mut handle) != 0 {
                return None;
            }
            let found = (self.address)(handle, &mut address) == 0;
            let object = (self.wrap)(handle);
            (self.delete)(handle);
            if object.is_null() {
                pyo3::ffi::PyErr_Clear();
                return None;
            }
            if !found {
                pyo3::ffi::Py_DECREF(object);
                return None;
            }
            Some((object, address.cast()))
        }
    }
}
