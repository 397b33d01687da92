//! Kernels that are no operation of the catalog: elementwise functions, copies, products.

use lz_abi::{DType, Param};
use lz_cpu::primitives::{Activation, BinaryOp, Meta, Primitive, UnaryOp};

use super::linear::products;
use super::{Arg, Bound, Candidate, Site, Terms, reductions};
use crate::exec::kernel::Kernel;
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::elements::Number;
use crate::ops::gated::Gated;
use crate::ops::matmul::MatMul;
use crate::ops::unary::UnaryKind;

/// Whether every element type is one that elementwise primitives compute with for all of their functions. In place nothing but
/// what is sure to work may run: there is no second try.
fn floats(args: &[&Arg]) -> bool {
    args.iter().all(|arg| matches!(arg.dtype, DType::F64 | DType::F32 | DType::F16 | DType::Bf16))
}

/// A call of a primitive.
pub(super) fn bound(
    primitive: Primitive,
    inputs: Vec<Option<Arg>>,
    output: Arg,
    params: Vec<Param>,
    terms: Terms<'_>,
) -> Bound {
    let metas: Vec<Option<Meta<'_>>> =
        inputs.iter().map(|arg| arg.as_ref().map(|arg| Meta { dtype: arg.dtype, shape: &arg.shape })).collect();
    let scratch = primitive.scratch(&metas, &params, terms.threads);
    let kernel = Kernel::Primitive(primitive, terms.instructions());
    Bound { kernel, inputs, outputs: vec![output], params, dims: Vec::new(), scratch, reserved: 0 }
}

/// A candidate of one call.
pub(super) fn one(site: &Site<'_>, primitive: Primitive, params: Vec<Param>, in_place: &'static [usize]) -> Candidate {
    let inputs = site.read();
    Candidate {
        name: format!("primitive.{}", primitive.name()),
        calls: vec![bound(primitive, inputs, site.output.clone(), params, site.terms)],
        in_place,
    }
}

/// The operation of a primitive for a function of two numbers.
fn binary(kind: BinaryKind, dtype: DType) -> BinaryOp {
    let truth = dtype == DType::Bool;
    match kind {
        BinaryKind::Add => BinaryOp::Add,
        BinaryKind::Sub => BinaryOp::Sub,
        BinaryKind::Mul => BinaryOp::Mul,
        BinaryKind::Div => BinaryOp::Div,
        BinaryKind::Pow => BinaryOp::Pow,
        BinaryKind::Max => BinaryOp::Max,
        BinaryKind::Min => BinaryOp::Min,
        BinaryKind::Remainder => BinaryOp::Mod,
        BinaryKind::FloorDiv => BinaryOp::FloorDiv,
        BinaryKind::Eq => BinaryOp::Eq,
        BinaryKind::Ne => BinaryOp::Ne,
        BinaryKind::Lt => BinaryOp::Lt,
        BinaryKind::Le => BinaryOp::Le,
        BinaryKind::Gt => BinaryOp::Gt,
        BinaryKind::Ge => BinaryOp::Ge,
        BinaryKind::And if truth => BinaryOp::LogicalAnd,
        BinaryKind::Or if truth => BinaryOp::LogicalOr,
        BinaryKind::Xor if truth => BinaryOp::LogicalXor,
        BinaryKind::And => BinaryOp::And,
        BinaryKind::Or => BinaryOp::Or,
        BinaryKind::Xor => BinaryOp::Xor,
    }
}

