"""Liger (`liger_kernel`), read from its sources at v0.6.1 to v0.8.2.

Run on an H200 at 0.8.5: every kernel against float64, and captured in graphs.

What is called writes to none of its arguments. `LigerSiLUMulFunction` would in its backward, so it is used only where no
gradient is wanted. `LigerRopeFunction` turns queries and keys in place, and is not used.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.kernels import direct

from .._shared.library import Library

_library = Library(
    "liger_kernel",
    modules={
        "liger_kernel.ops.rms_norm": ("LigerRMSNormFunction",),
        "liger_kernel.ops.layer_norm": ("LigerLayerNormFunction",),
        "liger_kernel.ops.fused_add_rms_norm": ("LigerFusedAddRMSNormFunction",),
        "liger_kernel.ops.swiglu": ("LigerSiLUMulFunction",),
    },
)
detect = _library.find

# Of the norms: nothing is added to the weight; all is computed in float32; the gradient given to the backward is kept.
_NORM = (0.0, "gemma", False)


def _rms_norm_call(input: Tensor, weight: Tensor | None, eps: float) -> tuple[Any, ...]:
    return _library.LigerRMSNormFunction.apply, (input, weight, eps, *_NORM)


@direct(_rms_norm_call)
def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm."""
    output: Tensor = _library.LigerRMSNormFunction.apply(input, weight, eps, *_NORM)
    return output


def _layer_norm_call(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Any, ...]:
    return _library.LigerLayerNormFunction.apply, (input, weight, bias, eps)


@direct(_layer_norm_call)
def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm."""
    output: Tensor = _library.LigerLayerNormFunction.apply(input, weight, bias, eps)
    return output


def _add_rms_norm_call(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Any, ...]:
    return _library.LigerFusedAddRMSNormFunction.apply, (input, residual, weight, eps, *_NORM)


@direct(_add_rms_norm_call)
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds the residual, then normalizes the sum as it was rounded."""
    outputs: tuple[Tensor, Tensor] = _library.LigerFusedAddRMSNormFunction.apply(input, residual, weight, eps, *_NORM)
    return outputs


def _silu_mul_call(gate: Tensor, up: Tensor) -> tuple[Any, ...]:
    return _library.LigerSiLUMulFunction.apply, (gate, up)


@direct(_silu_mul_call)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu of the gate times the other half."""
    output: Tensor = _library.LigerSiLUMulFunction.apply(gate, up)
    return output


KERNELS: dict[str, Callable[..., Any]] = {
    "liger.rms_norm": rms_norm,
    "liger.layer_norm": layer_norm,
    "liger.add_rms_norm": fused_add_rms_norm,
    "liger.silu_mul": silu_mul,
}
