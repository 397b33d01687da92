"""AITER (`aiter`, of the package amd-aiter), read from its sources at v0.1.9 to v0.1.20.post1.

Not run on hardware: tested against functions of the same signatures.

Its attention takes one of several kernels by the shape of the call, and one of them goes by the causal flag alone where
a window of zero keys was asked for: such windows are not declared. `silu_and_mul` takes gate and other half joined in
one tensor, which the operation does not give, and is not used.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..._shared.amd_processors import check_processor
from ..._shared.dense_attention import Call, dense
from ..._shared.library import Library

_library = Library(
    "aiter",
    *("flash_attn_func", "rmsnorm2d_fwd", "rmsnorm2d_fwd_with_add", "layernorm2d_fwd"),
    *("rope_cached_fwd", "rope_cached_positions_fwd"),
)
_PROCESSORS = ("gfx942", "gfx950")
# How rotary pairs lie: half a head apart, or next to each other.
_NEOX, _GPTJ = 0, 1


def detect() -> str:
    """The version of AITER; raises `ImportError` where it or a function is missing, `RuntimeError` on other processors."""
    check_processor("AITER", _PROCESSORS)
    version = _library.find()
    if not getattr(import_module("aiter.ops.mha"), "ENABLE_CK", True):
        raise ImportError("this aiter was built without Composable Kernel; its Triton kernels read windows otherwise")
    return version


def _attend(call: Call) -> Tensor:
    output: Tensor = _library.flash_attn_func(
        *call.operands,
        softmax_scale=call.scale,
        causal=call.causal,
        # A causal bound is a window that ends at the query; the other end is its own.
        window_size=(call.window_left, -1 if call.causal else call.window_right, 0),
        alibi_slopes=call.alibi_slopes,
    )
    return output


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of rows."""
    output: Tensor = _library.rmsnorm2d_fwd(input.view(-1, input.shape[-1]), weight, eps)
    return output.view(input.shape)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds the residual, then normalizes; both results are new."""
    output, total = torch.empty_like(input), torch.empty_like(input)
    rows = (-1, input.shape[-1])
    _library.rmsnorm2d_fwd_with_add(
        output.view(rows), input.view(rows), residual.view(rows), total.view(rows), weight, eps
    )
    return output, total


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of rows."""
    output: Tensor = _library.layernorm2d_fwd(input.view(-1, input.shape[-1]), weight, bias, eps)
    return output.view(input.shape)


def rope(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str) -> Tensor:
    """Rotary embedding; what is left of a head is copied."""
    there, back = _ORDERS[layout]
    given = input.unsqueeze(0) if layout == "NHD" else input
    given = given.permute(there)
    length, batch, _, head_dim = given.shape
    pairs = head_dim // 2 if cos.shape[-1] == head_dim else cos.shape[-1]
    style = _GPTJ if interleaved else _NEOX
    output: Tensor
    if positions is None:
        tables = (_table(cos[:length], pairs), _table(sin[:length], pairs))
        output = _library.rope_cached_fwd(given, *tables, style, True, False)
    else:
        # It reads them by sequence, then batch, without strides.
        order = (positions if positions.dim() == 2 else positions.unsqueeze(0)).expand(batch, length).t().contiguous()
        output = _library.rope_cached_positions_fwd(
            given, _table(cos, pairs), _table(sin, pairs), order, style, True, False
        )
    output = output.permute(back)
    return output.squeeze(0) if layout == "NHD" else output


# To sequence, batch, heads, element, and back.
_ORDERS = {
    "BSHD": ((1, 0, 2, 3), (1, 0, 2, 3)),
    "NHD": ((1, 0, 2, 3), (1, 0, 2, 3)),
    "BHSD": ((2, 0, 1, 3), (1, 2, 0, 3)),
}


def _table(table: Tensor, pairs: int) -> Tensor:
    """A table with one column per pair, as it is read: row by row."""
    return table[:, :pairs].contiguous().view(-1, 1, 1, pairs)


KERNELS: dict[str, Callable[..., Any]] = {
    "aiter.flash_attn": dense(_attend, "alibi_slopes", "causal", "window_left", "window_right"),
    "aiter.flash_attn.cross": dense(_attend),
    "aiter.rms_norm": rms_norm,
    "aiter.add_rms_norm": fused_add_rms_norm,
    "aiter.layer_norm": layer_norm,
    "aiter.rope": rope,
}
