//! Capabilities documents: the specification's own are read as they stand, everything wrong with a document is said
//! at once, and nothing a document holds can do more than be refused.

use std::collections::BTreeMap;

use lz_model::capabilities::{CapabilitiesError, Problem, canonical_hash, json_schema, read, read_value};
use lz_model::{DType, DTypeSet, DimRule, KernelDescriptor, Layout, Platform, PluginOrigin};
use serde_json::{Map, Value, json};

mod hostile;
mod refusals;

/// Appendix D of the specification, as it stands there.
const APPENDIX_D: &str = include_str!("../fixtures/appendix_d.json");
/// Section 6.3 of the companion document, as it stands there.
const SECTION_6_3: &str = include_str!("../fixtures/section_6_3.yaml");

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
    assert_eq!(backend.origin, PluginOrigin::Builtin);
    assert_eq!(backend.requires, []);
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
    assert!(kernel.requires_last_dim_stride1);
    assert!(kernel.graph_safe);
    assert!(!kernel.deterministic);
    assert_eq!(kernel.transform_cost_hint, 0);

    // Nothing beyond what was stated.
    let expected = KernelDescriptor {
        version: "2.5.6".into(),
        platforms: vec![Platform::Cuda],
        min_sm: Some(80),
        dtypes: DTypeSet::of(&[DType::F16, DType::Bf16]),
        layouts: vec![Layout::Bshd],
        requires_last_dim_stride1: true,
        dims: kernel.dims.clone(),
        shares_kv_heads: true,
        graph_safe: true,
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
        ("packed weights", k.takes(lz_model::Packing::blocked(32, 1).unwrap())),
        ("less accuracy", !k.accuracy.is_standard()),
        ("offsets", k.params.contains_key("return_offsets")),
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
        "packing_formats": ["plain", "blocked_16x2"], "accuracy_class": "split_bf16_3",
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
    assert_eq!(k.packing, [lz_model::Packing::Plain, lz_model::Packing::blocked(16, 2).unwrap()]);
    assert_eq!(k.accuracy, lz_model::Accuracy::SplitBf16x3);
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
         make schemas"
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
