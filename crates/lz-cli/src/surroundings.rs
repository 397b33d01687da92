//! Where a command runs: the environment, the directory and so the configuration in force, and the program it is a part
//! of.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use layerzero::status;
use lz_config::{Config, Layers, Sources};

use crate::error::CliError;
use crate::program::Program;

/// Where a command runs.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The environment variables that are looked at.
    pub environment: BTreeMap<String, String>,
    /// The current directory.
    pub directory: PathBuf,
    /// A file to take for the project's, by `--config`.
    pub config: Option<PathBuf>,
    /// The program it is a part of, whose kernels it has; without one, the built-in references.
    pub program: Option<Arc<dyn Program>>,
    /// Whether the command itself has LayerZero's kernels for vector instructions. A program has its own.
    pub simd_kernels: bool,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process() -> Surroundings {
        let directory = std::env::current_dir().unwrap_or_default();
        Surroundings { environment: lz_config::environment(), directory, ..Surroundings::default() }
    }

    /// Where its configuration is found.
    pub fn sources(&self) -> Sources {
        let found = Sources::discover(self.environment.clone(), &self.directory);
        match &self.config {
            Some(file) => Sources { project: Some(self.directory.join(file)), found: false, ..found },
            None => found,
        }
    }

    /// One file, and nothing else: neither the user's file nor the environment.
    pub fn alone(&self, file: &Path) -> Sources {
        Sources { project: Some(self.directory.join(file)), ..Sources::default() }
    }

    /// The configuration in force.
    pub fn config(&self) -> Result<Config, CliError> {
        config(&self.sources())
    }

    /// Where processes keep the figures of their rollouts.
    pub fn state_dir(&self) -> Option<PathBuf> {
        status::state_dir(&self.environment)
    }
}

/// The configuration of some sources.
pub fn config(sources: &Sources) -> Result<Config, CliError> {
    let refused = |error| CliError::Engine(layerzero::Error::Config(error));
    Layers::load(sources).and_then(|layers| layers.resolve()).map_err(refused)
}
