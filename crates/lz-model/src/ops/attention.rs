//! Dense attention over contiguous keys and values: standard, grouped-query and cross.

use lz_abi::DTypeSet;

use crate::param::{Param, ParamDefault, ParamRole, ParamType};
use crate::schema::*;

/// Softmax scale of every attention operation.
pub const SCALE: Param =
    Param::new("scale", ParamType::Float, ParamDefault::Derived, "softmax scale; 1/sqrt(head_dim) when not given")
        .role(ParamRole::Presence)
        .also(&["sm_scale", "softmax_scale"]);
/// Causal masking, aligned bottom-right.
pub const CAUSAL: Param =
    Param::bool("causal", true, "query i attends to keys up to i + seq_k - seq_q").also(&["is_causal"]);
/// Sliding window to the left.
pub const WINDOW_LEFT: Param = Param::int("window_left", -1, "how many earlier keys a query may attend to; -1 for all");
/// Sliding window to the right.
pub const WINDOW_RIGHT: Param = Param::int("window_right", -1, "how many later keys a query may attend to; -1 for all");
/// Logit soft-capping.
pub const SOFTCAP: Param =
    Param::float("softcap", 0.0, "scores become softcap * tanh(scores / softcap); 0 turns it off");

const DROPOUT: Param = Param::float("dropout_p", 0.0, "probability that an attention weight is dropped (training)");

const MASK: Input =
    Input::new("attn_mask", "batch? heads? seq_q? seq_k | seq_q? seq_k", DTypeSet::MASKS).optional().mask();
/// A learned score per head that joins the softmax and has no value.
pub const SINKS: Input = Input::new("sinks", "heads", DTypeSet::FLOATS).optional().also(&["s_aux", "learnable_sink"]);
const SLOPES: Input = Input::new("alibi_slopes", "heads", DTypeSet::FLOATS).optional();

/// Groups of query heads share a key/value head.
pub const HEADS_DIVIDE: Check = Check {
    holds: "heads % max(kv_heads, 1) == 0 and (kv_heads > 0 or heads == 0)",
    code: CheckCode::GqaHeadsMismatch,
    message: "the number of query heads is not a multiple of the number of key/value heads",
    hint: "pass key and value with a head count that divides the query's",
};
/// Every query head has a key/value head of its own.
pub const HEADS_EQUAL: Check = Check {
    holds: "heads == kv_heads",
    code: CheckCode::GqaHeadsMismatch,
    message: "standard attention needs as many key/value heads as query heads",
    hint: "call the gqa operation, or an alias such as 'attention', which picks it by head counts",
};
const MASK_OR_CAUSAL: Check = Check {
    holds: "not (causal and attn_mask.present)",
    code: CheckCode::AttnMaskInvalid,
    message: "attn_mask and causal=true were both given",
    hint: "pass causal=false and put the causal structure into the mask",
};
/// Under the bottom-right alignment the first queries would attend to nothing: almost always the tensors are in the
/// other layout.
pub(super) const QUERIES_FIT: Check = Check {
    holds: "not causal or seq_q <= seq_k",
    code: CheckCode::CausalMoreQueries,
    message: "causal attention with more queries than keys",
    hint: "if the tensors are in the other layout, say so: layout='BHSD' is (batch, heads, sequence, head_dim), \
layout='BSHD' is (batch, sequence, heads, head_dim). Otherwise pass causal=False, or call \
lz.scaled_dot_product_attention, where query i attends to the keys up to i",
};
/// Windows are at least -1.
pub const WINDOWS_VALID: Check = Check {
    holds: "window_left >= -1 and window_right >= -1",
    code: CheckCode::Constraint,
    message: "a side of 'window' is smaller than -1",
    hint: "pass window=(left, right) with -1 for no bound on a side, 0 for only the aligned key",
};
/// Softcap is not negative, and small enough that float32 scores divided by it keep their digits: scores below
/// 1e30 times the least normal number (1.2e-38) may be lost, which is 1.2e-8 and below a weight's own rounding.
pub const SOFTCAP_VALID: Check = Check {
    holds: "softcap >= 0.0 and softcap <= 1e30",
    code: CheckCode::Constraint,
    message: "softcap is negative or above 1e30",
    hint: "use 0 to turn it off, or a positive cap up to 1e30",
};
const DROPOUT_VALID: Check = Check {
    holds: "dropout_p >= 0.0 and dropout_p < 1.0",
    code: CheckCode::Constraint,
    message: "dropout_p is outside [0, 1)",
    hint: "use 0 for inference",
};

