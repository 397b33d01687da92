//! Binding: which operation a call is, what is wrong with one that is none, and what it will give.

use std::collections::{BTreeMap, BTreeSet};

use lz_model::schema::{CheckCode, DTypeRule, LayoutRule, Output};
use lz_model::*;
use proptest::prelude::*;

// --- calls, written down -------------------------------------------------------------------

/// A tensor argument that owns its shape.
#[derive(Clone, Debug)]
struct Arg {
    name: &'static str,
    dtype: DType,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    device: u16,
}

impl Arg {
    fn strided(mut self, strides: &[i64]) -> Arg {
        self.strides = Some(strides.to_vec());
        self
    }

    fn on(mut self, device: u16) -> Arg {
        self.device = device;
        self
    }
}

fn t(name: &'static str, dtype: DType, shape: &[i64]) -> Arg {
    Arg { name, dtype, shape: shape.to_vec(), strides: None, device: 0 }
}

/// A call that owns its arguments.
#[derive(Clone, Debug, Default)]
struct Made {
    inputs: Vec<Arg>,
    params: Vec<(&'static str, ParamValue)>,
    layout: Option<Layout>,
    strict: bool,
}

fn made(inputs: Vec<Arg>) -> Made {
    Made { inputs, ..Made::default() }
}

impl Made {
    fn param(mut self, name: &'static str, value: ParamValue) -> Made {
        self.params.push((name, value));
        self
    }

    fn layout(mut self, layout: Layout) -> Made {
        self.layout = Some(layout);
        self
    }

    fn strict(mut self) -> Made {
        self.strict = true;
        self
    }

    fn with(mut self, input: Arg) -> Made {
        self.inputs.retain(|i| i.name != input.name);
        self.inputs.push(input);
        self
    }

    fn without(mut self, name: &str) -> Made {
        self.inputs.retain(|i| i.name != name);
        self
    }

    fn named(&self) -> NamedCall<'_> {
        NamedCall {
            inputs: self
                .inputs
                .iter()
                .map(|arg| {
                    let meta = TensorMeta::new(arg.dtype, &arg.shape).on(DeviceIx(arg.device));
                    let meta = match &arg.strides {
                        Some(strides) => meta.strided(strides),
                        None => meta,
                    };
                    (arg.name, meta)
                })
                .collect(),
            params: self.params.clone(),
            layout: self.layout,
            ..NamedCall::new()
        }
    }

    fn rules(&self) -> BindRules {
        BindRules { strict: self.strict, ..BindRules::default() }
    }

    fn resolve(&self, name: &str) -> Result<(&'static Op, Bound), CallError> {
        let call = self.named();
        let (_, bound) = Catalog::get().resolve(name, &call, &self.rules(), |_| None)?;
        Ok((Catalog::get().op(bound.query.op()), bound))
    }

    fn op(&self, name: &str) -> &'static str {
        self.resolve(name).unwrap_or_else(|e| panic!("{e}")).0.id()
    }

    fn error(&self, name: &str) -> CallError {
        match self.resolve(name) {
            Err(error) => error,
            Ok((op, bound)) => panic!("bound to {}: {:?}", op.id(), bound.query),
        }
    }

    fn dim(&self, name: &str, dim: &str) -> i64 {
        let (op, bound) = self.resolve(name).unwrap_or_else(|e| panic!("{e}"));
        bound.query.dim(op.dim_index(dim).unwrap())
    }

    fn outputs(&self, name: &str) -> Vec<(&'static str, DType, Vec<i64>)> {
        let named = self.named();
        let (ordered, bound) =
            Catalog::get().resolve(name, &named, &self.rules(), |_| None).unwrap_or_else(|e| panic!("{name}: {e}"));
        let call = Call {
            inputs: &ordered.inputs,
            params: &ordered.params,
            layout: self.layout,
            device: DeviceIx(0),
            context: Context::default(),
        };
        let op = Catalog::get().op(bound.query.op());
        op.outputs(&call, &bound.query).into_iter().map(|o| (o.name, o.dtype, o.shape.to_vec())).collect()
    }
}

