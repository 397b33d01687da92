//! Linear layers with packed weights: out = act(input · weight^T + bias).
//!
//! A packed weight is a list of *panels*. A panel holds [`WIDTH`] output features, group after group of input features, so
//! that a product reads it from front to back. A *tile* is what one panel makes of a few rows of the input; its sums stay
//! in registers ([`engine::Engine`]).
//!
//! | | |
//! |---|---|
//! | [`product`] | which tiles there are, in which order, on which thread |
//! | [`engine`] | what computes a tile, how the input must lie for it, and what is prefetched |
//! | [`widened`] | tiles of float32, float16 and bfloat16, for any instruction set |
//! | [`dot_bf16`], [`amx`] | tiles of bfloat16, by the instructions for it |
//! | [`dequantized`] | tiles of integers with scales, for any instruction set |
//! | [`expanded`] | the same by instructions for bfloat16 |
//! | [`integers`] | the kernels for weights of integers |
//! | [`epilogue`] | bias, activation and rounding of a tile |
//!
//! The sum of an output is made in one order, whatever the number of rows and threads: [`engine::DEPTH`] products one after
//! the other, and the sums of these blocks one after the other. So a row's result depends on no other row.

use std::marker::PhantomData;

use lz_model::{DType, DTypeSet, InputRule, KernelArgs, KernelDescriptor, KernelError, Op};

use super::{FLOATS, Isa, describe, floats, with_float};
use crate::kernel::NativeKernel;
use engine::Engine;

pub mod amx;
pub mod dequantized;
pub mod dot_bf16;
pub mod engine;
pub mod epilogue;
pub mod expanded;
pub mod integers;
pub mod product;
pub mod widened;

/// Output features of a panel.
pub const WIDTH: usize = lz_model::ops::mlp::PACKED_ROWS as usize;

/// The kernel that computes in float32, for an instruction set.
pub struct LinearPacked<I>(PhantomData<I>);

impl<I: widened::Tile> NativeKernel for LinearPacked<I> {
    const OPS: &'static [&'static str] = &["mlp.linear.packed"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        KernelDescriptor {
            dtypes: FLOATS,
            inputs: floats(&["input", "weight", "bias"]),
            conditions: vec![
                "interleave == 1 and input.dtype != 'bfloat16' or interleave == 2 and input.dtype == 'bfloat16'".into(),
            ],
            ..described::<I>(op, "linear_packed", 60)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let dtype = args.args.input(product::INPUT).map_or(DType::F64, |input| input.dtype());
        with_float!(dtype, T => product::run::<widened::Widened<I, T>>(args))
    }
}

/// The kernel for bfloat16 alone, by instructions that multiply it.
pub struct LinearPackedBf16<E>(PhantomData<E>);

impl<E: Engine<Number = half::bf16>> NativeKernel for LinearPackedBf16<E> {
    const OPS: &'static [&'static str] = &["mlp.linear.packed"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let only = DTypeSet::of(&[DType::Bf16]);
        let rule = InputRule { dtypes: Some(only), ..InputRule::default() };
        KernelDescriptor {
            dtypes: only,
            inputs: ["input", "weight", "bias"].map(|name| (name.to_owned(), rule.clone())).into(),
            conditions: vec!["interleave == 2".into()],
            ..described::<E::Isa>(op, "linear_packed", 60)
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        product::run::<E>(args)
    }
}

