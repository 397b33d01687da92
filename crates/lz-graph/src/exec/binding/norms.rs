//! Layer norms of several axes, and norms of groups of channels: as layer norms of rows.

use lz_abi::{DType, row_major};
use lz_cpu::primitives::{BinaryOp, Primitive};

use super::sequence::Sequence;
use super::{Arg, Candidate, Site, catalog};
use crate::ops::group_norm::GroupNorm;
use crate::ops::layer_norm::LayerNorm;

/// The same elements with other sizes, of a tensor that lies row-major.
fn reshaped(arg: &Arg, shape: &[i64]) -> Option<Arg> {
    arg.is_row_major().then(|| Arg { shape: shape.into(), strides: row_major(shape), ..arg.clone() })
}

/// A layer norm: of the last axes as of one.
pub(super) fn layer_norm(site: &Site<'_>, op: &LayerNorm) -> Vec<Candidate> {
    if op.axes == 1 {
        return catalog::layer_norm(site, op);
    }
    let shape = &site.output.shape;
    let (leading, last) = shape.split_at(shape.len() - op.axes);
    let width: i64 = last.iter().product();
    let flat = [leading, &[width]].concat();
    let given = |at: usize, shape: &[i64]| site.get(at).map_or(Some(None), |arg| reshaped(arg, shape).map(Some));
    let row = [width];
    let (Some(x), Some(weight), Some(bias), Some(output)) =
        (given(0, &flat), given(1, &row), given(2, &row), reshaped(site.output, &flat))
    else {
        return Vec::new();
    };
    let (op, inputs) = (LayerNorm { axes: 1, ..op.clone() }, [x, weight, bias]);
    catalog::layer_norm(&Site { inputs: &inputs, output: &output, over: &[], ..*site }, &op)
}

/// A norm of groups of channels: a layer norm of each group, then the weight and the bias of each channel.
pub(super) fn group_norm(site: &Site<'_>, op: &GroupNorm) -> Vec<Candidate> {
    let (x, shape) = (site.need(0), &site.output.shape);
    let (images, channels, inside) = (shape[0], shape[1], shape[2..].iter().product::<i64>());
    let (planes, rows) = ([images, channels, inside], [images * op.groups, channels / op.groups * inside]);
    let (Some(x), Some(output)) = (reshaped(x, &planes), reshaped(site.output, &planes)) else { return Vec::new() };
    if planes.contains(&0) {
        return Vec::new();
    }
    let scaled = site.get(1).or(site.get(2)).is_some();
    // Halves are rounded once, at the end.
    let narrow = scaled && matches!(x.dtype, DType::F16 | DType::Bf16);
    let dtype = if narrow { DType::F32 } else { x.dtype };
    let mut sequence = Sequence::new(site.terms);
    let x = sequence.cast(&x, dtype);
    let normed = if narrow { sequence.scratch(dtype, &planes) } else { output.clone() };
    for (at, kind) in [(1, BinaryOp::Mul), (2, BinaryOp::Add)] {
        let Some(numbers) = site.get(at) else { continue };
        let numbers = sequence.cast(numbers, dtype);
        let column = Arg {
            shape: [channels, 1].as_slice().into(),
            strides: [numbers.strides[0], 1].as_slice().into(),
            ..numbers
        };
        sequence.after(Primitive::Binary, vec![None, Some(column)], &normed, vec![kind.param()]);
    }
    if narrow {
        sequence.after(Primitive::Cast, vec![Some(normed.clone())], &output, Vec::new());
    }
    let (Some(input), Some(result)) = (reshaped(&x, &rows), reshaped(&normed, &rows)) else { return Vec::new() };
    let norm = LayerNorm { eps: op.eps, axes: 1 };
    let site = Site { inputs: &[Some(input)], output: &result, over: &[], ..*site };
    sequence.around(catalog::layer_norm(&site, &norm), "groups")
}
