"""Intel Extension for PyTorch on Intel GPUs, read from its sources at v2.8.10+xpu and v2.9.10+xpu.

Not run on hardware: tested against functions of the same signatures.

Its attention is over packed sequences; a batch is sequences of one length. It draws numbers from a generator even where
nothing is dropped, so it is given one of its own.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from ..flash_attn.operands import positive

_ops = torch.ops.torch_ipex
_DISTRIBUTION = "intel_extension_for_pytorch"
_OPERATORS = ("rms_norm", "fast_layer_norm", "add_rms_norm", "silu_mul")
# The extension's attention, once it is found.
_packed: Any = None


def detect() -> str:
    """The version of the extension; raises `ImportError` where it, an operator, or the torch it needs is missing, and
    `RuntimeError` without a device."""
    global _packed
    try:
        version = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"{_DISTRIBUTION} is not installed") from error
    if "cpu" in version:
        raise ImportError(f"{_DISTRIBUTION} {version} is built for the CPU")
    # Importing it under another torch prints an error and fails in a way that depends on the release.
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(f"{_DISTRIBUTION} {version} needs torch of the same minor version, found {torch.__version__}")
    if not torch.xpu.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no XPU device")
    import_module(_DISTRIBUTION)
    missing = [name for name in _OPERATORS if not hasattr(_ops, name)]
    if missing:
        raise ImportError(f"{_DISTRIBUTION} {version} has no {', '.join(missing)}")
    _packed = import_module(f"{_DISTRIBUTION}.llm.functional").varlen_attention
    return version


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Dense attention: causal asks for as many queries as keys, and takes nothing from a single one."""
    query, scale = positive(query, scale)
    batch, seq_q, heads, head_dim = query.shape
    seq_k, kv_heads = key.shape[1:3]
    output = torch.empty_like(query)
    _packed(
        query.view(batch * seq_q, heads, head_dim),
        key.view(batch * seq_k, kv_heads, head_dim),
        value.view(batch * seq_k, kv_heads, head_dim),
        output.view(batch * seq_q, heads, head_dim),
        _starts(batch, seq_q, query.device),
        _starts(batch, seq_k, query.device),
        None,
        seq_q,
        seq_k,
        0.0,
        float(head_dim**-0.5 if scale is None else scale),
        False,
        causal and seq_q != 1,
        False,
        _generator(query.device),
    )
    return output


def _starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Where the sequences begin and end."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


@cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention to another sequence."""
    return attention(query, key, value, False, scale)


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    output: Tensor = _ops.rms_norm(input, [input.shape[-1]], weight, eps)[0]
    return output


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm."""
    output: Tensor = _ops.fast_layer_norm(input, [input.shape[-1]], weight, bias, eps)
    return output


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Addition and norm in one, which leaves the sum in its first argument: in a copy."""
    total = residual.clone(memory_format=torch.contiguous_format)
    output: Tensor = _ops.add_rms_norm(total, input, [input.shape[-1]], weight, None, eps, True)
    return output, total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu of the gate times the other half."""
    output = torch.empty_like(gate)
    _ops.silu_mul(gate, up, output)
    return output


KERNELS: dict[str, Callable[..., Any]] = {
    "ipex.xpu.varlen_attention": attention,
    "ipex.xpu.varlen_attention.cross": cross,
    "ipex.xpu.rms_norm": rms_norm,
    "ipex.xpu.layer_norm": layer_norm,
    "ipex.xpu.add_rms_norm": fused_add_rms_norm,
    "ipex.xpu.silu_mul": silu_mul,
}
