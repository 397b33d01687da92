//! Calls on Python objects: one of the callers of the engine's call path ([`layerzero::Scope::serve`]).

use layerzero::model::schema::Update;
use layerzero::{Blame, Caller, Proven};
use pyo3::prelude::*;

use crate::job::Job;
use crate::route::RouteStep;
use crate::sampled::{Stopwatch, Wanted};
use crate::saved::SavedRows;
use crate::versions::Versions;
use crate::watched::Watching;
use crate::{error, host, interrupted, proof, registry};

/// What ended the run of a kernel.
pub enum Raised {
    /// It was raised while the kernel ran, or its result is wrong.
    ByKernel(PyErr),
    /// It is to be passed on as it is: an interrupt, or a failure outside of the kernel.
    PassOn(PyErr),
}

impl Raised {
    /// The exception.
    pub fn into_raised(self) -> PyErr {
        match self {
            Raised::ByKernel(error) | Raised::PassOn(error) => error,
        }
    }

    fn error(&self) -> &PyErr {
        match self {
            Raised::ByKernel(error) | Raised::PassOn(error) => error,
        }
    }
}

/// A call from Python under way.
pub struct PyCaller<'a, 'b, 'py> {
    pub job: &'a Job<'b, 'py>,
    /// What the straight path's attempt gave, until it was looked at.
    pub tried: Option<PyResult<Bound<'py, PyAny>>>,
    /// The in-place changes torch had counted before the last run.
    pub versions: Option<Versions>,
    /// The rows the call overwrites, where another attempt would need them.
    pub saved: Option<SavedRows>,
}

impl PyCaller<'_, '_, '_> {
    /// Whether the caller's tensors may be neither as before nor as after the call.
    pub fn is_half_written(&self) -> bool {
        matches!(self.job.route.op.schema().update, Some(Update::Rows { .. })) && self.saved.is_none()
    }

    fn run_step<'py>(job: &Job<'_, 'py>, at: usize) -> Result<Bound<'py, PyAny>, Raised> {
        let (py, step) = (job.py, &job.route.steps[at]);
        let watching = Watching::begin(py, job.front, &job.slots, job.route, at);
        let before = job.before(step).map_err(Raised::PassOn)?;
        let wanted = if watching.is_some() { Wanted::Compared } else { Wanted::No };
        let mut watch = Stopwatch::start(py, &job.route.query, wanted);
        let result = job.run(step);
        watch.stop(py);
        let result = result.and_then(|result| job.checked(step, result, before.as_ref())).map_err(Raised::ByKernel)?;
        if let Some(watching) = watching {
            watching.finish(**job, &result, &watch, None).map_err(Raised::PassOn)?;
        }
        Ok(result)
    }
}

impl<'py> Caller for PyCaller<'_, '_, 'py> {
    type Output = Bound<'py, PyAny>;
    type Error = Raised;

    fn load(&mut self, at: usize) -> Result<(), Raised> {
        self.job.route.steps[at].import(self.job.py).map_err(Raised::ByKernel)
    }

    fn declines(&mut self, at: usize) -> Result<Option<String>, Raised> {
        let (job, steps) = (self.job, &self.job.route.steps);
        if !steps[at].is_native() {
            return Ok(None);
        }
        let others = steps.iter().any(RouteStep::is_python);
        if let Some(name) = host::unreadable(job) {
            return match others {
                true => Ok(Some(format!("the memory of '{name}' cannot be read"))),
                false => Err(Raised::PassOn(host::cannot_be_read(job, name))),
            };
        }
        match host::recorder(job.py).map_err(Raised::PassOn)? {
            // Nobody else can serve it.
            Some(recorder) if !others => Err(Raised::PassOn(host::cannot_be_recorded(job, &recorder))),
            recorder => Ok(recorder.map(|recorder| format!("{recorder} cannot see into a native kernel"))),
        }
    }

    fn prove(&mut self, at: usize, alone: bool) -> Result<Proven, Raised> {
        proof::prove(self.job, &self.job.route.steps[at], alone).map_err(Raised::ByKernel)
    }

    fn save(&mut self) -> Result<(), Raised> {
        self.saved = SavedRows::of(self.job).map_err(Raised::ByKernel)?;
        Ok(())
    }

    fn restore(&mut self) -> Result<(), Raised> {
        self.saved.as_ref().map_or(Ok(()), |saved| saved.put_back(self.job.py)).map_err(Raised::ByKernel)
    }

    fn run(&mut self, at: usize) -> Result<Bound<'py, PyAny>, Raised> {
        let job = self.job;
        match self.tried.take() {
            Some(tried) => {
                tried.and_then(|result| job.checked(&job.route.steps[at], result, None)).map_err(Raised::ByKernel)
            }
            None => {
                self.versions = Some(Versions::read(job.py, job.front, &job.slots));
                PyCaller::run_step(job, at)
            }
        }
    }

    fn blame(&mut self, at: usize, raised: Raised) -> Blame<Raised> {
        let (job, versions) = (self.job, self.versions.take());
        let py = job.py;
        let error = match raised {
            Raised::PassOn(_) => return Blame::Caller(raised),
            Raised::ByKernel(error) => error,
        };
        if let Some(interruption) = interrupted::by_the_caller(py, &error, &job.slots) {
            return Blame::Caller(Raised::PassOn(interruption));
        }
        // A call that is wrong stays wrong, and those that failed it before are not to blame.
        match registry::is_callers_fault(py, &error) {
            Ok(false) => {}
            Ok(true) => return Blame::Caller(Raised::PassOn(error)),
            Err(other) => return Blame::Caller(Raised::PassOn(other)),
        }
        let step = &job.route.steps[at];
        step.doubt();
        let changed = versions.map(|versions| versions.changed(py, job.front, &job.slots)).unwrap_or_default();
        if !changed.is_empty() {
            let error = error::input_modified(py, job.route.op.id(), &step.kernel.id, &changed, error);
            return Blame::Spoiled(Raised::ByKernel(error));
        }
        match error::is_input_modified(py, &error) {
            Ok(true) => Blame::Spoiled(Raised::ByKernel(error)),
            _ => Blame::Kernel(Raised::ByKernel(error)),
        }
    }

    fn told(&self, raised: &Raised) -> (String, String) {
        (error::one_line(self.job.py, raised.error()), raised.error().to_string())
    }
}
