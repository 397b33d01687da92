"""LayerZero as a provider of vLLM's IR operations.

vLLM's IR (0.20 to 0.33; its removal is announced) has operations with several implementations each, and a list that says
which of them is asked first. Importing this module imports vLLM.
"""

from __future__ import annotations

import torch
from vllm import ir

import layerzero as lz
from layerzero.integrations.vllm import PROVIDER

__all__ = ["register"]

# vLLM compares these signatures with its own, parameter by parameter, by their types too, and reads the types as objects.


def _rms_norm_takes(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and (weight is None or weight.dtype == x.dtype)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return lz.rms_norm(x, weight, epsilon)


def _fused_add_rms_norm_takes(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return variance_size is None and x_residual.dtype == x.dtype and (weight is None or weight.dtype == x.dtype)


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return lz.fused_add_rms_norm(x, x_residual, weight, epsilon)


_PROVIDED = {
    "rms_norm": (_rms_norm, _rms_norm_takes),
    "fused_add_rms_norm": (_fused_add_rms_norm, _fused_add_rms_norm_takes),
}


def register() -> None:
    """Registers the operations that this version of vLLM has. Calling it again changes nothing."""
    for name, (function, takes) in _PROVIDED.items():
        operation = getattr(ir.ops, name, None)
        if operation is not None and PROVIDER not in operation.impls:
            operation.register_impl(PROVIDER, supports_args=takes)(function)
