# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Attention of one query per sequence over keys and values that lie evenly, in either layout.

The query heads that share a key/value head are the rows of one product. A causal query, being the last, sees every key.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Launch, hint, planned, power
from ..overlapping import go_on, overlaps
from . import splitting
from .splitting import dot, give, weigh


@triton.jit(do_not_specialize=["first", "seq_k", "share", "parts", "lines", "group", "blocks"])
def _attend(
    q_ptr, k_ptr, v_ptr, y_ptr,
    kv_heads, group, blocks, head_dim, v_dim, first, seq_k, share, parts, lines, scale, cap,
    q_batch, q_head, k_batch, k_head, v_batch, v_head,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    go_on(OVERLAPS)
    # Launched by compiled code, numbers come as float64.
    scale, cap = tl.cast(scale, tl.float32), tl.cast(cap, tl.float32)
    # Neighbours read what lies side by side.
    block = tl.program_id(0) % blocks
    kv_head = (tl.program_id(0) // blocks % kv_heads).to(tl.int64)
    part = tl.program_id(0) // blocks // kv_heads % parts
    batch = (tl.program_id(0) // blocks // kv_heads // parts).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    head = kv_head * group + row
    dim, v_column = tl.arange(0, DIM), tl.arange(0, V_DIM)
    start = first + part * share
    end = tl.minimum(start + share, seq_k)

    inside = (row < group)[:, None] & (dim < head_dim)[None, :]
    q = tl.load(q_ptr + batch * q_batch + head[:, None] * q_head + dim[None, :], mask=inside, other=0.0)
    token = tl.arange(0, TOKENS)
    k_at = k_ptr + batch * k_batch + kv_head * k_head + tl.cast(start, tl.int64) * K_TOKEN
    v_at = v_ptr + batch * v_batch + kv_head * v_head + tl.cast(start, tl.int64) * V_TOKEN
    k_at = k_at + token.to(tl.int64)[:, None] * K_TOKEN + dim[None, :]
    v_at = v_at + token.to(tl.int64)[:, None] * V_TOKEN + v_column[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, V_DIM], tl.float32)
    for begin in range(start, end, TOKENS):
        there = token < end - begin
        k = tl.load(k_at, mask=there[:, None] & (dim < head_dim)[None, :], other=0.0)
        v = tl.load(v_at, mask=there[:, None] & (v_column < v_dim)[None, :], other=0.0)
        weights, kept, top, total = weigh(dot(q, tl.trans(k), EXACT), there[None, :], top, total, scale, cap, CAPPED)
        y = y * kept[:, None] + dot(weights.to(q.dtype), v, EXACT)
        k_at += TOKENS * K_TOKEN
        v_at += TOKENS * V_TOKEN
    line = (batch * kv_heads + kv_head) * group + row
    give(y_ptr, y, top, total, line, row < group, True, v_dim, parts, part, lines, V_DIM, SPLIT)


@planned
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Any:
    """One query per sequence."""
    head, token = (1, 2) if layout == "BHSD" else (2, 1)
    batch, heads, head_dim = query.shape[0], query.shape[head], query.shape[3]
    kv_heads, seq_k, v_dim = key.shape[head], key.shape[token], value.shape[3]
    device, exact = query.device, query.dtype == torch.float32
    if batch * heads * v_dim == 0 or kv_heads == 0:
        shape = (*query.shape[:-1], v_dim)
        return lambda query: torch.zeros(shape, dtype=query.dtype, device=device), (query,)
    group = heads // kv_heads
    dim, v_width = power(max(head_dim, 16)), power(max(v_dim, 16))
    rows = splitting.rows_for(group, exact, max(dim, v_width))
    blocks = -(-group // rows)
    crowd = hint(batch * kv_heads * blocks)
    tokens, warps, stages = splitting.tiling(exact, max(dim, v_width), crowd, device)
    first = max(seq_k - 1 - window_left, 0) if window_left >= 0 else 0
    tiles = -(-(seq_k - first) // tokens)
    parts = splitting.parts_for(crowd, hint(tiles), device)
    share = -(-tiles // parts)
    if isinstance(tiles, int):
        # None is empty; in a graph of contexts that vary, some may be.
        parts = max(-(-tiles // max(share, 1)), 1)
    scalars = (
        *(kv_heads, group, blocks, head_dim, v_dim, first, seq_k, share * tokens, parts, batch * heads * parts),
        *splitting.factors(1.0 / math.sqrt(max(head_dim, 1)) if scale is None else float(scale), float(softcap)),
        *(query.stride(0), query.stride(head), key.stride(0), key.stride(head), value.stride(0), value.stride(head)),
    )
    constants = (
        *(key.stride(token), value.stride(token), rows, tokens, dim, v_width),
        *(softcap != 0.0, parts > 1, exact, parts > 1 and overlaps(device)),
    )
    grid = batch * kv_heads * blocks * parts
    attend = Launch(_attend, grid, device, scalars, constants, warps, stages)
    return splitting.attention(attend, query, v_dim, parts), (query, key, value)


KERNELS: dict[str, Callable[..., Any]] = {"triton.decode": decode, "triton.decode.gqa": decode}
