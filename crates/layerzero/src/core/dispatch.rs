//! Calls on host tensors: one of the callers of [`Scope::serve`].

use lz_model::schema::{Access, Update};
use lz_model::{
    CallError, Catalog, Context, KernelError, Layout, NamedCall, ParamValue, Tensor, TensorMeta, TensorView,
    TensorViewMut,
};

use super::Core;
use super::attempt::Attempt;
use super::scope::Scope;
use super::serve::{Blame, Caller, Ending, Proven};
use super::step::Step;
use crate::error::{Error, Failure};

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

impl Core {
    /// [`Scope::dispatch`] outside of any context.
    pub fn dispatch(&self, op: &str, arguments: Arguments<'_>) -> Result<Dispatched, Error> {
        self.process().dispatch(op, arguments)
    }
}

impl Scope<'_> {
    /// Runs an operation with the kernel selection chooses. A kernel that fails is followed by the next in the ranking, at
    /// last by the reference.
    pub fn dispatch(&self, op: &str, mut arguments: Arguments<'_>) -> Result<Dispatched, Error> {
        let state = &self.state;
        let named = NamedCall {
            inputs: arguments
                .inputs
                .iter()
                .map(|(name, view)| (*name, TensorMeta::of(view.as_ref())))
                .chain(arguments.updates.iter().map(|(name, view)| (*name, TensorMeta::of(view.as_ref()))))
                .collect(),
            params: arguments.params.clone(),
            layout: arguments.layout,
            device: lz_model::DeviceIx(0),
            context: arguments.context,
        };
        let (ordered, bound) = self.bind(op, &named)?;
        let query = bound.query;
        let op = Catalog::get().op(query.op());
        for (name, _) in &arguments.updates {
            let input = op.input_index(name).map(|i| &op.schema().inputs[i]);
            if let Some(input) = input.filter(|i| i.access == Access::Read) {
                return Err(CallError::NotUpdated { op: op.id(), input: input.name }.into());
            }
        }
        let (params, expected) = op.settled(&named, &ordered, &query)?;
        let (steps, _) = self.all_steps(&query)?;
        drop(named);

        let mut inputs: Vec<Option<TensorView<'_>>> = vec![None; op.schema().inputs.len()];
        for (name, view) in &arguments.inputs {
            if let Some(index) = op.input_index(name) {
                inputs[index] = Some(view.clone());
            }
        }
        let attempt = Attempt { scope: self, op, query: &query, inputs: &inputs, params: &params, expected: &expected };
        let runnable = |step: &&Step| step.executable.runs_on_host();
        let mut steps: Vec<&Step> = match steps.iter().filter(runnable).collect::<Vec<_>>() {
            // Nothing can run here: say so by trying.
            none if none.is_empty() => steps.iter().collect(),
            some => some,
        };
        if !state.snapshot.spec().settings.fallback_enabled {
            steps.truncate(1);
        }
        let mut caller = HostCaller { attempt, steps: &steps, updates: &mut arguments.updates, saved: Vec::new() };
        let failure = |(at, error): (usize, KernelError)| Failure { kernel_id: steps[at].kernel.id.clone(), error };
        match self.serve(&query, &steps, None, &mut caller) {
            Ending::Served { at, output, failed } => Ok(Dispatched {
                op: op.id(),
                kernel_id: steps[at].kernel.id.clone(),
                outputs: expected.iter().map(|spec| spec.name).zip(output).collect(),
                failures: failed.into_iter().map(failure).collect(),
            }),
            Ending::Ended { at, error, failed } => {
                let chain = failed.into_iter().chain([(at, error)]).map(failure).collect();
                Err(Error::Execution { op: op.id(), chain })
            }
            Ending::Unserved { refused, failed, .. } => {
                let refused = refused.into_iter().map(|(at, why)| (at, KernelError::Failed(why)));
                Err(Error::Execution { op: op.id(), chain: refused.chain(failed).map(failure).collect() })
            }
        }
    }
}

/// A call on host tensors.
struct HostCaller<'c, 'a, 'n, 'u> {
    attempt: Attempt<'a>,
    steps: &'c [&'c Step],
    updates: &'c mut [(&'n str, TensorViewMut<'u>)],
    /// The rows that are overwritten, and each updated tensor's as they were.
    saved: Vec<(Vec<i64>, Tensor)>,
}

impl Caller for HostCaller<'_, '_, '_, '_> {
    type Output = Vec<Tensor>;
    type Error = KernelError;

    fn prove(&mut self, _at: usize, _alone: bool) -> Result<Proven, KernelError> {
        Ok(Proven::Passed)
    }

    fn save(&mut self) -> Result<(), KernelError> {
        let Some(Update::Rows { index, column }) = self.attempt.op.schema().update else { return Ok(()) };
        let index = self.attempt.op.input_index(index).and_then(|i| self.attempt.inputs[i].as_ref());
        let Some(index) = index else { return Ok(()) };
        for (_, view) in self.updates.iter() {
            let count = view.shape().first().copied().unwrap_or(0);
            let listed = (0..index.shape()[0]).map(|i| index.get_int(&[i, column]));
            let rows: Vec<i64> = listed.filter(|row| (0..count).contains(row)).collect();
            let copy = view.as_view().rows(&rows);
            self.saved.push((rows, copy));
        }
        Ok(())
    }

    fn restore(&mut self) -> Result<(), KernelError> {
        for ((_, view), (rows, copy)) in self.updates.iter_mut().zip(&self.saved) {
            view.put_rows(rows, &copy.view());
        }
        Ok(())
    }

    fn run(&mut self, at: usize) -> Result<Vec<Tensor>, KernelError> {
        self.attempt.run(self.steps[at], self.updates)
    }

    fn blame(&mut self, _at: usize, error: KernelError) -> Blame<KernelError> {
        if error.is_callers_fault() { Blame::Caller(error) } else { Blame::Kernel(error) }
    }

    fn told(&self, error: &KernelError) -> (String, String) {
        let said = error.to_string();
        (said.clone(), said)
    }
}