/// Dense attention, BSHD.
fn dense(seq_q: i64, seq_k: i64, heads: i64, kv_heads: i64) -> Made {
    made(vec![
        t("query", DType::F16, &[2, seq_q, heads, 64]),
        t("key", DType::F16, &[2, seq_k, kv_heads, 64]),
        t("value", DType::F16, &[2, seq_k, kv_heads, 64]),
    ])
    .layout(Layout::Bshd)
}

/// Paged attention of one query per sequence: 3 sequences, tables of 5 pages of 16 slots.
fn paged(heads: i64, kv_heads: i64) -> Made {
    made(vec![
        t("query", DType::Bf16, &[3, heads, 64]),
        t("key_cache", DType::Bf16, &[40, 16, kv_heads, 64]),
        t("value_cache", DType::Bf16, &[40, 16, kv_heads, 64]),
        t("block_tables", DType::I32, &[3, 5]),
        t("context_lens", DType::I32, &[3]),
    ])
}

/// Paged attention of 11 packed queries.
fn paged_prefill(heads: i64, kv_heads: i64) -> Made {
    paged(heads, kv_heads).with(t("query", DType::Bf16, &[11, heads, 64])).with(t("cu_seqlens_q", DType::I32, &[4]))
}

fn mla(seq_q: i64, seq_k: i64) -> Made {
    made(vec![
        t("q_nope", DType::Bf16, &[seq_q, 16, 512]),
        t("q_pe", DType::Bf16, &[seq_q, 16, 64]),
        t("ckv", DType::Bf16, &[seq_k, 1, 512]),
        t("kpe", DType::Bf16, &[seq_k, 1, 64]),
    ])
    .param("scale", ParamValue::Float(0.1))
}

fn mla_paged() -> Made {
    made(vec![
        t("q_nope", DType::Bf16, &[3, 16, 512]),
        t("q_pe", DType::Bf16, &[3, 16, 64]),
        t("ckv_cache", DType::F8E4M3, &[40, 32, 512]),
        t("kpe_cache", DType::F8E4M3, &[40, 32, 64]),
        t("block_tables", DType::I64, &[3, 7]),
        t("context_lens", DType::I32, &[3]),
    ])
    .param("scale", ParamValue::Float(0.1))
}

fn rms(shape: &[i64]) -> Made {
    made(vec![t("input", DType::F32, shape)])
}

fn linear() -> Made {
    made(vec![t("input", DType::F32, &[4, 5, 6]), t("weight", DType::F32, &[7, 6]), t("bias", DType::F32, &[7])])
}

fn quantize(format: &str) -> Made {
    made(vec![t("input", DType::F32, &[3, 80])]).param("dtype", ParamValue::str(format))
}

// --- which operation a call is -------------------------------------------------------------

#[test]
fn attention_is_told_apart_by_head_counts_and_query_length() {
    let expected = [
        (dense(128, 128, 8, 8), "attention.standard.prefill"),
        (dense(1, 128, 8, 8), "attention.standard.decode"),
        (dense(128, 128, 8, 2), "attention.gqa.prefill"),
        (dense(1, 128, 8, 2), "attention.gqa.decode"),
        (dense(0, 128, 8, 8), "attention.standard.prefill"),
    ];
    for (call, id) in expected {
        for alias in ["attention", "attention.causal", "attention.full"] {
            assert_eq!(call.op(alias), id, "{alias}");
        }
    }
}

#[test]
fn paged_latent_and_cross_attention_are_told_apart_by_what_they_are_given() {
    assert_eq!(paged(8, 8).op("attention.paged"), "attention.standard.decode.paged");
    assert_eq!(paged(8, 2).op("attention.paged"), "attention.gqa.decode.paged");
    assert_eq!(paged_prefill(8, 8).op("attention.paged"), "attention.standard.prefill.paged");
    assert_eq!(paged_prefill(8, 2).op("attention.paged"), "attention.gqa.prefill.paged");
    assert_eq!(mla(1, 9).op("attention.mla"), "attention.mla.decode");
    assert_eq!(mla(9, 9).op("attention.mla"), "attention.mla.prefill");
    assert_eq!(mla_paged().op("attention.mla"), "attention.mla.decode.paged");
    assert_eq!(dense(1, 9, 4, 4).op("attention.cross"), "attention.cross.decode");
    assert_eq!(dense(5, 9, 4, 2).op("attention.cross"), "attention.cross.prefill");
}

