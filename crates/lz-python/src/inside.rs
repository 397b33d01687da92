//! A tensor's fields read where torch keeps them: a few loads instead of a call through three libraries.
//!
//! Nothing here is assumed. Where the fields are is found by experiment on tensors whose every field is known
//! ([`Fields::find`]), and for each kind of tensor (torch's set of dispatch keys says which kind one is) the first is read
//! both ways: only a kind for which DLPack's exchange API tells the same is read in place from then on. A torch that
//! keeps them otherwise is read through the exchange API alone.

use std::sync::atomic::{AtomicU64, Ordering};

use layerzero::abi::{Device, RawTensor};
use libloading::os::unix::{Library, RTLD_LAZY};
use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::torch::NO_LOAD;

/// Where a Python tensor holds the address of the C++ one: right behind the object's header.
pub const IMPL: usize = size_of::<pyo3::ffi::PyObject>();
/// How much of the C++ tensor is searched. It has been larger than this in every version so far.
const SEARCHED: usize = 192;
/// How much of its storage is searched.
const STORAGE_SEARCHED: usize = 64;
/// Most dimensions that are kept inside the tensor itself; with more they are elsewhere.
const INLINE_DIMS: usize = 5;
/// Dtypes whose element size is known.
const DTYPES: usize = 64;
/// Kinds of tensors that can be known at a time.
const KINDS: usize = 8;
const WORD: usize = size_of::<u64>();

/// Where torch keeps the fields of a tensor, as offsets in bytes.
pub struct Fields {
    sizes: usize,
    offset: usize,
    dtype: usize,
    device: usize,
    keys: usize,
    data: usize,
    storage: usize,
    /// Bytes of an element by dtype; zero where it is not known.
    itemsize: [u8; DTYPES],
    requires_grad: unsafe extern "C" fn(*const u8) -> bool,
    /// The dispatch keys of tensors whose memory holds the negative, or the conjugate, of what they are.
    negative: u64,
    /// Sets of dispatch keys that were read both ways and agreed; zero where none is.
    kinds: [AtomicU64; KINDS],
}

/// A tensor, read in place.
pub struct Seen<'a> {
    pub sizes: &'a [i64],
    pub strides: &'a [i64],
    /// torch's number for the dtype.
    pub dtype: u16,
    /// torch's number for the kind of device, and which one.
    pub device: (i8, i8),
    /// Its first element.
    pub start: usize,
}

impl Seen<'_> {
    /// The CUDA device it lies on, if it does.
    #[inline]
    pub fn cuda(&self) -> Option<i32> {
        (self.device.0 == TORCH_CUDA).then_some(i32::from(self.device.1))
    }

    /// Its dtype and device, in torch's numbers.
    #[inline]
    pub fn kind(&self) -> u64 {
        1 | u64::from(self.dtype) << 8 | u64::from(self.device.0 as u8) << 32 | u64::from(self.device.1 as u8) << 40
    }
}

/// A tensor all of whose fields are known, to search by. Made by `torch_state.specimens`.
#[derive(FromPyObject)]
struct Specimen {
    tensor: Py<PyAny>,
    address: usize,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    dtype: u16,
    itemsize: u8,
    on_host: bool,
    keys: u64,
    /// The address of its C++ storage.
    holder: usize,
    /// The address of its memory.
    storage: usize,
    requires_grad: bool,
}

impl Specimen {
    /// The bytes of its C++ tensor.
    fn bytes<'a>(&self, py: Python<'a>) -> Bound<'a, PyBytes> {
        // SAFETY: the address is that of a live C++ tensor, which is at least this large.
        PyBytes::new(py, unsafe { std::slice::from_raw_parts(self.address as *const u8, SEARCHED) })
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; WORD];
    word.copy_from_slice(&bytes[at..at + WORD]);
    u64::from_le_bytes(word)
}

/// The first place at which every specimen shows what it should.
fn search(range: std::ops::Range<usize>, step: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    range.step_by(step).find(|&at| fits(at))
}

