//! Attention over packed sequences of different lengths: queries, keys and values without padding.

use lz_abi::DTypeSet;

use super::attention::{
    CAUSAL, HEADS_DIVIDE, HEADS_EQUAL, SCALE, SINKS, SOFTCAP, SOFTCAP_VALID, WINDOW_LEFT, WINDOW_RIGHT, WINDOWS_VALID,
};
use crate::param::Param;
use crate::schema::*;

const MAX_SEQLEN_Q: Param = Param::promise(
    "max_seqlen_q",
    "no sequence has more queries than this; 0 if not known. A promise that kernels may use, and on which no result depends",
)
.also(&["max_q"]);
const MAX_SEQLEN_K: Param = Param::promise(
    "max_seqlen_k",
    "no sequence has more keys than this; 0 if not known. A promise that kernels may use, and on which no result depends",
)
.also(&["max_k"]);

pub(super) const PACKED: OpSchema = OpSchema {
    family: Family::Attention,
    semantics: "sequences are packed along the first dimension, without padding: sequence b owns the query rows \
cu_seqlens_q[b] .. cu_seqlens_q[b+1] and the key and value rows cu_seqlens_k[b] .. cu_seqlens_k[b+1]. Each is attended to as \
by dense attention: scores = scale * q.k^T (softcapped), keys outside the causal bound or the window get no weight, out = \
softmax(scores).v. Causal and windows are aligned bottom-right within each sequence. A query that may attend to nothing gives \
zeros, and so does a row of no sequence. sinks join the softmax as in dense attention. max_seqlen_q and max_seqlen_k promise that no sequence is longer; a call that breaks \
them is refused, but not in a CUDA graph, where the lengths cannot be read.",
    dims: &[
        Dim::bucketed("batch", DimKind::Batch).also(&["batch_size"]),
        Dim::bucketed("seq_q", DimKind::Seq).also(&["tokens", "seq_len", "seq_len_q"]),
        Dim::bucketed("seq_k", DimKind::Seq).also(&["seq_len_k", "kv_len"]),
        Dim::exact("heads", DimKind::Heads).also(&["num_heads"]),
        Dim::exact("kv_heads", DimKind::KvHeads).also(&["num_kv_heads"]),
        Dim::exact("head_dim", DimKind::HeadDim).must_constrain(),
        Dim::exact("v_dim", DimKind::Other),
        Dim::bucketed_or_none("max_seqlen_q", DimKind::Other),
        Dim::bucketed_or_none("max_seqlen_k", DimKind::Other),
    ],
    inputs: &[
        Input::new("query", "seq_q heads head_dim", DTypeSet::FLOATS).also(&["q"]),
        Input::same("key", "seq_k kv_heads head_dim", "query").also(&["k"]),
        Input::same("value", "seq_k kv_heads v_dim", "query").also(&["v"]),
        Input::new("cu_seqlens_q", "batch+1", DTypeSet::INDICES).also(&["qo_indptr", "cu_seq_q"]),
        Input::new("cu_seqlens_k", "batch+1", DTypeSet::INDICES).also(&["kv_indptr", "cu_seq_k"]),
        SINKS,
    ],
    params: &[CAUSAL, SCALE, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, MAX_SEQLEN_Q, MAX_SEQLEN_K],
    outputs: &[Output::like("output", "seq_q heads v_dim", "query")],
    // As if all sequences were of one length: of those with as many keys as queries, no others do less.
    flops: "2 * heads * seq_q * (seq_k / max(batch, 1)) * (head_dim + v_dim)",
    flops_when: &[
        ("window_left >= 0", "heads * seq_q * min(seq_k / max(batch, 1), window_left + 1) * (head_dim + v_dim)"),
        ("causal", "heads * seq_q * (seq_k / max(batch, 1)) * (head_dim + v_dim)"),
    ],
    bytes: "(seq_q * heads + seq_k * kv_heads) * (head_dim + v_dim) * dtype_bits / 8",
    ..BLANK
};

/// One key/value head per query head.
pub static STANDARD_PREFILL_VARLEN: OpSchema = OpSchema {
    id: "attention.standard.prefill.varlen",
    summary: "attention within packed sequences, one key/value head per query head",
    when: "heads == kv_heads",
    checks: &[HEADS_EQUAL, WINDOWS_VALID, SOFTCAP_VALID],
    ..PACKED
};

/// Key/value heads shared by groups of query heads.
pub static GQA_PREFILL_VARLEN: OpSchema = OpSchema {
    id: "attention.gqa.prefill.varlen",
    summary: "attention within packed sequences, shared key/value heads",
    when: "heads != kv_heads",
    checks: &[HEADS_DIVIDE, WINDOWS_VALID, SOFTCAP_VALID],
    ..PACKED
};
