"""AMD's zentorch, the ZenDNN plugin for PyTorch: `torch.ops.zentorch`, read from its sources at v2.11.0.0 to v2.12.1.1.

Run on an Intel Xeon with AVX-512 at 2.11.0.3, with torch 2.11: every kernel over the cases of testdata/, and by
`layerzero compat`. Not run on an AMD processor.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._shared.library import Library
from .._shared.operands import positive
from .._shared.torch_functions import norm

_ops = torch.ops.zentorch
_OPERATORS = ("zentorch_bmm", "zentorch_rms_norm", "zentorch_add_rms_norm_", "zentorch_sdpa")
_library = Library("zentorch", own_version=True)


def detect() -> str:
    """The version of zentorch; raises `ImportError` where it, or an operator, is missing."""
    version = _library.find()
    missing = [name for name in _OPERATORS if not hasattr(_ops, name)]
    if missing:
        raise ImportError(f"zentorch {version} has no {', '.join(missing)}; install zentorch 2.11 or newer")
    return version


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """ZenDNN's matrix product.

    The operators made for linear layers take weights for constants, which ZenDNN caches by address: a weight that is
    updated, or another one at its address, would be answered with the old one. The batched product does not. It rounds
    what it gives, so that in half precision a bias would come too late: those calls are not served.
    """
    rows = input.reshape(1, math.prod(input.shape[:-1]), input.shape[-1])
    output: Tensor = _ops.zentorch_bmm(rows, weight.unsqueeze(0).transpose(1, 2))[0]
    if bias is not None:
        output = output + bias
    return output.view(*input.shape[:-1], weight.shape[0])


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """ZenDNN's root-mean-square norm, which counts rows along the first axis only. Without an eps it logs an error and
    leaves the result as it lay in memory: then torch computes it."""
    if eps <= 0.0:
        return norm.rms_norm(input, weight, eps)
    output: Tensor = _ops.zentorch_rms_norm(input.reshape(-1, input.shape[-1]), weight, eps)
    return output.view(input.shape)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """ZenDNN's addition and norm in one, which works in place: on copies. Without an eps as :func:`rms_norm`."""
    if eps <= 0.0:
        return norm.fused_add_rms_norm_plain(input, residual, weight, eps)
    output = input.clone().view(-1, input.shape[-1])
    total = residual.clone().view(-1, input.shape[-1])
    _ops.zentorch_add_rms_norm_(output, weight, total, eps)
    return output.view(input.shape), total.view(input.shape)


def sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, layout: str) -> Tensor:
    """zentorch's flash attention."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    query, scale = positive(query, scale)
    # Causal asks for as many queries as keys, and takes nothing from a single one: these kernels align top-left.
    output: Tensor
    output, _ = _ops.zentorch_sdpa(query, key, value, 0.0, causal and query.shape[2] != 1, scale=scale)
    return output.transpose(1, 2) if layout == "BSHD" else output


def sdpa_cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> Tensor:
    """zentorch's flash attention, to another sequence."""
    return sdpa(query, key, value, False, scale, layout)


KERNELS: dict[str, Callable[..., Any]] = {
    "zentorch.linear": linear,
    "zentorch.linear.bf16": linear,
    "zentorch.rms_norm": rms_norm,
    "zentorch.add_rms_norm": fused_add_rms_norm,
    "zentorch.sdpa": sdpa,
    "zentorch.sdpa.cross": sdpa_cross,
}
