//! The operator's configuration, applied to a running engine.
//!
//! A change is read, resolved, built, checked and warmed before it is swapped in; when any of that fails, what was
//! serving goes on serving. Readers never wait.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use lz_config::{CodeLayer, Config, Layers, Sources, Value};
use lz_resilience::{Event, Level, Rollout, RolloutSpec, Watch};

use super::{Engine, pins};
use crate::core::Draft;
use crate::error::Error;
use crate::forking;
use crate::services::control::{apply, breaker, degradation, rollout_rule, rollout_spec};
use crate::services::status::state_dir;

impl Engine {
    /// The configuration in force.
    pub fn config(&self) -> Arc<Config> {
        self.control.config.load_full()
    }

    /// Reads the configuration in force.
    pub fn with_config<R>(&self, read: impl FnOnce(&Config) -> R) -> R {
        read(&self.control.config.load())
    }

    /// What is to be said about the configuration: names nobody knows.
    pub fn config_warnings(&self) -> Vec<String> {
        self.config().warnings.iter().map(ToString::to_string).collect()
    }

    /// Takes its files and environment from these sources; what code has set stays.
    pub fn load_sources(&self, sources: &Sources) -> Result<(), Error> {
        self.loaded(self.reconfigure(|layers| layers.moved(sources).map_err(Error::Config)))
    }

    /// Takes this file for the project's.
    pub fn load_config(&self, file: &Path) -> Result<(), Error> {
        self.loaded(self.reconfigure(|layers| {
            let sources = Sources { project: Some(file.to_owned()), found: false, ..layers.sources().clone() };
            layers.moved(&sources).map_err(Error::Config)
        }))
    }

    /// Files that were refused are out of order until some are taken, whoever asked for them.
    pub(crate) fn loaded(&self, result: Result<(), Error>) -> Result<(), Error> {
        *self.control.last_error.lock() = result.as_ref().err().map(ToString::to_string);
        result
    }

    /// Sets settings from code, all or none.
    pub fn configure(&self, entries: impl IntoIterator<Item = (String, Value)>) -> Result<(), Error> {
        self.edit(|code| code.set_all(entries))
    }

    /// Only `kernel` may serve `operation`: the id of a kernel, an alias, a backend, a library, or a glob of these.
    pub fn lock(&self, operation: &str, kernel: &str) -> Result<(), Error> {
        self.edit(|code| code.lock(operation, kernel))
    }

    /// As [`Engine::lock`], where `kernel` is known and can run; elsewhere it does nothing.
    pub fn lock_if_there(&self, operation: &str, kernel: &str) -> Result<(), Error> {
        self.edit(|code| code.lock_if_there(operation, kernel))
    }

    /// Takes a lock back, wherever it was said.
    pub fn unlock(&self, operation: &str) -> Result<(), Error> {
        self.edit(|code| code.unlock(operation))
    }

    /// Forgets what code has set.
    pub fn reset_code(&self) -> Result<(), Error> {
        self.edit(|code| {
            code.reset();
            Ok(())
        })
    }

    fn edit(&self, change: impl FnOnce(&mut CodeLayer) -> Result<(), lz_config::ConfigError>) -> Result<(), Error> {
        self.reconfigure(|layers| {
            let mut next = layers.clone();
            change(next.code()).map_err(Error::Config)?;
            Ok(next)
        })
    }

    /// Reads its files again. A file that is refused leaves the last good configuration in force, and is told as an event.
    pub fn reload(&self) -> Result<(), Error> {
        let result = self.loaded(self.reconfigure(|layers| layers.reread().map_err(Error::Config)));
        let sources = self.config().files().iter().map(|f| f.display().to_string()).collect();
        match &result {
            Ok(()) => {
                self.control.succeeded.fetch_add(1, Ordering::Relaxed);
                self.guard.emit(Event::ReloadSucceeded { version: self.version(), sources });
            }
            Err(error) => {
                self.control.refused.fetch_add(1, Ordering::Relaxed);
                self.guard.emit(Event::ReloadRefused { error: error.to_string(), sources });
            }
        }
        result
    }

    /// Reloads whenever one of its files changes, if the configuration says so; otherwise stops to.
    pub fn watch(self: &Arc<Engine>) -> Result<(), Error> {
        let config = self.config();
        let files: Vec<PathBuf> = self.watched();
        let mut watch = self.control.watch.lock();
        *watch = None;
        if !config.settings.watch || files.is_empty() || self.control.ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let engine: Weak<Engine> = Arc::downgrade(self);
        let (before, watched) = (config.clone(), files.clone());
        let reload = move || {
            let Some(engine) = engine.upgrade() else { return };
            forking::without_forks(|| engine.reload_and_watch(&before, &watched));
        };
        let debounce = Duration::from_millis(config.settings.watch_debounce_ms);
        *watch = Some(Watch::start(files, debounce, reload).map_err(Error::Watch)?);
        Ok(())
    }

    /// Reloads, and watches other files where the new configuration says so.
    fn reload_and_watch(self: &Arc<Engine>, before: &Config, watched: &[PathBuf]) {
        // What is refused is an event, and in the health; there is nobody here to tell.
        if self.reload().is_err() {
            return;
        }
        let (old, new) = (&before.settings, &self.config().settings);
        if self.watched() == watched && (old.watch, old.watch_debounce_ms) == (new.watch, new.watch_debounce_ms) {
            return;
        }
        // Other files, or not at all from now on. What changed before it is watched is read once more.
        match self.watch() {
            Ok(()) if new.watch => drop(self.reload()),
            Ok(()) => {}
            Err(error) => tracing::warn!(target: "layerzero", "configuration files are no longer watched: {error}"),
        }
    }

