//! Which kernel should be compiled for a call: the one that would serve it, were everything compiled.

use std::sync::Arc;

use lz_model::{Query, Reason};
use lz_select::{Decision, Snapshot};
use parking_lot::Mutex;

use crate::core::{State, no_kernel};
use crate::error::Error;

/// The snapshot of an epoch, as it would be if everything were compiled.
#[derive(Default)]
pub(super) struct Ideal(Mutex<Option<Arc<Snapshot>>>);

impl Ideal {
    fn of(&self, state: &State) -> Option<Arc<Snapshot>> {
        let build = || {
            let mut spec = state.snapshot.spec().clone();
            spec.warm = None;
            // What was built before is valid with other kernels ready.
            spec.build(state.snapshot.epoch()).ok().map(Arc::new)
        };
        if state.own_cache.is_some() {
            return build();
        }
        let mut known = self.0.lock();
        if known.as_ref().is_none_or(|snapshot| snapshot.epoch() != state.snapshot.epoch()) {
            *known = build();
        }
        known.clone()
    }

    /// The kernel that would serve a call if everything were compiled, unless it is ready for it. Kernels for which
    /// `passed_over` holds, and that are not ready, do not count.
    pub fn wanted(
        &self,
        state: &State,
        decision: &Decision,
        passed_over: impl Fn(&str, &Query) -> bool,
    ) -> Option<String> {
        if !decision.candidates.iter().any(|c| c.cold && c.accepted()) {
            return None;
        }
        let ideal = self.of(state)?;
        let is_cold = |kernel| decision.candidates.iter().any(|c| c.kernel == kernel && c.cold);
        for candidate in ideal.select(&decision.query).ranked() {
            let id = &ideal.kernel(candidate.kernel).id;
            if !is_cold(candidate.kernel) {
                return None;
            }
            if !passed_over(id, &decision.query) {
                return Some(id.clone());
            }
        }
        None
    }
}

/// Nobody serves: those who could are not compiled, and no call waits for that.
pub(crate) fn only_cold(snapshot: &Snapshot, mut decision: Decision) -> Error {
    for candidate in decision.candidates.iter_mut().filter(|c| c.cold && c.accepted()) {
        candidate.reasons.push(Reason::JitDisabled);
    }
    no_kernel(snapshot, &decision)
}
