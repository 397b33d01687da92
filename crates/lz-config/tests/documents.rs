//! The documents of the specification load as written, and mean what they say.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use lz_config::{Config, Layers, Origin, Sources};
use lz_model::*;
use lz_select::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn load(name: &str, environment: &[(&str, &str)]) -> Config {
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let sources = Sources { project: Some(data(name)), environment, ..Sources::default() };
    Layers::load(&sources).and_then(|layers| layers.resolve()).unwrap_or_else(|e| panic!("{name}:\n{e}"))
}

fn rules(config: &Config) -> Vec<String> {
    let operation = |r: &RuleSpec| r.operation.clone().unwrap_or_else(|| "all".into());
    let condition = |r: &RuleSpec| match &r.condition {
        Condition::Always => String::new(),
        other => format!(" when {other:?}"),
    };
    config
        .policy()
        .rules
        .iter()
        .map(|r| format!("[{}] {}: {:?}{}", r.name, operation(r), r.action, condition(r)))
        .collect()
}

#[test]
fn the_policy_file_of_the_specification() {
    let config = load("policy.yaml", &[]);
    assert_eq!(config.settings.prefer_sources, ["flash_attn", "flashinfer"]);
    assert_eq!(config.settings.avoid_sources, ["experimental_lib"]);
    insta::assert_snapshot!(rules(&config).join("\n"));
    assert_eq!(config.warnings, []);
}

#[test]
fn the_reference_of_the_specification_is_the_defaults() {
    let mut config = load("reference.yaml", &[]);
    assert_eq!(config.settings.prefer_sources, ["flash_attn", "flashinfer", "xformers"]);
    config.settings.prefer_sources.clear();
    assert_eq!(config.settings, lz_config::Settings::default());
    let said = config.entries().iter().filter(|e| e.origin != Origin::Default).count();
    assert_eq!(said, 16, "every key of the file is a setting that was said");
}

#[test]
fn the_short_files_of_the_low_level_specification() {
    insta::assert_snapshot!(rules(&load("static.yaml", &[])).join("\n"));
    insta::assert_snapshot!(rules(&load("rules.yaml", &[])).join("\n"));
}

#[test]
fn the_kernels_document_of_the_specification() {
    let config = load("kernels.yaml", &[]);
    assert!(config.settings.perfdb.auto_tune);
    assert_eq!(config.settings.cache.ttl_seconds, 3600);
    assert_eq!(config.settings.health.sample_every, 64);
    insta::assert_snapshot!(rules(&config).join("\n"));
    assert_eq!(config.warnings, []);
    let development = load("kernels.yaml", &[("LAYERZERO_POLICY", "development")]);
    assert_eq!(development.settings.health.sample_every, 1);
    assert_eq!(development.policy().rules, config.policy().rules);
}

#[test]
fn a_mark_of_the_byte_order_and_dos_lines_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layerzero.yaml");
    std::fs::write(&path, "\u{feff}verbose: true\r\nbreaker:\r\n  timeout_ms: 7\r\n").unwrap();
    let config = Layers::load(&Sources { project: Some(path), ..Sources::default() }).unwrap().resolve().unwrap();
    assert!(config.settings.verbose);
    assert_eq!(config.settings.breaker.timeout_ms, 7);
    assert!(config.origin("breaker.timeout_ms").unwrap().to_string().ends_with(":3:3"));
}

#[test]
fn a_kernels_document_can_be_included_and_overruled() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(data("kernels.yaml"), folder.path().join("kernels.yaml")).unwrap();
    let path = folder.path().join("layerzero.yaml");
    std::fs::write(&path, "include: kernels.yaml\npolicy: production\ncache: {ttl_seconds: 5}\n").unwrap();
    let config = Layers::load(&Sources { project: Some(path), ..Sources::default() }).unwrap().resolve().unwrap();
    assert_eq!(config.settings.cache.ttl_seconds, 5);
    assert!(config.settings.perfdb.auto_tune);
    assert!(matches!(config.origin("perfdb.auto_tune"), Some(Origin::Included { line: 7, .. })));
    assert_eq!(config.policy().rules[0].name, "lock flash_attention_v2 (kernels.yaml:81)");
}

