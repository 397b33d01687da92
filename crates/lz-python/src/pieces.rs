//! Calls whose batch no kernel can launch as a whole: the function is called for each piece, and the results are joined.

use layerzero::model::Special;
use layerzero::{Pieces, Warning};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::engine::engine;
use crate::front::{self, Front, Slots};
use crate::slow::given;

/// Why a call of this function cannot be made in pieces from here, although its operation could.
pub fn refusal(py: Python<'_>, front: &Front, slots: &Slots) -> Option<&'static str> {
    let out = front.special(Special::Out).and_then(|at| given(py, slots, at));
    out.map(|_| "its result is wanted in a tensor of the caller's ('out')")
}

/// Makes a call in pieces, with one warning.
pub fn make<'py>(
    py: Python<'py>,
    front: &'static Front,
    op: &'static str,
    slots: &Slots,
    pieces: &Pieces,
) -> PyResult<Bound<'py, PyAny>> {
    let (count, size, why) = (pieces.count, pieces.cut.size, pieces.why.clone());
    engine().warn(&Warning::SplitBatch { op, pieces: count, size, why });
    let place = |name: &str| front.signature.arguments.iter().position(|argument| argument.name == name);
    let mut results: Vec<Bound<'py, PyAny>> = Vec::with_capacity(count as usize);
    for (start, rows) in pieces.bounds() {
        let mut own = *slots;
        let mut kept = Vec::with_capacity(pieces.cut.inputs.len());
        for (name, axis) in &pieces.cut.inputs {
            let Some(at) = place(name) else { continue };
            let Some(tensor) = given(py, slots, at) else { continue };
            let part = tensor.call_method1("narrow", (*axis, start, rows))?;
            own[at] = part.as_ptr();
            kept.push(part);
        }
        // SAFETY: the slots hold the caller's objects and those kept above, and this thread holds the interpreter; the
        // result is a new reference, or null with an exception set.
        results.push(unsafe { Bound::from_owned_ptr_or_err(py, front::run(front, &own, false)) }?);
        drop(kept);
    }
    let torch = py.import("torch")?;
    let join = |parts: Vec<Bound<'py, PyAny>>, axis: usize| torch.call_method1("cat", (PyList::new(py, parts)?, axis));
    match &pieces.cut.outputs[..] {
        [axis] => join(results, *axis),
        axes => {
            let part = |i: usize| results.iter().map(|result| result.get_item(i)).collect::<PyResult<Vec<_>>>();
            let joined = axes.iter().enumerate().map(|(i, axis)| join(part(i)?, *axis));
            Ok(PyTuple::new(py, joined.collect::<PyResult<Vec<_>>>()?)?.into_any())
        }
    }
}
