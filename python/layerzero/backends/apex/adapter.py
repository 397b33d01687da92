"""Apex (`apex`, with its CUDA extensions), read from its sources in 2025. Run on an H200 at 6424da3 (0.1).

It launches on the device that is the current one, whatever the tensors are on.
"""

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

_MISFITS = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError)
_FUNCTIONS = (
    "FusedRMSNormFunction",
    "FusedRMSNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedLayerNormAffineFunction",
)

# The library's module, once it is found.
_norms: Any = None


def detect() -> str:
    """The version of Apex; raises `ImportError` where it, its extension or a function is missing. Another package of that
    name has none of them."""
    global _norms
    try:
        module = import_module("apex.normalization.fused_layer_norm")
        import_module("fused_layer_norm_cuda")
        for name in _FUNCTIONS:
            getattr(module, name)
    except _MISFITS as error:
        raise ImportError(f"apex cannot be used: {' '.join(str(error).split())}") from error
    _norms = module
    return metadata.version("apex")


def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm."""
    shape = input.shape[-1:]
    output: Tensor
    with torch.cuda.device_of(input):  # type: ignore[no-untyped-call]
        if weight is None:
            output = _norms.FusedRMSNormFunction.apply(input, shape, eps, False)
        else:
            output = _norms.FusedRMSNormAffineFunction.apply(input, weight, shape, eps, False)
    return output


def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm, with both weight and bias or with neither."""
    shape = input.shape[-1:]
    output: Tensor
    with torch.cuda.device_of(input):  # type: ignore[no-untyped-call]
        if weight is None:
            output = _norms.FusedLayerNormFunction.apply(input, shape, eps, False)
        else:
            output = _norms.FusedLayerNormAffineFunction.apply(input, weight, bias, shape, eps, False)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"apex.rms_norm": rms_norm, "apex.layer_norm": layer_norm}
