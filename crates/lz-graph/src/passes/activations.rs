//! Activations that are written out, and gates.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use super::pattern::{any, binary, node, one_of, rewrite, square, unary};
use crate::ir::{Graph, GraphError};
use crate::ops::Op;
use crate::ops::binary::BinaryKind;
use crate::ops::gated::{Gated, GatedKind};
use crate::ops::unary::{Unary, UnaryKind};

/// `x · (1 + erf(x / √2)) / 2`, and the form with tanh.
pub fn gelu(graph: &mut Graph) -> Result<usize, GraphError> {
    let x = || any("x");
    let erf = x() * (unary(UnaryKind::Erf, x() * FRAC_1_SQRT_2) + 1.0) * 0.5;
    let cube = one_of([x().pow(3.0) * 0.044715, x() * x() * x() * 0.044715, x() * square(x()) * 0.044715]);
    let outer = (2.0 / PI).sqrt();
    let inner = one_of([
        (x() + cube) * outer,
        // √(2/π) · x · (1 + 0.044715 · x²)
        x() * (one_of([square(x()) * 0.044715, x() * x() * 0.044715]) + 1.0) * outer,
    ]);
    let tanh = x() * (unary(UnaryKind::Tanh, inner) + 1.0) * 0.5;
    let become_ = |graph: &mut Graph, pattern, kind| {
        rewrite(graph, pattern, |_, found| Some((Unary { kind }.into(), vec![found.input("x")])))
    };
    Ok(become_(graph, &erf, UnaryKind::Gelu)? + become_(graph, &tanh, UnaryKind::GeluTanh)?)
}

/// `x · sigmoid(x)`.
pub fn silu(graph: &mut Graph) -> Result<usize, GraphError> {
    let silu = any("x") * unary(UnaryKind::Sigmoid, any("x"));
    rewrite(graph, &silu, |_, found| Some((Unary { kind: UnaryKind::Silu }.into(), vec![found.input("x")])))
}

/// `f(gate) · up` of tensors of the same sizes.
pub fn gated(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for kind in [GatedKind::SiluMul, GatedKind::GeluMul, GatedKind::GeluTanhMul] {
        let pattern = binary(BinaryKind::Mul, unary(kind.function(), any("gate")), any("up"));
        count += rewrite(graph, &pattern, |_, found| {
            Some((Gated { kind }.into(), vec![found.input("gate"), found.input("up")]))
        })?;
    }
    Ok(count)
}

/// An operation on one value that is an activation.
pub fn is_activation(op: &Op) -> bool {
    matches!(op, Op::Unary(Unary { kind }) if crate::ops::linear::Activation::of(*kind).is_some())
}

/// Any activation of a value.
pub fn activation(input: super::pattern::Pattern) -> super::pattern::Pattern {
    node(is_activation, [input]).named("activation")
}
