"""Apex (`apex`, with its CUDA extensions), read from its sources in 2025.

Not run on hardware: tested against functions of the same signatures.
"""

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

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
    if weight is None:
        plain: Tensor = _norms.FusedRMSNormFunction.apply(input, shape, eps, False)
        return plain
    output: Tensor = _norms.FusedRMSNormAffineFunction.apply(input, weight, shape, eps, False)
    return output


def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm, with both weight and bias or with neither."""
    shape = input.shape[-1:]
    if weight is None:
        plain: Tensor = _norms.FusedLayerNormFunction.apply(input, shape, eps, False)
        return plain
    output: Tensor = _norms.FusedLayerNormAffineFunction.apply(input, weight, bias, shape, eps, False)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"apex.rms_norm": rms_norm, "apex.layer_norm": layer_norm}
