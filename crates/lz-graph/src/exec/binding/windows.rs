//! Convolutions and pools.

use lz_abi::{DType, Param};
use lz_cpu::primitives::{PoolOp, Primitive};

use super::primitives::{activation, one, unary};
use super::{Candidate, Site};
use crate::ops::conv::Conv;
use crate::ops::pool::{Pool, PoolKind};

/// A number for each axis as parameters.
fn numbers<'a>(of: &'a [&'a [i64]]) -> impl Iterator<Item = Param> + 'a {
    of.iter().flat_map(|axes| axes.iter().copied().map(Param::Int))
}

/// Whether the primitives take it: floats that are computed as float32, or row-major float64, into a row-major result.
fn takes(site: &Site<'_>) -> bool {
    let inputs = || site.inputs.iter().flatten();
    site.output.is_row_major()
        && match site.output.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => true,
            DType::F64 => inputs().all(|input| input.dtype == DType::F64 && input.is_row_major()),
            _ => false,
        }
}

/// A convolution.
pub(super) fn conv(site: &Site<'_>, op: &Conv) -> Vec<Candidate> {
    if !takes(site) || !site.need(1).is_row_major() {
        return Vec::new();
    }
    let name = op.activation.kind().map_or("none", |kind| unary(kind).name());
    let first = [Param::Int(op.groups), activation(name)];
    let params = first.into_iter().chain(numbers(&[&op.stride, &op.padding, &op.dilation])).collect();
    vec![one(site, Primitive::Conv, params, &[])]
}

/// The largest or the mean of windows.
pub(super) fn pool(site: &Site<'_>, op: &Pool) -> Vec<Candidate> {
    if !takes(site) {
        return Vec::new();
    }
    let kind = match op.kind {
        PoolKind::Max => PoolOp::Max,
        PoolKind::Avg => PoolOp::Avg,
    };
    let first = [kind.param(), Param::Bool(op.count_padding)];
    let params = first.into_iter().chain(numbers(&[&op.kernel, &op.stride, &op.padding])).collect();
    vec![one(site, Primitive::Pool, params, &[])]
}
