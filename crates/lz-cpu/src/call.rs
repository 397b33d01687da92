//! Running references on named tensors.

use std::cell::RefCell;

use lz_model::schema::Output;
use lz_model::{
    Arena, BindRules, CallError, Catalog, DType, HostCall, KernelError, Layout, NamedCall, Op, ParamValue, Tensor,
    TensorMeta, TensorView, TensorViewMut, Threads,
};

use crate::{Builtin, KERNELS};

/// Why [`call`] gave no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CallRefError {
    /// The arguments are no valid call of the operation.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The operation works on text and has no native reference.
    #[error("{op} has no reference kernel")]
    NoReference {
        /// The operation.
        op: &'static str,
    },
    /// A result would have a negative size, or more elements than memory can hold.
    #[error("{op}: '{output}' would have the shape {shape:?}")]
    ImpossibleOutput {
        /// The operation.
        op: &'static str,
        /// The result.
        output: &'static str,
        /// Its shape.
        shape: Vec<i64>,
    },
    /// The reference itself refused, because of the data.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Runs the reference of an operation: what right means.
///
/// `name` is an operation or an alias, arguments go by name, and anything not given takes its
/// default. Results come in the order of the schema's outputs. The caller's tensors are never
/// changed: an operation that updates an input works on a row-major copy, which is among the results.
///
/// ```
/// use lz_cpu::call;
/// use lz_model::{DType, ParamValue, Tensor};
///
/// let logits = Tensor::from_f64(DType::F32, &[1, 4], &[0.0, 3.0, 1.0, 2.0]);
/// let ids = call("sampling.topk", &[("logits", logits.view())], &[("k", ParamValue::Int(1))], None)?;
/// assert_eq!(ids[0].1.to_f64(), [1.0]);
/// # Ok::<(), lz_cpu::CallRefError>(())
/// ```
pub fn call(
    name: &str,
    inputs: &[(&str, TensorView<'_>)],
    params: &[(&str, ParamValue)],
    layout: Option<Layout>,
) -> Result<Vec<(&'static str, Tensor)>, CallRefError> {
    call_into(name, inputs, params, layout, Tensor::zeros, &How::default())
}

thread_local! {
    /// Scratch memory, kept for the next call. References need none.
    static SCRATCH: RefCell<Arena> = RefCell::default();
}

/// Runs a kernel on views of its results.
type Run<'a> = &'a mut dyn FnMut(&mut [TensorViewMut<'_>]) -> Result<(), KernelError>;

/// Lets a kernel write to results.
type Lend = fn(&mut [(&'static str, Tensor)], Run<'_>) -> Result<(), KernelError>;

/// How [`call_into`] makes its call; by default as [`call`] does.
pub(crate) struct How<'a> {
    /// The kernel; the reference where it is `None`.
    pub kernel: Option<Builtin>,
    /// Bytes of scratch memory.
    pub scratch: usize,
    pub threads: Threads<'a>,
    /// Lets the kernel write to the results.
    pub lend: Lend,
}

impl Default for How<'_> {
    fn default() -> Self {
        How { kernel: None, scratch: 0, threads: Threads::ONE, lend: in_place }
    }
}

fn in_place(results: &mut [(&'static str, Tensor)], run: Run<'_>) -> Result<(), KernelError> {
    run(&mut results.iter_mut().map(|(_, tensor)| tensor.view_mut()).collect::<Vec<_>>())
}

/// [`call`], with results that start out as what `blank` makes of a dtype and a shape.
pub(crate) fn call_into(
    name: &str,
    inputs: &[(&str, TensorView<'_>)],
    params: &[(&str, ParamValue)],
    layout: Option<Layout>,
    blank: impl Fn(DType, &[i64]) -> Tensor,
    how: &How<'_>,
) -> Result<Vec<(&'static str, Tensor)>, CallRefError> {
    let metas: Vec<(&str, TensorMeta<'_>)> =
        inputs.iter().map(|(name, view)| (*name, TensorMeta::of(view.as_ref()))).collect();
    let named = NamedCall { inputs: metas, params: params.to_vec(), layout, ..NamedCall::new() };
    let (ordered, bound) = Catalog::get().resolve(name, &named, &BindRules::default(), |_| None)?;
    let op = Catalog::get().op(bound.query.op());
    let kernel = how.kernel.or_else(|| reference_of(op)).ok_or(CallRefError::NoReference { op: op.id() })?;

    let mut views: Vec<Option<TensorView<'_>>> = vec![None; op.schema().inputs.len()];
    for (name, view) in inputs {
        if let Some(index) = op.input_index(name) {
            views[index] = Some(view.clone());
        }
    }
    let (params, expected) = op.settled(&named, &ordered, &bound.query)?;
    let mut fresh = expected.into_iter();
    let mut results: Vec<(&'static str, Tensor)> = Vec::new();
    for output in op.schema().outputs {
        let tensor = match *output {
            Output::Updates(input) => op.input_index(input).and_then(|i| views[i].take()).map(|view| view.to_tensor()),
            Output::Fresh { .. } => match fresh.next() {
                Some(spec) if Tensor::try_zeros(spec.dtype, &spec.shape).is_none() => {
                    let shape = spec.shape.to_vec();
                    return Err(CallRefError::ImpossibleOutput { op: op.id(), output: spec.name, shape });
                }
                spec => spec.map(|spec| blank(spec.dtype, &spec.shape)),
            },
        };
        results.extend(tensor.map(|tensor| (output.name(), tensor)));
    }

    (how.lend)(&mut results, &mut |outputs| {
        let call = HostCall { query: &bound.query, inputs: &views, params: &params, outputs };
        SCRATCH.with_borrow_mut(|arena| call.run((arena, how.scratch), how.threads, |args| kernel.run(args)))
    })?;
    Ok(results)
}

fn reference_of(op: &Op) -> Option<Builtin> {
    KERNELS.iter().copied().find(|k| k.ops().contains(&op.id()) && k.descriptor(op.id()).reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_can_be_raised() {
        let slopes = Tensor::zeros(DType::F32, &[2]);
        let alibi = |seq_q| {
            let params = [("seq_q", ParamValue::Int(seq_q)), ("seq_k", ParamValue::Int(seq_q))];
            call("posenc.alibi", &[("slopes", slopes.view())], &params, None)
        };
        assert!(matches!(call("no_such_thing", &[], &[], None), Err(CallRefError::Call(CallError::UnknownOp { .. }))));
        // Negative sizes may be refused when the call is bound, or here.
        assert!(matches!(alibi(-1), Err(CallRefError::ImpossibleOutput { .. } | CallRefError::Call(_))));
        assert!(matches!(alibi(i64::MAX), Err(CallRefError::ImpossibleOutput { .. })));
        let tokenizer =
            [("tokenizer_id", ParamValue::str("t")), ("texts", ParamValue::Int(1)), ("length", ParamValue::Int(1))];
        assert_eq!(
            call("tokenize.encode", &[], &tokenizer, None),
            Err(CallRefError::NoReference { op: "tokenize.encode" })
        );
        let ids = Tensor::from_ints(DType::I64, &[1], &[7]);
        let table = Tensor::zeros(DType::F32, &[2, 2]);
        let outside = call("embedding.lookup", &[("indices", ids.view()), ("weight", table.view())], &[], None);
        assert!(matches!(outside, Err(CallRefError::Kernel(KernelError::BadData { .. }))));
    }

    #[test]
    fn the_callers_cache_is_left_alone() {
        let new = Tensor::from_f64(DType::F32, &[1, 1, 1], &[5.0]);
        let cache = Tensor::zeros(DType::F32, &[1, 1, 1, 1]);
        let slots = Tensor::from_ints(DType::I32, &[1], &[0]);
        let inputs = [
            ("key", new.view()),
            ("value", new.view()),
            ("key_cache", cache.view()),
            ("value_cache", cache.view()),
            ("slot_mapping", slots.view()),
        ];
        let results = call("kv_cache.append", &inputs, &[], None).unwrap();
        assert_eq!(results[0].0, "key_cache");
        assert_eq!((results[0].1.to_f64(), cache.to_f64()), (vec![5.0], vec![0.0]));
    }
}
