//! Conversion between floating point and quantized storage.

use std::ops::Range;

use lz_model::{DType, KernelArgs, KernelError, TensorView, numeric};

use super::Reference;
use super::arguments::Arguments;
use super::rows::{read_row, write_row};

/// Float to quantized.
pub struct Quantize;

/// Quantized to float.
pub struct Dequantize;

/// Which elements share a scale.
struct Groups {
    rows: i64,
    cols: i64,
    scale_rows: i64,
    scale_cols: i64,
    per_tensor: bool,
    width: i64,
}

impl Groups {
    fn of(args: &KernelArgs<'_, '_>) -> Groups {
        let [rows, cols, scale_rows, scale_cols, width] =
            ["rows", "cols", "scale_rows", "scale_cols", "group"].map(|name| args.dim(name));
        Groups {
            rows,
            cols,
            scale_rows,
            scale_cols,
            per_tensor: args.text("granularity") == "per_tensor",
            width: width.max(1),
        }
    }

    /// The place of the scale that covers an element.
    fn covering(&self, row: i64, col: i64) -> (i64, i64) {
        (if self.per_tensor { 0 } else { row }, col / self.width)
    }

    /// The rows and columns a scale covers.
    fn members(&self, scale_row: i64, scale_col: i64) -> (Range<i64>, Range<i64>) {
        let rows = if self.per_tensor { 0..self.rows } else { scale_row..scale_row + 1 };
        let start = scale_col * self.width;
        (rows, start..start.saturating_add(self.width).min(self.cols))
    }
}

/// The entry for a group in a tensor of scales, which has one per group, one per row of them, or one.
fn entry(scales: &TensorView<'_>, (row, col): (i64, i64)) -> f64 {
    match scales.shape() {
        [_, _] => scales.get(&[row, col]),
        [1] => scales.get(&[0]),
        _ => scales.get(&[row]),
    }
}

/// The scale of a group without a zero point, as float32, from its largest magnitude.
fn symmetric_scale(format: DType, max: f64) -> f64 {
    match format {
        _ if max == 0.0 => 0.0,
        // The scale is an exponent of eight bits (E8M0); 4 = 2^2 is the largest power of two of E2M1.
        DType::MxFp4 => f64::from(libm::ilogb(max).saturating_sub(2).clamp(-127, 127)).exp2(),
        DType::NvFp4 => numeric::rounded(DType::F8E4M3, max / numeric::largest(format)),
        _ => numeric::rounded(DType::F32, max / numeric::largest(format)),
    }
}

/// Scale (as float32) and zero point of a group of integers that covers `min` to `max` and zero.
fn affine_scale(format: DType, min: f64, max: f64) -> (f64, f64) {
    let (min, max) = (min.min(0.0), max.max(0.0));
    let steps = numeric::largest(format) - numeric::lowest(format);
    let scale = numeric::rounded(DType::F32, (max - min) / steps);
    if scale == 0.0 {
        return (0.0, 0.0);
    }
    (scale, numeric::rounded(DType::I32, numeric::lowest(format) - min / scale))
}

/// A number in units of the scale; storing it rounds it. Without a scale
/// there is only zero, and NaN, for the formats that have one.
fn quantized(format: DType, x: f64, scale: f64, zero_point: f64) -> f64 {
    if scale == 0.0 && !x.is_nan() {
        return 0.0;
    }
    let units = x / scale;
    // Offset after rounding: the zero point must not decide which way halves go.
    let offset = if zero_point == 0.0 { units } else { units.round_ties_even() + zero_point };
    offset.clamp(numeric::lowest(format), numeric::largest(format))
}

