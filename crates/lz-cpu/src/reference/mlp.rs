//! Matrix products and feed-forward blocks.

use lz_model::{DType, KernelArgs, KernelError};

use super::Reference;
use super::activation::{gelu, gelu_tanh, relu, silu};
use super::arguments::Arguments;
use super::matrix::Matrix;
use super::rows::{read_matrix, read_row, read_vector, write_row};

/// Linear layer.
pub struct Linear;

/// Linear layer with a packed weight.
pub struct LinearPacked;

/// Linear layer with a packed weight of integers.
pub struct LinearQuantized;

/// Feed-forward block.
pub struct Fused;

impl Reference for Linear {
    const OPS: &'static [&'static str] = &["mlp.linear"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (input, weight) = (args.tensor("input"), read_matrix(&args.tensor("weight")));
        let bias = args.optional_tensor("bias").map(|bias| read_vector(&bias));
        for row in 0..args.dim("rows") {
            let mut out = weight.times(&read_row(&input, row));
            for (out, bias) in out.iter_mut().zip(bias.iter().flatten()) {
                *out += bias;
            }
            write_row(&mut args.outputs[0], row, out);
        }
        Ok(())
    }
}

impl Reference for LinearPacked {
    const OPS: &'static [&'static str] = &["mlp.linear.packed"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let packed = args.tensor("weight");
        let (outs, ins, interleave) = (args.dim("out_features"), args.dim("in_features"), args.dim("interleave"));
        let weight = Matrix::gather(outs, ins, |n, k| packed.get(&[n / 32, k / interleave, n % 32, k % interleave]));
        activated(args, &weight);
        Ok(())
    }
}

impl Reference for LinearQuantized {
    const OPS: &'static [&'static str] = &["mlp.linear.quantized"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (packed, scales) = (args.tensor("weight"), args.tensor("scales"));
        let (outs, ins, interleave) = (args.dim("out_features"), args.dim("in_features"), args.dim("interleave"));
        let halves = packed.dtype() == DType::U8;
        let integer = |n: i64, k: i64| {
            let byte = if halves { k / 2 } else { k };
            let number = packed.get(&[n / 32, byte / interleave, n % 32, byte % interleave]);
            if !halves {
                return number;
            }
            // Four bits in two's complement: 8 to 15 are -8 to -1.
            let four = if k % 2 == 0 { number as u8 & 15 } else { number as u8 >> 4 };
            f64::from(four) - if four < 8 { 0.0 } else { 16.0 }
        };
        // All of them where one scale covers a whole row.
        let group = if args.dim("group_size") == 0 { ins.max(1) } else { args.dim("group_size") };
        let weight = Matrix::gather(outs, ins, |n, k| integer(n, k) * scales.get(&[n / 32, k / group, n % 32]));
        activated(args, &weight);
        Ok(())
    }
}

/// Writes act(input · weight^T + bias).
fn activated(args: &mut KernelArgs<'_, '_>, weight: &Matrix) {
    let input = args.tensor("input");
    let bias = args.optional_tensor("bias").map(|bias| read_vector(&bias));
    let activation = match args.text("activation") {
        "relu" => relu,
        "gelu" => gelu,
        "gelu_tanh" => gelu_tanh,
        "silu" => silu,
        _ => |x| x,
    };
    for row in 0..args.dim("rows") {
        let mut out = weight.times(&read_row(&input, row));
        for (out, bias) in out.iter_mut().zip(bias.iter().flatten()) {
            *out += bias;
        }
        out.iter_mut().for_each(|out| *out = activation(*out));
        write_row(&mut args.outputs[0], row, out);
    }
}

