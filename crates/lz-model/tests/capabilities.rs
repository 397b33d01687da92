//! Capabilities documents: the specification's own are read as they stand, everything wrong with a document is said
//! at once, and nothing a document holds can do more than be refused.

use std::collections::BTreeMap;

use lz_model::capabilities::{
    CapabilitiesError, MAX_BYTES, Problem, SCHEMA_VERSION, canonical_hash, json_schema, read, read_value,
};
use lz_model::{DType, DTypeSet, DimRule, KernelDescriptor, Layout, Platform, PluginOrigin, Reason};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Appendix D of the specification, as it stands there.
const APPENDIX_D: &str = include_str!("fixtures/appendix_d.json");
/// Section 6.3 of the companion document, as it stands there.
const SECTION_6_3: &str = include_str!("fixtures/section_6_3.yaml");
/// Keys, types and values the JSON Schema rules out.
const MISTAKES_OF_FORM: &str = include_str!("fixtures/mistakes_of_form.json");
/// A document the JSON Schema has nothing against, and nothing else is right about.
const MISTAKES_OF_MEANING: &str = include_str!("fixtures/mistakes_of_meaning.json");

fn appendix_d() -> Value {
    serde_json::from_str(APPENDIX_D).unwrap()
}

/// Appendix D with its one kernel changed.
fn with_kernel(change: impl FnOnce(&mut Map<String, Value>)) -> Value {
    let mut document = appendix_d();
    let kernel = &mut document["ops"]["attention.causal"][0];
    change(kernel.as_object_mut().unwrap());
    document
}

/// The smallest document: one kernel for `op` on the CPU, with `more` stated.
fn smallest(op: &str, more: Value) -> Value {
    let mut kernel = json!({"kernel_id": "k", "dtypes": ["float32"], "requires_layouts": ["strided"]});
    let object = kernel.as_object_mut().unwrap();
    object.extend(more.as_object().unwrap().clone());
    json!({
        "schema_version": "1.0", "backend": "b", "backend_version": "2", "platform": "cpu",
        "ops": {op: [kernel]},
    })
}

fn problems(document: &Value) -> Vec<Problem> {
    match read_value(document) {
        Err(CapabilitiesError::Problems(problems)) => problems,
        other => panic!("expected problems, got {other:?}"),
    }
}

fn paths(problems: &[Problem]) -> Vec<&str> {
    problems.iter().map(|p| p.path.as_str()).collect()
}

// --- the specification's documents --------------------------------------------------------

#[test]
fn the_document_of_appendix_d_means_what_it_says() {
    let capabilities = read(APPENDIX_D).unwrap();

    let backend = &capabilities.backend;
    assert_eq!(backend.name, "flash_attn");
    assert_eq!(backend.version, "2.5.6");
    assert_eq!(backend.platforms, [Platform::Cuda]);
    assert_eq!(backend.import_name, None);
    assert_eq!(backend.origin, PluginOrigin::Builtin);
    assert_eq!(backend.requires, []);
    assert_eq!(backend.init_cost_ms, None);
    assert!(backend.supports_graphs);
    assert_eq!(backend.schema_version, "1.0");
    assert_eq!(backend.capabilities_hash, canonical_hash(&appendix_d()));
    assert!(capabilities.generations.is_empty());

    let [kernel] = &capabilities.kernels[..] else { panic!("one kernel, got {}", capabilities.kernels.len()) };
    assert_eq!(kernel.id, "flash_attn.v2.causal");
    assert_eq!(kernel.version, "2.5.6");
    assert_eq!(kernel.backend, "flash_attn");
    assert_eq!(kernel.operation, "attention.causal");
    assert_eq!(kernel.platforms, [Platform::Cuda]);
    assert_eq!((kernel.min_sm, kernel.max_sm), (Some(80), None));
    assert_eq!(kernel.dtypes, DTypeSet::of(&[DType::F16, DType::Bf16]));
    let head_dim = DimRule { min: Some(32), max: Some(256), multiple_of: Some(8), one_of: None };
    assert_eq!(
        kernel.dims,
        BTreeMap::from([("head_dim".to_owned(), head_dim)]),
        "max_seq_len is null: sequences are not constrained"
    );
    assert!(kernel.shares_kv_heads);
    assert!(kernel.inputs.is_empty(), "masks are unsupported");
    assert!(kernel.params.is_empty(), "dropout is unsupported");
    assert_eq!(kernel.layouts, [Layout::Bshd]);
    assert_eq!(kernel.produces_layout, Some(Layout::Bshd));
    assert!(kernel.requires_last_dim_stride1);
    assert!(kernel.graph_safe);
    assert!(!kernel.deterministic);
    assert_eq!(kernel.fuses, ["posenc.rope"]);
    assert_eq!(kernel.transform_cost_hint, 0);

    // Nothing beyond what was stated.
    let expected = KernelDescriptor {
        version: "2.5.6".into(),
        platforms: vec![Platform::Cuda],
        min_sm: Some(80),
        dtypes: DTypeSet::of(&[DType::F16, DType::Bf16]),
        layouts: vec![Layout::Bshd],
        produces_layout: Some(Layout::Bshd),
        requires_last_dim_stride1: true,
        dims: kernel.dims.clone(),
        shares_kv_heads: true,
        graph_safe: true,
        fuses: vec!["posenc.rope".into()],
        ..KernelDescriptor::new("flash_attn.v2.causal", "attention.causal", "flash_attn")
    };
    assert_eq!(*kernel, expected);
}

