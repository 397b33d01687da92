//! The words of a call: all that can influence what is decided for it.

use std::mem::MaybeUninit;
use std::ptr;

use pyo3::ffi::{self, PyObject};

use crate::exchange::{Borrow, CUDA, DlTensor};
use crate::inside::Seen;
use crate::torch::Torch;

/// All that can influence a decision, on the stack.
pub struct Words {
    words: [MaybeUninit<u64>; MAX_WORDS],
    len: usize,
    overflowed: bool,
}

/// Most words a call is described by; longer ones are not remembered.
const MAX_WORDS: usize = 160;

impl Words {
    /// None yet.
    pub fn new() -> Words {
        Words { words: [const { MaybeUninit::uninit() }; MAX_WORDS], len: 0, overflowed: false }
    }

    /// Whether there were more than fit.
    pub fn overflowed(&self) -> bool {
        self.overflowed
    }

    /// Writes the first word, which was pushed before all others.
    #[inline]
    pub fn set_head(&mut self, word: u64) {
        self.words[0].write(word);
    }

    /// All of them.
    pub fn as_slice(&self) -> &[u64] {
        // SAFETY: `push` wrote the first `len` of them.
        unsafe { self.words[..self.len].assume_init_ref() }
    }

    /// Adds one.
    #[inline]
    pub fn push(&mut self, word: u64) {
        match self.words.get_mut(self.len) {
            Some(place) => {
                place.write(word);
                self.len += 1;
            }
            None => self.overflowed = true,
        }
    }

    #[inline]
    fn extend(&mut self, values: &[i64]) {
        match self.words.get_mut(self.len..self.len + values.len()) {
            Some(places) => {
                places.iter_mut().zip(values).for_each(|(place, &value)| {
                    place.write(value as u64);
                });
                self.len += values.len();
            }
            None => self.overflowed = true,
        }
    }

    /// A tensor that was read in place.
    #[inline]
    pub fn seen(&mut self, tensor: &Seen<'_>, wants_grad: bool) {
        let header = tensor.kind()
            | u64::from(tensor.start.is_multiple_of(16)) << 1
            | u64::from(wants_grad) << 2
            | (tensor.sizes.len() as u64) << 24;
        self.push(header);
        self.extend(tensor.sizes);
        self.extend(tensor.strides);
    }

    /// A tensor, asked through the exchange API; gives its CUDA device, if it is on one. `None` when it cannot be asked.
    ///
    /// # Safety
    /// A live, plain tensor.
    pub unsafe fn borrowed(
        &mut self,
        torch: &Torch,
        borrow: Borrow,
        object: *mut PyObject,
        wants_grad: bool,
    ) -> Option<Option<i32>> {
        let mut tensor = DlTensor::EMPTY;
        // SAFETY: a live tensor, and a struct to fill, which is read while the tensor is alive. A failed call has set an
        // exception.
        unsafe {
            if borrow(object, &mut tensor) != 0 {
                ffi::PyErr_Clear();
                return None;
            }
            if let Some(fields) = &torch.fields {
                fields.learn(object, &tensor);
            }
            self.tensor(&tensor, wants_grad);
        }
        Some((tensor.device_type == CUDA).then_some(tensor.device_id))
    }

    /// # Safety
    /// The struct was filled and its tensor is alive.
    unsafe fn tensor(&mut self, tensor: &DlTensor, wants_grad: bool) {
        let aligned = (tensor.start() as usize).is_multiple_of(16);
        let header = tensor.kind()
            | u64::from(aligned) << 1
            | u64::from(wants_grad) << 2
            | u64::from(tensor.strides.is_null()) << 3
            | (tensor.ndim as u64 & 0xff) << 24;
        self.push(header);
        // SAFETY: the contract above.
        let (shape, strides) = unsafe { (tensor.shape(), tensor.strides()) };
        self.extend(shape);
        self.extend(strides.unwrap_or(&[]));
    }

    /// A truth value, number, short string, or pair of integers. `false` for anything else.
    ///
    /// # Safety
    /// A live object.
    #[inline]
    pub unsafe fn scalar(&mut self, object: *mut PyObject) -> bool {
        // SAFETY: each check reads the object's type, each reading follows its check.
        unsafe {
            if object == ffi::Py_True() || object == ffi::Py_False() {
                self.push(1 | u64::from(object == ffi::Py_True()) << 8);
            } else if ffi::PyFloat_CheckExact(object) != 0 {
                self.push(2);
                self.push(ffi::PyFloat_AsDouble(object).to_bits());
            } else if ffi::PyLong_CheckExact(object) != 0 {
                return self.integer(object);
            } else if ffi::PyUnicode_CheckExact(object) != 0 {
                return self.text(object);
            } else if ffi::PyTuple_CheckExact(object) != 0 {
                let count = ffi::PyTuple_Size(object);
                self.push(5 | (count as u64) << 8);
                let integer = |i| {
                    let item = ffi::PyTuple_GetItem(object, i);
                    ffi::PyLong_CheckExact(item) != 0 && self.integer(item)
                };
                return count <= 4 && (0..count).all(integer);
            } else {
                return false;
            }
        }
        true
    }

    /// # Safety
    /// A live integer.
    unsafe fn integer(&mut self, object: *mut PyObject) -> bool {
        // SAFETY: an integer; one that does not fit sets an exception, cleared here.
        let value = unsafe { ffi::PyLong_AsLongLong(object) };
        // SAFETY: as above.
        if value == -1 && !unsafe { ffi::PyErr_Occurred() }.is_null() {
            // SAFETY: as above.
            unsafe { ffi::PyErr_Clear() };
            return false;
        }
        self.push(3);
        self.push(value as u64);
        true
    }

    /// # Safety
    /// A live string.
    unsafe fn text(&mut self, object: *mut PyObject) -> bool {
        let mut size = 0;
        // SAFETY: a string; its bytes live as long as it does.
        let bytes = unsafe { ffi::PyUnicode_AsUTF8AndSize(object, &mut size) };
        if bytes.is_null() || size > 16 {
            // SAFETY: clears the exception of a string that is no UTF-8, if any.
            unsafe { ffi::PyErr_Clear() };
            return false;
        }
        let mut padded = [0u8; 16];
        // SAFETY: `size` bytes are there, at most 16.
        unsafe { ptr::copy_nonoverlapping(bytes.cast::<u8>(), padded.as_mut_ptr(), size as usize) };
        self.push(4 | (size as u64) << 8);
        padded.chunks_exact(8).for_each(|c| self.push(u64::from_le_bytes(c.try_into().unwrap_or_default())));
        true
    }
}
