"""LayerZero runs the fastest kernel that is valid and proven right for this input on this machine, and says why.

    import layerzero as lz

    out = lz.attention(q, k, v, causal=True)
    print(lz.explain("attention", q, k, v))

Importing it imports neither torch nor a GPU's driver; libraries are looked for when the first call is made.
"""

from __future__ import annotations

import sys as _sys
import typing as _typing

from layerzero import integrations, lifecycle, renamed
from layerzero._native import (
    __version__,
    alibi_bias,
    attention,
    attention_lse,
    cross_attention,
    dequantize,
    embedding,
    fused_add_rms_norm,
    fused_mlp,
    gelu,
    kv_append,
    kv_compact,
    layer_norm,
    linear,
    linear_packed,
    linear_quantized,
    merge_states,
    mla_attention,
    paged_attention,
    paged_attention_lse,
    quantize,
    rms_norm,
    rope,
    sample_topk,
    sample_topp,
    silu_mul,
    softmax,
    sparse_attention,
    speculative_verify,
    varlen_attention,
    varlen_attention_lse,
)
from layerzero.arrays import Quantized
from layerzero.auto_tuning import AutoTunedCall, AutoTuneStatus, auto_tune_status
from layerzero.compiled_model import CompiledModel, compile
from layerzero.control import (
    Check,
    Health,
    Readiness,
    Setting,
    avoid,
    configure,
    deterministic,
    disabled,
    force_kernel,
    forget_failures,
    health,
    layout,
    load_config,
    prefer,
    readiness_check,
    reload,
    reset,
    restart_rollout,
    settings,
    unforce_kernel,
)
from layerzero.deciding import BakedCall, Plan, decide
from layerzero.dispatch_table import (
    DispatchTable,
    Mismatch,
    UndecidedCall,
    load_lockfile,
    load_table,
    release_pins,
    solve,
    write_lockfile,
)
from layerzero.errors import (
    ArgumentTypeError,
    BadTokenizerError,
    CapabilitiesError,
    ConfigurationError,
    CudaGraphUnsafeError,
    ExportError,
    InputModifiedError,
    InvalidCallError,
    KernelExecutionError,
    LayerZeroError,
    LayerZeroInternalError,
    LayerZeroWarning,
    NoKernelFoundError,
    UnknownKernelError,
    UnknownOperationError,
    UnknownTokenizerError,
    UnsupportedDerivativeError,
    UnsupportedTensorError,
)
from layerzero.graph_answers import GraphReport, GraphStep, PlannedGraph, TimedStep
from layerzero.graph_capture import RecordedCall, Recording, capture
from layerzero.graph_capture import release as release_captures
from layerzero.inspection import (
    Candidate,
    Diagnosis,
    KernelInfo,
    OperationInfo,
    Reason,
    Selection,
    SelectionReport,
    TensorSpec,
    Validation,
    doctor,
    explain,
    list_kernels,
    ops,
    run_kernel,
    validate,
    which,
)
from layerzero.integrations._diffusers.backend import register_with_diffusers
from layerzero.integrations._transformers.registering import register_with_transformers
from layerzero.kernels import register_kernel, unregister_kernel
from layerzero.loaded_models import load_plan
from layerzero.loading import register_backend
from layerzero.lowerings import CompileReport, LoweredCall, compile_report
from layerzero.models import (
    Call,
    DryRun,
    PlannedCall,
    SkippedCall,
    UntraceableModelError,
    calls_of,
    dry_run,
    model_hash,
)
from layerzero.optimizing import Kept, Optimized, OptimizeReport, Replaced, optimize, patched
from layerzero.packing import PackedWeight, pack
from layerzero.paging import PageTables, page_tables
from layerzero.results import Result, Rows
from layerzero.sdpa import scaled_dot_product_attention
from layerzero.tokenization import detokenize, register_tokenizer, tokenize
from layerzero.tuning import explain_call, regret, tune, workload
from layerzero.tuning.forward import Forward
from layerzero.tuning.reports import (
    Excluded,
    RegretReport,
    RegretRow,
    Timing,
    TimingStats,
    TuneReport,
    TuneRow,
    Unmeasured,
)
from layerzero.warm_up import WarmedCall, WarmupReport, manifest, save_manifest, warmup
from layerzero.workloads import ManifestEntry, Workload

