//! Kernels of float64, which the catalog's operations have none of.

use lz_abi::{DType, Param};
use lz_cpu::primitives::Primitive;

use super::primitives::{bound, one};
use super::{Arg, Candidate, Site};
use crate::ops::attention::Attention;

/// Whether the elements of each row follow each other.
fn has_rows(arg: &Arg) -> bool {
    arg.shape.last().zip(arg.strides.last()).is_none_or(|(&n, &stride)| n == 1 || stride == 1)
}

/// A primitive of rows: of its first input, with numbers for each column.
pub(super) fn rows(
    site: &Site<'_>,
    primitive: Primitive,
    inputs: &[Option<&Arg>],
    output: &Arg,
    params: Vec<Param>,
) -> Vec<Candidate> {
    let doubles = inputs.iter().flatten().all(|input| input.dtype == DType::F64);
    let [Some(x), columns @ ..] = inputs else { return Vec::new() };
    if !doubles || !has_rows(x) || !output.is_row_major() || !columns.iter().flatten().all(|arg| arg.is_row_major()) {
        return Vec::new();
    }
    let inputs = inputs.iter().map(|arg| arg.cloned()).collect();
    let call = bound(primitive, inputs, output.clone(), params, site.terms);
    vec![Candidate { name: format!("primitive.{}", primitive.name()), calls: vec![call], in_place: &[] }]
}

/// Attention, with a mask and bounds alike.
pub(super) fn attention(site: &Site<'_>, op: &Attention) -> Vec<Candidate> {
    if site.get(3).is_some_and(|mask| !matches!(mask.dtype, DType::Bool | DType::F64)) {
        return Vec::new();
    }
    let [queries, keys] = [0, 1].map(|at| site.need(at).shape[2]);
    let params = vec![
        Param::Int(if op.top_left { 0 } else { keys - queries }),
        Param::Bool(op.causal),
        op.window.map_or(Param::None, Param::Int),
        op.scale.map_or(Param::None, Param::Float),
        op.softcap.map_or(Param::None, Param::Float),
    ];
    vec![one(site, Primitive::Attention, params, &[])]
}
