//! What one can change: kernels, backends, devices, the operator's will. Every change is a whole new state, built and
//! checked first; when that fails nothing changes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lz_model::capabilities::{self, Capabilities, CapabilitiesError, Problem};
use lz_model::{BackendDescriptor, GenerationTable, KernelDescriptor, PluginOrigin, Query};
use lz_select::{BackendState, Invalidate, KernelName, SnapshotSpec};

use super::Core;
use super::executable::{DynamicKernel, Executable};
use super::scope::{OverlayId, Scope};
use super::state::{Draft, State};
use crate::error::Error;

/// What a change put out of use.
struct Dropped {
    _draft: Draft,
    _state: Option<Arc<State>>,
}

/// A capabilities document that was read, or why it was refused, and the name it was loaded by.
struct Loaded {
    name: String,
    read: Result<Capabilities, CapabilitiesError>,
}

impl Loaded {
    fn refusal(&self) -> Option<Error> {
        let error = self.read.as_ref().err()?.clone();
        Some(Error::Capabilities { backend: self.name.clone(), error })
    }

    /// Puts what it says into a draft, in the place of what was said under its name before.
    fn put(self, draft: &mut Draft) {
        let Loaded { name, read } = self;
        let spec = &mut draft.spec;
        match read {
            Ok(document) => {
                // What a refused document left under the name it was loaded by.
                let left_over = |b: &BackendState| b.unavailable.is_some() && b.descriptor.version == "unknown";
                if spec.backends.get(&name).is_some_and(left_over) {
                    spec.backends.remove(&name);
                }
                spec.kernels.retain(|kernel| kernel.backend != document.backend.name);
                spec.kernels.extend(document.kernels.into_iter().map(Arc::new));
                if !document.generations.is_empty() {
                    let table = GenerationTable::builtin().overlaid(document.generations);
                    spec.devices.iter_mut().for_each(|device| *device = device.clone().completed(&table));
                    // Devices that are found later are completed by it as well.
                    draft.generations.push(table);
                }
                draft.spec.backend(document.backend);
            }
            Err(error) => {
                let mut descriptor = BackendDescriptor::native(name.as_str(), "unknown", Vec::new());
                descriptor.origin = PluginOrigin::EntryPoint;
                spec.kernels.retain(|kernel| kernel.backend != name);
                let reason = error.reason(&name);
                spec.backends.insert(name, BackendState::unavailable(descriptor, reason));
            }
        }
    }
}

impl Core {
    /// Changes what selection depends on. The new state is built and checked first; when that
    /// fails nothing changes.
    pub fn update(&self, change: impl FnOnce(&mut SnapshotSpec)) -> Result<(), Error> {
        self.change(|draft| change(&mut draft.spec))
    }

    fn change(&self, change: impl FnOnce(&mut Draft)) -> Result<(), Error> {
        if self.holds_changes.load(Ordering::Acquire) {
            self.change_draft(change);
            return Ok(());
        }
        self.change_warmed(change, |_| Ok(()), &[])
    }

    /// Changes what the next state is built from, and builds none.
    fn change_draft(&self, change: impl FnOnce(&mut Draft)) {
        let mut current = self.draft.lock();
        let mut next = current.clone();
        change(&mut next);
        next.repin();
        let before = std::mem::replace(&mut *current, next);
        // As in `change_warmed`.
        drop(current);
        drop(before);
    }

    /// Has changes wait for [`Core::settle_changes`]: loading makes dozens of them, and building a state for each would take
    /// most of its time. Only for changes that are known to fit.
    pub fn hold_changes(&self) {
        self.holds_changes.store(true, Ordering::Release);
    }

    /// Builds the state of everything that changed since [`Core::hold_changes`]. Nothing happens where nothing was held.
    pub fn settle_changes(&self) -> Result<(), Error> {
        match self.holds_changes.swap(false, Ordering::AcqRel) {
            true => self.change(|_| {}),
            false => Ok(()),
        }
    }

    /// As [`Core::update`]; the new state is refused if `check` says so, and these queries are decided before anybody
    /// sees it.
    pub(crate) fn change_warmed(
        &self,
        change: impl FnOnce(&mut Draft),
        check: impl FnOnce(&State) -> Result<(), Error>,
        warm: &[Query],
    ) -> Result<(), Error> {
        // What goes out of use is dropped when the lock is released: it may be the last of a Python object, whose
        // destructor may call the engine.
        let (result, dropped) = self.change_locked(change, check, warm);
        drop(dropped);
        result
    }