impl Fields {
    /// Finds the fields, or `None` where torch does not keep them as this file can read.
    pub fn find(py: Python<'_>) -> PyResult<Option<Fields>> {
        let made = py.import("layerzero.torch_state")?.call_method0("specimens")?;
        let specimens: Vec<Specimen> = made.extract()?;
        let Some(requires_grad) = requires_grad_symbol() else { return Ok(None) };
        let negative: u64 = py.import("layerzero.torch_state")?.call_method0("negative_keys")?.extract()?;
        let bytes: Vec<Bound<'_, PyBytes>> = specimens.iter().map(|s| s.bytes(py)).collect();
        let all = || specimens.iter().zip(bytes.iter().map(|b| b.as_bytes()));
        // SAFETY: live tensors.
        let held = |s: &Specimen| unsafe { inner(s.tensor.as_ptr()) } as usize;
        if specimens.is_empty() || !specimens.iter().all(|s| held(s) == s.address) {
            return Ok(None);
        }
        let words_at = |b: &[u8], at: usize, values: &[i64]| {
            values.iter().enumerate().all(|(i, &v)| word(b, at + i * WORD) == v as u64)
        };
        let span = WORD * (1 + 2 * INLINE_DIMS);
        let sizes_fit = |at: usize| {
            all().all(|(s, b)| {
                word(b, at) == s.sizes.len() as u64
                    && words_at(b, at + WORD, &s.sizes)
                    && words_at(b, at + WORD * (1 + INLINE_DIMS), &s.strides)
            })
        };
        let found = || {
            let sizes = search(WORD..SEARCHED - span, WORD, sizes_fit)?;
            let after = sizes + span;
            let offset = search(after..SEARCHED - WORD, WORD, |at| all().all(|(s, b)| word(b, at) == s.offset as u64))?;
            let dtype = search(after..SEARCHED - 2, 2, |at| {
                all().all(|(s, b)| u16::from_le_bytes([b[at], b[at + 1]]) == s.dtype)
            })?;
            // Kind, number, and that there is one.
            let device = search(dtype + 2..SEARCHED - 3, 1, |at| {
                all().all(|(s, b)| (b[at] == 0) == s.on_host && b[at + 1] == 0xff && b[at + 2] == 1)
            })?;
            let keys = search(after..SEARCHED - WORD, WORD, |at| all().all(|(s, b)| word(b, at) == s.keys))?;
            let (data, storage) = find_storage(&specimens, &bytes)?;
            let mut itemsize = [0; DTYPES];
            specimens.iter().for_each(|s| itemsize[s.dtype as usize % DTYPES] = s.itemsize);
            let kinds = [const { AtomicU64::new(0) }; KINDS];
            Some(Fields { sizes, offset, dtype, device, keys, data, storage, itemsize, requires_grad, negative, kinds })
        };
        let Some(fields) = found() else { return Ok(None) };
        // SAFETY: the specimens are live tensors.
        let told = |s: &Specimen| unsafe { fields.wants_grad(s.tensor.as_ptr()) == s.requires_grad };
        Ok(specimens.iter().all(told).then_some(fields))
    }

    /// Reads a tensor, if it is of a kind that is known to be read right.
    ///
    /// # Safety
    /// `tensor` is a live `torch.Tensor` or `Parameter`, no subclass, and nobody resizes it while the result is in use.
    #[inline]
    pub unsafe fn read<'a>(&self, tensor: *mut PyObject) -> Option<Seen<'a>> {
        // SAFETY: passed on; a tensor of a known kind has storage.
        unsafe {
            let inner = inner(tensor);
            let keys = self.keys(inner);
            // Zero marks a free place, so that a tensor without keys is of no known kind.
            if keys == 0 || !self.kinds.iter().any(|known| known.load(Ordering::Relaxed) == keys) {
                return None;
            }
            self.look(inner)
        }
    }

    /// # Safety
    /// The address of a live C++ tensor.
    #[inline]
    unsafe fn keys(&self, inner: *const u8) -> u64 {
        // SAFETY: the keys of every tensor lie where every specimen had them.
        unsafe { inner.add(self.keys).cast::<u64>().read() }
    }

    /// # Safety
    /// The address of a live C++ tensor with sizes and strides, of a kind that has storage, or none at all.
    #[inline]
    unsafe fn look<'a>(&self, inner: *const u8) -> Option<Seen<'a>> {
        // SAFETY: the fields of a live tensor lie where every specimen had them.
        unsafe {
            let dims = inner.add(self.sizes).cast::<usize>().read();
            if dims > INLINE_DIMS {
                return None;
            }
            let values = inner.add(self.sizes + WORD).cast::<i64>();
            let dtype = inner.add(self.dtype).cast::<u16>().read_unaligned();
            let itemsize = *self.itemsize.get(dtype as usize)?;
            let storage = inner.add(self.data).cast::<*const u8>().read();
            if itemsize == 0 || storage.is_null() {
                return None;
            }
            // An array: unlike a tuple's, its layout is specified.
            let [kind, number] = inner.add(self.device).cast::<[i8; 2]>().read_unaligned();
            let start = storage.add(self.storage).cast::<usize>().read();
            let offset = inner.add(self.offset).cast::<i64>().read();
            Some(Seen {
                sizes: std::slice::from_raw_parts(values, dims),
                strides: std::slice::from_raw_parts(values.add(INLINE_DIMS), dims),
                dtype,
                device: (kind, number),
                start: start.wrapping_add_signed((offset * i64::from(itemsize)) as isize),
            })
        }
    }

