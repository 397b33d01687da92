//! What can be wrong with a call.

use super::*;

/// Every variant of [`CallError`]; a new one does not compile until it is added here.
fn variant(error: &CallError) -> &'static str {
    match error {
        CallError::UnknownOp { .. } => "UnknownOp",
        CallError::UnknownInput { .. } => "UnknownInput",
        CallError::MissingInput { .. } => "MissingInput",
        CallError::UnknownParam { .. } => "UnknownParam",
        CallError::MissingParam { .. } => "MissingParam",
        CallError::BadParam { .. } => "BadParam",
        CallError::TooMany { .. } => "TooMany",
        CallError::GivenTwice { .. } => "GivenTwice",
        // Raised where memory is handed over: see the engine's dispatch tests.
        CallError::NotUpdated { .. } => "NotUpdated",
        CallError::BadStrides { .. } => "BadStrides",
        CallError::WrongRank { .. } => "WrongRank",
        CallError::WrongSize { .. } => "WrongSize",
        CallError::NegativeSize { .. } => "NegativeSize",
        CallError::TooLarge { .. } => "TooLarge",
        CallError::WrongDType { .. } => "WrongDType",
        CallError::MixedDTypes { .. } => "MixedDTypes",
        CallError::MixedDevices { .. } => "MixedDevices",
        CallError::WrongLayout { .. } => "WrongLayout",
        CallError::LayoutContradicted { .. } => "LayoutContradicted",
        CallError::Check { .. } => "Check",
        CallError::NoneFits { .. } => "NoneFits",
    }
}

const VARIANTS: usize = 20;

/// A wrong call: its variant, its code, what the message and the hint must hold.
struct Wrong(&'static str, &'static str, CallError, &'static [&'static str], &'static str);

fn too_many_tensors() -> CallError {
    let op = Catalog::get().op(Catalog::get().find("norm.rms").unwrap().ops[0]);
    let meta = Some(TensorMeta::new(DType::F32, &[2]));
    let call = Call { inputs: &[meta; 3], params: &[], layout: None, device: DeviceIx(0), context: Context::default() };
    op.bind(&call, &BindRules::default()).unwrap_err()
}

fn too_many_params() -> CallError {
    let op = Catalog::get().op(Catalog::get().find("norm.rms").unwrap().ops[0]);
    op.params(&[ParamValue::Float(1e-6), ParamValue::Int(1)]).unwrap_err()
}

