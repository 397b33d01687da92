//! Wrong command lines and wrong calls: each ends with 2, a code, a message and a hint.

use crate::support::{attention, layerzero, layerzero_args, on_h100};

/// A wrong line, and what is said about it.
const WRONG: &[(&str, &str, &[&str])] = &[
    ("frobnicate", "USAGE", &["unrecognized subcommand 'frobnicate'"]),
    ("select", "USAGE", &["--op <NAME>"]),
    ("select --op rms_norm --frob", "USAGE", &["unexpected argument '--frob'"]),
    ("select --op rms_norm --shape input", "USAGE", &["expected NAME=VALUE"]),
    ("select --op rms_norm --shape =4", "USAGE", &["expected NAME=VALUE"]),
    ("select --op rms_norm --shape input=4xtwo", "USAGE", &["'two' is no whole number"]),
    ("select --op rms_norm --shape input=4x8 --dtype bf61", "USAGE", &["unknown dtype 'bf61'", "did you mean 'bf16'?"]),
    ("select --op rms_norm --shape input=4x8 --layout BSDH", "USAGE", &["unknown layout 'BSDH'"]),
    ("run --op rms_norm --shape input=4x8 --seed minus", "USAGE", &["--seed <SEED>"]),
    ("schema everything", "USAGE", &["capabilities", "device"]),
    ("select --op rms_norm --shape input=4x8 --shape input=4x8", "BAD_ARGUMENT", &["--shape input was given twice"]),
    (
        "select --op rms_norm --shape input=4x8 --param eps=1 --param eps=2",
        "BAD_ARGUMENT",
        &["--param eps was given twice"],
    ),
    (
        "select --op rms_norm --shape input=4x8 --strides input=1",
        "BAD_ARGUMENT",
        &["'input' has 2 sizes but 1 strides"],
    ),
    (
        "select --op rms_norm --shape input=4x8 --strides weight=1",
        "BAD_ARGUMENT",
        &["--strides weight", "--shape weight"],
    ),
    ("select --op rms_norm --shape input=4x8 --input-dtype w=f16", "BAD_ARGUMENT", &["--input-dtype w"]),
    ("select --op rms_norm --shape input=4x8 --prefer lz_gpu", "BAD_ARGUMENT", &["unknown library 'lz_gpu'", "lz_cpu"]),
    (
        "select --op rms_norm --shape input=4x8 --lock lz_cpu.ref.norm.rsm",
        "UNKNOWN_KERNEL",
        &["did you mean 'lz_cpu.ref.norm.rms'?"],
    ),
    ("select --op rms_norm --shape input=4x8 --deny x.*", "UNKNOWN_KERNEL", &["unknown kernel 'x.*'"]),
    ("select --op rms_norm --shape input=4x8 --device h10", "UNKNOWN_DEVICE", &["did you mean 'h100'?", "mi300x"]),
    (
        "select --op rms_norm --shape input=4x8 --device cuda:99",
        "BAD_ARGUMENT",
        &["this machine has no device 'cuda:99'"],
    ),
    ("select --op attnetion --shape query=1", "UNKNOWN_OPERATION", &["did you mean 'attention'?", "layerzero ops"]),
    ("ops rms_nrom", "UNKNOWN_OPERATION", &["did you mean 'rms_norm'?"]),
    ("kernels --op rms_nrom", "UNKNOWN_OPERATION", &["did you mean 'rms_norm'?"]),
    ("bench selct", "BAD_ARGUMENT", &["did you mean 'select'?"]),
    ("select --op rms_norm", "MISSING_INPUT", &["norm.rms needs the tensor 'input'"]),
    ("select --op rms_norm --shape inptu=4x8", "UNKNOWN_INPUT", &["did you mean 'input'?"]),
    ("select --op rms_norm --shape input=4x8 --param epz=1", "UNKNOWN_PARAM", &["did you mean 'eps'?"]),
    ("select --op rms_norm --shape input=4x8 --param eps=small", "BAD_PARAM", &["'eps' is small, expected a number"]),
    ("select --op rms_norm --shape input=4x8 --param eps=-1", "CONSTRAINT_FAILED", &["eps is negative", "1e-6"]),
    ("select --op gelu --shape x=4x8 --param approximate=erf", "BAD_PARAM", &["expected one of none, tanh"]),
    ("select --op sample_topk --shape logits=4x8", "MISSING_PARAM", &["needs the parameter 'k'"]),
    ("select --op sample_topk --shape logits=4x8 --param k=1.5", "BAD_PARAM", &["'k' is 1.5, expected an integer"]),
    ("select --op rms_norm --shape input=4x8 --dtype int8", "WRONG_DTYPE", &["'input' is int8", "bfloat16"]),
    ("select --op rms_norm --shape input=-4x8", "WRONG_SHAPE", &["negative size"]),
    ("select --op rms_norm --shape input=4x8 --shape weight=9", "WRONG_SHAPE", &["'hidden' is 9, expected 8"]),
    ("select --op rms_norm --shape input=4x8 --shape weight=2x4", "WRONG_RANK", &["'weight' has rank 2"]),
    (
        "select --op attention.causal --shape q=1x8x4x64 --param causal=false",
        "BAD_PARAM",
        &["as 'attention.causal' says"],
    ),
    ("run --op rms_norm --shape input=1000000x1000000", "BAD_ARGUMENT", &["'input' is too large"]),
    (
        "run --op alibi_bias --shape slopes=8 --param seq_q=100000 --param seq_k=100000",
        "BAD_ARGUMENT",
        &["'output' is too large"],
    ),
    ("run --op rms_norm --shape input=4x8 --strides input=8x-1", "BAD_ARGUMENT", &["negative stride"]),
];

