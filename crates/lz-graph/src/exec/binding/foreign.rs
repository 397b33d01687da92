//! Nodes as calls of another library's kernels.

use lz_abi::{Extents, Param};
use lz_cpu::primitives::{BinaryOp, Primitive};
use lz_select::Standing;

use super::primitives::{bound, unary};
use super::sequence::Sequence;
use super::{Arg, At, Bound, Candidate, Site, Weights, preference};
use crate::exec::foreign::{Foreign, Task};
use crate::exec::kernel::Kernel;
use crate::ops::Op;
use crate::ops::attention::Attention;
use crate::ops::conv::Conv;
use crate::ops::linear::{Activation, Linear};
use crate::ops::matmul::MatMul;

/// Adds what other libraries have for a node to the candidates it has here.
pub(super) fn add(site: &Site<'_>, found: &mut Vec<Candidate>) {
    let empty = |arg: &Arg| arg.shape.contains(&0);
    if site.terms.foreign.is_empty() || site.inputs.iter().flatten().chain([site.output]).any(empty) {
        return;
    }
    let made = match site.op {
        Op::Linear(op) if !is_narrow(site, found) => linear(site, op),
        Op::MatMul(op) if !is_narrow(site, found) => matmul(site, op),
        Op::Attention(op) => attention(site, op),
        Op::Conv(op) => conv(site, op),
        _ => None,
    };
    let Some(made) = made else { return };
    let Some(kernel) = made.foreign() else { return };
    let ahead = match site.terms.ranking.standing(site.op, kernel) {
        Standing::Denied => return,
        Standing::Avoided => false,
        Standing::Open => preference::is_ahead(site, found),
        Standing::Preferred => true,
    };
    found.insert(if ahead { 0 } else { found.len() }, made);
}

/// Whether a weight was made narrow: nothing then reads the wide one, unless all other ways fail.
fn is_narrow(site: &Site<'_>, found: &[Candidate]) -> bool {
    let is_constant = matches!(site.need(1).at, At::Constant(..));
    site.terms.packs.weights() != Weights::AsTheyAre && is_constant && !found.is_empty()
}

/// A call of a kernel that has a task.
fn call(site: &Site<'_>, task: Task, inputs: Vec<Option<Arg>>, output: Arg, params: Vec<Param>) -> Option<Candidate> {
    let dtype = output.dtype;
    let found = Foreign::find(site.terms.foreign, task, dtype)?;
    if inputs.iter().flatten().any(|arg| arg.dtype != dtype) {
        return None;
    }
    let kernel = Kernel::Foreign(found);
    let call = Bound { kernel, inputs, outputs: vec![output], params, dims: Vec::new(), scratch: 0, reserved: 0 };
    // In place there is no second try, and this may fail.
    Some(Candidate { name: found.name.to_owned(), calls: vec![call], in_place: &[] })
}

/// Adds a function of the result and a sum with another tensor.
fn finished(site: &Site<'_>, mut one: Candidate, activation: Activation, residual: Option<&Arg>) -> Candidate {
    if let Some(kind) = activation.kind() {
        let (kind, out) = (unary(kind), site.output.clone());
        one.calls.push(bound(Primitive::Unary, vec![None], out, vec![kind.param()], site.terms));
        one.name = format!("{}+{}", one.name, kind.name());
    }
    if let Some(residual) = residual {
        let inputs = vec![None, Some(residual.clone())];
        one.calls.push(bound(Primitive::Binary, inputs, site.output.clone(), vec![BinaryOp::Add.param()], site.terms));
        one.name += "+add";
    }
    one
}

/// The same elements with all axes but the last `keep` as one, if those follow each other at one distance.
fn collapsed(arg: &Arg, keep: usize) -> Option<Arg> {
    let leading = arg.shape.len().checked_sub(keep)?;
    let (mut count, mut stride) = (1, 0);
    for axis in (0..leading).rev().filter(|&axis| arg.shape[axis] != 1) {
        if count == 1 {
            stride = arg.strides[axis];
        } else if arg.strides[axis] != stride * count {
            return None;
        }
        count *= arg.shape[axis];
    }
    if count == 1 {
        // Any stride is right for one row; this is that of rows which follow each other.
        stride = arg.shape[leading..].iter().product();
    }
    let joined = |first: i64, rest: &Extents| std::iter::once(first).chain(rest[leading..].iter().copied()).collect();
    Some(Arg { shape: joined(count, &arg.shape), strides: joined(stride, &arg.strides), ..arg.clone() })
}

/// The same with the last two axes in each other's place.
fn turned(arg: &Arg, turn: bool) -> Arg {
    let mut axes: Vec<usize> = (0..arg.shape.len()).collect();
    if let (true, [.., a, b]) = (turn, &mut axes[..]) {
        std::mem::swap(a, b);
    }
    arg.permuted(&axes)
}