fn wrong_calls() -> Vec<Wrong> {
    let standard = "attention.standard.prefill";
    let ok = || dense(4, 6, 8, 8);
    let f = |x| ParamValue::Float(x);
    vec![
        Wrong(
            "UnknownOp",
            "UNKNOWN_OPERATION",
            ok().error("atention.causal"),
            &["'atention.causal'", "did you mean 'attention.causal'?"],
            "layerzero ops",
        ),
        Wrong("UnknownOp", "UNKNOWN_OPERATION", ok().error("zzz"), &["'zzz'"], "layerzero ops"),
        Wrong(
            "UnknownInput",
            "UNKNOWN_INPUT",
            rms(&[2, 4]).with(t("wieght", DType::F32, &[4])).error("norm.rms"),
            &["norm.rms", "'wieght'", "did you mean 'weight'?"],
            "layerzero ops norm.rms",
        ),
        Wrong(
            "MissingInput",
            "MISSING_INPUT",
            linear().without("weight").error("mlp.linear"),
            &["mlp.linear", "'weight'"],
            "layerzero ops mlp.linear",
        ),
        Wrong(
            "UnknownParam",
            "UNKNOWN_PARAM",
            rms(&[2, 4]).param("epsilon", f(1e-6)).error("norm.rms"),
            &["norm.rms", "'epsilon'", "did you mean 'eps'?"],
            "layerzero ops norm.rms",
        ),
        Wrong(
            "MissingParam",
            "MISSING_PARAM",
            made(vec![t("input", DType::F32, &[2, 4])]).error("quantize"),
            &["quantize", "'dtype'"],
            "layerzero ops quantize",
        ),
        Wrong(
            "BadParam",
            "BAD_PARAM",
            rms(&[2, 4]).param("eps", ParamValue::str("small")).error("norm.rms"),
            &["'eps'", "small", "a number"],
            "layerzero ops norm.rms",
        ),
        Wrong(
            "BadParam",
            "BAD_PARAM",
            rms(&[2, 4]).param("eps", f(f64::NAN)).error("norm.rms"),
            &["'eps'", "NaN", "a number"],
            "norm.rms",
        ),
        Wrong(
            "BadParam",
            "BAD_PARAM",
            quantize("int9").error("quantize"),
            &["'dtype'", "int9", "one of int8, int4, fp8_e4m3, fp8_e5m2, mxfp4, nvfp4"],
            "quantize",
        ),
        Wrong(
            "BadParam",
            "BAD_PARAM",
            ok().param("causal", ParamValue::Int(1)).error(standard),
            &["'causal'", "1", "true or false"],
            standard,
        ),
        Wrong(
            "BadParam",
            "BAD_PARAM",
            ok().param("window_left", f(1.5)).error(standard),
            &["'window_left'", "1.5", "an integer"],
            standard,
        ),
        Wrong(
            "BadParam",
            "BAD_PARAM",
            made(vec![t("logits", DType::F32, &[2, 9])]).param("k", ParamValue::Int(-4)).error("sampling.topk"),
            &["'k'", "-4", "zero or more"],
            "sampling.topk",
        ),
        Wrong(
            "BadParam",
            "BAD_PARAM",
            made(vec![])
                .param("tokenizer_id", ParamValue::Bool(true))
                .param("texts", ParamValue::Int(1))
                .param("length", ParamValue::Int(1))
                .error("tokenize.encode"),
            &["'tokenizer_id'", "true", "a name"],
            "tokenize.encode",
        ),
        Wrong("TooMany", "TOO_MANY_ARGUMENTS", too_many_tensors(), &["at most 2 tensors", "got 3"], "norm.rms"),
        Wrong("TooMany", "TOO_MANY_ARGUMENTS", too_many_params(), &["at most 1 parameters", "got 2"], "norm.rms"),
        Wrong(
            "GivenTwice",
            "GIVEN_TWICE",
            linear().with(t("x", DType::F32, &[4, 5, 6])).error("mlp.linear"),
            &["mlp.linear", "'input'"],
            "once",
        ),
        Wrong(
            "GivenTwice",
            "GIVEN_TWICE",
            rms(&[2, 4]).param("eps", f(1e-6)).param("eps", f(1.0)).error("norm.rms"),
            &["norm.rms", "'eps'"],
            "once",
        ),
        Wrong(
            "BadStrides",
            "BAD_STRIDES",
            ok().with(t("query", DType::F16, &[2, 4, 8, 64]).strided(&[64, 1])).error(standard),
            &["'query'", "[2, 4, 8, 64]", "[64, 1]"],
            "one stride per dimension",
        ),
        Wrong(
            "WrongRank",
            "WRONG_RANK",
            ok().with(t("query", DType::F16, &[4, 8, 64])).error(standard),
            &["'query'", "rank 3", "[4, 8, 64]", "seq_q heads head_dim"],
            "reshape 'query'",
        ),
        Wrong(
            "WrongRank",
            "WRONG_RANK",
            linear().with(t("weight", DType::F32, &[6])).error("mlp.linear"),
            &["'weight'", "rank 1", "(out_features in_features)"],
            "reshape 'weight' to (out_features in_features)",
        ),
        Wrong(
            "WrongSize",
            "WRONG_SHAPE",
            ok().with(t("value", DType::F16, &[2, 5, 8, 64])).error(standard),
            &["'value'", "[2, 5, 8, 64]", "'seq_k' is 5, expected 6", "'key'"],
            "make 'value' agree",
        ),
        Wrong(
            "WrongSize",
            "WRONG_SHAPE",
            mla(4, 4).with(t("ckv", DType::Bf16, &[4, 2, 512])).error("attention.mla.prefill"),
            &["'ckv'", "[4, 2, 512]", "is 2, expected 1"],
            "make 'ckv' agree",
        ),
        Wrong(
            "WrongSize",
            "WRONG_SHAPE",
            made(vec![t("gate", DType::F32, &[2, 3, 8]), t("up", DType::F32, &[3, 2, 8])]).error("silu_mul"),
            &["'up'", "leading axes [3, 2]", "leading axes of 'gate' are [2, 3]"],
            "make 'up' agree",
        ),
        Wrong(
            "WrongSize",
            "WRONG_SHAPE",
            paged_prefill(8, 8).with(t("cu_seqlens_q", DType::I32, &[3])).error("attention.standard.prefill.paged"),
            &["'cu_seqlens_q'", "is 3, expected 4"],
            "make 'cu_seqlens_q' agree",
        ),
        Wrong("NegativeSize", "WRONG_SHAPE", rms(&[-3, 4]).error("norm.rms"), &["'input'", "[-3, 4]"], "zero or more"),
        Wrong(
            "TooLarge",
            "WRONG_SHAPE",
            rms(&[1 << 40, 1 << 40]).error("norm.rms"),
            &["'input'", "[1099511627776, 1099511627776]", "too many elements"],
            "2^63 - 1",
        ),
        Wrong(
            "WrongDType",
            "WRONG_DTYPE",
            made(vec![t("input", DType::I32, &[2, 4])]).error("norm.rms"),
            &["'input'", "int32", "float64, float32, float16, bfloat16"],
            "cast 'input' to one of float64",
        ),
        Wrong(
            "MixedDTypes",
            "MIXED_DTYPES",
            ok().with(t("key", DType::Bf16, &[2, 6, 8, 64])).error(standard),
            &["'key' is bfloat16", "'query' is float16"],
            "cast 'key' to float16",
        ),
        Wrong(
            "MixedDevices",
            "MIXED_DEVICES",
            linear().with(t("bias", DType::F32, &[7]).on(3)).error("mlp.linear"),
            &["'bias' is on device 3", "'input' is on device 0"],
            "move 'bias' to the device of 'input'",
        ),
        Wrong(
            "WrongLayout",
            "WRONG_LAYOUT",
            ok().layout(Layout::Nhd).error(standard),
            &["NHD", "BHSD, BSHD"],
            "use one of BHSD, BSHD",
        ),
        Wrong(
            "WrongLayout",
            "WRONG_LAYOUT",
            rms(&[2, 4]).layout(Layout::Bshd).error("norm.rms"),
            &["BSHD", "none"],
            "none",
        ),
        Wrong("WrongLayout", "WRONG_LAYOUT", ok().layout(Layout::Contiguous).error(standard), &["contiguous"], "BSHD"),
        Wrong(
            "LayoutContradicted",
            "LAYOUT_CONTRADICTED",
            Made { layout: None, ..dense(8, 8, 8, 8).strict() }
                .with(t("key", DType::F16, &[2, 8, 8, 64]).strided(&[4096, 64, 512, 1]))
                .error(standard),
            &["'key'", "[2, 8, 8, 64]", "BSHD"],
            "layout='BHSD'",
        ),
        Wrong(
            "Check",
            "CAUSAL_MORE_QUERIES",
            dense(8, 6, 4, 4).error(standard),
            &["more queries than keys", "seq_q=8", "seq_k=6"],
            "layout='BHSD'",
        ),
        Wrong(
            "Check",
            "GQA_HEADS_MISMATCH",
            dense(4, 6, 8, 3).error("attention"),
            &["heads=8", "kv_heads=3"],
            "divides",
        ),
        Wrong("Check", "GQA_HEADS_MISMATCH", dense(4, 6, 8, 2).error(standard), &["heads=8", "kv_heads=2"], "gqa"),
        Wrong(
            "Check",
            "GQA_HEADS_MISMATCH",
            paged(8, 3).error("attention.paged"),
            &["heads=8", "kv_heads=3"],
            "divides",
        ),
        Wrong(
            "Check",
            "ATTN_MASK_INVALID",
            ok().with(t("attn_mask", DType::Bool, &[4, 6])).error(standard),
            &["causal=true", "attn_mask"],
            "causal=false",
        ),
        Wrong(
            "Check",
            "CONSTRAINT_FAILED",
            ok().param("window_left", ParamValue::Int(-2)).error(standard),
            &["window_left=-2"],
            "-1",
        ),
        Wrong(
            "Check",
            "CONSTRAINT_FAILED",
            ok().param("softcap", f(-1.0)).error(standard),
            &["softcap=-1"],
            "positive",
        ),
        Wrong("Check", "CONSTRAINT_FAILED", quantize("nvfp4").error("quantize"), &["nvfp4"], "granularity='blockwise'"),
        Wrong(
            "MixedDTypes",
            "MIXED_DTYPES",
            ok().with(t("key", DType::Bf16, &[2, 6, 8, 64])).error("attention"),
            &["attention:", "bfloat16"],
            "cast 'key' to float16",
        ),
        Wrong(
            "NoneFits",
            "MISSING_PARAM",
            made(vec![t("query", DType::F32, &[2, 4, 8])]).error("attention.sparse"),
            &["'attention.sparse'", "'block_rows'", "'key'"],
            "layerzero ops attention.sparse",
        ),
    ]
}

