//! What is wrong with a document is said at once, with its place, and nothing of the document is taken.

use lz_model::Reason;
use lz_model::capabilities::SCHEMA_VERSION;

use super::*;

/// Keys, types and values the JSON Schema rules out.
const MISTAKES_OF_FORM: &str = include_str!("../fixtures/mistakes_of_form.json");
/// A document the JSON Schema has nothing against, and nothing else is right about.
const MISTAKES_OF_MEANING: &str = include_str!("../fixtures/mistakes_of_meaning.json");

#[test]
fn an_unknown_schema_version_is_refused_before_anything_else_is_looked_at() {
    for found in ["2.0", "1.1", "", "1"] {
        // Everything else about it is wrong too, and not worth a word.
        let error = read_value(&json!({"schema_version": found, "nonsense": 1})).unwrap_err();
        assert_eq!(error, CapabilitiesError::UnknownSchemaVersion { found: found.into() });
        assert_eq!(
            error.reason("flash_attn"),
            Reason::CapabilitiesSchemaMismatch { found: found.into(), supported: "1.0".into() }
        );
        assert_eq!(error.reason("x").code(), "CAPABILITIES_SCHEMA_MISMATCH", "{error}");
        assert!(error.to_string().contains(&format!("'{found}'")), "{error}");
    }
    assert_eq!(SCHEMA_VERSION, "1.0");
    let missing = problems(&json!({"backend": "x"}));
    assert!(missing[0].message.contains("schema_version"));
}

#[test]
fn any_other_refusal_means_the_library_could_not_be_brought_in() {
    let error = read("{").unwrap_err();
    assert!(matches!(error, CapabilitiesError::Syntax(_)));
    let Reason::BackendImportFailed { library, error } = error.reason("flash_attn") else { panic!() };
    assert_eq!(library, "flash_attn");
    assert!(error.contains("not a capabilities document"), "{error}");
}

/// Checks that each `(path, words)` is a problem, and says which are not.
fn assert_all_said(problems: &[Problem], expected: &[(&str, &str)]) {
    let said = |(path, words): &&(&str, &str)| problems.iter().any(|p| p.path == *path && p.message.contains(words));
    let unsaid: Vec<_> = expected.iter().filter(|e| !said(e)).collect();
    assert!(unsaid.is_empty(), "not said: {unsaid:#?}\nsaid: {problems:#?}");
}

#[test]
fn every_mistake_of_form_is_reported_at_once_with_its_path() {
    let Err(CapabilitiesError::Problems(problems)) = read(MISTAKES_OF_FORM) else {
        panic!("a document with mistakes was accepted")
    };
    let kernel = "/ops/attention.causal/0";
    let at = |key: &str| format!("{kernel}/{key}");
    let (min_sm, multiple, deterministic, strategy) =
        (at("min_sm"), at("head_dim_multiple"), at("deterministic"), at("supports_kv_strategies/0"));
    let (priority, rule, max, grid) = (at("priority"), at("dims/head_dim"), at("dims/head_dim/max"), at("grid_layout"));
    let expected = [
        ("", "unknown key 'import_nam'; did you mean 'import_name'?"),
        ("", "\"backend_version\" is missing"),
        ("/platform", "\"cudda\""),
        ("/requires", "\"torch>=2.2\""),
        (kernel, "unknown key 'max_hed_dim'; did you mean 'max_head_dim'?"),
        (kernel, "\"dtypes\" is missing"),
        (kernel, "\"requires_layouts\" is missing"),
        (&*min_sm, "\"eighty\""),
        (&*multiple, "8.5"),
        (&*deterministic, "\"yes\""),
        (&*strategy, "\"heap\""),
        (&*priority, "200"),
        (&*rule, "unknown key 'mx'; did you mean"),
        (&*max, "\"large\""),
        (&*grid, "{\"tile_size\":64}"),
        ("/ops/attention.causal/1/kernel_id", "7"),
        ("/ops/attention.causal/1/requires_layouts/0", "\"BDSH\""),
    ];
    assert_all_said(&problems, &expected);
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
}

