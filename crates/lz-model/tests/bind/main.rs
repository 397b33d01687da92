//! Binding: which operation a call is, what is wrong with one that is none, and what it will give.

use std::collections::{BTreeMap, BTreeSet};

use lz_model::schema::{CheckCode, DTypeRule, Output};
use lz_model::*;
use proptest::prelude::*;

mod any_call;
mod derived;
mod errors;
mod layouts;
mod outputs;
mod resolution;

// --- calls, written down -------------------------------------------------------------------

/// A tensor argument that owns its shape.
#[derive(Clone, Debug)]
struct Arg {
    name: &'static str,
    dtype: DType,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    device: u16,
}

impl Arg {
    fn strided(mut self, strides: &[i64]) -> Arg {
        self.strides = Some(strides.to_vec());
        self
    }

    fn on(mut self, device: u16) -> Arg {
        self.device = device;
        self
    }
}

fn t(name: &'static str, dtype: DType, shape: &[i64]) -> Arg {
    Arg { name, dtype, shape: shape.to_vec(), strides: None, device: 0 }
}

/// A call that owns its arguments.
#[derive(Clone, Debug, Default)]
struct Made {
    inputs: Vec<Arg>,
    params: Vec<(&'static str, ParamValue)>,
    layout: Option<Layout>,
    strict: bool,
    defaults: DefaultLayouts,
}

fn made(inputs: Vec<Arg>) -> Made {
    Made { inputs, ..Made::default() }
}

impl Made {
    fn param(mut self, name: &'static str, value: ParamValue) -> Made {
        self.params.push((name, value));
        self
    }

    fn layout(mut self, layout: Layout) -> Made {
        self.layout = Some(layout);
        self
    }

    fn strict(mut self) -> Made {
        self.strict = true;
        self
    }

    fn defaults(mut self, dense: Layout, cache: Layout) -> Made {
        self.defaults = DefaultLayouts { dense, cache };
        self
    }

    fn with(mut self, input: Arg) -> Made {
        self.inputs.retain(|i| i.name != input.name);
        self.inputs.push(input);
        self
    }

    fn without(mut self, name: &str) -> Made {
        self.inputs.retain(|i| i.name != name);
        self
    }

    fn named(&self) -> NamedCall<'_> {
        NamedCall {
            inputs: self
                .inputs
                .iter()
                .map(|arg| {
                    let meta = TensorMeta::new(arg.dtype, &arg.shape).on(DeviceIx(arg.device));
                    let meta = match &arg.strides {
                        Some(strides) => meta.strided(strides),
                        None => meta,
                    };
                    (arg.name, meta)
                })
                .collect(),
            params: self.params.clone(),
            layout: self.layout,
            ..NamedCall::new()
        }
    }

    fn rules(&self) -> BindRules {
        BindRules { strict: self.strict, default_layouts: self.defaults, ..BindRules::default() }
    }

    fn resolve(&self, name: &str) -> Result<(&'static Op, Bound), CallError> {
        let call = self.named();
        let (_, bound) = Catalog::get().resolve(name, &call, &self.rules(), |_| None)?;
        Ok((Catalog::get().op(bound.query.op()), bound))
    }

    fn op(&self, name: &str) -> &'static str {
        self.resolve(name).unwrap_or_else(|e| panic!("{e}")).0.id()
    }

    fn error(&self, name: &str) -> CallError {
        match self.resolve(name) {
            Err(error) => error,
            Ok((op, bound)) => panic!("bound to {}: {:?}", op.id(), bound.query),
        }
    }

    fn dim(&self, name: &str, dim: &str) -> i64 {
        let (op, bound) = self.resolve(name).unwrap_or_else(|e| panic!("{e}"));
        bound.query.dim(op.dim_index(dim).unwrap())
    }

    fn outputs(&self, name: &str) -> Vec<(&'static str, DType, Vec<i64>)> {
        let named = self.named();
        let (ordered, bound) =
            Catalog::get().resolve(name, &named, &self.rules(), |_| None).unwrap_or_else(|e| panic!("{name}: {e}"));
        let call = Call {
            inputs: &ordered.inputs,
            params: &ordered.params,
            layout: self.layout,
            device: DeviceIx(0),
            context: Context::default(),
        };
        let op = Catalog::get().op(bound.query.op());
        op.outputs(&call, &bound.query).into_iter().map(|o| (o.name, o.dtype, o.shape.to_vec())).collect()
    }
}

/// Dense attention, BSHD.
fn dense(seq_q: i64, seq_k: i64, heads: i64, kv_heads: i64) -> Made {
    made(vec![
        t("query", DType::F16, &[2, seq_q, heads, 64]),
        t("key", DType::F16, &[2, seq_k, kv_heads, 64]),
        t("value", DType::F16, &[2, seq_k, kv_heads, 64]),
    ])
    .layout(Layout::Bshd)
}

/// Paged attention of one query per sequence: 3 sequences, tables of 5 pages of 16 slots.
fn paged(heads: i64, kv_heads: i64) -> Made {
    made(vec![
        t("query", DType::Bf16, &[3, heads, 64]),
        t("key_cache", DType::Bf16, &[40, 16, kv_heads, 64]),
        t("value_cache", DType::Bf16, &[40, 16, kv_heads, 64]),
        t("block_tables", DType::I32, &[3, 5]),
        t("context_lens", DType::I32, &[3]),
    ])
}

/// Paged attention of 11 packed queries.
fn paged_prefill(heads: i64, kv_heads: i64) -> Made {
    paged(heads, kv_heads).with(t("query", DType::Bf16, &[11, heads, 64])).with(t("cu_seqlens_q", DType::I32, &[4]))
}

fn mla(seq_q: i64, seq_k: i64) -> Made {
    made(vec![
        t("q_nope", DType::Bf16, &[seq_q, 16, 512]),
        t("q_pe", DType::Bf16, &[seq_q, 16, 64]),
        t("ckv", DType::Bf16, &[seq_k, 1, 512]),
        t("kpe", DType::Bf16, &[seq_k, 1, 64]),
    ])
    .param("scale", ParamValue::Float(0.1))
}

fn mla_paged() -> Made {
    made(vec![
        t("q_nope", DType::Bf16, &[3, 16, 512]),
        t("q_pe", DType::Bf16, &[3, 16, 64]),
        t("ckv_cache", DType::F8E4M3, &[40, 32, 512]),
        t("kpe_cache", DType::F8E4M3, &[40, 32, 64]),
        t("block_tables", DType::I64, &[3, 7]),
        t("context_lens", DType::I32, &[3]),
    ])
    .param("scale", ParamValue::Float(0.1))
}

fn rms(shape: &[i64]) -> Made {
    made(vec![t("input", DType::F32, shape)])
}

fn linear() -> Made {
    made(vec![t("input", DType::F32, &[4, 5, 6]), t("weight", DType::F32, &[7, 6]), t("bias", DType::F32, &[7])])
}

fn quantize(format: &str) -> Made {
    made(vec![t("input", DType::F32, &[3, 80])]).param("dtype", ParamValue::str(format))
}
