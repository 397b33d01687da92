//! Rollouts at work: which kernel is in a rollout for a call, beside or instead of which other.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lz_model::{Catalog, Denial, Query, Reason};
use lz_resilience::rollout::{Mode, RolloutCall};
use lz_resilience::{Event, Rollout, RolloutSpec, RolloutStatus, Verdict};
use lz_select::{Pattern, Snapshot};

use super::Core;
use super::errands::Errand;
use super::scope::Scope;
use super::step::Step;

/// Milliseconds between two writings of the figures, unless a verdict changes.
const PUBLISH_EVERY_MS: u64 = 1000;

impl Core {
    /// The kernels in a rollout and how they do.
    pub fn rollouts(&self) -> Vec<RolloutStatus> {
        self.guard.rollouts.load().iter().map(|rollout| rollout.status()).collect()
    }

    /// Puts an outcome to a rollout; one that is rolled back serves no further call.
    pub fn tried(&self, rollout: &Rollout, outcome: RolloutCall) {
        self.judged(rollout, rollout.record(outcome));
    }

    /// Puts the times of a call whose outcome was put to the rollout before: on a GPU they are known later.
    pub fn tried_for(&self, rollout: &Rollout, serving_us: f64, candidate_us: f64) {
        self.judged(rollout, rollout.record_times(serving_us, candidate_us));
    }

    /// What follows from a verdict that changed.
    fn judged(&self, rollout: &Rollout, verdict: Option<Verdict>) {
        let changed = verdict.is_some();
        if let Some(Verdict::RolledBack { why }) = verdict {
            let spec = rollout.spec();
            let (op, candidate) = (spec.operation.clone(), spec.candidate.clone());
            self.guard.emit(Event::RolledBack { rollout: spec.name.clone(), op, candidate, why });
            self.renew();
        }
        if changed || self.is_time_to_publish() {
            self.errands.later(Errand::PublishRollouts);
        }
    }

    /// Whether [`PUBLISH_EVERY_MS`] have passed. Of several threads that ask, one is told so.
    fn is_time_to_publish(&self) -> bool {
        let (now_ms, at) = (self.guard.clock.now_ms(), &self.guard.publish_at_ms);
        let due_ms = at.load(Ordering::Relaxed);
        let next_ms = now_ms.saturating_add(PUBLISH_EVERY_MS);
        now_ms >= due_ms && at.compare_exchange(due_ms, next_ms, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Gives a rollout that was rolled back, or is to begin anew, its calls again. `false` when there is no such one.
    pub(crate) fn rearm_rollout(&self, name: &str) -> bool {
        let rollouts = self.guard.rollouts.load();
        let Some(rollout) = rollouts.iter().find(|r| r.spec().name == name) else { return false };
        rollout.rearm();
        let spec = rollout.spec();
        // What was seen of the candidate before counts no more than the calls do.
        let candidate = Pattern::Kernel(spec.candidate.clone());
        let tried = |s: &Snapshot| s.named(&candidate).map(|ix| s.kernel(ix).clone()).collect::<Vec<_>>();
        let tried = self.with_snapshot(tried);
        self.prove(|proofs| tried.iter().for_each(|kernel| proofs.forget(&kernel.id, &kernel.version)));
        let (op, candidate) = (spec.operation.clone(), spec.candidate.clone());
        self.guard.emit(Event::Rearmed { rollout: spec.name.clone(), op, candidate });
        self.renew();
        true
    }

    /// Tells of a candidate whose results are not those of the kernel that serves.
    pub fn mismatched(&self, rollout: &Rollout, serving: &str, max_error: f64) {
        let spec = rollout.spec();
        self.guard.emit(Event::ShadowMismatch {
            rollout: spec.name.clone(),
            op: spec.operation.clone(),
            candidate: spec.candidate.clone(),
            serving: serving.to_owned(),
            max_error: max_error.is_finite().then_some(max_error),
        });
    }

    /// Builds the same state anew, so that nothing decided before is served.
    fn renew(&self) {
        let _ = self.update(|_| {});
    }
}

impl Scope<'_> {
    /// What the calls of a query are to be compared with, when a kernel is in a rollout for them: the rollout, the other
    /// kernel, and whether the candidate is the one that serves (a canary) or the other (a shadow).
    pub fn comparison(&self, query: &Query, steps: &[Step]) -> Option<(Arc<Rollout>, Step, bool)> {
        let rollouts = self.core.guard.rollouts.load();
        if rollouts.is_empty() {
            return None;
        }
        let state = &self.state;
        let decision = state.snapshot.select(query);
        let op = Catalog::get().op(query.op()).id();
        // Nothing but the rollout keeps a shadow's candidate from serving.
        let shadow = |name: &str| {
            let alone = |reasons: &[Reason]| match reasons {
                [Reason::PolicyDenied { rule: Denial::Rollout { name: by } }] => by == name,
                _ => false,
            };
            let candidate = decision.candidates.iter().find(|c| alone(&c.reasons))?;
            Some(state.step(&self.core.guard, op, candidate.kernel, candidate.transforms))
        };
        rollouts.iter().filter(|rollout| rollout.is_armed()).find_map(|rollout| {
            let RolloutSpec { name, mode, .. } = rollout.spec();
            let other = match mode {
                Mode::Canary if decision.rollout.as_deref() == Some(name) => steps.get(1).cloned(),
                Mode::Canary => None,
                Mode::Shadow => shadow(name),
            };
            Some((rollout.clone(), other?, *mode == Mode::Canary))
        })
    }

    /// Puts how a canary did, whose call nobody compares, to its rollout.
    pub(crate) fn tried_first(&self, query: &Query, outcome: RolloutCall) {
        let rollouts = self.core.guard.rollouts.load();
        if rollouts.is_empty() {
            return;
        }
        let given = self.state.snapshot.select(query).rollout;
        if let Some(rollout) = rollouts.iter().find(|r| given.as_deref() == Some(&r.spec().name)) {
            self.core.tried(rollout, outcome);
        }
    }
}
