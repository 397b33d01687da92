//! Rollouts at work: which kernel is on trial for a call, beside or instead of which other.

use std::sync::Arc;

use lz_model::{Catalog, KernelDescriptor, Query};
use lz_resilience::rollout::{Mode, Outcome};
use lz_resilience::{Event, Rollout, RolloutStatus, Verdict};
use lz_select::{Pattern, Trial};

use crate::ask::Step;
use crate::engine::Engine;

impl Engine {
    /// The kernels on trial and how they do.
    pub fn rollouts(&self) -> Vec<RolloutStatus> {
        self.guard.rollouts.load().iter().map(|rollout| rollout.status()).collect()
    }

    /// What the calls of a query are to be compared with, when a kernel is on trial for them: the rollout, the other
    /// kernel, and whether the candidate is the one that serves (a canary) or the other (a shadow).
    pub fn comparison(&self, query: &Query, steps: &[Step]) -> Option<(Arc<Rollout>, Step, bool)> {
        let rollouts = self.guard.rollouts.load();
        let concerned = |r: &&Arc<Rollout>| r.is_armed() && Trial::ops_of(&r.spec().operation).contains(&query.op());
        let is_candidate =
            |r: &Rollout, kernel: &KernelDescriptor| Pattern::Kernel(r.spec().candidate.clone()).matches(kernel);
        for rollout in rollouts.iter().filter(concerned) {
            let found = match rollout.spec().mode {
                Mode::Canary => {
                    steps.first().filter(|step| is_candidate(rollout, &step.kernel)).and_then(|_| steps.get(1)).cloned()
                }
                Mode::Shadow => self.shadow(rollout, query),
            };
            if let Some(other) = found {
                return Some((rollout.clone(), other, rollout.spec().mode == Mode::Canary));
            }
        }
        None
    }

    /// The candidate of a shadow rollout, if nothing but the rollout keeps it from serving the call.
    fn shadow(&self, rollout: &Rollout, query: &Query) -> Option<Step> {
        let state = self.state();
        let decision = state.snapshot.select(query);
        let denial = [Trial::denial(&rollout.spec().name)];
        let candidate = decision.candidates.iter().find(|c| c.reasons == denial)?;
        let op = Catalog::get().op(query.op()).id();
        Some(state.step(&self.guard, op, candidate.kernel, candidate.transforms))
    }

    /// Puts an outcome to a rollout; one that is rolled back serves no further call.
    pub fn tried(&self, rollout: &Rollout, outcome: Outcome) {
        let verdict = rollout.record(outcome);
        let changed = verdict.is_some();
        if let Some(Verdict::RolledBack { why }) = verdict {
            let spec = rollout.spec();
            let (op, candidate) = (spec.operation.clone(), spec.candidate.clone());
            self.guard.emit(Event::RolledBack { rollout: spec.name.clone(), op, candidate, why });
            self.renew();
        }
        if changed {
            self.publish();
        } else {
            self.publish_soon();
        }
    }

    /// Gives a rollout that was rolled back, or is to begin anew, its calls again. `false` when there is no such one.
    pub fn rearm(&self, name: &str) -> bool {
        let rollouts = self.guard.rollouts.load();
        let Some(rollout) = rollouts.iter().find(|r| r.spec().name == name) else { return false };
        rollout.rearm();
        let spec = rollout.spec();
        let (op, candidate) = (spec.operation.clone(), spec.candidate.clone());
        self.guard.emit(Event::Rearmed { rollout: spec.name.clone(), op, candidate });
        self.renew();
        self.republish();
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
