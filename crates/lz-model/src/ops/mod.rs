//! The operations, one file per family. To add one: write its schema, add a line to [`OPS`].

use crate::schema::{Alias, OpSchema};

pub mod activation;
pub mod attention;
pub mod attention_mla;
pub mod attention_paged;
pub mod attention_sparse;
pub mod embedding;
pub mod kv_cache;
pub mod mlp;
pub mod norm;
pub mod posenc;
pub mod quantize;
pub mod sampling;
pub mod tokenize;

/// Every operation. The order is the order of listings; nothing else depends on it.
pub static OPS: &[&OpSchema] = &[
    &attention::STANDARD_PREFILL,
    &attention::STANDARD_DECODE,
    &attention::GQA_PREFILL,
    &attention::GQA_DECODE,
    &attention::CROSS_PREFILL,
    &attention::CROSS_DECODE,
    &attention_paged::STANDARD_PREFILL_PAGED,
    &attention_paged::STANDARD_DECODE_PAGED,
    &attention_paged::GQA_PREFILL_PAGED,
    &attention_paged::GQA_DECODE_PAGED,
    &attention_mla::PREFILL,
    &attention_mla::DECODE,
    &attention_mla::DECODE_PAGED,
    &attention_sparse::BLOCK,
    &attention_sparse::VARIABLE_BLOCK,
    &embedding::LOOKUP,
    &posenc::ROPE,
    &posenc::ALIBI,
    &norm::RMS,
    &norm::LAYER,
    &norm::FUSED_ADD_RMS,
    &mlp::LINEAR,
    &mlp::FUSED,
    &activation::SILU_MUL,
    &activation::GELU,
    &sampling::TOPK,
    &sampling::TOPP,
    &sampling::SPECULATIVE,
    &quantize::QUANTIZE,
    &quantize::DEQUANTIZE,
    &kv_cache::APPEND,
    &kv_cache::COMPACT,
    &tokenize::ENCODE,
    &tokenize::DECODE,
];

const DENSE: &[&str] =
    &["attention.standard.decode", "attention.standard.prefill", "attention.gqa.decode", "attention.gqa.prefill"];

/// Names that stand for several operations.
pub static ALIASES: &[Alias] = &[
    Alias { name: "attention", ops: DENSE, fixes: &[] },
    Alias { name: "attention.causal", ops: DENSE, fixes: &[("causal", true)] },
    Alias { name: "attention.full", ops: DENSE, fixes: &[("causal", false)] },
    Alias {
        name: "attention.paged",
        ops: &[
            "attention.standard.decode.paged",
            "attention.standard.prefill.paged",
            "attention.gqa.decode.paged",
            "attention.gqa.prefill.paged",
        ],
        fixes: &[],
    },
    Alias { name: "attention.cross", ops: &["attention.cross.decode", "attention.cross.prefill"], fixes: &[] },
    Alias {
        name: "attention.mla",
        ops: &["attention.mla.decode.paged", "attention.mla.decode", "attention.mla.prefill"],
        fixes: &[],
    },
    Alias { name: "attention.sparse", ops: &["attention.sparse.block", "attention.sparse.variable_block"], fixes: &[] },
];
