//! Settings for the calls of one context: `with lz.prefer("flashinfer"):`.
//!
//! An overlay is a layer above all others, held by whoever makes the calls. For each there is a state of its own, built
//! when it is first used and again when the engine changes; calls outside pay nothing for it.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use lz_config::CodeLayer;
use parking_lot::Mutex;

use crate::control::apply;
use crate::engine::{Engine, State};
use crate::error::Error;

/// Most different overlays a process may make.
const MOST: usize = 1024;

/// An overlay that was made; zero is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OverlayId(pub u32);

impl OverlayId {
    /// No overlay.
    pub const NONE: OverlayId = OverlayId(0);
}

thread_local! {
    /// The overlay the calls of this thread are made in.
    static CURRENT: Cell<OverlayId> = const { Cell::new(OverlayId::NONE) };
}

/// The overlays of an engine.
#[derive(Default)]
pub(crate) struct Overlays {
    made: Mutex<Vec<CodeLayer>>,
    states: Mutex<HashMap<OverlayId, (u64, Arc<State>)>>,
}

impl Engine {
    /// Makes an overlay, or finds the one that says the same.
    pub fn overlay(&self, layer: CodeLayer) -> Result<OverlayId, Error> {
        self.resolve_in(&layer)?;
        let mut made = self.overlays.made.lock();
        if let Some(at) = made.iter().position(|known| *known == layer) {
            return Ok(OverlayId(at as u32 + 1));
        }
        if made.len() == MOST {
            return Err(Error::TooManyOverlays { most: MOST });
        }
        made.push(layer);
        Ok(OverlayId(made.len() as u32))
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

    /// The state for an overlay, if this thread is in one.
    pub(crate) fn overlaid(&self) -> Option<Arc<State>> {
        let overlay = CURRENT.get();
        if overlay == OverlayId::NONE {
            return None;
        }
        let version = self.version();
        if let Some((_, state)) = self.overlays.states.lock().get(&overlay).filter(|(v, _)| *v == version) {
            return Some(state.clone());
        }
        let layer = self.overlays.made.lock().get(overlay.0 as usize - 1).cloned()?;
        let config = self.resolve_in(&layer).ok()?;
        let mut draft = self.draft.lock().clone();
        apply(&config, &mut draft.spec);
        let mut state = draft.build().ok()?;
        state.overlaid = true;
        let state = Arc::new(state);
        self.overlays.states.lock().insert(overlay, (version, state.clone()));
        Some(state)
    }
}
