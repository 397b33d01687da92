//! Straight calls that somebody looks at: one in so many is timed, and kernels on trial are compared.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use layerzero::resilience::rollout::{Compared, Outcome};
use pyo3::ffi::PyObject;
use pyo3::prelude::*;

use crate::engine::engine;
use crate::front::{Front, Slots};
use crate::route::{Comparison, Prepared, Route};
use crate::slow::{self, Job};
use crate::tensors::Purpose;

/// Makes a straight call and looks at it. The answer is the serving kernel's, whatever else happens.
///
/// # Safety
/// As [`Prepared::call`].
#[cold]
pub unsafe fn call(
    front: &'static Front,
    slots: &Slots,
    route: &Route,
    at: usize,
    prepared: Prepared,
) -> *mut PyObject {
    let comparison = route.comparison.as_ref().filter(|c| {
        // A candidate that serves is looked at whenever it does; one that runs beside, in its share of the calls.
        let call = c.calls.fetch_add(1, Ordering::Relaxed);
        (c.serves && at == 0 && call & route.sampled == 0) || (!c.serves && c.rollout.samples(call))
    });
    // What a call updates in place is gone when the other kernel would want it.
    let before = comparison.map(|_| Python::attach(|py| Before::new(py, front, slots)));
    let begun = Instant::now();
    // SAFETY: passed on.
    let result = unsafe { prepared.call() };
    let took = begun.elapsed();
    if result.is_null() {
        return result;
    }
    let step = &route.steps[at];
    route.latency.record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    engine().sampled(step, route.sampled + 1, took, route.latency.ratio());
    if let (Some(comparison), Some(Ok(before))) = (comparison, before) {
        Python::attach(|py| {
            // SAFETY: a live object the caller owns.
            let served = unsafe { Bound::from_borrowed_ptr(py, result) };
            before.compare(py, front, route, comparison, &served, took);
        });
    }
    result
}

/// Arguments for the other kernel: what is updated in place is a copy.
struct Before {
    given: Slots,
    slots: Slots,
    copies: Vec<(usize, Py<PyAny>)>,
}

impl Before {
    fn new(py: Python<'_>, front: &'static Front, slots: &Slots) -> PyResult<Before> {
        let mut own = *slots;
        let mut copies = Vec::new();
        for name in front.signature.updates() {
            let Some(at) = front.signature.arguments.iter().position(|a| a.name == name) else { continue };
            if let Some(tensor) = slow::given(py, slots, at) {
                let copy = tensor.call_method0("clone")?;
                own[at] = copy.as_ptr();
                copies.push((at, copy.unbind()));
            }
        }
        Ok(Before { given: *slots, slots: own, copies })
    }

    /// Runs the other kernel and compares. Nothing that happens here reaches the caller.
    fn compare(
        &self,
        py: Python<'_>,
        front: &'static Front,
        route: &Route,
        comparison: &Comparison,
        served: &Bound<'_, PyAny>,
        took: Duration,
    ) {
        let begun = Instant::now();
        let other = self.run(py, front, route, comparison);
        let other_took = begun.elapsed();
        let micros = |d: Duration| Some(d.as_secs_f64() * 1e6);
        let (serving_us, candidate_us) =
            if comparison.serves { (micros(other_took), micros(took)) } else { (micros(took), micros(other_took)) };
        let compared = other.and_then(|other| self.difference(py, route, served, &other));
        let outcome = match compared {
            Ok((error, within)) => {
                if !within {
                    engine().mismatched(&comparison.rollout, &route.steps[0].kernel.id, error);
                }
                let compared = match within {
                    true => Compared::Agrees { max_error: error },
                    false => Compared::Differs { max_error: error },
                };
                Outcome { ok: true, compared, serving_us, candidate_us }
            }
            // The kernel it is compared with failed: that says nothing of the candidate.
            Err(_) if comparison.serves => Outcome::OK,
            Err(_) => Outcome::FAILED,
        };
        engine().tried(&comparison.rollout, outcome);
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        front: &'static Front,
        route: &Route,
        comparison: &Comparison,
    ) -> PyResult<Bound<'py, PyAny>> {
        let arguments = slow::read(py, front, &self.slots, Purpose::Run)?;
        Job::new(py, front, &self.slots, &arguments, route)?.run(&comparison.other)
    }

    /// The largest difference, and whether it is within the operation's tolerance.
    fn difference(
        &self,
        py: Python<'_>,
        route: &Route,
        served: &Bound<'_, PyAny>,
        other: &Bound<'_, PyAny>,
    ) -> PyResult<(f64, bool)> {
        let tolerance = |dtype| route.op.schema().tolerances.of(dtype).rtol;
        let dtype = route.op.dtype(&route.query);
        let rtol = dtype.map_or(0.0, tolerance);
        let checks = py.import("layerzero.checks")?;
        if self.copies.is_empty() {
            return checks.call_method1("difference", (served, other, rtol))?.extract();
        }
        let mut worst = (0.0f64, true);
        for (at, copy) in &self.copies {
            let Some(tensor) = slow::given(py, &self.given, *at) else { continue };
            let (error, within): (f64, bool) = checks.call_method1("difference", (tensor, copy, rtol))?.extract()?;
            worst = (worst.0.max(error), worst.1 && within);
        }
        Ok(worst)
    }
}
