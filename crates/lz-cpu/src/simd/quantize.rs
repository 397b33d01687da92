//! Floats to 8-bit integers and floats, in two passes over memory: one for the scales, one for the values.
//!
//! A value is the nearest to the exact quotient, half to even. The quotient formed in float32 says between which two values it
//! is. Which of them is nearer is the sign of x − middle · scale, which is exact: it is rounded once. Floats of 16 bits are
//! often exactly in the middle, so a slower way for such numbers would be the usual one.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use lz_abi::{Args, Rows, TensorRef, as_unsigned};
use lz_model::{DType, KernelArgs, KernelDescriptor, KernelError, Op, Scalar, numeric};

use super::half_floats::Narrow;
use super::{BLOCK, FLOATS, Isa, Work, check, describe, floats, one_of, rows_per_thread, with_float};
use crate::kernel::NativeKernel;
use crate::reference::arguments::Arguments;

/// The kernel, for an instruction set.
pub struct Quantize<I>(PhantomData<I>);

/// The places of its arguments in the schema, and of its results.
const INPUT: usize = 0;
const SCALE: usize = 1;
const VALUES: usize = 0;
const SCALES: usize = 1;
const ZERO_POINTS: usize = 2;

/// Scales with which quotients and remainders are normal numbers of float32: by others, all is computed in float64.
const PLAIN: std::ops::RangeInclusive<f32> = 1e-20..=1e20;

impl<I: Isa> NativeKernel for Quantize<I> {
    const OPS: &'static [&'static str] = &["quantize"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<I>(op, "quantize", 55);
        let (mut inputs, mut params) = (reference.inputs.clone(), reference.params.clone());
        inputs.extend(floats(&["input"]));
        let text = |name: &str| Scalar::Str(name.to_owned());
        params.extend([
            one_of("dtype", &["int8", "fp8_e4m3", "fp8_e5m2"].map(text)),
            one_of("granularity", &["per_tensor", "per_channel"].map(text)),
            one_of("zero_point", &[Scalar::Bool(false)]),
        ]);
        KernelDescriptor {
            dtypes: FLOATS,
            inputs,
            params,
            requires_last_dim_stride1: true,
            // Above torch's kernels (35 to 50): two passes over memory, where plain torch makes a tensor for each step.
            ..reference
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let whole = args.text("granularity") == "per_tensor";
        let args = &mut args.args;
        let input = args.input(INPUT).ok_or_else(|| KernelError::Failed("no input".into()))?;
        with_float!(input.dtype(), T => run::<I, T>(args, input, whole))
    }
}

fn run<I: Isa, T: Narrow>(args: &mut Args<'_, '_>, input: TensorRef<'_>, whole: bool) -> Result<(), KernelError> {
    check::<I>()?;
    let rows = input.rows::<T>()?;
    let (given, threads) = (args.input(SCALE), args.threads());
    let format = args.outputs[VALUES].dtype();
    args.outputs[ZERO_POINTS].as_slice::<i32>()?.fill(0);
    let per_part = rows_per_thread(rows.count(), rows.count() * rows.len(), threads.count());

    let (values, rest) = args.outputs.split_at_mut(SCALES);
    let scales = rest[0].as_slice::<f32>()?;
    match given {
        Some(given) => {
            for (row, scale) in scales.iter_mut().enumerate() {
                *scale = match given.shape() {
                    [1] => given.get(&[0]),
                    [_] => given.get(&[row as i64]),
                    _ => given.get(&[row as i64, 0]),
                } as f32;
            }
        }
        None if whole => {
            // Magnitudes are in the order of their bits.
            let largest = AtomicU32::new(0);
            threads.each(rows.count().div_ceil(per_part.max(1)), |part| {
                let rows_of_part = part * per_part..rows.count().min((part + 1) * per_part);
                let found = I::vectorize(Largest { rows, of: rows_of_part }).unwrap_or_default();
                largest.fetch_max(found.to_bits(), Ordering::Relaxed);
            });
            scales.fill(scale_of(format, f32::from_bits(largest.into_inner())));
        }
        None => threads.each_chunk(scales, per_part, |part, scales| {
            for (i, scale) in scales.iter_mut().enumerate() {
                let row = part * per_part + i;
                let found = if rows.is_empty() { None } else { I::vectorize(Largest { rows, of: row..row + 1 }) };
                *scale = scale_of(format, found.unwrap_or_default());
            }
        }),
    }
    let scales = &*scales;
    let part = |part: usize, output: &mut [u8]| {
        let first = part * per_part;
        I::vectorize(Rounded { rows, first, scales, format, output, instructions: PhantomData::<I> });
    };
    if format == DType::I8 {
        let values = values[0].as_slice::<i8>()?;
        threads.each_chunk(values, per_part * rows.len(), |i, values| part(i, as_unsigned(values)));
    } else {
        threads.each_chunk(values[0].as_slice::<u8>()?, per_part * rows.len(), part);
    }
    Ok(())
}

