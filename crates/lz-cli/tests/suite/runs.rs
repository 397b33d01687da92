//! `layerzero run`: every operation that has a kernel here runs on the inputs made for it.

use std::collections::BTreeSet;

use lz_model::ops::OPS;
use lz_model::schema::OpKind;

use crate::support::layerzero;

/// A call of every operation, with every kind of index it takes.
const CALLS: &[&str] = &[
    "attention.standard.prefill --shape q=2x5x3x8 --shape k=2x5x3x8 --shape v=2x5x3x8 --shape alibi_slopes=3",
    "attention.standard.decode --shape q=2x1x3x8 --shape k=2x7x3x8 --shape v=2x7x3x8 --param softcap=5",
    "attention.gqa.prefill --dtype bf16 --shape q=2x5x4x8 --shape k=2x5x2x8 --shape v=2x5x2x8 --shape attn_mask=5x5 --param causal=false",
    "attention.gqa.decode --dtype f16 --shape q=2x4x1x8 --shape k=2x2x7x8 --shape v=2x2x7x8 --layout BHSD",
    "attention.cross.prefill --shape q=2x5x4x8 --shape k=2x9x2x8 --shape v=2x9x2x8",
    "attention.cross.decode --shape q=2x1x4x8 --shape k=2x9x2x8 --shape v=2x9x2x8",
    "attention.standard.prefill.paged --shape q=6x2x8 --shape key_cache=8x4x2x8 --shape value_cache=8x4x2x8 --shape block_tables=2x4 --shape context_lens=2 --shape cu_seqlens_q=3",
    "attention.standard.decode.paged --shape q=2x2x8 --shape key_cache=8x4x2x8 --shape value_cache=8x4x2x8 --shape block_tables=2x4 --shape context_lens=2",
    "attention.gqa.prefill.paged --shape q=6x4x8 --shape key_cache=8x2x4x8 --shape value_cache=8x2x4x8 --layout HND --shape block_tables=2x4 --shape context_lens=2 --shape qo_indptr=3",
    "attention.gqa.decode.paged --shape q=2x4x8 --shape key_cache=8x4x2x8 --shape value_cache=8x4x2x8 --shape block_tables=2x4 --shape seq_lens=2 --input-dtype seq_lens=int32",
    "attention.gqa.decode.paged --shape q=3x4x8 --shape key_cache=8x4x2x8 --shape value_cache=8x4x2x8 --shape block_tables=3x4 --shape context_lens=3 --param shared_prefix=9",
    "attention.standard.prefill.varlen --shape q=6x2x8 --shape k=8x2x8 --shape v=8x2x8 --shape cu_seqlens_q=3 --shape cu_seqlens_k=3 --shape sinks=2",
    "attention.gqa.prefill.varlen --dtype bf16 --shape q=6x4x8 --shape k=8x2x8 --shape v=8x2x6 --shape cu_seqlens_q=3 --shape cu_seqlens_k=3 --param max_seqlen_q=3",
    "attention.lse --shape q=2x5x4x8 --shape k=2x5x2x8 --shape v=2x5x2x8",
    "attention.lse.varlen --shape q=6x4x8 --shape k=8x2x8 --shape v=8x2x8 --shape cu_seqlens_q=3 --shape cu_seqlens_k=3",
    "attention.lse.paged --shape q=2x4x8 --shape key_cache=8x4x2x8 --shape value_cache=8x4x2x8 --shape block_tables=2x4 --shape context_lens=2",
    "attention.merge --dtype bf16 --shape out_a=3x4x8 --shape lse_a=3x4 --shape out_b=3x4x8 --shape lse_b=3x4",
    "attention.mla.prefill.paged --shape q_nope=5x4x16 --shape q_pe=5x4x8 --shape ckv_cache=8x4x16 --shape kpe_cache=8x4x8 --shape block_tables=2x4 --shape context_lens=2 --shape qo_indptr=3 --param scale=0.1",
    "attention.mla.prefill --shape q_nope=5x4x16 --shape q_pe=5x4x8 --shape ckv=7x16 --shape kpe=7x8 --param scale=0.1 --shape qo_indptr=3 --shape kv_indptr=3",
    "attention.mla.decode --shape q_nope=1x4x16 --shape q_pe=1x4x8 --shape ckv=7x16 --shape kpe=7x8 --param scale=0.1",
    "attention.mla.decode.paged --shape q_nope=2x4x16 --shape q_pe=2x4x8 --shape ckv_cache=8x4x16 --shape kpe_cache=8x4x8 --shape block_tables=2x4 --shape context_lens=2 --param scale=0.1",
    "attention.sparse.block --shape q=8x4x8 --shape k=12x2x8 --shape v=12x2x8 --shape indptr=5 --shape indices=6 --param block_rows=2 --param block_cols=3",
    "attention.sparse.variable_block --shape q=4x9x8 --shape k=2x10x8 --shape v=2x10x8 --shape block_mask=2x3x4 --shape block_row_sizes=2x3 --shape block_col_sizes=2x4",
    "embedding.lookup --dtype bf16 --shape indices=2x3 --shape weight=10x4",
    "posenc.rope --shape x=2x5x4x8 --shape cos=16x4 --shape sin=16x4 --shape positions=2x5",
    "posenc.alibi --shape slopes=4 --param seq_q=3 --param seq_k=5",
    "norm.rms --shape input=4x8 --shape weight=8 --strides input=16x1",
    "norm.layer --shape input=2x4x8 --shape weight=8 --shape bias=8",
    "norm.fused_add_rms --shape input=4x8 --shape residual=4x8",
    "mlp.linear --shape input=4x8 --shape weight=6x8 --shape bias=6",
    "mlp.linear.packed --shape input=4x8 --shape weight=1x8x32x1 --shape bias=6 --param out_features=6",
    "mlp.linear.packed --dtype bf16 --shape input=4x30 --shape weight=2x16x32x2 --param out_features=40 --param interleave=2 --param activation=silu",
    "mlp.linear.quantized --shape input=4x40 --shape weight=1x40x32x1 --input-dtype weight=int8 --shape scales=1x2x32 --shape bias=6 --param out_features=6 --param group_size=32",
    "mlp.linear.quantized --shape input=4x30 --shape weight=2x16x32x4 --input-dtype weight=uint8 --shape scales=2x1x32 --param out_features=40 --param interleave=4 --param activation=silu",
    "mlp.fused --shape input=4x8 --shape up_weight=16x8 --shape down_weight=8x16 --shape gate_weight=16x8 --param activation=gelu",
    "activation.silu_mul --shape gate=4x8 --shape up=4x8",
    "activation.gelu --shape input=4x8 --param approximate=tanh",
    "activation.softmax --dtype bf16 --shape input=2x4x8",
    "sampling.topk --shape logits=4x50 --shape uniform=4 --param k=5",
    "sampling.topp --shape logits=4x50 --param p=0.9 --param seed=7",
    "sampling.speculative --shape draft_ids=2x3 --shape draft_probs=2x3x10 --shape target_probs=2x4x10 --shape uniform=2x4",
    "quantize --shape input=4x64 --param dtype=mxfp4 --param granularity=blockwise",
    "dequantize --dtype int4 --shape values=4x64 --shape scales=4x2 --shape zero_points=4x2 --param granularity=blockwise",
    "kv_cache.append --shape key=6x2x8 --shape value=6x2x8 --shape key_cache=4x4x2x8 --shape value_cache=4x4x2x8 --input-dtype key_cache=fp8_e4m3 --shape slot_mapping=6",
    "kv_cache.compact --shape key_cache=8x4x2x8 --shape value_cache=8x4x2x8 --shape moves=3x2",
];

