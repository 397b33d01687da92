//! The words of a call: all that can influence what is decided for it.

use std::mem::MaybeUninit;
use std::ptr;

use pyo3::ffi::{self, PyObject};

use layerzero::abi::{Device, RawTensor};

use crate::exchange::{Borrow, kind};
use crate::inside::Seen;
use crate::torch::Torch;

/// What takes the words of a call one by one, and may refuse one: nobody describes the rest of the call then.
pub trait Take {
    /// Takes a word.
    fn word(&mut self, word: u64) -> bool;
    /// Takes several.
    fn all(&mut self, values: &[i64]) -> bool;
    /// Takes what a tensor is that cannot be read in place, by the exchange API; gives its CUDA device, if it is on one.
    /// `None` when it cannot be asked.
    ///
    /// # Safety
    /// A live, plain tensor.
    unsafe fn ask(
        &mut self,
        torch: &Torch,
        borrow: Borrow,
        object: *mut PyObject,
        wants_grad: bool,
    ) -> Option<Option<i32>>;
    /// Whether a graph is being captured on a CUDA device; `None` when that cannot be asked.
    fn capturing(&self, torch: &Torch, device: i32) -> Option<bool>;
    /// Which of torch's implementations of attention are allowed, and in which order; `None` when that cannot be asked.
    fn sdpa(&self, torch: &Torch) -> Option<u64>;
}

/// All that can influence a decision, on the stack.
pub struct Words {
    words: [MaybeUninit<u64>; MAX_WORDS],
    len: usize,
}

/// Most words a call is described by; longer ones are not remembered.
const MAX_WORDS: usize = 160;

impl Words {
    /// A place for the first word, which is known last.
    pub fn new() -> Words {
        let mut words = [const { MaybeUninit::uninit() }; MAX_WORDS];
        words[0].write(0);
        Words { words, len: 1 }
    }

    /// The same with the first word.
    pub fn headed(&mut self, head: u64) -> &mut Words {
        self.words[0].write(head);
        self
    }

    /// All of them.
    pub fn as_slice(&self) -> &[u64] {
        // SAFETY: the first `len` of them were written.
        unsafe { self.words[..self.len].assume_init_ref() }
    }
}

impl Take for Words {
    #[inline]
    fn word(&mut self, word: u64) -> bool {
        let Some(place) = self.words.get_mut(self.len) else { return false };
        place.write(word);
        self.len += 1;
        true
    }

    #[inline]
    fn all(&mut self, values: &[i64]) -> bool {
        let Some(places) = self.words.get_mut(self.len..self.len + values.len()) else { return false };
        places.iter_mut().zip(values).for_each(|(place, &value)| {
            place.write(value as u64);
        });
        self.len += values.len();
        true
    }

    unsafe fn ask(
        &mut self,
        torch: &Torch,
        borrow: Borrow,
        object: *mut PyObject,
        wants_grad: bool,
    ) -> Option<Option<i32>> {
        let mut tensor = RawTensor::ABSENT;
        // SAFETY: a live tensor, and a struct to fill, which is read while the tensor is alive. A failed call has set an
        // exception.
        let taken = unsafe {
            if borrow(object, &mut tensor) != 0 {
                ffi::PyErr_Clear();
                return None;
            }
            if let Some(fields) = &torch.fields {
                fields.learn(object, &tensor);
            }
            lent(self, &tensor, wants_grad)
        };
        taken.then(|| (tensor.device.kind == Device::CUDA).then_some(tensor.device.id))
    }

    #[inline]
    fn capturing(&self, torch: &Torch, device: i32) -> Option<bool> {
        Some(torch.is_capturing(device))
    }

    fn sdpa(&self, torch: &Torch) -> Option<u64> {
        torch.sdpa_word()
    }
}

/// The words of a call made before, which another is compared with as it is described: nothing is written down. They lie in
/// memory that a call made meanwhile may change, so that nothing is asked that could run Python code.
pub struct Expected<'a> {
    words: &'a [u64],
    at: usize,
}

impl<'a> Expected<'a> {
    /// To be compared with these; the first of them is compared by [`Expected::is_complete`].
    pub fn new(words: &'a [u64]) -> Expected<'a> {
        Expected { words, at: 1 }
    }

    /// Whether all words were met, given the first.
    #[inline]
    pub fn is_complete(&self, head: u64) -> bool {
        self.at == self.words.len() && self.words[0] == head
    }
}

impl Take for Expected<'_> {
    #[inline]
    fn word(&mut self, word: u64) -> bool {
        let same = self.words.get(self.at) == Some(&word);
        self.at += 1;
        same
    }

