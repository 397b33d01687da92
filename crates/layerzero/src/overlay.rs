//! Settings and plans for the calls of one context: `with lz.prefer("flashinfer"):`, a call of `lz.compile(model)`.
//!
//! An overlay is a layer above all others, held by whoever makes the calls, with the plans they are made inside of. For
//! each there is a state of its own, built when it is first used and again when the engine changes; calls outside pay
//! nothing for it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use lz_config::CodeLayer;
use parking_lot::Mutex;

use crate::baked::Baked;
use crate::control::apply;
use crate::engine::{Draft, Engine, State};
use crate::error::Error;

/// Overlays that are kept although nobody holds them: a block in a loop finds what it decided the last time.
const KEPT: usize = 256;

/// Shards and entries of an overlay's own selection cache: a block makes few kinds of calls.
const CACHE: (usize, usize) = (4, 1024);

/// The number of an overlay; zero is none. None is given twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OverlayId(pub u32);

impl OverlayId {
    /// No overlay.
    pub const NONE: OverlayId = OverlayId(0);
}

/// What the calls of a context are made in. Whoever is inside holds it, on whichever thread or task; there may be any
/// number of them.
pub struct Overlay {
    id: OverlayId,
    layer: CodeLayer,
    /// Its plans, the innermost first. Whoever is inside of one holds it.
    plans: Vec<Weak<Baked>>,
}

impl std::fmt::Debug for Overlay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Overlay").field(&self.id.0).finish()
    }
}

impl Overlay {
    /// Its number.
    pub fn id(&self) -> OverlayId {
        self.id
    }

    fn says(&self, layer: &CodeLayer, plans: &[Arc<Baked>]) -> bool {
        let same = |(known, plan): (&Weak<Baked>, &Arc<Baked>)| known.as_ptr() == Arc::as_ptr(plan);
        self.layer == *layer && self.plans.len() == plans.len() && self.plans.iter().zip(plans).all(same)
    }

    /// Whether one of its plans was dropped. Then no `with` block can still use it.
    fn is_unused(&self) -> bool {
        self.plans.iter().any(|plan| plan.strong_count() == 0)
    }
}

#[derive(Default)]
struct Made {
    by_id: HashMap<OverlayId, Weak<Overlay>>,
    /// The last that were asked for, the newest at the end.
    kept: VecDeque<Arc<Overlay>>,
    /// The last number that was given.
    last: u32,
}

impl Made {
    /// Keeps one as the newest; the oldest beyond [`KEPT`] live as long as somebody holds them.
    fn keep(&mut self, overlay: &Arc<Overlay>) {
        self.kept.retain(|known| !Arc::ptr_eq(known, overlay) && !known.is_unused());
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(overlay.clone());
    }
}

/// The overlays of an engine.
#[derive(Default)]
pub(crate) struct Overlays {
    made: Mutex<Made>,
    states: Mutex<HashMap<OverlayId, (u64, Arc<State>)>>,
}

impl Overlays {
    /// Takes out the states of overlays that are gone, to be dropped when no lock is held: that may run code that asks for
    /// one.
    fn forget(&self, made: &Made) -> Vec<Arc<State>> {
        let mut gone = Vec::new();
        self.states.lock().retain(|id, (_, state)| {
            let is_there = made.by_id.contains_key(id);
            if !is_there {
                gone.push(state.clone());
            }
            is_there
        });
        gone
    }
}

impl Engine {
    /// Makes an overlay, or finds the one that says the same.
    pub fn overlay(&self, layer: CodeLayer) -> Result<Arc<Overlay>, Error> {
        self.overlay_with(layer, &[])
    }

    /// Makes an overlay inside of plans, the innermost first, or finds the one that says the same.
    pub fn overlay_with(&self, layer: CodeLayer, plans: &[Arc<Baked>]) -> Result<Arc<Overlay>, Error> {
        let config = self.resolve_in(&layer)?;
        let mut made = self.overlays.made.lock();
        let known = made.by_id.values().filter_map(Weak::upgrade).find(|known| known.says(&layer, plans));
        if let Some(known) = known {
            made.keep(&known);
            return Ok(known);
        }
        // Once for each: a block is entered often.
        self.check_names(&config, &self.state.load().snapshot)?;
        made.last += 1;
        let plans = plans.iter().map(Arc::downgrade).collect();
        let overlay = Arc::new(Overlay { id: OverlayId(made.last), layer, plans });
        made.keep(&overlay);
        made.by_id.retain(|_, known| known.strong_count() > 0);
        made.by_id.insert(overlay.id, Arc::downgrade(&overlay));
        let gone = self.overlays.forget(&made);
        drop(made);
        drop(gone);
        Ok(overlay)
    }

    fn made(&self, id: OverlayId) -> Option<Arc<Overlay>> {
        self.overlays.made.lock().by_id.get(&id).and_then(Weak::upgrade)
    }

    /// What the state of an overlay, or the process's own, is built from.
    pub(crate) fn draft_in(&self, id: OverlayId) -> Draft {
        let overlay = self.made(id);
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
    pub(crate) fn overlaid(&self, id: OverlayId) -> Option<Arc<State>> {
        if id == OverlayId::NONE {
            return None;
        }
        let version = self.version();
        if let Some((_, state)) = self.overlays.states.lock().get(&id).filter(|(v, _)| *v == version) {
            return Some(state.clone());
        }
        let overlay = self.made(id)?;
        let mut state = self.draft_in(id).build().ok()?;
        state.own_cache = Some(self.cache.sibling(CACHE.0, CACHE.1));
        state.learner = overlay.plans.first().cloned().unwrap_or_default();
        let state = Arc::new(state);
        // Dropped when the lock is released: dropping a state may run code that asks for this one.
        let _before = self.overlays.states.lock().insert(id, (version, state.clone()));
        Some(state)
    }
}