/// The scale under which numbers up to this magnitude fill the format.
fn scale_of(format: DType, largest: f32) -> f32 {
    (f64::from(largest) / numeric::largest(format)) as f32
}

/// The largest magnitude of some rows; a NaN has none.
struct Largest<'a, T: Narrow> {
    rows: Rows<'a, T>,
    of: std::ops::Range<usize>,
}

impl<T: Narrow> Work for Largest<'_, T> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        const LANES: usize = 32;
        let (mut x, mut most) = ([0f32; BLOCK], [0f32; LANES]);
        for row in self.of {
            for block in self.rows.get(row).chunks(BLOCK) {
                let x = &mut x[..block.len()];
                T::widen(block, x);
                let mut chunks = x.chunks_exact(LANES);
                for chunk in &mut chunks {
                    for (most, x) in most.iter_mut().zip(chunk) {
                        *most = if x.abs() > *most { x.abs() } else { *most };
                    }
                }
                for x in chunks.remainder() {
                    most[0] = if x.abs() > most[0] { x.abs() } else { most[0] };
                }
            }
        }
        most.into_iter().fold(0.0, f32::max)
    }
}

/// Some rows in units of their scales.
struct Rounded<'a, T: Narrow, I> {
    rows: Rows<'a, T>,
    first: usize,
    /// One for each row, or one for all.
    scales: &'a [f32],
    format: DType,
    output: &'a mut [u8],
    instructions: PhantomData<I>,
}

impl<T: Narrow, I: Isa> Work for Rounded<'_, T, I> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.format {
            DType::I8 => self.round::<Int8>(),
            DType::F8E4M3 => self.round::<E4m3>(),
            _ => self.round::<E5m2>(),
        }
    }
}

impl<T: Narrow, I: Isa> Rounded<'_, T, I> {
    #[inline(always)]
    fn round<F: Format>(self) {
        let mut x = [0f32; BLOCK];
        for (i, output) in self.output.chunks_exact_mut(self.rows.len()).enumerate() {
            let row = self.first + i;
            let scale = if self.scales.len() == 1 { self.scales[0] } else { self.scales[row] };
            for (block, codes) in self.rows.get(row).chunks(BLOCK).zip(output.chunks_mut(BLOCK)) {
                let x = &mut x[..block.len()];
                T::widen(block, x);
                if PLAIN.contains(&scale) {
                    codes.iter_mut().zip(&*x).for_each(|(code, x)| *code = F::nearest::<I>(*x, scale));
                } else {
                    codes.iter_mut().zip(&*x).for_each(|(code, x)| *code = F::exact(*x, scale));
                }
            }
        }
    }
}

/// An 8-bit format.
trait Format {
    /// What it is.
    const DTYPE: DType;

    /// The code of the value nearest to x / scale, half to even, for a scale of [`PLAIN`].
    fn nearest<I: Isa>(x: f32, scale: f32) -> u8;

    /// The code of the value nearest to x / scale, by the definition.
    fn exact(x: f32, scale: f32) -> u8 {
        let quotient = if scale == 0.0 && !x.is_nan() { 0.0 } else { f64::from(x) / f64::from(scale) };
        let clamped = quotient.clamp(numeric::lowest(Self::DTYPE), numeric::largest(Self::DTYPE));
        let mut code = [0u8];
        numeric::store(Self::DTYPE, &mut code, 0, clamped);
        code[0]
    }
}

/// x − middle · scale, rounded once, so that its sign is exact.
#[inline(always)]
fn beyond<I: Isa>(x: f32, middle: f32, scale: f32) -> f32 {
    // A middle has at most 9 digits and a scale 24: float64 holds their product.
    if I::FUSED { (-middle).mul_add(scale, x) } else { (f64::from(x) - f64::from(middle) * f64::from(scale)) as f32 }
}

struct Int8;

impl Format for Int8 {
    const DTYPE: DType = DType::I8;

