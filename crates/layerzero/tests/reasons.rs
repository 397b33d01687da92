//! Every reason code is produced by a real rejection: a world in which the kernel would do, changed in one way.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use layerzero::model::*;
use layerzero::selection::*;
use layerzero::{Buckets, Engine, Error, SolveRequest};
use serde_json::Value;

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

/// A machine on which every kernel but the reference was seen to be wrong.
struct SeenWrong;

impl PerfSource for SeenWrong {
    fn estimate(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        None
    }
    fn verdict(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Reason> {
        Some(Reason::NumericalMismatch { error: "off by 3".into() })
    }
    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

// --- worlds --------------------------------------------------------------------------------

/// A tensor argument.
struct Arg {
    name: &'static str,
    dtype: DType,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    aligned: bool,
}

fn arg(name: &'static str, dtype: DType, shape: &[i64]) -> Arg {
    Arg { name, dtype, shape: shape.to_vec(), strides: None, aligned: true }
}

/// One kernel, one device, one call.
struct World {
    kernel: KernelDescriptor,
    spec: SnapshotSpec,
    op: &'static str,
    inputs: Vec<Arg>,
    params: Vec<(&'static str, ParamValue)>,
    layout: Option<Layout>,
    context: Context,
}

impl World {
    fn new(op: &'static str, device: DeviceSpec, mut kernel: KernelDescriptor) -> World {
        kernel.platforms = vec![device.platform];
        let mut spec = SnapshotSpec { devices: vec![device], ..SnapshotSpec::default() };
        spec.backend(BackendDescriptor::native("lib", "1.0", kernel.platforms.clone()));
        World { kernel, spec, op, inputs: vec![], params: vec![], layout: None, context: Context::default() }
    }

    fn device(&mut self) -> &mut DeviceSpec {
        &mut self.spec.devices[0]
    }

    fn input(&mut self, name: &str) -> &mut Arg {
        self.inputs.iter_mut().find(|i| i.name == name).unwrap()
    }

    fn settings(&mut self) -> &mut Settings {
        &mut self.spec.settings
    }

    fn param(&mut self, name: &'static str, value: ParamValue) {
        self.params.retain(|(n, _)| *n != name);
        self.params.push((name, value));
    }

    fn call(&self) -> NamedCall<'_> {
        NamedCall {
            inputs: self
                .inputs
                .iter()
                .map(|a| {
                    let mut meta = TensorMeta::new(a.dtype, &a.shape);
                    meta.strides = a.strides.as_deref();
                    meta.aligned = a.aligned;
                    (a.name, meta)
                })
                .collect(),
            params: self.params.clone(),
            layout: self.layout,
            context: self.context,
            ..NamedCall::new()
        }
    }

    /// Why the kernel cannot serve the call, as selection says.
    fn reasons(&self) -> Vec<Reason> {
        let mut spec = self.spec.clone();
        spec.kernels.push(Arc::new(self.kernel.clone()));
        let snapshot = spec.build(1).unwrap_or_else(|e| panic!("{e:?}"));
        let call = self.call();
        let rules = spec.settings.bind_rules();
        let (_, bound) = Catalog::get()
            .resolve(self.op, &call, &rules, |ix| snapshot.device(ix))
            .unwrap_or_else(|e| panic!("{}: {e}", self.op));
        let decision = snapshot.select(&bound.query);
        let (ix, _) = snapshot.kernels().find(|(_, k)| k.id == self.kernel.id).unwrap();
        let candidate = decision.candidates.iter().find(|c| c.kernel == ix).expect("the kernel is a candidate");
        assert_eq!(decision.chosen().is_some_and(|c| c.kernel == ix), candidate.accepted());
        candidate.reasons.clone()
    }
}

fn any_size(kernel: &mut KernelDescriptor, dims: &[&str]) {
    for dim in dims {
        kernel.dims.insert((*dim).into(), DimRule::default());
    }
}

fn attention_kernel() -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new("lib.attention", "attention.causal", "lib");
    kernel.dtypes = DTypeSet::of(&[DType::F16, DType::Bf16]);
    kernel.layouts = vec![Layout::Bshd];
    any_size(&mut kernel, &["head_dim"]);
    kernel
}

/// Causal attention on an A100, with a kernel that does it.
fn attention() -> World {
    let device = lz_hardware::described("a100").unwrap();
    let mut world = World::new("attention.causal", device, attention_kernel());
    world.inputs = ["query", "key", "value"].map(|name| arg(name, DType::F16, &[2, 128, 8, 64])).into();
    world.layout = Some(Layout::Bshd);
    world
}

/// Attention over a paged cache on an A100.
fn paged() -> World {
    let mut kernel = KernelDescriptor::new("lib.paged", "attention.paged", "lib");
    kernel.dtypes = DTypeSet::of(&[DType::F16]);
    kernel.layouts = vec![Layout::Nhd];
    any_size(&mut kernel, &["head_dim"]);
    let mut world = World::new("attention.paged", lz_hardware::described("a100").unwrap(), kernel);
    world.inputs = vec![
        arg("query", DType::F16, &[3, 8, 64]),
        arg("key_cache", DType::F16, &[40, 16, 8, 64]),
        arg("value_cache", DType::F16, &[40, 16, 8, 64]),
        arg("block_tables", DType::I32, &[3, 5]),
        arg("context_lens", DType::I32, &[3]),
    ];
    world
}

/// A linear layer on an A100.
fn linear() -> World {
    let mut kernel = KernelDescriptor::new("lib.linear", "mlp.linear", "lib");
    kernel.dtypes = DTypeSet::of(&[DType::F16]);
    kernel.layouts = vec![Layout::Strided];
    let mut world = World::new("mlp.linear", lz_hardware::described("a100").unwrap(), kernel);
    world.inputs = vec![arg("input", DType::F16, &[4, 32]), arg("weight", DType::F16, &[64, 32])];
    world
}

/// A tokenizer on the host.
fn tokenizer() -> World {
    let kernel = KernelDescriptor::new("lib.encode", "tokenize.encode", "lib");
    let mut world = World::new("tokenize.encode", DeviceSpec::new(Platform::Cpu, "host"), kernel);
    let serves = [
        ("tokenizer_id", "bert"),
        ("vocab_hash", "v1"),
        ("merges_hash", "m1"),
        ("added_tokens_hash", "a1"),
        ("special_tokens_hash", "s1"),
        ("normalizer_id", "nfc"),
    ];
    for (name, value) in serves {
        world.kernel.tokenizer.serves.insert(name.into(), vec![value.into()]);
        world.params.push((name, ParamValue::str(value)));
    }
    world.params.push(("texts", ParamValue::Int(4)));
    world.params.push(("length", ParamValue::Int(100)));
    world
}

#[test]
fn each_world_is_fine_before_it_is_changed() {
    for world in [attention(), paged(), linear(), tokenizer()] {
        assert_eq!(world.reasons(), [], "{}", world.op);
    }
}

fn changed(mut world: World, change: impl FnOnce(&mut World)) -> Vec<Reason> {
    change(&mut world);
    world.reasons()
}

fn attention_with(change: impl FnOnce(&mut World)) -> Vec<Reason> {
    changed(attention(), change)
}

fn paged_with(change: impl FnOnce(&mut World)) -> Vec<Reason> {
    changed(paged(), change)
}

fn linear_with(change: impl FnOnce(&mut World)) -> Vec<Reason> {
    changed(linear(), change)
}

fn asked_for(param: &'static str, value: &str) -> Vec<Reason> {
    changed(tokenizer(), |w| w.param(param, ParamValue::str(value)))
}

fn head_dim(rule: DimRule) -> Vec<Reason> {
    attention_with(|w| {
        w.kernel.dims.insert("head_dim".into(), rule);
    })
}

fn grid() -> GridRule {
    GridRule {
        x_formula: "batch * heads".into(),
        y_formula: None,
        z_formula: None,
        blocks_per_batch_head: 1,
        tiles_sequence: false,
        tile_size: 128,
        threads_per_block: None,
        shared_bytes_formula: None,
    }
}

fn quantized(formats: &[QuantFormat], call: QuantFormat) -> impl FnOnce(&mut World) {
    let formats = formats.to_vec();
    move |w: &mut World| {
        w.kernel.quant = Some(QuantRule { formats, ..QuantRule::default() });
        w.context.quant = Some(QuantSpec::of(call));
    }
}

/// The reason an engine gives for a kernel whose backend's document was refused.
fn refused(document: &str) -> Vec<Reason> {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cuda, "gpu")]).build();
    assert!(matches!(engine.load_capabilities("lib", document), Err(Error::Capabilities { .. })));
    let mut kernel = attention_kernel();
    kernel.platforms = vec![Platform::Cuda];
    engine.register(kernel, Arc::new(|_: &mut KernelArgs<'_, '_>| Ok(()))).unwrap();
    let reasons = engine.validate("lib.attention", &attention().call()).unwrap();
    let backend = engine.backends().into_iter().find(|b| b.descriptor.name == "lib").unwrap();
    assert_eq!(backend.unavailable.as_slice(), reasons);
    reasons
}

