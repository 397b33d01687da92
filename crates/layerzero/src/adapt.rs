//! Transforms: arguments brought into the form a kernel takes, and results brought back.
//! Bindings that transform tensors of their own ask here what is to be done.

use lz_model::{
    BindRules, Call, DType, HostCall, KernelDescriptor, KernelError, Layout, Op, OutputSpec, Tensor, TensorMeta,
    TensorView, TensorViewMut,
};
use lz_select::Transforms;

use crate::ask::Step;
use crate::dispatch::Attempt;

/// The axes that exchange two layouts, by rank.
pub fn transposition(rank: usize) -> Option<&'static [usize]> {
    match rank {
        4 => Some(&[0, 2, 1, 3]),
        3 => Some(&[1, 0, 2]),
        _ => None,
    }
}

/// The layout the kernel takes instead of `from`.
pub fn counterpart(kernel: &KernelDescriptor, from: Layout) -> Option<Layout> {
    let partner = match from {
        Layout::Bshd => Layout::Bhsd,
        Layout::Bhsd => Layout::Bshd,
        Layout::Nhd => Layout::Hnd,
        Layout::Hnd => Layout::Nhd,
        other => other,
    };
    kernel.layouts.contains(&partner).then_some(partner)
}

/// Runs a kernel on transformed copies and views of the inputs, and gives its results in the form
/// the caller expects.
pub(crate) fn run_adapted(attempt: &Attempt<'_>, step: &Step) -> Result<Vec<Tensor>, KernelError> {
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

/// The dtype an input is handed over in: its own where the kernel takes it, else what it widens to.
pub fn wanted_dtype(op: &Op, kernel: &KernelDescriptor, index: usize, dtype: DType) -> DType {
    let input = &op.schema().inputs[index];
    let rule = kernel.inputs.iter().find(|(name, _)| op.input_index(name) == Some(index)).and_then(|(_, r)| r.dtypes);
    let taken = rule.unwrap_or(kernel.dtypes).contains(dtype);
    match kernel.requires_dtype {
        Some(to) if !taken && !input.mask && !input.cache && dtype.is_float() && dtype.widens_to(to) => to,
        _ => dtype,
    }
}
