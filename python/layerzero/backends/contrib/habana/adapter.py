"""The fused kernels of Intel Gaudi's framework (`habana_frameworks.torch.hpex`), called as vllm-gaudi 0.26 and
optimum-habana 1.20 call them; the framework's own sources are not public.

Not run on hardware: tested against functions of those signatures.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._shared.library import Library
from ..._shared.operands import positive

_library = Library(
    "habana_frameworks",
    modules={
        "habana_frameworks.torch.hpex.kernels": ("FusedSDPA", "RotaryPosEmbeddingMode", "apply_rotary_pos_emb"),
        "habana_frameworks.torch.hpex.normalization": ("FusedRMSNorm",),
    },
)
# Softmax as it is, not the fast one that rounds more.
_SOFTMAX = "None"
# Scores are not kept, as in flash attention.
_RECOMPUTE = True
_INFINITY = math.inf


def detect() -> str:
    """The version of the framework; raises `ImportError` where it or a function is missing, `RuntimeError` without a device."""
    version = _library.find()
    device = getattr(torch, "hpu", None)
    if device is None or not device.is_available():
        raise RuntimeError("no HPU device")
    return version


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    layout: str,
) -> Tensor:
    """Dense attention. Its causal bound asks for as many queries as keys, and takes nothing from a single one."""
    query, scale = positive(query, scale)
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if attn_mask is not None:
        attn_mask = _four(attn_mask).expand(-1, -1, query.shape[2], key.shape[2])
    causal = causal and query.shape[2] != 1
    output: Tensor = _library.FusedSDPA.apply(query, key, value, attn_mask, 0.0, causal, scale, _SOFTMAX, _RECOMPUTE)
    if attn_mask is not None:
        output = output.masked_fill((attn_mask == -_INFINITY).all(-1, keepdim=True), 0.0)
    return output.transpose(1, 2) if layout == "BSHD" else output


def _four(mask: Tensor) -> Tensor:
    return mask if mask.dim() == 4 else mask[None, None]


def cross(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, layout: str
) -> Tensor:
    """Attention to another sequence."""
    return attention(query, key, value, attn_mask, False, scale, layout)


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm; it takes tensors of three dimensions."""
    output: Tensor = _library.FusedRMSNorm.apply(input.view(1, -1, input.shape[-1]), weight, eps)
    return output.view(input.shape)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, then its norm: the compiler joins them."""
    total = input + residual
    return rms_norm(total, weight, eps), total


def rope(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str) -> Tensor:
    """Rotary embedding of tokens one after another, with tables as wide as what is turned."""
    heads, head_dim = input.shape[-2:]
    length = input.shape[-3]
    batch = input.shape[0] if layout == "BSHD" else 1
    pairs = head_dim // 2 if cos.shape[-1] == head_dim else cos.shape[-1]
    tables = (_table(table, pairs, positions, batch, length, interleaved) for table in (cos, sin))
    modes = _library.RotaryPosEmbeddingMode
    mode = modes.PAIRWISE if interleaved else modes.BLOCKWISE
    tokens = input.reshape(batch * length, heads, head_dim)
    turned: Tensor = _library.apply_rotary_pos_emb(tokens[..., : 2 * pairs], *tables, None, 0, mode)
    if 2 * pairs < head_dim:
        turned = torch.cat((turned, tokens[..., 2 * pairs :]), -1)
    return turned.reshape(input.shape)


def _table(table: Tensor, pairs: int, positions: Tensor | None, batch: int, length: int, interleaved: bool) -> Tensor:
    """A row of the table for each token."""
    table = table[:, :pairs]
    if positions is None:
        rows = table[:length]
    else:
        rows = table.index_select(0, positions.reshape(-1))
    if rows.shape[0] == length and batch > 1:
        rows = rows.expand(batch, length, pairs).reshape(batch * length, pairs)
    rows = rows.repeat_interleave(2, -1) if interleaved else torch.cat((rows, rows), -1)
    return rows.unsqueeze(1)


KERNELS: dict[str, Callable[..., Any]] = {
    "habana.fused_sdpa": attention,
    "habana.fused_sdpa.cross": cross,
    "habana.rms_norm": rms_norm,
    "habana.add_rms_norm": fused_add_rms_norm,
    "habana.rope": rope,
}
