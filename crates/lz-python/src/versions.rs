//! Whether a kernel has written to tensors it may only read.
//!
//! torch counts the in-place changes of a tensor. A kernel that failed and has changed one left the call without its data:
//! no other kernel could give the right answer.

use pyo3::intern;
use pyo3::prelude::*;

use crate::front::{Front, Slots};
use crate::slow::given;

/// The counts of a call's tensors, with their places. Tensors that are not counted (inference tensors, arrays) are left out.
pub struct Versions(Vec<(usize, i64)>);

impl Versions {
    /// Reads them. Nothing is read for a call that updates tensors: what it wrote is never tried with another kernel.
    pub fn read(py: Python<'_>, front: &Front, slots: &Slots) -> Versions {
        if !front.updated.is_empty() {
            return Versions(Vec::new());
        }
        Versions(front.tensors.iter().filter_map(|&at| Some((at, version(py, slots, at)?))).collect())
    }

    /// The names of the tensors that were changed since.
    pub fn changed(&self, py: Python<'_>, front: &Front, slots: &Slots) -> Vec<&'static str> {
        let changed = self.0.iter().filter(|(at, before)| version(py, slots, *at).is_some_and(|now| now != *before));
        changed.map(|(at, _)| front.signature.arguments[*at].name).collect()
    }
}

fn version(py: Python<'_>, slots: &Slots, at: usize) -> Option<i64> {
    given(py, slots, at)?.getattr(intern!(py, "_version")).ok()?.extract().ok()
}
