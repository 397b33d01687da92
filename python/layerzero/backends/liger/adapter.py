"""Liger (`liger_kernel`), read from its sources at v0.6.1 to v0.8.2.

Run on an H200 at 0.8.5: every kernel against float64, and captured in graphs.

What is called writes to none of its arguments. `LigerSiLUMulFunction` would in its backward, so it is used only where no
gradient is wanted. `LigerRopeFunction` turns queries and keys in place, and is not used.
"""

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from torch import Tensor

from layerzero.kernels import direct

_MISFITS = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError)
_FUNCTIONS = {
    "rms_norm": "LigerRMSNormFunction",
    "layer_norm": "LigerLayerNormFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "swiglu": "LigerSiLUMulFunction",
}

# The library's autograd functions, by module, once it is found.
_found: dict[str, Any] = {}

# Of the norms: nothing is added to the weight; all is computed in float32; the gradient given to the backward is kept.
_NORM = (0.0, "gemma", False)


def detect() -> str:
    """The version of Liger; raises `ImportError` where it or one of its functions is missing."""
    try:
        version = metadata.version("liger-kernel")
        for module, name in _FUNCTIONS.items():
            _found[module] = getattr(import_module(f"liger_kernel.ops.{module}"), name)
    except metadata.PackageNotFoundError as error:
        raise ImportError("liger_kernel is not installed") from error
    except _MISFITS as error:
        raise ImportError(f"liger_kernel cannot be used: {' '.join(str(error).split())}") from error
    return version


def _rms_norm_call(input: Tensor, weight: Tensor | None, eps: float) -> tuple[Any, ...]:
    return _found["rms_norm"].apply, (input, weight, eps, *_NORM)


@direct(_rms_norm_call)
def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm."""
    output: Tensor = _found["rms_norm"].apply(input, weight, eps, *_NORM)
    return output


def _layer_norm_call(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Any, ...]:
    return _found["layer_norm"].apply, (input, weight, bias, eps)


@direct(_layer_norm_call)
def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm."""
    output: Tensor = _found["layer_norm"].apply(input, weight, bias, eps)
    return output


def _add_rms_norm_call(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Any, ...]:
    return _found["fused_add_rms_norm"].apply, (input, residual, weight, eps, *_NORM)


@direct(_add_rms_norm_call)
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds the residual, then normalizes the sum as it was rounded."""
    outputs: tuple[Tensor, Tensor] = _found["fused_add_rms_norm"].apply(input, residual, weight, eps, *_NORM)
    return outputs


def _silu_mul_call(gate: Tensor, up: Tensor) -> tuple[Any, ...]:
    return _found["swiglu"].apply, (gate, up)


@direct(_silu_mul_call)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu of the gate times the other half."""
    output: Tensor = _found["swiglu"].apply(gate, up)
    return output


KERNELS: dict[str, Callable[..., Any]] = {
    "liger.rms_norm": rms_norm,
    "liger.layer_norm": layer_norm,
    "liger.add_rms_norm": fused_add_rms_norm,
    "liger.silu_mul": silu_mul,
}
