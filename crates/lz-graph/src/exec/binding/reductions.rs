//! Reductions along axes.

use lz_abi::Param;
use lz_cpu::primitives::{Primitive, ReduceOp};

use super::primitives::one;
use super::{Candidate, Site};
use crate::ops::argreduce::{ArgKind, ArgReduce};
use crate::ops::reduce::{Reduce, ReduceKind};

/// A number of all elements along some axes.
pub(super) fn reduce(site: &Site<'_>, op: &Reduce) -> Vec<Candidate> {
    // For the primitive, no axes are all axes.
    if op.axes.is_empty() {
        return Vec::new();
    }
    let kind = match op.kind {
        ReduceKind::Sum => ReduceOp::Sum,
        ReduceKind::Mean => ReduceOp::Mean,
        ReduceKind::Max => ReduceOp::Max,
        ReduceKind::Min => ReduceOp::Min,
        ReduceKind::Prod => ReduceOp::Prod,
        ReduceKind::Any => ReduceOp::Any,
        ReduceKind::All => ReduceOp::All,
    };
    let params = std::iter::once(kind.param()).chain(op.axes.iter().copied().map(Param::Int)).collect();
    vec![one(site, Primitive::Reduce, params, &[])]
}

/// The place of the largest or smallest element.
pub(super) fn arg_reduce(site: &Site<'_>, op: &ArgReduce) -> Vec<Candidate> {
    let kind = match op.kind {
        ArgKind::Argmax => ReduceOp::Max,
        ArgKind::Argmin => ReduceOp::Min,
    };
    let params = std::iter::once(kind.param()).chain(op.axis.map(Param::Int)).collect();
    vec![one(site, Primitive::ArgReduce, params, &[])]
}
