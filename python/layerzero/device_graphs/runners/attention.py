"""Attention, dense and over a cache that is partly written."""

from __future__ import annotations

from typing import Any

import torch

import layerzero as lz
from layerzero.device_graphs.cache_pages import as_pages, pages_of
from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs


def _heads_inside(*tensors: Any) -> bool:
    """Whether heads lie beside each other, as where they were split off the last axis."""
    return all(one.shape[1] == 1 or one.shape[2] == 1 or one.stride(1) < one.stride(2) for one in tensors)


@runs("attention")
def attention(node: Node) -> Work:
    """``softmax(scale · q·kᵀ + mask)·v``."""
    given = node.attributes
    scale, window, softcap = given.get("scale"), given.get("window"), given.get("softcap") or 0.0
    causal, top_left = given.get("causal", False), given.get("top_left", False)

    def run(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        queries, keys = q.shape[2], k.shape[2]
        bottom_right, reach = causal, window
        if (causal or window is not None) and queries != keys and (top_left or queries > keys):
            # `lz.attention` has the last query at the last key, and no query before the first.
            shift = 0 if top_left else keys - queries
            kept = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
            kept = kept.tril(shift) if causal else kept
            kept = kept.triu(shift - window) if window is not None else kept
            mask, bottom_right, reach = _masks_joined(mask, kept, q.dtype), False, None
        if mask is not None and mask.dim() not in (2, 4):
            mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        if mask is not None:
            mask = mask.expand(*mask.shape[:-1], keys)
        how = {"causal": bottom_right, "scale": scale, "attn_mask": mask, "softcap": softcap}
        how["window"] = None if reach is None else (reach, 0 if causal else keys)
        if _heads_inside(q, k, v):
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            return lz.attention(q, k, v, **how, layout="bshd").transpose(1, 2)
        return lz.attention(q, k, v, **how, layout="bhsd")

    return Work(run, "attention", chosen=True)


def _masks_joined(mask: Any, kept: Any, dtype: torch.dtype) -> Any:
    """A mask, and keys that are left out beside it."""
    if mask is None:
        return kept
    if mask.dtype == torch.bool:
        return mask & kept
    return torch.where(kept, mask, torch.full((), -torch.inf, dtype=mask.dtype, device=mask.device)).to(dtype)


@runs("cached_attention")
def cached_attention(node: Node) -> Work:
    """Causal attention of new tokens over the written part of a cache."""
    given = node.attributes
    scale, window, softcap = given.get("scale"), given.get("window"), given.get("softcap") or 0.0

    def run(q: Any, keys: Any, values: Any, position: Any, firsts: Any = None) -> Any:
        same = keys.shape[3] == values.shape[3]
        if firsts is None and same and (pages := pages_of(keys)) is not None and pages_of(values) == pages:
            return _paged(q, keys, values, position, pages, scale=scale, window=window, softcap=softcap)
        queries, capacity = q.shape[2], keys.shape[2]
        places = torch.arange(capacity, device=q.device)
        at = (position.reshape(1) + torch.arange(queries, device=q.device))[:, None]
        kept = places <= at
        if window is not None:
            kept = kept & (at - places <= window)
        # What is not written may hold anything, and 0 · NaN is NaN.
        written = (places < position.reshape(1) + queries)[:, None]
        keys, values = (one.masked_fill(~written, 0) for one in (keys, values))
        kept = kept[None, None]
        if firsts is not None:
            kept = kept & (places >= firsts[:, None, None])[:, None]
        return lz.attention(q, keys, values, causal=False, scale=scale, attn_mask=kept, softcap=softcap, layout="bhsd")

    return Work(run, "paged_attention", chosen=True)


def _paged(q: Any, keys: Any, values: Any, position: Any, pages: tuple[int, int], **how: Any) -> Any:
    """Attention over the written part of a cache: how much that is stays on the device."""
    batch, heads, queries, _ = q.shape
    count, _ = pages
    key_pages, value_pages = (as_pages(one, pages) for one in (keys, values))
    tables = torch.arange(batch * count, device=q.device, dtype=torch.int32).view(batch, count)
    lengths = (position.reshape(1) + queries).to(torch.int32).expand(batch).contiguous()
    window, softcap = how["window"], how["softcap"]
    more = {"window": None if window is None else (window, 0), "softcap": softcap, "layout": "nhd"}
    if queries == 1:
        out = lz.paged_attention(q[:, :, 0], key_pages, value_pages, tables, lengths, how["scale"], **more)
        return out[:, :, None]
    packed = q.transpose(1, 2).reshape(batch * queries, heads, q.shape[3])
    bounds = torch.arange(0, (batch + 1) * queries, queries, device=q.device, dtype=torch.int32)
    out = lz.paged_attention(
        *(packed, key_pages, value_pages, tables, lengths, how["scale"]), cu_seqlens_q=bounds, causal=True, **more
    )
    return out.view(batch, queries, heads, -1).transpose(1, 2)
