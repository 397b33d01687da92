//! Convolutions over one or two axes.

use lz_abi::{KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::elements::{Number, fill, given, same};
use super::layer_norm::floats;
use super::linear::Activation;
use super::{Cost, OpDef};
use crate::ir::{Dim, Inputs, Meta, ShapeError};

/// Convolution of x (batch, channels, sizes…) with w (outputs, channels / groups, kernel…), plus a number for each output
/// channel, put through an activation. x is padded with zeros.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conv {
    /// From one place of the kernel to the next.
    pub stride: Vec<i64>,
    /// Zeros before and after each axis.
    pub padding: Vec<i64>,
    /// From one element under the kernel to the next.
    pub dilation: Vec<i64>,
    /// How many parts the channels have that do not see each other.
    pub groups: i64,
    /// What is applied to the sum with its bias.
    #[serde(default)]
    pub activation: Activation,
}

/// How often a window fits: `(size + 2·padding - dilation·(kernel - 1) - 1) // stride + 1`.
pub fn windows(size: &Dim, kernel: &Dim, stride: i64, padding: i64, dilation: i64) -> Dim {
    let reach = Dim::from(dilation) * (kernel.clone() - Dim::from(1)) + Dim::from(1);
    (size.clone() + Dim::from(2 * padding) - reach).quotient(Dim::from(stride)) + Dim::from(1)
}

/// Checks an attribute that has a number for each axis.
pub fn per_axis(name: &'static str, numbers: &[i64], axes: usize, least: i64) -> Result<(), ShapeError> {
    if numbers.len() == axes && numbers.iter().all(|&n| n >= least) {
        return Ok(());
    }
    let expected = format!("a number of {least} or more for each of {axes} axes");
    Err(ShapeError::Attribute { name, value: format!("{numbers:?}"), expected })
}

