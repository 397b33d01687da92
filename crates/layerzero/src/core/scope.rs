//! A scope: which of the core's states a call is made in.
//!
//! The process has one state, and each context (`with lz.prefer(…):`, a call of `lz.decide(model)`) has one of its own,
//! with its overlay applied. Whoever makes a call says which: there is no ambient one.

use std::sync::Arc;

use lz_select::Snapshot;

use super::Core;
use super::state::State;

/// The number of an overlay; zero is none. None is given twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OverlayId(pub u32);

impl OverlayId {
    /// No overlay.
    pub const NONE: OverlayId = OverlayId(0);
}

/// The core in one of its states. It keeps the state it was made with: make one for each call.
pub struct Scope<'e> {
    pub(super) core: &'e Core,
    pub(super) state: arc_swap::Guard<Arc<State>>,
    pub(super) overlay: OverlayId,
}

impl Core {
    /// The process's own scope: calls outside of any context.
    pub fn process(&self) -> Scope<'_> {
        Scope { core: self, state: self.state.load(), overlay: OverlayId::NONE }
    }

    /// Runs `read` on the process's current snapshot.
    pub fn with_snapshot<R>(&self, read: impl FnOnce(&Snapshot) -> R) -> R {
        read(&self.state.load().snapshot)
    }
}

impl<'e> Scope<'e> {
    /// An engine in a state that is not in force.
    pub(crate) fn of(core: &'e Core, state: Arc<State>, overlay: OverlayId) -> Scope<'e> {
        Scope { core, state: arc_swap::Guard::from_inner(state), overlay }
    }

    /// The core.
    pub fn core(&self) -> &'e Core {
        self.core
    }

    /// The overlay it is of.
    pub fn overlay(&self) -> OverlayId {
        self.overlay
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// What selection goes by.
    pub fn snapshot(&self) -> &Snapshot {
        &self.state.snapshot
    }
}
