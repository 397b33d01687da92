//! Normalization over the last dimension.

use lz_model::{KernelArgs, KernelError, TensorView};

use super::Reference;
use super::arguments::Arguments;
use super::rows::{read_row, read_vector, write_row};

/// Root-mean-square norm.
pub struct Rms;

/// Layer norm.
pub struct Layer;

/// Residual addition and root-mean-square norm in one.
pub struct FusedAddRms;

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len() as f64;
    values.sum::<f64>() / n
}

/// A vector given per column, or `otherwise` everywhere.
fn per_column(given: Option<TensorView<'_>>, hidden: i64, otherwise: f64) -> Vec<f64> {
    given.map_or_else(|| vec![otherwise; hidden as usize], |view| read_vector(&view))
}

fn rms(row: &[f64], eps: f64, weight: &[f64]) -> Vec<f64> {
    let size = (mean(row.iter().map(|x| x * x)) + eps).sqrt();
    row.iter().zip(weight).map(|(x, w)| x / size * w).collect()
}

impl Reference for Rms {
    const OPS: &'static [&'static str] = &["norm.rms"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (input, eps) = (args.tensor("input"), args.float("eps"));
        let weight = per_column(args.optional_tensor("weight"), args.dim("hidden"), 1.0);
        for row in 0..args.dim("rows") {
            write_row(&mut args.outputs[0], row, rms(&read_row(&input, row), eps, &weight));
        }
        Ok(())
    }
}

impl Reference for Layer {
    const OPS: &'static [&'static str] = &["norm.layer"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (input, eps) = (args.tensor("input"), args.float("eps"));
        let weight = per_column(args.optional_tensor("weight"), args.dim("hidden"), 1.0);
        let bias = per_column(args.optional_tensor("bias"), args.dim("hidden"), 0.0);
        for row in 0..args.dim("rows") {
            let x = read_row(&input, row);
            let center = mean(x.iter().copied());
            let spread = (mean(x.iter().map(|x| (x - center) * (x - center))) + eps).sqrt();
            let affine = weight.iter().zip(&bias);
            write_row(&mut args.outputs[0], row, x.iter().zip(affine).map(|(x, (w, b))| (x - center) / spread * w + b));
        }
        Ok(())
    }
}

impl Reference for FusedAddRms {
    const OPS: &'static [&'static str] = &["norm.fused_add_rms"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (input, residual, eps) = (args.tensor("input"), args.tensor("residual"), args.float("eps"));
        let weight = per_column(args.optional_tensor("weight"), args.dim("hidden"), 1.0);
        for row in 0..args.dim("rows") {
            let sum: Vec<f64> =
                read_row(&input, row).iter().zip(read_row(&residual, row)).map(|(x, r)| x + r).collect();
            // The norm is that of the sum before it is rounded.
            write_row(&mut args.outputs[0], row, rms(&sum, eps, &weight));
            write_row(&mut args.outputs[1], row, sum);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::call;
    use lz_model::{DType, ParamValue, Tensor};

    const EXACT: (&str, ParamValue) = ("eps", ParamValue::Float(0.0));

    #[test]
    fn rms_gives_rows_of_mean_square_one() {
        let x = Tensor::from_f64(DType::F64, &[2, 4], &[1., -2., 3., 4., 0.1, 0.1, 0.1, 0.1]);
        let y = call("rms_norm", &[("x", x.view())], &[EXACT], None).unwrap()[0].1.to_f64();
        for row in y.chunks(4) {
            assert!((row.iter().map(|v| v * v).sum::<f64>() / 4.0 - 1.0).abs() < 1e-12);
        }
        let w = Tensor::from_f64(DType::F16, &[4], &[2., 2., 2., 0.]);
        let weighted =
            call("rms_norm", &[("x", x.view()), ("weight", w.view())], &[EXACT], None).unwrap()[0].1.to_f64();
        assert_eq!((weighted[0], weighted[3]), (2.0 * y[0], 0.0));
    }

    #[test]
    fn eps_keeps_a_row_of_zeros_at_zero() {
        let x = Tensor::zeros(DType::F32, &[1, 3]);
        for op in ["rms_norm", "layer_norm"] {
            assert_eq!(call(op, &[("x", x.view())], &[], None).unwrap()[0].1.to_f64(), [0.0; 3]);
        }
    }

    #[test]
    fn layer_gives_rows_of_mean_zero_and_variance_one() {
        let x = Tensor::from_f64(DType::F64, &[1, 4], &[1., 2., 3., 10.]);
        let y = call("layer_norm", &[("x", x.view())], &[EXACT], None).unwrap()[0].1.to_f64();
        assert!(y.iter().sum::<f64>().abs() < 1e-12);
        assert!((y.iter().map(|v| v * v).sum::<f64>() / 4.0 - 1.0).abs() < 1e-12);
        let bias = Tensor::from_f64(DType::F32, &[4], &[5.; 4]);
        let moved =
            call("layer_norm", &[("x", x.view()), ("bias", bias.view())], &[EXACT], None).unwrap()[0].1.to_f64();
        assert!((moved[1] - y[1] - 5.0).abs() < 1e-12);
    }

    #[test]
    fn the_fused_norm_is_of_the_sum_before_rounding() {
        // In bfloat16, 256 + 1 rounds to 256; the norm still sees 257.
        let x = Tensor::from_f64(DType::Bf16, &[1, 2], &[256., 0.]);
        let r = Tensor::from_f64(DType::Bf16, &[1, 2], &[1., 768.]);
        let out = call("fused_add_rms_norm", &[("input", x.view()), ("residual", r.view())], &[EXACT], None).unwrap();
        assert_eq!(out[1].0, "residual_out");
        assert_eq!(out[1].1.to_f64()[0], 256.0);
        let of = |s: f64| lz_model::numeric::rounded(DType::Bf16, s / ((s * s + 768.0 * 768.0) / 2.0).sqrt());
        assert_ne!(of(257.0), of(256.0));
        assert_eq!(out[0].1.to_f64()[0], of(257.0));
    }

    #[test]
    fn inputs_with_the_same_rows_in_other_axes_are_refused() {
        let x = Tensor::from_f64(DType::F32, &[2, 1, 1], &[1., 2.]);
        let r = Tensor::from_f64(DType::F32, &[2, 1], &[10., 20.]);
        let inputs = [("input", x.view()), ("residual", r.view())];
        let error = call("fused_add_rms_norm", &inputs, &[], None).unwrap_err();
        assert!(error.to_string().contains("the leading axes of 'input' are [2, 1]"), "{error}");
    }
}