#[test]
fn every_name_of_the_catalog_leads_to_its_operation() {
    for op in Catalog::get().ops() {
        for name in [op.id()].iter().chain(op.schema().also) {
            let target = Catalog::get().find(name).unwrap();
            assert_eq!((target.ops.as_slice(), target.fixes.len()), (&[op.ix()][..], 0));
        }
    }
    assert_eq!(rms(&[2, 8]).op("rms_norm"), "norm.rms");
    assert_eq!(rms(&[2, 8]).without("input").with(t("x", DType::F32, &[2, 8])).op("rms_norm"), "norm.rms");
}

fn causal(call: &Made, name: &str) -> ParamValue {
    let (op, bound) = call.resolve(name).unwrap_or_else(|e| panic!("{e}"));
    let index = op.param_index("causal").unwrap();
    bound.query.param(index, &op.schema().params[index])
}

#[test]
fn an_alias_fixes_causal_and_contradicting_it_is_an_error() {
    let call = dense(4, 4, 2, 2);
    assert_eq!(causal(&call, "attention"), ParamValue::Bool(true));
    assert_eq!(causal(&call, "attention.causal"), ParamValue::Bool(true));
    assert_eq!(causal(&call, "attention.full"), ParamValue::Bool(false));
    let said = |value| call.clone().param("causal", ParamValue::Bool(value));
    assert_eq!(causal(&said(true), "attention.causal"), ParamValue::Bool(true));
    assert_eq!(causal(&said(false), "attention"), ParamValue::Bool(false));
    for (alias, value) in [("attention.causal", false), ("attention.full", true)] {
        let error = said(value).error(alias);
        assert_eq!(error.code(), "BAD_PARAM");
        let text = error.to_string();
        assert!(text.contains(&value.to_string()) && text.contains(alias), "{text}");
    }
}

#[test]
fn contradicting_an_alias_under_the_parameters_other_name_is_an_error_too() {
    let call = dense(4, 4, 2, 2).param("is_causal", ParamValue::Bool(false));
    assert_eq!(causal(&call, "attention"), ParamValue::Bool(false));
    let error = call.resolve("attention.causal").map(|_| ());
    assert_eq!(error.map_err(|e| e.code()), Err("BAD_PARAM"));
}

#[test]
fn a_mask_goes_with_the_alias_that_is_not_causal() {
    let call = dense(4, 6, 2, 2).with(t("attn_mask", DType::Bool, &[4, 6]));
    assert_eq!(call.op("attention.full"), "attention.standard.prefill");
    assert_eq!(call.error("attention.causal").code(), "ATTN_MASK_INVALID");
}

// --- what can be wrong ---------------------------------------------------------------------

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
        CallError::AmbiguousLayout { .. } => "AmbiguousLayout",
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
            "AmbiguousLayout",
            "AMBIGUOUS_LAYOUT",
            Made { layout: None, ..dense(8, 8, 8, 8).strict() }.error(standard),
            &["[2, 8, 8, 64]", "BSHD", "BHSD"],
            "layout='BSHD'",
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

// --- layouts -------------------------------------------------------------------------------

fn evidence(call: &Made, name: &str) -> (Layout, LayoutEvidence) {
    let verdict = call.resolve(name).unwrap_or_else(|e| panic!("{e}")).1.layout.unwrap();
    (verdict.layout, verdict.evidence)
}

