//! DLPack's C exchange API: a tensor's shape, strides, dtype and device without any Python object in between.

use std::ffi::{CStr, c_int, c_void};

use layerzero::abi::RawTensor;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

/// The attribute of a tensor *type* that holds the API, and what its capsule is called.
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const CAPSULE: &CStr = c"dlpack_exchange_api";
/// The major version this file is written for.
const MAJOR: u32 = 1;

/// A tensor's dtype and device, in DLPack's numbers. Never what [`crate::inside::Seen::kind`] gives.
pub fn kind(tensor: &RawTensor) -> u64 {
    let (element, device) = (tensor.element, tensor.device);
    u64::from(element.code) << 8
        | u64::from(element.bits) << 16
        | u64::from(element.lanes == 1) << 4
        | (device.kind as u64 & 0xff) << 32
        | (device.id as u64 & 0xffff) << 40
}

/// Fills a [`RawTensor`] from a Python object; 0 when it did, -1 with an exception set when not.
pub type Borrow = unsafe extern "C" fn(*mut PyObject, *mut RawTensor) -> c_int;

/// Writes the stream a device's work goes to now; 0 when it did, -1 with an exception set when not.
pub type WorkStream = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int;

/// What a tensor type offers, as far as it is used here.
#[derive(Clone, Copy, Default)]
pub struct Exchange {
    pub borrow: Option<Borrow>,
    pub work_stream: Option<WorkStream>,
}

#[repr(C)]
struct Api {
    major: u32,
    minor: u32,
    previous: *const Api,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    borrow: Option<Borrow>,
    work_stream: Option<WorkStream>,
}

/// The functions of a tensor type, where it has some this file understands.
pub fn functions_of(tensor_type: &Bound<'_, PyAny>) -> Exchange {
    let Ok(capsule) = tensor_type.getattr(ATTRIBUTE) else { return Exchange::default() };
    // SAFETY: the pointer is checked by the capsule's name and may be null; the exception of a mismatch is cleared.
    let mut api = unsafe {
        let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE.as_ptr());
        if pointer.is_null() {
            ffi::PyErr_Clear();
        }
        pointer.cast::<Api>().cast_const()
    };
    // SAFETY: a capsule of this name holds a struct that begins with its version and the previous one's address, and
    // lives as long as the process; the fields behind are read only for the major version they belong to.
    unsafe {
        while let Some(found) = api.as_ref() {
            if found.major == MAJOR {
                return Exchange { borrow: found.borrow, work_stream: found.work_stream };
            }
            api = found.previous;
        }
    }
    Exchange::default()
}
