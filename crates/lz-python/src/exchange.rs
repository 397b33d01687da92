//! DLPack's C exchange API: a tensor's shape, strides, dtype and device without any Python object in between.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use layerzero::model::DType;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

/// The attribute of a tensor *type* that holds the API, and what its capsule is called.
const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
const CAPSULE: &CStr = c"dlpack_exchange_api";
/// The major version this file is written for.
const MAJOR: u32 = 1;

/// A tensor that is borrowed, as DLPack lays it out.
#[repr(C)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device_type: i32,
    pub device_id: i32,
    pub ndim: i32,
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
    pub shape: *const i64,
    pub strides: *const i64,
    pub byte_offset: u64,
}

/// `DLDeviceType` of host memory and of CUDA devices.
pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;

impl DlTensor {
    pub const EMPTY: DlTensor = DlTensor {
        data: ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: ptr::null(),
        strides: ptr::null(),
        byte_offset: 0,
    };

    /// Its sizes.
    ///
    /// # Safety
    /// The producer filled the struct and the tensor is still alive.
    pub unsafe fn shape(&self) -> &[i64] {
        // SAFETY: by the contract above `shape` points to `ndim` sizes; it may be null when there are none.
        if self.ndim <= 0 { &[] } else { unsafe { std::slice::from_raw_parts(self.shape, self.ndim as usize) } }
    }

    /// Its strides in elements; none means row-major without gaps.
    ///
    /// # Safety
    /// As for [`DlTensor::shape`].
    pub unsafe fn strides(&self) -> Option<&[i64]> {
        if self.strides.is_null() {
            return None;
        }
        // SAFETY: by the contract above non-null `strides` point to `ndim` values.
        Some(unsafe { std::slice::from_raw_parts(self.strides, self.ndim.max(0) as usize) })
    }

    /// Where its first element is.
    pub fn start(&self) -> *mut u8 {
        self.data.cast::<u8>().wrapping_add(self.byte_offset as usize)
    }

    /// Its dtype and device, in DLPack's numbers. Never what [`crate::inside::Seen::kind`] gives.
    pub fn kind(&self) -> u64 {
        u64::from(self.code) << 8
            | u64::from(self.bits) << 16
            | u64::from(self.lanes == 1) << 4
            | (self.device_type as u64 & 0xff) << 32
            | (self.device_id as u64 & 0xffff) << 40
    }

    /// Its dtype, if LayerZero has it.
    pub fn dtype(&self) -> Option<DType> {
        let dtype = match (self.code, self.bits) {
            (0, 8) => DType::I8,
            (0, 16) => DType::I16,
            (0, 32) => DType::I32,
            (0, 64) => DType::I64,
            (1, 8) => DType::U8,
            (2, 16) => DType::F16,
            (2, 32) => DType::F32,
            (2, 64) => DType::F64,
            (4, 16) => DType::Bf16,
            (6, 8) => DType::Bool,
            (10, 8) => DType::F8E4M3,
            (12, 8) => DType::F8E5M2,
            _ => return None,
        };
        (self.lanes == 1).then_some(dtype)
    }
}

/// Fills a [`DlTensor`] from a Python object; 0 when it did, -1 with an exception set when not.
pub type Borrow = unsafe extern "C" fn(*mut PyObject, *mut DlTensor) -> c_int;

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
