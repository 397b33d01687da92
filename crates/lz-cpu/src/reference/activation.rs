//! Activations.

use std::f64::consts::{FRAC_2_PI, SQRT_2};

use lz_model::{KernelArgs, KernelError};

use super::Reference;
use super::arguments::Arguments;
use super::rows::{read_row, write_row};

/// Gated SiLU.
pub struct SiluMul;

/// Gaussian error linear unit.
pub struct Gelu;

/// Softmax of rows.
pub struct Softmax;

/// x / (1 + exp(-x)); 0 at minus infinity, its limit.
pub fn silu(x: f64) -> f64 {
    if x == f64::NEG_INFINITY { 0.0 } else { x / (1.0 + (-x).exp()) }
}

/// x/2 (1 + erf(x / sqrt 2)), by the complementary function, which keeps its precision for negative x; 0 at minus
/// infinity, its limit.
pub fn gelu(x: f64) -> f64 {
    if x == f64::NEG_INFINITY { 0.0 } else { x / 2.0 * libm::erfc(-x / SQRT_2) }
}

/// The usual approximation of [`gelu`].
pub fn gelu_tanh(x: f64) -> f64 {
    if x == f64::NEG_INFINITY {
        return 0.0;
    }
    x / 2.0 * (1.0 + (FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// The positive part; NaN stays NaN.
pub fn relu(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

impl Reference for SiluMul {
    const OPS: &'static [&'static str] = &["activation.silu_mul"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (gate, up) = (args.tensor("gate"), args.tensor("up"));
        for row in 0..args.dim("rows") {
            let products = read_row(&gate, row).into_iter().zip(read_row(&up, row)).map(|(gate, up)| silu(gate) * up);
            write_row(&mut args.outputs[0], row, products);
        }
        Ok(())
    }
}

impl Reference for Gelu {
    const OPS: &'static [&'static str] = &["activation.gelu"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let input = args.tensor("input");
        let function = if args.text("approximate") == "tanh" { gelu_tanh } else { gelu };
        for row in 0..args.dim("rows") {
            write_row(&mut args.outputs[0], row, read_row(&input, row).into_iter().map(function));
        }
        Ok(())
    }
}

impl Reference for Softmax {
    const OPS: &'static [&'static str] = &["activation.softmax"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let input = args.tensor("input");
        for row in 0..args.dim("rows") {
            let x = read_row(&input, row);
            let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            // Of nothing but minus infinity, and where plus infinity is, this is NaN.
            let weights: Vec<f64> = x.iter().map(|x| (x - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            write_row(&mut args.outputs[0], row, weights.into_iter().map(|weight| weight / total));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call;
    use lz_model::{DType, ParamValue, Tensor};

    #[test]
    fn silu_times_up() {
        let gate = Tensor::from_f64(DType::F64, &[3], &[0.0, 3f64.ln(), -800.0]);
        let up = Tensor::from_f64(DType::F64, &[3], &[9.0, 4.0, 1.0]);
        let out = call("silu_mul", &[("gate", gate.view()), ("up", up.view())], &[], None).unwrap()[0].1.to_f64();
        assert_eq!((out[0], out[2]), (0.0, 0.0));
        assert!((out[1] - 3.0 * 3f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn gelu_has_its_published_values() {
        // x times the normal distribution function: Phi(1) = 0.8413447460685429.
        let x = Tensor::from_f64(DType::F64, &[3], &[1.0, -1.0, 0.0]);
        let exact = call("gelu", &[("x", x.view())], &[], None).unwrap()[0].1.to_f64();
        assert!((exact[0] - 0.841_344_746_068_542_9).abs() < 1e-15);
        assert!((exact[1] + 0.158_655_253_931_457_1).abs() < 1e-15);
        let params = [("approximate", ParamValue::str("tanh"))];
        let near = call("gelu", &[("x", x.view())], &params, None).unwrap()[0].1.to_f64();
        assert!((near[0] - exact[0]).abs() < 3e-4 && near[0] != exact[0]);
    }

    #[test]
    fn softmax_is_a_share_of_the_row() {
        let x = Tensor::from_f64(DType::F64, &[2, 3], &[0.0, 3f64.ln(), f64::NEG_INFINITY, 1e300, 1e300, -1e300]);
        let out = call("softmax", &[("x", x.view())], &[], None).unwrap()[0].1.to_f64();
        for (got, wanted) in out.iter().zip([0.25, 0.75, 0.0, 0.5, 0.5, 0.0]) {
            assert!((got - wanted).abs() < 1e-15, "{got}");
        }
        for row in [[f64::NEG_INFINITY; 2], [f64::INFINITY, 0.0], [f64::NAN, 0.0]] {
            let x = Tensor::from_f64(DType::F64, &[2], &row);
            assert!(call("softmax", &[("x", x.view())], &[], None).unwrap()[0].1.to_f64()[0].is_nan());
        }
    }

    #[test]
    fn infinities_give_the_limit() {
        for f in [silu, gelu, gelu_tanh, relu] {
            assert_eq!((f(f64::INFINITY), f(f64::NEG_INFINITY)), (f64::INFINITY, 0.0));
        }
    }

    #[test]
    fn nan_stays_nan() {
        for f in [silu, gelu, gelu_tanh, relu] {
            assert!(f(f64::NAN).is_nan());
        }
        assert_eq!((relu(-1.0), relu(2.0)), (0.0, 2.0));
    }
}
