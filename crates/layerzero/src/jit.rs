//! Kernels that are compiled on first use: what they are compiled for, and what somebody should compile next.
//!
//! An engine that was made with [`EngineBuilder::compiled_elsewhere`] never compiles while a call waits, as long as another
//! kernel can serve it: a kernel that is not compiled for a call ranks behind all others. What such a kernel would have
//! won is queued ([`Engine::decided`]); whoever made the engine takes it from there ([`Engine::next_compile`]), runs the
//! kernel once on a thread of its own, and says how that went ([`Engine::compiled`], [`Engine::compile_failed`]).
//!
//! [`EngineBuilder::compiled_elsewhere`]: crate::EngineBuilder::compiled_elsewhere

mod queue;
mod wanted;

use std::fmt;
use std::sync::Arc;

use lz_model::{Bound, CallSpec, Context, DeviceIx, DeviceSpec, NamedCall, Query};
use lz_select::{Decision, Warm};
use parking_lot::Mutex;
use serde::Serialize;

use self::queue::Queue;
use self::wanted::Ideal;
use crate::engine::{Engine, State};
use crate::error::Error;
use crate::scope::Scope;
use crate::warm_file::WarmRecord;

/// A kernel that should be compiled, and the call to compile it for.
#[derive(Clone, Debug, PartialEq)]
pub struct Compile {
    /// To say how it went.
    pub id: u64,
    /// The kernel's id.
    pub kernel: String,
    /// The call.
    pub call: CallSpec,
    /// The device it is made on.
    pub device: DeviceIx,
}

/// A compilation that was given up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailedCompile {
    /// The kernel's id.
    pub kernel: String,
    /// The call it was compiled for.
    pub call: CallSpec,
    /// How often it was tried.
    pub attempts: u32,
    /// What it said last.
    pub error: String,
}

/// How far the kernels that are compiled on first use are compiled. They are counted by kernel and kind of call.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct JitStatus {
    /// Whether it is kept count at all.
    pub tracked: bool,
    /// Compiled.
    pub warm: usize,
    /// Asked for by calls, and not compiled: those queued, those that failed, and those that were dropped.
    pub cold: usize,
    /// Waiting to be compiled.
    pub queued: usize,
    /// Being compiled.
    pub running: usize,
    /// Compiled by this process.
    pub compiled: u64,
    /// Compiled by an earlier process, and kept on disk by their library.
    pub restored: usize,
    /// Taken off the queue because it was full.
    pub dropped: u64,
    /// Given up.
    pub failed: Vec<FailedCompile>,
}

impl fmt::Display for JitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JitStatus { warm, cold, queued, running, dropped, .. } = self;
        write!(f, "compiled on first use: {warm} ready, {cold} not yet ({queued} queued, {running} under way")?;
        write!(f, ", {} failed); {dropped} dropped", self.failed.len())
    }
}

/// What an engine knows of compilations.
pub(crate) struct Jit {
    /// Whether somebody takes them from the queue.
    pub elsewhere: bool,
    queue: Mutex<Queue>,
    ideal: Ideal,
    /// What earlier processes compiled for devices that are not known yet.
    absent: Mutex<Absent>,
}

impl Jit {
    pub fn new(elsewhere: bool) -> Jit {
        Jit { elsewhere, queue: Mutex::default(), ideal: Ideal::default(), absent: Mutex::default() }
    }
}

#[derive(Default)]
struct Absent {
    records: Vec<WarmRecord>,
    /// How many devices there were when they were looked at.
    devices: usize,
    restored: usize,
}

impl Engine {
    fn wanted_in(&self, state: &State, decision: &Decision) -> Option<String> {
        let gave_up = |kernel: &str, query: &Query| self.jit.queue.lock().gave_up(kernel, query);
        self.jit.ideal.wanted(state, decision, gave_up)
    }

    fn enqueue(&self, kernel: &str, query: &Query, call: CallSpec) -> bool {
        let settings = &self.config().settings.jit;
        let mut queue = self.jit.queue.lock();
        queue.want(kernel, query);
        // A compiler that runs beside a capture would break it.
        let now = settings.background_compile && !query.context().capturing;
        now && queue.push(kernel, query, call, settings.queue_size as usize)
    }

