"""Norms over the last dimension."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import direct

from ..blocks import blocks, rows_of

_rms_norm = torch._C._VariableFunctions.rms_norm
_layer_norm = torch._C._VariableFunctions.layer_norm
_addcmul = torch._C._VariableFunctions.addcmul
_vector_norm = torch.linalg.vector_norm
#: Elements whose squares are summed at a time. The error of the root is up to half of 256 times 6e-8, which is 8e-6; the
#: tolerance is 1e-5.
_PART = 256


LEAST_EPS = 1e-30
"""With a smaller eps the squares of small numbers decide the result, and float32 has none below 1e-45: then float64 is
computed in. With this one they are lost in eps."""
_WITH_SMALL_NUMBERS = (torch.float32, torch.bfloat16)


def _work(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def needs_float64(input: Tensor, eps: float) -> bool:
    """Whether squares in float32 would be lost; those of float16 numbers are not."""
    return eps < LEAST_EPS and input.dtype in _WITH_SMALL_NUMBERS


def _rms_norm_in_float64(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    weight = None if weight is None else weight.double()
    return _rms_norm(input.double(), input.shape[-1:], weight, eps).to(input.dtype)


def _rms_norm_call(input: Tensor, weight: Tensor | None, eps: float) -> tuple[Any, ...] | None:
    return None if needs_float64(input, eps) else (_rms_norm, (input, tuple(input.shape[-1:]), weight, eps))


@direct(_rms_norm_call)
def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """torch's own root-mean-square norm."""
    if needs_float64(input, eps):
        return _rms_norm_in_float64(input, weight, eps)
    return _rms_norm(input, input.shape[-1:], weight, eps)


def rms_norm_composed(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Composed with few temporaries, rounded once at the end; the weight may have any dtype."""
    if needs_float64(input, eps):
        return _rms_norm_in_float64(input, weight, eps)
    return _normalized(input.to(_work(input)), weight, eps).to(input.dtype)


def _normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """A new tensor in the dtype of `x`, which is wide enough to compute in."""
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x if weight is None else x * weight.to(x.dtype)
    x = x * _factor(x, eps)
    return x if weight is None else x.mul_(weight.to(x.dtype))


def _in_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor whose rows have the same norms as those of `x`, and few elements: on some CPUs torch adds up squares one after
    the other, and the error of a sum of n squares is then up to n times 6e-8."""
    hidden = x.shape[-1]
    if hidden <= _PART or dtype == torch.float64:
        return x
    whole = hidden - hidden % _PART
    parts: Tensor = _vector_norm(torch.unflatten(x[..., :whole], -1, (-1, _PART)), 2, -1, dtype=dtype)
    return parts if whole == hidden else torch.cat([parts, x[..., whole:]], -1)


def _factor(x: Tensor, eps: float) -> Tensor:
    """What each row is multiplied by. The norm reads x once and writes nothing of its size: memory is what this costs."""
    size: Tensor = _vector_norm(_in_parts(x, x.dtype), 2, -1, True)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_norm_blocked(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Of half-width floats, widened piece by piece."""
    if needs_float64(input, eps):
        return _rms_norm_in_float64(input, weight, eps)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    weight = None if weight is None else weight.float()
    for rows, result in blocks(rows_of(input), rows_of(output), whole=1):
        wide = rows.float()
        wide.mul_(_factor(wide, eps))
        result.copy_(wide if weight is None else wide.mul_(weight))
    return output


def rms_norm_one_row(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Of a single row: what it is multiplied by is a number, and the rest one step."""
    if needs_float64(input, eps):
        return _rms_norm_in_float64(input, weight, eps)
    return _row_times(input, weight, _row_factor(input, eps)).to(input.dtype)


def _row_factor(row: Tensor, eps: float) -> float:
    work = _work(row)
    size: float = _vector_norm(_in_parts(row, work), dtype=work).item()
    root = math.sqrt(size * size / row.shape[-1] + eps)
    # Zeros over zero are not numbers.
    return 1.0 / root if root != 0.0 else math.inf


def _row_times(row: Tensor, weight: Tensor | None, factor: float) -> Tensor:
    """Rounded once; in the wider of their dtypes."""
    return row * factor if weight is None else _addcmul(_zero(row.dtype), row, weight, value=factor)


@cache
def _zero(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device="cpu")


def _layer_norm_call(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Any, ...] | None:
    if needs_float64(input, eps):
        return None
    return _layer_norm, (input, tuple(input.shape[-1:]), weight, bias, eps)


@direct(_layer_norm_call)
def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's own layer norm; of half-width floats, weight and bias may be in float32."""
    if needs_float64(input, eps):
        return layer_norm_mixed(input, weight, bias, eps)
    return _layer_norm(input, input.shape[-1:], weight, bias, eps)


def layer_norm_mixed(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch's own layer norm in float32 or wider; weight and bias may have any dtype."""
    work = torch.float64 if needs_float64(input, eps) else _work(input)
    weight = None if weight is None else weight.to(work)
    bias = None if bias is None else bias.to(work)
    return _layer_norm(input.to(work), input.shape[-1:], weight, bias, eps).to(input.dtype)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Adds the residual, then normalizes the sum before it is rounded."""
    work = torch.float64 if needs_float64(input, eps) else _work(input)
    total = input.to(work) + residual.to(work)
    return _normalized(total, weight, eps).to(input.dtype), total.to(input.dtype)


def fused_add_rms_norm_plain(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum, then torch's own norm of it."""
    if needs_float64(input, eps):
        return fused_add_rms_norm(input, residual, weight, eps)
    total = input + residual
    return _rms_norm(total, total.shape[-1:], weight, eps), total


def fused_add_rms_norm_blocked(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The same of half-width floats, widened piece by piece."""
    if needs_float64(input, eps):
        return fused_add_rms_norm(input, residual, weight, eps)
    output, total = (torch.empty(input.shape, dtype=input.dtype, device=input.device) for _ in range(2))
    weight = None if weight is None else weight.float()
    given = rows_of(input), rows_of(residual)
    for rows, others, result, sums in blocks(*given, rows_of(output), rows_of(total), whole=1):
        wide = rows.float().add_(others)
        sums.copy_(wide)
        wide.mul_(_factor(wide, eps))
        result.copy_(wide if weight is None else wide.mul_(weight))
    return output, total


def fused_add_rms_norm_one_row(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The same of a single row."""
    if needs_float64(input, eps):
        return fused_add_rms_norm(input, residual, weight, eps)
    work = _work(input)
    total = input.to(work) + residual.to(work)
    output = _row_times(total, weight, _row_factor(total, eps))
    return output.to(input.dtype), total.to(input.dtype)
