//! Calls on texts. A query says which tokenizer a call is for; what it cannot say is whose tokenizer that is, and which
//! libraries would give other ids than it does. A [`TextCall`] says it.

use lz_model::{DeviceIx, NamedCall, ParamValue, Query, Reason};
use lz_select::{Decision, Ranked};

use super::ask::{Selection, no_kernel};
use super::scope::Scope;
use super::state::State;
use super::step::Step;
use crate::error::Error;
use crate::rejections::Rejection;
use crate::report::Report;

/// A call on texts, but for its sizes.
pub struct TextCall {
    query: Query,
    own: String,
    refused: Vec<(String, String)>,
}

impl TextCall {
    /// Whether this is the library the tokenizer belongs to: what it gives is right by definition, it serves when nobody
    /// else may.
    pub fn is_own(&self, backend: &str) -> bool {
        self.own == backend
    }

    /// Why a library's kernels may not serve the call, if they may not.
    fn refusal(&self, backend: &str) -> Option<&str> {
        self.refused.iter().find(|(name, _)| name == backend).map(|(_, why)| why.as_str())
    }

    /// The query for so many texts, the longest of that length.
    pub fn query(&self, texts: i64, length: i64) -> Query {
        let mut dims = *self.query.dims();
        [dims[0], dims[1]] = [texts, length];
        self.query.with_dims(dims)
    }
}

impl Scope<'_> {
    /// A call of `tokenize.encode` or `tokenize.decode`. `own` is the library the tokenizer belongs to, `refused` are
    /// those that would not give its ids, with why.
    pub fn text_call(
        &self,
        op: &str,
        params: Vec<(&str, ParamValue)>,
        own: String,
        refused: Vec<(String, String)>,
    ) -> Result<TextCall, Error> {
        let sizes = [("texts", ParamValue::Int(1)), ("length", ParamValue::Int(1))];
        let params = params.into_iter().chain(sizes).collect();
        let call = NamedCall { params, device: DeviceIx(0), ..NamedCall::new() };
        let (_, bound) = self.bind(op, &call)?;
        Ok(TextCall { query: bound.query, own, refused })
    }

    /// The kernels to try, in order.
    pub fn text_steps(&self, call: &TextCall, query: &Query) -> Result<Vec<Step>, Error> {
        let state = &self.state;
        let op = lz_model::Catalog::get().op(query.op()).id();
        let most = if state.snapshot.spec().settings.fallback_enabled { usize::MAX } else { 1 };
        let chain = self.chain(query);
        let steps = chain.iter().flat_map(|chain| chain.steps());
        let may = steps.filter(|(kernel, _)| call.refusal(&state.snapshot.kernel(*kernel).backend).is_none());
        let step = |(kernel, transforms)| {
            let step = state.step(&self.core.guard, op, kernel, transforms);
            let unproven = !call.is_own(&step.kernel.backend) && state.snapshot.needs_proof(kernel, query);
            Step { unproven, ..step }
        };
        let steps: Vec<Step> = may.take(most).map(step).collect();
        if !steps.is_empty() {
            return Ok(steps);
        }
        let decision = self.text_decision(call, query);
        match decision.chosen() {
            Some(own) => Ok(vec![step((own.kernel, own.transforms))]),
            None => Err(no_kernel(&state.snapshot, &decision)),
        }
    }

    /// The kernel of the library the tokenizer belongs to, if it can run: what others are compared with.
    pub fn text_own_step(&self, call: &TextCall, query: &Query) -> Option<Step> {
        let state = &self.state;
        let op = lz_model::Catalog::get().op(query.op());
        let own = |ix: &lz_select::KernelIx| call.is_own(&state.snapshot.kernel(*ix).backend);
        let mut kernels = state.snapshot.kernels_for(op.ix()).filter(own);
        kernels.find_map(|ix| {
            let transforms = state.snapshot.legality(ix, query).ok()?;
            Some(state.step(&self.core.guard, op.id(), ix, transforms))
        })
    }

    /// Selection, less the libraries that would give other ids. The tokenizer's own is left where only references may
    /// run: it is the reference.
    fn text_decision(&self, call: &TextCall, query: &Query) -> Decision {
        let state = &self.state;
        let mut decision = self.decide(query);
        let backend = |c: &lz_select::Candidate| &state.snapshot.kernel(c.kernel).backend;
        for candidate in &mut decision.candidates {
            if let Some(why) = call.refusal(backend(candidate)) {
                let constraint = "giving the ids of the tokenizer's own library".to_owned();
                candidate.reasons.push(Reason::ConstraintFailed { constraint, found: why.to_owned() });
            }
        }
        decision.strike_out(|kernel| state.snapshot.name(kernel));
        if decision.ranking.is_empty()
            && let Some(at) =
                decision.candidates.iter().position(|c| call.is_own(backend(c)) && is_last_resort(state, c))
        {
            decision.candidates[at].reasons.clear();
            decision.ranking.push(at);
            (decision.ranked_first, decision.struck_out) = (Some(Ranked::Only), None);
        }
        decision
    }

    /// Everything about the choice of a kernel for the call.
    pub fn text_explain(&self, call: &TextCall, query: &Query) -> Report {
        Report::new(&self.state.snapshot, &self.text_decision(call, query))
    }

    /// The kernel that serves the call.
    pub fn text_which(&self, call: &TextCall, query: &Query) -> Result<Selection, Error> {
        let state = &self.state;
        let decision = self.text_decision(call, query);
        let chosen = decision.chosen().ok_or_else(|| no_kernel(&state.snapshot, &decision))?;
        Ok(Selection::new(&state.snapshot, query, chosen))
    }

    /// One kernel for the call, whatever the ranking; an error with its reasons when it cannot serve it.
    pub fn text_step_of(&self, call: &TextCall, query: &Query, kernel_id: &str) -> Result<Step, Error> {
        let step = self.step_of(kernel_id, query)?;
        let Some(why) = call.refusal(&step.kernel.backend) else { return Ok(step) };
        let constraint = "giving the ids of the tokenizer's own library".to_owned();
        let reasons = vec![Reason::ConstraintFailed { constraint, found: why.to_owned() }];
        Err(Error::NoKernel { op: step.op, rejections: vec![Rejection { kernel_id: kernel_id.to_owned(), reasons }] })
    }
}

/// Whether a kernel is out for no other reason than that only references, or what has proved itself, may run, or that its
/// circuit is open. What the operator forbids, and what it cannot do, it does not do as a last resort either.
fn is_last_resort(state: &State, candidate: &lz_select::Candidate) -> bool {
    let can_run = state.snapshot.static_reasons(candidate.kernel, DeviceIx(0)).is_empty();
    let failures = candidate.reasons.iter().filter(|r| matches!(r, Reason::BackendError { .. })).count();
    can_run && candidate.reasons.len() == candidate.cautions + failures
}
