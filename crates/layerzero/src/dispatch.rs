//! Dispatch: the chosen kernel is run; when it fails, the next; at last the reference.

use std::collections::VecDeque;

use lz_model::schema::{Access, Output};
use lz_model::{
    Call, CallError, Catalog, Context, KernelArgs, KernelDescriptor, KernelError, Layout, NamedCall, Op, OutputSpec,
    ParamValue, Query, Tensor, TensorView, TensorViewMut,
};
use lz_resilience::rollout::Outcome;
use lz_select::{Candidate, KernelIx, Transforms};

use crate::adapt::run_adapted;
use crate::ask::no_kernel;
use crate::engine::{Engine, State};
use crate::error::{Error, Failure};
use crate::executable::Executable;
use crate::guard::Fault;
use crate::warn::Warning;

/// The arguments of a call on host memory, by name.
#[derive(Debug, Default)]
pub struct Arguments<'a> {
    inputs: Vec<(&'a str, TensorView<'a>)>,
    updates: Vec<(&'a str, TensorViewMut<'a>)>,
    params: Vec<(&'a str, ParamValue)>,
    layout: Option<Layout>,
    context: Context,
}

impl<'a> Arguments<'a> {
    /// No arguments yet.
    pub fn new() -> Arguments<'a> {
        Arguments::default()
    }

    /// Adds a tensor that is read.
    pub fn input(mut self, name: &'a str, view: TensorView<'a>) -> Arguments<'a> {
        self.inputs.push((name, view));
        self
    }

    /// Adds a tensor that is updated in place.
    pub fn update(mut self, name: &'a str, view: TensorViewMut<'a>) -> Arguments<'a> {
        self.updates.push((name, view));
        self
    }

    /// Adds a parameter.
    pub fn param(mut self, name: &'a str, value: ParamValue) -> Arguments<'a> {
        self.params.push((name, value));
        self
    }

    /// Says the layout.
    pub fn layout(mut self, layout: Layout) -> Arguments<'a> {
        self.layout = Some(layout);
        self
    }

    /// Says the demands.
    pub fn context(mut self, context: Context) -> Arguments<'a> {
        self.context = context;
        self
    }
}

/// A call that was served.
#[derive(Clone, Debug)]
pub struct Dispatched {
    /// The operation it was.
    pub op: &'static str,
    /// The kernel that served it.
    pub kernel_id: String,
    /// The new tensors, by name. Updated inputs were updated in place.
    pub outputs: Vec<(&'static str, Tensor)>,
    /// What was tried before, and failed.
    pub failures: Vec<Failure>,
}

impl Dispatched {
    /// The first output: the result of most operations.
    pub fn output(&self) -> Option<&Tensor> {
        self.outputs.first().map(|(_, tensor)| tensor)
    }
}

impl Engine {
    /// Runs an operation with the kernel selection chooses. A kernel that fails is followed by
    /// the next in the ranking, at last by the reference; half-written in-place tensors are put
    /// back before another kernel sees them.
    pub fn dispatch(&self, op: &str, mut arguments: Arguments<'_>) -> Result<Dispatched, Error> {
        let state = self.state();
        let named = NamedCall {
            inputs: arguments
                .inputs
                .iter()
                .map(|(name, view)| (*name, view.meta()))
                .chain(arguments.updates.iter().map(|(name, view)| (*name, view.meta())))
                .collect(),
            params: arguments.params.clone(),
            layout: arguments.layout,
            device: lz_model::DeviceIx(0),
            context: arguments.context,
        };
        let (ordered, bound) = self.bind_in(&state, op, &named)?;
        let query = bound.query;
        let op = Catalog::get().op(query.op());
        for (name, _) in &arguments.updates {
            let input = op.input_index(name).map(|i| &op.schema().inputs[i]);
            if let Some(input) = input.filter(|i| i.access == Access::Read) {
                return Err(CallError::NotUpdated { op: op.id(), input: input.name }.into());
            }
        }
        let params = op.params(&ordered.params)?;
        let call = Call {
            inputs: &ordered.inputs,
            params: &params,
            layout: named.layout,
            device: named.device,
            context: named.context,
        };
        let expected = op.outputs(&call, &query);
        let Some(plan) = self.plan_in(&state, &query) else {
            return Err(no_kernel(&state.snapshot, &state.snapshot.select(&query)));
        };
        drop(named);

        let mut inputs: Vec<Option<TensorView<'_>>> = vec![None; op.schema().inputs.len()];
        for (name, view) in &arguments.inputs {
            if let Some(index) = op.input_index(name) {
                inputs[index] = Some(view.clone());
            }
        }
        let attempt =
            Attempt { state: &state, op, query: &query, inputs: &inputs, params: &params, expected: &expected };
        let runnable = |(kernel, _): &(KernelIx, Transforms)| state.executables[kernel.0 as usize].runs_on_host();
        let mut steps: VecDeque<_> = match plan.steps().filter(runnable).collect::<VecDeque<_>>() {
            // Nothing can run here: say so by trying.
            none if none.is_empty() => plan.steps().collect(),
            some => some,
        };
        if !state.snapshot.spec().settings.fallback_enabled {
            steps.truncate(1);
        }
        let mut failures: Vec<Failure> = Vec::new();
        // Those whose circuit is open: not tried, so that nothing fell back.
        let mut refused: Vec<Failure> = Vec::new();
        while let Some((kernel, transforms)) = steps.pop_front() {
            let step = state.step(&self.guard, op.id(), kernel, transforms);
            let kernel_id = step.kernel.id.clone();
            let admission = match self.admit(&step) {
                Ok(admission) => admission,
                Err(why) => {
                    refused.push(Failure { kernel_id, error: KernelError::Failed(why) });
                    continue;
                }
            };
            step.health.record_call();
            match attempt.run(kernel, transforms, &mut arguments.updates) {
                Ok(outputs) => {
                    self.succeeded(&step, admission, !failures.is_empty());
                    if failures.is_empty() && refused.is_empty() {
                        self.tried_first(&query, Outcome::OK);
                    }
                    self.tell_fallback(&query, op.id(), &failures, &kernel_id);
                    let outputs = expected.iter().map(|spec| spec.name).zip(outputs).collect();
                    return Ok(Dispatched { op: op.id(), kernel_id, outputs, failures });
                }
                Err(error) if error.is_callers_fault() => {
                    failures.push(Failure { kernel_id, error });
                    return Err(Error::Execution { op: op.id(), chain: failures });
                }
                Err(error) => {
                    if failures.is_empty() && refused.is_empty() {
                        self.tried_first(&query, Outcome::FAILED);
                    }
                    let said = error.to_string();
                    if self.failed(&step, admission, &said, &said) == Fault::OutOfMemory {
                        // The reference stays the last: it needs nothing, and takes its time.
                        let needs = |(kernel, _): &(KernelIx, Transforms)| {
                            (state.snapshot.kernel(*kernel).reference, state.snapshot.workspace(*kernel, &query))
                        };
                        steps.make_contiguous().sort_by_key(needs);
                    }
                    failures.push(Failure { kernel_id, error });
                }
            }
        }
        self.nobody_served();
        refused.append(&mut failures);
        Err(Error::Execution { op: op.id(), chain: refused })
    }

