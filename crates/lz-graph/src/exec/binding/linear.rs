//! Products with constant weights: packed once, shared by every plan.
//!
//! The blocks are those of `lz.pack`: 32 outputs side by side for each feature of the input, two features for bfloat16.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use half::{bf16, f16};
use lz_abi::{DType, Extents, NotASlice, Param, Scalar, Storage, Tensor, TensorRef, row_major};
use lz_cpu::primitives::{BinaryOp, Primitive};
use lz_model::ParamValue;
use lz_model::ops::mlp::{PACKED_GROUPS, PACKED_ROWS};

use super::catalog::Call;
use super::primitives::{activation, bound, multiplies};
use super::{Arg, At, Candidate, Site};
use crate::ops::linear::{Activation, Linear};
use crate::ops::matmul::MatMul;

/// A packed weight.
struct Packed {
    /// Its memory is not used again for another constant as long as this exists.
    _source: Weak<dyn Storage>,
    blocks: Arc<dyn Storage>,
}

/// Packed weights, by the constant they were made of.
#[derive(Default)]
pub struct Packs {
    /// By the address of the constant, and whether it is (in, out).
    made: Mutex<HashMap<(usize, bool), Packed>>,
    /// Row-major copies of constants that lie otherwise.
    copies: Mutex<HashMap<usize, Packed>>,
}

impl Packs {
    /// Bytes of all packed weights and copies.
    pub fn bytes(&self) -> usize {
        let bytes = |one: &Packed| one.blocks.view().dtype().bytes_for(one.blocks.view().len());
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        made.values().chain(copies.values()).map(bytes).sum()
    }

    /// A constant that lies row-major: itself, or a copy.
    pub fn laid(&self, constant: &Arc<dyn Storage>) -> Arc<dyn Storage> {
        if constant.view().is_contiguous() {
            return constant.clone();
        }
        let key = Arc::as_ptr(constant).cast::<u8>() as usize;
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let made = copies.entry(key).or_insert_with(|| {
            let blocks: Arc<dyn Storage> = Arc::new(constant.view().to_tensor());
            Packed { _source: Arc::downgrade(constant), blocks }
        });
        made.blocks.clone()
    }

    /// The packed form of a constant matrix: (out, in), or (in, out) if `turned`. `None` if it cannot be packed.
    fn packed(&self, constant: &Arc<dyn Storage>, turned: bool) -> Option<Arc<dyn Storage>> {
        let key = (Arc::as_ptr(constant).cast::<u8>() as usize, turned);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(one) = made.get(&key) {
            return Some(one.blocks.clone());
        }
        let view = constant.view();
        let turned_view = if turned { view.permuted(&[1, 0]) } else { view.clone() };
        let blocks = match view.dtype() {
            DType::F32 => pack::<f32>(turned_view.as_ref(), 1),
            DType::F16 => pack::<f16>(turned_view.as_ref(), 1),
            DType::Bf16 => pack::<bf16>(turned_view.as_ref(), 2),
            _ => return None,
        };
        let blocks: Arc<dyn Storage> = Arc::new(blocks.ok()?);
        made.insert(key, Packed { _source: Arc::downgrade(constant), blocks: blocks.clone() });
        Some(blocks)
    }
}

/// The blocks of a weight (out, in), with so many features side by side.
fn pack<T: Scalar>(weight: TensorRef<'_>, side: usize) -> Result<Tensor, NotASlice> {
    let (outs, ins) = (weight.shape()[0] as usize, weight.shape()[1] as usize);
    let width = PACKED_ROWS as usize;
    let whole = if side == 1 { 1 } else { PACKED_GROUPS as usize };
    let groups = ins.div_ceil(side).next_multiple_of(whole);
    let panels = outs.div_ceil(width);
    let mut blocks = Tensor::zeros(weight.dtype(), &[panels as i64, groups as i64, width as i64, side as i64]);
    let place = |n: usize, k: usize| ((n / width * groups + k / side) * width + n % width) * side + k % side;
    // Along the axis whose elements follow each other.
    let (source, by_input) = match weight.strides() {
        [1, _] => (weight.view().permuted(&[1, 0]), true),
        _ => (weight.view(), false),
    };
    {
        let mut view = blocks.view_mut();
        let mut target = view.as_mut();
        let target = target.as_slice::<T>()?;
        let source = source.as_ref();
        let rows = source.rows::<T>()?;
        for row in 0..rows.count() {
            for (column, &number) in rows.get(row).iter().enumerate() {
                let (n, k) = if by_input { (column, row) } else { (row, column) };
                target[place(n, k)] = number;
            }
        }
    }
    Ok(blocks)
}