fn unavailable(reason: Reason) -> Vec<Reason> {
    attention_with(|w| w.spec.backends.get_mut("lib").unwrap().unavailable = Some(reason))
}

// --- the table -----------------------------------------------------------------------------

/// How a code comes about, and the reason it must be, as JSON; `"*"` stands for any text.
type Shown = (fn() -> Vec<Reason>, &'static str);

const SHOWN: &[Shown] = &[
    // hardware
    (
        || attention_with(|w| w.kernel.platforms = vec![Platform::Rocm, Platform::Hpu]),
        r#"{"code": "PLATFORM_MISMATCH", "required": "rocm or hpu", "found": "cuda"}"#,
    ),
    (|| attention_with(|w| w.kernel.min_sm = Some(90)), r#"{"code": "SM_TOO_OLD", "required": 90, "found": 80}"#),
    (|| attention_with(|w| w.kernel.max_sm = Some(80)), r#"{"code": "SM_TOO_NEW", "required": 80, "found": 80}"#),
    (
        || attention_with(|w| w.kernel.generations = vec!["hopper".into(), "blackwell".into()]),
        r#"{"code": "GPU_GENERATION_UNSUPPORTED", "required": "hopper, blackwell", "found": "ampere"}"#,
    ),
    (
        || attention_with(|w| w.kernel.min_tensor_core_generation = Some(4)),
        r#"{"code": "TENSOR_CORE_GEN_UNSUPPORTED", "required": 4, "found": 3}"#,
    ),
    (
        || attention_with(|w| w.kernel.instruction_sets = vec!["wgmma".into()]),
        r#"{"code": "INSTRUCTION_SET_MISMATCH", "required": "wgmma"}"#,
    ),
    (
        || attention_with(|w| w.kernel.device_features = vec!["fp8".into()]),
        r#"{"code": "DEVICE_CAPABILITY_UNSUPPORTED", "required": "fp8"}"#,
    ),
    (
        || attention_with(|w| w.kernel.vendors = vec!["amd".into()]),
        r#"{"code": "DEVICE_CAPABILITY_UNSUPPORTED", "required": "vendor amd"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.requires = vec!["driver>=600".parse().unwrap()];
                w.device().versions.insert("driver".into(), "550.54".into());
            })
        },
        r#"{"code": "DRIVER_VERSION_UNSUPPORTED", "required": "driver>=600", "found": "550.54"}"#,
    ),
    // software
    (
        || unavailable(Reason::NotInstalled { library: "flash_attn".into() }),
        r#"{"code": "NOT_INSTALLED", "library": "flash_attn"}"#,
    ),
    (
        || refused(r#"{"schema_version": "1.0", "nonsense": true}"#),
        r#"{"code": "BACKEND_IMPORT_FAILED", "library": "lib", "error": "*"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.requires = vec!["torch>=2.4".parse().unwrap()];
                w.spec.versions.insert("torch".into(), "2.2.1+cu121".into());
            })
        },
        r#"{"code": "VERSION_UNSUPPORTED", "required": "torch>=2.4", "found": "2.2.1+cu121"}"#,
    ),
    (
        || refused(r#"{"schema_version": "2.0"}"#),
        r#"{"code": "CAPABILITIES_SCHEMA_MISMATCH", "found": "2.0", "supported": "1.0"}"#,
    ),
    (
        || {
            attention_with(|w| {
                let health = Health { quarantined: Some("illegal memory access".into()), ..Health::default() };
                w.spec.health.insert("lib.attention".into(), health);
            })
        },
        r#"{"code": "BACKEND_ERROR", "error": "illegal memory access"}"#,
    ),
    (
        || attention_with(|w| w.spec.perf = Arc::new(SeenWrong)),
        r#"{"code": "NUMERICAL_MISMATCH", "error": "off by 3"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.jit = true;
                w.spec.health.insert("lib.attention".into(), Health { cold: true, ..Health::default() });
                w.context.no_jit = true;
            })
        },
        r#"{"code": "JIT_DISABLED"}"#,
    ),
    // tensors
    (
        || linear_with(|w| w.kernel.dtypes = DTypeSet::of(&[DType::Bf16, DType::F32])),
        r#"{"code": "DTYPE_UNSUPPORTED", "input": "input", "found": "float16", "supported": "float32, bfloat16"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.layouts = vec![Layout::Bhsd];
                w.settings().allow_adaptation = false;
            })
        },
        r#"{"code": "LAYOUT_UNSUPPORTED", "input": "query", "found": "BSHD", "supported": "BHSD"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.requires_contiguous = true;
                w.settings().strict = true;
                w.input("key").strides = Some(vec![1 << 20, 1024, 128, 1]);
            })
        },
        r#"{"code": "NOT_CONTIGUOUS", "input": "key"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.requires_last_dim_stride1 = true;
                w.settings().strict = true;
                w.input("value").strides = Some(vec![1 << 20, 1024, 128, 2]);
            })
        },
        r#"{"code": "STRIDE_LAST_DIM", "input": "value"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.requires_aligned = true;
                w.settings().strict = true;
                w.input("query").aligned = false;
            })
        },
        r#"{"code": "NOT_ALIGNED", "input": "query"}"#,
    ),
    (
        || linear_with(|w| w.inputs.push(arg("bias", DType::F16, &[64]))),
        r#"{"code": "INPUT_UNSUPPORTED", "input": "bias"}"#,
    ),
    (
        || {
            attention_with(|w| {
                (w.op, w.kernel.operation) = ("attention.full", "attention.full".into());
                w.inputs.push(arg("attn_mask", DType::Bool, &[128, 128]));
            })
        },
        r#"{"code": "ATTN_MASK_UNSUPPORTED", "found": "bool", "supported": "none"}"#,
    ),
    (
        || {
            paged_with(|w| {
                let rule = InputRule { layouts: Some(vec![Layout::Hnd]), ..InputRule::default() };
                w.kernel.inputs.insert("key_cache".into(), rule);
            })
        },
        r#"{"code": "KV_CACHE_LAYOUT_MISMATCH", "input": "key_cache", "found": "NHD", "supported": "HND"}"#,
    ),
    (
        || {
            paged_with(|w| {
                for cache in ["key_cache", "value_cache"] {
                    w.input(cache).dtype = DType::F8E4M3;
                }
                let rule = InputRule { dtypes: Some(DTypeSet::of(&[DType::F8E4M3])), ..InputRule::default() };
                w.kernel.inputs.insert("value_cache".into(), rule);
            })
        },
        r#"{"code": "KV_CACHE_DTYPE_MISMATCH", "input": "key_cache", "found": "float8_e4m3fn", "supported": "float16"}"#,
    ),
    (|| linear_with(|w| w.kernel.requires_packed_weights = true), r#"{"code": "PACKED_WEIGHTS_REQUIRED"}"#),
    // sizes
    (
        || head_dim(DimRule { one_of: Some(vec![96, 128]), ..DimRule::default() }),
        r#"{"code": "HEAD_DIM_INVALID", "dim": "head_dim", "found": 64, "supported": "[96, 128]"}"#,
    ),
    (
        || head_dim(DimRule { max: Some(48), ..DimRule::default() }),
        r#"{"code": "HEAD_DIM_TOO_LARGE", "dim": "head_dim", "found": 64, "max": 48}"#,
    ),
    (
        || head_dim(DimRule { min: Some(32), max: Some(256), multiple_of: Some(24), ..DimRule::default() }),
        r#"{"code": "HEAD_DIM_ALIGNMENT", "dim": "head_dim", "found": 64, "multiple": 24}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.dims.insert("seq_k".into(), DimRule { max: Some(100), ..DimRule::default() });
            })
        },
        r#"{"code": "SEQ_TOO_LONG", "dim": "seq_k", "found": 128, "max": 100}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.input("key").shape = vec![2, 128, 2, 64];
                w.input("value").shape = vec![2, 128, 2, 64];
            })
        },
        r#"{"code": "GQA_UNSUPPORTED", "heads": 8, "kv_heads": 2}"#,
    ),
    (
        || attention_with(|w| w.param("softcap", ParamValue::Float(30.0))),
        r#"{"code": "PARAM_UNSUPPORTED", "param": "softcap", "found": "30", "supported": "0"}"#,
    ),
    (
        || attention_with(|w| w.kernel.conditions = vec!["seq_q * batch < 256".into()]),
        r#"{"code": "CONSTRAINT_FAILED", "constraint": "seq_q * batch < 256", "found": "*"}"#,
    ),
    (
        || attention_with(|w| w.kernel.grid = Some(GridRule { threads_per_block: Some(2048), ..grid() })),
        r#"{"code": "CUDA_BLOCK_LIMIT_EXCEEDED", "what": "threads", "needed": 2048, "limit": 1024}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.grid = Some(GridRule { y_formula: Some("seq_q * 1000".into()), ..grid() });
            })
        },
        r#"{"code": "CUDA_GRID_DIM_EXCEEDED", "axis": "y", "needed": 128000, "limit": 65535}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.workspace = Some("batch * 1000".into());
                w.spec.memory = vec![Some(MemoryState { free: 5_000, largest_block: 5_000 })];
                w.settings().memory_headroom_bytes = 4_000;
            })
        },
        r#"{"code": "MEMORY_HEADROOM_EXCEEDED", "needed": 2000, "available": 1000}"#,
    ),
    // demands
    (|| attention_with(|w| w.context.capturing = true), r#"{"code": "CUDA_GRAPH_UNSAFE"}"#),
    (|| attention_with(|w| w.context.deterministic = true), r#"{"code": "NON_DETERMINISTIC"}"#),
    (|| attention_with(|w| w.settings().deterministic = true), r#"{"code": "NON_DETERMINISTIC"}"#),
    (|| attention_with(|w| w.context.requires_grad = true), r#"{"code": "AUTOGRAD_UNSUPPORTED"}"#),
    (|| attention_with(|w| w.context.batch_invariant = true), r#"{"code": "BATCH_INVARIANCE_REQUIRED"}"#),
    (
        || linear_with(quantized(&[QuantFormat::Int8], QuantFormat::Nvfp4)),
        r#"{"code": "QUANT_FORMAT_UNSUPPORTED", "found": "nvfp4", "supported": "int8"}"#,
    ),
    (
        || {
            linear_with(|w| {
                quantized(&[QuantFormat::Mxfp4], QuantFormat::Mxfp4)(w);
                w.context.min_accuracy_rank = 8;
            })
        },
        r#"{"code": "QUANT_ACCURACY_THRESHOLD_EXCEEDED", "format": "mxfp4", "rank": 5, "required": 8}"#,
    ),
    (
        || linear_with(quantized(&[QuantFormat::Mxfp4], QuantFormat::Nvfp4)),
        r#"{"code": "REQUANTIZATION_REQUIRED", "from": "nvfp4", "to": "mxfp4"}"#,
    ),
    (|| linear_with(|w| w.context.tp_invariant = true), r#"{"code": "TP_INVARIANCE_REQUIRED"}"#),
    (
        || {
            linear_with(|w| {
                w.kernel.tp = Some(TpRule { max_size: Some(4), reduction_order: ReductionOrder::Tree });
                (w.context.tp_invariant, w.context.tp_size) = (true, 8);
            })
        },
        r#"{"code": "TP_SIZE_EXCEEDED", "max": 4, "found": 8}"#,
    ),
    (
        || {
            linear_with(|w| {
                w.kernel.tp = Some(TpRule { max_size: None, reduction_order: ReductionOrder::Tree });
                (w.context.tp_invariant, w.context.reduction) = (true, Some(ReductionOrder::Ring));
            })
        },
        r#"{"code": "REDUCTION_ORDER_MISMATCH", "required": "ring", "found": "tree"}"#,
    ),
    (
        || paged_with(|w| w.context.kv_strategy = Some(KvStrategy::Virtual)),
        r#"{"code": "KV_STRATEGY_UNSUPPORTED", "found": "virtual", "supported": "paged"}"#,
    ),
    // tokenizers
    (
        || asked_for("tokenizer_id", "gpt2"),
        r#"{"code": "TOKENIZER_ID_MISMATCH", "found": "gpt2", "supported": "bert"}"#,
    ),
    (|| asked_for("vocab_hash", "v2"), r#"{"code": "VOCAB_HASH_MISMATCH", "found": "v2", "supported": "v1"}"#),
    (|| asked_for("merges_hash", "m2"), r#"{"code": "MERGES_HASH_MISMATCH", "found": "m2", "supported": "m1"}"#),
    (|| asked_for("added_tokens_hash", "a2"), r#"{"code": "ADDED_TOKENS_MISMATCH", "found": "a2", "supported": "a1"}"#),
    (
        || asked_for("special_tokens_hash", "s2"),
        r#"{"code": "SPECIAL_TOKENS_MISMATCH", "found": "s2", "supported": "s1"}"#,
    ),
    (|| asked_for("normalizer_id", "nfkc"), r#"{"code": "NORMALIZER_MISMATCH", "found": "nfkc", "supported": "nfc"}"#),
    // policy
    (
        || attention_with(|w| w.spec.policy = PolicySpec::default().deny("lib.*")),
        r#"{"code": "POLICY_DENIED", "rule": "deny lib.*"}"#,
    ),
    (
        || attention_with(|w| w.spec.policy = PolicySpec::default().lock("attention.causal", "other.kernel@2")),
        r#"{"code": "POLICY_LOCKED", "locked": "other.kernel@2"}"#,
    ),
    (outside_a_table, r#"{"code": "PLAN_BUCKET_MISS", "dim": "rows", "found": 513}"#),
];

/// Why a table for norms of up to 512 rows says nothing about one of 513.
fn outside_a_table() -> Vec<Reason> {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).build();
    let norm = |rows| CallSpec::new("rms_norm").tensor("input", DType::F32, &[rows, 64]);
    let buckets = Buckets::new([("rows", [512])]).unwrap();
    let request = SolveRequest { buckets, calls: vec![norm(512)], ..SolveRequest::default() };
    engine.load_table(&engine.solve(&request).unwrap().table, "table.json").unwrap();
    let call = norm(513);
    let report = engine.explain(&call.op, &call.named(DeviceIx(0), Context::default())).unwrap();
    report.outside_table.into_iter().map(|outside| outside.reason).collect()
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
