//! Nucleus sampling without sorting the vocabulary.

use std::marker::PhantomData;

use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

use super::Isa;
use super::sample_row::Kept;
use super::sample_topk::{described, sample};
use crate::kernel::NativeKernel;
use crate::reference::arguments::Arguments;

/// The kernel, for an instruction set.
pub struct TopP<I>(PhantomData<I>);

impl<I: Isa> NativeKernel for TopP<I> {
    const OPS: &'static [&'static str] = &["sampling.topp"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        described::<I>(op, "sample_topp")
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let kept = Kept::Reaching(args.float("p"));
        sample::<I>(args, kept)
    }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor, TensorView};
    use proptest::prelude::*;

    fn check(logits: TensorView<'_>, uniform: &Tensor, p: f64) {
        let inputs = [("logits", logits), ("uniform", uniform.view())];
        let kernels = Agreement::of("sampling.topp", "lz_cpu.sample_topp").exactly();
        kernels.check(&inputs, &[("p", ParamValue::Float(p))], None);
    }

    proptest! {
        #[test]
        fn it_draws_what_the_reference_draws(
            (rows, vocab) in (0i64..4, prop_oneof![1i64..200, 500i64..3000, 40_000i64..41_000]),
            p in prop_oneof![Just(1.0), Just(0.999), Just(0.9017), Just(0.5031), Just(1.03e-3)],
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (size, gap, seed) in (prop_oneof![Just(0.0), Just(1.0), Just(20.0), Just(1e3)], 0i64..3, any::<u64>()),
        ) {
            let logits: Vec<f64> = drawn(DType::F32, &[rows * (vocab + gap)], seed).to_f64().iter().map(|x| x * size).collect();
            let logits = Tensor::from_f64(dtype, &[rows, vocab + gap], &logits);
            let uniform: Vec<f64> = drawn(DType::F32, &[rows], seed ^ 5).to_f64().iter().map(|x| x.abs().min(0.99)).collect();
            check(strided(&logits, &[rows, vocab]), &Tensor::from_f64(DType::F64, &[rows], &uniform), p);
        }
    }

    #[test]
    fn logits_left_out_are_never_drawn() {
        let mut logits = drawn(DType::F32, &[40_000], 9).to_f64();
        logits.iter_mut().enumerate().filter(|(i, _)| i % 5 != 2).for_each(|(_, x)| *x = f64::NEG_INFINITY);
        let logits = Tensor::from_f64(DType::F32, &[1, 40_000], &logits);
        for (u, p) in [(0.0, 0.9), (0.37, 0.9), (0.999_999, 1.0), (1.0 - f64::EPSILON / 2.0, 1.0)] {
            check(logits.view(), &Tensor::from_f64(DType::F64, &[1], &[u]), p);
        }
    }

    #[test]
    fn many_logits_in_one_bin_are_distinguished() {
        // One logit far below makes bins wide; nearly all others are in the first.
        let mut logits: Vec<f64> = drawn(DType::F32, &[30_000], 2).to_f64().iter().map(|x| x * 0.01).collect();
        logits[77] = -1e4;
        let logits = Tensor::from_f64(DType::F32, &[1, 30_000], &logits);
        for u in [0.001, 0.41, 0.87] {
            check(logits.view(), &Tensor::from_f64(DType::F64, &[1], &[u]), 0.95);
        }
    }

    #[test]
    fn the_last_bin_is_drawn_from_too() {
        // The largest logit has half of the weight, 20,000 logits beyond the last bin the other half.
        let mut logits: Vec<f64> = drawn(DType::F32, &[20_000], 4).to_f64().iter().map(|x| x * 3.0 - 40.0).collect();
        logits[5] = 0.0;
        let logits = Tensor::from_f64(DType::F32, &[1, 20_000], &logits);
        for (u, p) in [(0.3, 1.0), (0.999_999_999_999, 1.0)] {
            check(logits.view(), &Tensor::from_f64(DType::F64, &[1], &[u]), p);
        }
    }

    #[test]
    fn rows_that_are_no_distribution_give_minus_one() {
        let none = f64::NEG_INFINITY;
        let rows = [[f64::NAN, 1.0, 2.0], [none; 3], [f64::INFINITY, 0.0, 1.0], [none, 0.0, none], [-0.0, 0.0, -0.0]];
        let logits = Tensor::from_f64(DType::F32, &[5, 3], &rows.concat());
        for p in [1e-9, 0.5, 1.0] {
            check(logits.view(), &Tensor::from_f64(DType::F64, &[5], &[0.9; 5]), p);
        }
    }
}