    /// The next kernel to compile, the one that waited longest.
    pub fn next_compile(&self) -> Option<Compile> {
        self.jit.queue.lock().next()
    }

    /// A kernel that somebody compiles for a call now, whether it waits or not.
    pub fn begin_compile(&self, kernel: &str, call: &CallSpec, device: DeviceIx) -> Result<Compile, Error> {
        let query = self.bind_call(call, device)?;
        Ok(self.jit.queue.lock().begin(kernel, &query, call.clone()))
    }

    /// A kernel was compiled: from now on it serves. Gives what was compiled; nothing when that was not under way.
    pub fn compiled(&self, id: u64) -> Result<Option<Compile>, Error> {
        let Some(job) = self.jit.queue.lock().finish(id) else { return Ok(None) };
        self.mark(&job.compile.kernel, &job.query)?;
        Ok(Some(job.compile))
    }

    /// A kernel could not be compiled. It is tried twice more, then the next best is queued in its place.
    pub fn compile_failed(&self, id: u64, error: &str) {
        let most = self.config().settings.jit.queue_size as usize;
        let given_up = {
            let mut queue = self.jit.queue.lock();
            queue.finish(id).filter(|job| !queue.failed(job, error, most))
        };
        if let Some(job) = given_up
            && let Some(kernel) = self.process().wanted(&job.query)
        {
            self.enqueue(&kernel, &job.query, job.compile.call);
        }
    }

    /// In a process that was forked: what the parent's thread was compiling waits again.
    pub fn compiles_forked(&self) {
        self.jit.queue.lock().rewind();
    }

    /// From now on a kernel is compiled for calls like this one. Does nothing where nobody keeps count. What is to be
    /// known to the next process as well is kept with [`Engine::keep_warm`].
    pub fn mark_warm(&self, kernel: &str, call: &CallSpec, device: DeviceIx) -> Result<(), Error> {
        self.mark(kernel, &self.bind_call(call, device)?)
    }

    fn mark(&self, kernel: &str, query: &Query) -> Result<(), Error> {
        if !self.jit.elsewhere {
            return Ok(());
        }
        self.jit.queue.lock().compiled += 1;
        self.insert_warm(&[(kernel.to_owned(), *query)])
    }

    fn insert_warm(&self, compiled: &[(String, Query)]) -> Result<(), Error> {
        let news = {
            let mut queue = self.jit.queue.lock();
            compiled.iter().fold(false, |news, (kernel, query)| queue.warmed(kernel, query) || news)
        };
        if news { self.put_warm_in_force() } else { Ok(()) }
    }

    fn put_warm_in_force(&self) -> Result<(), Error> {
        // Looked at while nobody else changes it, so that the last one in force is the last one known.
        self.update(|spec| spec.warm = Some(Arc::new(self.jit.queue.lock().warm())))
    }

    /// Forgets what is known of a kernel whose code is gone.
    pub(crate) fn forget_compiled(&self, kernel: &str) -> Result<(), Error> {
        if !self.jit.elsewhere {
            return Ok(());
        }
        let changed = self.jit.queue.lock().forget(kernel);
        if changed { self.put_warm_in_force() } else { Ok(()) }
    }

    /// What kernels are compiled for; nothing when nobody keeps count.
    pub fn warm_state(&self) -> Arc<Warm> {
        self.with_snapshot(|s| s.spec().warm.clone()).unwrap_or_default()
    }

    /// How far the kernels that are compiled on first use are compiled.
    pub fn jit_status(&self) -> JitStatus {
        let restored = self.jit.absent.lock().restored;
        let queue = self.jit.queue.lock();
        let (warm, cold, queued, running) = queue.counts();
        JitStatus {
            tracked: self.jit.elsewhere,
            warm,
            cold,
            queued,
            running,
            compiled: queue.compiled,
            restored,
            dropped: queue.dropped,
            failed: queue.given_up(),
        }
    }

    /// A call, as selection sees it.
    pub(crate) fn bind_call(&self, call: &CallSpec, device: DeviceIx) -> Result<Query, Error> {
        self.bind(&call.op, &call.named(device, Context::default())).map(|(_, bound)| bound.query)
    }

    /// Puts in force what earlier processes compiled, as far as it is still there. Gives how much that is.
    pub fn load_warm(&self) -> Result<usize, Error> {
        if self.jit.elsewhere { self.restore_warm(self.kept_warm()) } else { Ok(0) }
    }