#[test]
fn the_yaml_of_section_6_3_and_the_json_of_appendix_d_are_the_same_document() {
    let (json, yaml) = (read(APPENDIX_D).unwrap(), read(SECTION_6_3).unwrap());
    assert_eq!(json, yaml);
    assert_eq!(json.backend.capabilities_hash, yaml.backend.capabilities_hash);
}

// --- fail closed --------------------------------------------------------------------------

#[test]
fn whatever_is_not_stated_is_not_supported() {
    let capabilities = read_value(&smallest("attention", json!({"max_head_dim": null}))).unwrap();
    let k = &capabilities.kernels[0];
    for (name, on) in [
        ("shared heads", k.shares_kv_heads),
        ("graphs", k.graph_safe),
        ("determinism", k.deterministic),
        ("gradients", k.autograd),
        ("batch invariance", k.batch_invariant),
        ("packing", k.supports_prepack),
        ("offsets", k.params.contains_key("return_offsets")),
        ("graphs of the backend", capabilities.backend.supports_graphs),
    ] {
        assert!(!on, "{name}");
    }
    assert!(k.inputs.is_empty(), "optional inputs cannot be used");
    assert!(k.params.is_empty(), "parameters stay at their defaults");
    assert_eq!((&k.tp, &k.quant), (&None, &None));
    assert!(k.kv_strategies.is_empty());
    assert_eq!(k.dtypes, DTypeSet::of(&[DType::F32]));
    assert_eq!(k.priority, 50);
}

#[test]
fn a_head_dimension_stated_as_any_is_a_rule_that_takes_any() {
    let capabilities = read_value(&smallest("attention", json!({"max_head_dim": null}))).unwrap();
    assert_eq!(
        capabilities.kernels[0].dims.get("head_dim"),
        Some(&DimRule::default()),
        "selection asks every kernel for a rule on head_dim"
    );
}

#[test]
fn what_is_stated_is_supported() {
    let stated = json!({
        "max_head_dim": null, "supports_attn_mask": true, "supported_attn_mask_types": ["none", "bool"],
        "supports_dropout": true, "supports_scale": true, "max_seq_len": 4096,
        "min_batch_size": 2, "max_batch_size": 64, "min_driver_version": "550.10",
        "instruction_set": "avx2", "instruction_sets": ["avx512f"], "requires": ["torch>=2.2"],
        "shape_constraints": {"heads": [1, 32]}, "version": "9.1",
        "supported_quant_dtypes": ["nvfp4"], "quantization_scale_granularity": "blockwise",
    });
    let k = read_value(&smallest("attention", stated)).unwrap().kernels.remove(0);
    assert_eq!(k.inputs["attn_mask"].dtypes, Some(DTypeSet::of(&[DType::Bool])));
    assert_eq!(k.params.keys().map(String::as_str).collect::<Vec<_>>(), ["dropout_p", "scale"]);
    let between = |min, max| DimRule { min, max, ..DimRule::default() };
    assert_eq!(k.dims["seq_q"], between(None, Some(4096)));
    assert_eq!(k.dims["seq_k"], between(None, Some(4096)));
    assert_eq!(k.dims["batch"], between(Some(2), Some(64)));
    assert_eq!(k.dims["heads"], between(Some(1), Some(32)));
    assert_eq!(k.instruction_sets, ["avx2", "avx512f"]);
    let requires: Vec<String> = k.requires.iter().map(ToString::to_string).collect();
    assert_eq!(requires, ["torch>=2.2", "driver>=550.10"]);
    assert_eq!(k.version, "9.1");
    let quant = k.quant.unwrap();
    assert_eq!(quant.formats, [lz_model::QuantFormat::Nvfp4]);
    assert_eq!(quant.granularities, [lz_model::Granularity::Blockwise]);
}

