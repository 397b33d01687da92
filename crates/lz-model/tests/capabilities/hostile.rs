//! Documents made to do harm: they are refused, and reading them ends.

use lz_model::capabilities::MAX_BYTES;
use proptest::prelude::*;

use super::*;

#[test]
fn nesting_without_end_is_an_error() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let nested = format!("{}1{}", open.repeat(50_000), close.repeat(50_000));
        assert!(read(&format!("{{\"ops\": {nested}}}")).is_err());
        assert!(read(&format!("ops: {nested}")).is_err());
    }
    let indented: String = (0..1_000).map(|depth| format!("{}k:\n", " ".repeat(depth))).collect();
    assert!(read(&indented).is_err());
    assert!(read(&"- ".repeat(50_000)).is_err());
}

#[test]
fn an_alias_bomb_is_an_error() {
    let mut bomb = String::from("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
    for i in 1..20 {
        let inside = vec![format!("*a{}", i - 1); 9].join(", ");
        bomb.push_str(&format!("a{i}: &a{i} [{inside}]\n"));
    }
    bomb.push_str("schema_version: \"1.0\"\n");
    assert!(matches!(read(&bomb), Err(CapabilitiesError::Syntax(_))));
}

#[test]
fn a_document_longer_than_the_limit_is_not_even_parsed() {
    let error = read(&"#".repeat(MAX_BYTES + 1)).unwrap_err();
    assert!(error.to_string().contains("at most"), "{error}");
    assert!(matches!(error, CapabilitiesError::Syntax(_)));
}

#[test]
fn a_document_of_thousands_of_kernels_is_read() {
    let one = appendix_d()["ops"]["attention.causal"][0].clone();
    let mut document = appendix_d();
    document["ops"]["attention.causal"] = (0..1_000)
        .map(|i| {
            let mut kernel = one.clone();
            kernel["kernel_id"] = json!(format!("k{i}"));
            kernel
        })
        .collect();
    assert_eq!(read(&document.to_string()).unwrap().kernels.len(), 1_000);
}

#[test]
fn several_documents_in_one_text_are_an_error() {
    assert!(read("---\na: 1\n---\nb: 2\n").is_err());
    for nothing in ["", " \n", "~", "# only a comment", "hello", "[1, 2]", "\0", "\u{feff}"] {
        assert!(read(nothing).is_err(), "{nothing:?}");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![0i64, -1, 1, 80, i64::MAX, i64::MIN]).prop_map(Value::from),
    ];
    let words = prop::sample::select(vec![
        "1.0",
        "cuda",
        "attention.causal",
        "float16",
        "BSHD",
        "seq_q > 1",
        "batch * 9223372036854775807",
        "torch>=2",
        "seq_tiles",
        "",
        "nvfp4",
        "head_dim",
        "(((",
        "ring",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        number,
        words.prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        let key = prop_oneof![any::<String>(), prop::sample::select(keys())];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::vec((key, inner), 0..4).prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

/// Every key a document may have, anywhere.
fn keys() -> Vec<String> {
    let schema = json_schema();
    let tables = schema["$defs"].as_object().unwrap().values();
    let mut keys: Vec<String> =
        tables.chain([&schema]).filter_map(|t| t["properties"].as_object()).flat_map(|p| p.keys().cloned()).collect();
    keys.sort();
    keys.dedup();
    keys
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_json_makes_reading_panic(value in any_json()) {
        let _ = read_value(&value);
        let _ = read(&value.to_string());
    }

    #[test]
    fn no_text_makes_reading_panic(text in any::<String>(), yaml in "[-:{}\\[\\]&*!|>%@`'\"a-c0-9 \n\t,#?~]{0,60}") {
        let _ = read(&text);
        let _ = read(&yaml);
        let _ = read(&format!("{{{text}"));
        let _ = read(&format!("{SECTION_6_3}\n{yaml}"));
    }

    #[test]
    fn no_change_to_a_good_document_makes_reading_panic(
        changes in prop::collection::vec((prop::sample::select(keys()), any_json()), 1..4),
    ) {
        let changed = with_kernel(|kernel| kernel.extend(changes.iter().cloned()));
        let _ = read_value(&changed);
        let mut document = appendix_d();
        document.as_object_mut().unwrap().extend(changes);
        document["schema_version"] = json!("1.0");
        let _ = read_value(&document);
    }

    #[test]
    fn no_expression_makes_reading_panic(text in "[a-z_0-9+*/%<>=!() .'-]{0,40}") {
        let document = with_kernel(|kernel| {
            kernel.insert("conditions".into(), json!([text]));
            kernel.insert("workspace_bytes".into(), json!(text));
            kernel.insert("grid_layout".into(), json!({"x_formula": text}));
        });
        let _ = read_value(&document);
    }
}
