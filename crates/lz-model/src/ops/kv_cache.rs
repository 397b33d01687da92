//! Upkeep of a paged key/value cache.

use lz_abi::DTypeSet;

use crate::schema::*;

const CACHE: &str = "NHD: num_blocks block_size kv_heads head_dim | HND: num_blocks kv_heads block_size head_dim";
const KEY_CACHE: Input = Input::new("key_cache", CACHE, DTypeSet::FLOATS_AND_FP8).cache().updated();
const VALUE_CACHE: Input = Input::same("value_cache", CACHE, "key_cache").cache().updated();
const NUM_BLOCKS: Dim = Dim::bucketed("num_blocks", DimKind::Other);
const BLOCK_SIZE: Dim = Dim::exact("block_size", DimKind::Other).also(&["page_size"]);
const KV_HEADS: Dim = Dim::exact("kv_heads", DimKind::KvHeads).also(&["num_kv_heads"]);
const HEAD_DIM: Dim = Dim::exact("head_dim", DimKind::HeadDim);

/// Writes new keys and values.
pub static APPEND: OpSchema = OpSchema {
    id: "kv_cache.append",
    family: Family::KvCache,
    kind: OpKind::PrePost,
    also: &["kv_append"],
    summary: "writes new keys and values into their slots",
    semantics: "slot s = slot_mapping[t] is slot s % block_size of page s / block_size; negative slots are skipped \
(padding); later tokens win. Values are rounded to the cache's dtype. A slot beyond the cache is an error and nothing is written.",
    dims: &[
        Dim::bucketed("tokens", DimKind::Seq).also(&["seq_len", "seq_q", "batch", "batch_size"]),
        NUM_BLOCKS,
        BLOCK_SIZE,
        KV_HEADS,
        HEAD_DIM,
    ],
    inputs: &[
        Input::new("key", "tokens kv_heads head_dim", DTypeSet::FLOATS),
        Input::same("value", "tokens kv_heads head_dim", "key"),
        KEY_CACHE,
        VALUE_CACHE,
        Input::new("slot_mapping", "tokens", DTypeSet::INDICES),
    ],
    outputs: &[Output::Updates("key_cache"), Output::Updates("value_cache")],
    update: Some(Update::Idempotent),
    layout: LayoutRule::Cache,
    bytes: "4 * tokens * kv_heads * head_dim * dtype_bits / 8",
    ..BLANK
};

/// Moves pages.
pub static COMPACT: OpSchema = OpSchema {
    id: "kv_cache.compact",
    family: Family::KvCache,
    kind: OpKind::PrePost,
    also: &["kv_compact"],
    summary: "moves pages, so that freed ones gather at the end",
    semantics: "page moves[i, 1] becomes what page moves[i, 0] held before the call; sources are read before anything \
is written; of two moves to one page the later wins. A page beyond the cache is an error and nothing is written.",
    dims: &[
        Dim::bucketed("moves", DimKind::Batch).also(&["batch", "batch_size"]),
        NUM_BLOCKS,
        BLOCK_SIZE,
        KV_HEADS,
        HEAD_DIM,
    ],
    inputs: &[KEY_CACHE, VALUE_CACHE, Input::new("moves", "moves 2", DTypeSet::INDICES)],
    outputs: &[Output::Updates("key_cache"), Output::Updates("value_cache")],
    update: Some(Update::Rows { index: "moves", column: 1 }),
    layout: LayoutRule::Cache,
    tolerances: Tolerances::Exact,
    bytes: "4 * moves * block_size * kv_heads * head_dim * dtype_bits / 8",
    ..BLANK
};
