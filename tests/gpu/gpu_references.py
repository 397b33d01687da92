"""What operations give, in float64 on whatever device the tensors are, and by how much arithmetic may be off.

`growth` is in units of the arithmetic's roundoff, as in `reference`: a sum of n products may be off by n times the sum of
their sizes, in any order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Answer = tuple[Tensor, Tensor]
"""Values, and their growth."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
) -> Answer:
    """Heads first; `allowed` and `bias` broadcast to the scores. A query that may attend to nothing gives zeros."""
    group = q.shape[-3] // k.shape[-3]
    q, k, v = q.double(), k.double().repeat_interleave(group, -3), v.double().repeat_interleave(group, -3)
    scores = scale * (q @ k.transpose(-1, -2))
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    # A row of nothing but minus infinity has no softmax, and no gradient.
    scores = scores.masked_fill(~allowed & allowed.any(-1, keepdim=True), -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~allowed, 0.0)
    with torch.no_grad():
        product = abs(scale) * (q.abs() @ k.abs().transpose(-1, -2)).amax(-1, keepdim=True)
        largest = scores.abs().masked_fill(~allowed, 0.0).amax(-1, keepdim=True)
        moved = 2.0 * (q.shape[-1] * product + 4.0 * largest) + k.shape[-2] + 4.0
        growth = moved * (weights @ v.abs())
    return weights @ v, growth


def reach(seq_q: int, seq_k: int, causal: bool, left: int, right: int, device: torch.device) -> Tensor:
    """Which keys a query sees by position, aligned bottom-right."""
    query = torch.arange(seq_k - seq_q, seq_k, device=device)[:, None]
    key = torch.arange(seq_k, device=device)[None]
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    allowed &= key <= query if causal else allowed
    allowed &= key >= query - left if left >= 0 else allowed
    return allowed & (key <= query + right) if right >= 0 else allowed


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = True,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: Any = None,
    softcap: float = 0.0,
    layout: str = "BSHD",
) -> Answer:
    """Dense attention."""
    if layout == "BSHD":
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    seq_q, seq_k = query.shape[2], key.shape[2]
    left, right = (-1, -1) if window is None else (window, -1) if isinstance(window, int) else window
    allowed = reach(seq_q, seq_k, causal, left, right, query.device)
    bias = None
    if alibi_slopes is not None:
        position = torch.arange(seq_k - seq_q, seq_k, device=query.device)[:, None]
        distance = (position - torch.arange(seq_k, device=query.device)).abs()
        bias = -alibi_slopes.double()[:, None, None] * distance
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        finite = attn_mask.double().masked_fill(attn_mask == -torch.inf, 0.0)
        bias = finite if bias is None else bias + finite
        allowed = allowed & (attn_mask != -torch.inf)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    values, growth = attend(query, key, value, allowed, scale, softcap, bias)
    return (values.transpose(1, 2), growth.transpose(1, 2)) if layout == "BSHD" else (values, growth)


def cross_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, **options: Any) -> Answer:
    """Attention to another sequence."""
    return attention(query, key, value, False, scale, **options)