impl Reference for Fused {
    const OPS: &'static [&'static str] = &["mlp.fused"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let input = args.tensor("input");
        let (up, down) = (read_matrix(&args.tensor("up_weight")), read_matrix(&args.tensor("down_weight")));
        let gate = args.optional_tensor("gate_weight").map(|gate| read_matrix(&gate));
        let activation = match args.text("activation") {
            "gelu" => gelu,
            "relu" => relu,
            _ => silu,
        };
        for row in 0..args.dim("rows") {
            let x = read_row(&input, row);
            let hidden: Vec<f64> = match &gate {
                Some(gate) => {
                    gate.times(&x).into_iter().zip(up.times(&x)).map(|(gate, up)| activation(gate) * up).collect()
                }
                None => up.times(&x).into_iter().map(activation).collect(),
            };
            write_row(&mut args.outputs[0], row, down.times(&hidden));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::DType;
    use crate::call;
    use lz_model::{ParamValue, Tensor};

    #[test]
    fn linear_multiplies_with_the_transposed_weight() {
        let x = Tensor::from_f64(DType::F32, &[2, 2], &[1., 2., 3., 4.]);
        let w = Tensor::from_f64(DType::F32, &[3, 2], &[1., 0., 0., 1., 10., 100.]);
        let b = Tensor::from_f64(DType::F32, &[3], &[0., 0., 0.5]);
        let inputs = [("input", x.view()), ("weight", w.view()), ("bias", b.view())];
        let out = call("linear", &inputs, &[], None).unwrap();
        assert_eq!(out[0].1.shape(), [2, 3]);
        assert_eq!(out[0].1.to_f64(), [1., 2., 210.5, 3., 4., 430.5]);
    }

    #[test]
    fn no_features_sum_to_the_bias() {
        let (x, w) = (Tensor::zeros(DType::F32, &[2, 0]), Tensor::zeros(DType::F32, &[1, 0]));
        let b = Tensor::from_f64(DType::F32, &[1], &[3.0]);
        let inputs = [("input", x.view()), ("weight", w.view()), ("bias", b.view())];
        assert_eq!(call("linear", &inputs, &[], None).unwrap()[0].1.to_f64(), [3.0, 3.0]);
    }

    #[test]
    fn integers_are_multiplied_with_the_scale_of_their_group() {
        // Output 0 is 1, -2, 3 with scales of 10 (two features) and 100; all else is zero.
        let x = Tensor::from_f64(DType::F64, &[1, 3], &[1.0, 10.0, 100.0]);
        let params = |interleave| {
            [
                ("out_features", ParamValue::Int(1)),
                ("interleave", ParamValue::Int(interleave)),
                ("group_size", ParamValue::Int(2)),
            ]
        };
        let mut scales = vec![0.0; 2 * 32];
        (scales[0], scales[32]) = (10.0, 100.0);
        let scales = Tensor::from_f64(DType::F32, &[1, 2, 32], &scales);
        let mut bytes = vec![0.0; 3 * 32];
        (bytes[0], bytes[32], bytes[64]) = (1.0, -2.0, 3.0);
        let int8 = Tensor::from_f64(DType::I8, &[1, 3, 32, 1], &bytes);
        // 1 and -2 (14) in one byte, 3 in the next.
        let mut bytes = vec![0.0; 16 * 32 * 4];
        (bytes[0], bytes[1]) = (225.0, 3.0);
        let int4 = Tensor::from_f64(DType::U8, &[1, 16, 32, 4], &bytes);
        for (weight, interleave) in [(int8, 1), (int4, 4)] {
            let inputs = [("input", x.view()), ("weight", weight.view()), ("scales", scales.view())];
            let out = call("linear_quantized", &inputs, &params(interleave), None).unwrap();
            assert_eq!(out[0].1.to_f64(), [10.0 - 200.0 + 30000.0]);
        }
    }

    #[test]
    fn the_block_is_its_parts() {
        let x = Tensor::from_f64(DType::F64, &[1], &[2.0]);
        let up = Tensor::from_f64(DType::F64, &[2, 1], &[1.0, -1.0]);
        let down = Tensor::from_f64(DType::F64, &[1, 2], &[10.0, 1.0]);
        let gate = Tensor::from_f64(DType::F64, &[2, 1], &[3.0, 3.0]);
        let relu = [("activation", ParamValue::str("relu"))];
        let plain = [("input", x.view()), ("up_weight", up.view()), ("down_weight", down.view())];
        assert_eq!(call("fused_mlp", &plain, &relu, None).unwrap()[0].1.to_f64(), [20.0]);
        let gated = [&plain[..], &[("gate_weight", gate.view())]].concat();
        // relu(6) * 2 and relu(6) * -2.
        assert_eq!(call("fused_mlp", &gated, &relu, None).unwrap()[0].1.to_f64(), [108.0]);
    }
}
