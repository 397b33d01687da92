//! Settings and plans for the calls of one context: `with lz.prefer("flashinfer"):`, a call of `lz.compile(model)`.
//!
//! An overlay is a layer above all others, held by whoever makes the calls, with the plans they are made inside of. For
//! each there is a state of its own, built when it is first used and again when the engine changes; calls outside pay
//! nothing for it.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use lz_config::CodeLayer;
use parking_lot::Mutex;

use crate::baked::Baked;
use crate::control::apply;
use crate::engine::{Draft, Engine, State};
use crate::error::Error;

/// Most different overlays a process may have. Those of plans that are gone do not count.
const MOST: usize = 1024;

/// An overlay that was made; zero is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OverlayId(pub u32);

impl OverlayId {
    /// No overlay.
    pub const NONE: OverlayId = OverlayId(0);
}

thread_local! {
    /// The overlay the calls of this thread are made in.
    static CURRENT: Cell<OverlayId> = const { Cell::new(OverlayId::NONE) };
}

/// What the calls of a context are made in.
#[derive(Clone)]
struct Overlay {
    layer: CodeLayer,
    /// Its plans, the innermost first. Whoever is inside of one holds it.
    plans: Vec<Weak<Baked>>,
}

impl Overlay {
    fn says(&self, layer: &CodeLayer, plans: &[Arc<Baked>]) -> bool {
        let same = |(known, plan): (&Weak<Baked>, &Arc<Baked>)| known.as_ptr() == Arc::as_ptr(plan);
        self.layer == *layer && self.plans.len() == plans.len() && self.plans.iter().zip(plans).all(same)
    }

    fn is_gone(&self) -> bool {
        self.plans.iter().any(|plan| plan.strong_count() == 0)
    }
}

#[derive(Default)]
struct Made {
    by_id: BTreeMap<OverlayId, Overlay>,
    /// The last number that was given. None is given twice.
    last: u32,
}

/// The overlays of an engine.
#[derive(Default)]
pub(crate) struct Overlays {
    made: Mutex<Made>,
    states: Mutex<HashMap<OverlayId, (u64, Arc<State>)>>,
}

impl Engine {
    /// Makes an overlay, or finds the one that says the same.
    pub fn overlay(&self, layer: CodeLayer) -> Result<OverlayId, Error> {
        self.overlay_with(layer, &[])
    }

    /// Makes an overlay inside of plans, the innermost first, or finds the one that says the same. It lasts as long as
    /// its plans.
    pub fn overlay_with(&self, layer: CodeLayer, plans: &[Arc<Baked>]) -> Result<OverlayId, Error> {
        let config = self.resolve_in(&layer)?;
        let mut made = self.overlays.made.lock();
        if let Some((id, _)) = made.by_id.iter().find(|(_, known)| known.says(&layer, plans)) {
            return Ok(*id);
        }
        // Once for each: a block is entered often.
        self.check_names(&config, &self.state.load().snapshot)?;
        self.overlays.forget_gone(&mut made);
        if made.by_id.len() == MOST {
            return Err(Error::TooManyOverlays { most: MOST });
        }
        made.last += 1;
        let id = OverlayId(made.last);
        made.by_id.insert(id, Overlay { layer, plans: plans.iter().map(Arc::downgrade).collect() });
        Ok(id)
    }

    /// Those of them that are gone: a plan of theirs is, and nobody can be inside any more.
    pub fn overlays_gone(&self, of: &[OverlayId]) -> Vec<OverlayId> {
        let made = self.overlays.made.lock();
        of.iter().filter(|id| made.by_id.get(id).is_none_or(Overlay::is_gone)).copied().collect()
    }

    /// Runs `work` with the calls of this thread made in an overlay.
    pub fn within<R>(&self, overlay: OverlayId, work: impl FnOnce() -> R) -> R {
        struct Restore(OverlayId);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let _restore = Restore(CURRENT.replace(overlay));
        work()
    }

    /// The overlay this thread is in.
    fn here(&self) -> Option<(OverlayId, Overlay)> {
        let id = CURRENT.get();
        if id == OverlayId::NONE {
            return None;
        }
        let overlay = self.overlays.made.lock().by_id.get(&id).cloned()?;
        Some((id, overlay))
    }

    /// What the state for the calls of this thread is built from.
    pub(crate) fn draft_here(&self) -> Draft {
        let overlay = self.here().map(|(_, overlay)| overlay);
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

    /// The state for an overlay, if this thread is in one.
    pub(crate) fn overlaid(&self) -> Option<Arc<State>> {
        let id = CURRENT.get();
        if id == OverlayId::NONE {
            return None;
        }
        let version = self.version();
        if let Some((_, state)) = self.overlays.states.lock().get(&id).filter(|(v, _)| *v == version) {
            return Some(state.clone());
        }
        let (id, overlay) = self.here()?;
        let mut state = self.draft_here().build().ok()?;
        state.overlaid = true;
        state.learner = overlay.plans.first().cloned().unwrap_or_default();
        let state = Arc::new(state);
        self.overlays.states.lock().insert(id, (version, state.clone()));
        Some(state)
    }
}

impl Overlays {
    /// Drops the overlays of plans nobody holds any more: nobody is inside of them.
    fn forget_gone(&self, made: &mut Made) {
        let gone: Vec<OverlayId> = made.by_id.iter().filter(|(_, o)| o.is_gone()).map(|(id, _)| *id).collect();
        let mut states = self.states.lock();
        for id in gone {
            made.by_id.remove(&id);
            states.remove(&id);
        }
    }
}