    /// Warns when another kernel than the first served a call.
    fn tell_fallback(&self, query: &Query, op: &'static str, failures: &[Failure], served: &str) {
        let Some(first) = failures.first() else { return };
        let (failed, error, served) = (first.kernel_id.clone(), first.error.to_string(), served.to_owned());
        let factor = self.cost_of(query, &failed, &served);
        self.warn(&Warning::FellBack { op, failed, error, served, factor });
    }
}

/// One bound call, to be tried on one kernel after another.
pub(crate) struct Attempt<'a> {
    state: &'a State,
    pub op: &'static Op,
    pub query: &'a Query,
    pub inputs: &'a [Option<TensorView<'a>>],
    pub params: &'a [ParamValue],
    pub expected: &'a [OutputSpec],
}

impl Attempt<'_> {
    /// Whether a kernel takes a query as it is.
    pub fn serves(&self, kernel: &KernelDescriptor, query: &Query) -> bool {
        let snapshot = &self.state.snapshot;
        let is_it = |c: &Candidate| std::ptr::eq(&**snapshot.kernel(c.kernel), kernel);
        snapshot.select(query).candidates.iter().any(|c| is_it(c) && c.accepted() && c.transforms.is_empty())
    }

    fn run(
        &self,
        kernel: KernelIx,
        transforms: Transforms,
        updates: &mut [(&str, TensorViewMut<'_>)],
    ) -> Result<Vec<Tensor>, KernelError> {
        let executable = &self.state.executables[kernel.0 as usize];
        let descriptor = self.state.snapshot.kernel(kernel);
        if !transforms.is_empty() {
            return run_adapted(self, descriptor, executable, transforms);
        }
        let before: Vec<Vec<u8>> = updates.iter().map(|(_, view)| view.save()).collect();
        let result = self.run_as_is(executable, updates);
        if result.is_err() {
            for ((_, view), old) in updates.iter_mut().zip(&before) {
                view.restore(old);
            }
        }
        result
    }

    fn run_as_is(
        &self,
        executable: &Executable,
        updates: &mut [(&str, TensorViewMut<'_>)],
    ) -> Result<Vec<Tensor>, KernelError> {
        let mut fresh: Vec<Tensor> = self.expected.iter().map(OutputSpec::allocate).collect::<Result<_, _>>()?;
        let mut fresh_views = fresh.iter_mut().map(Tensor::view_mut);
        let mut updated: Vec<Option<TensorViewMut<'_>>> = Vec::new();
        let mut names = Vec::new();
        for (name, view) in updates.iter_mut() {
            names.push(self.op.input_index(name));
            updated.push(Some(view.reborrow()));
        }
        let mut outputs: Vec<TensorViewMut<'_>> = Vec::new();
        for output in self.op.schema().outputs {
            let view = match output {
                Output::Fresh { .. } => fresh_views.next(),
                Output::Updates(name) => {
                    let index = self.op.input_index(name);
                    names.iter().position(|n| *n == index).and_then(|i| updated[i].take())
                }
            };
            let missing =
                || KernelError::Failed(format!("no memory for '{}'; pass it as an updated tensor", output.name()));
            outputs.push(view.ok_or_else(missing)?);
        }
        let inputs = self.inputs;
        let args = &mut KernelArgs { query: self.query, inputs, params: self.params, outputs: &mut outputs };
        executable.run(args)?;
        drop(outputs);
        Ok(fresh)
    }
}