/// The operation of a primitive for a function of one number.
pub(super) fn unary(kind: UnaryKind) -> UnaryOp {
    match kind {
        UnaryKind::Neg => UnaryOp::Neg,
        UnaryKind::Abs => UnaryOp::Abs,
        UnaryKind::Sign => UnaryOp::Sign,
        UnaryKind::Exp => UnaryOp::Exp,
        UnaryKind::Log => UnaryOp::Log,
        UnaryKind::Sqrt => UnaryOp::Sqrt,
        UnaryKind::Rsqrt => UnaryOp::Rsqrt,
        UnaryKind::Reciprocal => UnaryOp::Reciprocal,
        UnaryKind::Sin => UnaryOp::Sin,
        UnaryKind::Cos => UnaryOp::Cos,
        UnaryKind::Tanh => UnaryOp::Tanh,
        UnaryKind::Sigmoid => UnaryOp::Sigmoid,
        UnaryKind::Relu => UnaryOp::Relu,
        UnaryKind::Silu => UnaryOp::Silu,
        UnaryKind::Erf => UnaryOp::Erf,
        UnaryKind::Gelu => UnaryOp::Gelu,
        UnaryKind::GeluTanh => UnaryOp::GeluTanh,
        UnaryKind::Floor => UnaryOp::Floor,
        UnaryKind::Ceil => UnaryOp::Ceil,
        UnaryKind::Round => UnaryOp::Round,
        UnaryKind::Not => UnaryOp::LogicalNot,
    }
}

/// A number of an element type as a parameter.
fn number(number: Number, dtype: DType) -> Param {
    match number.of_type(dtype) {
        Number::Float(x) => Param::Float(x),
        Number::Int(i) => Param::Int(i),
    }
}

/// The name of an activation as a parameter of products.
pub(super) fn activation(name: &str) -> Param {
    Activation::named(name).unwrap_or(Activation::None).param()
}

/// The primitive of a node, if there is one.
pub(super) fn candidates(site: &Site<'_>) -> Vec<Candidate> {
    let given = || site.inputs.iter().flatten().collect::<Vec<_>>();
    let in_place = |inputs: &'static [usize]| if floats(&given()) && floats(&[site.output]) { inputs } else { &[] };
    let copy = |arg: Arg| {
        let call = bound(Primitive::Copy, vec![Some(arg)], site.output.clone(), Vec::new(), site.terms);
        vec![Candidate { name: "primitive.copy".into(), calls: vec![call], in_place: &[] }]
    };
    match site.op {
        Op::Binary(op) => {
            let kind = binary(op.kind, site.need(0).dtype);
            vec![one(site, Primitive::Binary, vec![kind.param()], in_place(&[0, 1]))]
        }
        Op::Unary(op) if !unary(op.kind).takes(site.need(0).dtype) => Vec::new(),
        Op::Unary(op) => vec![one(site, Primitive::Unary, vec![unary(op.kind).param()], in_place(&[0]))],
        Op::Gated(op) => gated(site, op),
        Op::Where(_) => vec![one(site, Primitive::Where, Vec::new(), &[])],
        Op::Cast(_) => vec![one(site, Primitive::Cast, Vec::new(), &[])],
        Op::Full(op) => vec![one(site, Primitive::Fill, vec![number(op.value, op.dtype)], &[])],
        Op::Permute(op) => copy(site.need(0).permuted(&op.axes)),
        Op::Expand(_) => copy(site.need(0).clone()),
        Op::Reshape(_) => reshape(site),
        Op::Slice(op) => {
            let arg = site.need(0);
            let rank = arg.shape.len() as i64;
            let axis = if op.axis < 0 { op.axis + rank } else { op.axis } as usize;
            let Some(start) = op.start.known() else { return Vec::new() };
            let size = arg.shape[axis];
            let start = if start < 0 { start + size } else { start }.clamp(0, size);
            let mut params = vec![Param::None; 2 * axis];
            params.extend([Param::Int(start), Param::Int(op.step)]);
            vec![one(site, Primitive::Slice, params, &[])]
        }
        Op::Concat(op) => vec![one(site, Primitive::Concat, vec![Param::Int(op.axis)], &[])],
        Op::Pad(op) => {
            let before: Option<Vec<i64>> = op.pads.iter().map(|(before, _)| before.known()).collect();
            let Some(before) = before.filter(|before| before.iter().all(|&n| n >= 0)) else { return Vec::new() };
            let after = op.pads.iter().all(|(_, after)| after.known().is_some_and(|n| n >= 0));
            let params = std::iter::once(number(op.value, site.output.dtype)).chain(before.into_iter().map(Param::Int));
            let params = params.collect();
            if after { vec![one(site, Primitive::Pad, params, &[])] } else { Vec::new() }
        }
        Op::Iota(op) => {
            let Some(start) = op.start.known() else { return Vec::new() };
            vec![one(site, Primitive::Iota, vec![Param::Int(start), Param::Int(op.step)], &[])]
        }
        Op::Triangle(op) => {
            let params = vec![Param::Bool(op.upper), Param::Int(op.diagonal)];
            vec![one(site, Primitive::Triangle, params, in_place(&[0]))]
        }
        Op::Gather(op) => vec![one(site, Primitive::Gather, vec![Param::Int(op.axis)], &[])],
        Op::IndexSelect(op) => vec![one(site, Primitive::IndexSelect, vec![Param::Int(op.axis)], &[])],
        // Wrong indices are found before anything is written.
        Op::IndexCopy(op) => vec![one(site, Primitive::IndexCopy, vec![Param::Int(op.axis)], &[0])],
        Op::IndexPut(op) => vec![one(site, Primitive::IndexPut, vec![Param::Bool(op.accumulate)], &[0])],
        Op::MatMul(op) => matmul(site, op),
        Op::Reduce(op) => reductions::reduce(site, op),
        Op::ArgReduce(op) => reductions::arg_reduce(site, op),
        Op::CumSum(op) => vec![one(site, Primitive::Cumsum, vec![Param::Int(op.axis)], &[])],
        _ => Vec::new(),
    }
}

