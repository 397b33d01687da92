//! Every reason code is produced by a real rejection: a world in which the kernel would do, changed in one way.

use std::collections::BTreeSet;
use std::path::Path;

use layerzero::model::*;
use layerzero::{Engine, Error};
use serde_json::Value;

use self::shown::SHOWN;
use self::worlds::*;

mod fields;
mod shown;
mod worlds;

/// Codes nothing produces yet; they belong to parts that are not there.
const PENDING: &[&str] = &[
    "SPEC_DECODE_PP_INCOMPATIBLE",
    "SPEC_DECODE_DRAFT_TP_CONSTRAINT",
    "SPEC_DECODE_KV_INCOMPATIBLE",
    "SPEC_DECODE_ALGORITHM_UNSUPPORTED",
    "VIRTUAL_MEMORY_EXHAUSTED",
];

/// Codes of calls that no kernel could serve, raised before any kernel is judged.
const RAISED_AT_THE_CALL: &[&str] = &["ATTN_MASK_INVALID", "GQA_HEADS_MISMATCH"];

#[test]
fn each_world_is_fine_before_it_is_changed() {
    for world in [attention(), paged(), linear(), tokenizer()] {
        assert_eq!(world.reasons(), [], "{}", world.op);
    }
}

/// The code, and what else must be in the JSON of the reason.
fn expected(text: &str) -> (String, serde_json::Map<String, Value>) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    (value["code"].as_str().unwrap().to_owned(), value.as_object().unwrap().clone())
}

/// `POLICY_DENIED` as the variant is written.
fn variant_name(code: &str) -> String {
    let capitalized = |word: &str| word[..1].to_owned() + &word[1..].to_lowercase();
    code.split('_').map(capitalized).collect()
}

#[test]
fn every_rejection_carries_exactly_its_reason() {
    for (show, text) in SHOWN {
        let (code, fields) = expected(text);
        let reasons = show();
        let with_code: Vec<&Reason> = reasons.iter().filter(|r| r.code() == code).collect();
        assert!(!with_code.is_empty(), "{code} was not given, but {reasons:?}");
        assert_eq!(with_code.len(), reasons.len(), "{code} was not all: {reasons:?}");
        let json = serde_json::to_value(with_code[0]).unwrap();
        assert_eq!(
            json.as_object().unwrap().keys().collect::<Vec<_>>(),
            fields.keys().collect::<Vec<_>>(),
            "{code}: the fields"
        );
        for (name, want) in fields {
            assert!(want == "*" || json[&name] == want, "{code}: {name} is {}, expected {want}", json[&name]);
        }
    }
}

#[test]
fn every_reason_is_a_sentence_that_names_its_values() {
    for (show, _) in SHOWN {
        let reason = show().remove(0);
        let sentence = reason.to_string();
        assert!(sentence.len() > 10, "{}: '{sentence}'", reason.code());
        for (name, value) in serde_json::to_value(&reason).unwrap().as_object().unwrap() {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            // Evidence in numbers, and which case it is, are for programs; the sentence says what is wrong in words.
            if value.is_f64() || value.is_null() || value.is_object() {
                continue;
            }
            assert!(name == "code" || sentence.contains(&text), "{}: '{text}' is not in '{sentence}'", reason.code());
        }
    }
}

#[test]
fn every_code_is_shown_raised_at_the_call_or_known_to_be_pending() {
    let shown: BTreeSet<String> = SHOWN.iter().map(|(_, text)| expected(text).0).collect();
    let elsewhere: BTreeSet<&str> = PENDING.iter().chain(RAISED_AT_THE_CALL).copied().collect();
    assert_eq!(PENDING.len(), 5, "nothing may be added to PENDING");
    assert_eq!(RAISED_AT_THE_CALL.len(), 2);
    for code in CODES {
        assert!(
            shown.contains(*code) != elsewhere.contains(code),
            "{code} is {}",
            if shown.contains(*code) { "shown, and still listed elsewhere" } else { "neither shown nor pending" }
        );
    }
    for code in shown.iter().map(String::as_str).chain(elsewhere) {
        assert!(CODES.contains(&code), "{code} is no code");
    }
}

#[test]
fn nothing_in_the_sources_makes_a_pending_reason() {
    fn sources(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("lz-model/src/reason.rs") {
                found.push(path);
            }
        }
    }
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(crates).unwrap().flatten() {
        sources(&entry.path().join("src"), &mut files);
    }
    assert!(files.len() > 50, "the sources were found");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for code in PENDING {
            let made = format!("Reason::{}", variant_name(code));
            assert!(!text.contains(&made), "{} makes {code}: show it here", file.display());
        }
    }
}

