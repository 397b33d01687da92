//! Products with constant weights, which are packed.

use std::sync::Arc;

use lz_abi::{DType, Extents, Param, Storage, row_major};
use lz_cpu::primitives::matmul::split;
use lz_cpu::primitives::{BinaryOp, Primitive};
use lz_model::{CpuIsa, ParamValue};

use super::catalog::Call;
use super::packs::Weights;
use super::primitives::{activation, bound, multiplies};
use super::{Arg, At, Candidate, Site};
use crate::ops::linear::{Activation, Linear};
use crate::ops::matmul::MatMul;

/// A linear layer: `act(x · Wᵀ + bias) + residual`.
struct Layer<'a> {
    /// (…, in).
    x: &'a Arg,
    /// (out, in), or (in, out) if `transposed`.
    weight: &'a Arg,
    transposed: bool,
    /// (out).
    bias: Option<&'a Arg>,
    /// By the name kernels have for it.
    activation: &'static str,
    /// (…, out), if there is one.
    residual: bool,
}

impl Layer<'_> {
    /// The kernels that take the weight packed.
    fn candidates(&self, site: &Site<'_>) -> Vec<Candidate> {
        let At::Constant(constant, 0) = &self.weight.at else { return Vec::new() };
        let outs = self.weight.shape[usize::from(self.transposed)];
        if self.weight.shape.len() != 2 || self.weight.shape.contains(&0) {
            return Vec::new();
        }
        let Some(transposed) = self.transposed_in(constant) else { return Vec::new() };
        let narrow = match site.terms.packs.weights() {
            Weights::AsTheyAre => Vec::new(),
            Weights::Bfloat16 => self.halves(site, outs, transposed),
            Weights::Int8 | Weights::Int4 => self.integers(site, outs, transposed),
        };
        if !narrow.is_empty() {
            return narrow;
        }
        let Some(blocks) = site.terms.packs.packed(constant, transposed, site.terms.instructions()) else {
            return Vec::new();
        };
        let weight = Arg::constant(blocks);
        let mut found = self.primitive(site, &weight, outs);
        let call = Call {
            op: "mlp.linear.packed",
            inputs: &[("input", Some(self.x)), ("weight", Some(&weight)), ("bias", self.bias)],
            params: &[
                ("out_features", ParamValue::Int(outs)),
                ("interleave", ParamValue::Int(weight.shape[3])),
                ("activation", ParamValue::str(self.activation)),
            ],
            layout: None,
            output: site.output,
        };
        let packed = call.candidates(site);
        if !self.residual {
            return packed.into_iter().chain(found).collect();
        }
        // The sum with the residual is a step of its own here, and part of the product above.
        found.extend(packed.into_iter().map(|one| self.with_residual(site, one)));
        found
    }

    /// Adds the residual to what a candidate gives, if there is one.
    fn with_residual(&self, site: &Site<'_>, mut one: Candidate) -> Candidate {
        if self.residual {
            let inputs = vec![None, site.get(3).cloned()];
            let params = vec![BinaryOp::Add.param()];
            one.calls.push(bound(Primitive::Binary, inputs, site.output.clone(), params, site.terms));
            one.name += "+add";
        }
        one
    }

    /// Products with a weight that is rounded to integers with scales.
    fn integers(&self, site: &Site<'_>, outs: i64, transposed: bool) -> Vec<Candidate> {
        let At::Constant(constant, 0) = &self.weight.at else { return Vec::new() };
        let Some(rounded) = site.terms.packs.rounded(constant, transposed) else { return Vec::new() };
        let (weight, scales) = (Arg::constant(rounded.blocks), Arg::constant(rounded.scales));
        let call = Call {
            op: "mlp.linear.quantized",
            inputs: &[
                ("input", Some(self.x)),
                ("weight", Some(&weight)),
                ("bias", self.bias),
                ("scales", Some(&scales)),
            ],
            params: &[
                ("out_features", ParamValue::Int(outs)),
                ("interleave", ParamValue::Int(weight.shape[3])),
                ("group_size", ParamValue::Int(rounded.group)),
                ("activation", ParamValue::str(self.activation)),
            ],
            layout: None,
            output: site.output,
        };
        call.candidates(site).into_iter().map(|one| self.with_residual(site, one)).collect()
    }

    /// Products in bfloat16: input, weight and bias are rounded, and so is the sum of each output.
    fn halves(&self, site: &Site<'_>, outs: i64, transposed: bool) -> Vec<Candidate> {
        let At::Constant(constant, 0) = &self.weight.at else { return Vec::new() };
        let bias = match self.bias.map(|bias| &bias.at) {
            None => None,
            Some(At::Constant(bias, 0)) => Some(Arg::constant(site.terms.packs.halved(bias))),
            Some(_) => return Vec::new(),
        };
        let Some(blocks) = site.terms.packs.packed_halves(constant, transposed) else { return Vec::new() };
        let weight = Arg::constant(blocks);
        // Input and output in bfloat16 lie one after the other in scratch memory.
        let half = |arg: &Arg, from: usize| {
            let strides = row_major(&arg.shape);
            Arg { dtype: DType::Bf16, shape: arg.shape.clone(), strides, at: At::Scratch(from) }
        };
        let bytes = |arg: &Arg| (2 * arg.shape.iter().product::<i64>() as usize).next_multiple_of(64);
        let (x, y) = (half(self.x, 0), half(site.output, bytes(self.x)));
        let reserved = bytes(&x) + bytes(&y);
        let call = Call {
            op: "mlp.linear.packed",
            inputs: &[("input", Some(&x)), ("weight", Some(&weight)), ("bias", bias.as_ref())],
            params: &[
                ("out_features", ParamValue::Int(outs)),
                ("interleave", ParamValue::Int(weight.shape[3])),
                ("activation", ParamValue::str(self.activation)),
            ],
            layout: None,
            output: &y,
        };
        let cast =
            |from: &Arg, to: &Arg| bound(Primitive::Cast, vec![Some(from.clone())], to.clone(), Vec::new(), site.terms);
        let whole = call.candidates(site).into_iter().map(|mut one| {
            one.calls.insert(0, cast(self.x, &x));
            one.calls.push(cast(&y, site.output));
            one.calls.iter_mut().for_each(|call| call.reserved = reserved);
            one.name += "+cast";
            self.with_residual(site, one)
        });
        if self.x.dtype == DType::F32 { whole.collect() } else { Vec::new() }
    }

    /// Whether the constant is (in, out). The weight may be a view of it: only the whole, and the whole transposed, can be packed.
    fn transposed_in(&self, constant: &Arc<dyn Storage>) -> Option<bool> {
        let view = constant.view();
        let lies = |shape: &[i64], strides: &[i64]| *self.weight.shape == *shape && *self.weight.strides == *strides;
        if lies(view.shape(), view.strides()) {
            return Some(self.transposed);
        }
        let (&[rows, columns], &[down, across]) = (view.shape(), view.strides()) else { return None };
        lies(&[columns, rows], &[across, down]).then_some(!self.transposed)
    }

    /// The product of primitives, which adds the residual before it stores.
    fn primitive(&self, site: &Site<'_>, weight: &Arg, outs: i64) -> Vec<Candidate> {
        let (Some(_), true) = (self.x.shape.last(), weight.shape[3] == 1 && weight.dtype == DType::F32) else {
            return Vec::new();
        };
        let weight = Arg { shape: weight.shape[..3].into(), strides: weight.strides[..3].into(), ..weight.clone() };
        let residual = site.get(3).filter(|_| !site.is_over(3));
        // One product of many rows instead of many products, where rows follow each other.
        let matrix = |arg: &Arg| {
            let width = *arg.shape.last()?;
            let rows = arg.shape[..arg.shape.len() - 1].iter().product();
            let shape: Extents = [rows, width].as_slice().into();
            arg.is_row_major().then(|| Arg { strides: row_major(&shape), shape, ..arg.clone() })
        };
        let flat = [Some(self.x), residual, Some(site.output)].map(|arg| arg.map(matrix));
        let (x, residual, output) = match flat {
            [Some(Some(x)), None, Some(Some(output))] => (x, None, output),
            [Some(Some(x)), Some(Some(residual)), Some(Some(output))] => (x, Some(residual), output),
            _ if self.x.shape.len() > 1 => (self.x.clone(), residual.cloned(), site.output.clone()),
            _ => return Vec::new(),
        };
        let beta = if self.residual { Param::Float(1.0) } else { Param::None };
        let params = vec![Param::None, Param::None, Param::None, beta, activation(self.activation), Param::Int(outs)];
        let inputs = vec![Some(x), Some(weight), self.bias.cloned(), residual];
        let in_place: &[usize] = if self.residual { &[3] } else { &[] };
        products(site, "primitive.matmul.packed", inputs, &output, params, in_place)
    }
}