#[test]
fn a_document_says_where_its_kernels_run_and_which_versions_it_needs() {
    let mut document = smallest("norm.rms", json!({}));
    document["platform"] = json!(["cpu", "rocm"]);
    document["requires"] = json!(["torch>=2.2,<3"]);
    document["gpu_generations"] = json!([{"generation": "rubin", "sm": [130, 140], "tensor_cores": 6}]);
    let capabilities = read_value(&document).unwrap();
    assert_eq!(capabilities.kernels[0].platforms, [Platform::Cpu, Platform::Rocm]);
    assert!(capabilities.kernels[0].requires[0].met_by("2.5"));
    assert!(!capabilities.kernels[0].requires[0].met_by("3.1"));
    assert_eq!(capabilities.generations[0].sm, (130, 140));
}

// --- refusals -----------------------------------------------------------------------------

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

// --- the hash -----------------------------------------------------------------------------

/// The document as text, with the keys of every object in reverse order and much white space.
fn reversed(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let entries: Vec<String> =
                map.iter().rev().map(|(k, v)| format!(" {}\n :\t{} ", Value::from(k.as_str()), reversed(v))).collect();
            format!("{{ {} }}", entries.join(","))
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(reversed).collect();
            format!("[\n{}\n]", items.join(" , "))
        }
        other => other.to_string(),
    }
}

#[test]
fn the_hash_is_of_what_is_said_and_not_of_how() {
    let original = read(APPENDIX_D).unwrap().backend.capabilities_hash;
    assert_eq!(original.len(), 64);
    assert!(original.bytes().all(|b| b.is_ascii_hexdigit()));
    let text = reversed(&appendix_d());
    assert!(text.find("transform_cost_hint") < text.find("kernel_id"), "the order did change");
    assert_eq!(read(&text).unwrap().backend.capabilities_hash, original);
    assert_eq!(read(SECTION_6_3).unwrap().backend.capabilities_hash, original);
    for (key, value) in [
        ("min_sm", json!(90)),
        ("deterministic", json!(true)),
        ("dtypes", json!(["bfloat16", "float16"])),
        ("max_seq_len", json!(4096)),
        ("kernel_id", json!("flash_attn.v3.causal")),
    ] {
        let changed = with_kernel(|k| drop(k.insert(key.into(), value)));
        let changed = read_value(&changed).unwrap().backend.capabilities_hash;
        assert_ne!(changed, original, "{key}");
    }
}

// --- the schema file ----------------------------------------------------------------------

#[test]
fn the_checked_in_json_schema_is_the_generated_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/capabilities-1.0.schema.json");
    let checked_in = std::fs::read_to_string(path).unwrap_or_default();
    let generated = format!("{:#}\n", json_schema());
    assert!(
        checked_in == generated,
        "schemas/capabilities-1.0.schema.json is not the schema this build reads; regenerate it with\n  \
         cargo run -p lz-cli -- schema capabilities > schemas/capabilities-1.0.schema.json"
    );
}

#[test]
fn the_schema_accepts_what_reading_accepts() {
    let schema = json_schema();
    assert_eq!(schema["title"], "LayerZero capabilities v1.0");
    assert_eq!(schema["additionalProperties"], false);
    let required: Vec<&str> = schema["required"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(required, ["schema_version", "backend", "backend_version", "platform", "ops"]);
}

// --- hostile documents --------------------------------------------------------------------

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

/// A kernel may run on some of its backend's platforms only; on others it is not, whatever the backend does.
#[test]
fn a_kernel_may_be_for_some_of_its_backends_platforms() {
    let document = |platform: &str| {
        format!(
            r#"{{"schema_version": "1.0", "backend": "b", "backend_version": "1", "platform": ["cpu", "cuda"],
            "ops": {{"norm.rms": [{{"kernel_id": "b.k", "dtypes": ["float32"], "requires_layouts": ["contiguous"]{platform}}}]}}}}"#
        )
    };
    let read = |platform: &str| read(&document(platform));
    let platforms = |platform: &str| read(platform).map(|d| d.kernels[0].platforms.clone()).unwrap();
    assert_eq!(platforms(r#", "platform": "cpu""#), [Platform::Cpu], "no SM needs to be stated for it");
    assert_eq!(platforms(r#", "min_sm": 80"#), [Platform::Cpu, Platform::Cuda]);
    let refused = |platform: &str| read(platform).unwrap_err().to_string();
    assert!(refused(r#", "platform": "rocm""#).contains("does not run on rocm"));
    assert!(refused(r#", "platform": []"#).contains("no platform"));
}
