"""Norms over the last dimension."""

from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import direct

_rms_norm = torch._C._VariableFunctions.rms_norm
_layer_norm = torch._C._VariableFunctions.layer_norm
_vector_norm = torch.linalg.vector_norm


def _work(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _rms_norm_call(input: Tensor, weight: Tensor | None, eps: float) -> tuple[Any, ...]:
    return _rms_norm, (input, tuple(input.shape[-1:]), weight, eps)


@direct(_rms_norm_call)
def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """torch's own root-mean-square norm."""
    return _rms_norm(input, input.shape[-1:], weight, eps)


def rms_norm_composed(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Composed with few temporaries, rounded once at the end; the weight may have any dtype."""
    return _normalized(input.to(_work(input)), weight, eps).to(input.dtype)


def _normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """A new tensor in the dtype of `x`, which is wide enough to compute in."""
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x if weight is None else x * weight.to(x.dtype)
    # The norm reads x once and writes nothing of its size: memory is what this costs.
    size = _vector_norm(x, 2, -1, True)
    x = x * size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x if weight is None else x.mul_(weight.to(x.dtype))


def _layer_norm_call(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Any, ...]:
    return _layer_norm, (input, tuple(input.shape[-1:]), weight, bias, eps)


@direct(_layer_norm_call)
def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's own layer norm."""
    return _layer_norm(input, input.shape[-1:], weight, bias, eps)


def layer_norm_mixed(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's own layer norm in float32 or wider; weight and bias may have any dtype."""
    work = _work(input)
    weight = None if weight is None else weight.to(work)
    bias = None if bias is None else bias.to(work)
    return _layer_norm(input.to(work), input.shape[-1:], weight, bias, eps).to(input.dtype)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Adds the residual, then normalizes the sum before it is rounded."""
    work = _work(input)
    total = input.to(work) + residual.to(work)
    return _normalized(total, weight, eps).to(input.dtype), total.to(input.dtype)