    /// As [`Core::change_warmed`], with what goes out of use: the caller drops it.
    fn change_locked(
        &self,
        change: impl FnOnce(&mut Draft),
        check: impl FnOnce(&State) -> Result<(), Error>,
        warm: &[Query],
    ) -> (Result<(), Error>, Dropped) {
        let mut current = self.draft.lock();
        let mut next = current.clone();
        change(&mut next);
        next.repin();
        next.epoch = current.epoch + 1;
        let state = match next.build() {
            Ok(state) => Arc::new(state),
            Err(error) => return (Err(error), Dropped { _draft: next, _state: None }),
        };
        if let Err(error) = check(&state) {
            return (Err(error), Dropped { _draft: next, _state: Some(state) });
        }
        let scope = Scope::of(self, state.clone(), OverlayId::NONE);
        for query in warm {
            scope.chain(query);
        }
        drop(scope);
        let state = self.state.swap(state);
        self.move_version();
        let draft = std::mem::replace(&mut *current, next);
        (Ok(()), Dropped { _draft: draft, _state: Some(state) })
    }

    /// Registers a kernel with its implementation. Several versions of one id may be registered;
    /// the newest is preferred, and `id@version` names one of them.
    pub fn register(&self, descriptor: KernelDescriptor, kernel: Arc<dyn DynamicKernel>) -> Result<(), Error> {
        self.register_as(descriptor, Executable::Dynamic(kernel))
    }

    /// As [`Core::register`], with anything that runs it.
    pub fn register_as(&self, descriptor: KernelDescriptor, executable: Executable) -> Result<(), Error> {
        self.change(|draft| {
            let name = descriptor.backend.clone();
            draft.spec.backends.entry(name.clone()).or_insert_with(|| {
                let (version, platforms) = (descriptor.version.clone(), descriptor.platforms.clone());
                BackendState::available(BackendDescriptor::native(name, version, platforms))
            });
            let key = (descriptor.id.clone(), descriptor.version.clone());
            // Under the same name there may still be what ran a kernel that a document no longer has.
            draft.executables.insert(key, executable);
            draft.spec.kernels.push(Arc::new(descriptor));
        })
    }

    /// Gives an implementation to a kernel that so far was only described, by a document.
    pub fn attach(&self, id: &str, version: &str, kernel: Arc<dyn DynamicKernel>) -> Result<(), Error> {
        self.attach_all(vec![(id.to_owned(), version.to_owned(), Executable::Dynamic(kernel))])
    }

    /// As [`Core::attach`], for many at once: id, version, and what runs it. All or none.
    pub fn attach_all(&self, kernels: Vec<(String, String, Executable)>) -> Result<(), Error> {
        for (id, version, _) in &kernels {
            self.known(id, version)?;
        }
        self.change(|draft| {
            draft.executables.extend(kernels.into_iter().map(|(id, version, e)| ((id, version), e)));
        })
    }

    /// Takes over what another engine has registered and this one has not: backends, kernels, versions found.
    pub fn adopt(&self, other: &Core) -> Result<(), Error> {
        let theirs = other.draft.lock().clone();
        self.change(|draft| {
            draft.spec.compiled = theirs.spec.compiled;
            let known: HashSet<(String, String)> =
                draft.spec.kernels.iter().map(|k| (k.id.clone(), k.version.clone())).collect();
            let new = |k: &&Arc<KernelDescriptor>| !known.contains(&(k.id.clone(), k.version.clone()));
            draft.spec.kernels.extend(theirs.spec.kernels.iter().filter(new).cloned());
            for (name, state) in theirs.spec.backends {
                draft.spec.backends.entry(name).or_insert(state);
            }
            for (library, version) in theirs.spec.versions {
                draft.spec.versions.entry(library).or_insert(version);
            }
            for (key, executable) in theirs.executables {
                draft.executables.entry(key).or_insert(executable);
            }
        })
    }

    fn known(&self, id: &str, version: &str) -> Result<(), Error> {
        let known = self.with_snapshot(|s| s.kernels().any(|(_, k)| k.id == id && k.version == version));
        if known { Ok(()) } else { Err(Error::UnknownKernel { id: format!("{id}@{version}"), nearest: None }) }
    }

