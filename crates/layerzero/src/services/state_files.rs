//! What is kept in the state directory for other processes: figures of rollouts, circuits that opened.

use std::path::PathBuf;

use super::failures_file::FailuresFile;
use super::status::StatusFile;
use crate::core::{Core, Errand};

/// The files of the state directory.
pub(crate) struct StateFiles {
    pub status: StatusFile,
    failures: FailuresFile,
}

impl StateFiles {
    /// `fixed`: the directory, instead of the one that the environment says.
    pub fn new(fixed: Option<PathBuf>) -> StateFiles {
        StateFiles { status: StatusFile::new(fixed), failures: FailuresFile::default() }
    }

    /// Goes by what earlier processes left of circuits, once for each place it is kept at.
    pub fn read_circuits(&self, core: &Core) {
        if let Some(folder) = self.status.folder() {
            self.failures.read(core, &folder);
        }
    }

    /// Does what follows from calls.
    pub fn run(&self, core: &Core, errand: Errand) {
        match errand {
            Errand::LookAtMemory => core.refresh_memory(),
            Errand::PublishRollouts => self.status.publish(core),
            Errand::KeepCircuits => match self.status.folder() {
                Some(folder) => self.failures.keep(core, &folder),
                None => drop(core.guard.circuits.take_changes()),
            },
        }
    }
}