/// The dimensions of dense attention.
pub(super) const DIMS: &[Dim] = &[
    Dim::bucketed("batch", DimKind::Batch).also(&["batch_size"]),
    Dim::bucketed("seq_q", DimKind::Seq).also(&["seq_len", "seq_len_q"]),
    Dim::bucketed("seq_k", DimKind::Seq).also(&["seq_len_k", "kv_len"]),
    Dim::exact("heads", DimKind::Heads).also(&["num_heads"]),
    Dim::exact("kv_heads", DimKind::KvHeads).also(&["num_kv_heads"]),
    Dim::exact("head_dim", DimKind::HeadDim).must_constrain(),
    Dim::exact("v_dim", DimKind::Other),
];

pub(super) const QUERY: Input = Input::new(
    "query",
    "BSHD: batch seq_q heads head_dim | BHSD: batch heads seq_q head_dim",
    DTypeSet::FLOATS_AND_FP8,
)
.also(&["q"]);
pub(super) const KEY: Input =
    Input::same("key", "BSHD: batch seq_k kv_heads head_dim | BHSD: batch kv_heads seq_k head_dim", "query")
        .also(&["k"]);
pub(super) const VALUE: Input =
    Input::same("value", "BSHD: batch seq_k kv_heads v_dim | BHSD: batch kv_heads seq_k v_dim", "query").also(&["v"]);

const SELF_INPUTS: &[Input] = &[QUERY, KEY, VALUE, MASK, SLOPES, SINKS];
const SELF_PARAMS: &[Param] = &[CAUSAL, SCALE, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, DROPOUT, Param::seed()];

const SEMANTICS: &str = "scores = scale * q.k^T (softcapped, plus slope * -|distance|, plus or masked by attn_mask); \
keys outside the causal bound or the window get no weight; out = softmax(scores).v. Causal and windows are aligned \
bottom-right: query i stands at key position i + seq_k - seq_q, and a causal call has at least as many keys as queries. A query that may attend to nothing gives zeros. \
sinks is a score per head that joins the softmax and has no value: weights are exp(scores) / (sum(exp(scores)) + exp(sink)). Each \
group of heads/kv_heads query heads shares one key/value head. A NaN that takes part gives NaN; a NaN or \
infinity among keys or values that get no weight may reach further rows, since kernels multiply it by zero.";

/// What every dense attention gives where arithmetic ends.
const EDGES: &[Edge] = &[
    Edge {
        name: "nan_scores",
        when: "all scores of a query are NaN: it holds a NaN, or every key it attends to does",
        gives: "NaN for that query",
        except: "with fewer than 16 keys torch's fused kernel for the CPU gives zeros; under a mask that leaves such a \
query nothing it gives NaN instead of zeros",
    },
    Edge {
        name: "infinite_score",
        when: "a score is plus infinity: of infinite queries or keys, or products beyond float32's range",
        gives: "NaN for that query",
        except: "torch's fused kernel for the CPU gives zeros in float16 and bfloat16",
    },
    Edge {
        name: "tiny_scale",
        when: "scale is closer to 0 than float32's smallest normal number, 2^-126",
        gives: "the scores by the definition, which in float32 or narrower are 0: keys that may be attended to weigh \
the same",
        except: "",
    },
    Edge {
        name: "half_gradients",
        when: "gradients of key and value are wanted in float16 or bfloat16",
        gives: "sums over more than 4096 queries are made in float32",
        except: "fused kernels round weights to the dtype first; torch's for the CPU also rounds the sum after every \
256 of up to 4096 queries",
    },
];