#[test]
fn every_mistake_has_its_code_names_the_offending_value_and_says_what_to_do() {
    let mut seen = BTreeSet::new();
    for Wrong(name, code, error, words, hint) in wrong_calls() {
        assert_eq!((variant(&error), error.code()), (name, code), "{error}");
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "'{word}' is not in: {text}");
        }
        let said = error.hint();
        assert!(said.contains(hint), "'{hint}' is not in the hint: {said}");
        seen.insert(name);
    }
    assert_eq!(seen.len(), VARIANTS, "some variant was not raised: {seen:?}");
}

#[test]
fn the_smallest_integer_is_a_value_and_not_nothing() {
    let call = dense(4, 6, 8, 8).param("window_left", ParamValue::Int(i64::MIN));
    let code = call.resolve("attention").map(|_| ()).map_err(|e| e.code());
    assert_eq!(code, Err("BAD_PARAM"), "windows are at least -1");
    let call = quantize("int8")
        .param("granularity", ParamValue::str("blockwise"))
        .param("group_size", ParamValue::Int(i64::MIN));
    let code = call.resolve("quantize").map(|_| ()).map_err(|e| e.code());
    assert_eq!(code, Err("BAD_PARAM"), "groups have at least one element");
}

#[test]
fn an_error_behind_several_operations_is_about_the_one_that_was_meant() {
    // Contiguous latent attention with a wrong dtype; the paged operation is none of its business.
    let call = mla(4, 6).with(t("q_pe", DType::F32, &[4, 16, 64]));
    let error = call.error("attention.mla");
    assert!(error.to_string().contains("'q_pe' is float32"), "{error}");
    assert_eq!(error.code(), "MIXED_DTYPES");
}

