# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Attention of one new query per sequence over a paged cache.

How many parts a context is cut into depends on sizes alone, how long they are on the sequence. The query heads that share
a key/value head are the rows of one product. Large batches are worked on several sequences at a time: see `together.py`.

A page or length that cannot be gives NaN: to raise, the host would have to wait for the device.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Launch, planned, power
from ..overlapping import go_on, overlaps
from . import splitting, together
from .pages import known, look_up, slots_of
from .splitting import dot, give, place, weigh


@triton.jit
def reach(lens_ptr, batch, capacity, window, part, parts, TOKENS: tl.constexpr, WINDOWED: tl.constexpr):
    """The first token a sequence's query sees, where the part begins and ends, and whether the sequence's length can be.

    Parts begin at multiples of a tile: the first may begin before the first token.
    """
    length = tl.load(lens_ptr + batch)
    sound = (length >= 0) & (length <= capacity)
    length = tl.where(sound, length, 0).to(tl.int32)
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - 1 - window, 0)
    before = first // TOKENS
    share = tl.cdiv(tl.cdiv(length, TOKENS) - before, parts)
    start = (before + part * share) * TOKENS
    return first, start, tl.minimum(start + share * TOKENS, length), sound


@triton.jit(do_not_specialize=["capacity", "window", "parts", "lines", "group", "blocks", "num_blocks"])
def _attend(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, y_ptr,
    kv_heads, group, blocks, head_dim, capacity, window, parts, lines, num_blocks, scale, cap,
    q_batch, q_head, k_page, k_head, v_page, v_head, t_batch, t_page, l_batch,
    K_SLOT: tl.constexpr, V_SLOT: tl.constexpr, ALIKE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
    EXACT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    go_on(OVERLAPS)
    block, kv_head, part, batch = place(blocks, kv_heads, parts)
    row = block * ROWS + tl.arange(0, ROWS)
    head = kv_head * group + row
    dim, tile = tl.arange(0, DIM), tl.arange(0, TOKENS)
    first, start, end, sound = reach(lens_ptr, batch * l_batch, capacity, window, part, parts, TOKENS, WINDOWED)

    inside = (row < group)[:, None] & (dim < head_dim)[None, :]
    q = tl.load(q_ptr + batch * q_batch + head[:, None] * q_head + dim[None, :], mask=inside, other=0.0)
    tables_ptr += batch * t_batch
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    # Pages behind the window need not be there any more.
    sound = sound & known(tables_ptr, tl.maximum(start, first), end, num_blocks, t_page, PAGE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, DIM], tl.float32)
    page = look_up(tables_ptr, start, tile, end, num_blocks, t_page, TOKENS, PAGE)
    for begin in range(start, end, TOKENS):
        token = begin + tile
        there = token < end
        if WINDOWED:
            there = there & (token >= first)
        slot = slots_of(begin, tile, TOKENS, PAGE).to(tl.int64)
        k_at = (page * k_page + slot * K_SLOT)[:, None] + dim[None, :]
        v_at = k_at if ALIKE else (page * v_page + slot * V_SLOT)[:, None] + dim[None, :]
        read = there[:, None] & (dim < head_dim)[None, :]
        k = tl.load(k_ptr + k_at, mask=read, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + v_at, mask=read, other=0.0).to(q.dtype)
        weights, kept, top, total = weigh(dot(q, tl.trans(k), EXACT), there[None, :], top, total, scale, cap, CAPPED)
        y = y * kept[:, None] + dot(weights.to(q.dtype), v, EXACT)
        # Looked up here, and not where it is used, it leaves all stages of the pipeline to keys and values.
        page = look_up(tables_ptr, begin + TOKENS, tile, end, num_blocks, t_page, TOKENS, PAGE)
    line = (batch * kv_heads + kv_head) * group + row
    give(y_ptr, y, top, total, line, row < group, sound, head_dim, parts, part, lines, DIM, SPLIT)


@planned
def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Any:
    """One query per sequence."""
    batch, heads, head_dim = query.shape[0], query.shape[-2], query.shape[-1]
    slots, kv = (2, 1) if layout == "HND" else (1, 2)
    kv_heads, block_size = key_cache.shape[kv], key_cache.shape[slots]
    if query.numel() == 0 or kv_heads == 0:
        return torch.zeros_like, (query,)
    device, group, exact = query.device, heads // kv_heads, query.dtype == torch.float32
    capacity, dim = block_tables.shape[1] * block_size, power(max(head_dim, 16))
    rows = splitting.rows_for(group, exact, dim)
    blocks = -(-group // rows)
    tokens, warps, stages = splitting.tiling(exact, dim, batch * kv_heads * blocks, device)
    within = min(capacity, window_left + 1) if window_left >= 0 else capacity
    parts = splitting.parts_for(batch * kv_heads * blocks, -(-within // tokens), device)
    many = 1 if exact or window_left >= 0 else together.together_for(batch, kv_heads, group, dim, capacity, device)
    parts = min(parts, splitting.MOST_PARTS // many)
    lines = batch * heads * parts * many
    factors = splitting.factors(1.0 / math.sqrt(head_dim) if scale is None else float(scale), float(softcap))
    strides = (
        *(query.stride(0), query.stride(-2), key_cache.stride(0), key_cache.stride(kv)),
        *(value_cache.stride(0), value_cache.stride(kv), *block_tables.stride(), context_lens.stride(0)),
    )
    alike = key_cache.stride() == value_cache.stride()
    where = (key_cache.stride(slots), value_cache.stride(slots), alike, block_size)
    tensors = (query, key_cache, value_cache, block_tables, context_lens)
    overlap = overlaps(device)
    sizes: tuple[int, ...]
    constants: tuple[int, ...]
    if many > 1:
        sizes = (batch, kv_heads, group, head_dim, capacity, parts, lines, key_cache.shape[0])
        constants = (
            many,
            max(power(group), together.ROWS // many),
            tokens,
            dim,
            together.LOOK,
            softcap != 0.0,
            overlap,
        )
        grid = -(-batch // many) * many * kv_heads * parts
        attend = Launch(
            together.attend_together, grid, device, (*sizes, *factors, *strides), (*where, *constants), warps, stages
        )
        return splitting.attention(attend, query, head_dim, parts * many, may_be_whole=True), tensors
    sizes = (kv_heads, group, blocks, head_dim, capacity, window_left, parts, lines, key_cache.shape[0])
    constants = (rows, tokens, dim, window_left >= 0, softcap != 0.0, parts > 1, exact, parts > 1 and overlap)
    grid = batch * kv_heads * blocks * parts
    attend = Launch(_attend, grid, device, (*sizes, *factors, *strides), (*where, *constants), warps, stages)
    return splitting.attention(attend, query, head_dim, parts), tensors


KERNELS: dict[str, Callable[..., Any]] = {"triton.paged.decode": decode, "triton.paged.decode.gqa": decode}