#[test]
fn every_mistake_of_meaning_is_reported_at_once_with_its_path() {
    let Err(CapabilitiesError::Problems(problems)) = read(MISTAKES_OF_MEANING) else {
        panic!("a document with mistakes was accepted")
    };
    let first = |key: &str| format!("/ops/attention.causal/0{key}");
    let second = |key: &str| format!("/ops/attention.causal/1{key}");
    let expected: Vec<(String, &str)> = vec![
        ("/backend".into(), "the name is empty"),
        ("/requires/0".into(), "'torch>>2' is no version requirement"),
        ("/ops/attention.casual".into(), "unknown operation 'attention.casual'; did you mean 'attention.causal'?"),
        (first(""), "'min_sm' is missing"),
        (first(""), "no constraint on 'head_dim'"),
        (first("/dtypes/1"), "unknown dtype 'blfoat16'; did you mean 'bfloat16'?"),
        (first("/requires_dtype"), "unknown dtype 'fp33'"),
        (first("/requires/0"), "'cuda>=' is no version requirement"),
        (first("/min_driver_version"), "newest"),
        (first("/dims/batch"), "min 9 is larger than max 2"),
        (first("/dims/hed_dim"), "no dimension 'hed_dim' here; did you mean 'head_dim'?"),
        (first("/dims/heads"), "an empty 'one_of' allows nothing"),
        (first("/shape_constraints/sequence"), "no dimension 'sequence'"),
        (first("/inputs/quary"), "no input 'quary' here; did you mean 'query'?"),
        (first("/inputs/attn_mask/dtypes/0"), "unknown dtype 'boole'; did you mean 'bool'?"),
        (first("/params/soft_cap"), "no parameter 'soft_cap' here; did you mean 'softcap'?"),
        (first("/params/scale"), "cannot decide by its value"),
        (first("/conditions/0"), "column 7: `+` does not take int and str"),
        (first("/conditions/1"), "column 1: unknown name `seq_qq`"),
        (first("/conditions/2"), "the expression is int, but bool is wanted"),
        (first("/workspace_bytes"), "the expression is bool, but int is wanted"),
        (first("/grid_layout"), "tile_size"),
        (first("/grid_layout/x_formula"), "column 9: unknown name `hedas`"),
        (first("/fuses_ops/0"), "unknown operation 'posenc.ropes'; did you mean 'posenc.rope'?"),
        (second("/kernel_id"), "'careless.attention' is used twice"),
        (second("/dtypes"), "no dtype is stated"),
        (second("/requires_layouts"), "no layout is stated"),
        (second("/dims/head_dim"), "a multiple of 0 makes no sense"),
    ];
    let borrowed: Vec<(&str, &str)> = expected.iter().map(|(p, m)| (p.as_str(), *m)).collect();
    assert_all_said(&problems, &borrowed);

    let text = CapabilitiesError::Problems(problems.clone()).to_string();
    for problem in &problems {
        assert!(text.contains(&problem.to_string()), "{problem}");
    }
}

#[test]
fn each_mistake_is_reported_once_and_where_it_was_made() {
    let kernel = |key: &str| format!("/ops/attention.causal/0/{key}");
    let cases = [
        (with_kernel(|k| drop(k.insert("dims".into(), json!({"batch": {"min": 9, "max": 2}})))), kernel("dims/batch")),
        (
            with_kernel(|k| {
                k.insert("shape_constraints".into(), json!({"heads": [9, 2]}));
            }),
            kernel("shape_constraints/heads"),
        ),
        (
            with_kernel(|k| {
                k.insert("supports_attn_mask".into(), json!(true));
                k.insert("supported_attn_mask_types".into(), json!(["colour"]));
            }),
            kernel("supported_attn_mask_types/0"),
        ),
    ];
    for (document, path) in cases {
        assert_eq!(paths(&problems(&document)), [path]);
    }
}

