//! Settings and plans for the calls of one context: `with lz.prefer("flashinfer"):`, a call of `lz.decide(model)`.
//!
//! An overlay is a layer above all others, held by whoever makes the calls, with the plans they are made inside of. For
//! each there is a state of its own, built when it is first used and again when the engine changes; calls outside pay
//! nothing for it.

use std::sync::{Arc, Weak};

use lz_config::CodeLayer;

use super::Engine;
use crate::core::{Draft, OverlayId, Scope, State};
use crate::documents::Plan;
use crate::error::Error;
use crate::services::control::apply;
use crate::services::overlays::Overlay;

/// Shards and entries of an overlay's own selection cache: a block makes few kinds of calls.
const CACHE: (usize, usize) = (4, 1024);

impl Engine {
    /// Makes an overlay, or finds the one that says the same.
    pub fn overlay(&self, layer: CodeLayer) -> Result<Arc<Overlay>, Error> {
        self.overlay_with(layer, &[])
    }

    /// Makes an overlay inside of plans, the innermost first, or finds the one that says the same.
    pub fn overlay_with(&self, layer: CodeLayer, plans: &[Arc<Plan>]) -> Result<Arc<Overlay>, Error> {
        let config = self.resolve_in(&layer)?;
        // Names are checked once for each: a block is entered often.
        self.overlays.find_or_make(layer, plans, || self.check_names(&config, &self.state.load().snapshot))
    }

    /// The scope of calls made in an overlay; the process's own when there is no such overlay any more.
    pub fn scope(&self, overlay: OverlayId) -> Scope<'_> {
        match self.overlaid(overlay) {
            Some(state) => Scope::of(self, state, overlay),
            None => self.process(),
        }
    }

    /// What the state of an overlay, or the process's own, is built from.
    pub(crate) fn draft_in(&self, id: OverlayId) -> Draft {
        let overlay = self.overlays.get(id);
        let config = overlay.as_ref().and_then(|overlay| self.resolve_in(&overlay.layer).ok());
        let mut draft = self.draft.lock().clone();
        if let (Some(overlay), Some(config)) = (overlay, config) {
            apply(&config, &mut draft.spec);
            let plans = overlay.plans.iter().filter_map(Weak::upgrade);
            draft.pinned.put_plans(plans.map(|plan| plan.source().clone()).collect());
            draft.repin();
        }
        draft
    }

    /// The state of an overlay: as it was built, or built anew when the engine has changed since.
    fn overlaid(&self, id: OverlayId) -> Option<Arc<State>> {
        if id == OverlayId::NONE {
            return None;
        }
        let version = self.version();
        if let Some(state) = self.overlays.state(id, version) {
            return Some(state);
        }
        let overlay = self.overlays.get(id)?;
        let mut state = self.draft_in(id).build().ok()?;
        state.own_cache = Some(self.cache.sibling(CACHE.0, CACHE.1));
        state.learner = overlay.plans.first().cloned().unwrap_or_default();
        let state = Arc::new(state);
        self.overlays.put_state(id, version, state.clone());
        Some(state)
    }
}