/// A linear layer: `act(x · Wᵀ + bias) + residual`.
struct Layer<'a> {
    /// (…, in).
    x: &'a Arg,
    /// (out, in), or (in, out) if `turned`.
    weight: &'a Arg,
    turned: bool,
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
        let outs = self.weight.shape[usize::from(self.turned)];
        if self.weight.shape.len() != 2 || self.weight.shape.contains(&0) {
            return Vec::new();
        }
        let Some(turned) = self.turned_in(constant) else { return Vec::new() };
        let Some(blocks) = site.packs.packed(constant, turned) else { return Vec::new() };
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
        found.extend(packed.into_iter().map(|mut one| {
            let inputs = vec![None, site.get(3).cloned()];
            let params = vec![BinaryOp::Add.param()];
            one.calls.push(bound(Primitive::Binary, inputs, site.output.clone(), params, site.threads));
            one.name += "+add";
            one
        }));
        found
    }

    /// Whether the constant is (in, out). The weight may be a view of it: only the whole, and the whole transposed, can be packed.
    fn turned_in(&self, constant: &Arc<dyn Storage>) -> Option<bool> {
        let view = constant.view();
        let lies = |shape: &[i64], strides: &[i64]| *self.weight.shape == *shape && *self.weight.strides == *strides;
        if lies(view.shape(), view.strides()) {
            return Some(self.turned);
        }
        let (&[rows, columns], &[down, across]) = (view.shape(), view.strides()) else { return None };
        lies(&[columns, rows], &[across, down]).then_some(!self.turned)
    }

    /// The product of primitives, which adds the residual before it stores.
    fn primitive(&self, site: &Site<'_>, weight: &Arg, outs: i64) -> Vec<Candidate> {
        let (Some(_), true) = (self.x.shape.last(), weight.shape[3] == 1 && weight.dtype == DType::F32) else {
            return Vec::new();
        };
        let weight = Arg { shape: weight.shape[..3].into(), strides: weight.strides[..3].into(), ..weight.clone() };
        let residual = site.get(3).filter(|_| site.in_place != Some(3));
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
        let call = bound(Primitive::Matmul, inputs, output, params, site.threads);
        let in_place: &[usize] = if self.residual { &[3] } else { &[] };
        vec![Candidate { name: "primitive.matmul.packed".into(), calls: vec![call], in_place }]
    }
}

/// A product of any matrices with a constant one.
pub(super) fn matmul(site: &Site<'_>, op: &MatMul) -> Vec<Candidate> {
    if op.transpose_a || op.alpha != 1.0 || site.need(1).shape.len() != 2 {
        return Vec::new();
    }
    let (x, weight) = (site.need(0), site.need(1));
    Layer { x, weight, turned: !op.transpose_b, bias: None, activation: "none", residual: false }.candidates(site)
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
    let layer = Layer { x, weight, turned: false, bias: site.get(2), activation: activation_name, residual };
    let mut found = layer.candidates(site);
    if x.shape.len() > 1 && multiplies(x.dtype) {
        let beta = if residual { Param::Float(1.0) } else { Param::None };
        let params = vec![Param::None, Param::Bool(true), Param::None, beta, activation(activation_name)];
        let added = site.get(3).filter(|_| site.in_place != Some(3)).cloned();
        let inputs = vec![Some(x.clone()), Some(weight.clone()), site.get(2).cloned(), added];
        let call = bound(Primitive::Matmul, inputs, site.output.clone(), params, site.threads);
        let in_place: &[usize] = if residual { &[3] } else { &[] };
        found.push(Candidate { name: "primitive.matmul".into(), calls: vec![call], in_place });
    }
    found
}