#[test]
fn a_kernel_the_document_does_not_list_is_warned_about_when_it_lists_one_nearly_so_called() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(data("kernels.yaml")).unwrap();
    let path = folder.path().join("kernels.yaml");
    std::fs::write(&path, text.replace("kernel_override: xformers", "kernel_override: xfomers")).unwrap();
    let config = Layers::load(&Sources { project: Some(path), ..Sources::default() }).unwrap().resolve().unwrap();
    let warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 1);
    let expected = ":71:24: 'xfomers_memory_efficient' is not among the document's kernels; did you mean 'xformers_memory_efficient'?";
    assert!(warnings[0].ends_with(expected), "{}", warnings[0]);
}

#[test]
fn a_policy_that_no_document_has_is_an_error() {
    let environment = [("LAYERZERO_POLICY".to_owned(), "producton".to_owned())].into();
    let sources = Sources { project: Some(data("kernels.yaml")), environment, ..Sources::default() };
    let error = Layers::load(&sources).unwrap().resolve().unwrap_err();
    insta::assert_snapshot!(error.to_string());
}

// --- what the kernels document does to a selection --------------------------------------------------

const KERNELS: &[(&str, &str)] = &[
    ("flash_attn.v2", "attention"),
    ("flash_attn.v2_experimental", "attention"),
    ("flashinfer.prefill", "attention"),
    ("xformers.memory_efficient", "attention"),
    ("torch.sdpa.math", "attention"),
    ("other.attention", "attention"),
    ("liger.rms_norm", "norm.rms"),
    ("torch.rms_norm", "norm.rms"),
];

fn snapshot(config: &Config, sm: u32) -> Snapshot {
    let mut device = DeviceSpec::new(Platform::Cuda, "made-up");
    device.sm = Some(sm);
    let devices = vec![device.completed(&GenerationTable::builtin())];
    let mut spec = SnapshotSpec { devices, settings: config.selection(), ..SnapshotSpec::default() };
    for (id, operation) in KERNELS {
        let mut kernel = KernelDescriptor::new(*id, *operation, id.split('.').next().unwrap());
        kernel.platforms = vec![Platform::Cuda];
        kernel.dtypes = DTypeSet::FLOATS;
        kernel.layouts = vec![Layout::Strided];
        kernel.shares_kv_heads = true;
        kernel.deterministic = id.starts_with("torch");
        let param = if *operation == "attention" { "causal" } else { "eps" };
        kernel.params.insert(param.into(), ParamRule::default());
        if *operation == "attention" {
            kernel.dims.insert("head_dim".into(), DimRule::default());
        }
        spec.backend(BackendDescriptor::native(kernel.backend.clone(), "1", vec![Platform::Cuda]));
        spec.kernels.push(Arc::new(kernel));
    }
    spec.policy = config.policy().clone();
    spec.build(1).unwrap()
}

#[derive(Clone, Copy)]
struct Call {
    batch: i64,
    seq: i64,
    head_dim: i64,
    dtype: DType,
    deterministic: bool,
}

const CALL: Call = Call { batch: 1, seq: 128, head_dim: 64, dtype: DType::F16, deterministic: false };

fn ranking(snapshot: &Snapshot, call: Call) -> Vec<String> {
    let shape = [call.batch, call.seq, 4, call.head_dim];
    let tensor = || TensorMeta::new(call.dtype, &shape);
    let named = NamedCall::new()
        .input("query", tensor())
        .input("key", tensor())
        .input("value", tensor())
        .param("causal", ParamValue::Bool(true))
        .layout(Layout::Bshd)
        .context(Context { deterministic: call.deterministic, ..Context::default() });
    let query = Catalog::get().resolve("attention", &named, &BindRules::default(), |_| None).unwrap().1.query;
    let decision = snapshot.select(&query);
    decision.ranked().map(|c| snapshot.kernel(c.kernel).id.clone()).collect()
}