#[test]
fn every_mistake_is_named_with_what_to_do() {
    for (line, code, parts) in WRONG {
        let outcome = layerzero(line).ended(2).says(&format!("error[{code}]: ")).says("\nhint: ");
        for part in *parts {
            assert!(outcome.err.contains(part), "'{part}' for '{line}' in\n{}", outcome.err);
        }
        assert_eq!(outcome.out, "", "{line}");
    }
}

#[test]
fn programs_get_the_same_as_json() {
    for (line, code, _) in WRONG {
        let outcome = layerzero(&format!("{line} --json")).ended(2);
        let error = &outcome.json()["error"];
        assert_eq!(error["code"], *code, "{line}");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{line}");
        assert!(error["hint"].as_str().is_some_and(|h| !h.is_empty()), "{line}");
    }
}

#[test]
fn attention_says_what_does_not_fit() {
    let wrong = |shapes: &str| layerzero(&format!("select --op attention {shapes}")).ended(2);
    let shapes = |q: &str, k: &str, v: &str| format!("--shape query={q} --shape key={k} --shape value={v}");
    wrong(&shapes("2x8x4x64", "2x8x4x64", "2x8x3x64")).says("error[WRONG_SHAPE]").says("'kv_heads' is 3, expected 4");
    wrong(&shapes("2x8x4", "2x8x4x64", "2x8x4x64")).says("error[WRONG_RANK]").says("'query' has rank 3");
    wrong(&format!("{} --layout BSHD", shapes("2x8x4x64", "2x8x3x64", "2x8x3x64")))
        .says("error[GQA_HEADS_MISMATCH]")
        .says("heads=4, kv_heads=3");
    let fitting = shapes("2x8x4x64", "2x8x4x64", "2x8x4x64");
    wrong(&format!("{fitting} --shape attn_mask=8x8")).says("error[ATTN_MASK_INVALID]").says("pass causal=false");
    wrong(&format!("{fitting} --dtype int8")).says("error[WRONG_DTYPE]");
    wrong(&format!("{fitting} --input-dtype key=f16")).says("error[MIXED_DTYPES]").says("cast 'key' to float32");
    wrong(&format!("{fitting} --param causl=true")).says("error[UNKNOWN_PARAM]").says("did you mean 'causal'?");
    wrong(&format!("{fitting} --layout NHD")).says("error[WRONG_LAYOUT]");
}

#[test]
fn odd_text_is_a_mistake_like_any_other() {
    for shape in ["input=", "input=4x", "input=x", "input=4×8", "input=99999999999999999999", "input=4.5", "=", ""] {
        layerzero_args(&["select", "--op", "rms_norm", "--shape", shape]).ended(2).says("error[USAGE]");
    }
    let huge = format!("input={0}x{0}", i64::MAX);
    layerzero_args(&["explain", "--op", "rms_norm", "--shape", &huge]).ended(2).says("error[WRONG_SHAPE]");
    layerzero_args(&["select", "--op", "", "--shape", "input=4"]).ended(2).says("error[UNKNOWN_OPERATION]");
    layerzero_args(&["ops", "\u{1F980}"]).ended(2).says("error[UNKNOWN_OPERATION]");
    layerzero_args(&["ops", "--device", ""]).ended(2).says("error[USAGE]");
    layerzero_args(&["kernels", "--device", ""]).ended(2).says("error[UNKNOWN_DEVICE]");
}

#[test]
fn no_arguments_show_the_help_beside_the_answer() {
    let outcome = layerzero_args(&[]).ended(2).says("Usage: layerzero");
    assert!(!outcome.err.contains("error["), "{}", outcome.err);
    assert_eq!(outcome.out, "");
}

#[test]
fn no_kernel_is_an_answer_with_every_reason() {
    let line = format!("select {} {} --deny flash_attn.*", attention(2), on_h100());
    layerzero(&line)
        .ended(1)
        .says("error[NO_KERNEL_FOUND]: no kernel available for 'attention.gqa.prefill'")
        .says("[POLICY_DENIED] denied by policy: deny flash_attn.*")
        .says("for other hardware");
    let error = &layerzero(&format!("{line} --json")).ended(1).json()["error"];
    assert_eq!(error["code"], "NO_KERNEL_FOUND");
    let capturing =
        layerzero(&format!("select --op rms_norm --shape x=4x64 --shape weight=64 {} --capturing", on_h100()));
    capturing.ended(1).says("error[CUDA_GRAPH_UNSAFE]").says("outside capture");
    layerzero("run --op tokenize --param tokenizer_id=gpt2 --param texts=1 --param length=8")
        .ended(1)
        .says("none is registered");
    let outcome = layerzero("explain --op rms_norm --shape x=4x64 --device h100").ended(1);
    assert!(outcome.out.contains("nothing: no kernel can serve this call"), "{}", outcome.out);
}
