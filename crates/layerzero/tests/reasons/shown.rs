//! The table: how each code comes about.

use std::sync::Arc;

use layerzero::model::*;
use layerzero::selection::*;
use layerzero::{Buckets, Engine, SolveRequest};

use super::worlds::*;

/// How a code comes about, and the reason it must be, as JSON; `"*"` stands for any text.
pub type Shown = (fn() -> Vec<Reason>, &'static str);

pub const SHOWN: &[Shown] = &[
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
    (|| attention_with(|w| w.kernel.proven = false), r#"{"code": "UNPROVEN", "name": "lib"}"#),
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
        r#"{"code": "NUMERICAL_MISMATCH", "error": "off by 3", "call": "this call", "max_error": 3.0, "tolerance": 1e-5}"#,
    ),
    (
        || {
            attention_with(|w| {
                (w.kernel.trust, w.kernel.graph_safe) = (Trust::Unproven, true);
                w.context.capturing = true;
            })
        },
        r#"{"code": "NOT_VERIFIED", "busy": "a CUDA graph is captured"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.jit = true;
                w.spec.health.insert("lib.attention".into(), Health { cold: true, ..Health::default() });
                w.settings().allow_jit = false;
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
    (
        || linear_with(|w| w.kernel.packing = vec![Packing::blocked(32, 1).unwrap()]),
        r#"{"code": "PACKED_WEIGHTS_REQUIRED", "supported": "blocked_32x1"}"#,
    ),
    (
        || linear_with(|w| w.context.packing = Packing::blocked(32, 1).unwrap()),
        r#"{"code": "PACKING_UNSUPPORTED", "found": "blocked_32x1", "supported": "plain"}"#,
    ),
    (
        || {
            linear_with(|w| {
                w.kernel.packing = vec![Packing::Plain, Packing::blocked(16, 2).unwrap()];
                w.context.packing = Packing::blocked(32, 1).unwrap();
            })
        },
        r#"{"code": "PACKING_UNSUPPORTED", "found": "blocked_32x1", "supported": "plain, blocked_16x2"}"#,
    ),
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
                w.spec.memory = Arc::new(DeviceMemory::of([Some(MemoryState { free: 5_000, largest_block: 5_000 })]));
                w.settings().memory_headroom_bytes = 4_000;
            })
        },
        r#"{"code": "MEMORY_HEADROOM_EXCEEDED", "needed": 2000, "available": 1000}"#,
    ),
    // demands
    (
        || attention_with(|w| w.context.capturing = true),
        r#"{"code": "CUDA_GRAPH_UNSAFE", "why": {"kind": "undeclared"}}"#,
    ),
    (|| attention_with(|w| w.context.deterministic = true), r#"{"code": "NON_DETERMINISTIC"}"#),
    (|| attention_with(|w| w.settings().deterministic = true), r#"{"code": "NON_DETERMINISTIC"}"#),
    (|| attention_with(|w| w.context.requires_grad = true), r#"{"code": "AUTOGRAD_UNSUPPORTED"}"#),
    (
        || attention_with(|w| w.context.sdpa = SdpaChoice::new(0b11, &[SdpaBackend::Flash])),
        r#"{"code": "SDPA_BACKEND_DISABLED", "backend": "OVERRIDEABLE", "allowed": "FLASH_ATTENTION, MATH"}"#,
    ),
    (
        || {
            attention_with(|w| {
                w.kernel.sdpa = Some(SdpaRole::Cudnn);
                w.context.sdpa = SdpaChoice::new(0, &[]);
            })
        },
        r#"{"code": "SDPA_BACKEND_DISABLED", "backend": "CUDNN_ATTENTION", "allowed": "nothing"}"#,
    ),
    (|| attention_with(|w| w.context.batch_invariant = true), r#"{"code": "BATCH_INVARIANCE_REQUIRED"}"#),
    (|| attention_with(|w| w.settings().batch_invariant = true), r#"{"code": "BATCH_INVARIANCE_REQUIRED"}"#),
    (
        || linear_with(|w| w.kernel.accuracy = Accuracy::SplitBf16x2),
        r#"{"code": "ACCURACY_UNSUPPORTED", "provided": "split_bf16_2", "required": "standard"}"#,
    ),
    (
        || linear_with(|w| (w.kernel.accuracy, w.context.accuracy) = (Accuracy::Bf16, Accuracy::Tf32)),
        r#"{"code": "ACCURACY_UNSUPPORTED", "provided": "bf16", "required": "tf32"}"#,
    ),
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