/// A product of any matrices with a constant one.
pub(super) fn matmul(site: &Site<'_>, op: &MatMul) -> Vec<Candidate> {
    if op.transpose_a || op.alpha != 1.0 || site.need(1).shape.len() != 2 {
        return Vec::new();
    }
    let (x, weight) = (site.need(0), site.need(1));
    Layer { x, weight, transposed: !op.transpose_b, bias: None, activation: "none", residual: false }.candidates(site)
}

/// A linear layer. With a weight that is no constant it is a product of matrices as it lies.
pub(super) fn linear(site: &Site<'_>, op: &Linear) -> Vec<Candidate> {
    let activation_name = match op.activation {
        Activation::None => "none",
        Activation::Relu => "relu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_tanh",
        Activation::Silu => "silu",
    };
    let (x, weight, residual) = (site.need(0), site.need(1), site.inputs.get(3).is_some_and(Option::is_some));
    let layer = Layer { x, weight, transposed: false, bias: site.get(2), activation: activation_name, residual };
    let mut found = layer.candidates(site);
    // With narrow weights nothing reads the wide ones, unless all other ways fail.
    let wide = found.is_empty() || site.terms.packs.weights() == Weights::AsTheyAre;
    if x.shape.len() > 1 && wide && multiplies(x.dtype) {
        let beta = if residual { Param::Float(1.0) } else { Param::None };
        let params = vec![Param::None, Param::Bool(true), Param::None, beta, activation(activation_name)];
        let added = site.get(3).filter(|_| !site.is_over(3)).cloned();
        let inputs = vec![Some(x.clone()), Some(weight.clone()), site.get(2).cloned(), added];
        let in_place: &[usize] = if residual { &[3] } else { &[] };
        found.extend(products(site, "primitive.matmul", inputs, site.output, params, in_place));
    }
    found
}

