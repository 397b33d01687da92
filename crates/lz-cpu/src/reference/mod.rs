//! The references: one file per family of operations, and the pieces they share.
//!
//! They read through [`lz_model::TensorView::get`], so strides and every dtype are honoured,
//! compute in float64, and round once, when a result is stored.

use std::collections::BTreeMap;

use lz_model::schema::{DTypeRule, Input, OpSchema};
use lz_model::{
    DTypeSet, DimRule, InputRule, KernelArgs, KernelDescriptor, KernelError, KvStrategy, Layout, Op, ParamRule,
    Platform, QuantFormat, QuantRule,
};

use crate::kernel::NativeKernel;
use crate::{BACKEND, VERSION};

pub(crate) mod arguments;
pub(crate) mod indices;
mod matrix;
pub(crate) mod pages;
mod random;
pub(crate) mod reach;
pub(crate) mod rows;
mod softmax;

pub mod activation;
pub mod attention;
pub mod embedding;
pub mod kv_cache;
pub mod merge;
pub mod mla;
pub mod mlp;
pub mod norm;
pub mod paged;
pub mod posenc;
pub mod quantize;
pub mod sampling;
pub mod sparse;
pub mod varlen;

/// A kernel that is the definition of its operations, and therefore takes every call of them.
pub trait Reference {
    /// The ids of the operations it implements.
    const OPS: &'static [&'static str];

    /// Does the work, as [`NativeKernel::run`].
    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError>;
}

impl<R: Reference> NativeKernel for R {
    const OPS: &'static [&'static str] = <R as Reference>::OPS;

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        descriptor(op)
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        <R as Reference>::run(args)
    }
}

/// A descriptor that takes whatever the schema allows.
pub fn descriptor(op: &Op) -> KernelDescriptor {
    let schema = op.schema();
    let any_value = |name: &str| (name.to_owned(), ParamRule::default());
    let any_size = |name: &str| (name.to_owned(), DimRule::default());
    KernelDescriptor {
        version: VERSION.into(),
        platforms: vec![Platform::Cpu],
        dtypes: schema.inputs.iter().filter(|i| is_data(schema, i)).flat_map(|i| dtypes_of(schema, i).iter()).collect(),
        layouts: layouts(schema),
        inputs: input_rules(schema),
        dims: schema.dims.iter().filter(|d| d.must_constrain).map(|d| any_size(d.name)).collect(),
        params: schema.params.iter().map(|p| any_value(p.name)).collect(),
        shares_kv_heads: true,
        deterministic: true,
        batch_invariant: true,
        kv_strategies: vec![KvStrategy::Contiguous, KvStrategy::Paged],
        quant: Some(QuantRule { formats: QuantFormat::ALL.to_vec(), zero_point: true, ..QuantRule::default() }),
        priority: 0,
        reference: true,
        ..KernelDescriptor::new(format!("{BACKEND}.ref.{}", op.id()), op.id(), BACKEND)
    }
}

/// The dtypes the schema allows an input; those of another input where it must be the same.
fn dtypes_of(schema: &OpSchema, input: &Input) -> DTypeSet {
    match input.dtype {
        DTypeRule::In(set) => set,
        DTypeRule::Same(other) => {
            schema.inputs.iter().find(|i| i.name == other).map_or(DTypeSet::EMPTY, |other| dtypes_of(schema, other))
        }
    }
}

/// Whether an input carries numbers to compute with, as opposed to indices or a mask.
fn is_data(schema: &OpSchema, input: &Input) -> bool {
    !input.mask && dtypes_of(schema, input).iter().any(|d| d.is_float())
}

/// Every input by name with the schema's own dtypes: indices, masks and scales differ from the data.
fn input_rules(schema: &OpSchema) -> BTreeMap<String, InputRule> {
    let rule = |input: &Input| InputRule { dtypes: Some(dtypes_of(schema, input)), ..InputRule::default() };
    schema.inputs.iter().map(|input| (input.name.to_owned(), rule(input))).collect()
}

/// Any strides, and the layouts that tag alternatives of the inputs' shapes.
fn layouts(schema: &OpSchema) -> Vec<Layout> {
    let tags = schema.inputs.iter().flat_map(|input| input.shape.split('|')).filter_map(|shape| shape.split_once(':'));
    let mut layouts: Vec<Layout> = tags.filter_map(|(tag, _)| tag.trim().parse().ok()).collect();
    layouts.push(Layout::Strided);
    layouts.sort();
    layouts.dedup();
    layouts
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_model::{Catalog, DType};

    fn of(id: &str) -> KernelDescriptor {
        descriptor(Catalog::get().ops().iter().find(|op| op.id() == id).unwrap())
    }

    #[test]
    fn a_descriptor_says_what_the_schema_says() {
        let attention = of("attention.gqa.prefill");
        assert_eq!(attention.id, "lz_cpu.ref.attention.gqa.prefill");
        assert_eq!(attention.layouts, [Layout::Strided, Layout::Bshd, Layout::Bhsd]);
        assert_eq!(attention.dtypes, DTypeSet::FLOATS_AND_FP8);
        assert_eq!(attention.inputs["attn_mask"].dtypes, Some(DTypeSet::MASKS));
        assert_eq!(attention.inputs["value"].dtypes, Some(DTypeSet::FLOATS_AND_FP8));
        assert!(attention.dims.contains_key("head_dim") && !attention.dims.contains_key("batch"));
        assert!(attention.params.contains_key("seed") && attention.reference && !attention.graph_safe);
    }

    #[test]
    fn indices_are_no_data() {
        let lookup = of("embedding.lookup");
        assert_eq!(lookup.dtypes, DTypeSet::FLOATS);
        assert_eq!(lookup.inputs["indices"].dtypes, Some(DTypeSet::INDICES));
        let dequantize = of("dequantize");
        assert!(dequantize.dtypes.contains(DType::I4));
        assert_eq!(dequantize.inputs["zero_points"].dtypes, Some(DTypeSet::of(&[DType::I32])));
    }
}
