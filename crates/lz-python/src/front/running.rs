//! Runs a call straight, by the route that is remembered for its words and with nothing allocated; every other call (a
//! first one, a tensor subclass, autocast, tracing, numpy arrays, a kernel that fails) goes to [`crate::slow`].

use std::ptr;

use layerzero::OverlayId;
use pyo3::ffi::PyObject;
use pyo3::prelude::*;

use super::{Front, Slots};
use crate::engine::engine;
use crate::route::Route;
use crate::torch::Torch;
use crate::words::Words;
use crate::{context, finish, memory, slow, watched};

/// Runs a call whose arguments are in order. `outside`: what surrounds it counts; the torch operators, which are called
/// from inside, have seen to that.
///
/// # Safety
/// The slots hold live objects or null, and this thread holds the interpreter.
#[inline]
pub unsafe fn run(front: &'static Front, slots: &Slots, outside: bool) -> *mut PyObject {
    let (version, overlay) = (engine().version(), context::current());
    // SAFETY: the contract above.
    unsafe {
        let Some(route) = front.again(slots, overlay, version).filter(Route::still_holds) else {
            return otherwise(front, slots, outside, overlay, version);
        };
        match straight(front, slots, &route) {
            Ok(result) => result,
            Err(tried) => slowly(front, slots, outside, overlay, None, Some(route), tried),
        }
    }
}

/// A call that is not the last one of its function again: one before that, or a new one.
///
/// # Safety
/// As [`run`].
#[inline(never)]
unsafe fn otherwise(
    front: &'static Front,
    slots: &Slots,
    outside: bool,
    overlay: OverlayId,
    version: u64,
) -> *mut PyObject {
    let mut words = Words::new();
    // SAFETY: the contract above.
    unsafe {
        let described = front.describe(slots, overlay, &mut words).map(|head| (version, &*words.headed(head)));
        let known = described.and_then(|(version, words)| memory::find(front.index, version, words));
        let known = known.filter(Route::still_holds);
        let tried = match known.as_ref().map(|route| straight(front, slots, route)) {
            Some(Ok(result)) => return result,
            Some(Err(tried)) => tried,
            None => None,
        };
        slowly(front, slots, outside, overlay, described, known, tried)
    }
}

/// A call that was tried: which step of its route, and what came back, a new reference or null with an exception set.
type Tried = Option<(usize, *mut PyObject)>;

/// Makes the call a route comes down to, if it can be made at once and its result looks as it should.
///
/// # Safety
/// The slots hold what the route was found by, and this thread holds the interpreter.
#[inline]
unsafe fn straight(front: &'static Front, slots: &Slots, route: &Route) -> Result<*mut PyObject, Tried> {
    let (at, ready) = route.straight(slots).ok_or(None)?;
    let call = route.steps[at].health.record_call();
    // SAFETY: the slots are live, and the route is held.
    let result = unsafe {
        match call & route.sampled == 0 || route.steps[at].watched {
            false => ready.call(slots).ok_or(None)?,
            true => watched::call(front, slots, route, at, ready, call & route.sampled == 0).ok_or(None)?,
        }
    };
    // SAFETY: a new reference or null; torch is known, or nothing would have been described.
    if !result.is_null() && Torch::known().is_some_and(|torch| unsafe { route.looks_right(torch, result) }) {
        let out = front.out_at().map(|at| slots[at]).filter(|&out| !out.is_null());
        // SAFETY: passed on.
        return unsafe { finish::finish(route.ending, result, out) };
    }
    Err(Some((at, result)))
}

/// The rest of a call that does not go straight; apart, so that the straight path is short and in one piece.
///
/// # Safety
/// As [`run`]; `tried` holds a new reference, or null with an exception set.
#[cold]
#[inline(never)]
unsafe fn slowly(
    front: &'static Front,
    slots: &Slots,
    outside: bool,
    overlay: OverlayId,
    words: Option<(u64, &Words)>,
    known: Option<Route>,
    tried: Tried,
) -> *mut PyObject {
    Python::attach(|py| {
        let tried = tried.map(|(at, result)| {
            // SAFETY: a new reference, or null with an exception set.
            (at, unsafe { Bound::from_owned_ptr_or_err(py, result) })
        });
        let request = slow::Request { front, slots, outside, overlay, words, known, tried };
        match request.serve(py) {
            Ok(result) => result.into_ptr(),
            Err(error) => {
                error.restore(py);
                ptr::null_mut()
            }
        }
    })
}
