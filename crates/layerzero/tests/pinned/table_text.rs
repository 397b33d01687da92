//! The text of dispatch tables.

use layerzero::{Buckets, DispatchTable, FallbackMode, TableError};
use proptest::prelude::*;

use super::text::{edited, edits};
use super::*;

/// The example of the specification, appendix E.
const APPENDIX_E: &str = r#"{
  "schema_version": "1.0",
  "model_id": "llama3-70b",
  "hardware_signature": "cuda_sm90_cu123",
  "shape_buckets": {
    "seq_len": [128, 512, 2048, 8192],
    "batch": [1, 4, 16, 64]
  },
  "plans": [
    {
      "bucket": { "seq_len": 512, "batch": 4 },
      "ops": [
        { "op": "posenc.rope", "kernel_id": "liger.rope" },
        { "op": "attention.causal", "kernel_id": "flash_attn.v2.causal" },
        { "op": "norm.rms", "kernel_id": "liger.rms_norm" }
      ],
      "jit_artifacts": ["flashinfer_cache_key_abc123"]
    }
  ],
  "fallback": { "mode": "runtime_select" }
}"#;

/// A table with a call.
fn sample() -> String {
    let call = attention(4, 512, 512).to_string();
    let entry = r#"{ "op": "attention.causal", "kernel_id": "flash_attn.v2.causal" }"#;
    let op =
        format!(r#"{{ "op": "attention", "kernel_id": "flash_attn.v2.causal", "version": "2.5.6", "call": {call} }}"#);
    assert!(APPENDIX_E.contains(entry));
    APPENDIX_E.replace(entry, &op)
}

#[test]
fn the_example_of_the_specification_is_read() {
    let table = DispatchTable::parse(APPENDIX_E).unwrap();
    assert_eq!((table.model_id.as_str(), table.hardware_signature.as_str()), ("llama3-70b", "cuda_sm90_cu123"));
    assert_eq!(table.shape_buckets.ends("batch"), [1, 4, 16, 64]);
    assert_eq!(table.plans[0].bucket, BTreeMap::from([("batch".into(), 4), ("seq_len".into(), 512)]));
    assert_eq!(table.plans[0].ops[2].kernel_id, "liger.rms_norm");
    assert_eq!(table.plans[0].jit_artifacts, ["flashinfer_cache_key_abc123"]);
    assert_eq!(table.fallback.mode, FallbackMode::RuntimeSelect);
    // What is not in it is not written either.
    let written: serde_json::Value = serde_json::from_str(&table.to_json()).unwrap();
    assert_eq!(written, serde_json::from_str::<serde_json::Value>(APPENDIX_E).unwrap());
}

#[test]
fn what_is_written_is_read() {
    let table = DispatchTable::parse(&sample()).unwrap();
    let text = table.to_string();
    assert_eq!(DispatchTable::parse(&text), Ok(table.clone()));
    assert_eq!(DispatchTable::parse(&text).unwrap().to_json(), text);
    assert!(text.ends_with("}\n"));
}

#[test]
fn the_schema_takes_what_the_reader_takes() {
    let validator = jsonschema::validator_for(&DispatchTable::json_schema()).unwrap();
    let judged = |text: &str| {
        let document: serde_json::Value = serde_json::from_str(text).unwrap();
        (validator.is_valid(&document), DispatchTable::parse(text).is_ok())
    };
    for good in [APPENDIX_E, &sample(), &DispatchTable::parse(&sample()).unwrap().to_json()] {
        assert_eq!(judged(good), (true, true), "{good}");
    }
    for (from, to) in [
        ("\"model_id\"", "\"modelid\""),
        ("[128, 512, 2048, 8192]", "128"),
        ("[128, 512, 2048, 8192]", "[\"128\"]"),
        ("runtime_select", "guess"),
        ("\"shape\":[4,512,8,64]", "\"shape\":4"),
        ("\"layout\":\"BSHD\"", "\"layot\":\"BSHD\""),
        ("\"kernel_id\": \"liger.rope\"", "\"kernel_id\": 5"),
        ("{ \"seq_len\": 512, \"batch\": 4 }", "[512, 4]"),
    ] {
        let text = sample().replacen(from, to, 1);
        assert_ne!(text, sample(), "{from}");
        assert_eq!(judged(&text), (false, false), "{from} -> {to}");
    }
}

#[test]
fn every_mistake_is_told_with_its_place() {
    let cases = [
        ("\"model_id\"", "\"modle_id\"", "line 3, column 12: unknown field `modle_id`"),
        ("\"model_id\"", "\"modle_id\"", "did you mean 'model_id'?"),
        ("\"kernel_id\": \"liger.rope\"", "\"kernal_id\": \"liger.rope\"", "did you mean 'kernel_id'?"),
        ("\"1.0\"", "\"1.1\"", "schema_version 1.1 is not supported; this build reads 1.0"),
        (
            "\"seq_len\": [128",
            "\"seq_length\": [128",
            "no operation has a size 'seq_length' that varies; did you mean 'seq_len",
        ),
        ("\"seq_len\": [128", "\"head_dim\": [128", "no operation has a size 'head_dim' that varies"),
        ("[1, 4, 16, 64]", "[]", "batch has 0 buckets; 1 to 1024 can be had"),
        ("[1, 4, 16, 64]", "[1, 4, 4]", "batch: 4 follows 4; the upper ends of buckets ascend"),
        ("[1, 4, 16, 64]", "[4, 1]", "batch: 1 follows 4"),
        ("[1, 4, 16, 64]", "[0, 4]", "batch: 0 follows 0"),
        ("[1, 4, 16, 64]", "[-4]", "batch: -4 follows 0"),
        ("[1, 4, 16, 64]", "[9223372036854775807]", "batch: 9223372036854775807 follows 0"),
        ("\"batch\": [1, 4, 16, 64]", "\"seq_len\": [1]", "the key 'seq_len' is stated twice"),
        ("\"batch\": 4", "\"batch\": 5", "plans[0].bucket: batch = 5 is no bucket of shape_buckets"),
        ("\"batch\": 4", "\"rows\": 4", "plans[0].bucket: rows = 4 is no bucket of shape_buckets"),
        ("\"batch\": 4", "\"seq_len\": 512", "the key 'seq_len' is stated twice"),
        ("posenc.rope", "posenc.rop", "plans[0].ops[0]: unknown operation 'posenc.rop'; did you mean 'posenc.rope'?"),
        (
            "\"op\": \"attention\",",
            "\"op\": \"rms_norm\",",
            "plans[0].ops[1]: 'op' is rms_norm, but the call is one of attention",
        ),
        ("\"shape\":[4,512,8,64]", "\"shape\":[4,512,8,65]", "plans[0].ops[1]: the call cannot be made: "),
        ("\"shape\":[4,512,8,64]", "\"shape\":[4,512,8,-1]", "plans[0].ops[1]: the call cannot be made: "),
        ("runtime_select", "guess", "unknown variant `guess`"),
        ("\"plans\"", "plans", "line 9, column 3: key must be a string"),
    ];
    for (from, to, expected) in cases {
        let text = sample().replacen(from, to, 1);
        assert_ne!(text, sample(), "{from}");
        let error = DispatchTable::parse(&text).unwrap_err().to_string();
        assert!(error.contains(expected), "{from} -> {to}:\n{error}\n{expected}");
    }
    assert!(DispatchTable::parse("").is_err() && DispatchTable::parse("[]").is_err());
    let large = DispatchTable::parse(&" ".repeat(DispatchTable::MAX_BYTES + 1)).unwrap_err();
    assert!(matches!(large, TableError::TooLarge { .. }), "{large}");
}

#[test]
fn a_call_decided_twice_is_told() {
    let mut table = DispatchTable::parse(&sample()).unwrap();
    let mut again = table.plans[0].ops[1].clone();
    again.call = again.call.map(|call| call.param("causal", true));
    table.plans[0].ops.push(again.clone());
    let error = DispatchTable::parse(&table.to_json()).unwrap_err();
    let (place, first) = ("plans[0].ops[3]".into(), "plans[0].ops[1]".into());
    assert_eq!(error, TableError::DuplicateEntry { place, first });
    table.plans[0].ops[3].graph = true;
    assert!(DispatchTable::parse(&table.to_json()).is_ok(), "another mode");
}

#[test]
fn axes_are_written_as_they_are_given() {
    let buckets = Buckets::new([("seq_len", vec![128, 512]), ("batch", vec![1])]).unwrap();
    assert_eq!(buckets.to_string(), "batch=1 seq_len=128,512");
    assert_eq!(buckets.ends("rows"), [0i64; 0]);
    assert!(Buckets::new([("seq_len", (1..=1025).collect::<Vec<i64>>())]).is_err());
    assert_eq!(Buckets::default().to_string(), "");
}

fn holds(text: &str) -> Result<(), TestCaseError> {
    if let Ok(table) = DispatchTable::parse(text) {
        let again = table.to_json();
        prop_assert_eq!(DispatchTable::parse(&again), Ok(table), "{}", again);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(300)))]

    #[test]
    fn any_bytes_are_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        holds(&String::from_utf8_lossy(&bytes))?;
    }

    #[test]
    fn a_good_text_with_mistakes_is_an_answer(edits in edits()) {
        holds(&edited(&sample(), &edits))?;
    }

    /// Whatever is read can be put in force, or not, on any machine.
    #[test]
    fn what_is_read_can_be_looked_at(edits in edits()) {
        if let Ok(table) = DispatchTable::parse(&edited(&sample().replace("cuda_sm90_cu123", "cpu__baseline"), &edits)) {
            let engine = engine_on(vec![host()]);
            let status = engine.check_table(&table, "x").unwrap();
            prop_assert_eq!(status.in_force + if status.refused { status.entries } else { status.mismatches.len() }, status.entries);
        }
    }
}
