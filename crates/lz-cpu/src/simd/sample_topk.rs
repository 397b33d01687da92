//! Top-k sampling without sorting the vocabulary; with k = 1 the largest logit.

use std::cell::Cell;
use std::marker::PhantomData;

use lz_model::{DType, DTypeSet, InputRule, KernelArgs, KernelDescriptor, KernelError, Op};

use super::half_floats::Narrow;
use super::sample_row::{Draw, Kept, Scratch};
use super::{FLOATS, Isa, check, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;
use crate::reference::sampling::Uniforms;

/// The kernel, for an instruction set.
pub struct TopK<I>(PhantomData<I>);

/// Above torch's kernels (34 to 45), which sort, or collect what they look at.
pub(super) const PRIORITY: i32 = 55;

thread_local! {
    /// Memory of this thread's rows.
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl<I: Isa> NativeKernel for TopK<I> {
    const OPS: &'static [&'static str] = &["sampling.topk"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        described::<I>(op, "sample_topk")
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let kept = Kept::Most(args.dim("k").max(1) as usize);
        sample::<I>(args, kept)
    }
}

/// What both kernels declare.
pub(super) fn described<I: Isa>(op: &'static Op, name: &str) -> KernelDescriptor {
    let mut inputs = floats(&["logits"]);
    let numbers = DTypeSet::of(&[DType::F32, DType::F64]);
    inputs.insert("uniform".into(), InputRule { dtypes: Some(numbers), ..InputRule::default() });
    KernelDescriptor { dtypes: FLOATS, inputs, requires_last_dim_stride1: true, ..describe::<I>(op, name, PRIORITY) }
}

/// Draws one token of each row.
pub(super) fn sample<I: Isa>(args: &mut KernelArgs<'_, '_>, kept: Kept) -> Result<(), KernelError> {
    let logits = args.input("logits").ok_or_else(|| KernelError::Failed("no logits".into()))?;
    match I::FUSED {
        true => with_float!(logits.dtype(), T => rows::<I, T, true>(args, kept)),
        false => with_float!(logits.dtype(), T => rows::<I, T, false>(args, kept)),
    }
}

fn rows<I: Isa, T: Narrow, const FUSED: bool>(args: &mut KernelArgs<'_, '_>, kept: Kept) -> Result<(), KernelError> {
    check::<I>()?;
    let logits = args.input("logits").ok_or_else(|| KernelError::Failed("no logits".into()))?;
    let (uniforms, rows, threads) = (Uniforms::of(args)?, logits.rows::<T>()?, args.args.threads());
    let output = args.args.outputs[0].as_slice::<i64>()?;
    let per_part = rows_per_thread(output.len(), logits.len() * size_of::<T>(), threads.count());
    threads.each_chunk(output, per_part, |part, output| {
        let mut scratch = SCRATCH.take();
        let mut wide = std::mem::take(&mut scratch.wide);
        wide.resize(if size_of::<T>() == size_of::<f32>() { 0 } else { rows.len() }, 0.0);
        for (i, output) in output.iter_mut().enumerate() {
            let row = part * per_part + i;
            let uniform = uniforms.get(row as i64);
            // A row is widened once, so that draws are compiled for float32 alone.
            let row = T::wide(rows.get(row), &mut wide);
            let draw = Draw::<f32, FUSED> { row, kept, uniform, scratch: &mut scratch };
            *output = I::vectorize(draw).flatten().map_or(-1, |id| id as i64);
        }
        scratch.wide = wide;
        SCRATCH.set(scratch);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    fn kernels() -> Agreement {
        Agreement::of("sampling.topk", "lz_cpu.sample_topk").exactly()
    }

    proptest! {
        #[test]
        fn it_draws_what_the_reference_draws(
            (rows, vocab, k) in (0i64..4, prop_oneof![1i64..200, 500i64..3000], prop_oneof![1i64..70, 100i64..4000]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (size, gap, seed) in (prop_oneof![Just(1.0), Just(20.0), Just(1e3)], 0i64..3, any::<u64>()),
            numbers in prop_oneof![Just(DType::F32), Just(DType::F64)],
        ) {
            let logits: Vec<f64> = drawn(DType::F32, &[rows * (vocab + gap)], seed).to_f64().iter().map(|x| x * size).collect();
            let logits = Tensor::from_f64(dtype, &[rows, vocab + gap], &logits);
            let uniform: Vec<f64> = drawn(DType::F32, &[rows], seed ^ 5).to_f64().iter().map(|x| x.abs().min(0.99)).collect();
            let uniform = Tensor::from_f64(numbers, &[rows], &uniform);
            let inputs = [("logits", strided(&logits, &[rows, vocab])), ("uniform", uniform.view())];
            kernels().check(&inputs, &[("k", ParamValue::Int(k))], None);
        }
    }

    #[test]
    fn the_seed_decides_as_for_the_reference() {
        let logits = drawn(DType::F32, &[40, 300], 3);
        for seed in [0, 7, -1] {
            let params = [("k", ParamValue::Int(50)), ("seed", ParamValue::Int(seed))];
            kernels().check(&[("logits", logits.view())], &params, None);
        }
    }

    #[test]
    fn rows_that_are_no_distribution_give_minus_one() {
        let none = f64::NEG_INFINITY;
        let rows = [[f64::NAN, 1.0, 2.0], [none; 3], [f64::INFINITY, 0.0, 1.0], [none, 0.0, none], [-0.0, 0.0, -0.0]];
        let logits = Tensor::from_f64(DType::F32, &[5, 3], &rows.concat());
        let uniform = Tensor::from_f64(DType::F64, &[5], &[0.9; 5]);
        for k in [1, 2, 3, 9] {
            let inputs = [("logits", logits.view()), ("uniform", uniform.view())];
            kernels().check(&inputs, &[("k", ParamValue::Int(k))], None);
        }
    }

    #[test]
    fn a_number_outside_its_range_is_the_callers_mistake() {
        let logits = Tensor::from_f64(DType::F32, &[2, 2], &[0.0; 4]);
        let uniform = Tensor::from_f64(DType::F64, &[2], &[0.5, 1.0]);
        let inputs = [("logits", logits.view()), ("uniform", uniform.view())];
        assert!(kernels().fails(&inputs, &[("k", ParamValue::Int(2))], None).starts_with("uniform[1] is 1"));
    }
}
