//! Attention over a paged key/value cache.

use lz_abi::DTypeSet;

use super::attention::{
    CAUSAL, HEADS_DIVIDE, HEADS_EQUAL, SCALE, SINKS, SOFTCAP, SOFTCAP_VALID, WINDOW_LEFT, WINDOW_RIGHT, WINDOWS_VALID,
};
use crate::param::Param;
use crate::schema::*;

/// Page indices of each sequence.
pub const BLOCK_TABLES: Input = Input::new("block_tables", "batch max_blocks", DTypeSet::INDICES).cache();
/// Tokens of each sequence in the cache.
pub const CONTEXT_LENS: Input = Input::new("context_lens", "batch", DTypeSet::INDICES).cache().also(&["seq_lens"]);

pub(super) const KEY_CACHE: Input = Input::new(
    "key_cache",
    "NHD: num_blocks block_size kv_heads head_dim | HND: num_blocks kv_heads block_size head_dim",
    DTypeSet::FLOATS_AND_FP8,
)
.cache();
pub(super) const VALUE_CACHE: Input = Input::same(
    "value_cache",
    "NHD: num_blocks block_size kv_heads head_dim | HND: num_blocks kv_heads block_size head_dim",
    "key_cache",
)
.cache();

pub(super) const BATCH: Dim = Dim::bucketed("batch", DimKind::Batch).also(&["batch_size"]);
pub(super) const TOKENS: Dim = Dim::bucketed("seq_q", DimKind::Seq).also(&["seq_len", "seq_len_q", "tokens"]);
pub(super) const MAX_BLOCKS: Dim = Dim::bucketed("max_blocks", DimKind::Other);
pub(super) const NUM_BLOCKS: Dim = Dim::bucketed("num_blocks", DimKind::Other);
pub(super) const BLOCK_SIZE: Dim = Dim::exact("block_size", DimKind::Other).also(&["page_size"]);
pub(super) const HEADS: Dim = Dim::exact("heads", DimKind::Heads).also(&["num_heads"]);
pub(super) const KV_HEADS: Dim = Dim::exact("kv_heads", DimKind::KvHeads).also(&["num_kv_heads"]);
pub(super) const HEAD_DIM: Dim = Dim::exact("head_dim", DimKind::HeadDim).must_constrain();
pub(super) const MAX_CONTEXT: Dim = Dim::bucketed("seq_k", DimKind::Seq)
    .also(&["seq_len_k", "max_context"])
    .derived(|sizes| sizes.dim("max_blocks").saturating_mul(sizes.dim("block_size")));
const SHARED: Dim = Dim::bucketed_or_none("shared_prefix", DimKind::Other);

const SHARED_PREFIX: Param = Param::promise(
    "shared_prefix",
    "how many cached tokens all sequences begin with, in the same pages; a promise that kernels may use, and on which no \
result depends",
);

// The one query of a sequence is its last position, and no key comes after it.
const DECODE_CAUSAL: Param = CAUSAL.without_effect();
const DECODE_WINDOW_RIGHT: Param = WINDOW_RIGHT.without_effect();

const DECODE: OpSchema = OpSchema {
    family: Family::Attention,
    semantics: "sequence b's keys are the first context_lens[b] slots of the pages block_tables[b, 0..]; its one query \
attends to all of them (within the window); no key comes after it, so causal and the right side of the window change \
nothing. A context length of 0 gives zeros. sinks join the softmax as in dense attention. Page indices beyond the context are not read. \
shared_prefix promises that no context is shorter than that, and that the first shared_prefix // block_size columns of \
block_tables are the same in all rows; a kernel that relies on it refuses a call that breaks it.",
    dims: &[BATCH, MAX_BLOCKS, NUM_BLOCKS, MAX_CONTEXT, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, SHARED],
    inputs: &[
        Input::new("query", "batch heads head_dim | batch 1 heads head_dim", DTypeSet::FLOATS_AND_FP8).also(&["q"]),
        KEY_CACHE,
        VALUE_CACHE,
        BLOCK_TABLES,
        CONTEXT_LENS,
        SINKS,
    ],
    params: &[SCALE, WINDOW_LEFT, SOFTCAP, SHARED_PREFIX, DECODE_CAUSAL, DECODE_WINDOW_RIGHT],
    outputs: &[Output::like("output", "like:query", "query")],
    layout: LayoutRule::Cache,
    flops: "4 * batch * heads * seq_k * head_dim",
    // Tokens that all share are read once.
    bytes: "(2 * (batch * seq_k - max(batch - 1, 0) * min(shared_prefix, seq_k)) * kv_heads + 2 * batch * heads) \
* head_dim * dtype_bits / 8",
    ..BLANK
};

