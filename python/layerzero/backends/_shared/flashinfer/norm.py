"""Norms of rows.

Its fused addition of a residual works in place, and an operation gives new tensors: copying both first takes longer than
adding and normalizing one after the other, so it is not used.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

# The library, once it is found.
_library: Any = None


def bind(library: Any) -> None:
    """Keeps the library."""
    global _library
    _library = library


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of half-width floats."""
    if input.dim() == 2:
        output: Tensor = _library.rmsnorm(input, weight, eps)
        return output
    rows: Tensor = _library.rmsnorm(input.reshape(-1, input.shape[-1]), weight, eps)
    return rows.view(input.shape)


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of bfloat16 with weight and bias in float32."""
    if input.dim() == 2:
        output: Tensor = _library.layernorm(input, weight, bias, eps)
        return output
    rows: Tensor = _library.layernorm(input.view(-1, input.shape[-1]), weight, bias, eps)
    return rows.view(input.shape)


KERNELS: dict[str, Callable[..., Any]] = {"flashinfer.rms_norm": rms_norm, "flashinfer.layer_norm": layer_norm}
