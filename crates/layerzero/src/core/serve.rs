//! The one call path: admit a kernel, run it, classify its failure, go on to the next, at last the reference.
//!
//! [`Scope::serve`] is the only loop of its kind. Who makes the call is a [`Caller`]: host tensors
//! ([`Scope::dispatch`]), Python objects and texts today. A caller knows how to run a kernel on its own tensors and whose
//! fault a failure was; the order of attempts, circuits, counters, levels, warnings and rollouts are the same for all.

use std::collections::VecDeque;

use lz_model::schema::Update;
use lz_model::{Catalog, Query};
use lz_resilience::Admission;
use lz_resilience::rollout::RolloutCall;

use super::Core;
use super::executable::Executable;
use super::guard::Fault;
use super::scope::Scope;
use super::step::Step;
use crate::warn::Warning;

/// Somebody who makes calls: runs kernels on tensors of its own kind.
///
/// `at` is always the place of a step in the list that was given to [`Scope::serve`].
pub trait Caller {
    /// What a call gives.
    type Output;
    /// What a kernel, or anything around it, raises.
    type Error;

    /// Makes a kernel ready to run: imports its library. One whose library cannot be imported has failed, and the decision it
    /// was part of no longer holds.
    fn load(&mut self, _at: usize) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Why a step cannot serve this very call, although selection allows it: somebody records the caller's operations and
    /// would miss what a native kernel does. It is passed over, and nobody is counted.
    fn declines(&mut self, _at: usize) -> Result<Option<String>, Self::Error> {
        Ok(None)
    }

    /// Compares a kernel with the reference before it serves. `alone`: no other kernel is left, so waiting for another
    /// thread's comparison is worth it. Only asked about steps that are [`Step::unproven`].
    fn prove(&mut self, at: usize, alone: bool) -> Result<Proven, Self::Error>;

    /// Copies the rows that the call is about to overwrite, so that [`Caller::restore`] can put them back. Only asked
    /// for operations whose schema says [`Update::Rows`].
    fn save(&mut self) -> Result<(), Self::Error>;

    /// Puts saved rows back.
    fn restore(&mut self) -> Result<(), Self::Error>;

    /// Runs a kernel and checks what it gave.
    fn run(&mut self, at: usize) -> Result<Self::Output, Self::Error>;

    /// Whose fault a failure was.
    fn blame(&mut self, at: usize, error: Self::Error) -> Blame<Self::Error>;

    /// What an error says, in one line and in full. The full text is searched for what it says about the device.
    fn told(&self, error: &Self::Error) -> (String, String);

    /// Whether a step is the definition of what is right for this call, although it is no reference of ours: it is tried
    /// even if its circuit is open.
    fn defines(&self, _at: usize) -> bool {
        false
    }
}

/// What came of an attempt to prove a kernel.
pub enum Proven {
    /// It may serve.
    Passed,
    /// It was wrong: it is out, and the decision it was part of no longer holds.
    Wrong(String),
    /// It cannot be compared now, so it may not serve this call.
    Later(String),
}

/// Whose fault a failure was.
pub enum Blame<E> {
    /// The kernel's: the next one is tried.
    Kernel(E),
    /// The kernel's, and it has changed tensors it may only read: no other kernel could give the right answer.
    Spoiled(E),
    /// The caller's: wrong data, an interrupt, an exception of the caller's own code. The call ends; nobody is counted.
    Caller(E),
}

/// How a call ended.
pub enum Ending<O, E> {
    /// A kernel served it.
    Served {
        /// Which.
        at: usize,
        /// What it gave.
        output: O,
        /// The kernels that failed before it.
        failed: Vec<(usize, E)>,
    },
    /// It was over before a kernel could serve it: [`Blame::Caller`] or [`Blame::Spoiled`].
    Ended {
        /// The kernel that ran.
        at: usize,
        /// What is to be raised, as it is.
        error: E,
        /// The kernels that failed before it.
        failed: Vec<(usize, E)>,
    },
    /// No kernel served it.
    Unserved {
        /// Kernels that were not tried, with why.
        refused: Vec<(usize, String)>,
        /// Kernels that failed.
        failed: Vec<(usize, E)>,
        /// Whether a kernel was found wrong, or could not be loaded, and none ran: another decision may name one that
        /// can serve.
        decide_again: bool,
    },
}

