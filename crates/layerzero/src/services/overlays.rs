//! The overlays of an engine: layers of settings above all others, held by whoever makes calls in them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use lz_config::CodeLayer;
use parking_lot::Mutex;

use crate::core::{OverlayId, State};
use crate::documents::Plan;
use crate::error::Error;

/// Overlays that are kept although nobody holds them: a block in a loop finds what it decided the last time.
const KEPT: usize = 256;

/// What the calls of a context are made in. Whoever is inside holds it, on whichever thread or task; there may be any
/// number of them.
pub struct Overlay {
    id: OverlayId,
    pub(crate) layer: CodeLayer,
    /// Its plans, the innermost first. Whoever is inside of one holds it.
    pub(crate) plans: Vec<Weak<Plan>>,
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

    fn says(&self, layer: &CodeLayer, plans: &[Arc<Plan>]) -> bool {
        let same = |(known, plan): (&Weak<Plan>, &Arc<Plan>)| known.as_ptr() == Arc::as_ptr(plan);
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
    /// The state of each, and the version of the core it was built in.
    states: Mutex<HashMap<OverlayId, (u64, Arc<State>)>>,
}

impl Overlays {
    /// Takes out the states of overlays that nobody holds any more, to be dropped when no lock is held: that may run code that asks for
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

    /// The overlay that says this, as the newest. One that is new must pass `check`.
    pub fn find_or_make(
        &self,
        layer: CodeLayer,
        plans: &[Arc<Plan>],
        check: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Arc<Overlay>, Error> {
        let mut made = self.made.lock();
        let known = made.by_id.values().filter_map(Weak::upgrade).find(|known| known.says(&layer, plans));
        if let Some(known) = known {
            made.keep(&known);
            return Ok(known);
        }
        check()?;
        made.last += 1;
        let plans = plans.iter().map(Arc::downgrade).collect();
        let overlay = Arc::new(Overlay { id: OverlayId(made.last), layer, plans });
        made.keep(&overlay);
        made.by_id.retain(|_, known| known.strong_count() > 0);
        made.by_id.insert(overlay.id, Arc::downgrade(&overlay));
        let gone = self.forget(&made);
        drop(made);
        drop(gone);
        Ok(overlay)
    }

    /// The overlay of a number, if somebody still holds it or it is kept.
    pub fn get(&self, id: OverlayId) -> Option<Arc<Overlay>> {
        self.made.lock().by_id.get(&id).and_then(Weak::upgrade)
    }

    /// The state of an overlay that was built in this version.
    pub fn state(&self, id: OverlayId, version: u64) -> Option<Arc<State>> {
        self.states.lock().get(&id).filter(|(built, _)| *built == version).map(|(_, state)| state.clone())
    }

    pub fn put_state(&self, id: OverlayId, version: u64, state: Arc<State>) {
        // Dropped when the lock is released: dropping a state may run code that asks for this one.
        let _before = self.states.lock().insert(id, (version, state));
    }
}
