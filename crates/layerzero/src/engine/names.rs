//! Names in a configuration: kernels, aliases, backends and libraries. One that nobody knows is refused, one that is
//! known and not installed is said once.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use lz_config::Config;
use lz_select::{Pattern, Snapshot, not_installed, refusals};

use super::Engine;
use crate::error::Error;
use crate::warn::Warning;

impl Engine {
    /// Every kernel is registered that the configuration may name, of an engine that was made to wait for that
    /// ([`kernels_follow`](crate::EngineBuilder::kernels_follow)). A configuration that names nothing known is an error
    /// from now on, the one in force too.
    pub fn settle_names(&self) -> Result<(), Error> {
        if !self.control.kernels_follow.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let checked = self.check_names(&self.config(), &self.state.load().snapshot);
        // It may have been put right since it was read.
        let checked = checked.or_else(|_| self.reconfigure(|layers| layers.reread().map_err(Error::Config)));
        match &checked {
            Ok(()) => self.warn_of_absent(),
            // Whoever asks next is told as well.
            Err(_) => self.control.kernels_follow.store(true, Ordering::Release),
        }
        self.loaded(checked)
    }

    /// An error when a configuration names something that nobody knows, or locks an operation to nothing.
    pub(crate) fn check_names(&self, config: &Config, snapshot: &Snapshot) -> Result<(), Error> {
        if self.control.kernels_follow.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut refused = config.refused(&refusals(config.policy(), snapshot));
        for (index, rollout) in config.rollouts.iter().enumerate() {
            let candidate = Pattern::Kernel(rollout.candidate.clone());
            if !snapshot.knows(&candidate) {
                refused.problems.push(config.unknown_candidate(index, snapshot.nearest_name(&candidate)));
            }
        }
        for name in &config.settings.backends.unproven {
            let source = Pattern::Source(name.clone());
            if !snapshot.knows(&source) {
                refused.problems.push(config.unknown_unproven(name, snapshot.nearest_name(&source)));
            }
        }
        if refused.problems.is_empty() { Ok(()) } else { Err(Error::Config(refused)) }
    }

    /// Says which names of the configuration in force are of libraries that are not installed, each once in the life of
    /// the engine.
    pub(crate) fn warn_of_absent(&self) {
        if self.control.kernels_follow.load(Ordering::Acquire) {
            return;
        }
        let config = self.config();
        let absent = not_installed(config.policy(), &self.state.load().snapshot);
        let (mut locks, mut others) = (Vec::new(), BTreeSet::new());
        let mut said = self.control.absent.lock();
        for (rule, name) in absent {
            let locked = matches!(rule.action, lz_select::Action::Lock(_));
            let cause = if locked { rule.name.clone() } else { name.clone() };
            if !said.insert(cause) {
                continue;
            }
            match locked {
                true => locks.push(rule.name.clone()),
                false => drop(others.insert(name)),
            }
        }
        drop(said);
        for lock in locks {
            let sentence = format!("{lock}: it is not installed here; calls that it covers fail");
            self.warn(&Warning::NotInForce { sentence });
        }
        if !others.is_empty() {
            let names = others.into_iter().collect::<Vec<_>>().join(", ");
            let sentence = format!("not installed here: {names}; what the configuration says about it has no effect");
            self.warn(&Warning::NotInForce { sentence });
        }
    }
}
