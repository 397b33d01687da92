//! Selection: query to candidates to ranking to decision. Pure: same snapshot, same query, same decision.

use std::sync::Arc;

use lz_expr::Possible;
use lz_model::{Catalog, Denial, Facts, KernelDescriptor, Platform, Query, Reason, SdpaRole, Trust};

use crate::check::{Case, call_reasons, workspace};
use crate::constraint::Compiled;
use crate::decision::{Basis, Candidate, Chain, Decision, KernelIx, Terms, Transforms};
use crate::memory::MemoryRange;
use crate::perf::{Estimate, EstimateKind, PerfSource};
use crate::policy::{Applied, Rule};
use crate::proof;
use crate::rank::{baseline_of, rank, score_speed};
use crate::rollout::RolloutRules;
use crate::snapshot::{Entry, Settings, Snapshot};
use crate::why::Ranking;

/// Points a kernel loses that would have to be compiled first.
const COLD: f64 = -40.0;

impl Snapshot {
    /// Decides which kernel serves a query, and says everything about it.
    pub fn select(&self, query: &Query) -> Decision {
        self.select_with(query, &self.spec.settings)
    }

    /// As [`Snapshot::select`], as if strict mode had every proof it asks for.
    pub fn select_as_proven(&self, query: &Query) -> Decision {
        self.select_with(query, &Settings { graph_strict: false, ..self.spec.settings.clone() })
    }

    fn select_with(&self, query: &Query, settings: &Settings) -> Decision {
        let catalog = Catalog::get();
        let op = catalog.op(query.op());
        let Some(device) = self.device(query.device()) else {
            return Decision {
                query: *query,
                candidates: Vec::new(),
                ranking: Vec::new(),
                basis: Basis::Declared,
                prior: None,
                ranked_first: None,
                struck_out: None,
                rules: Vec::new(),
                locked_by: None,
                overridden_by: None,
                pinned_by: None,
                rollout: None,
                level: self.spec.restriction.level,
                uniform: true,
                available: None,
                memory: MemoryRange::ANY,
            };
        };
        let facts = Facts { op, query, device };
        // Read once: all candidates are judged by the same figure.
        let available = self.available_memory(query.device());
        let case = Case { op, query, context: query.context(), facts, settings, available };
        let cells = &self.cells[query.op().0 as usize];
        let representative = cells.representative(query);
        let rules = Applied::new(self.policy.rules(query.op()), &facts);
        let keys = [cells.key(query), query.marked_exact()];
        let rollouts = RolloutRules::new(&self.spec.rollouts, &facts, &keys[0]);
        let at = Facts { query: &representative, ..facts };
        let judge = Judge { snapshot: self, case: &case, at, rules: &rules, keys: &keys, rollouts: &rollouts };

        let compiled = &self.by_op[query.op().0 as usize];
        let mut candidates: Vec<Candidate> = compiled.iter().map(|c| judge.candidate(c, false)).collect();
        let locked_by = judge.apply_locks(&mut candidates);
        let locked = locked_by.is_some();
        if !candidates.iter().any(Candidate::accepted) {
            judge.keep_a_last_one(compiled, &mut candidates);
        }
        let (basis, source) = judge.score(&mut candidates);
        let (mut ranking, groups) = rank(&candidates, basis, source);
        let ranked_first = Ranking {
            candidates: &candidates,
            order: &ranking,
            group: groups.first(),
            baseline: baseline_of(&candidates),
            times_count: !self.spec.restriction.declared_only,
            name: &|i| self.name(candidates[i].kernel),
        }
        .first(basis);
        for (group, i) in groups.iter().flat_map(|group| group.members.iter().map(move |&i| (group, i))) {
            candidates[i].tied_with = Some(group.fastest).filter(|&fastest| fastest != i);
        }
        let pinned = match case.context.sdpa.is_for_torch_alone() {
            true => judge.apply_torchs_order(&candidates, &mut ranking),
            false => judge.apply_pin(&candidates, &mut ranking),
        };
        let overridden_by = judge.apply_order(&candidates, &mut ranking);
        let rollout = judge.apply_rollout(&candidates, &mut ranking, locked);
        let pinned_by = pinned.filter(|_| !locked && overridden_by.is_none() && rollout.is_none());
        let uniform = self.spec.restriction.is_uniform()
            && !judge.asks_for_proofs(compiled)
            && judge.is_uniform(cells, compiled, &candidates);
        let memory = judge.memory_range(cells, compiled, uniform);
        let prior = (basis == Basis::Prior).then(|| source.origin(query.device())).flatten();
        let basis = if locked { Basis::Locked } else { basis };
        Decision {
            query: *query,
            candidates,
            ranking,
            basis,
            prior,
            ranked_first,
            struck_out: None,
            locked_by,
            rules: rules.iter().map(|r| r.name.clone()).collect(),
            overridden_by,
            pinned_by,
            rollout,
            level: self.spec.restriction.level,
            uniform,
            available: (available < i64::MAX).then_some(available),
            memory,
        }
    }

