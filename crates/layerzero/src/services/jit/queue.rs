//! What waits to be compiled, what is under way, and how that went.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};

use lz_model::{CallSpec, DeviceIx, Query};
use lz_select::Warm;
use serde::Serialize;

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

/// How often a compilation is tried again.
const RETRIES: u32 = 2;
/// How many pairs of kernel and kind of call are remembered as asked for and not compiled.
const MOST_WANTED: usize = 10_000;

/// A kernel and the class of calls it is compiled for.
#[derive(Clone, PartialEq, Eq)]
struct Kind {
    kernel: String,
    class: Query,
}

impl Hash for Kind {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.kernel.hash(state);
        self.class.fingerprint().hash(state);
    }
}

/// The kind a kernel has to be compiled for to serve a call.
fn kind(kernel: &str, query: &Query) -> Kind {
    Kind { kernel: kernel.to_owned(), class: query.compiled_class() }
}

/// A compilation.
#[derive(Clone)]
pub(crate) struct Job {
    pub compile: Compile,
    pub query: Query,
}

impl Job {
    fn kind(&self) -> Kind {
        kind(&self.compile.kernel, &self.query)
    }
}

/// The compilations of an engine.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Job>,
    running: Vec<Job>,
    /// What is in either.
    busy: HashSet<Kind>,
    /// Asked for by calls, and not compiled when that was.
    wanted: HashMap<Kind, Query>,
    failures: HashMap<Kind, FailedCompile>,
    /// What is compiled.
    warm: HashMap<Kind, Query>,
    ids: u64,
    pub dropped: u64,
    pub compiled: u64,
}

impl Queue {
    /// Remembers that a call would have gone to a kernel.
    pub fn want(&mut self, kernel: &str, query: &Query) {
        if self.wanted.len() < MOST_WANTED {
            self.wanted.insert(kind(kernel, query), *query);
        }
    }

    /// Has a kernel compiled for a call; of too many that wait the oldest is dropped. `false` when it waits already.
    pub fn push(&mut self, kernel: &str, query: &Query, call: CallSpec, most: usize) -> bool {
        if !self.busy.insert(kind(kernel, query)) {
            return false;
        }
        while self.waiting.len() >= most.max(1)
            && let Some(oldest) = self.waiting.pop_front()
        {
            self.busy.remove(&oldest.kind());
            self.dropped += 1;
        }
        self.ids += 1;
        let compile = Compile { id: self.ids, kernel: kernel.to_owned(), call, device: query.device() };
        self.waiting.push_back(Job { compile, query: *query });
        true
    }

    /// The next one, the one that waited longest; what was compiled meanwhile is passed over.
    pub fn next(&mut self) -> Option<Compile> {
        while let Some(job) = self.waiting.pop_front() {
            if self.warm.contains_key(&job.kind()) {
                self.busy.remove(&job.kind());
                continue;
            }
            let compile = job.compile.clone();
            self.running.push(job);
            return Some(compile);
        }
        None
    }

    /// One that begins now; if it waited, it waits no more.
    pub fn begin(&mut self, kernel: &str, query: &Query, call: CallSpec) -> Compile {
        let kind = kind(kernel, query);
        self.waiting.retain(|job| job.kind() != kind);
        self.ids += 1;
        let compile = Compile { id: self.ids, kernel: kernel.to_owned(), call, device: query.device() };
        self.busy.insert(kind);
        self.running.push(Job { compile: compile.clone(), query: *query });
        compile
    }

    /// Takes one that is under way off the list.
    pub fn finish(&mut self, id: u64) -> Option<Job> {
        let at = self.running.iter().position(|job| job.compile.id == id)?;
        let job = self.running.swap_remove(at);
        // Somebody else may be at the same.
        if !self.running.iter().any(|other| other.kind() == job.kind()) {
            self.busy.remove(&job.kind());
        }
        Some(job)
    }

    /// One that was under way did not succeed. Whether it is tried again.
    pub fn failed(&mut self, job: &Job, error: &str, most: usize) -> bool {
        let Compile { kernel, call, .. } = job.compile.clone();
        let attempts = self.failures.get(&job.kind()).map_or(0, |failed| failed.attempts) + 1;
        let error = error.chars().take(2000).collect();
        self.failures.insert(job.kind(), FailedCompile { kernel, call, attempts, error });
        attempts <= RETRIES && self.push(&job.compile.kernel, &job.query, job.compile.call.clone(), most)
    }

    /// Whether it was tried often enough.
    pub fn gave_up(&self, kernel: &str, query: &Query) -> bool {
        self.failures.get(&kind(kernel, query)).is_some_and(|failed| failed.attempts > RETRIES)
    }

    /// Those that were given up.
    pub fn given_up(&self) -> Vec<FailedCompile> {
        let mut all: Vec<FailedCompile> = self.failures.values().filter(|f| f.attempts > RETRIES).cloned().collect();
        all.sort_by_cached_key(|failed| (failed.kernel.clone(), failed.call.to_string()));
        all
    }

    /// A kernel is compiled for calls like this one. `false` when that was known.
    pub fn warmed(&mut self, kernel: &str, query: &Query) -> bool {
        let kind = kind(kernel, query);
        self.wanted.remove(&kind);
        self.failures.remove(&kind);
        self.warm.insert(kind, *query).is_none()
    }

    /// Forgets a kernel: its code was removed, and a kernel that gets its name is another. Whether any of it was compiled.
    pub fn forget(&mut self, kernel: &str) -> bool {
        let before = self.warm.len();
        let other = |kind: &Kind| kind.kernel != kernel;
        self.waiting.retain(|job| job.compile.kernel != kernel);
        self.running.retain(|job| job.compile.kernel != kernel);
        self.busy.retain(other);
        self.wanted.retain(|kind, _| other(kind));
        self.failures.retain(|kind, _| other(kind));
        self.warm.retain(|kind, _| other(kind));
        self.warm.len() != before
    }

    /// What is compiled, for selection.
    pub fn warm(&self) -> Warm {
        let mut warm = Warm::default();
        self.warm.iter().for_each(|(kind, query)| warm.insert(&kind.kernel, query));
        warm
    }

    /// What ran in a thread that is not there any more waits again, before all others.
    pub fn rewind(&mut self) {
        for job in self.running.drain(..).rev() {
            self.waiting.push_front(job);
        }
    }

    /// How many are compiled, wanted and not compiled, waiting, under way.
    pub fn counts(&self) -> (usize, usize, usize, usize) {
        let cold = self.wanted.keys().filter(|kind| !self.warm.contains_key(*kind)).count();
        (self.warm.len(), cold, self.waiting.len(), self.running.len())
    }
}
