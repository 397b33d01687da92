"""Attention as diffusers' dispatcher calls it, served by `lz.attention`: (batch, sequence, heads, head_dim) in and out.

It means what diffusers' ``native`` backend means, which is torch's ``scaled_dot_product_attention``. What `lz.attention`
cannot express runs in that backend, with a warning.
"""

from __future__ import annotations

from typing import Any

import torch

from layerzero._native import attention
from layerzero.errors import warn
from layerzero.sdpa import scaled_dot_product_attention

__all__ = ["attend"]

_said: set[str] = set()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """The function for diffusers' registry of attention backends.

    Args:
        query: (batch, queries, heads, head_dim).
        key: (batch, keys, kv_heads, head_dim).
        value: (batch, keys, kv_heads, head_dim).
        attn_mask: broadcast to (batch, heads, queries, keys), of bools or added to the scores; or (batch, keys).
        dropout_p: probability that a weight is dropped. The draws are torch's.
        is_causal: query i attends to the keys up to i.
        scale: softmax scale; 1/sqrt(head_dim) when not given.
        enable_gqa: groups of query heads share a key/value head.
        return_lse: not served: the ``native`` backend refuses it too.
        _parallel_config: how a sequence is split over devices: runs in the ``native`` backend.
    """
    mask, why = _mask(attn_mask, query, key)
    if _parallel_config is not None:
        why = "context parallelism"
    elif return_lse:
        why = "return_lse=True"
    elif is_causal and attn_mask is not None:
        why = "is_causal=True with a mask"
    if why is not None or dropout_p:
        given = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "return_lse": return_lse,
            "_parallel_config": _parallel_config,
        }
        return _native(query, key, value, given, why)
    q, k = query.shape, key.shape
    if (
        len(q) == len(k) == 4
        and k[:3] == value.shape[:3]
        and q[0] == k[0]
        and (q[2] == k[2] or enable_gqa)
        and (not is_causal or q[1] == k[1])
    ):
        return attention(query, key, value, is_causal, scale, attn_mask=mask, layout="BSHD")
    # Broadcast, or causal and not square: aligned at the first key, and refused where torch refuses it.
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


def _mask(mask: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor | None, str | None]:
    """A mask of four dimensions, or why it has none that is certain."""
    if mask is None:
        return None, None
    unknown = f"a mask of the form {_form(mask)}"
    if not isinstance(mask, torch.Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return None, unknown
    batch, queries, heads, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[1]
    if mask.dim() == 2 and mask.shape[0] == batch != 1 and mask.shape[1] == keys:
        # Newer versions read (batch, keys), older ones (queries, keys).
        if batch == queries:
            return None, f"a mask of two dimensions for as many queries as sequences ({batch})"
        return mask[:, None, None, :], None
    if not 2 <= mask.dim() <= 4:
        return None, unknown
    mask = mask[(None,) * (4 - mask.dim())]
    fits = zip(mask.shape, (batch, heads, queries, keys), strict=True)
    if mask.shape[3] != keys or any(size not in (1, wanted) for size, wanted in fits):
        return None, unknown
    return mask, None


def _form(mask: Any) -> str:
    if isinstance(mask, torch.Tensor):
        return f"{list(mask.shape)} of {str(mask.dtype).removeprefix('torch.')}"
    return type(mask).__name__


def _native(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any], why: str | None
) -> torch.Tensor:
    """Attention by diffusers' ``native`` backend; with a warning where there is a reason, once for each."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    if why is not None and why not in _said and not torch.compiler.is_compiling():
        _said.add(why)
        warn(f"attention of diffusers: {why} is not served by LayerZero; diffusers' native backend runs")
    known = _AttentionBackendRegistry._supported_arg_names[AttentionBackendName.NATIVE]
    given = {name: argument for name, argument in given.items() if name in known}
    out: torch.Tensor = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE](query, key, value, **given)
    return out
