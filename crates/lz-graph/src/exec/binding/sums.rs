//! Norms of sums: the sum goes to scratch memory, and a norm of the catalog reads it there.

use lz_cpu::primitives::{BinaryOp, Primitive};

use super::primitives::bound;
use super::{Arg, At, Candidate, Site, catalog};
use crate::ops::Op;
use crate::ops::add_layer_norm::AddLayerNorm;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::rms_norm::{AddRmsNorm, RmsNorm};

/// A layer norm of a sum.
pub(super) fn add_layer_norm(site: &Site<'_>, op: &AddLayerNorm) -> Vec<Candidate> {
    let norm = LayerNorm { eps: op.eps, axes: 1 };
    summed(site, |site| catalog::layer_norm(site, &norm))
}

/// A norm by the root mean square of a sum.
pub(super) fn add_rms_norm(site: &Site<'_>, op: &AddRmsNorm) -> Vec<Candidate> {
    let norm = RmsNorm { eps: op.eps };
    summed(site, |site| catalog::rms_norm(site, &norm))
}

/// The candidates of a norm, each after the sum of the first two inputs.
fn summed(site: &Site<'_>, norm: impl Fn(&Site<'_>) -> Vec<Candidate>) -> Vec<Candidate> {
    let output = site.output;
    let sum = Arg { at: At::Scratch(0), strides: lz_abi::row_major(&output.shape), ..output.clone() };
    let bytes = output.dtype.bytes_for(output.shape.iter().product::<i64>() as usize).next_multiple_of(64);
    let inputs = vec![site.inputs[0].clone(), site.inputs[1].clone()];
    let params = vec![BinaryOp::Add.param()];
    let mut first = bound(Primitive::Binary, inputs, sum.clone(), params, site.terms);
    first.reserved = bytes;
    let mut rest = vec![Some(sum)];
    rest.extend(site.inputs[2..].iter().cloned());
    let op: &Op = site.op;
    let normed = norm(&Site { op, inputs: &rest, output, over: &[], terms: site.terms });
    normed
        .into_iter()
        .map(|mut one| {
            one.calls.iter_mut().for_each(|call| call.reserved = bytes);
            one.calls.insert(0, first.clone());
            Candidate { name: format!("add+{}", one.name), ..one }
        })
        .collect()
}
