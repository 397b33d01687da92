//! Attention that also gives the logarithm of each softmax's sum, and the merging of two such results.

use lz_abi::{DType, DTypeSet};

use super::attention::{
    CAUSAL, DIMS, HEADS_DIVIDE, KEY, QUERIES_FIT, QUERY, SCALE, SOFTCAP, SOFTCAP_VALID, VALUE, WINDOW_LEFT,
    WINDOW_RIGHT, WINDOWS_VALID,
};
use super::attention_paged::{
    BATCH, BLOCK_SIZE, BLOCK_TABLES, CONTEXT_LENS, HEAD_DIM, HEADS, KEY_CACHE, KV_HEADS, MAX_BLOCKS, MAX_CONTEXT,
    NUM_BLOCKS, TOKENS, VALUE_CACHE,
};
use super::attention_varlen::PACKED;
use crate::schema::*;

const fn lse(shape: &'static str) -> Output {
    Output::Fresh { name: "lse", shape, dtype: OutputDType::Fixed(DType::F32) }
}

/// Dense attention.
pub static DENSE: OpSchema = OpSchema {
    id: "attention.lse",
    family: Family::Attention,
    summary: "dense attention with the log-sum-exp of the scores, standard or grouped-query",
    semantics: "as dense attention, and lse = log(sum(exp(scores))) of each query and head: the natural logarithm, in \
float32, in the order of the output without its last dimension. A query that may attend to nothing gives zeros and minus \
infinity.",
    dims: DIMS,
    inputs: &[QUERY, KEY, VALUE],
    params: &[CAUSAL, SCALE, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP],
    outputs: &[
        Output::like("output", "BSHD: batch seq_q heads v_dim | BHSD: batch heads seq_q v_dim", "query"),
        lse("BSHD: batch seq_q heads | BHSD: batch heads seq_q"),
    ],
    checks: &[HEADS_DIVIDE, QUERIES_FIT, WINDOWS_VALID, SOFTCAP_VALID],
    layout: LayoutRule::Dense,
    flops: "2 * batch * heads * seq_q * seq_k * (head_dim + v_dim)",
    flops_when: &[
        ("window_left >= 0", "batch * heads * seq_q * min(seq_k, window_left + 1) * (head_dim + v_dim)"),
        ("causal", "batch * heads * seq_q * seq_k * (head_dim + v_dim)"),
    ],
    bytes: "batch * (seq_q * heads * (head_dim + v_dim) + seq_k * kv_heads * (head_dim + v_dim)) * dtype_bits / 8",
    ..BLANK
};

/// Packed sequences.
pub static VARLEN: OpSchema = OpSchema {
    id: "attention.lse.varlen",
    summary: "attention within packed sequences with the log-sum-exp of the scores",
    semantics: "as attention within packed sequences, and lse = log(sum(exp(scores))) of each query and head, the natural \
logarithm in float32. A query that may attend to nothing, and a row of no sequence, gives zeros and minus infinity.",
    inputs: &[PACKED.inputs[0], PACKED.inputs[1], PACKED.inputs[2], PACKED.inputs[3], PACKED.inputs[4]],
    outputs: &[Output::like("output", "seq_q heads v_dim", "query"), lse("seq_q heads")],
    checks: &[HEADS_DIVIDE, WINDOWS_VALID, SOFTCAP_VALID],
    ..PACKED
};

/// A paged cache.
pub static PAGED: OpSchema = OpSchema {
    id: "attention.lse.paged",
    family: Family::Attention,
    summary: "attention over a paged cache with the log-sum-exp of the scores",
    semantics: "as attention over a paged cache, and lse = log(sum(exp(scores))) of each query and head, the natural \
logarithm in float32. With cu_seqlens_q queries are packed, and are the last positions of their sequences; without it each \
sequence has one. A query that may attend to nothing, and a row of no sequence, gives zeros and minus infinity.",
    dims: &[BATCH, TOKENS, MAX_BLOCKS, NUM_BLOCKS, MAX_CONTEXT, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM],
    inputs: &[
        Input::new("query", "seq_q heads head_dim | seq_q 1 heads head_dim", DTypeSet::FLOATS_AND_FP8).also(&["q"]),
        KEY_CACHE,
        VALUE_CACHE,
        BLOCK_TABLES,
        CONTEXT_LENS,
        Input::new("cu_seqlens_q", "batch+1", DTypeSet::INDICES).optional().also(&["qo_indptr"]),
    ],
    params: &[CAUSAL, SCALE, WINDOW_LEFT, SOFTCAP, WINDOW_RIGHT],
    outputs: &[Output::like("output", "like:query", "query"), lse("rows:query")],
    checks: &[
        HEADS_DIVIDE,
        WINDOWS_VALID,
        SOFTCAP_VALID,
        Check {
            holds: "cu_seqlens_q.present or seq_q == batch",
            code: CheckCode::Constraint,
            message: "without cu_seqlens_q each sequence has one query",
            hint: "pass as many queries as context_lens has lengths, or cu_seqlens_q for packed queries",
        },
    ],
    layout: LayoutRule::Cache,
    flops: "4 * seq_q * heads * seq_k * head_dim",
    bytes: "2 * (batch * seq_k * kv_heads + seq_q * heads) * head_dim * dtype_bits / 8",
    ..BLANK
};

/// One attention out of two, each over a part of the keys.
pub static MERGE: OpSchema = OpSchema {
    id: "attention.merge",
    family: Family::Attention,
    kind: OpKind::PrePost,
    also: &["merge_states"],
    summary: "one attention out of two over different keys, each with its log-sum-exp",
    semantics: "lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b: what attention \
to both sets of keys gives. The logarithms are natural, as attention gives them with return_lse; logarithms to base 2, as \
FlashInfer's, must be multiplied by ln(2) first. A part with lse minus infinity takes no part; where both have it, the \
result is zeros and minus infinity.",
    dims: &[
        Dim::bucketed("rows", DimKind::Batch).also(&["tokens", "batch"]),
        Dim::exact("v_dim", DimKind::HeadDim).also(&["head_dim"]).must_constrain(),
    ],
    inputs: &[
        Input::new("out_a", "...rows v_dim", DTypeSet::FLOATS),
        Input::new("lse_a", "...rows", DTypeSet::of(&[DType::F32])),
        Input::same("out_b", "...rows v_dim", "out_a"),
        Input::new("lse_b", "...rows", DTypeSet::of(&[DType::F32])),
    ],
    outputs: &[
        Output::like("output", "like:out_a", "out_a"),
        Output::Fresh { name: "lse", shape: "like:lse_a", dtype: OutputDType::Fixed(DType::F32) },
    ],
    bytes: "3 * rows * (v_dim * dtype_bits / 8 + 4)",
    ..BLANK
};
