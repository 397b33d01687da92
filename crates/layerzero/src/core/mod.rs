//! The core: decides which kernel serves a call, runs it, and keeps count of how that went.
//!
//! It knows no files, no configuration and no thread-local state, and it calls nobody above it. What follows from calls
//! and needs a file is an [`Errand`]: the core says that it is due, and whoever stands above does it.
//!
//! ```text
//! state      snapshot + executables, immutable, behind one atomic pointer
//! change     the next state: built, checked, warmed, swapped in
//! scope      which state a call is made in
//! ask        bind, select, explain
//! serve      admit, run, classify a failure, next kernel, reference
//! guard      circuits, counters, levels, events
//! ```

pub mod adapt;
mod admit;
mod ask;
mod attempt;
mod change;
mod circuits;
mod dispatch;
mod drift;
mod errands;
mod executable;
mod guard;
mod live;
mod memory;
mod outside;
mod pieces;
mod proof;
mod proving;
mod rollouts;
mod scope;
mod serve;
mod state;
mod step;
mod text;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use lz_model::Query;
use lz_resilience::EventHook;
use lz_select::{CacheConfig, DeviceMemory, SelectionCache};
use parking_lot::Mutex;

use crate::warn::{WarningHook, Warnings};
use errands::Errands;
use guard::Guard;
use live::Live;
use proving::Proving;

pub use ask::{KernelInfo, Selection};
pub(crate) use ask::{find_kernels, no_kernel};
pub(crate) use circuits::{CircuitChange, CircuitKey, CircuitRecord};
pub use dispatch::{Arguments, Dispatched};
pub(crate) use errands::Errand;
pub use executable::{DynamicKernel, Executable};
pub use guard::Fault;
pub use live::Drifted;
pub(crate) use memory::probe_memory;
pub use memory::{AllocatorMemory, MemorySource};
pub use pieces::Pieces;
pub use proof::WrongResult;
pub use proving::Proof;
pub use scope::{OverlayId, Scope};
pub use serve::{Blame, Caller, Ending, Proven};
pub(crate) use state::{Draft, State};
pub use step::Step;
pub use text::TextCall;

/// How many of the last queries a new state is warmed with.
const RECENT: usize = 256;

/// Selects, explains and runs kernels.
///
/// All of it is behind `&self` and safe to share between threads. Reading never locks; a change builds a whole new state,
/// checks it, and swaps it in, or leaves everything as it was.
pub struct Core {
    pub(crate) state: ArcSwap<State>,
    pub(crate) draft: Mutex<Draft>,
    /// Moves whenever an answer given before may no longer be the one given now.
    version: AtomicU64,
    pub(crate) cache: SelectionCache,
    pub(crate) warnings: Warnings,
    pub(crate) guard: Guard,
    proving: Proving,
    pub(crate) errands: Errands,
    /// What sampled calls take.
    live: Live,
    /// The devices' free memory, which every state shares.
    memory: Arc<DeviceMemory>,
    memory_source: OnceLock<MemorySource>,
    /// The last queries that had to be decided.
    recent: Mutex<VecDeque<Query>>,
    /// Threads of calls on the CPU that do not say theirs.
    threads: AtomicU16,
    /// Whether changes wait until they are settled, all at once.
    holds_changes: AtomicBool,
}

impl Core {
    pub(crate) fn new(
        draft: Draft,
        cache: CacheConfig,
        threads: u16,
        warnings: Option<WarningHook>,
        events: Option<EventHook>,
    ) -> Core {
        let state = draft.build().expect("the built-in kernels fit together; a test builds them");
        Core {
            memory: draft.spec.memory.clone(),
            memory_source: OnceLock::new(),
            state: ArcSwap::from_pointee(state),
            draft: Mutex::new(draft),
            version: AtomicU64::new(1),
            guard: Guard::new(cache.clock.clone(), events),
            warnings: Warnings::new(cache.clock.clone(), warnings),
            cache: SelectionCache::new(cache),
            proving: Proving::default(),
            errands: Errands::default(),
            live: Live::default(),
            recent: Mutex::default(),
            threads: AtomicU16::new(threads),
            holds_changes: AtomicBool::new(false),
        }
    }

    /// A number that moves whenever an answer given before may no longer be the one given now: what was
    /// decided under one version holds as long as the version stands. Read it before deciding.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// How many calls were served so far, by all kernels together: tells whether anybody is calling.
    pub fn calls_made(&self) -> u64 {
        self.guard.counters.calls()
    }

    /// Milliseconds of the clock that decisions live by.
    pub fn now_ms(&self) -> u64 {
        self.guard.clock.now_ms()
    }

    /// Nothing that was decided before holds any more.
    pub(crate) fn move_version(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// How many threads kernels use in calls on the CPU that do not say (`Context::threads`). One per core, as long as
    /// [`Core::set_threads`] says nothing else.
    pub fn threads(&self) -> u16 {
        self.threads.load(Ordering::Relaxed)
    }

    /// Says how many threads kernels use from now on in calls on the CPU that do not say; 0 for not known. Nothing is
    /// built anew: the number is part of each query, and what was measured with another one is not asked.
    pub fn set_threads(&self, threads: u16) {
        self.threads.store(threads, Ordering::Relaxed);
    }

    /// Remembers a query that had to be decided.
    fn remember(&self, query: &Query) {
        let mut recent = self.recent.lock();
        if recent.len() == RECENT {
            recent.pop_front();
        }
        recent.push_back(*query);
    }

    /// The last queries that had to be decided.
    pub(crate) fn recent(&self) -> Vec<Query> {
        self.recent.lock().iter().copied().collect()
    }
}
