//! The kernels that failed a call, until it is known whose fault that was.

use layerzero::Fault;
use layerzero::resilience::Admission;
use pyo3::prelude::*;

use crate::engine::engine;
use crate::error;
use crate::route::RouteStep;

/// The kernels that failed a call, in order. They are counted when it is known that the call itself was not wrong.
#[derive(Default)]
pub struct Failures<'a> {
    counted: Vec<(String, PyErr)>,
    pending: Vec<Pending<'a>>,
}

/// A failure that is not counted yet: the step, whether it was a probe, what it said in a line, and the exception.
type Pending<'a> = (&'a RouteStep, Admission<'a>, String, PyErr);

impl<'a> Failures<'a> {
    /// Whether nobody failed yet.
    pub fn is_empty(&self) -> bool {
        self.counted.is_empty() && self.pending.is_empty()
    }

    /// Adds one, and says what went wrong. What says something of the device (memory, a lost context) counts at once.
    pub fn add(&mut self, py: Python<'_>, step: &'a RouteStep, admission: Admission<'a>, error: PyErr) -> Fault {
        let (line, detail) = (error::one_line(py, &error), error.to_string());
        let fault = Fault::of(&detail);
        match fault {
            Fault::Kernel => self.pending.push((step, admission, line, error)),
            Fault::OutOfMemory | Fault::Poisoned => {
                self.settle();
                engine().failed(step, admission, &line, &detail);
                self.counted.push((step.kernel.id.clone(), error));
            }
        }
        fault
    }

    fn settle(&mut self) {
        for (step, admission, line, error) in self.pending.drain(..) {
            engine().failed(step, admission, &line, &error.to_string());
            self.counted.push((step.kernel.id.clone(), error));
        }
    }

    /// Counts all of them, and gives what each said.
    pub fn count(mut self) -> Vec<(String, PyErr)> {
        self.settle();
        self.counted
    }
}
