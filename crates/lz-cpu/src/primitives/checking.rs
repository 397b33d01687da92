//! A primitive with every instruction set of this CPU, beside memory that must not be touched.

use lz_abi::{Arena, Args, DType, KernelError, Param, Tensor, TensorRef, TensorView, numeric};

use super::{InstructionSet, Meta, Primitive};
use crate::guarded::{Guarded, Side, lend};

/// Runs a primitive with every instruction set: on one thread with memory that ends where its tensors end, and on three with
/// memory that begins where they begin. It has as much scratch memory as it says, full of NaNs. `output` are the old contents.
pub fn each(
    primitive: Primitive,
    inputs: &[Option<TensorView<'_>>],
    params: &[Param],
    output: &Tensor,
) -> Vec<(InstructionSet, Result<Tensor, KernelError>)> {
    let mut all = Vec::new();
    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_here()) {
        for (count, side) in [(1, Side::Behind), (3, Side::Before)] {
            let copies: Vec<_> = inputs.iter().flatten().map(|view| Guarded::copy(view, side)).collect();
            let mut copy = copies.iter();
            let views: Vec<Option<TensorView<'_>>> = inputs
                .iter()
                .map(|view| view.as_ref().map(|view| copy.next().expect("one for each").view(view)))
                .collect();
            let refs: Vec<TensorRef<'_>> =
                views.iter().map(|view| view.as_ref().map_or(TensorRef::ABSENT, TensorView::as_ref)).collect();
            let metas: Vec<_> =
                inputs.iter().map(|v| v.as_ref().map(|v| Meta { dtype: v.dtype(), shape: v.shape() })).collect();
            let threads = crate::threads(count);
            let mut arena = Arena::try_new(primitive.scratch(&metas, params, threads.count())).expect("memory");
            arena.bytes_mut().fill(0xff);
            let mut results = [("output", output.clone())];
            let done = lend(&mut results, side, |outputs| {
                let mut outputs: Vec<_> = outputs.iter_mut().map(|view| view.as_mut()).collect();
                let mut workspace = arena.lend();
                let mut args = Args::new(&refs, &mut outputs, params, &[], &mut workspace).with_threads(threads);
                primitive.run_on(set, &mut args)
            });
            let [(_, result)] = results;
            all.push((set, done.map(|()| result)));
        }
    }
    all
}

/// The results of a call that must not fail.
pub fn results(
    primitive: Primitive,
    inputs: &[Option<TensorView<'_>>],
    params: &[Param],
    output: &Tensor,
) -> impl Iterator<Item = (InstructionSet, Tensor)> + use<> {
    each(primitive, inputs, params, output).into_iter().map(|(set, result)| (set, result.expect("no error")))
}

/// Asserts that results are those of a float64 reference, but for `off` of their size and `beside` it. What a dtype rounds is added.
pub fn agree(what: &str, got: &Tensor, wanted: &[f64], off: f64, beside: f64) {
    let (relative, least) = match got.dtype() {
        _ if off == 0.0 && beside == 0.0 => (0.0, 0.0),
        DType::F16 => (off + 5e-4, beside + 6e-8),
        DType::Bf16 => (off + 4e-3, beside),
        DType::F64 if off > 0.0 => (1e-13, beside.clamp(1e-300, 1e-13)),
        _ => (off, beside),
    };
    assert_eq!(got.to_f64().len(), wanted.len(), "{what}");
    let dtype = got.dtype();
    for (i, (got, &wanted)) in got.to_f64().into_iter().zip(wanted).enumerate() {
        // What the dtype cannot hold is infinite.
        let same = got == wanted || got == numeric::rounded(dtype, wanted) || got.is_nan() && wanted.is_nan();
        assert!(
            same || (got - wanted).abs() <= relative * wanted.abs() + least,
            "{what}[{i}] is {got:e}, not {wanted:e}"
        );
    }
}

/// Numbers from -`size` to `size`.
pub fn drawn(dtype: DType, shape: &[i64], size: f64, seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let numbers = (0..shape.iter().product::<i64>()).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 / f64::from(1u32 << 23) - 1.0) * size
    });
    Tensor::from_f64(dtype, shape, &numbers.collect::<Vec<_>>())
}

/// The element of a tensor that is broadcast, at an index of the result.
pub fn at(view: &TensorView<'_>, index: &[i64]) -> f64 {
    let skipped = index.len() - view.shape().len();
    let index: Vec<i64> =
        index[skipped..].iter().zip(view.shape()).map(|(&i, &n)| if n == 1 { 0 } else { i }).collect();
    view.get(&index)
}

/// All results must fail, with a message that has this in it.
pub fn fails(primitive: Primitive, inputs: &[Option<TensorView<'_>>], params: &[Param], output: &Tensor, why: &str) {
    for (set, result) in each(primitive, inputs, params, output) {
        let error = result.expect_err("an error").to_string();
        assert!(error.contains(why), "{set:?}: {error}");
    }
}
