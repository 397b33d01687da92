# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Attention of one new query per sequence over a paged cache.

The context of a sequence is cut into parts that are attended to side by side; how many there are depends on sizes alone,
how long they are on the sequence. The query heads that share a key/value head are the rows of one product.

A page or length that cannot be gives NaN: to raise, the host would have to wait for the device.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, planned, power, processors

# A part is worth its own block of threads from this many tokens on.
_PART = 256
_MOST_PARTS = 32


@triton.jit
def _parts(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, y_ptr, sums_ptr,
    heads, kv_heads, group, head_dim, capacity, block_size, window, scale, softcap, parts,
    q_batch, q_head, q_dim, k_page, k_slot, k_head, v_page, v_slot, v_head, t_batch, t_page, l_batch, num_blocks,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SPLIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    kv_head = tl.program_id(0) // parts % kv_heads
    batch = (tl.program_id(0) // parts // kv_heads).to(tl.int64)
    row = tl.arange(0, GROUP)
    dim = tl.arange(0, DIM)
    inside = (row < group)[:, None] & (dim < head_dim)[None, :]
    head = kv_head * group + row

    length = tl.load(lens_ptr + batch * l_batch).to(tl.int64)
    sound = (length >= 0) & (length <= capacity)
    length = tl.where(sound, length, 0)
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - 1 - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, parts), TOKENS) * TOKENS
    start = first + part * share
    end = tl.minimum(start + share, length)

    q = tl.load(q_ptr + batch * q_batch + head[:, None] * q_head + dim[None, :] * q_dim, mask=inside, other=0.0)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    y = tl.zeros([GROUP, DIM], tl.float32)
    for begin in range(start, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        there = token < end
        page = tl.load(tables_ptr + batch * t_batch + token // block_size * t_page, mask=there, other=0).to(tl.int64)
        known = (page >= 0) & (page < num_blocks)
        slot = token % block_size
        read = (there & known)[:, None] & (dim < head_dim)[None, :]
        k_at = page * k_page + slot * k_slot + kv_head.to(tl.int64) * k_head
        v_at = page * v_page + slot * v_slot + kv_head.to(tl.int64) * v_head
        k = tl.load(k_ptr + k_at[:, None] + dim[None, :], mask=read, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + v_at[:, None] + dim[None, :], mask=read, other=0.0).to(q.dtype)
        if EXACT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k))
        scores *= scale
        if CAPPED:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        # Powers of two from here on.
        scores = tl.where(known[None, :], scores * 1.4426950408889634, float("nan"))
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        weights = tl.where(there[None, :], weights, 0.0)
        kept = tl.exp2(top - new_top)
        total = total * kept + tl.sum(weights, 1)
        if EXACT:
            y = y * kept[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        else:
            y = y * kept[:, None] + tl.dot(weights.to(q.dtype), v)
        top = new_top
    if SPLIT:
        line = ((batch * heads + head) * parts + part).to(tl.int64)
        tl.store(y_ptr + line[:, None] * head_dim + dim[None, :], y, mask=inside)
        tl.store(sums_ptr + line * 2, top, mask=row < group)
        tl.store(sums_ptr + line * 2 + 1, tl.where(sound, total, float("nan")), mask=row < group)
    else:
        # Nothing to attend to gives zeros.
        y = tl.where(total[:, None] == 0.0, 0.0, y / total[:, None])
        y = tl.where(sound, y, float("nan"))
        at = (batch * heads + head)[:, None] * head_dim + dim[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _join(parts_ptr, sums_ptr, y_ptr, head_dim, parts, PARTS: tl.constexpr, DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    dim = tl.arange(0, DIM)
    line = row * parts + part
    top = tl.load(sums_ptr + line * 2, mask=part < parts, other=float("-inf"))
    total = tl.load(sums_ptr + line * 2 + 1, mask=part < parts, other=0.0)
    highest = tl.max(top, 0)
    # Parts that are empty have no largest score; a NaN is one all the same.
    share = tl.where(total == 0.0, 0.0, tl.exp2(top - highest))
    there = (part < parts)[:, None] & (dim < head_dim)[None, :]
    y = tl.load(parts_ptr + line[:, None] * head_dim + dim[None, :], mask=there, other=0.0)
    whole = tl.sum(total * share, 0)
    y = tl.sum(tl.where((total == 0.0)[:, None], 0.0, y * share[:, None]), 0)
    y = tl.where(whole == 0.0, 0.0, y / whole)
    tl.store(y_ptr + row * head_dim + dim, y.to(y_ptr.dtype.element_ty), mask=dim < head_dim)


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
    device, group = query.device, heads // kv_heads
    capacity = block_tables.shape[1] * block_size
    wanted = -(-4 * processors(device) // (batch * kv_heads))
    parts = max(min(wanted, -(-capacity // _PART), _MOST_PARTS), 1)
    dim, exact = power(max(head_dim, 16)), query.dtype == torch.float32
    tokens = 32 if exact or dim > 128 else 64
    k_strides, v_strides = (
        (cache.stride(0), cache.stride(slots), cache.stride(kv)) for cache in (key_cache, value_cache)
    )
    scalars = (
        *(heads, kv_heads, group, head_dim, capacity, block_size, window_left),
        *(1.0 / math.sqrt(head_dim) if scale is None else float(scale), float(softcap), parts),
        *(query.stride(0), query.stride(-2), query.stride(-1), *k_strides, *v_strides),
        *(*block_tables.stride(), context_lens.stride(0), key_cache.shape[0]),
    )
    constants = (max(power(group), 16), tokens, dim, window_left >= 0, softcap != 0.0, parts > 1, exact)
    attend = Launch(_parts, batch * kv_heads * parts, device, scalars, constants, 8 if exact else 4, 3)
    tensors = (query, key_cache, value_cache, block_tables, context_lens)
    if parts == 1:

        def whole(query: Tensor, *others: Tensor) -> Tensor:
            output = torch.empty(query.shape, dtype=query.dtype, device=device)
            attend(query, *others, output, None)
            return output

        return whole, tensors
    join = Launch(_join, batch * heads, device, (head_dim, parts), (power(parts), dim), 4)
    lines = batch * heads * parts

    def call(query: Tensor, *others: Tensor) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=device)
        partial = torch.empty(lines, head_dim, dtype=torch.float32, device=device)
        sums = torch.empty(lines, 2, dtype=torch.float32, device=device)
        attend(query, *others, partial, sums)
        join(partial, sums, output)
        return output

    return call, tensors


KERNELS: dict[str, Callable[..., Any]] = {"triton.paged.decode": decode, "triton.paged.decode.gqa": decode}