    /// The program ends: no thread of the engine goes on, and every call is decided anew.
    pub fn end(&self) {
        self.control.ended.store(true, Ordering::Release);
        // Taken first: a reload that is under way may want to watch other files.
        let watch = self.control.watch.lock().take();
        drop(watch);
        self.errands.end();
        self.move_version();
    }

    /// This process is a child that was forked: the thread that watches files is its parent's, so it starts its own.
    pub fn forked(self: &Arc<Engine>) {
        self.errands.forked();
        let watch = self.control.watch.lock().take();
        let Some(watch) = watch else { return };
        // To drop it would be to wait for a thread that is not here.
        std::mem::forget(watch);
        if let Err(error) = self.watch() {
            tracing::warn!(target: "layerzero", "configuration files are not watched in process {}: {error}", std::process::id());
        }
    }

    /// The files to watch: those that were read, and the project's and the user's, which may come to be.
    fn watched(&self) -> Vec<PathBuf> {
        let layers = self.control.layers.lock();
        let sources = layers.sources();
        let mut files: Vec<PathBuf> = [&sources.project, &sources.user].into_iter().flatten().cloned().collect();
        files.extend(self.config().files().iter().filter(|f| !files.contains(f)).cloned().collect::<Vec<_>>());
        files.extend(pins::files(&self.config()));
        files
    }

    /// Resolves, builds, warms and swaps, or changes nothing.
    pub(crate) fn reconfigure(&self, change: impl FnOnce(&Layers) -> Result<Layers, Error>) -> Result<(), Error> {
        // Held throughout: two changes at once are made one after the other.
        let mut layers = self.control.layers.lock();
        let before = self.config();
        let next = change(&layers)?;
        let config = next.resolve().map_err(Error::Config)?;
        let documents = pins::configured(&config, &self.control.unread.lock())?;
        self.take_over(&config, |draft| draft.pinned.configure(documents))?;
        *self.files.status.dir.lock() = state_dir(&next.sources().environment);
        *layers = next;
        drop(layers);
        self.files.read_circuits(self);
        self.learn_of_other_database(&before);
        self.files.status.republish(self);
        self.warn_of_absent();
        Ok(())
    }

    /// Puts kernels, documents and configuration back as they were at a checkpoint.
    pub(crate) fn reinstate(&self, before: Layers, change: impl FnOnce(&mut Draft)) -> Result<(), Error> {
        let mut layers = self.control.layers.lock();
        let replaced = self.config();
        let config = before.resolve().map_err(Error::Config)?;
        self.take_over(&config, change)?;
        *self.files.status.dir.lock() = state_dir(&before.sources().environment);
        *layers = before;
        drop(layers);
        self.learn_of_other_database(&replaced);
        self.files.status.republish(self);
        Ok(())
    }

    /// Puts a configuration in force, together with a change of what selection depends on; whoever calls holds the layers.
    fn take_over(&self, config: &Config, change: impl FnOnce(&mut Draft)) -> Result<(), Error> {
        let before = self.config();
        let rollouts = self.rollouts_for(config);
        let recent = self.recent();
        self.change_warmed(
            |draft| {
                change(draft);
                apply(config, &mut draft.spec);
                draft.spec.rollouts = rollouts.iter().map(rollout_rule).collect();
            },
            |state| self.check_names(config, &state.snapshot),
            &recent,
        )?;
        self.guard.rollouts.store(Arc::new(rollouts));
        self.control.config.store(Arc::new(config.clone()));
        let (old, new) = (&before.settings, &config.settings);
        if old.breaker != new.breaker {
            self.guard.set_breakers(breaker(config));
            // Whoever holds one of those before asks anew.
            self.move_version();
        }
        if old.degradation != new.degradation {
            self.guard.set_degradation(degradation(config));
            self.restrict(Level::Full);
        }
        if old.cache != new.cache {
            let size = if new.cache.enabled { new.cache.max_size } else { 0 };
            self.cache.resize(usize::try_from(size).unwrap_or(usize::MAX), new.cache.ttl_ms());
        }
        Ok(())
    }

    /// Puts what another database knows in force. Not under the lock of the layers: to learn takes a lock of its own, under
    /// which the layers may be asked.
    fn learn_of_other_database(&self, before: &Config) {
        if before.settings.perfdb != self.config().settings.perfdb && self.perf.is_consulted() {
            self.learn_if_there();
        }
    }

    /// The configuration with another layer above all.
    pub(crate) fn resolve_in(&self, context: &CodeLayer) -> Result<Config, Error> {
        self.control.layers.lock().resolve_in(&[context]).map_err(Error::Config)
    }

    /// The rollouts of a configuration: one that was there before goes on where it stands.
    fn rollouts_for(&self, config: &Config) -> Vec<Arc<Rollout>> {
        let known = self.guard.rollouts.load();
        let specs = config.rollouts.iter().map(rollout_spec);
        let same = |spec: &RolloutSpec| known.iter().find(|r| r.spec() == spec).cloned();
        specs.map(|spec| same(&spec).unwrap_or_else(|| Arc::new(Rollout::new(spec)))).collect()
    }
}
