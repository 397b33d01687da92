//! Attention that is written out: `softmax(q·kᵀ·scale + mask)·v`.

use super::absorb::scaled;
use super::pattern::{Match, Pattern, any, binary, maybe_cast, node, one_of, rewrite, some_number, unary};
use crate::ir::{Constant, Dim, Graph, GraphError, NodeId, Shape, ValueId};
use crate::ops::Op;
use crate::ops::attention::Attention;
use crate::ops::binary::BinaryKind;
use crate::ops::matmul::MatMul;
use crate::ops::permute::Permute;
use crate::ops::reshape::Reshape;
use crate::ops::select::Where;
use crate::ops::unary::{Unary, UnaryKind};

/// What stands in the place of scores that do not count. A truth value says the same: its weight is 0 in float64 as
/// long as
/// no score is that large itself.
pub fn is_masked(number: f64, dtype: lz_abi::DType) -> bool {
    number <= -1e9 || number <= lz_abi::numeric::lowest(dtype)
}

fn product(name: &'static str, left: Pattern, right: Pattern) -> Pattern {
    node(|op| matches!(op, Op::MatMul(_)), [left, right]).named(name)
}

fn matmul(graph: &Graph, value: ValueId) -> Option<&MatMul> {
    match graph.made_by(value).map(|(_, node)| &node.op) {
        Some(Op::MatMul(product)) => Some(product),
        _ => None,
    }
}

/// A value with axes of size 1 before its own, up to four. Attention has four axes.
fn four_axes(graph: &mut Graph, value: ValueId) -> Option<ValueId> {
    let meta = graph.meta(value).clone();
    if meta.rank() == 4 {
        return Some(value);
    }
    let mut shape = vec![Dim::from(1); 4usize.checked_sub(meta.rank())?];
    shape.extend(meta.shape);
    let name = format!("{}_4d", graph.value(value).name);
    graph.push(Reshape { shape }.into(), &[Some(value)], &name, "").ok()
}

/// k as (…, keys, width). A product reads it so if it is transposed; a permute before it can be made to give it so.
fn keys(graph: &mut Graph, product: &MatMul, k: ValueId) -> Option<ValueId> {
    if product.transpose_b {
        return Some(k);
    }
    let permuted = matches!(graph.made_by(k)?.1.op, Op::Permute(_));
    let rank = graph.meta(k).rank();
    let turned = Permute::swap(rank, rank - 2, rank - 1);
    permuted.then(|| graph.push(turned.into(), &[Some(k)], &format!("{}_rows", graph.value(k).name), "").ok()).flatten()
}

/// Adds attention behind the values of a match, with four axes.
fn attend(graph: &mut Graph, found: &Match, softcap: Option<f64>, shape: &Shape) -> Option<(Op, Vec<Option<ValueId>>)> {
    let (scores, weighted) = (matmul(graph, found.value("scores"))?.clone(), matmul(graph, found.value("result"))?);
    if scores.transpose_a || weighted.transpose_a || weighted.transpose_b || weighted.alpha != 1.0 {
        return None;
    }
    // Softmax over the keys.
    let weights = found.value("weights");
    let Op::Softmax(softmax) = &graph.made_by(weights)?.1.op else { return None };
    let meta = graph.meta(weights);
    if meta.axis(softmax.axis).ok()? + 1 != meta.rank() {
        return None;
    }
    let (q, k, v) = (found.value("q"), found.value("k"), found.value("v"));
    let rank = graph.meta(q).rank();
    if [k, v].iter().any(|&one| graph.meta(one).rank() != rank) || !(2..=4).contains(&rank) {
        return None;
    }
    // Leading axes that are broadcast are not the heads that attention shares.
    let leading = |value: ValueId| graph.meta(value).shape[..rank - 2].to_vec();
    if leading(q) != leading(k) || leading(q) != leading(v) {
        return None;
    }
    let k = keys(graph, &scores, k)?;
    let scale = match softcap {
        Some(cap) => scores.alpha * cap,
        None => scores.alpha,
    };
    let mask = match found.get("mask") {
        Some(mask) if graph.meta(mask).rank() > 2 && rank < 4 => Some(four_axes(graph, mask)?),
        other => other,
    };
    let op = Op::from(Attention { causal: false, top_left: false, scale: Some(scale), window: None, softcap });
    let mut inputs = Vec::new();
    for value in [q, k, v] {
        inputs.push(Some(four_axes(graph, value)?));
    }
    inputs.extend(mask.map(Some));
    if rank == 4 {
        return Some((op, inputs));
    }
    let whole = graph.push(op, &inputs, "attention", "").ok()?;
    Some((Reshape { shape: shape.to_vec() }.into(), vec![Some(whole)]))
}