/// Whether splitting into so many parts pays: each call splits the weight once, and the rows once for some columns.
fn split_pays(parts: i64, rows: i64, outs: i64) -> bool {
    match parts {
        2 => rows >= 48,
        _ => rows >= 192 || rows >= 96 && outs >= 2048,
    }
}

/// Multiplications from which it pays.
const LEAST_SPLIT_WORK: i64 = 1 << 21;

/// The product as a primitive: with numbers split for the matrix unit, where that pays and is exact enough, and in float32.
pub(super) fn products(
    site: &Site<'_>,
    name: &str,
    inputs: Vec<Option<Arg>>,
    output: &Arg,
    params: Vec<Param>,
    in_place: &'static [usize],
) -> Vec<Candidate> {
    let size = |at: usize| inputs.get(at).and_then(Option::as_ref).map_or(1, |arg| arg.shape.iter().product::<i64>());
    let (outs, all) = (output.shape.last().copied().unwrap_or(1), output.shape.iter().product::<i64>());
    let depth = size(0) / (all / outs.max(1)).max(1);
    let rows = all / outs.max(1);
    let pays = |parts| split_pays(parts, rows, outs) && all.saturating_mul(depth) >= LEAST_SPLIT_WORK;
    let floats = inputs.iter().flatten().chain([output]).all(|arg| arg.dtype == DType::F32);
    let here = floats && site.terms.level == CpuIsa::Native && split::is_here();
    let parts = site.terms.precision.parts().filter(|&parts| here && pays(parts));
    let split = parts.map(|parts| {
        let mut params = params.clone();
        params.resize(6, Param::None);
        params.push(Param::Int(parts));
        (format!("{name}.split{parts}"), params)
    });
    let all = split.into_iter().chain([(name.to_owned(), params)]);
    all.map(|(name, params)| {
        let call = bound(Primitive::Matmul, inputs.clone(), output.clone(), params, site.terms);
        Candidate { name, calls: vec![call], in_place }
    })
    .collect()
}
