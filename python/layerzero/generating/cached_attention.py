"""The operator that attention over a cache is exported as: `layerzero_graph::cached_attention`."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("layerzero_graph::cached_attention", mutates_args=())
def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: torch.Tensor,
    firsts: torch.Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention to the keys that are written. This form, in torch, masks the whole cache; the graph has a kernel for it."""
    queries, capacity = query.shape[2], key.shape[2]
    keys = torch.arange(capacity, device=query.device)
    at = (position + torch.arange(queries, device=query.device))[:, None]
    kept = (keys <= at)[None]
    if firsts is not None:
        kept = kept & (keys >= firsts[:, None, None])
    if window is not None:
        kept = kept & (at - keys <= window)
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    scores = (query @ key.transpose(2, 3)) * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~kept[:, None], -torch.inf), -1).nan_to_num(0.0)
    return weights @ value.nan_to_num(0.0)


@cached_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))