if _typing.TYPE_CHECKING:
    from layerzero.renamed import lock as lock
    from layerzero.renamed import rearm as rearm
    from layerzero.renamed import unlock as unlock
    from layerzero.renamed import unpin as unpin
else:

    def __getattr__(name):
        """Names of earlier releases."""
        if name in renamed.NAMES:
            return getattr(renamed, name)
        raise AttributeError(f"module 'layerzero' has no attribute {name!r}", name=name, obj=_sys.modules[__name__])


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "ArgumentTypeError",
    "AutoTuneStatus",
    "AutoTunedCall",
    "BadTokenizerError",
    "BakedCall",
    "Call",
    "Candidate",
    "CapabilitiesError",
    "Check",
    "CompileReport",
    "CompiledModel",
    "ConfigurationError",
    "CudaGraphUnsafeError",
    "Diagnosis",
    "DispatchTable",
    "DryRun",
    "Excluded",
    "ExportError",
    "Forward",
    "GraphReport",
    "GraphStep",
    "Health",
    "InputModifiedError",
    "InvalidCallError",
    "Kept",
    "KernelExecutionError",
    "KernelInfo",
    "LayerZeroError",
    "LayerZeroInternalError",
    "LayerZeroWarning",
    "LoweredCall",
    "ManifestEntry",
    "Mismatch",
    "NoKernelFoundError",
    "OperationInfo",
    "OptimizeReport",
    "Optimized",
    "PackedWeight",
    "PageTables",
    "Plan",
    "PlannedCall",
    "PlannedGraph",
    "Quantized",
    "Readiness",
    "Reason",
    "RecordedCall",
    "Recording",
    "RegretReport",
    "RegretRow",
    "Replaced",
    "Result",
    "Rows",
    "Selection",
    "SelectionReport",
    "Setting",
    "SkippedCall",
    "TensorSpec",
    "TimedStep",
    "Timing",
    "TimingStats",
    "TuneReport",
    "TuneRow",
    "UndecidedCall",
    "UnknownKernelError",
    "UnknownOperationError",
    "UnknownTokenizerError",
    "Unmeasured",
    "UnsupportedDerivativeError",
    "UnsupportedTensorError",
    "UntraceableModelError",
    "Validation",
    "WarmedCall",
    "WarmupReport",
    "Workload",
    "__version__",
    "alibi_bias",
    "attention",
    "attention_lse",
    "auto_tune_status",
    "avoid",
    "calls_of",
    "capture",
    "compile",
    "compile_report",
    "configure",
    "cross_attention",
    "decide",
    "dequantize",
    "deterministic",
    "detokenize",
    "disabled",
    "doctor",
    "dry_run",
    "embedding",
    "explain",
    "explain_call",
    "force_kernel",
    "forget_failures",
    "fused_add_rms_norm",
    "fused_mlp",
    "gelu",
    "health",
    "kv_append",
    "kv_compact",
    "layer_norm",
    "layout",
    "linear",
    "linear_packed",
    "linear_quantized",
    "list_kernels",
    "load_config",
    "load_lockfile",
    "load_plan",
    "load_table",
    "manifest",
    "merge_states",
    "mla_attention",
    "model_hash",
    "ops",
    "optimize",
    "pack",
    "page_tables",
    "paged_attention",
    "paged_attention_lse",
    "patched",
    "prefer",
    "quantize",
    "readiness_check",
    "register_backend",
    "register_kernel",
    "register_tokenizer",
    "register_with_diffusers",
    "register_with_transformers",
    "regret",
    "release_captures",
    "release_pins",
    "reload",
    "reset",
    "restart_rollout",
    "rms_norm",
    "rope",
    "run_kernel",
    "sample_topk",
    "sample_topp",
    "save_manifest",
    "scaled_dot_product_attention",
    "settings",
    "silu_mul",
    "softmax",
    "solve",
    "sparse_attention",
    "speculative_verify",
    "tokenize",
    "tune",
    "unforce_kernel",
    "unregister_kernel",
    "validate",
    "varlen_attention",
    "varlen_attention_lse",
    "warmup",
    "which",
    "workload",
    "write_lockfile",
]

lifecycle.install()
integrations.install()