/// What the kernels of this folder have in common. `priority` is above torch's kernel (50), which unpacks the weight first.
fn described<I: Isa>(op: &'static Op, name: &str, priority: i32) -> KernelDescriptor {
    KernelDescriptor {
        requires_last_dim_stride1: true,
        workspace: Some(product::WORKSPACE.into()),
        ..describe::<I>(op, name, priority)
    }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    const ACTIVATIONS: [&str; 5] = ["none", "relu", "gelu", "gelu_tanh", "silu"];

    /// Results are sums of so many products of numbers up to 1, added one after the other.
    fn agreement(ins: i64) -> Agreement {
        Agreement::of("mlp.linear.packed", "lz_cpu.linear_packed").within(3e-8 * ins.max(100) as f64)
    }

    /// A weight in blocks, from its elements by output and input feature. What pads it is NaN where nobody may look at it.
    fn packed(dtype: DType, outs: i64, ins: i64, at: impl Fn(i64, i64) -> f64) -> (Tensor, i64) {
        let interleave = if dtype == DType::Bf16 { 2 } else { 1 };
        let groups = if interleave == 1 { ins } else { (ins + 31) / 32 * 16 };
        let shape = [(outs + 31) / 32, groups, 32, interleave];
        let number = |i: i64| {
            let (second, i) = (i % interleave, i / interleave);
            let (n, i) = (i % 32, i / 32);
            let (k, n) = (i % groups * interleave + second, i / groups * 32 + n);
            if k >= ins {
                0.0
            } else if n >= outs {
                f64::NAN
            } else {
                at(n, k)
            }
        };
        let numbers: Vec<f64> = (0..shape.iter().product()).map(number).collect();
        (Tensor::from_f64(dtype, &shape, &numbers), interleave)
    }

    fn check(dtype: DType, (rows, ins, outs): (i64, i64, i64), bias: bool, gap: i64, activation: &str, seed: u64) {
        let x = drawn(dtype, &[rows, ins + gap], seed);
        let (w, b) = (drawn(dtype, &[outs, ins], seed + 1).to_f64(), drawn(dtype, &[outs], seed + 2));
        let (w, interleave) = packed(dtype, outs, ins, |n, k| w[(n * ins + k) as usize]);
        let mut inputs = vec![("input", strided(&x, &[rows, ins])), ("weight", w.view())];
        if bias {
            inputs.push(("bias", b.view()));
        }
        let params = [
            ("out_features", ParamValue::Int(outs)),
            ("interleave", ParamValue::Int(interleave)),
            ("activation", ParamValue::str(activation)),
        ];
        agreement(ins).check(&inputs, &params, None);
    }

    fn floats() -> impl Strategy<Value = DType> {
        prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            sizes in (
                0i64..40,
                prop_oneof![0i64..70, 500i64..530, 1020i64..1060],
                prop_oneof![0i64..10, 30i64..34, 60i64..70, 120i64..134, 150i64..166],
            ),
            dtype in floats(),
            (bias, gap, activation, seed) in (any::<bool>(), 0i64..3, 0usize..5, any::<u64>()),
        ) {
            check(dtype, sizes, bias, gap, ACTIVATIONS[activation], seed);
        }
    }

    #[test]
    fn every_height_of_a_tile_is_right() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for rows in 1..=33 {
                check(dtype, (rows, 37, 33), true, rows % 2, "none", rows as u64);
            }
        }
    }

    #[test]
    fn panels_that_are_computed_side_by_side_are_right_and_those_that_are_left_over() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for rows in [1, 2, 3, 6, 7] {
                for panels in [1, 2, 3, 4, 5, 9] {
                    check(dtype, (rows, 530, panels * 32 - 1), true, 0, "none", (rows * panels) as u64);
                }
            }
        }
    }

    #[test]
    fn panels_in_groups_and_rows_in_chunks_are_right() {
        // More than 480 blocks of rows, more than one chunk of 264, more than one group of 16 panels.
        check(DType::F32, (241, 600, 545), true, 1, "none", 3);
        for rows in [264, 265, 300, 529] {
            check(DType::F32, (rows, 40, 33), true, 0, "relu", rows as u64);
            check(DType::Bf16, (rows, 40, 33), false, 0, "none", rows as u64);
        }
    }

    #[test]
    fn rows_in_several_chunks_and_panels_on_several_threads_are_right() {
        check(DType::F32, (101, 5000, 70), true, 0, "relu", 7);
        check(DType::Bf16, (101, 5000, 70), true, 3, "none", 8);
    }

    #[test]
    fn the_ends_are_the_references() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let x = Tensor::from_f64(DType::F32, &[1, 3], &[1.0, 0.0, -1.0]);
        let numbers = [1.0, inf, 2.0, nan, 0.0, 0.0, 1e-44, 0.0, 1e-45, 3e38, 1.0, 1e38, -inf, 1.0, 1.0];
        let (w, _) = packed(DType::F32, 5, 3, |n, k| numbers[(3 * n + k) as usize]);
        for activation in ACTIVATIONS {
            let params = [("out_features", ParamValue::Int(5)), ("activation", ParamValue::str(activation))];
            agreement(3).check(&[("input", x.view()), ("weight", w.view())], &params, None);
        }
    }
}