/// The mask that says the same as a choice between scores and a number.
///
/// With -inf the choice is the mask: a query without any key has a weight of NaN for each, and attention gives 0. A
/// finite number
/// gives such a query the mean of all values. So does the number as a mask that is added, if it is so large that the
/// scores are
/// lost in the sum; for a smaller one, each query must have a key.
fn chosen_mask(graph: &mut Graph, found: &Match) -> Option<ValueId> {
    let (keep, masked) = (found.value("keep"), found.value("masked"));
    let (out, dtype) = (found.number(graph, "masked"), graph.meta(masked).dtype);
    if out == f64::NEG_INFINITY {
        return Some(keep);
    }
    if out <= -1e30 {
        let zero = graph.add_constant(Constant::number("zero", dtype, 0.0));
        return graph.push(Where {}.into(), &[Some(keep), Some(zero), Some(masked)], "mask", "").ok();
    }
    let causal = super::masks::leaves_a_key(graph, found.value("q"), found.value("scores"), keep);
    (is_masked(out, dtype) && causal).then_some(keep)
}

/// Finds attention, with a mask that is added, one that chooses, or none.
pub fn attention(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for capped in [false, true] {
        let scores = || {
            let plain = product("scores", any("q"), any("k"));
            match capped {
                false => plain,
                // cap · tanh(scores / cap); the division is in alpha already.
                true => binary(BinaryKind::Mul, unary(UnaryKind::Tanh, plain), some_number("cap")),
            }
        };
        let chosen = node(|op| matches!(op, Op::Where(_)), [any("keep"), maybe_cast(scores()), some_number("masked")]);
        // As `masked_fill` says it.
        let filled = node(|op| matches!(op, Op::Where(_)), [any("drop"), some_number("masked"), maybe_cast(scores())]);
        let added = binary(BinaryKind::Add, maybe_cast(scores()), any("mask"));
        let masked = one_of([added, chosen, filled, maybe_cast(scores())]);
        let weights = node(|op| matches!(op, Op::Softmax(_)), [maybe_cast(masked)]).named("weights");
        let whole = product("result", maybe_cast(weights), any("v"));
        count += rewrite(graph, &whole, |graph, found| {
            let mut found = found.clone();
            if let Some(drop) = found.get("drop") {
                let keep = graph.push(Unary { kind: UnaryKind::Not }.into(), &[Some(drop)], "keep", "").ok()?;
                found.bind("keep", keep);
            }
            if found.get("keep").is_some() {
                let mask = chosen_mask(graph, &found)?;
                found.bind("mask", mask);
            }
            // The sum and the choice must not be larger than the scores: a mask has no axes of its own.
            let (scores, weights) = (graph.meta(found.value("scores")), graph.meta(found.value("weights")));
            if scores.shape != weights.shape {
                return None;
            }
            let cap = found.get("cap").map(|_| found.number(graph, "cap"));
            let shape = graph.meta(found.value("result")).shape.clone();
            attend(graph, &found, cap, &shape)
        })?;
    }
    Ok(count)
}

/// The value that a chain of nodes which only move elements begins with, and those nodes. All are read once.
fn moved(graph: &Graph, mut value: ValueId) -> (ValueId, Vec<NodeId>) {
    let (uses, mut chain) = (graph.uses(), Vec::new());
    while let Some((id, made)) = graph.made_by(value) {
        if !matches!(made.op, Op::Reshape(_) | Op::Permute(_)) || uses[value.index()] != 1 {
            break;
        }
        let Some(before) = made.inputs[0] else { break };
        chain.push(id);
        value = before;
    }
    (value, chain)
}

/// A number that q or k is multiplied with becomes a part of the scale, also if it is multiplied before heads are
/// split.
pub fn scale(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        for side in 0..2 {
            let Some(made) = graph.get(id) else { continue };
            let Op::Attention(attention) = &made.op else { continue };
            let Some(input) = made.inputs[side] else { continue };
            let (source, chain) = moved(graph, input);
            let Some((from, by)) = scaled(graph, source) else { continue };
            if !by.is_finite() || graph.uses()[source.index()] != 1 {
                continue;
            }
            let width = made.inputs[0].and_then(|q| graph.meta(q).shape[3].known());
            let default = width.map(|width| 1.0 / (width as f64).sqrt());
            let Some(scale) = attention.scale.or(default) else { continue };
            let (mut inputs, op) = (made.inputs.to_vec(), Attention { scale: Some(scale * by), ..attention.clone() });
            match chain.last() {
                None => inputs[side] = Some(from),
                Some(&first) => {
                    let op = graph.node(first).op.clone();
                    graph.change(first, op, &[Some(from)])?;
                }
            }
            count += usize::from(super::pattern::change(graph, id, |_| Some((op.into(), inputs))));
        }
    }
    Ok(count)
}