const PREFILL: OpSchema = OpSchema {
    semantics: "queries are packed along the first dimension; sequence b owns rows cu_seqlens_q[b] .. cu_seqlens_q[b+1], \
which are the last positions of its context_lens[b] cached tokens (bottom-right aligned). sinks join the softmax as in \
dense attention. shared_prefix is the promise it is \
in decoding.",
    dims: &[BATCH, TOKENS, MAX_BLOCKS, NUM_BLOCKS, MAX_CONTEXT, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, SHARED],
    inputs: &[
        Input::new("query", "seq_q heads head_dim", DTypeSet::FLOATS_AND_FP8).also(&["q"]),
        KEY_CACHE,
        VALUE_CACHE,
        BLOCK_TABLES,
        CONTEXT_LENS,
        Input::new("cu_seqlens_q", "batch+1", DTypeSet::INDICES).also(&["qo_indptr"]),
        SINKS,
    ],
    params: &[CAUSAL, SCALE, WINDOW_LEFT, SOFTCAP, SHARED_PREFIX, WINDOW_RIGHT],
    flops: "4 * seq_q * heads * seq_k * head_dim",
    bytes: "(2 * (batch * seq_k - max(batch - 1, 0) * min(shared_prefix, seq_k)) * kv_heads + 2 * seq_q * heads) \
* head_dim * dtype_bits / 8",
    ..DECODE
};

const SHARED_FITS: Check = Check {
    holds: "shared_prefix <= seq_k",
    code: CheckCode::Constraint,
    message: "shared_prefix is more than the pages of a sequence hold",
    hint: "shared_prefix is a number of tokens, at most max_blocks * block_size; 0 where nothing is shared",
};

const STANDARD: &[Check] = &[HEADS_EQUAL, WINDOWS_VALID, SOFTCAP_VALID, SHARED_FITS];
const GQA: &[Check] = &[HEADS_DIVIDE, WINDOWS_VALID, SOFTCAP_VALID, SHARED_FITS];

/// Decode, one key/value head per query head.
pub static STANDARD_DECODE_PAGED: OpSchema = OpSchema {
    id: "attention.standard.decode.paged",
    summary: "one new query per sequence over a paged cache, one key/value head per query head",
    when: "heads == kv_heads",
    checks: STANDARD,
    ..DECODE
};

/// Decode, shared key/value heads.
pub static GQA_DECODE_PAGED: OpSchema = OpSchema {
    id: "attention.gqa.decode.paged",
    summary: "one new query per sequence over a paged cache, shared key/value heads",
    when: "heads != kv_heads",
    checks: GQA,
    ..DECODE
};

/// Prefill, one key/value head per query head.
pub static STANDARD_PREFILL_PAGED: OpSchema = OpSchema {
    id: "attention.standard.prefill.paged",
    summary: "packed queries over a paged cache, one key/value head per query head",
    when: "heads == kv_heads",
    checks: STANDARD,
    ..PREFILL
};

/// Prefill, shared key/value heads.
pub static GQA_PREFILL_PAGED: OpSchema = OpSchema {
    id: "attention.gqa.prefill.paged",
    summary: "packed queries over a paged cache, shared key/value heads",
    when: "heads != kv_heads",
    checks: GQA,
    ..PREFILL
};
