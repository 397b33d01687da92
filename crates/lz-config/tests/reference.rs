//! What is made from the list of settings: the reference and the schema.

use std::collections::BTreeSet;

use lz_config::{SECTIONS, SETTINGS, reference_markdown, schema};
use serde_json::{Value as Json, json};

#[test]
fn every_setting_is_declared_once_and_said_by_one_variable() {
    let keys: BTreeSet<&str> = SETTINGS.iter().map(|s| s.key).chain(SECTIONS.iter().map(|s| s.key)).collect();
    assert_eq!(keys.len(), SETTINGS.len() + SECTIONS.len());
    let variables: BTreeSet<String> = SETTINGS.iter().map(|s| s.variable_name()).collect();
    assert_eq!(variables.len(), SETTINGS.len());
    assert!(SETTINGS.iter().all(|s| s.doc.trim().ends_with('.')));
}

#[test]
fn the_reference_names_everything() {
    let text = reference_markdown();
    for setting in SETTINGS {
        assert!(text.contains(&format!("| `{}` |", setting.key)), "{}", setting.key);
        assert!(text.contains(&setting.variable_name()), "{}", setting.key);
    }
    insta::assert_snapshot!(text);
}

fn problems(document: &Json) -> Vec<String> {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    validator.iter_errors(document).map(|e| format!("{}: {e}", e.instance_path())).collect()
}

#[test]
fn the_schema_takes_the_documents_of_the_specification() {
    for (name, text) in [
        ("policy", include_str!("data/policy.yaml")),
        ("reference", include_str!("data/reference.yaml")),
        ("static", include_str!("data/static.yaml")),
        ("rules", include_str!("data/rules.yaml")),
        ("kernels", include_str!("data/kernels.yaml")),
    ] {
        let document: Json = serde_saphyr::from_str(text).unwrap();
        assert_eq!(problems(&document), Vec::<String>::new(), "{name}");
    }
    let mut defaults = json!({});
    for setting in SETTINGS {
        let value = serde_json::to_value(setting.default()).unwrap();
        match setting.key.split_once('.') {
            None => defaults[setting.key] = value,
            Some((group, name)) => defaults[group][name] = value,
        }
    }
    assert_eq!(problems(&defaults), Vec::<String>::new());
}

#[test]
fn the_schema_refuses_what_the_reader_refuses() {
    for document in [
        json!({"fallback_enabld": true}),
        json!({"strict_mode": "maybe"}),
        json!({"memory_headroom_mb": -1}),
        json!({"breaker": {"failure_treshold": 3}}),
        json!({"backend_isolation": "elsewhere"}),
        json!({"rules": [{"prefr": "x"}]}),
        json!({"rollouts": [{"name": "x"}]}),
        json!({"schema_version": 3}),
        json!({"locks": {"attention": 5}}),
        json!([1]),
    ] {
        assert!(!problems(&document).is_empty(), "{document}");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layerzero.yaml");
        std::fs::write(&path, document.to_string()).unwrap();
        let sources = lz_config::Sources { project: Some(path), ..Default::default() };
        assert!(lz_config::Layers::load(&sources).is_err(), "{document}");
    }
}