    #[inline(always)]
    fn nearest<I: Isa>(x: f32, scale: f32) -> u8 {
        /// Added to a number below 2^22, it leaves the nearest integer in the lowest bits.
        const INTEGERS: f32 = 12_582_912.0;
        let quotient = x / scale;
        // No number is 0.
        let known = if quotient.is_nan() { 0.0 } else { quotient };
        let clamped = known.clamp(-128.0, 127.0);
        let shifted = clamped + INTEGERS;
        let whole = shifted - INTEGERS;
        // The middle on the quotient's side of the integer; beyond it the next integer is nearer.
        let half = if clamped < whole { -0.5 } else { 0.5 };
        let past = beyond::<I>(x, whole + half, scale) * half;
        let code = shifted.to_bits().wrapping_sub(INTEGERS.to_bits()) as i32;
        let moves = past > 0.0 || (past == 0.0 && code & 1 == 1);
        let step = if half < 0.0 { -1 } else { 1 };
        (if moves { code.wrapping_add(step).min(127) } else { code }) as u8
    }
}

struct E4m3;

impl Format for E4m3 {
    const DTYPE: DType = DType::F8E4M3;

    #[inline(always)]
    fn nearest<I: Isa>(x: f32, scale: f32) -> u8 {
        nearest_float::<I, 3, 7>(x, scale, 448.0)
    }
}

struct E5m2;

impl Format for E5m2 {
    const DTYPE: DType = DType::F8E5M2;

    #[inline(always)]
    fn nearest<I: Isa>(x: f32, scale: f32) -> u8 {
        nearest_float::<I, 2, 15>(x, scale, 57_344.0)
    }
}

