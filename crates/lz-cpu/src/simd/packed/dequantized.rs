//! Tiles of integer weights, which become float32 in registers, for any instruction set.
//!
//! Integers are multiplied as they are. The sum of a group of input features is multiplied with the scale of the group, and
//! joins the sums of the groups before: so a scale costs one multiplication for each output of a group.

use std::marker::PhantomData;

use lz_model::DType;

use super::super::Work;
use super::super::half_floats::Narrow;
use super::super::vector::{LANES, Sixteen};
use super::WIDTH;
use super::engine::{AHEAD, ArrangedAs, DEPTH, Engine, Packed, Panels, STRIDE, prefetch};
use super::widened::Tile;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Panels side by side, by the rows of a tile: at most 24 registers of sums where they hold whole panels, at most 8 where
/// they hold halves.
const WHOLE: [usize; 8] = [1, 4, 4, 2, 2, 2, 2, 1];
const HALVES: [usize; 3] = [1, 4, 2];

/// A dtype of integer weights.
#[allow(unsafe_code, clippy::missing_safety_doc)] // those of `Sixteen`
pub trait Dequantize: Packed {
    /// The name of its kernels.
    const KERNEL: &'static str;
    /// What tensors of it are.
    const DTYPE: DType;
    /// Numbers side by side.
    const INTERLEAVE: usize;
    /// Input features of a step, which are side by side.
    const STEP: usize = Self::INTERLEAVE * Self::FEATURES;

    /// The integers of sixteen output features for one of the input features of a step.
    ///
    /// # Safety
    /// As for [`Sixteen`], and a step of sixteen output features is there.
    unsafe fn integers<V: Sixteen>(from: *const Self, feature: usize) -> V;
}

impl Dequantize for i8 {
    const KERNEL: &'static str = "linear_int8";
    const DTYPE: DType = DType::I8;
    const INTERLEAVE: usize = 1;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn integers<V: Sixteen>(from: *const i8, _: usize) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_i8(&*from.cast::<[i8; LANES]>()) }
    }
}

impl Dequantize for u8 {
    const KERNEL: &'static str = "linear_int4";
    const DTYPE: DType = DType::U8;
    const INTERLEAVE: usize = 4;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn integers<V: Sixteen>(from: *const u8, feature: usize) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_i4(&*from.cast::<[[u8; 4]; LANES]>(), feature) }
    }
}

/// The engine, for an instruction set, a dtype of weights and one of the input.
pub struct Dequantized<I, W, T>(PhantomData<(I, W, T)>);

impl<I: Tile, W: Dequantize, T: Narrow + ArrangedAs<f32>> Engine for Dequantized<I, W, T> {
    type Isa = I;
    type Number = T;
    type Weight = W;
    type Row = f32;
    type Scratch = ();
    const INTERLEAVE: usize = W::INTERLEAVE;
    const ROWS: usize = I::ROWS;

    #[inline(always)]
    fn abreast(count: usize) -> usize {
        let abreast: &[usize] = if I::WHOLE { &WHOLE } else { &HALVES };
        abreast.get(count).copied().unwrap_or(1)
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn add_block(
        _: &mut (),
        rows: &[f32],
        count: usize,
        weight: Panels<'_, W>,
        sums: &mut [[f32; WIDTH]],
        first: bool,
    ) {
        let (last, scales) = (weight.count.wrapping_sub(1), weight.scales);
        let (groups, steps) = (weight.features.div_ceil(scales.group), weight.features.div_ceil(W::STEP));
        assert!(rows.len() >= count * STRIDE && sums.len() >= count * weight.count && weight.features <= DEPTH);
        assert!(weight.count > 0 && weight.weight.len() >= last * weight.apart + steps * WIDTH * W::INTERLEAVE);
        assert!(scales.numbers.len() >= last * scales.apart + groups * WIDTH && scales.group.is_multiple_of(W::STEP));
        let block = Block::<I, W> { rows, count, weight, sums, first, isa: PhantomData };
        I::vectorize(block).expect("the caller has made sure of the instructions");
    }
}

/// A block of a tile, whose numbers are checked. It is a function of its own, so that it is compiled once for all dtypes of the input.
struct Block<'a, I, W> {
    rows: &'a [f32],
    count: usize,
    weight: Panels<'a, W>,
    sums: &'a mut [[f32; WIDTH]],
    first: bool,
    isa: PhantomData<I>,
}

impl<I: Tile, W: Dequantize> Work for Block<'_, I, W> {
    type Output = ();

    #[allow(unsafe_code)]
    #[inline(always)]
    fn run(self) {
        let Block { rows, count, weight, sums, first, .. } = self;
        macro_rules! among {
            ($c:literal: $($r:literal $p:literal)+) => {
                match (count, weight.count) {
                    // SAFETY: `add_block` has checked the sizes, and `vectorize` the instructions.
                    $(($r, $p) => unsafe { block::<I::Sixteen, W, $r, $c, $p>(rows, weight, sums, first) },)+
                    (count, panels) => unreachable!("a tile of {count} rows and {panels} panels"),
                }
            };
        }
        if I::WHOLE {
            among!(2: 1 1 1 4 2 1 2 4 3 1 3 2 4 1 4 2 5 1 5 2 6 1 6 2 7 1 8 1 9 1 10 1 11 1 12 1);
        } else {
            among!(1: 1 1 1 4 2 1 2 2 3 1 4 1 5 1 6 1);
        }
    }
}

