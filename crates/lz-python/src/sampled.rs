//! How long a call took that somebody looks at: by the host's clock on the CPU, by events on a GPU.
//!
//! What the host takes to launch a kernel says nothing of what the device takes to run it. On a GPU an event is recorded
//! before the call and one after it, on the stream it uses; `layerzero.device_times` polls them on a thread of its own,
//! and brings the times here when the device is done. The thread of the caller never waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layerzero::Step;
use layerzero::model::{CallSpec, DeviceIx, Query};
use layerzero::resilience::{Latency, Pace, Rollout};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::devices;
use crate::engine::engine;
use crate::route::Route;

/// How the calls of a route are timed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Clock,
    /// Events on a CUDA device, by its number.
    Events(i32),
    /// Not at all: a capture carries nothing out, and the events of other accelerators are not known here.
    Nothing,
}

/// Whether a test has the host stand for a GPU.
static HOST_IS_GPU: AtomicBool = AtomicBool::new(false);

/// Times the calls of the host by events, too: tests have it stand for a GPU.
#[pyfunction]
pub fn time_host_by_events(yes: bool) {
    HOST_IS_GPU.store(yes, Ordering::Relaxed);
}

/// When sampled calls may be timed by events: one in 100 ms. Recording, polling and reading a pair of events costs the
/// caller about 100 µs, so that this is at most 0.1% of its time, however fast it calls. Not where every call is to be timed.
static PACE: Pace = Pace::new(100);

impl By {
    fn of(query: &Query) -> By {
        let device = query.device();
        match device {
            DeviceIx(0) if !HOST_IS_GPU.load(Ordering::Relaxed) => By::Clock,
            _ if query.context().capturing => By::Nothing,
            DeviceIx(0) => By::Events(0),
            _ => devices::cuda_index(device).map_or(By::Nothing, By::Events),
        }
    }
}

/// Why somebody wants to know how long a call took.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// It is one of the sampled ones: it is timed if that is due, or if every call is to be.
    Sampled { every: bool },
    /// It is compared with another kernel: it is timed in any case.
    Compared,
    /// Nobody does.
    No,
}

/// A mark on a stream. None where it could not be recorded.
type Mark = Option<Py<PyAny>>;

fn mark(py: Python<'_>, number: i32) -> Mark {
    let marked = py.import("layerzero.device_times").and_then(|m| m.call_method1("mark", (number,)));
    marked.ok().filter(|mark| !mark.is_none()).map(Bound::unbind)
}

/// The time of one kernel, while it runs.
pub struct Stopwatch {
    by: By,
    begun: Instant,
    marks: (Mark, Mark),
    took: Duration,
}

impl Stopwatch {
    /// For a call of a route.
    pub fn start(py: Python<'_>, query: &Query, wanted: Wanted) -> Stopwatch {
        let by = match wanted {
            Wanted::No => By::Nothing,
            Wanted::Compared => By::of(query),
            Wanted::Sampled { every } => match By::of(query) {
                By::Events(_) if !every && !PACE.allows(engine().now_ms()) => By::Nothing,
                by => by,
            },
        };
        let first = match by {
            By::Events(number) => mark(py, number),
            By::Clock | By::Nothing => None,
        };
        Stopwatch { by, begun: Instant::now(), marks: (first, None), took: Duration::ZERO }
    }

    /// The kernel has returned.
    pub fn stop(&mut self, py: Python<'_>) {
        self.took = self.begun.elapsed();
        if let (By::Events(number), Some(_)) = (self.by, &self.marks.0) {
            self.marks.1 = mark(py, number);
        }
    }

    /// What it took by the host's clock, where that is the time of the call.
    pub fn on_host(&self) -> Option<Duration> {
        (self.by == By::Clock).then_some(self.took)
    }

    fn span(&self, py: Python<'_>) -> Option<(Py<PyAny>, Py<PyAny>)> {
        let (Some(begin), Some(end)) = &self.marks else { return None };
        Some((begin.clone_ref(py), end.clone_ref(py)))
    }
}

/// A sampled call that a GPU carries out. Called with the times when they are known, or with nothing when they never are.
#[pyclass(frozen, module = "layerzero._native")]
struct DeviceSample {
    step: Step,
    query: Query,
    call: Option<Arc<CallSpec>>,
    latency: Arc<Latency>,
    /// Calls that it stands for; none when it is only compared.
    calls: Option<u64>,
    /// The rollout, and whether its candidate is the one that served.
    rollout: Option<(Arc<Rollout>, bool)>,
}

#[pymethods]
impl DeviceSample {
    fn __call__(&self, times: Option<Vec<f64>>) {
        let times = times.unwrap_or_default();
        if let Some(calls) = self.calls {
            record(&self.step, &self.query, self.call.as_ref(), &self.latency, calls, times.first().copied());
        }
        if let (Some((rollout, serves)), [served_us, other_us]) = (&self.rollout, &times[..]) {
            let (serving, candidate) = if *serves { (other_us, served_us) } else { (served_us, other_us) };
            engine().tried_for(rollout, *serving, *candidate);
        }
    }
}

/// A sampled call of a step took so many microseconds, where that is known.
fn record(step: &Step, query: &Query, call: Option<&Arc<CallSpec>>, latency: &Latency, calls: u64, us: Option<f64>) {
    let us = us.filter(|us| us.is_finite() && *us >= 0.0);
    let took = us.map(|us| {
        let took = Duration::from_secs_f64(us / 1e6);
        latency.record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        (took, latency.ratio())
    });
    engine().sampled(step, calls, took);
    if let Some(us) = us {
        engine().took(&step.kernel, query, || call.map(|call| CallSpec::clone(call)), us);
    }
}

/// Hands on what a call of a route took. `calls`: how many it stands for; nothing when it is not one of the sampled ones.
/// `other`: the kernel it is compared with, in a rollout.
pub fn note(
    py: Python<'_>,
    route: &Route,
    at: usize,
    served: &Stopwatch,
    calls: Option<u64>,
    other: Option<(&Stopwatch, Arc<Rollout>, bool)>,
) {
    let step: &Step = &route.steps[at];
    if !matches!(served.by, By::Events(_)) {
        let us = served.on_host().map(|took| took.as_secs_f64() * 1e6);
        if let Some(calls) = calls {
            record(step, &route.query, route.call.as_ref(), &route.latency, calls, us);
        }
        return;
    }
    let spans: Option<Vec<_>> = [Some(served), other.as_ref().map(|(watch, ..)| *watch)]
        .into_iter()
        .flatten()
        .map(|watch| watch.span(py))
        .collect();
    let sample = DeviceSample {
        step: step.clone(),
        query: route.query,
        call: route.call.clone(),
        latency: route.latency.clone(),
        calls,
        rollout: other.map(|(_, rollout, serves)| (rollout, serves)),
    };
    let follow = |spans: Vec<(Py<PyAny>, Py<PyAny>)>, sample: DeviceSample| -> PyResult<bool> {
        let spans = PyList::new(py, spans)?;
        let sample = Bound::new(py, sample)?;
        let followed = py.import("layerzero.device_times")?.call_method1("follow", (spans, &sample))?.is_truthy()?;
        if !followed {
            sample.get().__call__(None);
        }
        Ok(followed)
    };
    match spans {
        // A call is not to fail because it cannot be timed.
        Some(spans) => drop(follow(spans, sample)),
        None => sample.__call__(None),
    }
}