def _pages(cache: Tensor, table: list[int], length: int, layout: str) -> Tensor:
    slots = cache if layout == "NHD" else cache.transpose(1, 2)
    used = -(-length // slots.shape[1])
    return slots[table[:used]].flatten(0, 1)[:length]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    layout: str = "NHD",
    shared_prefix: int = 0,
) -> Answer:
    """Attention over pages; rows of no sequence are zeros. What is shared makes no difference."""
    rows = query.reshape(-1, *query.shape[-2:])
    values, growth = (torch.zeros(rows.shape, dtype=torch.float64, device=rows.device) for _ in range(2))
    lengths, tables = context_lens.tolist(), block_tables.tolist()
    ends = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for i, length in enumerate(lengths):
        own = slice(ends[i], ends[i + 1])
        if length == 0 or own.start == own.stop:
            continue
        k, v = (_pages(c, tables[i], length, layout).transpose(0, 1) for c in (key_cache, value_cache))
        left = -1 if window is None else window
        is_causal = causal and cu_seqlens_q is not None
        allowed = reach(own.stop - own.start, length, is_causal, left, -1, rows.device)
        got = attend(rows[own].transpose(0, 1), k, v, allowed, scale, softcap)
        values[own], growth[own] = (t.transpose(0, 1) for t in got)
    return values.reshape(query.shape), growth.reshape(query.shape)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
) -> Answer:
    """Attention within packed sequences; rows of no sequence are zeros."""
    shape = (*query.shape[:2], value.shape[2])
    values, growth = (torch.zeros(shape, dtype=torch.float64, device=query.device) for _ in range(2))
    ends, lasts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = (-1, -1) if window is None else window
    for i in range(len(ends) - 1):
        own, keys = slice(ends[i], ends[i + 1]), slice(lasts[i], lasts[i + 1])
        rows, length = own.stop - own.start, keys.stop - keys.start
        if length == 0 or rows == 0:
            continue
        allowed = reach(rows, length, causal, left, right, query.device)
        got = attend(*(t.transpose(0, 1) for t in (query[own], key[keys], value[keys])), allowed, scale, softcap)
        values[own], growth[own] = (t.transpose(0, 1) for t in got)
    return values, growth


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    scale: float,
    causal: bool = True,
    qo_indptr: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> Answer:
    """Latent attention: over one sequence, packed ones, or pages."""
    values, growth = (torch.zeros(q_nope.shape, dtype=torch.float64, device=ckv.device) for _ in range(2))
    query = torch.cat((q_nope, q_pe), -1)
    parts: list[tuple[slice, Tensor, Tensor]] = []
    if block_tables is not None and context_lens is not None:
        causal = False
        for i, (table, length) in enumerate(zip(block_tables.tolist(), context_lens.tolist(), strict=True)):
            latent, turned = (_pages(c, table, length, "NHD") for c in (ckv, kpe))
            parts.append((slice(i, i + 1), latent, turned))
    else:
        ckv, kpe = ckv.reshape(-1, ckv.shape[-1]), kpe.reshape(-1, kpe.shape[-1])
        qo = [0, len(query)] if qo_indptr is None else qo_indptr.tolist()
        kv = [0, len(ckv)] if kv_indptr is None else kv_indptr.tolist()
        for i in range(len(qo) - 1):
            parts.append((slice(qo[i], qo[i + 1]), ckv[kv[i] : kv[i + 1]], kpe[kv[i] : kv[i + 1]]))
    for own, latent, turned in parts:
        if len(latent) == 0 or own.start == own.stop:
            continue
        allowed = reach(own.stop - own.start, len(latent), causal, -1, -1, ckv.device)
        keys = torch.cat((latent.double(), turned.double()), -1)[None]
        got = attend(query[own].transpose(0, 1), keys, latent[None], allowed, scale)
        values[own], growth[own] = (t.transpose(0, 1) for t in got)
    return values, growth


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indptr: Tensor | None = None,
    indices: Tensor | None = None,
    block_rows: int = 1,
    block_cols: int = 1,
    block_mask: Tensor | None = None,
    block_row_sizes: Tensor | None = None,
    block_col_sizes: Tensor | None = None,
    scale: float | None = None,
    layout: str | None = None,
) -> Answer:
    """Attention within blocks."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if indptr is not None and indices is not None:
        allowed = torch.zeros(len(query), len(key), dtype=torch.bool, device=query.device)
        starts, listed = indptr.tolist(), indices.tolist()
        for i in range(len(starts) - 1):
            for j in listed[starts[i] : starts[i + 1]]:
                allowed[i * block_rows : (i + 1) * block_rows, j * block_cols : (j + 1) * block_cols] = True
        got = attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), allowed, scale)
        return got[0].transpose(0, 1), got[1].transpose(0, 1)
    assert block_mask is not None and block_row_sizes is not None and block_col_sizes is not None
    if layout == "NHD":
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    per_head = torch.stack(
        [
            mask.repeat_interleave(rows.long(), 0).repeat_interleave(columns.long(), 1)
            for mask, rows, columns in zip(block_mask, block_row_sizes, block_col_sizes, strict=True)
        ]
    )
    got = attend(query, key, value, per_head.repeat_interleave(query.shape[0] // key.shape[0], 0), scale)
    return (got[0].transpose(0, 1), got[1].transpose(0, 1)) if layout == "NHD" else got


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Answer:
    """Matrix product."""
    x, w = input.double(), weight.double()
    values, size = x @ w.T, x.abs() @ w.abs().T
    if bias is not None:
        values, size = values + bias.double(), size + bias.double().abs()
    return values, (x.shape[-1] + 1.0) * size