/// Adds a block to the sums of `R` rows and `P` panels, `C` sixteens of output features at a time.
///
/// # Safety
/// As for [`Sixteen`]. `rows` are `R` rows that are [`STRIDE`] apart, `weight` are blocks of `P` panels with their scales, each
/// of at most [`DEPTH`] input features, and `sums` has `R · P` rows.
#[allow(unsafe_code)]
#[allow(clippy::needless_range_loop)] // an index names a row or a register of it, in several arrays at once
#[inline(always)]
unsafe fn block<V: Sixteen, W: Dequantize, const R: usize, const C: usize, const P: usize>(
    rows: &[f32],
    weight: Panels<'_, W>,
    sums: &mut [[f32; WIDTH]],
    first: bool,
) {
    let scales = weight.scales;
    for part in 0..WIDTH / (C * LANES) {
        let mut row = rows.as_ptr();
        let mut from = weight.weight.as_ptr().wrapping_add(part * C * LANES * W::INTERLEAVE);
        for (group, begin) in (0..weight.features).step_by(scales.group).enumerate() {
            let steps = scales.group.min(weight.features - begin).div_ceil(W::STEP);
            // SAFETY: every number is inside the row, the block, the scales or the sums, whose sizes the caller vouches for.
            unsafe {
                let mut tile = [[[V::splat(0.0); C]; R]; P];
                for _ in 0..steps {
                    for p in 0..P {
                        let from = from.wrapping_add(p * weight.apart);
                        if part == 0 {
                            for line in (0..WIDTH * W::INTERLEAVE * size_of::<W>()).step_by(LINE) {
                                prefetch(from, AHEAD + line);
                            }
                        }
                        for feature in 0..W::STEP {
                            let mut integers = [V::splat(0.0); C];
                            for c in 0..C {
                                integers[c] = W::integers::<V>(from.wrapping_add(c * LANES * W::INTERLEAVE), feature);
                            }
                            for r in 0..R {
                                let x = V::splat(*row.wrapping_add(r * STRIDE + feature));
                                for c in 0..C {
                                    tile[p][r][c] = integers[c].times(x, tile[p][r][c]);
                                }
                            }
                        }
                    }
                    from = from.wrapping_add(WIDTH * W::INTERLEAVE);
                    row = row.wrapping_add(W::STEP);
                }
                for p in 0..P {
                    for c in 0..C {
                        let columns = (part * C + c) * LANES;
                        let scale = &scales.numbers[p * scales.apart + group * WIDTH + columns..][..LANES];
                        let scale = V::load(&scale.as_chunks::<LANES>().0[0]);
                        for r in 0..R {
                            let sums = &mut sums[p * R + r][columns..][..LANES].as_chunks_mut::<LANES>().0[0];
                            let before = if first && group == 0 { V::splat(0.0) } else { V::load(sums) };
                            tile[p][r][c].times(scale, before).store(sums);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::simd::checking::{Agreement, drawn, strided};
    use lz_model::{DType, ParamValue, Tensor};
    use proptest::prelude::*;

    /// A kind of weight: its kernels, its dtype, its interleave, its largest integer.
    #[derive(Clone, Copy, Debug)]
    struct Kind(&'static str, DType, i64, f64);

    const KINDS: [Kind; 2] =
        [Kind("lz_cpu.linear_int8", DType::I8, 1, 127.0), Kind("lz_cpu.linear_int4", DType::U8, 4, 7.0)];
    const GROUPS: [i64; 5] = [0, 32, 64, 128, 256];
    const ACTIVATIONS: [&str; 5] = ["none", "relu", "gelu", "gelu_tanh", "silu"];

    /// A weight in blocks, from its integers by output and input feature. What pads it is not zero.
    fn packed(kind: Kind, outs: i64, ins: i64, at: impl Fn(i64, i64) -> i64) -> Tensor {
        let Kind(_, dtype, interleave, _) = kind;
        let features = if dtype == DType::U8 { 2 * interleave } else { interleave };
        let groups = if features == 1 { ins } else { (ins + 16 * features - 1) / (16 * features) * 16 };
        let shape = [(outs + 31) / 32, groups, 32, interleave];
        let integer = |n: i64, k: i64| if n < outs && k < ins { at(n, k) } else { 5 };
        let number = |i: i64| {
            let (side, i) = (i % interleave, i / interleave);
            let (n, i) = (i % 32, i / 32);
            let (k, n) = (i % groups * interleave + side, i / groups * 32 + n);
            if dtype == DType::U8 {
                (integer(n, 2 * k) & 15 | (integer(n, 2 * k + 1) & 15) << 4) as f64
            } else {
                integer(n, k) as f64
            }
        };
        Tensor::from_f64(dtype, &shape, &(0..shape.iter().product()).map(number).collect::<Vec<_>>())
    }

    /// Calls all kernels of a kind and the reference. Weights are from -1 to 1.
    fn check(
        kind: Kind,
        dtype: DType,
        (rows, ins, outs): (i64, i64, i64),
        group: i64,
        bias: bool,
        activation: &str,
        seed: u64,
    ) {
        let Kind(kernel, _, interleave, most) = kind;
        let gap = seed as i64 % 3;
        let (x, b) = (drawn(dtype, &[rows, ins + gap], seed), drawn(dtype, &[outs], seed + 2));
        let integers = drawn(DType::F64, &[outs, ins], seed + 1).to_f64();
        let weight = packed(kind, outs, ins, |n, k| (integers[(n * ins + k) as usize] * most).round() as i64);
        let shape = [(outs + 31) / 32, if group == 0 { 1 } else { (ins + group - 1) / group }, 32];
        let scales = drawn(DType::F32, &shape, seed + 3).to_f64();
        let scales: Vec<f64> = scales.iter().map(|scale| scale / most).collect();
        let scales = Tensor::from_f64(DType::F32, &shape, &scales);
        let mut inputs =
            vec![("input", strided(&x, &[rows, ins])), ("weight", weight.view()), ("scales", scales.view())];
        if bias {
            inputs.push(("bias", b.view()));
        }
        let params = [
            ("out_features", ParamValue::Int(outs)),
            ("interleave", ParamValue::Int(interleave)),
            ("group_size", ParamValue::Int(group)),
            ("activation", ParamValue::str(activation)),
        ];
        // Results are sums of so many products of numbers up to 1, added one after the other.
        let agreement = Agreement::of("mlp.linear.quantized", kernel).within(3e-8 * ins.max(100) as f64);
        agreement.check(&inputs, &params, None);
    }

    fn floats() -> impl Strategy<Value = DType> {
        prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            sizes in (
                0i64..40,
                prop_oneof![0i64..70, 120i64..140, 500i64..530, 1020i64..1060],
                prop_oneof![0i64..10, 30i64..34, 60i64..70, 120i64..134, 150i64..166],
            ),
            (kind, group, dtype) in (0..KINDS.len(), 0..GROUPS.len(), floats()),
            (bias, activation, seed) in (any::<bool>(), 0usize..5, 0..u64::MAX / 2),
        ) {
            check(KINDS[kind], dtype, sizes, GROUPS[group], bias, ACTIVATIONS[activation], seed);
        }
    }

    #[test]
    fn every_height_of_a_tile_and_every_group_is_right() {
        for kind in KINDS {
            for rows in 1..=33 {
                let group = GROUPS[rows as usize % 5];
                check(kind, DType::F32, (rows, 37 + 8 * rows, 33), group, true, "none", rows as u64);
            }
        }
    }

    #[test]
    fn panels_that_are_computed_side_by_side_are_right_and_those_that_are_left_over() {
        for kind in KINDS {
            for rows in [1, 2, 3, 6, 7] {
                for panels in [1, 2, 3, 4, 5, 9] {
                    let sizes = (rows, 530, panels * 32 - 1);
                    check(kind, DType::Bf16, sizes, GROUPS[panels as usize % 5], true, "none", (rows * panels) as u64);
                }
            }
        }
    }

    #[test]
    fn panels_in_groups_rows_in_chunks_and_parts_of_several_threads_are_right() {
        for kind in KINDS {
            check(kind, DType::F32, (241, 600, 545), 64, true, "none", 3);
            check(kind, DType::F32, (265, 40, 33), 0, true, "relu", 4);
            check(kind, DType::F32, (3, 5000, 270), 128, true, "relu", 5);
        }
    }

    #[test]
    fn the_ends_are_the_references() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        for kind in KINDS {
            let Kind(kernel, _, interleave, most) = kind;
            let weight = packed(kind, 3, 4, |n, k| [most as i64, -most as i64 - 1, 0, 1][(n + k) as usize % 4]);
            let mut scales = vec![nan; 32];
            scales[..3].copy_from_slice(&[1.0, 0.0, -2.5]);
            let scales = Tensor::from_f64(DType::F32, &[1, 1, 32], &scales);
            for special in [nan, inf, -inf, 1e-45, 0.0] {
                let x = Tensor::from_f64(DType::F32, &[2, 4], &[1.0, 2.0, 3.0, -1.0, 1.0, special, 0.5, 1.0]);
                let params = [("out_features", ParamValue::Int(3)), ("interleave", ParamValue::Int(interleave))];
                let inputs = [("input", x.view()), ("weight", weight.view()), ("scales", scales.view())];
                Agreement::of("mlp.linear.quantized", kernel).check(&inputs, &params, None);
            }
        }
    }
}