impl Scope<'_> {
    /// Runs the kernels of `steps` in order until one serves the call.
    ///
    /// `begun`: the step a caller has run already (its straight path), whose result [`Caller::run`] gives without running
    /// it again. Those before it were refused.
    ///
    /// - A step whose circuit is open is passed over. References, plain torch and what [`Caller::defines`] the result never
    ///   are.
    /// - A failure counts when it is known that the call itself was right: after another kernel has served it, or all have
    ///   failed. What it says about the device (memory ran out, a lost context) counts at once.
    /// - When memory runs out, the kernels that are left are tried in the order of the workspace they need, references last.
    /// - After a failed update in place the next kernel is tried only if the caller's tensors are as before: the update is
    ///   idempotent, or its rows were saved and are put back. The schema says which ([`Update`]).
    pub fn serve<S: AsRef<Step>, C: Caller>(
        &self,
        query: &Query,
        steps: &[S],
        begun: Option<usize>,
        caller: &mut C,
    ) -> Ending<C::Output, C::Error> {
        let (core, op) = (self.core, Catalog::get().op(query.op()));
        let fallback = self.state.snapshot.spec().settings.fallback_enabled;
        let saves_rows = matches!(op.schema().update, Some(Update::Rows { .. }));
        // Kernels that are only described cannot run: one is tried if there is no other, so that it says so.
        let runs = |at: &usize| !matches!(steps[*at].as_ref().executable, Executable::Described);
        let any_runs = (0..steps.len()).any(|at| runs(&at));
        let mut left: VecDeque<usize> = (begun.unwrap_or(0)..steps.len()).filter(|at| !any_runs || runs(at)).collect();
        let mut refused: Vec<(usize, String)> = Vec::new();
        let mut failures = Failures { core, steps, counted: Vec::new(), pending: Vec::new() };
        let (mut begun, mut saved) = (begun.is_some(), false);
        let (mut found_wrong, mut cannot_load, mut declined) = (false, false, false);
        while let Some(at) = left.pop_front() {
            let step = steps[at].as_ref();
            let has_run = std::mem::take(&mut begun);
            if !has_run {
                match caller.declines(at) {
                    Ok(None) => {}
                    Ok(Some(why)) => {
                        declined = true;
                        refused.push((at, why));
                        continue;
                    }
                    Err(error) => return failures.ended(at, error),
                }
            }
            let admission = match core.admit(step) {
                Ok(admission) => admission,
                // It ran before its circuit opened, or what it gives is right by definition.
                Err(_) if has_run || caller.defines(at) && core.admit_anyway(step).is_ok() => Admission::Closed,
                Err(why) => {
                    refused.push((at, why));
                    continue;
                }
            };
            let loaded = if has_run { Ok(()) } else { caller.load(at) };
            cannot_load |= loaded.is_err();
            let proven = loaded.and_then(|()| match step.unproven && !has_run {
                true => caller.prove(at, left.is_empty()),
                false => Ok(Proven::Passed),
            });
            if let Ok(Proven::Wrong(why) | Proven::Later(why)) = &proven {
                found_wrong |= matches!(proven, Ok(Proven::Wrong(_)));
                refused.push((at, why.clone()));
                continue;
            }
            // A comparison runs on copies: when that fails, or loading, the caller's tensors are as they were.
            let mut untouched = proven.is_err();
            if saves_rows && !saved && !has_run && !untouched && fallback && !left.is_empty() {
                match caller.save().map_err(|error| caller.blame(at, error)) {
                    Ok(()) => saved = true,
                    Err(Blame::Caller(error)) => return failures.ended(at, error),
                    // Without memory for a copy the call is made all the same: a failure then ends it.
                    Err(_) => {}
                }
            }
            let result = proven.and_then(|_| {
                if !has_run {
                    step.health.record_call();
                }
                caller.run(at)
            });
            let first = at == 0 && failures.is_empty() && refused.is_empty();
            let error = match result {
                Ok(output) => {
                    let failed = failures.count(caller);
                    core.succeeded(step, admission, !failed.is_empty());
                    if first {
                        self.tried_first(query, RolloutCall::OK);
                    }
                    if let Some((failed_at, error)) = failed.first() {
                        self.tell_fallback(query, steps[*failed_at].as_ref(), step, caller.told(error).0);
                    }
                    return Ending::Served { at, output, failed };
                }
                Err(error) => error,
            };
            let (error, spoiled) = match caller.blame(at, error) {
                Blame::Caller(error) => return failures.ended(at, error),
                Blame::Kernel(error) => (error, false),
                Blame::Spoiled(error) => (error, true),
            };
            if first {
                self.tried_first(query, RolloutCall::FAILED);
            }
            if spoiled {
                let failed = failures.count_last(caller, at, admission, &error);
                core.nobody_served();
                return Ending::Ended { at, error, failed };
            }
            if failures.add(caller, at, admission, error) == Fault::OutOfMemory {
                let need = |at: &usize| {
                    let step = steps[*at].as_ref();
                    (step.kernel.reference, self.workspace_of(step, query))
                };
                left.make_contiguous().sort_by_key(need);
            }
            untouched |= match op.schema().update {
                None | Some(Update::Idempotent) => true,
                Some(Update::Rows { .. }) => saved && caller.restore().is_ok(),
            };
            if !fallback || !untouched {
                break;
            }
        }
        let failed = failures.count(caller);
        // Nothing has run: another decision is no fallback.
        let decide_again = found_wrong && failed.is_empty() || cannot_load && !fallback;
        // Nor is it anybody's failure that a call could not be recorded.
        let nobody_tried = declined && failed.is_empty();
        if !decide_again && !nobody_tried {
            core.nobody_served();
        }
        Ending::Unserved { refused, failed, decide_again }
    }

    /// Warns that another kernel than the first served a call.
    pub fn tell_fallback(&self, query: &Query, failed: &Step, served: &Step, error: String) {
        let (failed, served) = (failed.kernel.id.clone(), served.kernel.id.clone());
        let factor = self.cost_of(query, &failed, &served);
        let op = Catalog::get().op(query.op()).id();
        self.core.warn(&Warning::FellBack { op, failed, error, served, factor });
    }
}

