//! Kernels that are compiled on first use, in the life of a call.
//!
//! An engine that was made with [`EngineBuilder::compiled_elsewhere`] never compiles while a call waits, as long as another
//! kernel can serve it: a kernel that is not compiled for a call ranks behind all others. What such a kernel would have
//! won is queued ([`Engine::decided`]); whoever made the engine takes it from there ([`Engine::next_compile`]), runs the
//! kernel once on a thread of its own, and says how that went ([`Engine::compiled`], [`Engine::compile_failed`]).
//!
//! [`EngineBuilder::compiled_elsewhere`]: crate::EngineBuilder::compiled_elsewhere

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lz_model::{Bound, CallSpec, DeviceIx, NamedCall, Query, device_name};
use lz_select::Warm;

use super::Engine;
use crate::core::Scope;
use crate::error::Error;
use crate::services::jit::{Compile, Compiled, JitStatus, only_cold};
use crate::services::manifest::{Manifest, ManifestError};

impl Engine {
    /// The next kernel to compile, the one that waited longest.
    pub fn next_compile(&self) -> Option<Compile> {
        self.jit.next()
    }

    /// A kernel that somebody compiles for a call now, whether it waits or not.
    pub fn begin_compile(&self, kernel: &str, call: &CallSpec, device: DeviceIx) -> Result<Compile, Error> {
        Ok(self.jit.begin(kernel, &self.bind_call(call, device)?, call))
    }

    /// A kernel was compiled: from now on it serves. Gives what was compiled; nothing when that was not under way.
    pub fn compiled(&self, id: u64) -> Result<Option<Compile>, Error> {
        let Some(job) = self.jit.finish(id) else { return Ok(None) };
        self.jit.mark(self, &job.compile.kernel, &job.query)?;
        Ok(Some(job.compile))
    }

    /// A kernel could not be compiled. It is tried twice more, then the next best is queued in its place.
    pub fn compile_failed(&self, id: u64, error: &str) {
        let settings = &self.config().settings.jit;
        if let Some(job) = self.jit.fail(id, error, settings)
            && let Some(kernel) = self.wanted(&self.process(), &job.query)
        {
            self.jit.enqueue(settings, &kernel, &job.query, job.compile.call);
        }
    }

    /// In a process that was forked: what the parent's thread was compiling waits again.
    pub fn compiles_forked(&self) {
        self.jit.forked();
    }

    /// From now on a kernel is compiled for calls like this one. Does nothing where nobody keeps count. What is to be
    /// known to the next process as well is kept with [`Engine::keep_warm`].
    pub fn mark_warm(&self, kernel: &str, call: &CallSpec, device: DeviceIx) -> Result<(), Error> {
        self.jit.mark(self, kernel, &self.bind_call(call, device)?)
    }

    /// What kernels are compiled for; nothing when nobody keeps count.
    pub fn warm_state(&self) -> Arc<Warm> {
        self.with_snapshot(|s| s.spec().warm.clone()).unwrap_or_default()
    }

    /// How far the kernels that are compiled on first use are compiled.
    pub fn jit_status(&self) -> JitStatus {
        self.jit.status()
    }

    /// Puts in force what earlier processes compiled, as far as it is still there. Gives how much that is.
    pub fn load_warm(&self) -> Result<usize, Error> {
        self.jit.load(self, self.config().manifest_path())
    }

    /// Keeps for the next process that a kernel was compiled, in so many milliseconds. `caches`: the folders where its
    /// library keeps what it compiled; without any there is nothing to keep. A disk that is full or read-only costs the
    /// next process some compilations, nothing else.
    pub fn keep_warm(&self, kernel: &str, call: &CallSpec, device: DeviceIx, compile_ms: f64, caches: Vec<PathBuf>) {
        let compiled = Compiled { kernel, call, device, compile_ms, caches };
        self.jit.keep(self, self.config().manifest_path(), compiled);
    }

    /// Takes note of a call that was decided in a scope: counts it in the manifest, and queues the kernel that should be
    /// compiled for it. `true` when something was queued that was not before. An error when only a kernel could serve the
    /// call that is not compiled, and the configuration does not want it to be while the call waits.
    pub fn decided(&self, scope: &Scope<'_>, call: &NamedCall<'_>, bound: &Bound) -> Result<bool, Error> {
        if self.jit.elsewhere {
            self.jit.look_for_devices(self);
        }
        let spec = CallSpec::canonical(call, bound);
        let query = &bound.query;
        let (state, snapshot) = (scope.state(), scope.snapshot());
        self.manifest.seen(&spec, &device_name(&snapshot.spec().devices, query.device()));
        if let Some(plan) = state.learner.upgrade() {
            plan.note(snapshot, query, &spec);
        }
        let is_compiled = |ix| snapshot.kernel(ix).jit && snapshot.static_reasons(ix, query.device()).is_empty();
        if !self.jit.elsewhere || !snapshot.kernels_for(query.op()).any(is_compiled) {
            return Ok(false);
        }
        // A sequence grows with every step, and most steps lie where the one before did.
        let cell = snapshot.cell_key(query);
        if state.own_cache.is_none() && self.jit.is_settled(snapshot.epoch(), &cell) {
            return Ok(false);
        }
        let decision = snapshot.select(query);
        let config = self.config();
        let settings = &config.settings.jit;
        let wanted = self.jit.wanted(state, &decision);
        let nothing = wanted.is_none();
        let queued = wanted.is_some_and(|kernel| self.jit.enqueue(settings, &kernel, query, spec));
        let somebody_is_ready = decision.ranked().any(|candidate| !candidate.cold);
        if !somebody_is_ready && decision.chosen().is_some() && settings.fail_on_no_fallback {
            return Err(only_cold(snapshot, decision));
        }
        if nothing && state.own_cache.is_none() {
            self.jit.settle(snapshot.epoch(), cell);
        }
        Ok(queued)
    }

    /// The kernel that would serve a call if it were compiled for it, and is not; `None` when nothing is to be gained.
    /// One whose compilation was given up is passed over.
    pub fn wanted(&self, scope: &Scope<'_>, query: &Query) -> Option<String> {
        self.jit.wanted(scope.state(), &scope.snapshot().select(query))
    }

    /// The calls it was asked to decide.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where the manifest is kept: at `path` when one is given, else where the configuration says.
    pub fn manifest_path(&self, path: Option<&Path>) -> Result<PathBuf, ManifestError> {
        path.map(Path::to_owned).or_else(|| self.config().manifest_path()).ok_or(ManifestError::Nowhere)
    }
}