    /// What must be done to the arguments of a call before a kernel can take them, or why it cannot. Only legality counts:
    /// not what the operator wants, what was measured or what was seen of the kernel.
    pub fn legality(&self, kernel: KernelIx, query: &Query) -> Result<Transforms, Vec<Reason>> {
        let mut reasons = self.static_reasons(kernel, query.device()).to_vec();
        let op = Catalog::get().op(query.op());
        let compiled = self.by_op[query.op().0 as usize].iter().find(|c| c.kernel == kernel);
        let (Some(compiled), Some(device)) = (compiled, self.device(query.device())) else {
            let constraint = format!("serves {}", self.kernel(kernel).operation);
            return Err(vec![Reason::ConstraintFailed { constraint, found: format!("the call is {}", op.id()) }]);
        };
        let available = self.available_memory(query.device());
        let facts = Facts { op, query, device };
        let case = Case { op, query, context: query.context(), facts, settings: &self.spec.settings, available };
        let transforms = call_reasons(&case, self.kernel(kernel), compiled, &mut reasons);
        if reasons.is_empty() { Ok(transforms) } else { Err(reasons) }
    }

    /// What dispatch needs of a decision; `None` when no kernel can serve the call.
    pub fn chain(&self, decision: &Decision) -> Option<Chain> {
        let step = |c: &Candidate| (c.kernel, c.transforms);
        let ranked: Vec<(KernelIx, Transforms)> = decision.ranked().map(step).collect();
        let reference = decision.ranked().find(|c| self.kernel(c.kernel).reference).map(step);
        Chain::new(&ranked, reference).map(|chain| chain.within(decision.memory))
    }
}

/// Judges the candidates of one call.
struct Judge<'a> {
    snapshot: &'a Snapshot,
    case: &'a Case<'a>,
    /// The shape at which speed is judged.
    at: Facts<'a>,
    rules: &'a Applied<'a>,
    /// What the decision is remembered under: the cell's key, and the call's own.
    keys: &'a [Query; 2],
    rollouts: &'a RolloutRules<'a>,
}

