//! Lockfiles and dispatch tables, in force: read where the configuration names them or given by code, put in place as pins
//! of the snapshot, and judged.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lz_config::{Config, ConfigError, Origin, Problem, ProblemKind};

use super::Engine;
use crate::documents::{DispatchTable, Lockfile, Mismatch, PinStatus, Slot, Source, status};
use crate::error::Error;
use crate::warn::Warning;

/// The documents a configuration names. One that cannot be read makes the configuration one that cannot be used.
pub(crate) fn configured(config: &Config, unread: &[&str]) -> Result<Vec<(Slot, Arc<Source>)>, Error> {
    let (mut sources, mut problems) = (Vec::new(), Vec::new());
    let mut take = |key: &str, path: Option<PathBuf>, slot: Slot, parse: &dyn Fn(&str, &str) -> Parsed| {
        let Some(path) = path.filter(|_| !unread.contains(&key)) else { return };
        let name = path.display().to_string();
        match lz_config::read_file(&path).and_then(|text| parse(&text, &name)) {
            Ok(source) => sources.push((slot, source)),
            Err(kind) => {
                let at = config.origin(key).cloned().unwrap_or(Origin::Default);
                problems.push(Problem { at, key: key.to_owned(), value: Some(name), kind });
            }
        }
    };
    take("lockfile", config.lockfile_path(), Slot::ConfiguredLockfile, &|text, name| {
        Lockfile::parse(text).map(|lockfile| Source::lockfile(lockfile, name)).map_err(|e| unfit(name, &e.to_string()))
    });
    take("dispatch_table", config.dispatch_table_path(), Slot::ConfiguredTable, &|text, name| {
        DispatchTable::parse(text).map(|table| Source::table(table, name)).map_err(|e| unfit(name, &e.to_string()))
    });
    if problems.is_empty() { Ok(sources) } else { Err(Error::Config(ConfigError { problems })) }
}

type Parsed = Result<Arc<Source>, ProblemKind>;

fn unfit(name: &str, error: &str) -> ProblemKind {
    ProblemKind::Contradiction { message: format!("'{name}', {error}") }
}

/// The files of a configuration that hold decisions.
pub(crate) fn files(config: &Config) -> impl Iterator<Item = PathBuf> {
    [config.lockfile_path(), config.dispatch_table_path()].into_iter().flatten()
}

impl Engine {
    /// Puts a lockfile in force, in the place of one that code put in force before and above one that is configured.
    /// `origin` is what it is called: its path. Gives the entries that cannot be kept; the others are in force.
    pub fn replay(&self, lockfile: &Lockfile, origin: &str) -> Result<Vec<Mismatch>, Error> {
        self.pin(Slot::CodeLockfile, Source::lockfile(lockfile.clone(), origin))
    }

    /// What [`Engine::replay`] would say; nothing is changed.
    pub fn check_lockfile(&self, lockfile: &Lockfile, origin: &str) -> Result<PinStatus, Error> {
        self.would_pin(Slot::CodeLockfile, Source::lockfile(lockfile.clone(), origin))
    }

    /// Puts a dispatch table in force, as [`Engine::replay`] does a lockfile. One for other hardware, or of other
    /// capabilities, is refused as a whole.
    pub fn load_table(&self, table: &DispatchTable, origin: &str) -> Result<Vec<Mismatch>, Error> {
        let source = Source::table(table.clone(), origin);
        self.look_for_more(|devices| source.is_for_others(devices))?;
        if let Some(kind) = self.with_snapshot(|snapshot| source.refusal(snapshot.spec())) {
            return Err(Error::TableRefused { table: origin.to_owned(), why: Box::new(kind) });
        }
        self.pin(Slot::CodeTable, source)
    }

    /// What of a table could be kept; nothing is changed.
    pub fn check_table(&self, table: &DispatchTable, origin: &str) -> Result<PinStatus, Error> {
        self.would_pin(Slot::CodeTable, Source::table(table.clone(), origin))
    }

    /// From now on does not read what a setting (`lockfile`, `dispatch_table`) names: for whoever is about to write it.
    pub fn leave_unread(&self, setting: &'static str) {
        self.control.unread.lock().push(setting);
    }

    /// Takes back the lockfile and the table that code put in force; those of the configuration stay.
    pub fn unpin(&self) -> Result<(), Error> {
        self.change_warmed(|draft| draft.pinned.take_back(), |_| Ok(()), &[])
    }

    fn pin(&self, slot: Slot, source: Arc<Source>) -> Result<Vec<Mismatch>, Error> {
        self.look_for_more(|devices| source.is_for_others(devices))?;
        self.change_warmed(|draft| draft.pinned.put(slot, source.clone()), |_| Ok(()), &[])?;
        Ok(status(&self.state.load().snapshot, &source).mismatches)
    }

    fn would_pin(&self, slot: Slot, source: Arc<Source>) -> Result<PinStatus, Error> {
        self.look_for_more(|devices| source.is_for_others(devices))?;
        let mut draft = self.draft.lock().clone();
        draft.pinned.put(slot, source.clone());
        draft.repin();
        Ok(status(&draft.build()?.snapshot, &source))
    }

    /// The lockfiles and dispatch tables that were read, the highest first, and what of each is in force now.
    pub fn pinned(&self) -> Arc<Vec<PinStatus>> {
        let version = self.version();
        if let Some((_, known)) = self.control.judged.lock().as_ref().filter(|(at, _)| *at == version) {
            return known.clone();
        }
        let sources: Vec<Arc<Source>> = self.draft.lock().pinned.sources().cloned().collect();
        let state = self.state.load();
        let judged = Arc::new(sources.iter().map(|source| status(&state.snapshot, source)).collect::<Vec<_>>());
        *self.control.judged.lock() = Some((version, judged.clone()));
        judged
    }

    /// A sentence about each document that is not in force as a whole. To be asked once kernels are registered. What is for other
    /// devices is not told of as long as GPUs were not looked for, but when they are.
    pub fn pin_warnings(&self) -> Vec<String> {
        let unseen = self.unseen.load(Ordering::Acquire);
        let told = |status: &PinStatus| status.warning().filter(|_| !(unseen && status.is_for_others()));
        self.pinned().iter().filter_map(told).collect()
    }

    /// Tells of documents for devices that are not here.
    pub(crate) fn warn_of_other_devices(&self) {
        for sentence in self.pinned().iter().filter(|s| s.is_for_others()).filter_map(PinStatus::warning) {
            self.warnings.give(&Warning::NotInForce { sentence });
        }
    }
}