/// A linear layer: a product of two matrices, with the bias where there is one.
fn linear(site: &Site<'_>, op: &Linear) -> Option<Candidate> {
    let (x, output) = (collapsed(site.need(0), 1)?, collapsed(site.output, 1)?);
    let weight = turned(site.need(1), true);
    let product = match site.get(2) {
        Some(bias) => {
            let inputs = vec![Some(x), Some(weight), Some(bias.clone())];
            call(site, Task::AddedProduct, inputs, output, vec![Param::Float(1.0)])
        }
        None => call(site, Task::Product, vec![Some(x), Some(weight)], output, Vec::new()),
    };
    Some(finished(site, product?, op.activation, site.get(3)))
}

/// A product of matrices: of two, where one matrix is multiplied with all, or of batches.
fn matmul(site: &Site<'_>, op: &MatMul) -> Option<Candidate> {
    let (a, b) = (turned(site.need(0), op.transpose_a), turned(site.need(1), op.transpose_b));
    let scaled = op.alpha != 1.0;
    let alpha = |plain: Task, with: Task| {
        if scaled { (with, vec![Param::Float(op.alpha)]) } else { (plain, Vec::new()) }
    };
    let leading = b.shape.len() - 2;
    if b.shape[..leading].iter().all(|&n| n == 1)
        && let (Some(a), Some(output)) = (collapsed(&a, 1), collapsed(site.output, 1))
    {
        let b = Arg { shape: b.shape[leading..].into(), strides: b.strides[leading..].into(), ..b };
        let (task, params) = alpha(Task::Product, Task::AddedProduct);
        return call(site, task, vec![Some(a), Some(b)], output, params);
    }
    let batches = &site.output.shape[..site.output.shape.len() - 2];
    let mut sequence = Sequence::new(site.terms);
    let mut whole = |arg: &Arg| {
        let wide = broadcast(arg, batches, 2);
        collapsed(&wide, 2).or_else(|| {
            let copy = sequence.scratch(wide.dtype, &wide.shape);
            sequence.before(Primitive::Copy, vec![Some(wide)], &copy, Vec::new());
            collapsed(&copy, 2)
        })
    };
    let (a, b, output) = (whole(&a)?, whole(&b)?, collapsed(site.output, 2)?);
    let (task, params) = alpha(Task::Products, Task::ScaledProducts);
    let product = call(site, task, vec![Some(a), Some(b)], output, params)?;
    if sequence.is_empty() { Some(product) } else { sequence.around(vec![product], "copy").pop() }
}

/// A tensor with the leading axes of another one, all of them but the last `keep`: what it has not is a distance of 0.
fn broadcast(arg: &Arg, leading: &[i64], keep: usize) -> Arg {
    let missing = (leading.len() + keep).saturating_sub(arg.shape.len());
    let mut shape: Extents = std::iter::repeat_n(1, missing).chain(arg.shape.iter().copied()).collect();
    let mut strides: Extents = std::iter::repeat_n(0, missing).chain(arg.strides.iter().copied()).collect();
    for (axis, &size) in leading.iter().enumerate() {
        if shape[axis] != size {
            (shape[axis], strides[axis]) = (size, 0);
        }
    }
    Arg { shape, strides, ..arg.clone() }
}

/// Attention whose heads have keys of their own.
fn attention(site: &Site<'_>, op: &Attention) -> Option<Candidate> {
    let [query, key, value] = [0, 1, 2].map(|at| site.need(at));
    let (queries, keys) = (query.shape[2], key.shape[2]);
    let follows = |arg: &&Arg| arg.shape[3] == 1 || arg.strides[3] == 1;
    let plain = op.window.is_none() && op.softcap.is_none() && query.shape[1] == key.shape[1];
    if !plain || query.shape[3] != value.shape[3] || ![query, key, value].iter().all(follows) {
        return None;
    }
    // One query at the last key may attend to all of them. Others are aligned at the first key there.
    let causal = op.causal && (queries > 1 || op.top_left);
    let mask = site.get(3).map(|mask| broadcast(mask, &[query.shape[0], query.shape[1], queries, keys], 0));
    if causal && (mask.is_some() || !op.top_left && queries != keys) {
        return None;
    }
    let scale = op.scale.unwrap_or(1.0 / (query.shape[3] as f64).sqrt());
    let inputs = vec![Some(query.clone()), Some(key.clone()), Some(value.clone()), mask];
    call(site, Task::Attention, inputs, site.output.clone(), vec![Param::Bool(causal), Param::Float(scale)])
}

/// A convolution.
fn conv(site: &Site<'_>, op: &Conv) -> Option<Candidate> {
    let numbers = [&op.stride, &op.padding, &op.dilation].into_iter().flatten().copied();
    let params = std::iter::once(op.groups).chain(numbers).map(Param::Int).collect();
    let inputs = (0..3).map(|at| site.get(at).cloned()).collect();
    let one = call(site, Task::Convolution, inputs, site.output.clone(), params)?;
    Some(finished(site, one, op.activation, None))
}
