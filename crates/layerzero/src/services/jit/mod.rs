//! Kernels that are compiled on first use: what they are compiled for, and what somebody should compile next.

mod queue;
mod wanted;
mod warm_file;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use lz_config::JitSettings;
use lz_model::{CallSpec, DeviceSpec, Query, device_name, device_named};
use lz_select::Decision;
use parking_lot::Mutex;
use serde::Serialize;

use self::queue::{Job, Queue};
use self::wanted::Ideal;
use self::warm_file::WarmRecord;
use crate::core::{Core, State};
use crate::error::Error;

pub use queue::{Compile, FailedCompile};
pub(crate) use wanted::only_cold;
pub(crate) use warm_file::Compiled;

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
    settled: Mutex<Settled>,
}

/// Cells of calls for which nothing is to be compiled, in an epoch: what is compiled changes with it.
#[derive(Default)]
struct Settled {
    epoch: u64,
    /// By their fingerprint.
    cells: HashMap<u64, Query>,
}

/// Cells that are remembered, 200 bytes each.
const MOST_SETTLED: usize = 4096;

impl Jit {
    pub fn new(elsewhere: bool) -> Jit {
        Jit {
            elsewhere,
            queue: Mutex::default(),
            ideal: Ideal::default(),
            absent: Mutex::default(),
            settled: Mutex::default(),
        }
    }

    /// Whether nothing is to be compiled for calls of a cell, as was found out in this epoch.
    pub fn is_settled(&self, epoch: u64, cell: &Query) -> bool {
        let settled = self.settled.lock();
        settled.epoch == epoch && settled.cells.get(&cell.fingerprint()) == Some(cell)
    }

    /// Remembers that nothing is to be compiled for calls of a cell.
    pub fn settle(&self, epoch: u64, cell: Query) {
        let mut settled = self.settled.lock();
        if settled.epoch != epoch || settled.cells.len() >= MOST_SETTLED {
            *settled = Settled { epoch, cells: HashMap::new() };
        }
        settled.cells.insert(cell.fingerprint(), cell);
    }
}

#[derive(Default)]
struct Absent {
    records: Vec<WarmRecord>,
    /// How many devices there were when they were looked at.
    devices: usize,
    restored: usize,
}

impl Jit {
    /// The kernel that would serve a call if it were compiled for it, and is not. One whose compilation was given up is
    /// passed over.
    pub fn wanted(&self, state: &State, decision: &Decision) -> Option<String> {
        self.ideal.wanted(state, decision, |kernel, query| self.queue.lock().gave_up(kernel, query))
    }

    /// Queues a kernel to be compiled for a call. `true` when it was not queued before.
    pub fn enqueue(&self, settings: &JitSettings, kernel: &str, query: &Query, call: CallSpec) -> bool {
        let mut queue = self.queue.lock();
        queue.want(kernel, query);
        // A compiler that runs beside a capture would break it.
        let now = settings.background_compile && !query.context().capturing;
        now && queue.push(kernel, query, call, settings.queue_size as usize)
    }

    /// The next kernel to compile, the one that waited longest.
    pub fn next(&self) -> Option<Compile> {
        self.queue.lock().next()
    }

    /// A kernel that somebody compiles now, whether it waits or not.
    pub fn begin(&self, kernel: &str, query: &Query, call: &CallSpec) -> Compile {
        self.queue.lock().begin(kernel, query, call.clone())
    }

    /// A compilation that was under way has succeeded: takes it off.
    pub fn finish(&self, id: u64) -> Option<Job> {
        self.queue.lock().finish(id)
    }

    /// A compilation has failed. Gives it when it is not tried again.
    pub fn fail(&self, id: u64, error: &str, settings: &JitSettings) -> Option<Job> {
        let mut queue = self.queue.lock();
        queue.finish(id).filter(|job| !queue.failed(job, error, settings.queue_size as usize))
    }

    /// In a process that was forked: what the parent's thread was compiling waits again.
    pub fn forked(&self) {
        self.queue.lock().rewind();
    }