#[test]
fn a_sequence_without_batch_has_no_positions_for_three_batches() {
    let call = made(vec![
        t("input", DType::F32, &[5, 2, 8]),
        t("cos", DType::F32, &[16, 4]),
        t("sin", DType::F32, &[16, 4]),
        t("positions", DType::I64, &[3, 5]),
    ]);
    assert!(call.resolve("posenc.rope").is_err());
}

#[test]
fn optional_inputs_may_be_left_out_and_required_ones_may_not() {
    for op in Catalog::get().ops() {
        let call = Call { inputs: &[], params: &[], layout: None, device: DeviceIx(0), context: Context::default() };
        let needs_params = op.schema().params.iter().any(|p| p.default.value().is_none());
        match op.bind(&call, &BindRules::default()) {
            Err(CallError::MissingParam { .. }) => assert!(needs_params, "{}", op.id()),
            Err(CallError::MissingInput { input, .. }) => {
                assert_eq!(input, op.schema().inputs[0].name);
            }
            other => panic!("{}: {other:?}", op.id()),
        }
    }
    let (op, bound) = rms(&[2, 4]).resolve("norm.rms").unwrap();
    assert!(!bound.query.tensor(op.input_index("weight").unwrap()).is_present());
    let (op, bound) = linear().without("bias").resolve("mlp.linear").unwrap();
    assert!(!bound.query.tensor(op.input_index("bias").unwrap()).is_present());
    assert_eq!(linear().without("bias").dim("mlp.linear", "out_features"), 7);
}