impl Judge<'_> {
    /// Caution leaves nobody without a kernel (degradation, being switched off, memory that must stay free): where it has ruled
    /// out all that could serve the call, what plain torch runs comes back, or, while LayerZero is not switched off, all that is
    /// out for no other reason. What fits into memory comes before what does not.
    fn keep_a_last_one(&self, compiled: &[Compiled], candidates: &mut [Candidate]) {
        let allowed = |c: &Candidate| c.baseline || self.case.settings.enabled;
        // A kernel that only launch limits (and caution) keep from the call takes it in pieces, which need less memory.
        let by_limits = |c: &Candidate| {
            let limits = c.reasons.iter().filter(|r| matches!(r, Reason::CudaGridDimExceeded { .. })).count();
            limits > 0 && limits + c.cautions == c.reasons.len()
        };
        let splits = self.case.op.can_be_cut() && candidates.iter().any(|c| allowed(c) && by_limits(c));
        let too_large = |c: &Candidate| c.reasons.iter().any(|r| matches!(r, Reason::MemoryHeadroomExceeded { .. }));
        let spared = |c: &Candidate| c.cautions > 0 && c.reasons.len() == c.cautions && !(splits && too_large(c));
        let may_come = |c: &Candidate| spared(c) && allowed(c);
        let one_fits = candidates.iter().any(|c| may_come(c) && !too_large(c));
        let comes = |c: &Candidate| may_come(c) && !(one_fits && too_large(c));
        let plain = candidates.iter().any(|c| comes(c) && c.baseline);
        let wanted = |c: &Candidate| comes(c) && (c.baseline || !plain);
        for (compiled, candidate) in compiled.iter().zip(candidates.iter_mut()) {
            if wanted(candidate) {
                *candidate = self.candidate(compiled, true);
            }
        }
    }

    /// Judges one kernel. `needed`: caution does not count, because without it nobody is left.
    fn candidate(&self, compiled: &Compiled, needed: bool) -> Candidate {
        let entry = &self.snapshot.entries[compiled.kernel.0 as usize];
        let kernel = &*entry.descriptor;
        let device = self.case.query.device().0 as usize;
        let mut reasons: Vec<Reason> = entry.static_reasons[device].clone();
        let mut transforms = Transforms::NONE;
        let mut cautions = 0;
        // A kernel for other hardware is out for that alone: judging its shapes would only be noise.
        if reasons.is_empty() {
            transforms = call_reasons(self.case, kernel, compiled, &mut reasons);
            // Without LayerZero plain torch would run whatever is free: headroom does not leave a call without a kernel.
            if self.is_last_resort(kernel) {
                let too_large = |reason: &Reason| matches!(reason, Reason::MemoryHeadroomExceeded { .. });
                cautions += reasons.iter().filter(|reason| !needed && too_large(reason)).count();
                reasons.retain(|reason| !needed || !too_large(reason));
            }
            let disabled = self.disabled(kernel).filter(|_| !needed);
            cautions += usize::from(disabled.is_some());
            reasons.extend(disabled);
            self.readiness(entry, &mut reasons);
            let strict = self.case.settings.graph_strict;
            let doubt = self.snapshot.graph_doubt(kernel, self.case.query, strict);
            reasons.extend(doubt.map(|why| Reason::CudaGraphUnsafe { why }));
        }
        if let Some(rule) = self.rules.forbids(compiled.kernel) {
            reasons.push(Reason::PolicyDenied { rule: Denial::Rule(rule.reason()) });
        }
        if !needed && !self.is_last_resort(kernel) {
            let degraded = self.snapshot.spec.restriction.rules_out(kernel, self.keys.each_ref());
            cautions += usize::from(degraded.is_some());
            reasons.extend(degraded);
        }
        if !kernel.reference {
            reasons.extend(self.verdict(kernel));
        }
        // A lock is the operator's last word, on a kernel in a rollout as well.
        if !self.rules.lock().is_some_and(|rule| rule.concerns(compiled.kernel)) {
            reasons.extend(self.rollouts.rules_out(kernel));
        }
        let accepted = reasons.is_empty();
        Candidate {
            kernel: compiled.kernel,
            terms: if accepted { self.terms(entry, compiled, transforms) } else { Terms::default() },
            estimate: if accepted { self.estimate(kernel, &*self.snapshot.spec.perf) } else { None },
            transforms,
            reasons,
            cautions,
            cold: self.is_cold(entry),
            reference: kernel.reference,
            baseline: kernel.baseline,
            built_in: kernel.trust == Trust::BuiltIn,
            tied_with: None,
            workspace: workspace(compiled, &self.case.facts),
        }
    }

    /// Whether a kernel would have to be compiled for this call.
    fn is_cold(&self, entry: &Entry) -> bool {
        let kernel = &*entry.descriptor;
        let ready = |warm: &Arc<crate::warm::Warm>| warm.contains(&kernel.id, self.case.query);
        kernel.jit && self.snapshot.spec.warm.as_ref().map_or(entry.health.cold, |warm| !ready(warm))
    }

    /// Scores the candidates by speed: by what was measured here, or, where that does not decide, by what was measured on other
    /// machines, where that does. Gives what decides, and who knows the times.
    fn score(&self, candidates: &mut [Candidate]) -> (Basis, &dyn PerfSource) {
        let spec = &self.snapshot.spec;
        let basis = score_speed(candidates);
        if basis != Basis::Declared {
            return (basis, &*spec.perf);
        }
        let kernel = |c: &Candidate| &*self.snapshot.entries[c.kernel.0 as usize].descriptor;
        let told = |c: &Candidate| c.accepted().then(|| self.estimate(kernel(c), &*spec.prior)).flatten();
        let told: Vec<Option<Estimate>> = candidates.iter().map(told).collect();
        if told.iter().all(Option::is_none) {
            return (basis, &*spec.perf);
        }
        let here: Vec<Option<Estimate>> = candidates.iter().map(|c| c.estimate).collect();
        let mut score_by = |times: Vec<Option<Estimate>>| {
            candidates.iter_mut().zip(times).for_each(|(candidate, time)| candidate.estimate = time);
            score_speed(candidates)
        };
        if score_by(told) != Basis::Declared {
            return (Basis::Prior, &*spec.prior);
        }
        (score_by(here), &*spec.perf)
    }

    /// What is known of its speed; a time that is no number is not known.
    fn estimate(&self, kernel: &KernelDescriptor, perf: &dyn PerfSource) -> Option<Estimate> {
        if self.snapshot.spec.restriction.declared_only {
            return None;
        }
        let here = perf.estimate(kernel, &self.at);
        // Who takes no notice of a promise is as fast without it.
        let without = || {
            let query = unpromised(kernel, &self.at)?;
            let estimate = perf.estimate(kernel, &Facts { query: &query, ..self.at }).filter(|e| e.trusted)?;
            let kind = if estimate.kind == EstimateKind::Prior { EstimateKind::Prior } else { EstimateKind::Predicted };
            Some(Estimate { kind, ..estimate })
        };
        let estimate = here.filter(|e| e.trusted).or_else(without).or(here)?;
        estimate.is_finite().then_some(estimate)
    }

    /// Why it must not serve the call, by what was seen of it.
    fn verdict(&self, kernel: &KernelDescriptor) -> Option<Reason> {
        let (spec, facts) = (&self.snapshot.spec, &self.case.facts);
        if let Some(evidence) = spec.proofs.evidence(kernel, facts.query) {
            return Some(evidence.reason());
        }
        let capturing = self.case.context.capturing;
        if capturing && proof::is_needed(spec.settings.verify, &spec.proofs, kernel, facts.query) {
            return Some(Reason::NotVerified { busy: "a CUDA graph is captured".into() });
        }
        let perf = &spec.perf;
        let without = || perf.verdict(kernel, &Facts { query: &unpromised(kernel, facts)?, ..*facts });
        perf.verdict(kernel, facts).or_else(without)
    }

    /// Whether a kernel may run whatever else may not: a reference, and, as those are for the CPU, what plain torch runs on
    /// other devices. Without it, being careful would mean that nothing runs there.
    fn is_last_resort(&self, kernel: &KernelDescriptor) -> bool {
        kernel.reference || kernel.baseline && self.case.facts.device.platform != Platform::Cpu
    }

    fn disabled(&self, kernel: &KernelDescriptor) -> Option<Reason> {
        let out = !self.case.settings.enabled && !self.is_last_resort(kernel);
        out.then_some(Reason::PolicyDenied { rule: Denial::Disabled })
    }

    fn readiness(&self, entry: &Entry, reasons: &mut Vec<Reason>) {
        if !self.case.settings.allow_jit && self.is_cold(entry) {
            reasons.push(Reason::JitDisabled);
        }
    }

    fn terms(&self, entry: &Entry, compiled: &Compiled, transforms: Transforms) -> Terms {
        let kernel = &*entry.descriptor;
        let preferred = compiled.preferred.as_ref().filter(|(when, _)| when.test(&self.case.facts).unwrap_or(false));
        let declared = preferred.map_or(kernel.priority, |(_, priority)| *priority);
        Terms {
            priority: f64::from(self.rules.priority(compiled.kernel).map_or(declared, |(_, priority)| priority)),
            policy: self.rules.points(compiled.kernel),
            perf: 0.0,
            jit: if self.is_cold(entry) { COLD } else { 0.0 },
            transform: transform_points(kernel, transforms),
        }
    }

    /// A lock leaves only the kernels it names; all others are out because of it. Returns the name of the lock.
    fn apply_locks(&self, candidates: &mut [Candidate]) -> Option<String> {
        // Switched off means off: a lock does not keep references from serving.
        if !self.case.settings.enabled {
            return None;
        }
        // The first lock that applies decides; later ones are shadowed by it.
        let rule = self.rules.lock()?;
        for candidate in candidates.iter_mut().filter(|c| !rule.concerns(c.kernel)) {
            let locked = rule.action.pattern().map(|p| p.as_str().to_owned()).unwrap_or_default();
            candidate.reasons.push(Reason::PolicyLocked { locked });
        }
        Some(rule.name.clone())
    }

    /// Where the caller allows torch's own implementations alone, they come in the caller's order, which no pin changes.
    fn apply_torchs_order(&self, candidates: &[Candidate], ranking: &mut [usize]) -> Option<Arc<str>> {
        let (choice, platform) = (self.case.context.sdpa, self.case.facts.device.platform);
        let role = |i: usize| self.snapshot.kernel(candidates[i].kernel).sdpa;
        ranking.sort_by_key(|&i| choice.place(SdpaRole::needs(role(i), platform)));
        None
    }

    /// What was decided before goes first, if it can serve the call at once. Returns who decided it.
    fn apply_pin(&self, candidates: &[Candidate], ranking: &mut [usize]) -> Option<Arc<str>> {
        let pin = self.snapshot.spec.pins.find(self.case.query)?;
        let is_it = |i: usize| pin.names(self.snapshot.kernel(candidates[i].kernel)) && !candidates[i].cold;
        let at = ranking.iter().position(|&i| is_it(i))?;
        ranking[..=at].rotate_right(1);
        Some(pin.origin.clone())
    }

    /// An override puts its kernels first, a fallback puts its best one second; the order is otherwise as ranked. Those
    /// that would have to be compiled stay behind those that need not. Returns the name of the override that decided.
    fn apply_order(&self, candidates: &[Candidate], ranking: &mut [usize]) -> Option<String> {
        let cold = |i: usize| candidates[i].cold;
        let first = self.rules.first(candidates);
        if let Some(rule) = first {
            ranking.sort_by_key(|&i| (cold(i), !rule.concerns(candidates[i].kernel)));
        }
        let ready = |i: usize, rule: &Rule| rule.concerns(candidates[i].kernel) && (!cold(i) || cold(ranking[0]));
        if let Some(rule) = self.rules.fallback(candidates)
            && let Some(at) = ranking.iter().position(|&i| ready(i, rule)).filter(|&at| at > 1)
        {
            ranking[1..=at].rotate_right(1);
        }
        let decides = |rule: &&Rule| ranking.first().is_some_and(|&i| rule.concerns(candidates[i].kernel));
        first.filter(decides).map(|rule| rule.name.clone())
    }

    /// A kernel in a rollout goes first in the calls it is given, unless the operator locked another or it would have to be
    /// compiled. Returns the name of the rollout.
    fn apply_rollout(&self, candidates: &[Candidate], ranking: &mut [usize], locked: bool) -> Option<String> {
        let rollout = |i: usize| self.rollouts.puts_first(self.snapshot.kernel(candidates[i].kernel));
        let ready = |i: usize| !candidates[i].cold || candidates[ranking[0]].cold;
        let at = ranking.iter().position(|&i| ready(i) && rollout(i).is_some()).filter(|_| !locked)?;
        ranking[..=at].rotate_right(1);
        rollout(ranking[0]).map(str::to_owned)
    }

    /// Whether it was looked at for which lengths kernels are proven. Otherwise that is found out when they run.
    fn asks_for_proofs(&self, compiled: &[Compiled]) -> bool {
        let unproven = |c: &Compiled| self.snapshot.kernel(c.kernel).trust == Trust::Unproven;
        self.case.context.capturing && compiled.iter().any(unproven)
    }

    /// Whether every condition that was looked at has one value over the whole cell.
    fn is_uniform(&self, cells: &crate::cell::Cells, compiled: &[Compiled], candidates: &[Candidate]) -> bool {
        let bounds = cells.bounds(&self.case.facts);
        let constant =
            |expr: &lz_expr::Expr| matches!(expr.possible(&bounds), Possible::AlwaysTrue | Possible::AlwaysFalse);
        let rules = self.snapshot.policy.rules(self.case.query.op());
        if !rules.iter().flat_map(|r| &r.when).all(constant) {
            return false;
        }
        let device = self.case.query.device().0 as usize;
        compiled.iter().zip(candidates).all(|(kernel, _)| {
            let entry = &self.snapshot.entries[kernel.kernel.0 as usize];
            !entry.static_reasons[device].is_empty()
                || kernel.conditions.iter().chain(kernel.preferred.iter().map(|(when, _)| when)).all(constant)
                    && self.sizes_are_uniform(kernel, &bounds)
        })
    }

    /// The available bytes with which every verdict on a workspace stays as it is: over the whole cell where the decision
    /// is uniform, else for this call.
    fn memory_range(&self, cells: &crate::cell::Cells, compiled: &[Compiled], uniform: bool) -> MemoryRange {
        let (bounds, device) = (cells.bounds(&self.case.facts), self.case.query.device().0 as usize);
        let mut range = MemoryRange::ANY;
        for kernel in compiled {
            let runs_here = self.snapshot.entries[kernel.kernel.0 as usize].static_reasons[device].is_empty();
            let (Some(expr), Some(here)) = (&kernel.workspace, workspace(kernel, &self.case.facts)) else { continue };
            let over_cell = || match expr.possible(&bounds) {
                Possible::Between(low, high) => (low, high),
                _ => (here, here),
            };
            if runs_here {
                range.compared(if uniform { over_cell() } else { (here, here) }, self.case.available);
            }
        }
        range
    }

    /// Workspace and grid are compared with limits: both ends of their range must fall on one side.
    fn sizes_are_uniform(&self, kernel: &Compiled, bounds: &crate::cell::CellBounds<'_>) -> bool {
        let one_side = |expr: &lz_expr::Expr, scale: i64, limit: i64| match expr.possible(bounds) {
            Possible::Between(low, high) => (low.saturating_mul(scale) > limit) == (high.saturating_mul(scale) > limit),
            _ => false,
        };
        let available = self.case.available;
        let workspace = kernel.workspace.as_ref().is_none_or(|expr| one_side(expr, 1, available));
        let grid = match (&kernel.grid, self.case.facts.device.launch) {
            (Some(grid), Some(limits)) => {
                let axes = grid.axes.iter().enumerate().all(|(i, axis)| {
                    let scale = if i == 0 { grid.blocks_per_batch_head } else { 1 };
                    axis.as_ref().is_none_or(|expr| one_side(expr, scale, i64::from(limits.max_grid[i])))
                });
                let shared = i64::from(limits.max_shared_bytes_per_block);
                axes && grid.shared_bytes.as_ref().is_none_or(|expr| one_side(expr, 1, shared))
            }
            _ => true,
        };
        workspace && grid
    }
}

/// The call without the promises a kernel has no rule about; `None` when it makes none.
fn unpromised(kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Query> {
    facts.op.unpromised(facts.query, |promise| kernel.dims.contains_key(promise))
}

fn transform_points(kernel: &KernelDescriptor, transforms: Transforms) -> f64 {
    if transforms.is_empty() {
        return 0.0;
    }
    let costs = [(Transforms::LAYOUT, 2.0), (Transforms::CONTIGUOUS, 5.0), (Transforms::CAST, 5.0)];
    let cost: f64 = costs.iter().filter(|(t, _)| transforms.has(*t)).map(|(_, cost)| cost).sum();
    -(cost + f64::from(kernel.transform_cost_hint))
}