#[test]
fn the_layout_comes_with_the_evidence_for_it() {
    let undecided = |shape: &[i64]| made(["query", "key", "value"].map(|name| t(name, DType::F32, shape)).to_vec());
    let square = undecided(&[2, 8, 8, 64]);
    assert_eq!(evidence(&square, "attention"), (Layout::Bshd, LayoutEvidence::Ambiguous));
    assert_eq!(
        evidence(&square.clone().layout(Layout::Bhsd).strict(), "attention"),
        (Layout::Bhsd, LayoutEvidence::Explicit)
    );
    let mut turned = square.clone();
    for input in &mut turned.inputs {
        *input = input.clone().strided(&[4096, 64, 512, 1]);
    }
    assert_eq!(evidence(&turned.clone().strict(), "attention"), (Layout::Bhsd, LayoutEvidence::Strides));
    assert_eq!(evidence(&turned.layout(Layout::Bshd), "attention"), (Layout::Bshd, LayoutEvidence::Explicit));
    assert_eq!(evidence(&undecided(&[2, 100, 8, 64]).strict(), "attention"), (Layout::Bshd, LayoutEvidence::Shape));
    assert_eq!(evidence(&undecided(&[2, 8, 100, 64]), "attention"), (Layout::Bhsd, LayoutEvidence::Shape));
    assert_eq!(undecided(&[2, 8, 100, 64]).dim("attention", "heads"), 8);
    assert_eq!(undecided(&[2, 100, 8, 64]).dim("attention", "heads"), 8);
    assert!(rms(&[2, 4]).resolve("norm.rms").unwrap().1.layout.is_none());
}

#[test]
fn a_layout_by_default_gives_way_to_the_rank_and_to_the_caller() {
    let rope = |shape: &[i64]| {
        made(vec![t("input", DType::F32, shape), t("cos", DType::F32, &[16, 4]), t("sin", DType::F32, &[16, 4])])
    };
    let layout = |call: &Made| evidence(call, "posenc.rope").0;
    assert_eq!(layout(&rope(&[2, 5, 3, 8])), Layout::Bshd);
    assert_eq!(layout(&rope(&[5, 3, 8])), Layout::Nhd);
    assert_eq!(rope(&[5, 3, 8]).dim("posenc.rope", "batch"), 1);
    assert_eq!(rope(&[5, 3, 8]).dim("posenc.rope", "seq"), 5);
    let bhsd = rope(&[2, 3, 5, 8]).layout(Layout::Bhsd);
    assert_eq!((layout(&bhsd), bhsd.dim("posenc.rope", "seq")), (Layout::Bhsd, 5));
    assert_eq!(paged(8, 2).dim("attention.paged", "kv_heads"), 2);
    let hnd = paged(8, 2)
        .with(t("key_cache", DType::Bf16, &[40, 2, 16, 64]))
        .with(t("value_cache", DType::Bf16, &[40, 2, 16, 64]))
        .layout(Layout::Hnd);
    assert_eq!(hnd.dim("attention.paged", "kv_heads"), 2);
    assert_eq!(hnd.dim("attention.paged", "block_size"), 16);
}

#[test]
fn what_a_query_keeps_of_a_tensor_is_what_it_was() {
    let call = Made { layout: Some(Layout::Bhsd), ..dense(8, 6, 4, 4) }
        .with(t("query", DType::F16, &[2, 4, 8, 64]).strided(&[8192, 128, 1024, 2]))
        .with(t("key", DType::F16, &[2, 4, 6, 64]))
        .with(t("value", DType::F16, &[2, 4, 6, 64]));
    let (op, bound) = call.resolve("attention").unwrap();
    let facts = |name| bound.query.tensor(op.input_index(name).unwrap());
    assert_eq!(facts("query").dtype(), Some(DType::F16));
    assert_eq!(facts("query").layout(), Layout::Bhsd);
    assert!(!facts("query").is_contiguous() && !facts("query").has_last_stride_one());
    assert!(facts("key").is_contiguous() && facts("key").has_last_stride_one());
    assert!(!facts("attn_mask").is_present() && facts("attn_mask").dtype().is_none());
}

