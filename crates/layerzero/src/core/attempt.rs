//! One bound call on host tensors, tried on one kernel: as it is, or on transformed copies.

use lz_model::schema::Output;
use lz_model::{
    BindRules, Call, HostCall, KernelDescriptor, KernelError, Layout, Op, OutputSpec, ParamValue, Query, Tensor,
    TensorMeta, TensorView, TensorViewMut,
};
use lz_select::{Candidate, Transforms};

use super::adapt::{counterpart, transposition, wanted_dtype};
use super::scope::Scope;
use super::step::Step;

/// One bound call, to be tried on one kernel after another.
pub(super) struct Attempt<'a> {
    pub scope: &'a Scope<'a>,
    pub op: &'static Op,
    pub query: &'a Query,
    pub inputs: &'a [Option<TensorView<'a>>],
    pub params: &'a [ParamValue],
    pub expected: &'a [OutputSpec],
}

impl Attempt<'_> {
    /// Whether a kernel takes a query as it is.
    fn serves(&self, kernel: &KernelDescriptor, query: &Query) -> bool {
        let snapshot = &self.scope.state.snapshot;
        let is_it = |c: &Candidate| std::ptr::eq(&**snapshot.kernel(c.kernel), kernel);
        snapshot.select(query).candidates.iter().any(|c| is_it(c) && c.accepted() && c.transforms.is_empty())
    }

    /// Runs the kernel of a step.
    pub fn run(&self, step: &Step, updates: &mut [(&str, TensorViewMut<'_>)]) -> Result<Vec<Tensor>, KernelError> {
        match step.transforms.is_empty() {
            true => self.run_as_is(step, updates),
            false => run_adapted(self, step),
        }
    }

    /// Calls the kernel of a step, with the scratch memory it says it needs and every thread it may use.
    fn call(&self, step: &Step, call: HostCall<'_, '_, '_>) -> Result<(), KernelError> {
        let scratch = self.scope.workspace_of(step, call.query);
        step.executable.run(call, scratch, lz_cpu::threads(self.scope.most_threads()))
    }

    fn run_as_is(&self, step: &Step, updates: &mut [(&str, TensorViewMut<'_>)]) -> Result<Vec<Tensor>, KernelError> {
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
        let (query, inputs, params) = (self.query, self.inputs, self.params);
        self.call(step, HostCall { query, inputs, params, outputs: &mut outputs })?;
        drop(outputs);
        Ok(fresh)
    }
}

/// Runs a kernel on transformed copies and views of the inputs, and gives its results in the form
/// the caller expects.
fn run_adapted(attempt: &Attempt<'_>, step: &Step) -> Result<Vec<Tensor>, KernelError> {
    let (kernel, transforms) = (&*step.kernel, step.transforms);
    let Attempt { op, query, inputs, params, expected, .. } = *attempt;
    let unexpected = |what: &str| KernelError::Failed(format!("arguments could not be adapted: {what}"));
    // Of a paged call only the cache has a layout; the first that has one speaks for all.
    let layout = (0..inputs.len()).map(|i| query.tensor(i).layout()).find(|l| l.is_named()).unwrap_or(Layout::Strided);
    let new_layout = if transforms.has(Transforms::LAYOUT) {
        Some(counterpart(kernel, layout).ok_or_else(|| unexpected("no layout to transpose to"))?)
    } else {
        None
    };
    let copies: Vec<Option<Tensor>> = inputs
        .iter()
        .enumerate()
        .map(|(i, input)| {
            let view = input.as_ref()?;
            let named = query.tensor(i).layout().is_named();
            let turned = match (new_layout, transposition(view.shape().len())) {
                (Some(_), Some(order)) if named => view.permuted(order),
                _ => view.clone(),
            };
            Some(turned.cast(wanted_dtype(op, kernel, i, turned.dtype())))
        })
        .collect();
    let views: Vec<Option<TensorView<'_>>> = copies.iter().map(|c| c.as_ref().map(Tensor::view)).collect();
    let metas: Vec<_> =
        views.iter().map(|v| v.as_ref().map(|v| TensorMeta::of(v.as_ref()).on(query.device()))).collect();
    let call = Call {
        inputs: &metas,
        params,
        layout: new_layout.or(layout.is_named().then_some(layout)),
        device: query.device(),
        context: query.context(),
    };
    let bound = op.bind(&call, &BindRules::default()).map_err(|e| unexpected(&e.to_string()))?;
    // What was adapted must now be legal as it stands; nothing forbidden is ever handed over.
    if !attempt.serves(kernel, &bound.query) {
        return Err(unexpected("the kernel does not take them after all"));
    }
    let mut results: Vec<Tensor> =
        op.outputs(&call, &bound.query).iter().map(OutputSpec::allocate).collect::<Result<_, _>>()?;
    let mut outputs: Vec<TensorViewMut<'_>> = results.iter_mut().map(Tensor::view_mut).collect();
    attempt.call(step, HostCall { query: &bound.query, inputs: &views, params, outputs: &mut outputs })?;
    results
        .iter()
        .zip(expected)
        .map(|(result, spec)| {
            let view = result.view();
            let turned = match (new_layout, transposition(view.shape().len())) {
                (Some(_), Some(order)) => view.permuted(order),
                _ => view,
            };
            if turned.shape() != &spec.shape[..] {
                return Err(unexpected(&format!(
                    "the result has shape {:?}, expected {:?}",
                    turned.shape(),
                    spec.shape
                )));
            }
            Ok(turned.cast(spec.dtype))
        })
        .collect()
}