impl Reference for Quantize {
    const OPS: &'static [&'static str] = &["quantize"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let groups = Groups::of(args);
        let (input, given) = (args.tensor("input"), args.optional_tensor("scale"));
        let rows: Vec<Vec<f64>> = (0..groups.rows).map(|row| read_row(&input, row)).collect();
        let affine = args.flag("zero_point");
        let format = args.outputs[0].dtype();

        let scale_and_zero_point = |place: (i64, i64)| {
            if let Some(given) = &given {
                return (entry(given, place), 0.0);
            }
            let (rows_in, cols_in) = groups.members(place.0, place.1);
            let members = rows_in.flat_map(|r| cols_in.clone().map(move |c| (r, c)));
            let numbers = members.map(|(r, c)| rows[r as usize][c as usize]).filter(|x| !x.is_nan());
            let (min, max) = numbers.fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), x| (min.min(x), max.max(x)));
            match (min <= max, affine) {
                (false, _) => (0.0, 0.0),
                (true, true) => affine_scale(format, min, max),
                (true, false) => (symmetric_scale(format, max.abs().max(min.abs())), 0.0),
            }
        };
        let of_row = |r| (0..groups.scale_cols).map(|c| scale_and_zero_point((r, c))).collect();
        let scales: Vec<Vec<(f64, f64)>> = (0..groups.scale_rows).map(of_row).collect();

        for (row, numbers) in rows.iter().enumerate() {
            let values = numbers.iter().enumerate().map(|(col, &x)| {
                let (r, c) = groups.covering(row as i64, col as i64);
                let (scale, zero_point) = scales[r as usize][c as usize];
                quantized(format, x, scale, zero_point)
            });
            write_row(&mut args.outputs[0], row as i64, values);
        }
        for (row, pairs) in (0..).zip(&scales) {
            write_row(&mut args.outputs[1], row, pairs.iter().map(|pair| pair.0));
            write_row(&mut args.outputs[2], row, pairs.iter().map(|pair| pair.1));
        }
        Ok(())
    }
}

