//! Tensors a call writes to in place: each element must be its own, and nobody else's of the call.
//!
//! Checked before anything is written. What decides by strides and gradients is checked when a call is first made, since
//! those describe it; where tensors lie is checked on every call.

use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;

use crate::error;
use crate::front::{Front, Slots};
use crate::slow::given;
use crate::tensors::Meta;
use crate::torch::Torch;
use layerzero::abi::RawTensor;
use layerzero::model::row_major;

/// Most dimensions of a tensor that are looked at; with more, tensors whose ranges meet are taken to share memory.
const MAX_DIMS: usize = 8;

/// Where the elements of a tensor lie.
struct Place {
    /// Of its first element, in bytes.
    start: i64,
    itemsize: i64,
    /// Strides in elements and sizes, the largest stride first. Dimensions of one element are left out.
    dims: [(i64, i64); MAX_DIMS],
    count: usize,
    is_empty: bool,
    /// Whether every dimension was looked at, and none runs backwards.
    is_known: bool,
}

impl Place {
    fn new(start: i64, itemsize: i64, sizes: &[i64], strides: &[i64]) -> Place {
        let mut place = Place {
            start,
            itemsize,
            dims: [(0, 1); MAX_DIMS],
            count: 0,
            is_empty: sizes.contains(&0),
            is_known: sizes.len() <= MAX_DIMS && strides.iter().all(|&s| s >= 0),
        };
        if place.is_known {
            for (&size, &stride) in sizes.iter().zip(strides).filter(|(size, _)| **size > 1) {
                place.dims[place.count] = (stride, size);
                place.count += 1;
            }
            place.dims[..place.count].sort_unstable_by(|a, b| b.cmp(a));
        }
        place
    }

    /// # Safety
    /// A live tensor, and this thread holds the interpreter.
    unsafe fn read(torch: &Torch, object: *mut PyObject) -> Option<Place> {
        let mut tensor = RawTensor::ABSENT;
        // SAFETY: a live tensor, and a struct to fill; what it points to lives as long as the tensor.
        unsafe {
            if torch.borrow?(object, &mut tensor) != 0 {
                ffi::PyErr_Clear();
                return None;
            }
            let itemsize = i64::from(tensor.element.bits).div_euclid(8).max(1);
            // Tensors without memory of their own (functional and fake ones) share nothing by it.
            if tensor.start() as usize == 0 && !tensor.shape().contains(&0) {
                return None;
            }
            Some(Place::new(tensor.start() as i64, itemsize, tensor.shape(), tensor.strides()?))
        }
    }

    fn dims(&self) -> &[(i64, i64)] {
        &self.dims[..self.count]
    }

    /// How many elements lie between the first and the last.
    fn reach(dims: &[(i64, i64)]) -> i64 {
        dims.iter().map(|(stride, size)| stride * (size - 1)).sum()
    }

    /// Whether two indices may name one element. Certain where each stride steps over all that the smaller ones reach,
    /// as it does in every tensor torch makes but by `expand` and `as_strided`.
    fn may_overlap_itself(&self) -> bool {
        let dims = self.dims();
        !self.is_empty && (0..dims.len()).any(|i| dims[i].0 <= Place::reach(&dims[i + 1..]))
    }

    /// Whether two tensors may have an element in common. Exact for tensors of the same sizes and strides (the halves of
    /// one cache, interleaved); others are taken to share memory if their ranges meet.
    fn may_share(&self, other: &Place) -> bool {
        if self.is_empty || other.is_empty {
            return false;
        }
        let end = |place: &Place| place.start + (Place::reach(place.dims()) + 1) * place.itemsize;
        if self.is_known && other.is_known && (end(self) <= other.start || end(other) <= self.start) {
            return false;
        }
        let apart = other.start - self.start;
        let alike = self.is_known && other.is_known && self.dims() == other.dims() && self.itemsize == other.itemsize;
        !alike || self.may_overlap_itself() || apart % self.itemsize != 0 || meets(apart / self.itemsize, self.dims())
    }
}

/// Whether a distance is a sum of steps, each fewer than its dimension has elements: then a tensor and the same one that
/// much further on have an element in common. Each stride steps over what the smaller ones reach.
fn meets(distance: i64, dims: &[(i64, i64)]) -> bool {
    let Some(&(stride, size)) = dims.first() else { return distance == 0 };
    let steps = distance.div_euclid(stride);
    let fits = |steps: i64| steps.abs() < size && meets(distance - steps * stride, &dims[1..]);
    fits(steps) || fits(steps + 1)
}

