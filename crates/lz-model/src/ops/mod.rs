//! The operations, one file per family. To add one: write its schema, add a line to [`OPS`].

use crate::function::Function;
use crate::schema::{Alias, OpSchema};

pub mod activation;
pub mod attention;
pub mod attention_lse;
pub mod attention_mla;
pub mod attention_paged;
pub mod attention_sparse;
pub mod attention_varlen;
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
    &attention_varlen::STANDARD_PREFILL_VARLEN,
    &attention_varlen::GQA_PREFILL_VARLEN,
    &attention_paged::STANDARD_PREFILL_PAGED,
    &attention_paged::STANDARD_DECODE_PAGED,
    &attention_paged::GQA_PREFILL_PAGED,
    &attention_paged::GQA_DECODE_PAGED,
    &attention_lse::DENSE,
    &attention_lse::VARLEN,
    &attention_lse::PAGED,
    &attention_lse::MERGE,
    &attention_mla::PREFILL,
    &attention_mla::DECODE,
    &attention_mla::DECODE_PAGED,
    &attention_mla::PREFILL_PAGED,
    &attention_sparse::BLOCK,
    &attention_sparse::VARIABLE_BLOCK,
    &embedding::LOOKUP,
    &posenc::ROPE,
    &posenc::ALIBI,
    &norm::RMS,
    &norm::LAYER,
    &norm::FUSED_ADD_RMS,
    &mlp::LINEAR,
    &mlp::LINEAR_PACKED,
    &mlp::LINEAR_QUANTIZED,
    &mlp::FUSED,
    &activation::SILU_MUL,
    &activation::GELU,
    &activation::SOFTMAX,
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
    Alias {
        name: "attention.varlen",
        ops: &["attention.standard.prefill.varlen", "attention.gqa.prefill.varlen"],
        fixes: &[],
    },
    Alias { name: "attention.cross", ops: &["attention.cross.decode", "attention.cross.prefill"], fixes: &[] },
    Alias {
        name: "attention.mla",
        ops: &[
            "attention.mla.decode.paged",
            "attention.mla.prefill.paged",
            "attention.mla.decode",
            "attention.mla.prefill",
        ],
        fixes: &[],
    },
    Alias { name: "attention.sparse", ops: &["attention.sparse.block", "attention.sparse.variable_block"], fixes: &[] },
];

const fn function(name: &'static str, target: &'static str, arguments: &'static str) -> Function {
    Function { name, target, arguments, summary: "" }
}

impl Function {
    /// The same with a line of its own, for functions of several operations.
    const fn about(mut self, summary: &'static str) -> Function {
        self.summary = summary;
        self
    }
}

/// The operations as people call them. Names after `*` are given by name only.
pub static FUNCTIONS: &[Function] = &[
    function(
        "attention",
        "attention",
        "query key value causal scale * attn_mask alibi_slopes sinks window softcap dropout_p seed return_lse layout out",
    )
    .about("softmax attention: standard or grouped-query by head counts, prefill or decode by query length"),
    function(
        "cross_attention",
        "attention.cross",
        "query key value scale * attn_mask softcap dropout_p seed layout out",
    )
    .about("softmax attention to another sequence, prefill or decode by query length"),
    function(
        "varlen_attention",
        "attention.varlen",
        "query key value cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k * causal scale sinks window softcap return_lse out",
    )
    .about("softmax attention within packed sequences of different lengths, standard or grouped-query"),
    function(
        "paged_attention",
        "attention.paged",
        "query key_cache value_cache block_tables context_lens scale * cu_seqlens_q causal sinks window softcap shared_prefix \
return_lse layout out",
    )
    .about("softmax attention over a paged cache: standard or grouped-query, decode or packed prefill"),
    function("attention_lse", "attention.lse", "query key value causal scale * window softcap layout"),
    function(
        "varlen_attention_lse",
        "attention.lse.varlen",
        "query key value cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k * causal scale window softcap",
    ),
    function(
        "paged_attention_lse",
        "attention.lse.paged",
        "query key_cache value_cache block_tables context_lens scale * cu_seqlens_q causal window softcap layout",
    ),
    function("merge_states", "attention.merge", "out_a lse_a out_b lse_b"),
    function(
        "mla_attention",
        "attention.mla",
        "q_nope q_pe ckv kpe scale * causal qo_indptr kv_indptr block_tables context_lens out",
    )
    .about("multi-head latent attention over compressed keys and values, contiguous or paged"),
    function(
        "sparse_attention",
        "attention.sparse",
        "query key value * indptr indices block_rows block_cols block_mask block_row_sizes block_col_sizes scale layout \
out",
    )
    .about("softmax attention within blocks: listed ones of one size, or a mask of blocks of many sizes"),
    function("embedding", "embedding.lookup", "indices weight * out"),
    function("rope", "posenc.rope", "input cos sin interleaved * positions layout out"),
    function("alibi_bias", "posenc.alibi", "slopes seq_q seq_k * out"),
    function("rms_norm", "norm.rms", "input weight eps * out"),
    function("layer_norm", "norm.layer", "input normalized_shape weight bias eps * out"),
    function("fused_add_rms_norm", "norm.fused_add_rms", "input residual weight eps"),
    function("linear", "mlp.linear", "input weight bias * out"),
    function("linear_packed", "mlp.linear.packed", "input weight bias * out_features interleave activation out"),
    function(
        "linear_quantized",
        "mlp.linear.quantized",
        "input weight bias * scales out_features interleave group_size activation out",
    ),
    function("fused_mlp", "mlp.fused", "input up_weight down_weight gate_weight activation * out"),
    function("silu_mul", "activation.silu_mul", "gate up * out"),
    function("gelu", "activation.gelu", "input approximate * out"),
    function("softmax", "activation.softmax", "input * out"),
    function("sample_topk", "sampling.topk", "logits k * uniform seed generator out"),
    function("sample_topp", "sampling.topp", "logits p * uniform seed generator out"),
    function(
        "speculative_verify",
        "sampling.speculative",
        "draft_ids draft_probs target_probs * uniform seed generator",
    ),
    function("quantize", "quantize", "input dtype scale * granularity group_size zero_point"),
    function("dequantize", "dequantize", "values scales zero_points * dtype granularity group_size format"),
    function("kv_append", "kv_cache.append", "key value key_cache value_cache slot_mapping * layout"),
    function("kv_compact", "kv_cache.compact", "key_cache value_cache moves * layout"),
];