    /// Removes one version of a kernel. Calls under way finish with it.
    pub(crate) fn remove_kernel(&self, id: &str, version: &str) -> Result<(), Error> {
        self.known(id, version)?;
        self.change(|draft| {
            // A configuration may go on naming it.
            let removed = draft.spec.kernels.iter().filter(|k| k.id == id && k.version == version);
            let removed: Vec<KernelName> = removed.map(|kernel| KernelName::from(&**kernel)).collect();
            for name in removed.into_iter().filter(|name| !draft.spec.names.contains(name)).collect::<Vec<_>>() {
                Arc::make_mut(&mut draft.spec.names).push(name);
            }
            draft.spec.kernels.retain(|k| k.id != id || k.version != version);
            // A backend that was only a name for registered code goes with its last kernel.
            let kernels = &draft.spec.kernels;
            let named = |backend: &str| kernels.iter().any(|k| k.backend == backend);
            draft.spec.backends.retain(|name, b| !b.descriptor.is_code() || named(name));
            draft.executables.remove(&(id.to_owned(), version.to_owned()));
            Arc::make_mut(&mut draft.spec.proofs).forget(id, version);
        })?;
        self.forget_removed_kernels();
        Ok(())
    }

    /// Failures of a kernel go with it: whoever comes under its name begins with a clean slate.
    pub(crate) fn forget_removed_kernels(&self) {
        let left: HashSet<String> = self.with_snapshot(|s| s.kernels().map(|(_, k)| k.id.clone()).collect());
        self.guard.breakers().forget(|kernel| !left.contains(kernel));
    }

    /// Loads a backend's capabilities document. Its kernels can be selected; they run once
    /// implementations are attached. A document that is refused leaves the backend known and
    /// disabled, with its reason. Loading a document again replaces what it said before.
    pub fn load_capabilities(&self, name: &str, text: &str) -> Result<(), Error> {
        let document = self.read_capabilities(name, text)?;
        let refused = document.refusal();
        self.change(|draft| document.put(draft))?;
        refused.map_or(Ok(()), Err)
    }

    /// Loads a document with what runs its kernels: id, version, and the executable. `adjust` changes what the document said.
    /// One change, all or none; a document that is refused leaves its backend known and disabled.
    pub fn load_backend(
        &self,
        name: &str,
        text: &str,
        adjust: impl FnOnce(&mut SnapshotSpec),
        kernels: Vec<(String, String, Executable)>,
    ) -> Result<(), Error> {
        let document = self.read_capabilities(name, text)?;
        let refused = document.refusal();
        self.change(|draft| {
            document.put(draft);
            adjust(&mut draft.spec);
            draft.executables.extend(kernels.into_iter().map(|(id, version, e)| ((id, version), e)));
        })?;
        refused.map_or(Ok(()), Err)
    }

    /// As [`Core::load_capabilities`], for many documents, each with a name: the state is built once. Gives why those that
    /// were refused were.
    pub fn load_all_capabilities(&self, documents: &[(String, String)]) -> Vec<Error> {
        let (mut read, mut refused) = (Vec::new(), Vec::new());
        for (name, text) in documents {
            match self.read_capabilities(name, text) {
                Ok(document) => {
                    refused.extend(document.refusal());
                    read.push(document);
                }
                Err(error) => refused.push(error),
            }
        }
        match self.change(|draft| read.into_iter().for_each(|document| document.put(draft))) {
            Ok(()) => refused,
            // One of them does not fit the others: each by itself, so that the others are loaded.
            Err(_) => documents.iter().filter_map(|(name, text)| self.load_capabilities(name, text).err()).collect(),
        }
    }

    /// Reads a document. Code that is registered stays registered, whatever a file calls itself.
    fn read_capabilities(&self, name: &str, text: &str) -> Result<Loaded, Error> {
        let read = capabilities::read(text);
        let backend = read.as_ref().map_or(name, |document| document.backend.name.as_str()).to_owned();
        let taken = self.with_snapshot(|s| s.spec().backends.get(&backend).is_some_and(|b| b.descriptor.is_code()));
        if taken {
            let message = format!("'{backend}' is a backend made of code; name the document's backend otherwise");
            let error = CapabilitiesError::Problems(vec![Problem { path: "/backend".into(), message }]);
            return Err(Error::Capabilities { backend, error });
        }
        Ok(Loaded { name: name.to_owned(), read })
    }

    /// Forgets cached decisions.
    pub fn invalidate(&self, what: &Invalidate) {
        self.cache.invalidate(what);
        self.move_version();
    }

    /// Forgets cached decisions that would run a backend's kernels.
    pub fn invalidate_backend(&self, backend: &str) {
        let kernels =
            self.with_snapshot(|s| s.kernels().filter(|(_, k)| k.backend == backend).map(|(ix, _)| ix).collect());
        self.invalidate(&Invalidate::Kernels(kernels));
    }
}