/// [`Format::nearest`] of a float with so many bits of mantissa, such a bias and such a largest number.
#[inline(always)]
fn nearest_float<I: Isa, const MANTISSA: u32, const BIAS: u32>(x: f32, scale: f32, largest: f32) -> u8 {
    let quotient = x.abs() / scale;
    let bits = quotient.to_bits();
    let dropped = 23 - MANTISSA;
    // The value at or below the quotient, and the middle between it and the next: of normal numbers the digits that fit, ...
    // Nothing overflows; a check for it would keep the compiler from doing many numbers at once.
    let kept = bits >> dropped;
    let normal = kept.wrapping_sub((127 - BIAS) << MANTISSA);
    let normal_middle = f32::from_bits(kept << dropped | 1 << (dropped - 1));
    // ... and below the least of them, 2^(1 - BIAS), whole steps of 2^(1 - BIAS - MANTISSA), which float32 numbers from
    // `steps` on are apart.
    let steps = f32::from_bits((127 + 24 - BIAS - MANTISSA) << 23);
    let step = f32::from_bits((127 + 1 - BIAS - MANTISSA) << 23);
    let shifted = quotient + steps;
    let above = if shifted - steps > quotient { 1 } else { 0 };
    let subnormal = shifted.to_bits().wrapping_sub(steps.to_bits()).wrapping_sub(above);
    let subnormal_middle = (shifted - steps) - above as f32 * step + 0.5 * step;

    let is_normal = bits >= (128 - BIAS) << 23;
    let code = if is_normal { normal } else { subnormal };
    let past = beyond::<I>(x.abs(), if is_normal { normal_middle } else { subnormal_middle }, scale);
    let up = if past > 0.0 || (past == 0.0 && code & 1 == 1) { 1 } else { 0 };
    let code = code.wrapping_add(up);
    // What is too large becomes the largest number, and of NaN there is a code.
    let most = largest.to_bits() >> dropped;
    let code = if quotient >= largest { most.wrapping_sub((127 - BIAS) << MANTISSA) } else { code };
    let code = if quotient.is_nan() { 0x7f } else { code };
    (code | x.to_bits() >> 24 & 0x80) as u8
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use super::super::{Avx2, Portable};
    use super::*;
    use lz_model::{ParamValue, Tensor};
    use proptest::prelude::*;

    const FORMATS: [&str; 3] = ["int8", "fp8_e4m3", "fp8_e5m2"];

    fn params(format: &str, granularity: &str) -> [(&'static str, ParamValue); 2] {
        [("dtype", ParamValue::str(format)), ("granularity", ParamValue::str(granularity))]
    }

    /// Values and scales must be those of the reference, to the last bit.
    fn agreement() -> Agreement {
        Agreement::of("quantize", "lz_cpu.quantize").exactly()
    }

    #[test]
    fn numbers_of_all_sizes_get_the_nearest_value() {
        fn all<I: Isa, F: Format>() {
            for scale in [1.0f32, 0.37, 0.007_874_016] {
                for upper in 0..=0xffffu32 {
                    for lower in [0, 0xffff] {
                        let x = f32::from_bits(upper << 16 | lower);
                        let (code, exact) = (F::nearest::<I>(x, scale), F::exact(x, scale));
                        let nan = |code: u8| numeric::load(F::DTYPE, &[code], 0).is_nan();
                        assert!(
                            code == exact || nan(code) && nan(exact),
                            "{x:e} / {scale:e}: {code:#x}, not {exact:#x}"
                        );
                    }
                }
            }
        }
        fn formats<I: Isa>() {
            all::<I, Int8>();
            all::<I, E4m3>();
            all::<I, E5m2>();
        }
        formats::<Portable>();
        // The same arithmetic with fused instructions, which need not be there: `mul_add` is a call without them.
        formats::<Avx2>();
    }

    #[test]
    fn numbers_in_the_middle_of_two_values_go_to_the_even_one() {
        fn all<F: Format>(codes: std::ops::Range<u8>) {
            for scale in [1.0f32, 0.37, 3e-5, 7e6] {
                for code in codes.clone() {
                    let [low, high] = [code, code + 1].map(|code| numeric::load(F::DTYPE, &[code], 0));
                    let middle = (low + high) / 2.0 * f64::from(scale);
                    // Without a float32 in the very middle, the nearest one is as near to it as any.
                    for x in [middle as f32, (middle as f32).next_up(), (middle as f32).next_down()] {
                        assert_eq!(F::nearest::<Avx2>(x, scale), F::exact(x, scale), "{x:e} / {scale:e}");
                        assert_eq!(F::nearest::<Portable>(-x, scale), F::exact(-x, scale), "{:e} / {scale:e}", -x);
                    }
                }
            }
        }
        all::<E4m3>(0..0x7e);
        all::<E5m2>(0..0x7b);
        all::<Int8>(0..127);
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            (rows, cols) in (0i64..6, prop_oneof![0i64..80, 500i64..1100]),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (format, whole) in (0usize..3, any::<bool>()),
            (gap, seed) in (0i64..3, any::<u64>()),
        ) {
            let x = drawn(dtype, &[rows, cols + gap], seed);
            let granularity = if whole { "per_tensor" } else { "per_channel" };
            agreement().check(&[("input", strided(&x, &[rows, cols]))], &params(FORMATS[format], granularity), None);
        }

        #[test]
        fn numbers_in_the_middle_go_to_the_even_value(
            units in proptest::collection::vec(-254i64..=254, 1..40),
            scale in prop_oneof![Just(1.0), Just(0.37), Just(3e-5), Just(7e6)],
        ) {
            // Halves of a scale, the largest 127: middles of two integers, if the scale is a power of two.
            let numbers: Vec<f64> = units.iter().map(|&n| n as f64 / 2.0 * scale).chain([127.0 * scale]).collect();
            let x = Tensor::from_f64(DType::F32, &[1, numbers.len() as i64], &numbers);
            for format in FORMATS {
                agreement().check(&[("input", x.view())], &params(format, "per_tensor"), None);
            }
        }

        #[test]
        fn given_scales_are_taken(
            (rows, cols) in (1i64..5, 1i64..70), form in 0..3, format in 0usize..3, seed in any::<u64>(),
        ) {
            let x = drawn(DType::F32, &[rows, cols], seed);
            let shape: &[i64] = match form { 0 => &[1], 1 => &[rows], _ => &[rows, 1] };
            let numbers: Vec<f64> = (0..shape.iter().product()).map(|i| [0.004, 1e-3, 0.5, 0.0][i as usize % 4]).collect();
            let scale = Tensor::from_f64(DType::F32, shape, &numbers);
            let granularity = if form == 0 { "per_tensor" } else { "per_channel" };
            let inputs = [("input", x.view()), ("scale", scale.view())];
            agreement().check(&inputs, &params(FORMATS[format], granularity), None);
        }
    }

    #[test]
    fn the_ends_are_the_references() {
        for numbers in [
            [0.0, -0.0, 0.0, 0.0],
            [f64::NAN, 1.0, -3.0, 0.0],
            [f64::NAN; 4],
            [f64::INFINITY, 1.0, f64::NEG_INFINITY, 0.0],
            [1e-44, -1e-45, 0.0, 1e-45],
            [3e38, -3e38, 1e30, 1.0],
        ] {
            let x = Tensor::from_f64(DType::F32, &[1, 4], &numbers);
            for format in FORMATS {
                for granularity in ["per_tensor", "per_channel"] {
                    agreement().check(&[("input", x.view())], &params(format, granularity), None);
                }
            }
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let x = drawn(DType::F32, &[300, 257], 1);
        for granularity in ["per_tensor", "per_channel"] {
            agreement().check(&[("input", x.view())], &params("int8", granularity), None);
        }
    }
}