/// A copy of a tensor that lies row-major, or that the result's sizes only cut up further.
fn reshape(site: &Site<'_>) -> Vec<Candidate> {
    let (from, to) = (site.need(0), site.output);
    if !to.is_row_major() {
        return Vec::new();
    }
    // The result with the sizes of the input: the same row-major elements.
    let shaped = Arg { shape: from.shape.clone(), strides: lz_abi::row_major(&from.shape), ..to.clone() };
    let call = bound(Primitive::Copy, vec![Some(from.clone())], shaped, Vec::new(), site.terms);
    vec![Candidate { name: "primitive.copy".into(), calls: vec![call], in_place: &[] }]
}

/// The function of the gate into the result, and what it is multiplied with.
fn gated(site: &Site<'_>, op: &Gated) -> Vec<Candidate> {
    // The gate may be written over, and `up` is read after that: it must be another value.
    if site.is_over(1) {
        return Vec::new();
    }
    let gate = site.read().swap_remove(0);
    let (kind, terms, out) = (unary(op.kind.function()), site.terms, || site.output.clone());
    let first = bound(Primitive::Unary, vec![gate], out(), vec![kind.param()], terms);
    let second =
        bound(Primitive::Binary, vec![None, site.inputs[1].clone()], out(), vec![BinaryOp::Mul.param()], terms);
    let in_place: &[usize] = if floats(&[site.output]) { &[0] } else { &[] };
    vec![Candidate { name: format!("primitive.{}+mul", kind.name()), calls: vec![first, second], in_place }]
}

/// Whether there are products of matrices of an element type. In place there is no second try.
pub(super) fn multiplies(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::Bf16)
}

/// A product of matrices.
fn matmul(site: &Site<'_>, op: &MatMul) -> Vec<Candidate> {
    if !multiplies(site.need(0).dtype) {
        return Vec::new();
    }
    let params = vec![Param::Bool(op.transpose_a), Param::Bool(op.transpose_b), Param::Float(op.alpha)];
    products(site, "primitive.matmul", site.read(), site.output, params, &[])
}