#[test]
fn masks_broadcast_where_the_schema_lets_them() {
    let mask = |shape: &[i64]| {
        dense(4, 6, 8, 8).with(t("attn_mask", DType::Bool, shape)).param("causal", ParamValue::Bool(false))
    };
    let broadcast = |shape: &[i64]| {
        let (op, bound) = mask(shape).resolve("attention").unwrap_or_else(|e| panic!("{e}"));
        bound.query.tensor(op.input_index("attn_mask").unwrap()).is_broadcast()
    };
    assert!(!broadcast(&[2, 8, 4, 6]) && !broadcast(&[4, 6]));
    for shape in [&[1, 8, 4, 6][..], &[2, 1, 4, 6], &[2, 8, 1, 6], &[1, 1, 1, 6], &[1, 6]] {
        assert!(broadcast(shape), "{shape:?}");
    }
    for shape in [&[2, 8, 4, 1][..], &[3, 8, 4, 6], &[2, 8, 5, 6], &[6], &[8, 4, 6], &[5, 6]] {
        let error = mask(shape).error("attention.standard.prefill");
        assert!(["WRONG_SHAPE", "WRONG_RANK"].contains(&error.code()), "{error}");
    }
}

// --- derived sizes -------------------------------------------------------------------------

#[test]
fn sizes_that_follow_from_others() {
    assert_eq!(paged(8, 2).dim("attention.paged", "seq_k"), 5 * 16);
    assert_eq!(paged_prefill(8, 8).dim("attention.paged", "seq_k"), 5 * 16);
    assert_eq!(paged_prefill(8, 8).dim("attention.paged", "batch"), 3);
    assert_eq!(mla_paged().dim("attention.mla", "seq_k"), 7 * 32);
    assert_eq!(mla(4, 6).dim("attention.mla", "batch"), 1);
    let several = mla(4, 6).with(t("qo_indptr", DType::I32, &[3])).with(t("kv_indptr", DType::I32, &[3]));
    assert_eq!(several.dim("attention.mla", "batch"), 2);
}

#[test]
fn a_quantization_groups_as_its_format_does() {
    let blockwise = |format| quantize(format).param("granularity", ParamValue::str("blockwise"));
    let sizes = |call: &Made| ["group", "scale_rows", "scale_cols"].map(|dim| call.dim("quantize", dim));
    assert_eq!(sizes(&blockwise("nvfp4")), [16, 3, 5]);
    assert_eq!(sizes(&blockwise("mxfp4")), [32, 3, 3], "80 = 32 + 32 + 16");
    assert_eq!(sizes(&blockwise("int8")), [32, 3, 3]);
    let by_ten = blockwise("int4").param("group_size", ParamValue::Int(10));
    assert_eq!(sizes(&by_ten), [10, 3, 8]);
    assert_eq!(sizes(&quantize("int8")), [80, 1, 1]);
    let by_row = quantize("int8").param("granularity", ParamValue::str("per_channel"));
    assert_eq!(sizes(&by_row), [80, 3, 1]);
    for (format, granularity) in [("nvfp4", "per_tensor"), ("mxfp4", "per_channel")] {
        let call = quantize(format).param("granularity", ParamValue::str(granularity));
        assert_eq!(call.error("quantize").code(), "CONSTRAINT_FAILED");
    }

    let back = |values: DType, scales: &[i64]| {
        made(vec![t("values", values, &[3, 80]), t("scales", DType::F32, scales)])
            .param("granularity", ParamValue::str("blockwise"))
    };
    assert_eq!(back(DType::NvFp4, &[3, 5]).dim("dequantize", "group"), 16);
    assert_eq!(back(DType::MxFp4, &[3, 3]).dim("dequantize", "group"), 32);
    assert_eq!(back(DType::MxFp4, &[3, 5]).error("dequantize").code(), "WRONG_SHAPE");
}

// --- what an operation gives ---------------------------------------------------------------