#[test]
fn the_specifications_codes_are_there() {
    // 5.5 and appendices I and J of the specification, 5.7 of its companion.
    let specified = "PLATFORM_MISMATCH SM_TOO_OLD SM_TOO_NEW DTYPE_UNSUPPORTED HEAD_DIM_INVALID HEAD_DIM_ALIGNMENT \
         SEQ_TOO_LONG GQA_UNSUPPORTED CUDA_GRAPH_UNSAFE ATTN_MASK_UNSUPPORTED STRIDE_LAST_DIM KV_CACHE_LAYOUT_MISMATCH \
         KV_CACHE_DTYPE_MISMATCH PACKED_WEIGHTS_REQUIRED CAPABILITIES_SCHEMA_MISMATCH NON_DETERMINISTIC NOT_INSTALLED \
         BACKEND_IMPORT_FAILED CONSTRAINT_FAILED CUDA_BLOCK_LIMIT_EXCEEDED CUDA_GRID_DIM_EXCEEDED \
         GPU_GENERATION_UNSUPPORTED TENSOR_CORE_GEN_UNSUPPORTED INSTRUCTION_SET_MISMATCH QUANT_FORMAT_UNSUPPORTED \
         QUANT_ACCURACY_THRESHOLD_EXCEEDED REQUANTIZATION_REQUIRED TP_INVARIANCE_REQUIRED TP_SIZE_EXCEEDED \
         REDUCTION_ORDER_MISMATCH KV_STRATEGY_UNSUPPORTED DRIVER_VERSION_UNSUPPORTED VIRTUAL_MEMORY_EXHAUSTED \
         SPEC_DECODE_PP_INCOMPATIBLE SPEC_DECODE_DRAFT_TP_CONSTRAINT SPEC_DECODE_KV_INCOMPATIBLE \
         SPEC_DECODE_ALGORITHM_UNSUPPORTED DEVICE_CAPABILITY_UNSUPPORTED HEAD_DIM_TOO_LARGE GQA_HEADS_MISMATCH \
         ATTN_MASK_INVALID JIT_DISABLED NOT_CONTIGUOUS TOKENIZER_ID_MISMATCH VOCAB_HASH_MISMATCH NORMALIZER_MISMATCH \
         MERGES_HASH_MISMATCH ADDED_TOKENS_MISMATCH SPECIAL_TOKENS_MISMATCH MEMORY_HEADROOM_EXCEEDED PLAN_BUCKET_MISS \
         BACKEND_ERROR";
    for code in specified.split_whitespace() {
        assert!(CODES.contains(&code), "{code}");
    }
}

// --- raised at the call --------------------------------------------------------------------

#[test]
fn some_codes_are_raised_before_any_kernel_is_judged() {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).build();
    let mut masked = attention();
    masked.inputs.push(arg("attn_mask", DType::Bool, &[128, 128]));
    let mut uneven = attention();
    uneven.input("key").shape = vec![2, 128, 3, 64];
    uneven.input("value").shape = vec![2, 128, 3, 64];
    for (world, code, words) in
        [(masked, "ATTN_MASK_INVALID", "causal=true"), (uneven, "GQA_HEADS_MISMATCH", "kv_heads=3")]
    {
        assert!(RAISED_AT_THE_CALL.contains(&code));
        let errors = [
            engine.which(world.op, &world.call()).map(|_| ()).unwrap_err(),
            engine.explain(world.op, &world.call()).map(|_| ()).unwrap_err(),
            engine.validate("lz_cpu.ref.attention.gqa.prefill", &world.call()).map(|_| ()).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.code(), code);
            assert!(matches!(error, Error::Call(CallError::Check { .. })), "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert!(!error.hint().is_empty());
        }
    }
}

// --- more than one way to a code -----------------------------------------------------------

#[test]
fn every_unmet_demand_is_listed_and_not_only_the_first() {
    let reasons = attention_with(|w| {
        w.context = Context { capturing: true, deterministic: true, requires_grad: true, ..Context::default() };
        w.kernel.dims.insert("seq_q".into(), DimRule { max: Some(64), ..DimRule::default() });
        w.kernel.conditions = vec!["heads > 100".into()];
        w.param("dropout_p", ParamValue::Float(0.5));
        w.param("scale", ParamValue::Float(0.5));
    });
    let mut codes: Vec<&str> = reasons.iter().map(Reason::code).collect();
    codes.sort_unstable();
    assert_eq!(
        codes,
        [
            "AUTOGRAD_UNSUPPORTED",
            "CONSTRAINT_FAILED",
            "CUDA_GRAPH_UNSAFE",
            "NON_DETERMINISTIC",
            "PARAM_UNSUPPORTED",
            "PARAM_UNSUPPORTED",
            "SEQ_TOO_LONG",
        ]
    );
}

#[test]
fn a_kernel_for_another_processor_is_out_for_that_alone() {
    let reasons = attention_with(|w| {
        w.kernel.platforms = vec![Platform::Cpu];
        w.kernel.min_sm = Some(100);
        w.context.deterministic = true;
    });
    let codes: Vec<&str> = reasons.iter().map(Reason::code).collect();
    assert_eq!(codes, ["PLATFORM_MISMATCH"]);
}

#[test]
fn a_library_that_is_not_there_meets_no_version() {
    let reasons = attention_with(|w| w.kernel.requires = vec!["flash_attn>=2".parse().unwrap()]);
    let [Reason::VersionUnsupported { found, .. }] = &reasons[..] else { panic!("{reasons:?}") };
    assert_eq!(found, "none");
}

#[test]
fn a_cuda_device_of_unknown_sm_is_refused_by_a_kernel_that_needs_one() {
    let reasons = attention_with(|w| {
        *w.device() = DeviceSpec::from_json(r#"{"platform": "cuda", "name": "unknown"}"#).unwrap();
        w.kernel.min_sm = Some(90);
    });
    let codes: Vec<&str> = reasons.iter().map(Reason::code).collect();
    assert_eq!(codes, ["SM_TOO_OLD"], "fail closed: nothing says that it is new enough");
}