/// The kernels that failed a call, in order, until it is known whose fault that was.
struct Failures<'a, S, E> {
    core: &'a Core,
    steps: &'a [S],
    counted: Vec<(usize, E)>,
    /// Not counted yet: the call itself may turn out to be wrong.
    pending: Vec<(usize, Admission<'a>, E)>,
}

impl<'a, S: AsRef<Step>, E> Failures<'a, S, E> {
    fn is_empty(&self) -> bool {
        self.counted.is_empty() && self.pending.is_empty()
    }

    /// Adds one, and says what went wrong. What says something about the device counts at once.
    fn add<C: Caller<Error = E>>(&mut self, caller: &C, at: usize, admission: Admission<'a>, error: E) -> Fault {
        let (line, detail) = caller.told(&error);
        let fault = Fault::of(&detail);
        match fault {
            Fault::Kernel => self.pending.push((at, admission, error)),
            Fault::OutOfMemory | Fault::Poisoned => {
                self.settle(caller);
                self.core.failed(self.steps[at].as_ref(), admission, &line, &detail);
                self.counted.push((at, error));
            }
        }
        fault
    }

    fn settle<C: Caller<Error = E>>(&mut self, caller: &C) {
        for (at, admission, error) in self.pending.drain(..) {
            let (line, detail) = caller.told(&error);
            self.core.failed(self.steps[at].as_ref(), admission, &line, &detail);
            self.counted.push((at, error));
        }
    }

    /// Counts all of them.
    fn count<C: Caller<Error = E>>(mut self, caller: &C) -> Vec<(usize, E)> {
        self.settle(caller);
        self.counted
    }

    /// Counts all of them and one more, which ends the call. Gives those before it.
    fn count_last<C: Caller<Error = E>>(
        mut self,
        caller: &C,
        at: usize,
        admission: Admission<'a>,
        error: &E,
    ) -> Vec<(usize, E)> {
        self.settle(caller);
        let (line, detail) = caller.told(error);
        self.core.failed(self.steps[at].as_ref(), admission, &line, &detail);
        self.counted
    }

    /// The call itself was wrong: nobody else is counted.
    fn ended<O>(mut self, at: usize, error: E) -> Ending<O, E> {
        self.counted.extend(self.pending.into_iter().map(|(at, _, error)| (at, error)));
        Ending::Ended { at, error, failed: self.counted }
    }
}