impl Reference for Dequantize {
    const OPS: &'static [&'static str] = &["dequantize"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let groups = Groups::of(args);
        let (values, scales, zero_points) =
            (args.tensor("values"), args.tensor("scales"), args.optional_tensor("zero_points"));
        for row in 0..groups.rows {
            let numbers = (0..).zip(read_row(&values, row)).map(|(col, value)| {
                let place = groups.covering(row, col);
                (value - zero_points.as_ref().map_or(0.0, |z| entry(z, place))) * entry(&scales, place)
            });
            write_row(&mut args.outputs[0], row, numbers);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::call;
    use lz_model::{ParamValue, Tensor};

    use super::*;

    type Quantized = (Tensor, Tensor, Tensor);

    fn quantize(x: &Tensor, format: &str, granularity: &str, extra: &[(&str, ParamValue)]) -> Quantized {
        let params =
            [&[("dtype", ParamValue::str(format)), ("granularity", ParamValue::str(granularity))], extra].concat();
        let out = call("quantize", &[("input", x.view())], &params, None).unwrap();
        let mut tensors = out.into_iter().map(|(_, tensor)| tensor);
        let mut next = || tensors.next().unwrap();
        (next(), next(), next())
    }

    fn dequantize(
        (values, scales, zero_points): &Quantized,
        granularity: &str,
        extra: &[(&str, ParamValue)],
    ) -> Vec<f64> {
        let params = [&[("granularity", ParamValue::str(granularity))], extra].concat();
        let inputs = [("values", values.view()), ("scales", scales.view()), ("zero_points", zero_points.view())];
        call("dequantize", &inputs, &params, None).unwrap()[0].1.to_f64()
    }

    fn ramp(rows: i64, cols: i64) -> Tensor {
        let values: Vec<f64> = (0..rows * cols).map(|i| (i as f64 * 0.37 - 3.0) * (1.0 + (i % 5) as f64)).collect();
        Tensor::from_f64(DType::F32, &[rows, cols], &values)
    }

    #[test]
    fn integers_are_off_by_at_most_half_a_scale() {
        let x = ramp(3, 10);
        let group = [("group_size", ParamValue::Int(4))];
        for format in ["int8", "int4"] {
            for (granularity, width) in [("per_tensor", 30), ("per_channel", 10), ("blockwise", 4)] {
                for affine in [false, true] {
                    let params = [&group[..], &[("zero_point", ParamValue::Bool(affine))]].concat();
                    let quantized = quantize(&x, format, granularity, &params);
                    let back = dequantize(&quantized, granularity, &group);
                    let scales = quantized.1.to_f64();
                    for (i, (a, b)) in x.to_f64().iter().zip(&back).enumerate() {
                        let (row, col) = (i / 10, i % 10);
                        let scale = match width {
                            30 => scales[0],
                            10 => scales[row],
                            _ => scales[row * 3 + col / 4],
                        };
                        // With a zero point its own rounding may cost the ends another half.
                        let bound = if affine { 1.0 } else { 0.5 };
                        assert!(
                            (a - b).abs() <= scale * bound * 1.0001,
                            "{format} {granularity} {affine}: {a} {b} {scale}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn int8_by_hand() {
        let x = Tensor::from_f64(DType::F32, &[1, 4], &[-127.0, 63.5, 0.5, 1.5]);
        let (values, scales, zero_points) = quantize(&x, "int8", "per_tensor", &[]);
        assert_eq!((scales.to_f64(), zero_points.to_f64()), (vec![1.0], vec![0.0]));
        assert_eq!(values.to_f64(), [-127., 64., 0., 2.]);
        let x = Tensor::from_f64(DType::F32, &[1, 2], &[0.0, 255.0]);
        let (values, scales, zero_points) =
            quantize(&x, "int8", "per_tensor", &[("zero_point", ParamValue::Bool(true))]);
        assert_eq!((scales.to_f64(), zero_points.to_f64()), (vec![1.0], vec![-128.0]));
        assert_eq!(values.to_f64(), [-128., 127.]);
    }

    #[test]
    fn four_bit_floats_have_scales_of_their_own_kind() {
        let group = |n| [("group_size", ParamValue::Int(n))];
        let x = Tensor::from_f64(DType::F32, &[1, 3], &[7.0, -1.0, 0.5]);
        let (values, scales, _) = quantize(&x, "mxfp4", "blockwise", &group(32));
        assert_eq!((values.to_f64(), scales.to_f64()), (vec![6.0, -1.0, 0.5], vec![1.0]));
        let x = Tensor::from_f64(DType::F64, &[1, 2], &[2f64.powi(-300), 0.0]);
        assert_eq!(quantize(&x, "mxfp4", "blockwise", &group(32)).1.to_f64(), [2f64.powi(-127)]);
        // 10 / 6 = 1.667 is 1.625 in E4M3.
        let x = Tensor::from_f64(DType::F32, &[1, 2], &[10.0, 3.25]);
        let (values, scales, _) = quantize(&x, "nvfp4", "blockwise", &group(16));
        assert_eq!((values.to_f64(), scales.to_f64()), (vec![6.0, 2.0], vec![1.625]));
    }

    #[test]
    fn zeros_nan_and_nothing() {
        for format in ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4"] {
            let zeros = Tensor::zeros(DType::F32, &[1, 2]);
            let (values, scales, _) = quantize(&zeros, format, "blockwise", &[]);
            assert_eq!((values.to_f64(), scales.to_f64()), (vec![0.0; 2], vec![0.0]));
            let nan = Tensor::from_f64(DType::F32, &[1, 2], &[f64::NAN, 2.0]);
            let (values, scales, _) = quantize(&nan, format, "blockwise", &[]);
            assert_eq!(values.to_f64()[0].is_nan(), format.starts_with("fp8"), "{format}");
            assert!(scales.to_f64()[0] > 0.0);
            let (values, scales, _) = quantize(&Tensor::zeros(DType::F32, &[0, 4]), format, "blockwise", &[]);
            assert!(values.to_f64().is_empty() && scales.to_f64().is_empty());
        }
        let nothing = quantize(&Tensor::zeros(DType::F32, &[0, 4]), "int8", "per_tensor", &[]);
        assert_eq!(nothing.1.to_f64(), [0.0]);
    }

    #[test]
    fn given_scales_broadcast_and_saturate() {
        let x = Tensor::from_f64(DType::F32, &[2, 2], &[1., 2., 3., 400.]);
        let scale = Tensor::from_f64(DType::F32, &[2], &[1., 2.]);
        let params = [("dtype", ParamValue::str("int8")), ("granularity", ParamValue::str("per_channel"))];
        let out = call("quantize", &[("input", x.view()), ("scale", scale.view())], &params, None).unwrap();
        assert_eq!(out[0].1.to_f64(), [1., 2., 2., 127.]);
        assert_eq!((out[1].1.shape(), out[1].1.to_f64()), (&[2, 1][..], vec![1., 2.]));
    }
}
