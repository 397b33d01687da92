//! Rotary embeddings.

use lz_abi::{DType, Param};
use lz_cpu::primitives::{BinaryOp, Primitive};
use lz_model::{Layout, ParamValue};

use super::catalog::Call;
use super::primitives::bound;
use super::{Arg, At, Candidate, Site};
use crate::ops::rope::Rope;

/// All ways to rotate.
pub(super) fn candidates(site: &Site<'_>, op: &Rope) -> Vec<Candidate> {
    let mut found = catalog(site, op);
    found.extend(primitive(site, op));
    found
}

/// Rotary embeddings with one column for each pair. With one for each element both halves may have other angles.
fn catalog(site: &Site<'_>, op: &Rope) -> Vec<Candidate> {
    let (x, cos, sin) = (site.need(0), site.need(1), site.need(2));
    let table = |arg: &Arg| {
        let rank = arg.shape.len();
        let whole = rank >= 2 && arg.shape[..rank - 2].iter().all(|&n| n == 1);
        whole.then(|| Arg {
            shape: arg.shape[rank - 2..].into(),
            strides: arg.strides[rank - 2..].into(),
            ..arg.clone()
        })
    };
    let (Some(cos), Some(sin), 4) = (table(cos), table(sin), x.shape.len()) else { return Vec::new() };
    let fits = 2 * cos.shape[1] == x.shape[3] && cos.shape[0] == x.shape[2] && x.dtype != DType::F64;
    if !fits {
        return Vec::new();
    }
    let inputs = [("input", Some(x)), ("cos", Some(&cos)), ("sin", Some(&sin))];
    let params = [("interleaved", ParamValue::Bool(op.interleaved))];
    let layout = Some(Layout::Bhsd);
    Call { op: "posenc.rope", inputs: &inputs, params: &params, layout, output: site.output }.candidates(site)
}

/// The halves of the pairs along the last axis: the first elements, and the second ones.
fn halves(arg: &Arg, interleaved: bool) -> [Arg; 2] {
    let axis = arg.shape.len() - 1;
    let half = arg.shape[axis] / 2;
    match interleaved {
        true => [arg.part(axis, 0, half, 2), arg.part(axis, 1, half, 2)],
        false => [arg.part(axis, 0, half, 1), arg.part(axis, half, half, 1)],
    }
}

/// Products and sums of halves, for tables of any kind: `a·cos - b·sin` and `b·cos + a·sin`.
fn primitive(site: &Site<'_>, op: &Rope) -> Option<Candidate> {
    let (x, cos, sin) = (site.need(0), site.need(1), site.need(2));
    let width = *x.shape.last()?;
    if width % 2 != 0 || x.dtype.bits() < 8 {
        return None;
    }
    let table = |arg: &Arg| match arg.shape.last() {
        Some(&columns) if columns == width => halves(arg, op.interleaved),
        _ => [arg.clone(), arg.clone()],
    };
    let ([a, b], [to_a, to_b]) = (halves(x, op.interleaved), halves(site.output, op.interleaved));
    let ([cos_a, cos_b], [sin_a, sin_b]) = (table(cos), table(sin));
    // What is added to the product that is stored first.
    let other = Arg { at: At::Scratch(0), strides: lz_abi::row_major(&a.shape), ..a.clone() };
    let bytes = other.dtype.bytes_for(other.shape.iter().product::<i64>() as usize).next_multiple_of(64);
    let call = |kind: BinaryOp, left: Option<&Arg>, right: &Arg, to: &Arg| {
        let params: Vec<Param> = vec![kind.param()];
        let inputs = vec![left.cloned(), Some(right.clone())];
        let mut call = bound(Primitive::Binary, inputs, to.clone(), params, site.terms);
        call.reserved = bytes;
        call
    };
    let calls = vec![
        call(BinaryOp::Mul, Some(&b), &sin_a, &other),
        call(BinaryOp::Mul, Some(&a), &cos_a, &to_a),
        call(BinaryOp::Sub, None, &other, &to_a),
        call(BinaryOp::Mul, Some(&a), &sin_b, &other),
        call(BinaryOp::Mul, Some(&b), &cos_b, &to_b),
        call(BinaryOp::Add, None, &other, &to_b),
    ];
    Some(Candidate { name: "primitive.rope".into(), calls, in_place: &[] })
}
