//! What an operation gives.

use super::*;

/// A call, the operation it is, and what it gives.
struct Gives(&'static str, Made, &'static str, Vec<(&'static str, DType, Vec<i64>)>);

fn gives() -> Vec<Gives> {
    use DType::*;
    let one = |dtype, shape: &[i64]| vec![("output", dtype, shape.to_vec())];
    let with_lse =
        |dtype, shape: &[i64]| vec![("output", dtype, shape.to_vec()), ("lse", F32, shape[..shape.len() - 1].to_vec())];
    let varlen = |heads: i64, kv_heads: i64| {
        made(vec![
            t("query", Bf16, &[11, heads, 64]),
            t("key", Bf16, &[20, kv_heads, 64]),
            t("value", Bf16, &[20, kv_heads, 48]),
            t("cu_seqlens_q", I32, &[4]),
            t("cu_seqlens_k", I64, &[4]),
        ])
    };
    let wide = |seq_q: i64, heads: i64, kv_heads: i64| {
        dense(seq_q, 6, heads, kv_heads).with(t("value", F16, &[2, 6, kv_heads, 32]))
    };
    let bhsd = |seq_q: i64| {
        made(vec![
            t("query", Bf16, &[2, 8, seq_q, 64]),
            t("key", Bf16, &[2, 8, 6, 64]),
            t("value", Bf16, &[2, 8, 6, 48]),
        ])
        .layout(Layout::Bhsd)
    };
    let norm = |shape: &[i64]| made(vec![t("input", Bf16, shape), t("weight", F32, &[*shape.last().unwrap()])]);
    let sparse = |layout, query: &[i64], key: &[i64]| {
        made(vec![
            t("query", F32, query),
            t("key", F32, key),
            t("value", F32, key),
            t("block_mask", Bool, &[2, 3, 5]),
            t("block_row_sizes", I32, &[2, 3]),
            t("block_col_sizes", I32, &[2, 5]),
        ])
        .layout(layout)
    };
    let rope = |shape: &[i64]| made(vec![t("input", F16, shape), t("cos", F32, &[16, 4]), t("sin", F32, &[16, 4])]);
    let logits = |shape: &[i64]| made(vec![t("logits", F16, shape)]);
    let append = made(vec![
        t("key", F32, &[7, 2, 64]),
        t("value", F32, &[7, 2, 64]),
        t("key_cache", F8E5M2, &[40, 16, 2, 64]),
        t("value_cache", F8E5M2, &[40, 16, 2, 64]),
        t("slot_mapping", I64, &[7]),
    ]);
    let compact = made(vec![
        t("key_cache", F16, &[40, 2, 16, 64]),
        t("value_cache", F16, &[40, 2, 16, 64]),
        t("moves", I32, &[5, 2]),
    ])
    .layout(Layout::Hnd);
    let text = || {
        made(vec![])
            .param("tokenizer_id", ParamValue::str("bert"))
            .param("texts", ParamValue::Int(4))
            .param("length", ParamValue::Int(100))
    };
    let block = made(vec![
        t("query", F64, &[12, 4, 16]),
        t("key", F64, &[20, 2, 16]),
        t("value", F64, &[20, 2, 16]),
        t("indptr", I32, &[4]),
        t("indices", I32, &[9]),
    ])
    .param("R", ParamValue::Int(4))
    .param("C", ParamValue::Int(5));
    let mlp =
        made(vec![t("input", Bf16, &[2, 3, 8]), t("up_weight", Bf16, &[24, 8]), t("down_weight", Bf16, &[8, 24])]);
    let blockwise = ParamValue::str("blockwise");
    let quantized = |dtype, rows: i64, cols: i64| {
        vec![("values", dtype, vec![3, 80]), ("scales", F32, vec![rows, cols]), ("zero_points", I32, vec![rows, cols])]
    };
    vec![
        Gives("attention", wide(4, 8, 8), "attention.standard.prefill", one(F16, &[2, 4, 8, 32])),
        Gives("attention", bhsd(4), "attention.standard.prefill", one(Bf16, &[2, 8, 4, 48])),
        Gives("attention", wide(1, 8, 8), "attention.standard.decode", one(F16, &[2, 1, 8, 32])),
        Gives("attention", bhsd(1), "attention.standard.decode", one(Bf16, &[2, 8, 1, 48])),
        Gives("attention", wide(4, 8, 2), "attention.gqa.prefill", one(F16, &[2, 4, 8, 32])),
        Gives("attention", wide(1, 8, 2), "attention.gqa.decode", one(F16, &[2, 1, 8, 32])),
        Gives("attention.cross", wide(4, 8, 2), "attention.cross.prefill", one(F16, &[2, 4, 8, 32])),
        Gives("attention.cross", wide(1, 8, 8), "attention.cross.decode", one(F16, &[2, 1, 8, 32])),
        Gives("attention.paged", paged(8, 8), "attention.standard.decode.paged", one(Bf16, &[3, 8, 64])),
        Gives(
            "attention.paged",
            paged(8, 2).with(t("query", F32, &[3, 1, 8, 64])),
            "attention.gqa.decode.paged",
            one(F32, &[3, 1, 8, 64]),
        ),
        Gives("attention.paged", paged_prefill(8, 8), "attention.standard.prefill.paged", one(Bf16, &[11, 8, 64])),
        Gives("attention.paged", paged_prefill(8, 2), "attention.gqa.prefill.paged", one(Bf16, &[11, 8, 64])),
        Gives("attention.mla", mla(9, 11), "attention.mla.prefill", one(Bf16, &[9, 16, 512])),
        Gives("attention.mla", mla(1, 11), "attention.mla.decode", one(Bf16, &[1, 16, 512])),
        Gives("attention.mla", mla_paged(), "attention.mla.decode.paged", one(Bf16, &[3, 16, 512])),
        Gives(
            "attention.mla",
            mla_paged().with(t("q_nope", Bf16, &[7, 16, 512])).with(t("q_pe", Bf16, &[7, 16, 64])).with(t(
                "qo_indptr",
                I32,
                &[4],
            )),
            "attention.mla.prefill.paged",
            one(Bf16, &[7, 16, 512]),
        ),
        Gives("attention.varlen", varlen(8, 8), "attention.standard.prefill.varlen", one(Bf16, &[11, 8, 48])),
        Gives("attention.varlen", varlen(8, 2), "attention.gqa.prefill.varlen", one(Bf16, &[11, 8, 48])),
        Gives("attention.lse", wide(3, 8, 2), "attention.lse", with_lse(F16, &[2, 3, 8, 32])),
        Gives("attention.lse", bhsd(3), "attention.lse", with_lse(Bf16, &[2, 8, 3, 48])),
        Gives("attention.lse.varlen", varlen(8, 2), "attention.lse.varlen", with_lse(Bf16, &[11, 8, 48])),
        Gives("attention.lse.paged", paged(8, 2), "attention.lse.paged", with_lse(Bf16, &[3, 8, 64])),
        Gives("attention.lse.paged", paged_prefill(8, 2), "attention.lse.paged", with_lse(Bf16, &[11, 8, 64])),
        Gives(
            "merge_states",
            made(vec![
                t("out_a", F16, &[5, 4, 64]),
                t("lse_a", F32, &[5, 4]),
                t("out_b", F16, &[5, 4, 64]),
                t("lse_b", F32, &[5, 4]),
            ]),
            "attention.merge",
            with_lse(F16, &[5, 4, 64]),
        ),
        Gives("attention.sparse", block, "attention.sparse.block", one(F64, &[12, 4, 16])),
        Gives(
            "attention.sparse.variable_block",
            sparse(Layout::Hnd, &[4, 12, 16], &[2, 20, 16]),
            "attention.sparse.variable_block",
            one(F32, &[4, 12, 16]),
        ),
        Gives(
            "attention.sparse.variable_block",
            sparse(Layout::Nhd, &[12, 4, 16], &[20, 2, 16]),
            "attention.sparse.variable_block",
            one(F32, &[12, 4, 16]),
        ),
        Gives(
            "embedding",
            made(vec![t("indices", I32, &[2, 3, 4]), t("weight", Bf16, &[100, 16])]),
            "embedding.lookup",
            one(Bf16, &[2, 3, 4, 16]),
        ),
        Gives(
            "embedding",
            made(vec![t("indices", I64, &[]), t("weight", F32, &[100, 16])]),
            "embedding.lookup",
            one(F32, &[16]),
        ),
        Gives("rope", rope(&[2, 5, 3, 8]), "posenc.rope", one(F16, &[2, 5, 3, 8])),
        Gives("rope", rope(&[5, 3, 8]), "posenc.rope", one(F16, &[5, 3, 8])),
        Gives(
            "alibi_bias",
            made(vec![t("slopes", F16, &[6])]).param("seq_q", ParamValue::Int(4)).param("seq_k", ParamValue::Int(0)),
            "posenc.alibi",
            one(F16, &[6, 4, 0]),
        ),
        Gives("rms_norm", norm(&[2, 3, 8]), "norm.rms", one(Bf16, &[2, 3, 8])),
        Gives("rms_norm", norm(&[8]), "norm.rms", one(Bf16, &[8])),
        Gives("layer_norm", norm(&[0, 8]), "norm.layer", one(Bf16, &[0, 8])),
        Gives(
            "norm.fused_add_rms",
            norm(&[4, 8]).with(t("residual", Bf16, &[4, 8])),
            "norm.fused_add_rms",
            vec![("output", Bf16, vec![4, 8]), ("residual_out", Bf16, vec![4, 8])],
        ),
        Gives("linear", linear(), "mlp.linear", one(F32, &[4, 5, 7])),
        Gives("linear", linear().with(t("input", F32, &[6])), "mlp.linear", one(F32, &[7])),
        Gives("fused_mlp", mlp, "mlp.fused", one(Bf16, &[2, 3, 8])),
        Gives(
            "silu_mul",
            made(vec![t("gate", F64, &[2, 3, 8]), t("up", F64, &[2, 3, 8])]),
            "activation.silu_mul",
            one(F64, &[2, 3, 8]),
        ),
        Gives("gelu", made(vec![t("x", F16, &[2, 3, 8])]), "activation.gelu", one(F16, &[2, 3, 8])),
        Gives("softmax", made(vec![t("x", Bf16, &[3, 8])]), "activation.softmax", one(Bf16, &[3, 8])),
        Gives(
            "sampling.topk",
            logits(&[2, 3, 50]).param("k", ParamValue::Int(7)),
            "sampling.topk",
            vec![("ids", I64, vec![2, 3])],
        ),
        Gives(
            "sampling.topp",
            logits(&[50]).param("p", ParamValue::Float(0.9)),
            "sampling.topp",
            vec![("ids", I64, vec![])],
        ),
        Gives(
            "speculative_verify",
            made(vec![
                t("draft_ids", I32, &[2, 4]),
                t("draft_probs", F32, &[2, 4, 50]),
                t("target_probs", F32, &[2, 5, 50]),
            ]),
            "sampling.speculative",
            vec![("ids", I64, vec![2, 5]), ("accepted", I64, vec![2])],
        ),
        Gives("quantize", quantize("int8"), "quantize", quantized(I8, 1, 1)),
        Gives("quantize", quantize("nvfp4").param("granularity", blockwise), "quantize", quantized(NvFp4, 3, 5)),
        Gives(
            "dequantize",
            made(vec![t("values", I4, &[3, 80]), t("scales", F32, &[1])]).param("dtype", ParamValue::str("bfloat16")),
            "dequantize",
            one(Bf16, &[3, 80]),
        ),
        Gives(
            "dequantize",
            made(vec![t("values", MxFp4, &[3, 80]), t("scales", F32, &[3, 3])]).param("granularity", blockwise),
            "dequantize",
            one(F32, &[3, 80]),
        ),
        Gives(
            "linear_packed",
            made(vec![t("input", Bf16, &[2, 3, 40]), t("weight", Bf16, &[2, 32, 32, 2])])
                .param("out_features", ParamValue::Int(33))
                .param("interleave", ParamValue::Int(2)),
            "mlp.linear.packed",
            one(Bf16, &[2, 3, 33]),
        ),
        Gives(
            "linear_quantized",
            made(vec![t("input", Bf16, &[2, 3, 300]), t("weight", U8, &[2, 48, 32, 4]), t("scales", F32, &[2, 3, 32])])
                .param("out_features", ParamValue::Int(33))
                .param("interleave", ParamValue::Int(4))
                .param("group_size", ParamValue::Int(128)),
            "mlp.linear.quantized",
            one(Bf16, &[2, 3, 33]),
        ),
        Gives("kv_append", append, "kv_cache.append", vec![]),
        Gives("kv_compact", compact, "kv_cache.compact", vec![]),
        Gives("tokenize", text(), "tokenize.encode", vec![]),
        Gives("detokenize", text(), "tokenize.decode", vec![]),
    ]
}

#[test]
fn every_operation_gives_what_its_schema_says() {
    let mut seen = BTreeSet::new();
    for Gives(name, call, op, expected) in gives() {
        assert_eq!(call.op(name), op);
        assert_eq!(call.outputs(name), expected, "{op}");
        seen.insert(op);
    }
    let all: BTreeSet<&str> = Catalog::get().ops().iter().map(Op::id).collect();
    assert_eq!(seen, all, "every operation has a row");
}