/// Whether two tensors in host memory may have an element in common.
pub fn may_share(one: &Meta, other: &Meta) -> bool {
    let place = |meta: &Meta| {
        let itemsize = i64::from(meta.dtype.bits()).div_euclid(8).max(1);
        let strides = meta.strides.clone().unwrap_or_else(|| row_major(&meta.shape));
        Place::new(meta.data as i64, itemsize, &meta.shape, &strides)
    };
    place(one).may_share(&place(other))
}

/// Whether nothing a call writes to lies where another of its tensors does. `false` also where that cannot be told.
///
/// # Safety
/// The slots hold live objects or null, and this thread holds the interpreter.
pub unsafe fn apart(front: &Front, slots: &Slots) -> bool {
    let Some(torch) = Torch::known() else { return false };
    // SAFETY: the contract above; none is a static object.
    let present = |at: usize| !slots[at].is_null() && slots[at] != unsafe { ffi::Py_None() };
    // SAFETY: passed on.
    let place = |at: usize| unsafe { Place::read(torch, slots[at]) };
    front.updated.iter().filter(|&&at| present(at)).all(|&at| {
        let Some(own) = place(at) else { return false };
        let mut others = front.tensors.iter().filter(|&&other| other != at && present(other));
        others.all(|&other| place(other).is_some_and(|other| !own.may_share(&other)))
    })
}

/// Tells torch that tensors were written to: a gradient that was to be computed from what they held is then refused.
pub fn count<'py>(py: Python<'py>, tensors: impl ExactSizeIterator<Item = Bound<'py, PyAny>>) -> PyResult<()> {
    static INCREMENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let increment = INCREMENT.import(py, "torch.autograd.graph", "increment_version")?;
    increment.call1((PyList::new(py, tensors)?,)).map(|_| ())
}

/// Refuses a call that writes to a tensor it cannot write to, with why.
pub fn check(py: Python<'_>, front: &Front, slots: &Slots) -> PyResult<()> {
    let Some(torch) = Torch::known().filter(|_| !front.updated.is_empty()) else { return Ok(()) };
    let name = |at: usize| front.signature.arguments[at].name;
    let refuse = |code: &str, text: String, hint: &str| {
        Err(error::invalid(py, code, &format!("{}: {text}", front.name()), hint))
    };
    // SAFETY: slots hold live objects.
    let place = |at: usize| given(py, slots, at).and_then(|object| unsafe { Place::read(torch, object.as_ptr()) });
    for &at in &front.updated {
        let Some(object) = given(py, slots, at).filter(|object| torch.is_tensor(object)) else { continue };
        if torch.surroundings().grad && object.getattr("requires_grad")?.is_truthy()? {
            let text = format!("'{}' requires gradients, which do not flow through an update in place", name(at));
            return refuse("REQUIRES_GRAD", text, "pass it detached, or make the call under torch.no_grad()");
        }
        let Some(own) = place(at) else { continue };
        if own.may_overlap_itself() {
            let text = format!("'{}' has elements that share memory: it was expanded, or made by as_strided", name(at));
            return refuse("SHARED_MEMORY", text, "pass a tensor of its own memory, such as a clone()");
        }
        for &other in front.tensors.iter().filter(|&&other| other != at) {
            if place(other).is_some_and(|other| own.may_share(&other)) {
                let text = format!("'{}' is updated and shares memory with '{}'", name(at), name(other));
                return refuse("SHARED_MEMORY", text, "pass tensors of their own memory, such as a clone() of one");
            }
        }
    }
    Ok(())
}

/// Refuses an `out` that cannot be written to as a whole, before a kernel runs.
pub fn check_out(py: Python<'_>, front: &Front, out: &Bound<'_, PyAny>) -> PyResult<()> {
    let Some(torch) = Torch::known().filter(|torch| torch.is_tensor(out)) else { return Ok(()) };
    let refuse =
        |text: &str, hint: &str| Err(error::invalid(py, "WRONG_OUT", &format!("{}: 'out' {text}", front.name()), hint));
    let yes = |name: &str| out.getattr(name).and_then(|v| v.is_truthy());
    if torch.surroundings().grad && yes("requires_grad")? && yes("is_leaf")? {
        return refuse("is a leaf that requires gradients", "pass it detached, or make the call under torch.no_grad()");
    }
    // SAFETY: a live tensor.
    if unsafe { Place::read(torch, out.as_ptr()) }.is_some_and(|place| place.may_overlap_itself()) {
        let text = "has elements that share memory: it was expanded, or made by as_strided";
        return refuse(text, "pass a tensor of its own memory, such as a clone()");
    }
    Ok(())
}
