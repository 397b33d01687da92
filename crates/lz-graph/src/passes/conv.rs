//! Convolutions: what their weights and their kernels can do on the way.

use lz_abi::numeric::rounded;
use lz_abi::{DType, Tensor};

use super::activations::activation as any_activation;
use super::pattern::{Pattern, any, binary, node, rewrite};
use crate::ir::{Constant, Graph, GraphError, ValueId};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::conv::Conv;
use crate::ops::linear::Activation;

/// A convolution without an activation.
fn is_plain(op: &Op) -> bool {
    matches!(op, Op::Conv(conv) if conv.activation == Activation::None)
}

/// A plain convolution with or without a bias.
fn plain() -> [Pattern; 2] {
    [vec![any("x"), any("w")], vec![any("x"), any("w"), any("b")]].map(|inputs| node(is_plain, inputs).named("conv"))
}

fn made(graph: &Graph, value: ValueId) -> Option<(Conv, Vec<Option<ValueId>>)> {
    let (_, made) = graph.made_by(value)?;
    let Op::Conv(conv) = &made.op else { return None };
    Some((conv.clone(), made.inputs.to_vec()))
}

/// The numbers of a constant that has one for each output of a convolution, or one for all.
fn per_output(graph: &Graph, value: ValueId, conv: ValueId) -> Option<Vec<f64>> {
    let (constant, whole) = (graph.constant(value)?, graph.meta(conv));
    let (outputs, rank) = (whole.shape[1].known()?, whole.rank());
    let view = constant.view();
    // As broadcast: axes are aligned at the last one.
    let skipped = rank.checked_sub(view.shape().len())?;
    let fits = |(axis, &size): (usize, &i64)| size == 1 || axis + skipped == 1 && size == outputs;
    if view.dtype() != whole.dtype || !view.shape().iter().enumerate().all(fits) {
        return None;
    }
    let numbers = view.to_f64();
    Some(if numbers.len() == 1 { vec![numbers[0]; outputs as usize] } else { numbers })
}

/// Whether numbers keep their precision as an element type: all are finite, and the largest is not below the smallest normal number.
/// What is rounded away of the others is no more than a rounding of the largest.
fn hold(dtype: DType, numbers: &[f64]) -> bool {
    let most = numbers.iter().map(|&number| rounded(dtype, number).abs()).fold(0.0, |a, b| if b <= a { a } else { b });
    let least = match dtype {
        DType::F64 => f64::MIN_POSITIVE,
        DType::F16 => half::f16::MIN_POSITIVE.to_f64(),
        _ => f64::from(f32::MIN_POSITIVE),
    };
    most.is_finite() && (most >= least || numbers.iter().all(|&number| number == 0.0))
}

/// A number that is added to each output, or that it is multiplied with, becomes a part of the weights: a batch norm of a model that is
/// not trained is four of these.
pub fn affine(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    // In the order of a batch norm's steps, so that one round finds all of them.
    for kind in [BinaryKind::Sub, BinaryKind::Div, BinaryKind::Mul, BinaryKind::Add] {
        for conv in plain() {
            count += rewrite(graph, &binary(kind, conv, any("c")), |graph, found| {
                let value = found.value("conv");
                let numbers = per_output(graph, found.value("c"), value)?;
                let (conv, mut inputs) = made(graph, value)?;
                let weight = graph.constant(found.value("w"))?;
                let bias = match found.get("b") {
                    Some(bias) => graph.constant(bias)?.view().to_f64(),
                    None => vec![0.0; numbers.len()],
                };
                let (dtype, name) = (weight.view().dtype(), weight.name().to_owned());
                let scale = match kind {
                    BinaryKind::Mul => numbers.clone(),
                    BinaryKind::Div => numbers.iter().map(|number| 1.0 / number).collect(),
                    _ => vec![1.0; numbers.len()],
                };
                // What is no number, or would not be one, stays where it is.
                if scale.iter().any(|number| !number.is_finite()) {
                    return None;
                }
                let shifted = |(i, bias): (usize, f64)| match kind {
                    BinaryKind::Add => bias + numbers[i],
                    BinaryKind::Sub => bias - numbers[i],
                    _ => bias * scale[i],
                };
                let shifted: Vec<f64> = bias.into_iter().enumerate().map(shifted).collect();
                if !hold(dtype, &shifted) {
                    return None;
                }
                if scale.iter().any(|&number| number != 1.0) {
                    let mut weights = weight.view().to_f64();
                    let per_output = weights.len() / numbers.len().max(1);
                    for (weights, scale) in weights.chunks_mut(per_output.max(1)).zip(&scale) {
                        weights.iter_mut().for_each(|weight| *weight *= scale);
                        if !hold(dtype, weights) {
                            return None;
                        }
                    }
                    let scaled = Tensor::from_f64(dtype, weight.view().shape(), &weights);
                    inputs[1] = Some(graph.add_constant(Constant::owned(&format!("{name}.scaled"), scaled)));
                }
                if shifted.iter().any(|&number| number != 0.0) || inputs.len() > 2 {
                    let shifted = Tensor::from_f64(dtype, &[numbers.len() as i64], &shifted);
                    let shifted = graph.add_constant(Constant::owned(&format!("{name}.shifted"), shifted));
                    inputs.truncate(2);
                    inputs.push(Some(shifted));
                }
                Some((conv.into(), inputs))
            })?;
        }
    }
    Ok(count)
}

/// An activation of a convolution becomes a part of it.
pub fn activation(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for conv in plain() {
        count += rewrite(graph, &any_activation(conv), |graph, found| {
            let Op::Unary(unary) = &graph.made_by(found.value("activation"))?.1.op else { return None };
            let activation = Activation::of(unary.kind)?;
            let (conv, inputs) = made(graph, found.value("conv"))?;
            Some((Conv { activation, ..conv }.into(), inputs))
        })?;
    }
    Ok(count)
}
