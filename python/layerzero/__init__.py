"""LayerZero runs the fastest kernel that is valid and proven right for this input on this machine, and says why.

    import layerzero as lz

    out = lz.attention(q, k, v, causal=True)
    print(lz.explain("attention", q, k, v))

Importing it imports neither torch nor a GPU's driver; libraries are looked for when the first call is made.
"""

from __future__ import annotations

from layerzero import integrations
from layerzero._native import (
    __version__,
    alibi_bias,
    attention,
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
    mla_attention,
    paged_attention,
    quantize,
    rms_norm,
    rope,
    sample_topk,
    sample_topp,
    silu_mul,
    sparse_attention,
    speculative_verify,
)
from layerzero.arrays import Quantized
from layerzero.errors import (
    ArgumentTypeError,
    CapabilitiesError,
    ConfigurationError,
    CudaGraphUnsafeError,
    InvalidCallError,
    KernelExecutionError,
    LayerZeroError,
    LayerZeroInternalError,
    LayerZeroWarning,
    NoKernelFoundError,
    UnknownKernelError,
    UnknownOperationError,
    UnsupportedTensorError,
)
from layerzero.inspection import (
    Candidate,
    Diagnosis,
    KernelInfo,
    OperationInfo,
    Reason,
    SelectionReport,
    TensorSpec,
    doctor,
    explain,
    list_kernels,
    ops,
    run_kernel,
    validate,
    which,
)
from layerzero.kernels import register_kernel, unregister_kernel
from layerzero.loading import register_backend

__all__ = [
    "ArgumentTypeError",
    "Candidate",
    "CapabilitiesError",
    "ConfigurationError",
    "CudaGraphUnsafeError",
    "Diagnosis",
    "InvalidCallError",
    "KernelExecutionError",
    "KernelInfo",
    "LayerZeroError",
    "LayerZeroInternalError",
    "LayerZeroWarning",
    "NoKernelFoundError",
    "OperationInfo",
    "Quantized",
    "Reason",
    "SelectionReport",
    "TensorSpec",
    "UnknownKernelError",
    "UnknownOperationError",
    "UnsupportedTensorError",
    "__version__",
    "alibi_bias",
    "attention",
    "cross_attention",
    "dequantize",
    "doctor",
    "embedding",
    "explain",
    "fused_add_rms_norm",
    "fused_mlp",
    "gelu",
    "kv_append",
    "kv_compact",
    "layer_norm",
    "linear",
    "list_kernels",
    "mla_attention",
    "ops",
    "paged_attention",
    "quantize",
    "register_backend",
    "register_kernel",
    "rms_norm",
    "rope",
    "run_kernel",
    "sample_topk",
    "sample_topp",
    "silu_mul",
    "sparse_attention",
    "speculative_verify",
    "unregister_kernel",
    "validate",
    "which",
]

integrations.install()