    #[inline]
    fn all(&mut self, values: &[i64]) -> bool {
        let Some(expected) = self.words.get(self.at..self.at + values.len()) else { return false };
        self.at += values.len();
        // A loop: they are few, and comparing them as bytes is a call.
        expected.iter().zip(values).fold(0, |differ, (&a, &b)| differ | (a ^ b as u64)) == 0
    }

    unsafe fn ask(&mut self, _: &Torch, _: Borrow, _: *mut PyObject, _: bool) -> Option<Option<i32>> {
        None
    }

    #[inline]
    fn capturing(&self, torch: &Torch, device: i32) -> Option<bool> {
        torch.sees_capture(device)
    }

    fn sdpa(&self, _: &Torch) -> Option<u64> {
        None
    }
}

/// A tensor that was read in place.
#[inline]
pub fn seen(words: &mut impl Take, tensor: &Seen<'_>, wants_grad: bool) -> bool {
    let header = tensor.kind()
        | u64::from(tensor.start.is_multiple_of(16)) << 1
        | u64::from(wants_grad) << 2
        | (tensor.sizes.len() as u64) << 24;
    words.word(header) && words.all(tensor.sizes) && words.all(tensor.strides)
}

/// A tensor that the exchange API lent.
///
/// # Safety
/// The struct was filled and its tensor is alive.
unsafe fn lent(words: &mut impl Take, tensor: &RawTensor, wants_grad: bool) -> bool {
    let aligned = (tensor.start() as usize).is_multiple_of(16);
    let header = kind(tensor)
        | u64::from(aligned) << 1
        | u64::from(wants_grad) << 2
        | u64::from(tensor.strides.is_null()) << 3
        | (tensor.rank as u64 & 0xff) << 24;
    // SAFETY: the contract above.
    let (shape, strides) = unsafe { (tensor.shape(), tensor.strides()) };
    words.word(header) && words.all(shape) && words.all(strides.unwrap_or(&[]))
}

/// A truth value, number, short string, or pair of integers. `false` for anything else.
///
/// # Safety
/// A live object.
#[inline]
pub unsafe fn scalar(words: &mut impl Take, object: *mut PyObject) -> bool {
    // SAFETY: each check reads the object's type, each reading follows its check.
    unsafe {
        if object == ffi::Py_True() || object == ffi::Py_False() {
            words.word(1 | u64::from(object == ffi::Py_True()) << 8)
        } else if ffi::PyFloat_CheckExact(object) != 0 {
            words.word(2) && words.word(ffi::PyFloat_AsDouble(object).to_bits())
        } else if ffi::PyLong_CheckExact(object) != 0 {
            integer(words, object)
        } else if ffi::PyUnicode_CheckExact(object) != 0 {
            text(words, object)
        } else if ffi::PyTuple_CheckExact(object) != 0 {
            let count = ffi::PyTuple_Size(object);
            let item = |i| ffi::PyTuple_GetItem(object, i);
            count <= 4
                && words.word(5 | (count as u64) << 8)
                && (0..count).all(|i| ffi::PyLong_CheckExact(item(i)) != 0 && integer(words, item(i)))
        } else {
            false
        }
    }
}

/// One size: an integer, or a tuple or list of one. `false` for anything else.
///
/// # Safety
/// A live object.
#[inline]
pub unsafe fn one_size(words: &mut impl Take, object: *mut PyObject) -> bool {
    // SAFETY: each reading follows its check; items are borrowed from their container.
    unsafe {
        let size = if ffi::PyTuple_Check(object) != 0 && ffi::PyTuple_Size(object) == 1 {
            ffi::PyTuple_GetItem(object, 0)
        } else if ffi::PyList_CheckExact(object) != 0 && ffi::PyList_Size(object) == 1 {
            ffi::PyList_GetItem(object, 0)
        } else {
            object
        };
        ffi::PyLong_CheckExact(size) != 0 && integer(words, size)
    }
}

/// # Safety
/// A live integer.
unsafe fn integer(words: &mut impl Take, object: *mut PyObject) -> bool {
    // SAFETY: an integer; one that does not fit sets an exception, cleared here.
    let value = unsafe { ffi::PyLong_AsLongLong(object) };
    // SAFETY: as above.
    if value == -1 && !unsafe { ffi::PyErr_Occurred() }.is_null() {
        // SAFETY: as above.
        unsafe { ffi::PyErr_Clear() };
        return false;
    }
    words.word(3) && words.word(value as u64)
}

/// # Safety
/// A live string.
unsafe fn text(words: &mut impl Take, object: *mut PyObject) -> bool {
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
    let halves = padded.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap_or_default()));
    words.word(4 | (size as u64) << 8) && halves.into_iter().all(|half| words.word(half))
}