#[test]
fn priorities_and_constraints_of_the_document_are_obeyed() {
    let ampere = snapshot(&load("kernels.yaml", &[]), 80);
    // Priorities 100 and 100, 95, 80; then what is not listed (50), then the fallback's 1, which is next in line.
    let order = ["flash_attn.v2", "torch.sdpa.math", "flash_attn.v2_experimental", "flashinfer.prefill"];
    assert_eq!(ranking(&ampere, CALL)[..4], order);
    assert_eq!(ranking(&ampere, CALL)[4..], ["xformers.memory_efficient", "other.attention"]);
    // dtypes: flash attention and flashinfer take 16 bits, xformers no bfloat16.
    let f32 = ranking(&ampere, Call { dtype: DType::F32, ..CALL });
    assert_eq!(f32, ["xformers.memory_efficient", "torch.sdpa.math", "other.attention"]);
    assert!(!ranking(&ampere, Call { dtype: DType::Bf16, ..CALL }).contains(&"xformers.memory_efficient".into()));
    // max_head_dim 256, max_batch_size 256.
    assert!(!ranking(&ampere, Call { head_dim: 512, ..CALL }).iter().any(|id| id.starts_with("flash_attn")));
    assert!(!ranking(&ampere, Call { batch: 257, ..CALL }).iter().any(|id| id.starts_with("flash_attn")));
    // dispatch_key: SM 75 is enough for xformers only, SM 70 not even for that.
    let turing = snapshot(&load("kernels.yaml", &[]), 75);
    assert_eq!(ranking(&turing, CALL), ["xformers.memory_efficient", "torch.sdpa.math", "other.attention"]);
    let volta = snapshot(&load("kernels.yaml", &[]), 70);
    assert_eq!(ranking(&volta, CALL), ["other.attention", "torch.sdpa.math"]);
}

#[test]
fn dispatch_rules_of_the_document_are_obeyed() {
    let snapshot = snapshot(&load("kernels.yaml", &[]), 80);
    // Long sequences: memory-efficient attention first.
    assert_eq!(ranking(&snapshot, Call { seq: 8193, ..CALL })[0], "xformers.memory_efficient");
    assert_eq!(ranking(&snapshot, Call { seq: 8192, ..CALL })[0], "flash_attn.v2");
    // Deterministic calls: only kernels that say they are.
    assert_eq!(ranking(&snapshot, Call { deterministic: true, ..CALL }), ["torch.sdpa.math"]);
    // A large batch raises what the document lists, but not what it falls to.
    let points = |batch: i64, id: &str| {
        let shape = [batch, 16, 4, 64];
        let tensor = || TensorMeta::new(DType::F16, &shape);
        let named = NamedCall::new()
            .input("query", tensor())
            .input("key", tensor())
            .input("value", tensor())
            .layout(Layout::Bshd);
        let query = Catalog::get().resolve("attention", &named, &BindRules::default(), |_| None).unwrap().1.query;
        let decision = snapshot.select(&query);
        decision.candidates.iter().find(|c| snapshot.kernel(c.kernel).id == id).unwrap().terms.policy
    };
    assert_eq!((points(8, "flash_attn.v2"), points(7, "flash_attn.v2")), (50.0, 0.0));
    assert_eq!((points(8, "torch.sdpa.math"), points(8, "other.attention")), (0.0, 0.0));
}

#[test]
fn policies_of_the_document_are_in_force_when_chosen() {
    let production = load("kernels.yaml", &[("LAYERZERO_POLICY", "production")]);
    let hopper = snapshot(&production, 90);
    // The lock leaves flash attention v2 alone, and the denial takes out what is experimental.
    assert_eq!(ranking(&hopper, CALL), ["flash_attn.v2"]);
    // The lock's conditions do not hold for 32 bits, nor on Turing.
    assert_eq!(ranking(&hopper, Call { dtype: DType::F32, ..CALL })[0], "xformers.memory_efficient");
    assert_eq!(ranking(&snapshot(&production, 75), CALL)[0], "xformers.memory_efficient");
    // What is not locked still runs.
    let shape = [4, 64];
    let norm = NamedCall::new().input("input", TensorMeta::new(DType::F16, &shape));
    let query = Catalog::get().resolve("norm.rms", &norm, &BindRules::default(), |_| None).unwrap().1.query;
    let decision = hopper.select(&query);
    assert_eq!(hopper.kernel(decision.chosen().unwrap().kernel).id, "liger.rms_norm");
}

#[test]
fn names_that_no_kernel_has_are_findings_and_no_errors() {
    let config = load("kernels.yaml", &[]);
    let findings = analyse(config.policy(), &snapshot(&config, 80));
    let unknown: Vec<String> = findings.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(unknown.join("\n"));
}