/// A call, the operation it is, and what it gives.
struct Gives(&'static str, Made, &'static str, Vec<(&'static str, DType, Vec<i64>)>);

fn gives() -> Vec<Gives> {
    use DType::*;
    let one = |dtype, shape: &[i64]| vec![("output", dtype, shape.to_vec())];
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

// --- any call at all -----------------------------------------------------------------------

const SIZES: &[i64] = &[0, 1, 1, 2, 3, 4, 5, 8, 16, 64, 1 << 20, 1 << 40, i64::MAX - 1, i64::MAX, -1, i64::MIN];

fn any_value() -> impl Strategy<Value = ParamValue> {
    let words = vec![
        "",
        "int8",
        "int4",
        "nvfp4",
        "mxfp4",
        "fp8_e4m3",
        "blockwise",
        "per_tensor",
        "per_channel",
        "float32",
        "tanh",
        "silu",
        "nonsense",
    ];
    prop_oneof![
        2 => Just(ParamValue::None),
        1 => any::<bool>().prop_map(ParamValue::Bool),
        2 => prop::sample::select(SIZES).prop_map(ParamValue::Int),
        1 => any::<f64>().prop_map(ParamValue::Float),
        1 => (0.0f64..1.0).prop_map(ParamValue::Float),
        3 => prop::sample::select(words).prop_map(ParamValue::str),
    ]
}

/// A dtype that the schema allows, mostly.
fn dtypes(rule: DTypeRule, first: DType) -> BoxedStrategy<DType> {
    let any = prop::sample::select(DType::all().collect::<Vec<_>>());
    match rule {
        DTypeRule::In(set) => prop_oneof![9 => prop::sample::select(set.iter().collect::<Vec<_>>()), 1 => any].boxed(),
        DTypeRule::Same(_) => prop_oneof![9 => Just(first), 1 => any].boxed(),
    }
}

type AnyTensor = Option<(DType, Vec<i64>, Option<Vec<i64>>)>;

fn any_tensor(rule: DTypeRule) -> impl Strategy<Value = AnyTensor> {
    let shape = prop::collection::vec(prop::sample::select(SIZES), 0..6);
    let tensor = (dtypes(rule, DType::F32), shape).prop_flat_map(|(dtype, shape)| {
        let rank = shape.len();
        let strides = prop::collection::vec(prop::sample::select(SIZES), rank);
        (Just(dtype), Just(shape), prop::option::of(strides))
    });
    prop::option::weighted(0.9, tensor)
}

fn any_call() -> impl Strategy<Value = (usize, Vec<AnyTensor>, Vec<ParamValue>, Option<Layout>, bool)> {
    (0..Catalog::get().ops().len()).prop_flat_map(|op| {
        let schema = Catalog::get().ops()[op].schema();
        let inputs: Vec<_> = schema.inputs.iter().map(|i| any_tensor(i.dtype)).collect();
        let params = prop::collection::vec(any_value(), schema.params.len());
        let layout = prop::option::weighted(0.3, prop::sample::select(&Layout::ALL[..]));
        (Just(op), inputs, params, layout, any::<bool>())
    })
}

/// Binds and looks at all there is to look at; nothing may panic.
fn bind_and_look(
    op: &Op,
    tensors: &[AnyTensor],
    params: &[ParamValue],
    layout: Option<Layout>,
    strict: bool,
) -> Result<Bound, CallError> {
    let metas: Vec<Option<TensorMeta<'_>>> = tensors
        .iter()
        .map(|tensor| {
            let (dtype, shape, strides) = tensor.as_ref()?;
            let meta = TensorMeta::new(*dtype, shape);
            Some(match strides {
                Some(strides) => meta.strided(strides),
                None => meta,
            })
        })
        .collect();
    let call = Call { inputs: &metas, params, layout, device: DeviceIx(0), context: Context::default() };
    let rules = BindRules { strict, ..BindRules::default() };
    let bound = op.bind(&call, &rules).inspect_err(|e| {
        assert!(!e.to_string().is_empty() && !e.hint().is_empty() && !e.code().is_empty());
    })?;
    let device = DeviceSpec::new(Platform::Cpu, "any");
    let outputs = op.outputs(&call, &bound.query);
    let fresh = op.schema().outputs.iter().filter(|o| matches!(o, Output::Fresh { .. }));
    assert_eq!(outputs.len(), fresh.count());
    for output in &outputs {
        assert!(output.shape.iter().all(|&n| n >= 0), "{output:?}");
    }
    let facts = Facts { op, query: &bound.query, device: &device };
    let _ = (op.flops(&facts), op.bytes(&facts), op.dtype(&bound.query), op.admits(&facts));
    assert!(!format!("{:?}", bound.query).is_empty());
    op.check(&bound.query, &device)?;
    Ok(bound)
}

/// A call made from the schema: sizes chosen first, then the shapes they make.
#[derive(Clone, Debug)]
struct FromSchema {
    op: usize,
    sizes: BTreeMap<&'static str, i64>,
    layout: Option<Layout>,
    tensors: Vec<AnyTensor>,
    params: Vec<ParamValue>,
}

/// Small numbers out of a seed, for choices that need no shrinking.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

fn axis(token: &'static str, sizes: &BTreeMap<&'static str, i64>, choices: &mut Choices, shape: &mut Vec<i64>) {
    if let Some(name) = token.strip_prefix("...") {
        // One leading axis, or two of which one is trivial.
        match choices.below(3) {
            0 => shape.push(sizes[name]),
            1 => shape.extend([1, sizes[name]]),
            _ => shape.extend([sizes[name], 1]),
        }
    } else if let Some(name) = token.strip_suffix('?') {
        shape.push(if choices.below(2) == 0 { 1 } else { sizes[name] });
    } else if let Some(name) = token.strip_suffix("+1") {
        shape.push(sizes[name] + 1);
    } else {
        shape.push(token.parse().unwrap_or_else(|_| sizes[token]));
    }
}

fn from_schema() -> impl Strategy<Value = FromSchema> {
    let some = (0..Catalog::get().ops().len(), any::<u64>());
    some.prop_map(|(op, seed)| {
        let schema = Catalog::get().ops()[op].schema();
        let mut choices = Choices(seed);
        let mut sizes: BTreeMap<&'static str, i64> = BTreeMap::new();
        for dim in schema.dims {
            sizes.insert(dim.name, 1 + choices.below(6) as i64);
        }
        let tags: Vec<Layout> = schema
            .inputs
            .iter()
            .flat_map(|i| i.shape.split('|'))
            .filter_map(|s| s.split_once(':'))
            .filter_map(|(tag, _)| tag.trim().parse().ok())
            .collect();
        let layout = (!tags.is_empty()).then(|| tags[choices.below(tags.len())]);
        if layout == Some(Layout::Nhd) && schema.id == "posenc.rope" {
            sizes.insert("batch", 1);
        }
        let mut leading: BTreeMap<&'static str, Vec<i64>> = BTreeMap::new();
        let mut tensors: Vec<AnyTensor> = Vec::new();
        for input in schema.inputs {
            // Scales depend on the granularity, which has tests of its own.
            if input.optional && (choices.below(2) == 0 || input.shape.contains("scale_")) {
                tensors.push(None);
                continue;
            }
            let alternatives: Vec<&'static str> = input
                .shape
                .split('|')
                .filter_map(|s| match s.split_once(':') {
                    Some((tag, axes)) => (tag.trim().parse().ok() == layout).then_some(axes),
                    None => Some(s),
                })
                .collect();
            let axes = alternatives[choices.below(alternatives.len())];
            let mut shape = Vec::new();
            for token in axes.split_whitespace() {
                match token.strip_prefix("...") {
                    // Inputs that share leading axes have the same ones.
                    Some(name) => {
                        let axes = leading.entry(name).or_insert_with(|| {
                            let mut axes = Vec::new();
                            axis(token, &sizes, &mut choices, &mut axes);
                            axes
                        });
                        shape.extend_from_slice(axes);
                    }
                    None => axis(token, &sizes, &mut choices, &mut shape),
                }
            }
            let dtype = match input.dtype {
                DTypeRule::In(set) => set.iter().nth(choices.below(set.iter().count())).unwrap(),
                DTypeRule::Same(other) => {
                    let i = schema.inputs.iter().position(|i| i.name == other).unwrap();
                    tensors[i].as_ref().unwrap().0
                }
            };
            tensors.push(Some((dtype, shape, None)));
        }
        let params = schema
            .params
            .iter()
            .map(|param| match (param.role, param.default, param.ty) {
                (ParamRole::Dim, ..) => ParamValue::Int(sizes[param.name]),
                (_, ParamDefault::Required, ParamType::Choice(names)) => ParamValue::str(names[0]),
                (_, ParamDefault::Required, ParamType::Name) => ParamValue::str("some"),
                (_, ParamDefault::Required, _) => ParamValue::Float(0.5),
                _ => ParamValue::None,
            })
            .collect();
        FromSchema { op, sizes, layout, tensors, params }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn no_call_makes_binding_panic((op, tensors, params, layout, strict) in any_call()) {
        let _ = bind_and_look(&Catalog::get().ops()[op], &tensors, &params, layout, strict);
    }

    #[test]
    fn a_call_made_from_the_schema_binds_to_the_sizes_it_was_made_of(made in from_schema()) {
        let op = &Catalog::get().ops()[made.op];
        // A scale of dequantize needs the granularity's sizes.
        prop_assume!(op.id() != "dequantize");
        let metas: Vec<_> = made
            .tensors
            .iter()
            .map(|t| t.as_ref().map(|(dtype, shape, _)| TensorMeta::new(*dtype, shape)))
            .collect();
        let call = Call {
            inputs: &metas,
            params: &made.params,
            layout: made.layout,
            device: DeviceIx(0),
            context: Context::default(),
        };
        let bound = op.bind(&call, &BindRules::default());
        let bound = bound.map_err(|e| TestCaseError::fail(e.to_string()))?;
        for (input, tensor) in op.schema().inputs.iter().zip(&made.tensors) {
            if tensor.is_none() || input.optional {
                continue;
            }
            for token in input.shape.split_whitespace() {
                let name = token.trim_start_matches("...").trim_end_matches("+1");
                let Some(index) = op.schema().dims.iter().position(|d| d.name == name) else { continue };
                prop_assert_eq!(bound.query.dim(index), made.sizes[name], "{} of {}", name, op.id());
            }
        }
        if matches!(op.schema().layout, LayoutRule::Detect { .. }) {
            prop_assert_eq!(bound.layout.unwrap().evidence, LayoutEvidence::Explicit);
        }
        let _ = bind_and_look(op, &made.tensors, &made.params, made.layout, false);
    }

    #[test]
    fn one_changed_size_never_makes_binding_panic(
        made in from_schema(),
        which in any::<prop::sample::Index>(),
        axis in any::<prop::sample::Index>(),
        size in prop::sample::select(SIZES),
        params in prop::collection::vec(any_value(), 10),
        change_params in any::<bool>(),
        forget_layout in any::<bool>(),
    ) {
        let mut made = made;
        if !made.tensors.is_empty() {
            let at = which.index(made.tensors.len());
            if let Some((_, shape, _)) = made.tensors[at].as_mut().filter(|(_, s, _)| !s.is_empty()) {
                let axis = axis.index(shape.len());
                shape[axis] = size;
            }
        }
        if change_params {
            for (param, value) in made.params.iter_mut().zip(params) {
                *param = value;
            }
        }
        let layout = made.layout.filter(|_| !forget_layout);
        let _ = bind_and_look(&Catalog::get().ops()[made.op], &made.tensors, &made.params, layout, forget_layout);
    }
}

#[test]
fn sizes_at_the_end_of_the_number_line_are_refused_without_overflow() {
    let speculative = |draft: i64, target: i64| {
        made(vec![
            t("draft_ids", DType::I32, &[0, draft]),
            t("draft_probs", DType::F32, &[0, draft, 1]),
            t("target_probs", DType::F32, &[0, target, 1]),
        ])
    };
    let error = std::panic::catch_unwind(|| speculative(i64::MAX, 5).error("sampling.speculative"));
    assert_eq!(error.expect("no panic").code(), "WRONG_SHAPE");
}

#[test]
fn each_failed_condition_is_of_the_kind_its_schema_says() {
    for op in Catalog::get().ops() {
        for check in op.schema().checks {
            let expected = match check.code {
                CheckCode::GqaHeadsMismatch => "GQA_HEADS_MISMATCH",
                CheckCode::AttnMaskInvalid => "ATTN_MASK_INVALID",
                CheckCode::Constraint => "CONSTRAINT_FAILED",
            };
            let error = CallError::Check {
                op: op.id(),
                code: check.code,
                message: check.message,
                hint: check.hint,
                values: "x=1".into(),
            };
            assert_eq!(error.code(), expected);
            assert!(CODES.contains(&expected), "a call error and a reason share the code");
            assert!(!check.hint.is_empty() && !check.message.is_empty(), "{}", op.id());
        }
    }
}
