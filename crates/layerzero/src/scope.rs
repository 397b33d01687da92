//! A scope: which of the engine's states a call is made in.
//!
//! The process has one state, and each context (`with lz.prefer(…):`, a call of `lz.compile(model)`) has one of its own,
//! with its overlay applied. Whoever makes a call says which: there is no ambient one.

use std::sync::Arc;

use lz_select::Snapshot;

use crate::engine::{Engine, State};
use crate::overlay::OverlayId;

/// An engine in one of its states. It keeps the state it was made with: make one for each call.
pub struct Scope<'e> {
    pub(crate) engine: &'e Engine,
    pub(crate) state: arc_swap::Guard<Arc<State>>,
    pub(crate) overlay: OverlayId,
}

impl Engine {
    /// The process's own scope: calls outside of any context.
    pub fn process(&self) -> Scope<'_> {
        Scope { engine: self, state: self.state.load(), overlay: OverlayId::NONE }
    }

    /// The scope of calls made in an overlay; the process's own when there is no such overlay any more.
    pub fn scope(&self, overlay: OverlayId) -> Scope<'_> {
        match self.overlaid(overlay) {
            Some(state) => Scope::of(self, state, overlay),
            None => self.process(),
        }
    }

    /// Runs `read` on the process's current snapshot.
    pub fn with_snapshot<R>(&self, read: impl FnOnce(&Snapshot) -> R) -> R {
        read(&self.state.load().snapshot)
    }
}

impl<'e> Scope<'e> {
    /// An engine in a state that is not in force.
    pub(crate) fn of(engine: &'e Engine, state: Arc<State>, overlay: OverlayId) -> Scope<'e> {
        Scope { engine, state: arc_swap::Guard::from_inner(state), overlay }
    }

    /// The engine.
    pub fn engine(&self) -> &'e Engine {
        self.engine
    }

    /// The overlay it is of.
    pub fn overlay(&self) -> OverlayId {
        self.overlay
    }

    /// What selection goes by.
    pub fn snapshot(&self) -> &Snapshot {
        &self.state.snapshot
    }
}