#[test]
fn every_operation_runs_on_inputs_made_for_it() {
    let mut ran = BTreeSet::new();
    for call in CALLS {
        let answer = layerzero(&format!("run --json --op {call}")).ended(0).json();
        let op = answer["op"].as_str().unwrap();
        assert!(call.starts_with(&format!("{op} ")), "{call} ran {op}");
        ran.insert(op.to_owned());
        assert!(answer["kernel_id"].as_str().unwrap().starts_with("lz_cpu."), "{answer}");
        assert!(!answer["outputs"].as_array().unwrap().is_empty(), "{call}");
        for output in answer["outputs"].as_array().unwrap() {
            assert_eq!(output["nans"], 0, "{call}: {output}");
            assert!(output["mean"].is_f64() && output["checksum"].is_string(), "{call}: {output}");
        }
    }
    let tensor_ops = OPS.iter().filter(|op| op.kind != OpKind::Tokenization);
    assert_eq!(ran, tensor_ops.map(|op| op.id.to_owned()).collect());
}

#[test]
fn inputs_are_a_function_of_the_seed() {
    let checksum = |seed: u64| {
        let answer = layerzero(&format!("run --json --op rms_norm --shape input=4x8 --seed {seed}")).ended(0).json();
        answer["outputs"][0]["checksum"].as_str().unwrap().to_owned()
    };
    assert_eq!(checksum(1), checksum(1));
    assert_ne!(checksum(1), checksum(2));
}

#[test]
fn people_see_what_ran_and_what_came_out() {
    let text = layerzero("run --op rms_norm --shape input=4x8 --seed 3").ended(0).out;
    for part in ["lz_cpu.", "ran norm.rms in", "seed  3", "4x8", "float32", "checksum"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let cache = "run --op kv_append --shape key=3x2x4 --shape value=3x2x4 --shape key_cache=2x2x2x4 --shape value_cache=2x2x2x4 --shape slot_mapping=3";
    let text = layerzero(cache).ended(0).out;
    assert!(text.contains("key_cache") && text.contains("value_cache"), "updated inputs are outputs: {text}");
}

#[test]
fn empty_tensors_run_too() {
    let answer = layerzero("run --json --op rms_norm --shape input=0x8").ended(0).json();
    assert!(answer["outputs"][0]["mean"].is_null(), "{answer}");
}

#[test]
fn kernels_for_vector_instructions_run_where_they_are_asked_for() {
    let call = "run --json --op softmax --shape input=3x40 --seed 5";
    let simd = layerzero(&format!("{call} --simd --lock lz_cpu.softmax")).ended(0).json();
    assert_eq!(simd["kernel_id"], "lz_cpu.softmax");
    let reference = layerzero(call).ended(0).json();
    assert_eq!(reference["kernel_id"], "lz_cpu.ref.activation.softmax");
    for figure in ["mean", "min", "max"] {
        let of = |answer: &serde_json::Value| answer["outputs"][0][figure].as_f64().unwrap();
        assert!((of(&simd) - of(&reference)).abs() < 1e-6, "{figure}: {simd} {reference}");
    }
}

#[test]
fn a_call_may_be_repeated() {
    let call = "run --json --op rms_norm --shape input=4x8";
    let often = layerzero(&format!("{call} --repeat 3")).ended(0).json();
    assert_eq!(often["outputs"], layerzero(call).ended(0).json()["outputs"]);
    let error = layerzero(&format!("{call} --repeat 0")).ended(2).err;
    assert!(error.contains("--repeat"), "{error}");
}