const DENSE: OpSchema = OpSchema {
    family: Family::Attention,
    semantics: SEMANTICS,
    edges: EDGES,
    dims: DIMS,
    inputs: SELF_INPUTS,
    params: SELF_PARAMS,
    outputs: &[Output::like("output", "BSHD: batch seq_q heads v_dim | BHSD: batch heads seq_q v_dim", "query")],
    layout: LayoutRule::Dense,
    flops: "2 * batch * heads * seq_q * seq_k * (head_dim + v_dim)",
    // A mask may leave anything out; half of a window's width is attended to at least.
    flops_when: &[
        ("attn_mask.present", "0"),
        ("window_left >= 0", "batch * heads * seq_q * min(seq_k, window_left + 1) * (head_dim + v_dim)"),
        (
            "causal",
            "2 * batch * heads * (head_dim + v_dim) * (seq_q * max(seq_k - seq_q, 0) + min(seq_q, seq_k) * (min(seq_q, seq_k) + 1) / 2)",
        ),
    ],
    bytes: "batch * (seq_q * heads * (head_dim + v_dim) + seq_k * kv_heads * (head_dim + v_dim)) * dtype_bits / 8",
    ..BLANK
};

const STANDARD_CHECKS: &[Check] =
    &[HEADS_EQUAL, MASK_OR_CAUSAL, QUERIES_FIT, WINDOWS_VALID, SOFTCAP_VALID, DROPOUT_VALID];
const GQA_CHECKS: &[Check] = &[HEADS_DIVIDE, MASK_OR_CAUSAL, QUERIES_FIT, WINDOWS_VALID, SOFTCAP_VALID, DROPOUT_VALID];

/// Many queries, as many key/value heads as query heads.
pub static STANDARD_PREFILL: OpSchema = OpSchema {
    id: "attention.standard.prefill",
    summary: "attention of many queries, one key/value head per query head",
    when: "heads == kv_heads and seq_q != 1",
    checks: STANDARD_CHECKS,
    ..DENSE
};

/// One query per sequence, as many key/value heads as query heads.
pub static STANDARD_DECODE: OpSchema = OpSchema {
    id: "attention.standard.decode",
    summary: "attention of one new query per sequence, one key/value head per query head",
    when: "heads == kv_heads and seq_q == 1",
    checks: STANDARD_CHECKS,
    ..DENSE
};

/// Many queries, key/value heads shared by groups of query heads.
pub static GQA_PREFILL: OpSchema = OpSchema {
    id: "attention.gqa.prefill",
    summary: "attention of many queries, key/value heads shared by groups of query heads",
    when: "heads != kv_heads and seq_q != 1",
    checks: GQA_CHECKS,
    ..DENSE
};

/// One query per sequence, key/value heads shared by groups of query heads.
pub static GQA_DECODE: OpSchema = OpSchema {
    id: "attention.gqa.decode",
    summary: "attention of one new query per sequence, key/value heads shared by groups of query heads",
    when: "heads != kv_heads and seq_q == 1",
    checks: GQA_CHECKS,
    ..DENSE
};

const CROSS: OpSchema = OpSchema {
    flops_when: &[("attn_mask.present", "0")],
    params: &[SCALE, SOFTCAP, DROPOUT, Param::seed()],
    checks: &[HEADS_DIVIDE, SOFTCAP_VALID, DROPOUT_VALID],
    semantics: "out = softmax(scale * q.k^T + mask).v with keys and values of another sequence (an encoder's); never causal",
    inputs: &[QUERY, KEY, VALUE, MASK],
    ..DENSE
};

/// Many queries over an encoder's keys and values.
pub static CROSS_PREFILL: OpSchema = OpSchema {
    id: "attention.cross.prefill",
    summary: "attention of many queries to another sequence",
    when: "seq_q != 1",
    ..CROSS
};

/// One query per sequence over an encoder's keys and values.
pub static CROSS_DECODE: OpSchema = OpSchema {
    id: "attention.cross.decode",
    summary: "attention of one new query per sequence to another sequence",
    when: "seq_q == 1",
    ..CROSS
};
