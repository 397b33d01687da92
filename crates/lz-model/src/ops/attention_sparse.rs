//! Block-sparse attention.

use lz_abi::DTypeSet;

use super::attention::{HEADS_DIVIDE, SCALE};
use crate::layout::Layout;
use crate::param::Param;
use crate::schema::*;

const SEQ_Q: Dim = Dim::bucketed("seq_q", DimKind::Seq).also(&["seq_len", "seq_len_q"]);
const SEQ_K: Dim = Dim::bucketed("seq_k", DimKind::Seq).also(&["kv_len", "seq_len_k"]);
const HEADS: Dim = Dim::exact("heads", DimKind::Heads).also(&["num_heads"]);
const KV_HEADS: Dim = Dim::exact("kv_heads", DimKind::KvHeads).also(&["num_kv_heads"]);
const HEAD_DIM: Dim = Dim::exact("head_dim", DimKind::HeadDim).must_constrain();

/// Sparsity in blocks of one size, as block compressed rows.
pub static BLOCK: OpSchema = OpSchema {
    id: "attention.sparse.block",
    family: Family::Attention,
    summary: "attention within listed blocks of one size",
    semantics: "query rows [i*R, (i+1)*R) attend to key rows [j*C, (j+1)*C) for the block columns j listed in \
indices[indptr[i] .. indptr[i+1]], and to nothing else; a row with no block gives zeros",
    dims: &[
        SEQ_Q,
        SEQ_K,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        Dim::exact("block_rows", DimKind::Other),
        Dim::exact("block_cols", DimKind::Other),
        Dim::bucketed("row_blocks", DimKind::Other),
        Dim::bucketed("nnz", DimKind::Other),
    ],
    inputs: &[
        Input::new("query", "seq_q heads head_dim", DTypeSet::FLOATS).also(&["q"]),
        Input::same("key", "seq_k kv_heads head_dim", "query").also(&["k"]),
        Input::same("value", "seq_k kv_heads head_dim", "query").also(&["v"]),
        Input::new("indptr", "row_blocks+1", DTypeSet::INDICES),
        Input::new("indices", "nnz", DTypeSet::INDICES),
    ],
    params: &[
        Param::dim("block_rows", "query rows per block").also(&["R"]),
        Param::dim("block_cols", "key rows per block").also(&["C"]),
        SCALE,
    ],
    outputs: &[Output::like("output", "like:query", "query")],
    fixed_layout: Some(Layout::Nhd),
    checks: &[
        HEADS_DIVIDE,
        Check {
            holds: "block_rows >= 1 and block_cols >= 1 and seq_q == row_blocks * block_rows and seq_k % max(block_cols, 1) == 0",
            code: CheckCode::Constraint,
            message: "the blocks do not tile the sequences",
            hint: "seq_q must be (len(indptr) - 1) * block_rows and seq_k a multiple of block_cols",
        },
    ],
    flops: "4 * nnz * block_rows * block_cols * heads * head_dim",
    bytes: "(2 * seq_q * heads + 2 * seq_k * kv_heads) * head_dim * dtype_bits / 8",
    ..BLANK
};

/// Sparsity in blocks of many sizes, per key/value head.
pub static VARIABLE_BLOCK: OpSchema = OpSchema {
    id: "attention.sparse.variable_block",
    summary: "attention within a block mask whose rows and columns have sizes of their own",
    semantics: "for key/value head h, block row i covers the next block_row_sizes[h, i] queries and block column j the \
next block_col_sizes[h, j] keys; they attend exactly where block_mask[h, i, j] is true; a row with no block gives zeros",
    dims: &[
        SEQ_Q,
        SEQ_K,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        Dim::bucketed("row_blocks", DimKind::Other),
        Dim::bucketed("col_blocks", DimKind::Other),
    ],
    inputs: &[
        Input::new("query", "HND: heads seq_q head_dim | NHD: seq_q heads head_dim", DTypeSet::FLOATS).also(&["q"]),
        Input::same("key", "HND: kv_heads seq_k head_dim | NHD: seq_k kv_heads head_dim", "query").also(&["k"]),
        Input::same("value", "HND: kv_heads seq_k head_dim | NHD: seq_k kv_heads head_dim", "query").also(&["v"]),
        Input::new("block_mask", "kv_heads row_blocks col_blocks", DTypeSet::of(&[lz_abi::DType::Bool])),
        Input::new("block_row_sizes", "kv_heads row_blocks", DTypeSet::INDICES),
        Input::new("block_col_sizes", "kv_heads col_blocks", DTypeSet::INDICES),
    ],
    params: &[SCALE],
    checks: &[HEADS_DIVIDE],
    layout: LayoutRule::Fixed(Layout::Hnd),
    flops: "4 * seq_q * seq_k * heads * head_dim",
    ..BLOCK_SHAPE
};

const BLOCK_SHAPE: OpSchema = OpSchema {
    family: Family::Attention,
    outputs: &[Output::like("output", "like:query", "query")],
    bytes: "(2 * seq_q * heads + 2 * seq_k * kv_heads) * head_dim * dtype_bits / 8",
    ..BLANK
};