#[test]
fn an_unknown_cache_dtype_is_reported_once() {
    let document = smallest("attention.paged", json!({"max_head_dim": null, "supports_kv_cache_dtypes": ["flot16"]}));
    assert_eq!(paths(&problems(&document)), ["/ops/attention.paged/0/supports_kv_cache_dtypes/0"]);
}

#[test]
fn head_dimensions_that_exclude_each_other_are_reported_at_one_of_their_keys() {
    let document = with_kernel(|k| drop(k.insert("min_head_dim".into(), json!(512))));
    let [problem] = &problems(&document)[..] else { panic!("one problem") };
    let at_fault = ["min_head_dim", "max_head_dim"].map(|k| format!("/ops/attention.causal/0/{k}"));
    assert!(at_fault.contains(&problem.path), "{problem}");
}

#[test]
fn a_number_of_the_wrong_kind_is_reported_with_its_path() {
    for (key, value) in [("min_sm", json!(5_000_000_000u64)), ("head_dim_multiple", json!(8.0))] {
        let document = with_kernel(|k| drop(k.insert(key.into(), value.clone())));
        match read_value(&document) {
            // 8.0 may as well be taken for 8.
            Ok(_) => assert_eq!(value, json!(8.0)),
            Err(CapabilitiesError::Problems(problems)) => {
                assert_eq!(paths(&problems), [format!("/ops/attention.causal/0/{key}")]);
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn one_dimension_under_two_names_never_loses_a_constraint() {
    let document = with_kernel(|k| {
        let rules = json!({"batch": {"max": 4}, "batch_size": {"max": 64}});
        k.insert("dims".into(), rules);
    });
    if let Ok(capabilities) = read_value(&document) {
        assert_eq!(capabilities.kernels[0].dims["batch"].max, Some(4));
    }
}

#[test]
fn a_flat_key_and_a_dimension_rule_that_contradict_each_other_do_not_widen_the_kernel() {
    let document = with_kernel(|k| {
        k.insert("dims".into(), json!({"head_dim": {"max": 1024}})); // beside max_head_dim: 256
    });
    if let Ok(capabilities) = read_value(&document) {
        assert_eq!(capabilities.kernels[0].dims["head_dim"].max, Some(256));
    }
}

#[test]
fn a_key_stated_twice_is_refused_in_yaml_and_in_json() {
    let twice = SECTION_6_3.replace("max_sm: null", "min_sm: 90");
    assert!(matches!(read(&twice), Err(CapabilitiesError::Syntax(_))));
    let twice = APPENDIX_D.replace("\"max_sm\": null", "\"min_sm\": 90");
    assert!(read(&twice).is_err(), "one of two min_sm was silently dropped");
}

#[test]
fn a_version_that_is_a_number_gets_a_message_that_makes_sense() {
    // `schema_version: 1.0` without quotes is a number in YAML.
    if let Err(error) = read(&SECTION_6_3.replace("\"1.0\"", "1.0")) {
        let text = error.to_string();
        assert!(!text.contains("'1.0' is not supported; this build reads '1.0'"), "{text}");
    }
}

#[test]
fn a_kernel_id_may_come_in_several_versions_but_each_only_once() {
    let kernel = |version: &str| json!({"kernel_id": "k", "version": version, "dtypes": ["float32"], "requires_layouts": ["strided"]});
    let mut document = smallest("norm.rms", json!({}));
    document["ops"]["norm.rms"] = json!([kernel("1"), kernel("2")]);
    assert_eq!(read_value(&document).unwrap().kernels.len(), 2);
    document["ops"]["norm.layer"] = json!([kernel("2")]);
    assert_eq!(paths(&problems(&document)), ["/ops/norm.rms/1/kernel_id"]);
}

#[test]
fn results_are_laid_out_as_the_operands_are() {
    let produces = |layout: &str| with_kernel(|k| drop(k.insert("produces_layout".into(), json!(layout))));
    assert!(read_value(&produces("BSHD")).is_ok());
    let problems = problems(&produces("BHSD"));
    assert_eq!(paths(&problems), ["/ops/attention.causal/0/produces_layout"]);
}
