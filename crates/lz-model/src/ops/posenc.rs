//! Positional encodings.

use lz_abi::DTypeSet;

use crate::param::Param;
use crate::schema::*;

/// Rotary embedding.
pub static ROPE: OpSchema = OpSchema {
    id: "posenc.rope",
    family: Family::PosEnc,
    also: &["rope"],
    summary: "rotary positional embedding from precomputed cosines and sines",
    semantics: "pair (a, b) at position p becomes (a cos - b sin, b cos + a sin). The tables have one column per rotated \
pair (the first 2 * rot dimensions are rotated), or head_dim columns of which the first half is used. Pairs are \
(i, i + half), or (2i, 2i + 1) when interleaved. Position p is the index in the sequence unless positions are given.",
    dims: &[
        Dim::bucketed("batch", DimKind::Batch).also(&["batch_size"]).otherwise(1),
        Dim::bucketed("seq", DimKind::Seq).also(&["seq_len", "seq_q"]),
        Dim::exact("heads", DimKind::Heads).also(&["num_heads"]),
        Dim::exact("head_dim", DimKind::HeadDim),
        Dim::bucketed("table", DimKind::Other),
        Dim::exact("rot", DimKind::Other),
    ],
    inputs: &[
        Input::new(
            "input",
            "BSHD: batch seq heads head_dim | BHSD: batch heads seq head_dim | NHD: seq heads head_dim",
            DTypeSet::FLOATS,
        )
        .also(&["x"]),
        Input::new("cos", "table rot", DTypeSet::FLOATS),
        Input::same("sin", "table rot", "cos"),
        Input::new("positions", "batch? seq | seq", DTypeSet::INDICES).optional().also(&["position_ids"]),
    ],
    params: &[Param::bool("interleaved", false, "pairs are neighbours instead of half a head apart")],
    outputs: &[Output::like("output", "like:input", "input")],
    checks: &[Check {
        holds: "(rot == head_dim or 2 * rot <= head_dim) and (rot != head_dim or head_dim % 2 == 0)",
        code: CheckCode::Constraint,
        message: "the tables are wider than the head",
        hint: "pass cos and sin with one column per rotated pair (at most head_dim / 2), or with head_dim columns",
    }],
    layout: LayoutRule::Dense,
    flops: "6 * batch * seq * heads * rot",
    bytes: "2 * batch * seq * heads * head_dim * dtype_bits / 8",
    ..BLANK
};

/// Linear position bias.
pub static ALIBI: OpSchema = OpSchema {
    id: "posenc.alibi",
    family: Family::PosEnc,
    also: &["alibi_bias"],
    summary: "linear bias by distance, one slope per head",
    semantics: "out[h, i, j] = -slopes[h] * |i + seq_k - seq_q - j|, queries aligned bottom-right",
    dims: &[
        Dim::bucketed("seq_q", DimKind::Seq).also(&["seq_len", "seq_len_q"]),
        Dim::bucketed("seq_k", DimKind::Seq).also(&["seq_len_k"]),
        Dim::exact("heads", DimKind::Heads).also(&["num_heads"]),
    ],
    inputs: &[Input::new("slopes", "heads", DTypeSet::FLOATS)],
    params: &[Param::dim("seq_q", "number of queries"), Param::dim("seq_k", "number of keys")],
    outputs: &[Output::like("output", "heads seq_q seq_k", "slopes")],
    flops: "3 * heads * seq_q * seq_k",
    bytes: "heads * seq_q * seq_k * dtype_bits / 8",
    ..BLANK
};