    /// Puts in force what was compiled for devices that came to be known.
    pub(crate) fn look_for_devices(&self) {
        let devices = self.with_snapshot(|s| s.spec().devices.len());
        let records = {
            let mut absent = self.jit.absent.lock();
            if absent.records.is_empty() || absent.devices == devices {
                return;
            }
            std::mem::take(&mut absent.records)
        };
        // What was built before is valid with more that is compiled as well.
        let _ = self.restore_warm(records);
    }

    fn restore_warm(&self, records: Vec<WarmRecord>) -> Result<usize, Error> {
        let devices = self.devices();
        let (here, absent): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| device_named(&devices, &record.device).is_some());
        let compiled: Vec<(String, Query)> = here.iter().filter_map(|r| self.restored(r, &devices)).collect();
        self.insert_warm(&compiled)?;
        let restored = self.jit.absent.lock().restored + compiled.len();
        *self.jit.absent.lock() = Absent { records: absent, devices: devices.len(), restored };
        Ok(compiled.len())
    }

    fn restored(&self, record: &WarmRecord, devices: &[DeviceSpec]) -> Option<(String, Query)> {
        let device = device_named(devices, &record.device)?;
        let same = self.with_snapshot(|s| record.is_of(s.spec(), device));
        let query = self.bind_call(&record.call, device).ok().filter(|_| same)?;
        Some((record.kernel.clone(), query))
    }
}

/// What a device is called: `cpu`, `cuda:0`.
pub fn device_name(devices: &[DeviceSpec], device: DeviceIx) -> String {
    let Some(spec) = devices.get(device.0 as usize) else { return format!("unknown:{}", device.0) };
    let number = devices[..device.0 as usize].iter().filter(|other| other.platform == spec.platform).count();
    match (spec.platform, number) {
        (lz_model::Platform::Cpu, 0) => "cpu".to_owned(),
        (platform, number) => format!("{platform}:{number}"),
    }
}

/// The device that is called so.
pub fn device_named(devices: &[DeviceSpec], name: &str) -> Option<DeviceIx> {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    let (platform, number): (lz_model::Platform, usize) = (kind.parse().ok()?, number.parse().ok()?);
    let of_kind = devices.iter().enumerate().filter(|(_, device)| device.platform == platform);
    of_kind.map(|(at, _)| DeviceIx(at as u16)).nth(number)
}

impl Scope<'_> {
    /// Takes note of a call that was decided: counts it in the manifest, and queues the kernel that should be compiled
    /// for it. `true` when something was queued that was not before. An error when only a kernel could serve the call
    /// that is not compiled, and the configuration does not want it to be while the call waits.
    pub fn decided(&self, call: &NamedCall<'_>, bound: &Bound) -> Result<bool, Error> {
        if self.engine.jit.elsewhere {
            self.engine.look_for_devices();
        }
        let spec = CallSpec::canonical(call, bound);
        let query = &bound.query;
        let state = &self.state;
        let snapshot = &state.snapshot;
        self.engine.manifest.seen(&spec, &device_name(&snapshot.spec().devices, query.device()));
        if let Some(plan) = state.learner.upgrade() {
            plan.note(snapshot, query, &spec);
        }
        if !self.engine.jit.elsewhere || !snapshot.kernels_for(query.op()).any(|ix| snapshot.kernel(ix).jit) {
            return Ok(false);
        }
        let decision = snapshot.select(query);
        let wanted = self.engine.wanted_in(state, &decision);
        let queued = wanted.is_some_and(|kernel| self.engine.enqueue(&kernel, query, spec));
        let somebody_is_ready = decision.ranked().any(|candidate| !candidate.cold);
        if !somebody_is_ready && decision.chosen().is_some() && self.engine.config().settings.jit.fail_on_no_fallback {
            return Err(wanted::only_cold(snapshot, decision));
        }
        Ok(queued)
    }

    /// The kernel that would serve a call if it were compiled for it, and is not; `None` when nothing is to be gained.
    /// One whose compilation was given up is passed over.
    pub fn wanted(&self, query: &Query) -> Option<String> {
        let state = &self.state;
        self.engine.wanted_in(state, &state.snapshot.select(query))
    }
}
