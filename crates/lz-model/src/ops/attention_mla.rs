//! Multi-head latent attention (DeepSeek): compressed keys/values and a separate positional part.

use lz_abi::DTypeSet;

use super::attention::{CAUSAL, SCALE};
use super::attention_paged::{BLOCK_TABLES, CONTEXT_LENS};
use crate::param::{Param, ParamDefault};
use crate::schema::*;

/// The scale belongs to the unabsorbed head dimension, which the absorbed inputs do not show.
const MLA_SCALE: Param = SCALE.default(ParamDefault::Required);

const TOKENS: Dim = Dim::bucketed("seq_q", DimKind::Seq).also(&["tokens", "seq_len", "seq_len_q"]);
const KV_LEN: Dim = Dim::bucketed("seq_k", DimKind::Seq).also(&["kv_len", "seq_len_k"]);
const HEADS: Dim = Dim::exact("heads", DimKind::Heads).also(&["num_heads"]);
const DIM_CKV: Dim = Dim::exact("dim_ckv", DimKind::HeadDim).must_constrain();
const DIM_KPE: Dim = Dim::exact("dim_kpe", DimKind::HeadDim).must_constrain();

const Q_NOPE: Input = Input::new("q_nope", "seq_q heads dim_ckv", DTypeSet::FLOATS);
const Q_PE: Input = Input::same("q_pe", "seq_q heads dim_kpe", "q_nope");

const CKV_CACHE: Input =
    Input::new("ckv_cache", "num_blocks block_size dim_ckv", DTypeSet::FLOATS_AND_FP8).cache().also(&["ckv"]);
const KPE_CACHE: Input = Input::same("kpe_cache", "num_blocks block_size dim_kpe", "ckv_cache").cache().also(&["kpe"]);
const PAGED_KV_LEN: Dim = Dim::bucketed("seq_k", DimKind::Seq)
    .also(&["kv_len", "seq_len_k", "max_context"])
    .derived(|sizes| sizes.dim("max_blocks").saturating_mul(sizes.dim("block_size")));

const CONTIGUOUS: OpSchema = OpSchema {
    family: Family::Attention,
    semantics: "scores = scale * (q_nope.ckv^T + q_pe.kpe^T), out = softmax(scores).ckv, with the projections absorbed \
into q_nope. Without indptrs all tokens belong to one sequence; with them sequence b owns query rows qo_indptr[b].. \
and key rows kv_indptr[b]... Causal is bottom-right aligned within each sequence.",
    dims: &[
        Dim::bucketed("batch", DimKind::Batch).also(&["batch_size"]).otherwise(1),
        TOKENS,
        KV_LEN,
        HEADS,
        DIM_CKV,
        DIM_KPE,
    ],
    inputs: &[
        Q_NOPE,
        Q_PE,
        Input::new("ckv", "seq_k 1 dim_ckv | seq_k dim_ckv", DTypeSet::FLOATS_AND_FP8).cache(),
        Input::same("kpe", "seq_k 1 dim_kpe | seq_k dim_kpe", "ckv").cache(),
        Input::new("qo_indptr", "batch+1", DTypeSet::INDICES).optional(),
        Input::new("kv_indptr", "batch+1", DTypeSet::INDICES).optional(),
    ],
    params: &[MLA_SCALE, CAUSAL],
    outputs: &[Output::like("output", "like:q_nope", "q_nope")],
    checks: &[Check {
        holds: "qo_indptr.present == kv_indptr.present",
        code: CheckCode::Constraint,
        message: "only one of qo_indptr and kv_indptr was given",
        hint: "pass both (several sequences) or neither (one sequence)",
    }],
    flops: "2 * seq_q * heads * seq_k * (2 * dim_ckv + dim_kpe)",
    bytes: "(seq_q * heads * (2 * dim_ckv + dim_kpe) + seq_k * (dim_ckv + dim_kpe)) * dtype_bits / 8",
    ..BLANK
};

/// Latent attention of a prompt.
pub static PREFILL: OpSchema = OpSchema {
    id: "attention.mla.prefill",
    summary: "latent attention of many queries",
    when: "seq_q != 1",
    ..CONTIGUOUS
};

/// Latent attention of new tokens.
pub static DECODE: OpSchema = OpSchema {
    id: "attention.mla.decode",
    summary: "latent attention of one new query",
    when: "seq_q == 1",
    ..CONTIGUOUS
};

/// Latent attention of several new tokens per sequence over a paged cache.
pub static PREFILL_PAGED: OpSchema = OpSchema {
    id: "attention.mla.prefill.paged",
    summary: "latent attention of packed queries, several per sequence, over a paged latent cache",
    semantics: "as attention.mla.decode.paged, with packed queries: sequence b owns the query rows qo_indptr[b] .. \
qo_indptr[b+1], which are the last positions of its context_lens[b] cached tokens. Causal is bottom-right aligned within each \
sequence. A query that may attend to nothing, and a row of no sequence, gives zeros.",
    dims: &[
        Dim::bucketed("batch", DimKind::Batch).also(&["batch_size"]),
        TOKENS,
        Dim::bucketed("max_blocks", DimKind::Other),
        Dim::bucketed("num_blocks", DimKind::Other),
        PAGED_KV_LEN,
        Dim::exact("block_size", DimKind::Other).also(&["page_size"]),
        HEADS,
        DIM_CKV,
        DIM_KPE,
    ],
    inputs: &[
        Q_NOPE,
        Q_PE,
        CKV_CACHE,
        KPE_CACHE,
        BLOCK_TABLES,
        CONTEXT_LENS,
        Input::new("qo_indptr", "batch+1", DTypeSet::INDICES).also(&["cu_seqlens_q"]),
    ],
    params: &[MLA_SCALE, CAUSAL],
    checks: &[],
    flops: "2 * seq_q * heads * seq_k * (2 * dim_ckv + dim_kpe)",
    bytes: "(seq_q * heads * (2 * dim_ckv + dim_kpe) + batch * seq_k * (dim_ckv + dim_kpe)) * dtype_bits / 8",
    ..CONTIGUOUS
};

/// Latent attention over a paged cache.
pub static DECODE_PAGED: OpSchema = OpSchema {
    id: "attention.mla.decode.paged",
    summary: "latent attention of one new query per sequence over a paged latent cache",
    semantics: "as attention.mla.decode, one query per sequence; sequence b's latent keys are the first context_lens[b] \
slots of the pages block_tables[b, 0..]",
    dims: &[
        Dim::bucketed("batch", DimKind::Batch).also(&["batch_size"]),
        Dim::bucketed("max_blocks", DimKind::Other),
        Dim::bucketed("num_blocks", DimKind::Other),
        PAGED_KV_LEN.also(&["kv_len", "seq_len", "seq_len_k", "max_context"]),
        Dim::exact("block_size", DimKind::Other).also(&["page_size"]),
        HEADS,
        DIM_CKV,
        DIM_KPE,
    ],
    inputs: &[
        Input::new("q_nope", "batch heads dim_ckv", DTypeSet::FLOATS),
        Input::same("q_pe", "batch heads dim_kpe", "q_nope"),
        CKV_CACHE,
        KPE_CACHE,
        BLOCK_TABLES,
        CONTEXT_LENS,
    ],
    params: &[MLA_SCALE],
    checks: &[],
    flops: "2 * batch * heads * seq_k * (2 * dim_ckv + dim_kpe)",
    bytes: "batch * (heads * (2 * dim_ckv + dim_kpe) + seq_k * (dim_ckv + dim_kpe)) * dtype_bits / 8",
    ..CONTIGUOUS
};