    /// From now on a kernel is compiled for calls like this one. Does nothing where nobody keeps count.
    pub fn mark(&self, core: &Core, kernel: &str, query: &Query) -> Result<(), Error> {
        if !self.elsewhere {
            return Ok(());
        }
        self.queue.lock().compiled += 1;
        self.insert_warm(core, &[(kernel.to_owned(), *query)])
    }

    fn insert_warm(&self, core: &Core, compiled: &[(String, Query)]) -> Result<(), Error> {
        let news = {
            let mut queue = self.queue.lock();
            compiled.iter().fold(false, |news, (kernel, query)| queue.warmed(kernel, query) || news)
        };
        if news { self.put_warm_in_force(core) } else { Ok(()) }
    }

    fn put_warm_in_force(&self, core: &Core) -> Result<(), Error> {
        // Looked at while nobody else changes it, so that the last one in force is the last one known.
        core.update(|spec| spec.warm = Some(Arc::new(self.queue.lock().warm())))
    }

    /// Drops the compilations of a kernel that was removed.
    pub fn forget(&self, core: &Core, kernel: &str) -> Result<(), Error> {
        if !self.elsewhere {
            return Ok(());
        }
        let changed = self.queue.lock().forget(kernel);
        if changed { self.put_warm_in_force(core) } else { Ok(()) }
    }

    /// How far the kernels that are compiled on first use are compiled.
    pub fn status(&self) -> JitStatus {
        let restored = self.absent.lock().restored;
        let queue = self.queue.lock();
        let (warm, cold, queued, running) = queue.counts();
        JitStatus {
            tracked: self.elsewhere,
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

    /// Keeps for the next process, in `warm.json` beside the manifest, that a kernel was compiled.
    pub fn keep(&self, core: &Core, manifest: Option<PathBuf>, compiled: Compiled<'_>) {
        if let Some(manifest) = manifest.filter(|_| self.elsewhere && !compiled.caches.is_empty()) {
            // Not while the snapshot is held: writing may wait for another process.
            let record = core.with_snapshot(|s| {
                let device = device_name(&s.spec().devices, compiled.device);
                WarmRecord::of(s.spec(), device, compiled)
            });
            if let Some(record) = record {
                warm_file::keep(&manifest, record);
            }
        }
    }

    /// Puts in force what earlier processes compiled, as far as it is still there. Gives how much that is.
    pub fn load(&self, core: &Core, manifest: Option<PathBuf>) -> Result<usize, Error> {
        let kept = || manifest.map_or_else(Vec::new, |manifest| warm_file::kept(&manifest));
        if self.elsewhere { self.restore(core, kept()) } else { Ok(0) }
    }

    /// Puts in force what was compiled for devices that came to be known.
    pub fn look_for_devices(&self, core: &Core) {
        let devices = core.with_snapshot(|s| s.spec().devices.len());
        let records = {
            let mut absent = self.absent.lock();
            if absent.records.is_empty() || absent.devices == devices {
                return;
            }
            std::mem::take(&mut absent.records)
        };
        // What was built before is valid with more that is compiled as well.
        let _ = self.restore(core, records);
    }

    fn restore(&self, core: &Core, records: Vec<WarmRecord>) -> Result<usize, Error> {
        let devices = core.devices();
        let (here, absent): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| device_named(&devices, &record.device).is_some());
        let compiled: Vec<(String, Query)> = here.iter().filter_map(|r| restored(core, r, &devices)).collect();
        self.insert_warm(core, &compiled)?;
        let restored = self.absent.lock().restored + compiled.len();
        *self.absent.lock() = Absent { records: absent, devices: devices.len(), restored };
        Ok(compiled.len())
    }
}

fn restored(core: &Core, record: &WarmRecord, devices: &[DeviceSpec]) -> Option<(String, Query)> {
    let device = device_named(devices, &record.device)?;
    let same = core.with_snapshot(|s| record.is_of(s.spec(), device));
    let query = core.bind_call(&record.call, device).ok().filter(|_| same)?;
    Some((record.kernel.clone(), query))
}