    /// Compares with what the exchange API says of the same tensor: its kind is read in place from now on when both
    /// agree.
    ///
    /// # Safety
    /// As [`Fields::read`], and `told` was filled for this very tensor.
    #[cold]
    pub unsafe fn learn(&self, tensor: *mut PyObject, told: &RawTensor) {
        // SAFETY: passed on; what the exchange API lends is dense.
        let (seen, keys) = unsafe { (self.look(inner(tensor)), self.keys(inner(tensor))) };
        let Some(seen) = seen else { return };
        // SAFETY: `told` was filled and its tensor is alive.
        let (shape, strides) = unsafe { (told.shape(), told.strides().unwrap_or(&[])) };
        let device = match told.device.kind {
            Device::CUDA => seen.device == (TORCH_CUDA, told.device.id as i8),
            _ => told.device.is_host() && seen.device.0 == TORCH_CPU,
        };
        let itemsize = self.itemsize[seen.dtype as usize];
        let empty = shape.contains(&0);
        let agrees = device
            && seen.sizes == shape
            && (seen.strides == strides || empty)
            && (seen.start == told.start() as usize || empty)
            && u16::from(itemsize) * 8 == u16::from(told.element.bits) * told.element.lanes;
        // A kind without keys would be taken for a free place. Memory that holds the negative of what a tensor is must not be
        // read as it is.
        if agrees && !empty && keys != 0 && keys & self.negative == 0 {
            let free = self.kinds.iter().find(|kind| kind.load(Ordering::Relaxed) == 0);
            free.into_iter().for_each(|kind| kind.store(keys, Ordering::Relaxed));
        }
    }

    /// Whether a gradient is wanted for a tensor.
    ///
    /// # Safety
    /// `tensor` is a live tensor.
    #[inline]
    pub unsafe fn wants_grad(&self, tensor: *mut PyObject) -> bool {
        // SAFETY: a live C++ tensor; its method only reads.
        unsafe { (self.requires_grad)(inner(tensor)) }
    }
}

/// The address of the C++ tensor.
///
/// # Safety
/// `tensor` is a live tensor.
#[inline]
unsafe fn inner(tensor: *mut PyObject) -> *const u8 {
    // SAFETY: it lies behind the object's header.
    unsafe { tensor.cast::<u8>().add(IMPL).cast::<*const u8>().read() }
}

/// torch's numbers for the kinds of devices that are read in place.
const TORCH_CPU: i8 = 0;
const TORCH_CUDA: i8 = 1;

/// Where a tensor holds its storage, and that the address of its memory.
fn find_storage(specimens: &[Specimen], bytes: &[Bound<'_, PyBytes>]) -> Option<(usize, usize)> {
    let host: Vec<(&Specimen, &[u8])> =
        specimens.iter().zip(bytes.iter().map(|b| b.as_bytes())).filter(|(s, _)| s.on_host).collect();
    // Right behind the virtual table and the reference count of each.
    let data = 2 * WORD;
    // Only what torch itself says is the address of a storage is followed.
    let is_held = |(s, b): &(&Specimen, &[u8])| {
        let held = word(b, data) as usize;
        held == s.holder && held != 0 && (held as *const usize).is_aligned()
    };
    if !host.iter().all(is_held) {
        return None;
    }
    let storage = search(data..STORAGE_SEARCHED, WORD, |at| {
        // SAFETY: the address of a live C++ storage, which is at least this large; both it and the offset are aligned.
        host.iter().all(|(s, _)| unsafe { (s.holder as *const u8).add(at).cast::<usize>().read() } == s.storage)
    })?;
    Some((data, storage))
}

fn requires_grad_symbol() -> Option<unsafe extern "C" fn(*const u8) -> bool> {
    // SAFETY: with RTLD_NOLOAD nothing is loaded; torch's libraries are never unloaded. The signature is that of the
    // C++ method of this name, which takes the object and returns a truth value.
    unsafe {
        let library = Library::open(Some("libc10.so"), RTLD_LAZY | NO_LOAD).ok()?;
        let found = *library.get(b"_ZNK3c1010TensorImpl13requires_gradEv").ok()?;
        std::mem::forget(library);
        Some(found)
    }
}
