"""Intel Extension for PyTorch on the CPU: `torch.ops.torch_ipex`, read from its sources at v2.8.0+cpu, the last release.

Not run on hardware: tested against operators of the same signatures.
"""

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from ..flash_attn.operands import positive
from . import DISTRIBUTION, check

_ops = torch.ops.torch_ipex
_OPERATORS = ("flash_attention", "rmsnorm", "add_rmsnorm")


def detect() -> str:
    """The version of the extension; raises `ImportError` where it, an operator, or the torch it needs is missing."""
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"{DISTRIBUTION} is not installed") from error
    check()
    import_module(DISTRIBUTION)
    missing = [name for name in _OPERATORS if not hasattr(_ops, name)]
    if missing:
        raise ImportError(f"{DISTRIBUTION} {version} has no {', '.join(missing)}; install 2.7 or newer")
    return version


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The extension's root-mean-square norm."""
    output: Tensor = _ops.rmsnorm(input, weight, eps)
    return output


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The extension's addition and norm in one, which leaves the sum in its second argument: in a copy."""
    total = residual.clone(memory_format=torch.contiguous_format)
    output = _ops.add_rmsnorm(input, total, weight, eps, True)
    return output, total


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, layout: str
) -> Tensor:
    """The extension's flash attention."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    query, scale = positive(query, scale)
    # Causal asks for as many queries as keys, and takes nothing from a single one: these kernels align top-left.
    output: Tensor
    output, _ = _ops.flash_attention(query, key, value, 0.0, causal and query.shape[2] != 1, scale=scale)
    return output.transpose(1, 2) if layout == "BSHD" else output


def flash_attention_cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> Tensor:
    """The extension's flash attention, to another sequence."""
    return flash_attention(query, key, value, False, scale, layout)


KERNELS: dict[str, Callable[..., Any]] = {
    "ipex.rms_norm": rms_norm,
    "ipex.add_rms_norm": fused_add_rms_norm,
    "ipex.flash_attention": flash_attention,
    "ipex.flash_attention.cross": flash_attention_cross,
}