impl OpDef for Conv {
    const NAME: &'static str = "conv";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(3)?;
        let (x, w) = (inputs.need(0)?, inputs.need(1)?);
        let axes = match x.rank() {
            rank @ 3..=4 => rank - 2,
            rank => return Err(ShapeError::Rank { at: 0, rank, expected: "three or four" }),
        };
        floats(0, x)?;
        if w.rank() != x.rank() {
            return Err(ShapeError::Rank { at: 1, rank: w.rank(), expected: "as many as input 0" });
        }
        if w.dtype != x.dtype {
            let expected = format!("what input 0 is, {}", x.dtype);
            return Err(ShapeError::Type { at: 1, dtype: w.dtype, expected });
        }
        per_axis("stride", &self.stride, axes, 1)?;
        per_axis("padding", &self.padding, axes, 0)?;
        per_axis("dilation", &self.dilation, axes, 1)?;
        if self.groups < 1 || w.shape[0].known().is_some_and(|n| n % self.groups != 0) {
            let expected = format!("a divisor of {} outputs", w.shape[0]);
            return Err(ShapeError::Attribute { name: "groups", value: self.groups.to_string(), expected });
        }
        same(&x.shape[1], &(w.shape[1].clone() * Dim::from(self.groups)))?;
        if let Some(b) = inputs.get(2) {
            floats(2, b)?;
            if b.rank() != 1 {
                return Err(ShapeError::Rank { at: 2, rank: b.rank(), expected: "one" });
            }
            same(&w.shape[0], &b.shape[0])?;
        }
        let mut found = Meta::new(x.dtype, [x.shape[0].clone(), w.shape[0].clone()]);
        for i in 0..axes {
            let kernel = &w.shape[i + 2];
            let size = windows(&x.shape[i + 2], kernel, self.stride[i], self.padding[i], self.dilation[i]);
            if size.known().is_some_and(|n| n < 1) {
                return Err(ShapeError::sizes(&x.shape[i + 2], kernel));
            }
            found.shape.push(size);
        }
        Ok(found)
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (x, w, b) = (given(inputs, 0), given(inputs, 1), inputs.get(2).and_then(Option::as_ref));
        let channels = w.shape()[1];
        let outputs = w.shape()[0] / self.groups;
        let under: Vec<lz_abi::Extents> = indices(&w.shape()[1..]).collect();
        fill(output, |index| {
            let group = index[1] / outputs;
            let terms = under.iter().filter_map(|k| {
                let mut place = vec![index[0], group * channels + k[0]];
                for (i, &at) in k[1..].iter().enumerate() {
                    let along = index[i + 2] * self.stride[i] - self.padding[i] + at * self.dilation[i];
                    if !(0..x.shape()[i + 2]).contains(&along) {
                        return None;
                    }
                    place.push(along);
                }
                let weight: Vec<i64> = [index[1]].into_iter().chain(k.iter().copied()).collect();
                Some(x.get(&place) * w.get(&weight))
            });
            let sum = terms.sum::<f64>() + b.map_or(0.0, |b| b.get(&index[1..2]));
            Number::Float(self.activation.kind().map_or(sum, |kind| kind.of(sum)))
        });
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let under =
            inputs.get(1).map_or(0, |w| w.shape[1..].iter().map(|size| size.known().unwrap_or(0)).product::<i64>());
        Cost {
            flops: 2.0 * under as f64 * output.len().known().unwrap_or(0) as f64,
            bytes: inputs.0.iter().flatten().map(|meta| bytes(meta)).sum::<f64>() + bytes(output),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{counted, evaluated, meta, refused, scattered};
    use super::super::matmul::MatMul;
    use super::super::reshape::Reshape;
    use super::*;
    use lz_abi::DType;

    fn conv(stride: &[i64], padding: &[i64], dilation: &[i64], groups: i64) -> Conv {
        let [stride, padding, dilation] = [stride, padding, dilation].map(<[i64]>::to_vec);
        Conv { stride, padding, dilation, groups, activation: Activation::None }
    }

    #[test]
    fn one_axis_by_hand() {
        let x = counted(DType::F32, &[1, 1, 5]);
        let w = Tensor::from_f64(DType::F32, &[1, 1, 2], &[1., 10.]);
        let b = Tensor::from_f64(DType::F32, &[1], &[100.]);
        let run = |op: Conv| evaluated(op, &[&x, &w, &b]).to_f64();
        assert_eq!(run(conv(&[1], &[0], &[1], 1)), [110., 121., 132., 143.]);
        assert_eq!(run(conv(&[2], &[1], &[1], 1)), [100., 121., 143.]);
        assert_eq!(run(conv(&[1], &[0], &[3], 1)), [130., 141.]);
    }

    #[test]
    fn groups_see_their_own_channels() {
        let x = Tensor::from_f64(DType::F32, &[1, 2, 1, 1], &[3., 5.]);
        let w = Tensor::from_f64(DType::F32, &[4, 1, 1, 1], &[1., 2., 3., 4.]);
        assert_eq!(evaluated(conv(&[1, 1], &[0, 0], &[1, 1], 2), &[&x, &w]).to_f64(), [3., 6., 15., 20.]);
    }

    #[test]
    fn a_kernel_of_one_is_a_product() {
        let (x, w) = (scattered(&[1, 3, 2, 2], 1), scattered(&[4, 3, 1, 1], 2));
        let found = evaluated(conv(&[1, 1], &[0, 0], &[1, 1], 1), &[&x, &w]).to_f64();
        let flat = |t: &Tensor, shape: [i64; 2]| evaluated(Reshape { shape: shape.map(Dim::from).to_vec() }, &[t]);
        let product = evaluated(MatMul::default(), &[&flat(&w, [4, 3]), &flat(&x, [3, 4])]).to_f64();
        assert!(found.iter().zip(&product).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn wrong_inputs_are_refused() {
        let (x, w) = (meta(DType::F32, &[1, 4, 5]), meta(DType::F32, &[2, 4, 3]));
        assert!(refused(&conv(&[0], &[0], &[1], 1), &[&x, &w]).contains("'stride' is [0]"));
        assert_eq!(refused(&conv(&[1], &[0], &[1], 2), &[&x, &w]), "sizes 4 and 8 do not fit together");
        assert_eq!(refused(&conv(&[1], &[0], &[3], 1), &[&x, &w]), "sizes 5 and 3 do not fit together");
        assert!(refused(&conv(&[1], &[0], &[1], 1), &[&meta(DType::F32, &[4, 5]), &w]).contains("three or four"));
    }

    #[test]
    fn sizes_may_be_symbols() {
        let x = Meta::new(DType::F32, [Dim::symbol("s0"), Dim::from(1), Dim::symbol("s1")]);
        let found = conv(&[1], &[1], &[1], 1).infer(Inputs(&[Some(&x), Some(&meta(DType::F32, &[2, 1, 3]))])).unwrap();
        assert_eq!(found.shape[2], Dim::symbol("s1"));
    }
}
