//! Models as transformers writes them down.

use std::borrow::Cow;

use lz_measure::workload::{Activation, GEOMETRIES, Geometry, Phase, Sizes, Window, WorkloadError, calls};
use lz_model::DType;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::configs::{CONFIGS, config};

fn with(name: &str, key: &str, value: Value) -> Result<Geometry, WorkloadError> {
    let mut json: Value = serde_json::from_str(config(name)).unwrap();
    json[key] = value;
    Geometry::from_hf_config(&json.to_string())
}

#[test]
fn a_published_configuration_is_the_model_of_that_name() {
    assert_eq!(CONFIGS.len(), GEOMETRIES.len());
    for geometry in GEOMETRIES {
        let read = Geometry::from_hf_config(config(&geometry.name)).unwrap();
        let mut named = Geometry { name: geometry.name.clone(), ..read };
        if let (Some(a), Some(b)) = (named.scale, geometry.scale) {
            assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
            named.scale = geometry.scale;
        }
        assert_eq!(&named, geometry);
    }
}

#[test]
fn the_name_is_that_of_the_checkpoint() {
    assert_eq!(with("gpt2", "_name_or_path", json!("me/mine")).unwrap().name, "me/mine");
    assert_eq!(with("gpt2", "_name_or_path", json!("")).unwrap().name, "gpt2");
    assert_eq!(Geometry::named("GPT2").unwrap().name, Cow::Borrowed("gpt2"));
}

#[test]
fn optional_keys_have_the_defaults_of_transformers() {
    let heads = |key: &str, value: Value| with("llama-3-8b", key, value).unwrap();
    assert_eq!(heads("num_key_value_heads", Value::Null).kv_heads, 32);
    assert_eq!(heads("head_dim", json!(64)).head_dim, 64);
    assert_eq!(heads("rope_theta", Value::Null).rope.unwrap().theta, 1e4);
    assert!(heads("attention_bias", json!(true)).bias.out);
    assert_eq!(heads("hidden_act", json!("gelu")).activation, Activation::GeluMul { tanh: false });
    assert_eq!(with("qwen3-8b", "head_dim", Value::Null).unwrap().head_dim, 128);
    assert_eq!(with("mistral-7b", "sliding_window", Value::Null).unwrap().window, None);
    assert_eq!(with("gemma-2-9b", "query_pre_attn_scalar", json!(144)).unwrap().scale, Some(1.0 / 12.0));
    assert_eq!(with("deepseek-v3", "rope_scaling", Value::Null).unwrap().scale, None);
    assert_eq!(with("deepseek-v3", "first_k_dense_replace", json!(61)).unwrap().experts, None);
    assert_eq!(with("vit-b-16", "image_size", json!(384)).unwrap().tokens, Some(577));
    // The layers that have a window: the later ones, or those listed.
    let mut json: Value = serde_json::from_str(config("qwen2.5-7b")).unwrap();
    json["use_sliding_window"] = true.into();
    json["max_window_layers"] = 20.into();
    json["sliding_window"] = 1000.into();
    let window = |json: &Value| Geometry::from_hf_config(&json.to_string()).unwrap().window;
    assert_eq!(window(&json), Some(Window { keys: 1000, layers: 8 }));
    json["layer_types"] = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    assert_eq!(window(&json), Some(Window { keys: 1000, layers: 2 }));
    json["layer_types"] = json!(["full_attention"]);
    assert_eq!(window(&json), None);
}

#[test]
fn a_missing_key_is_named_and_a_bad_value_shown() {
    let needed: &[(&str, &[&str])] = &[
        ("llama-3-8b", &["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"]),
        ("gpt2", &["n_embd", "n_head", "n_layer", "vocab_size"]),
        ("bert-base", &["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]),
        ("vit-b-16", &["hidden_size", "num_hidden_layers"]),
        ("deepseek-v3", &["kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"]),
    ];
    for (model, keys) in needed {
        for wanted in *keys {
            match with(model, wanted, Value::Null) {
                Err(WorkloadError::MissingKey { key, .. }) => assert_eq!(key, *wanted),
                other => panic!("{model} without {wanted}: {other:?}"),
            }
            for bad in [json!(0), json!(-7), json!(1.5), json!("12"), json!(true), json!([3]), json!(1u64 << 40)] {
                match with(model, wanted, bad.clone()) {
                    Err(WorkloadError::BadKey { key, got, .. }) => assert_eq!((key, got), (*wanted, bad.to_string())),
                    other => panic!("{model} with {wanted} = {bad}: {other:?}"),
                }
            }
        }
    }
    for (model, wanted, bad) in [
        ("llama-3-8b", "hidden_act", json!("relu")),
        ("llama-3-8b", "num_key_value_heads", json!(5)),
        ("llama-3-8b", "num_attention_heads", json!(33)),
        ("llama-3-8b", "attention_bias", json!("no")),
        ("llama-3-8b", "rms_norm_eps", json!(-1e-6)),
        ("bert-base", "num_attention_heads", json!(7)),
        ("bert-base", "hidden_act", json!("silu")),
        ("vit-b-16", "patch_size", json!(225)),
        ("mistral-7b", "layer_types", json!("all")),
        ("deepseek-v3", "model_type", json!(3)),
    ] {
        match with(model, wanted, bad.clone()) {
            // Without heads of their own the keys' must follow; either key may be the one that is named.
            Err(WorkloadError::BadKey { key, .. }) if wanted == "num_attention_heads" => assert!(key.contains("heads")),
            Err(WorkloadError::BadKey { key, got, .. }) => assert_eq!((key, got), (wanted, bad.to_string())),
            other => panic!("{model} with {wanted} = {bad}: {other:?}"),
        }
    }
    let long = with("gpt2", "n_embd", json!("x".repeat(10_000))).unwrap_err().to_string();
    assert!(long.len() < 300, "{long}");
}

#[test]
fn what_is_no_configuration_is_refused() {
    for text in ["", "nonsense", "[1]", "3", "null", "{"] {
        assert!(matches!(Geometry::from_hf_config(text), Err(WorkloadError::Unreadable { .. })), "{text}");
    }
    let missing = Geometry::from_hf_config("{}").unwrap_err();
    assert!(matches!(missing, WorkloadError::MissingKey { key: "model_type", .. }));
    let unknown = Geometry::from_hf_config(r#"{"model_type": "lama"}"#).unwrap_err();
    assert_eq!(unknown.to_string(), "model_type 'lama' is none that is known; did you mean 'llama'?");
    assert!(unknown.hint().contains("deepseek_v3"));
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (1i64..100_000).prop_map(Value::from),
        any::<f64>().prop_map(|x| json!(x)),
        ".{0,12}".prop_map(Value::from),
        Just(json!([])),
        Just(json!({"rope_theta": -1, "factor": "x"})),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_configuration_with_anything_in_it_is_read_or_refused(
        which in 0..CONFIGS.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..4),
    ) {
        let mut json: Value = serde_json::from_str(CONFIGS[which].1).unwrap();
        let keys: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
        for (index, value) in changes {
            json[&keys[index.index(keys.len())]] = value;
        }
        if let Ok(geometry) = Geometry::from_hf_config(&json.to_string()) {
            let sizes = Sizes { batch: &[1, 1 << 39], seq: &[1, 7], context: &[5] };
            // Whatever could be read either makes calls or says why not.
            for sizes in [sizes, Sizes { batch: &[2], ..sizes }] {
                let _ = calls(&geometry, &sizes, DType::F16, &[Phase::Prefill, Phase::Decode]);
            }
        }
    }
}
